//! A way that becomes narrower in the middle of a connection, and one that only the node itself was told of.

use std::thread;

use rstest::rstest;
use underpass_tests::{
    capture::Capture,
    frame,
    prelude::*,
    second::Second,
    traffic::{PATIENCE, SILENCE, offload, raw::RawLink},
    world::World,
};

use super::{ETHERNET, PORT, SOME, Tracking, lab, while_changing};

/// What the MTU shrinks to, one after the other.
const SHRUNK: [usize; 5] = [1400, 1350, 1300, 1290, 1280];

/// The node was told of a narrow path to a server beyond, as whoever sends to it is. Forwarding does not go by that: who sends is told by the
/// router where it is narrow.
#[rstest]
fn a_path_that_is_narrow_for_the_node_stalls_nobody(
    #[values(V4, V6)] family: Family,
    #[values(Tracking::Strict, Tracking::Liberal)] tracking: Tracking,
    #[values("before", "in the middle")] when: &str,
) -> Result<()> {
    const MTU: u16 = 1280;
    const ID: [u8; 4] = [0x12, 0x34, 0, 1];
    needs_root!();
    let lab = lab(tracking, 0)?;
    // The stack is shown the first packet that is too long.
    lab.firewall.tolerate_invalid();
    let pod = lab.pod("a")?;
    let remote = family.remote_at(PORT);
    let _server = tcp::Server::start(lab.world.netns(), remote)?;
    let (ask, answer) = match family {
        V4 => (8, 0),
        V6 => (128, 129),
    };
    let narrow = || {
        let link = RawLink::open(lab.world.netns(), World::LINK)?;
        let ends = lab.ends_from_world(remote.ip(), family.node())?;
        link.send(&ends.icmp(ask, 0, ID, b"anybody?"))?;
        thread::sleep(SILENCE / 4);
        let back = frame::Ends {
            src: ends.dst,
            dst: ends.src,
            ..ends
        };
        let quoted = back.icmp(answer, 0, ID, b"anybody?");
        let [high, low] = MTU.to_be_bytes();
        let (kind, code) = match family {
            V4 => (3, 4),
            V6 => (2, 0),
        };
        link.send(&ends.icmp(kind, code, [0, 0, high, low], &quoted[14..]))?;
        eventually("the node knows it", || {
            let route = lab
                .node
                .netns()
                .ip_json(&["route", "get", &remote.ip().to_string()])?;
            let known = route.to_string();
            ensure!(known.contains(&MTU.to_string()), "{known}");
            Ok(())
        })
    };
    if when == "before" {
        narrow()?;
    }
    let mut client = tcp::Client::connect(pod.netns(), remote)?;
    client.exchange(SOME, SOME)?;
    if when != "before" {
        narrow()?;
        thread::sleep(SILENCE / 2);
    }
    client.goes_on(SOME, SILENCE)
}

/// What shrinks is the uplink itself, or the node's route; who sends too much is told so from here.
#[rstest]
fn a_path_mtu_shrinks_in_the_middle(
    #[values(V4, V6)] family: Family,
    #[values(Tracking::Strict, Tracking::Liberal)] tracking: Tracking,
    #[values(true, false)] masquerade: bool,
    #[values("device", "route")] what: &str,
) -> Result<()> {
    needs_root!();
    let lab = lab(tracking, 0)?;
    lab.world.route_pods()?;
    let pod = lab.pod_with("a", &lab.conf().with("ipMasq", masquerade))?;
    let remote = family.remote_at(PORT);
    let _server = tcp::Server::start(lab.world.netns(), remote)?;
    // Else segments are seen before they are cut.
    offload::take_off(pod.netns(), Pod::IFNAME)?;
    let mut client = tcp::Client::connect(pod.netns(), remote)?;
    client.exchange(SOME, SOME)?;
    while_changing(&mut client, |round| {
        let mtu = SHRUNK[round];
        if what == "route" {
            let route = format!(
                "route replace {} {} mtu lock {mtu}",
                family.everywhere(),
                Second::other_way(family)
            );
            return lab.node.netns().ip(&[route]);
        }
        for (end, device) in [
            (lab.world.netns(), World::LINK),
            (lab.node.netns(), Node::UPLINK),
        ] {
            end.set_mtu(device, u32::try_from(mtu)?)?;
        }
        Ok(())
    })?;
    // The first that is too long may come only now: what went on meanwhile may have come from the other end. Of a flow whose end the bypass
    // carries, what follows it before its sender is told leaves as it is.
    client.exchange(SOME, SOME)?;
    let line = Capture::start(lab.world.netns(), World::LINK)?;
    client.exchange(SOME, 0)?;
    line.wait_for(PATIENCE, |bytes| bytes.len() > SHRUNK[4] / 2)
        .context("nothing arrives")?;
    thread::sleep(SILENCE / 4);
    let longest = line.frames().iter().map(Vec::len).max();
    ensure!(
        longest.is_some_and(|longest| longest <= ETHERNET + SHRUNK[4]),
        "a frame of {longest:?} bytes"
    );
    lab.firewall.expect_no_invalid()
}
