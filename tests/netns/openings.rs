//! What begins a flow, and who sees it: connection tracking must know of every connection that takes the bypass as much as it needs.

use std::{
    net::{SocketAddr, UdpSocket},
    thread,
    time::{Duration, Instant},
};

use rstest::rstest;
use serde_json::{Value, json};
use underpass_tests::{
    netfilter::LONGEST,
    patience,
    prelude::*,
    traffic::{PATIENCE, SILENCE},
};

const PORT: u16 = 443;
const SOURCE: u16 = 45_678;
const INSIDE: u16 = 80;
/// A port of the node that leads to [`INSIDE`].
const HOST: u16 = 8080;

/// Between two packets of a kind.
const PAUSE: Duration = Duration::from_millis(50);

/// A liberal connection tracking sees the whole opening of what is translated: else it waits for the third packet, and soon forgets. How
/// the addresses of both sides compare makes no difference.
#[rstest]
fn an_opening_is_seen_as_a_whole(
    #[values(V4, V6)] family: Family,
    #[values("masqueraded", "host port")] how: &str,
) -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    lab.firewall.set_liberal(true)?;
    let conf = lab.conf();
    let ranges = ["10.88.0.200", "fd00:88::c8"].map(|start| json!({ "rangeStart": start }));
    let ranges: Vec<Value> = Family::BOTH
        .iter()
        .zip(ranges)
        .map(|(family, mut range)| {
            range["subnet"] = family.pods().into();
            json!([range])
        })
        .collect();
    let high = conf.clone().with_ipam("ranges", ranges);
    let pods = [
        (lab.pod_with("a", &conf.with_host_port(HOST, INSIDE))?, HOST),
        (
            lab.pod_with("b", &high.with_host_port(HOST + 1, INSIDE))?,
            HOST + 1,
        ),
    ];
    let mut sources = SOURCE..;
    for peer in [family.gateway(), family.remote()] {
        let peer = SocketAddr::new(peer, PORT);
        let _server = tcp::Server::start(lab.world.netns(), peer)?;
        for (pod, port) in &pods {
            let _inside = tcp::Server::start(pod.netns(), family.port(INSIDE))?;
            // One of its own: by its port a connection is told from the earlier ones.
            let source = sources.next().context("no port left")?;
            let mut client = if how == "masqueraded" {
                tcp::Client::connect_from(pod.netns(), source, peer)?
            } else {
                let from = SocketAddr::new(peer.ip(), source);
                let served = SocketAddr::new(family.node(), *port);
                tcp::Client::connect_between(lab.world.netns(), from, served)?
            };
            client.exchange(1, 1)?;
            let source = format!("sport={source}");
            let found = lab.firewall.entries(family, &["tcp", &source])?;
            ensure!(
                found.len() == 1 && found[0].contains(" ESTABLISHED "),
                "after an exchange: {found:#?}"
            );
        }
    }
    Ok(())
}

/// A connection that says all it has to say at once, and is silent then, is known to be one.
#[rstest]
fn an_exchange_right_after_the_opening_is_noted(#[values(V4, V6)] family: Family) -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    let (a, b) = (lab.pod("a")?, lab.pod("b")?);
    let at = b.at(family, INSIDE);
    let _server = tcp::Server::start(b.netns(), family.port(INSIDE))?;
    for _ in 0..3 {
        let mut client = tcp::Client::connect(a.netns(), at)?;
        client.exchange(1, 1)?;
        let found = lab.node.flows([client.local()?, at])?;
        ensure!(found.len() == 1, "{found:#?}");
        for word in ["answered", "assured"] {
            let states = found[0]["state"].as_array();
            ensure!(
                states.is_some_and(|states| states.contains(&word.into())),
                "not {word}: {found:#?}"
            );
        }
    }
    Ok(())
}

/// The kernel's own timers, and somebody who asks for connection tracking.
fn with_usual_timers() -> Result<Lab> {
    let lab = Lab::open()?;
    lab.node.netns().nft(
        "table inet asks {
            chain forward { type filter hook forward priority 0; ct state invalid drop; }
        }",
    )?;
    Ok(lab)
}

/// Fails unless connection tracking takes the datagrams from the source port for a stream.
fn ensure_assured(lab: &Lab, family: Family) -> Result<()> {
    let source = format!("sport={SOURCE}");
    let found = lab.firewall.entries(family, &["udp", &source])?;
    ensure!(
        found.len() == 1 && found[0].contains("[ASSURED]"),
        "{found:#?}"
    );
    Ok(())
}

/// Connection tracking is fed as often as it needs to see that datagrams are a stream, however long its timers are, and whoever pauses.
#[rstest]
fn a_stream_of_datagrams_is_assured(
    #[values(V4, V6)] family: Family,
    #[values((6, 1), (2, 6))] (questions, seconds): (u32, u64),
) -> Result<()> {
    needs_root!();
    let lab = with_usual_timers()?;
    let (a, b) = (lab.pod("a")?, lab.pod("b")?);
    let at = b.at(family, INSIDE);
    let _server = udp::Server::start(b.netns(), family.port(INSIDE))?;
    let mut client = udp::Client::open_at(a.netns(), family, SOURCE)?;
    for question in 0..questions {
        if question > 0 {
            thread::sleep(Duration::from_secs(seconds));
        }
        client.ask(at, 100)?;
    }
    ensure_assured(&lab, family)
}

/// The same where the first question was lost.
#[rstest]
fn a_late_answer_begins_a_stream(#[values(V4, V6)] family: Family) -> Result<()> {
    needs_root!();
    let lab = with_usual_timers()?;
    let (a, b) = (lab.pod("a")?, lab.pod("b")?);
    let at = b.at(family, INSIDE);
    let client = a.netns().run(|| UdpSocket::bind(family.port(SOURCE)))?;
    let server = b.netns().run(|| UdpSocket::bind(at))?;
    for socket in [&client, &server] {
        socket.set_read_timeout(Some(patience::here(PATIENCE)))?;
    }
    let ask = || -> Result<SocketAddr> {
        client.send_to(b"question", at)?;
        Ok(server.recv_from(&mut [0; 64])?.1)
    };
    ask()?;
    thread::sleep(Duration::from_secs(5));
    for _ in 0..4 {
        server.send_to(b"answer", ask()?)?;
        client.recv_from(&mut [0; 64])?;
        thread::sleep(Duration::from_secs(1));
    }
    ensure_assured(&lab, family)
}

/// What connection tracking could not follow while it was liberal stays on the bypass once it is strict, from the next ADD on: also what the
/// stack was asked about before that, and called invalid.
#[rstest]
fn connections_outlive_a_stricter_connection_tracking(
    #[values(V4, V6)] family: Family,
    #[values(false, true)] asked: bool,
) -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    lab.firewall.set_liberal(true)?;
    let (a, b) = (lab.pod("a")?, lab.pod("b")?);
    let _server = tcp::Server::start(b.netns(), family.port(INSIDE))?;
    let mut client = tcp::Client::connect(a.netns(), b.at(family, INSIDE))?;
    for _ in 0..3 {
        client.exchange(5_000_000, 5_000_000)?;
        thread::sleep(Duration::from_secs(1));
    }
    lab.firewall.set_liberal(false)?;
    if asked {
        lab.firewall.tolerate_invalid();
    }
    let _another = thread::scope(|scope| {
        let talk = scope.spawn(|| -> Result<()> {
            let start = Instant::now();
            while asked && start.elapsed() < LONGEST {
                client.exchange(1000, 1000)?;
                thread::sleep(PAUSE);
            }
            Ok(())
        });
        if asked {
            thread::sleep(LONGEST / 2);
        }
        let another = lab.pod("c")?;
        talk.join().expect("it does not panic")?;
        anyhow::Ok(another)
    })?;
    let start = Instant::now();
    while start.elapsed() < patience::here(Duration::from_secs(4)) {
        let elapsed = client.exchange(100_000, 100_000)?.elapsed;
        ensure!(
            elapsed < patience::here(SILENCE / 2),
            "an exchange took {elapsed:?}, {:?} after the change",
            start.elapsed()
        );
        thread::sleep(PAUSE);
    }
    Ok(())
}

/// The node answers for a server, so sequence numbers change on the way.
#[rstest]
fn connections_through_a_syn_proxy(
    #[values(V4, V6)] family: Family,
    #[values(false, true)] liberal: bool,
) -> Result<()> {
    needs_root!();
    let lab = Lab::open()?;
    lab.world.route_pods()?;
    let node = lab.node.netns();
    let to = format!("tcp dport {INSIDE}");
    let proxy = format!(
        "table inet proxy {{
            chain prerouting {{
                type filter hook prerouting priority raw;
                {to} tcp flags syn notrack;
            }}
            chain forward {{
                type filter hook forward priority 0;
                {to} ct state invalid,untracked synproxy mss 1400 wscale 7 timestamp sack-perm;
                ct state invalid drop;
            }}
        }}"
    );
    if let Err(error) = node.nft(&proxy) {
        anstream::eprintln!("not on this kernel: {error:#}");
        return Ok(());
    }
    for (key, value) in [
        ("net/netfilter/nf_conntrack_tcp_loose", "0"),
        ("net/ipv4/tcp_syncookies", "1"),
        ("net/ipv4/tcp_timestamps", "1"),
    ] {
        node.set_sysctl(key, value)?;
    }
    lab.firewall.set_liberal(liberal)?;
    let pod = lab.pod_with("a", &lab.conf().with("ipMasq", false))?;
    let _server = tcp::Server::start(pod.netns(), family.port(INSIDE))?;
    for _ in 0..3 {
        let at = pod.at(family, INSIDE);
        let mut client = tcp::Client::connect(lab.world.netns(), at)?;
        for _ in 0..8 {
            client.exchange(1000, 1000)?;
            thread::sleep(PAUSE);
        }
    }
    Ok(())
}
