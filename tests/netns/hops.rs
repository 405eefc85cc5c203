//! Every router takes one from the hop limit, also when the packet goes under its stack.

use rstest::rstest;
use underpass_tests::{capture::Capture, frame, prelude::*};

const PORT: u16 = 8080;

/// What the kernel starts with.
const START: u8 = 64;

#[rstest]
fn between_pods(#[values(V4, V6)] family: Family) -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    let (a, b) = (lab.pod("a")?, lab.pod("b")?);
    let _server = udp::Server::start(b.netns(), family.port(PORT))?;
    let captures = [a.netns(), b.netns()].map(|netns| Capture::start(netns, "eth0"));
    let meter = Meter::start(&lab.node)?;
    udp::Client::open(a.netns(), family)?.chat(b.at(family, PORT), 10)?;
    for capture in captures {
        one_hop_less(&capture?, 10)?;
    }
    meter.expect(Counter::BypassPeer, 16)
}

#[rstest]
fn between_pod_and_world(#[values(V4, V6)] family: Family) -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    let pod = lab.pod("a")?;
    let server = family.remote_at(PORT);
    let _server = udp::Server::start(lab.world.netns(), server)?;
    let captures = [pod.netns(), lab.world.netns()].map(|netns| Capture::start(netns, "eth0"));
    let meter = Meter::start(&lab.node)?;
    udp::Client::open(pod.netns(), family)?.chat(server, 10)?;
    for capture in captures {
        one_hop_less(&capture?, 10)?;
    }
    meter.expect(Counter::BypassWire, 8)?;
    meter.expect(Counter::BypassPeer, 8)
}

/// All datagrams that came, at least `least`, passed one router.
fn one_hop_less(capture: &Capture, least: usize) -> Result<()> {
    // The last answer was read before it was captured, perhaps.
    std::thread::sleep(std::time::Duration::from_millis(50));
    let hops: Vec<u8> = capture
        .frames()
        .iter()
        .filter_map(|bytes| frame::read(bytes))
        .filter(|packet| packet.ports.is_some())
        .map(|packet| packet.hops)
        .collect();
    ensure!(
        hops.len() >= least,
        "{} datagrams were captured",
        hops.len()
    );
    ensure!(
        hops.iter().all(|&hops| hops == START - 1),
        "hop limits of the datagrams: {hops:?}"
    );
    Ok(())
}
