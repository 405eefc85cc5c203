//! TCP beside connection tracking, by the two sysctls that say how strict it is: what it has seen of a connection, and that no connection
//! stalls. The table is in docs/limitations.md.

use std::{
    io,
    net::SocketAddr,
    sync::atomic::{AtomicBool, AtomicUsize, Ordering},
    thread,
    time::{Duration, Instant},
};

use anyhow::bail;
use rstest::rstest;
use underpass_tests::{
    capture::Capture,
    frame,
    netfilter::LONGEST,
    netns::Netns,
    patience,
    prelude::*,
    rtnl::Route,
    second::{Kind, Second},
    traffic::SILENCE,
    wire::Wire,
    world::World,
};

mod path_mtu;

const PORT: u16 = 443;
const LARGE: u64 = 20_000_000;
const SOURCE: u16 = 45_678;
/// Bytes of each exchange, both ways, while something changes.
const SOME: u64 = 1_000_000;
/// Bytes of an Ethernet header.
const ETHERNET: usize = 14;

/// What `nf_conntrack_tcp_be_liberal` is set to.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Tracking {
    Strict,
    Liberal,
}

/// A lab where connection tracking is like that from the beginning.
fn lab(tracking: Tracking, loose: u8) -> Result<Lab> {
    let lab = Lab::new()?;
    let liberal = u8::from(tracking == Tracking::Liberal);
    // An idle connection is remembered, other than one that ends.
    for (key, value) in [
        ("be_liberal", liberal),
        ("loose", loose),
        ("timeout_established", 100),
    ] {
        let key = format!("net/netfilter/nf_conntrack_tcp_{key}");
        lab.node.netns().set_sysctl(&key, &value.to_string())?;
    }
    Ok(lab)
}

/// What connection tracking knows of the connections from a port: state, and how long it remembers.
fn states(lab: &Lab, family: Family, port: u16) -> Result<Vec<(String, Duration)>> {
    let entries = lab
        .firewall
        .entries(family, &["tcp", &format!("sport={port}")])?;
    entries
        .iter()
        .map(|entry| {
            // Family and protocol, each with its number, come first.
            let [left, state] = entry
                .split_whitespace()
                .skip(4)
                .take(2)
                .collect::<Vec<_>>()
                .try_into()
                .ok()
                .with_context(|| entry.clone())?;
            let left = left.parse().with_context(|| entry.clone())?;
            Ok((state.to_owned(), Duration::from_secs(left)))
        })
        .collect()
}

/// Fails unless connection tracking knows one connection from a port, in this state.
fn is_known_as(lab: &Lab, family: Family, port: u16, state: &str) -> Result<()> {
    let now = states(lab, family, port)?;
    ensure!(
        now.len() == 1 && now[0].0 == state,
        "it is {now:?} and no {state}"
    );
    Ok(())
}

/// Fails if connection tracking knows a connection from a port.
fn is_forgotten(lab: &Lab, family: Family, port: u16) -> Result<()> {
    let now = states(lab, family, port)?;
    ensure!(now.is_empty(), "it is {now:?} still, or again");
    Ok(())
}

/// How a client ends its connection.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum End {
    Close,
    Reset,
}

#[rstest]
fn a_row_of_the_table(
    #[values(V4, V6)] family: Family,
    #[values(Tracking::Strict, Tracking::Liberal)] tracking: Tracking,
    #[values(0, 1)] loose: u8,
    #[values("world", "pod")] peer: &str,
) -> Result<()> {
    needs_root!();
    let lab = lab(tracking, loose)?;
    let (pod, other) = (lab.pod("a")?, lab.pod("b")?);
    let (netns, at): (&Netns, SocketAddr) = match peer {
        "world" => (lab.world.netns(), family.remote_at(PORT)),
        _ => (other.netns(), other.at(family, PORT)),
    };
    let _server = tcp::Server::start(netns, at)?;
    for (port, end) in [(SOURCE, End::Close), (SOURCE + 1, End::Reset)] {
        let mut client = tcp::Client::connect_from(pod.netns(), port, at)?;
        client.chat(3)?;
        // A strict one must have seen nothing more than the opening, or it would judge by windows that it did not see grow: it
        // forgets the connection. A liberal one has to hear of it in time.
        let (idle, seen) = match tracking {
            Tracking::Strict => (LONGEST + LONGEST / 5, "SYN_RECV"),
            Tracking::Liberal => (LONGEST / 2, "ESTABLISHED"),
        };
        is_known_as(&lab, family, port, seen)?;
        client.exchange(LARGE, LARGE)?;
        if tracking == Tracking::Liberal {
            is_known_as(&lab, family, port, seen)?;
        }
        for _ in 0..2 {
            thread::sleep(patience::here(idle));
            client.chat(5).context("after a while")?;
            match tracking {
                Tracking::Strict => is_forgotten(&lab, family, port)?,
                Tracking::Liberal => is_known_as(&lab, family, port, seen)?,
            }
        }
        client.exchange(SOME, SOME)?;
        match end {
            End::Reset => client.reset()?,
            End::Close => drop(client),
        }
        thread::sleep(patience::here(Duration::from_millis(200)));
        if tracking == Tracking::Strict {
            is_forgotten(&lab, family, port).with_context(|| format!("after {end:?}"))?;
            continue;
        }
        let after = states(&lab, family, port)?;
        let [(state, left)] = &after[..] else {
            bail!("after {end:?} it is {after:?}");
        };
        // Where it can't tell whether the other end takes a reset, connection tracking keeps the state, but not for long.
        let closed: &[&str] = match end {
            End::Close => &["TIME_WAIT", "LAST_ACK", "CLOSE"],
            End::Reset => &["CLOSE", "ESTABLISHED"],
        };
        ensure!(
            closed.contains(&state.as_str()) && *left <= patience::here(LONGEST),
            "after {end:?} it is {after:?}"
        );
    }
    lab.firewall.expect_no_invalid()
}

/// A connection begins on the ports of one that was reset just now. Connection tracking sees no more of it than of any: an entry that is
/// established would stay for days.
#[rstest]
fn ports_are_used_again_after_a_reset(
    #[values(V4, V6)] family: Family,
    #[values("host port", "pod", "other pod")] what: &str,
) -> Result<()> {
    needs_root!();
    let lab = lab(Tracking::Strict, 0)?;
    lab.world.route_pods()?;
    let pod = lab.pod_with("a", &lab.conf().with_host_port(PORT, PORT))?;
    let other = lab.pod("b")?;
    let _server = tcp::Server::start(pod.netns(), family.port(PORT))?;
    let (from, to) = match what {
        "host port" => (lab.world.netns(), SocketAddr::new(family.node(), PORT)),
        "pod" => (lab.world.netns(), pod.at(family, PORT)),
        _ => (other.netns(), pod.at(family, PORT)),
    };
    for round in 0..4 {
        let mut client = tcp::Client::connect_from(from, SOURCE, to)?;
        client.chat(2)?;
        let after = |what: &str| format!("after {what} in round {round}");
        is_known_as(&lab, family, SOURCE, "SYN_RECV").with_context(|| after("a little"))?;
        client.exchange(LARGE, LARGE)?;
        // Where the machine is slow it is forgotten by now.
        let now = states(&lab, family, SOURCE)?;
        ensure!(
            now.iter().all(|(state, _)| state == "SYN_RECV"),
            "{} it is {now:?}",
            after("much")
        );
        client.reset()?;
        thread::sleep(patience::here(Duration::from_millis(100)));
    }
    lab.firewall.expect_no_invalid()
}

/// Both are of one pod's port to one port of another.
#[rstest]
fn a_direct_connection_leaves_the_one_to_the_host_port_alone(
    #[values(V4, V6)] family: Family,
) -> Result<()> {
    needs_root!();
    let lab = lab(Tracking::Strict, 0)?;
    let server = lab.pod_with("a", &lab.conf().with_host_port(PORT, PORT))?;
    let pod = lab.pod("b")?;
    let _server = tcp::Server::start(server.netns(), family.port(PORT))?;
    let mapped = SocketAddr::new(family.node(), PORT);
    let mut first = tcp::Client::connect_from(pod.netns(), SOURCE, mapped)?;
    first.exchange(LARGE, LARGE)?;
    let mut second = tcp::Client::connect_from(pod.netns(), SOURCE, server.at(family, PORT))?;
    first.goes_on(SOME, SILENCE)?;
    second.goes_on(SOME, SILENCE)?;
    first.goes_on(SOME, SILENCE)
}

/// Where connection tracking is liberal, a connection comes back to it all the time.
#[rstest]
fn a_rule_that_comes_later_ends_a_connection(
    #[values(V4, V6)] family: Family,
    #[values("dport", "sport")] direction: &str,
) -> Result<()> {
    needs_root!();
    let lab = lab(Tracking::Liberal, 1)?;
    let pod = lab.pod("a")?;
    let remote = family.remote_at(PORT);
    let _server = tcp::Server::start(lab.world.netns(), remote)?;
    let mut client = tcp::Client::connect(pod.netns(), remote)?;
    client.exchange(SOME, SOME)?;
    lab.firewall
        .drop_forwarded(&format!("tcp {direction} {PORT}"))?;
    let start = Instant::now();
    while client.chat(1).is_ok() {
        ensure!(
            start.elapsed() < patience::here(LONGEST),
            "it goes on after {:?}",
            start.elapsed()
        );
        thread::sleep(Duration::from_millis(20));
    }
    Ok(())
}

/// Exchanges on one connection while something changes again and again.
fn while_changing(
    client: &mut tcp::Client,
    mut change: impl FnMut(usize) -> Result<()> + Send,
) -> Result<()> {
    let is_over = AtomicBool::new(false);
    let exchanges = AtomicUsize::new(0);
    // Until what was under way when it changed is through: each loss doubles the time to the next attempt, and two changes in one
    // would add up.
    let settle = || {
        let before = exchanges.load(Ordering::Relaxed);
        thread::sleep(patience::here(Duration::from_millis(1300)));
        while exchanges.load(Ordering::Relaxed) == before && !is_over.load(Ordering::Relaxed) {
            thread::sleep(Duration::from_millis(10));
        }
    };
    thread::scope(|scope| {
        let changing = scope.spawn(|| -> Result<()> {
            for round in 0..5 {
                settle();
                change(round)?;
            }
            settle();
            is_over.store(true, Ordering::Relaxed);
            Ok(())
        });
        let mut end = Ok(());
        while end.is_ok() && !is_over.load(Ordering::Relaxed) && !changing.is_finished() {
            end = client.exchange(SOME, SOME).map(drop);
            exchanges.fetch_add(1, Ordering::Relaxed);
        }
        is_over.store(true, Ordering::Relaxed);
        changing.join().expect("changes do not panic")?;
        end.with_context(|| format!("exchange {}", exchanges.load(Ordering::Relaxed)))
    })
}

/// The way to the world changes, and back, more than once.
#[rstest]
fn a_route_changes_in_the_middle(
    #[values(V4, V6)] family: Family,
    #[values(Tracking::Strict, Tracking::Liberal)] tracking: Tracking,
    #[values(true, false)] masquerade: bool,
) -> Result<()> {
    needs_root!();
    let lab = lab(tracking, 0)?;
    lab.world.route_pods()?;
    let _second = Second::connect(&lab, Kind::Wire(Wire::Ethernet))?;
    let pod = lab.pod_with("a", &lab.conf().with("ipMasq", masquerade))?;
    let remote = family.remote_at(PORT);
    let _server = tcp::Server::start(lab.world.netns(), remote)?;
    let mut client = tcp::Client::connect(pod.netns(), remote)?;
    client.exchange(SOME, SOME)?;
    while_changing(&mut client, |round| {
        let way = if round % 2 == 0 {
            Second::way(family)
        } else {
            Second::other_way(family)
        };
        let route = format!("route replace {} {way}", family.everywhere());
        lab.node.netns().ip(&[route])
    })?;
    lab.firewall.expect_no_invalid()
}

/// The way back changes alone: answers come by another uplink than before.
#[rstest]
fn answers_change_their_way_in_the_middle(
    #[values(V4, V6)] family: Family,
    #[values(Tracking::Strict, Tracking::Liberal)] tracking: Tracking,
) -> Result<()> {
    needs_root!();
    let lab = lab(tracking, 0)?;
    lab.world.route_pods()?;
    let _second = Second::connect(&lab, Kind::Wire(Wire::Ethernet))?;
    let pod = lab.pod_with("a", &lab.conf().with("ipMasq", false))?;
    let remote = family.remote_at(PORT);
    let _server = tcp::Server::start(lab.world.netns(), remote)?;
    let mut client = tcp::Client::connect(pod.netns(), remote)?;
    client.exchange(SOME, SOME)?;
    while_changing(&mut client, |round| {
        if round % 2 == 0 {
            return Second::answer(&lab);
        }
        let route = Route::to(family.pods()).via(family.node());
        lab.world.netns().rtnl(|rtnl| rtnl.replace_route(route))
    })?;
    lab.firewall.expect_no_invalid()
}

/// Connects from the port of the last connection, which the client's own kernel may hold for a moment.
fn again(pod: &Pod, remote: SocketAddr) -> Result<tcp::Client> {
    let start = Instant::now();
    loop {
        let answer = tcp::Client::connect_from(pod.netns(), SOURCE, remote);
        let is_held = answer.as_ref().is_err_and(|error| {
            let cause = error.root_cause().downcast_ref::<io::Error>();
            cause.is_some_and(|cause| cause.kind() == io::ErrorKind::AddrNotAvailable)
        });
        if !is_held || start.elapsed() > patience::here(Duration::from_secs(2)) {
            return answer;
        }
        thread::sleep(Duration::from_millis(10));
    }
}

/// Nothing of one connection is taken for another's that had its port before.
#[rstest]
fn a_port_is_used_again_at_once(
    #[values(V4, V6)] family: Family,
    #[values(Tracking::Strict, Tracking::Liberal)] tracking: Tracking,
) -> Result<()> {
    needs_root!();
    let lab = lab(tracking, 0)?;
    let pod = lab.pod("a")?;
    let remote = family.remote_at(PORT);
    let _server = tcp::Server::start(lab.world.netns(), remote)?;
    for round in 0..40 {
        let mut client = again(&pod, remote)?;
        client
            .exchange(10_000, 10_000)
            .with_context(|| format!("round {round}"))?;
        // Else the port would wait at the client.
        client.reset()?;
    }
    lab.firewall.expect_no_invalid()
}

/// The end of a connection that was silent for longer than connection tracking remembers it arrives all the same.
#[rstest]
fn an_end_after_a_silence_arrives(
    #[values(V4, V6)] family: Family,
    #[values("FIN", "RST")] how: &str,
    #[values(0, 1)] loose: u8,
) -> Result<()> {
    needs_root!();
    let lab = lab(Tracking::Liberal, loose)?;
    // As soon as where data was seen last whose acknowledgement took the bypass.
    lab.node.netns().set_sysctl(
        "net/netfilter/nf_conntrack_tcp_timeout_established",
        &LONGEST.as_secs().to_string(),
    )?;
    let pod = lab.pod("a")?;
    let remote = family.remote_at(PORT);
    let _server = tcp::Server::start(lab.world.netns(), remote)?;
    let mut client = tcp::Client::connect_from(pod.netns(), SOURCE, remote)?;
    client.chat(5)?;
    thread::sleep(patience::here(LONGEST * 13 / 10));
    let arrived = Capture::start(lab.world.netns(), World::LINK)?;
    match how {
        "RST" => client.reset()?,
        _ => drop(client),
    }
    let flag = if how == "RST" { 4 } else { 1 };
    let is_end = |bytes: &[u8]| {
        let at = ETHERNET + family.header_len();
        frame::read(bytes).is_some_and(|seen| seen.ports == Some((SOURCE, PORT)))
            && bytes.get(at + 13).is_some_and(|flags| flags & flag != 0)
    };
    ensure!(
        arrived.wait_for(SILENCE, is_end).is_some(),
        "the {how} did not arrive"
    );
    lab.firewall.expect_no_invalid()
}
