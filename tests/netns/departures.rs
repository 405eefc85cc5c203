//! Uplinks that go: connections that begin afterwards, questions that nobody answered, and calls that are under way.

use std::{
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::Duration,
};

use rstest::rstest;
use underpass_tests::{
    patience,
    prelude::*,
    runtime::Conf,
    second::{Kind, Second},
    traffic::{SILENCE, serve},
    wire::Wire,
};

const PORT: u16 = 443;
const SOURCE: u16 = 45_678;

/// A lab whose node leaves by its second uplink.
fn lab(family: Family) -> Result<(Lab, Second)> {
    let lab = Lab::new()?;
    let second = Second::connect(&lab, Kind::Wire(Wire::Ethernet))?;
    route(&lab, family, &Second::way(family))?;
    Ok((lab, second))
}

fn route(lab: &Lab, family: Family, way: &str) -> Result<()> {
    let route = format!("route replace {} {way}", family.everywhere());
    lab.node.netns().ip(&[route])
}

/// A connection from the port of one that has ended is masqueraded anew.
#[rstest]
fn a_new_connection_has_an_address_that_is_there(
    #[values(V4, V6)] family: Family,
    #[values("closed", "reset")] end: &str,
    #[values(true, false)] is_deleted: bool,
) -> Result<()> {
    needs_root!();
    let (lab, _second) = lab(family)?;
    let pod = lab.pod("a")?;
    let remote = family.remote_at(PORT);
    let _server = tcp::Server::start(lab.world.netns(), remote)?;
    let mut client = tcp::Client::connect_from(pod.netns(), SOURCE, remote)?;
    let seen = client.chat(5)?;
    ensure!(seen.ip() == Second::node(family), "seen {seen}");
    match end {
        "reset" => client.reset()?,
        _ => drop(client),
    }
    thread::sleep(SILENCE);
    route(&lab, family, &Second::other_way(family))?;
    if is_deleted {
        lab.node.netns().delete_link(Second::LINK)?;
    }
    let mut client = tcp::Client::connect_from(pod.netns(), SOURCE, remote)
        .context("by the uplink that is left")?;
    let seen = client.chat(5)?;
    ensure!(seen.ip() == family.node(), "then seen {seen}");
    Ok(())
}

/// Who asks again, because nobody answered, is not bound to the uplink of the first question.
#[rstest]
fn a_question_is_repeated_by_another_uplink(
    #[values(V4, V6)] family: Family,
    #[values("TCP", "UDP")] by: &str,
) -> Result<()> {
    needs_root!();
    let (lab, _second) = lab(family)?;
    lab.world.netns().nft(&format!(
        "table inet dead {{
            chain input {{ type filter hook input priority 0; iif {} th dport {PORT} drop; }}
        }}",
        Second::LINK
    ))?;
    let pod = lab.pod("a")?;
    let remote = family.remote_at(PORT);
    let _servers = serve(lab.world.netns(), remote)?;
    let seen = if by == "UDP" {
        let mut client = udp::Client::open_at(pod.netns(), family, SOURCE)?;
        client.hears_nothing(remote)?;
        route(&lab, family, &Second::other_way(family))?;
        client.chat(remote, 5)?.seen
    } else {
        thread::scope(|scope| -> Result<_> {
            let connecting =
                scope.spawn(|| tcp::Client::connect_from(pod.netns(), SOURCE, remote)?.chat(5));
            thread::sleep(patience::here(SILENCE));
            route(&lab, family, &Second::other_way(family))?;
            connecting.join().expect("a connection does not panic")
        })?
    };
    ensure!(seen.ip() == family.node(), "seen {seen}");
    Ok(())
}

/// A container needs no uplink that is deleted in the middle of its ADD.
#[test]
fn an_add_outlives_an_uplink() -> Result<()> {
    const ADDS: usize = 100;
    needs_root!();
    let lab = Lab::new()?;
    lab.pod("first")?.del()?;
    let is_over = AtomicBool::new(false);
    thread::scope(|scope| {
        let coming_and_going = scope.spawn(|| -> Result<()> {
            for delay in (0..10).cycle() {
                if is_over.load(Ordering::Relaxed) {
                    break;
                }
                let _second = Second::connect(&lab, Kind::Wire(Wire::Ethernet))?;
                thread::sleep(Duration::from_millis(delay));
                lab.node.netns().delete_link(Second::LINK)?;
            }
            Ok(())
        });
        let adds = || -> Result<()> {
            for number in 0..ADDS {
                lab.pod(&format!("p{number}"))?.del()?;
            }
            Ok(())
        };
        let added = adds();
        is_over.store(true, Ordering::Relaxed);
        coming_and_going.join().expect("no uplink panics")?;
        added
    })
}

#[rstest]
fn an_address_that_changes_hands_serves_its_new_owner(
    #[values(V4, V6)] family: Family,
) -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    let a = lab.pod("a")?;
    let mut client = udp::Client::open(a.netns(), family)?;
    change_hands(&lab, family, &mut client, &tight(&lab))
}

/// The world asks an address, from one port, before and after it changes hands, and is answered by that address.
#[rstest]
fn an_address_that_changes_hands_answers_the_world(
    #[values(V4, V6)] family: Family,
    #[values("learned", "off")] bypass: &str,
) -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    lab.world.route_pods()?;
    let mut client = udp::Client::open_at(lab.world.netns(), family, SOURCE)?;
    let conf = tight(&lab).with("bypass", bypass);
    change_hands(&lab, family, &mut client, &conf)
}

/// A network with one address of each family: a second pod gets what the first one gave back.
fn tight(lab: &Lab) -> Conf {
    let ranges = Family::BOTH.map(|family| {
        let only = family.unused_pod();
        serde_json::json!([{ "subnet": family.pods(), "rangeStart": only, "rangeEnd": only }])
    });
    let conf = lab.conf().with_ipam("ranges", ranges.to_vec());
    conf.with("name", "tight")
}

/// Asks two pods, one after the other, which have one address.
fn change_hands(lab: &Lab, family: Family, client: &mut udp::Client, conf: &Conf) -> Result<()> {
    let mut address = None;
    for name in ["first", "second"] {
        let pod = lab.pod_with(name, conf)?;
        let _server = udp::Server::start(pod.netns(), family.port(PORT))?;
        client.chat(pod.at(family, PORT), 5)?;
        ensure!(
            address
                .replace(pod.ip(family))
                .is_none_or(|ip| ip == pod.ip(family))
        );
        pod.del()?;
    }
    Ok(())
}
