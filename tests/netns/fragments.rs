//! Datagrams larger than any packet: through masquerade and host ports, in both directions.

use std::net::SocketAddr;

use anyhow::{Context as _, Result, ensure};
use rstest::rstest;
use serde_json::json;
use underpass_abi::counter::Counter;
use underpass_tests::{
    Family::{self, V4, V6},
    Lab, Pod,
    capture::Capture,
    counter::Meter,
    frame::{self, as_fragment},
    needs_root,
    traffic::{PATIENCE, ping, raw::RawLink, udp},
    world::World,
};

const PORT: u16 = 443;
const SOURCE: u16 = 45_678;
const HOST: u16 = 8080;
const INSIDE: u16 = 80;
/// Three pieces; many; as many as there can be.
const SIZES: [usize; 3] = [4000, 20_000, 64_000];

#[rstest]
fn masqueraded(
    #[values(V4, V6)] family: Family,
    #[values("learned", "off", "eager")] bypass: &str,
) -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    let conf = lab.conf().with("bypass", bypass);
    let pods = [lab.pod_with("a", &conf)?, lab.pod_with("b", &conf)?];
    let server = family.remote_at(PORT);
    let _server = udp::Server::start(lab.world.netns(), server)?;
    let meter = Meter::start(&lab.node)?;
    for pod in &pods {
        // The second pod's port has to change.
        let mut client = udp::Client::open_at(pod.netns(), family, SOURCE)?;
        for len in SIZES {
            client.ask(server, len)?;
        }
        let mut ping = ping::Ping::new(pod.netns(), family.remote())?;
        for len in [4000, 65_000] {
            ping.echo(len)?;
        }
    }
    meter.expect(Counter::PortChanged, 1)?;
    ensure!(meter.read()?.dropped() == 0, "{:?}", meter.read()?);
    Ok(())
}

#[rstest]
fn to_a_host_port(#[values(V4, V6)] family: Family) -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    let mapping = json!({ "hostPort": HOST, "containerPort": INSIDE, "protocol": "udp" });
    let conf = lab
        .conf()
        .with("runtimeConfig", json!({ "portMappings": [mapping] }));
    let (server, client) = (lab.pod_with("server", &conf)?, lab.pod("client")?);
    let _server = udp::Server::start(server.netns(), family.port(INSIDE))?;
    let asked = SocketAddr::new(family.node(), HOST);
    for netns in [lab.world.netns(), client.netns()] {
        let mut client = udp::Client::open(netns, family)?;
        for len in SIZES {
            client.ask(asked, len)?;
        }
    }
    Ok(())
}

#[rstest]
fn a_later_piece_that_comes_first_is_a_counted_drop(
    #[values(V4, V6)] family: Family,
) -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    let pod = lab.pod("a")?;
    let link = RawLink::open(pod.netns(), Pod::IFNAME)?;
    let world = Capture::start(lab.world.netns(), World::LINK)?;
    let meter = Meter::start(&lab.node)?;
    let ends = pod.ends(family.remote())?;
    let whole = ends.udp(SOURCE, PORT, &[7; 56]);
    let rest = ends.protocol(17, &[7; 16]);
    let pieces = || {
        let frames = world.frames();
        frames
            .iter()
            .filter(|bytes| frame::is_fragment(bytes))
            .count()
    };
    link.send(&as_fragment(&rest, 8, false))?;
    meter.expect(Counter::DropFragment, 1)?;
    ensure!(pieces() == 0, "{} pieces came out", pieces());
    // The first piece, and a later one that comes after it, get out.
    link.send(&as_fragment(&whole, 0, true))?;
    link.send(&as_fragment(&rest, 8, false))?;
    world
        .wait_for(PATIENCE, |_| pieces() == 2)
        .context("two pieces come out")?;
    let own = pod.ip(family);
    ensure!(!world.addresses().contains(&own), "{own} came out");
    ensure!(meter.read()?.dropped() == 1, "{:?}", meter.read()?);
    Ok(())
}

#[rstest]
fn a_later_piece_to_a_host_port_that_comes_first_is_left_to_the_host(
    #[values(V4, V6)] family: Family,
    #[values("world", "pod")] from: &str,
) -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    let mapping = json!({ "hostPort": HOST, "containerPort": INSIDE, "protocol": "udp" });
    let conf = lab
        .conf()
        .with("runtimeConfig", json!({ "portMappings": [mapping] }));
    let (server, client) = (lab.pod_with("server", &conf)?, lab.pod("client")?);
    let (link, ends) = if from == "world" {
        let ends = lab.ends_from_world(family.remote(), family.node())?;
        (RawLink::open(lab.world.netns(), World::LINK)?, ends)
    } else {
        let ends = client.ends(family.node())?;
        (RawLink::open(client.netns(), Pod::IFNAME)?, ends)
    };
    let inside = Capture::start(server.netns(), Pod::IFNAME)?;
    let whole = ends.udp(SOURCE, HOST, &[7; 56]);
    let rest = ends.protocol(17, &[7; 16]);
    let arrived = || {
        let frames = inside.frames();
        let pieces = frames.iter().filter(|bytes| frame::is_fragment(bytes));
        pieces
            .filter_map(|bytes| frame::read(bytes))
            .collect::<Vec<_>>()
    };
    // The later piece might be the host's own, which would have to put it together; in order, both arrive.
    link.send(&as_fragment(&rest, 8, false))?;
    link.send(&as_fragment(&whole, 0, true))?;
    inside
        .wait_for(PATIENCE, |_| arrived().len() == 1)
        .context("the first piece arrives")?;
    link.send(&as_fragment(&rest, 8, false))?;
    inside
        .wait_for(PATIENCE, |_| arrived().len() == 2)
        .context("a later piece arrives after it")?;
    let (to, by) = (server.ip(family), ends.src);
    ensure!(
        arrived()
            .iter()
            .all(|read| read.dst == to && read.src == by),
        "{:?}",
        arrived()
    );
    Ok(())
}
