//! A connection to a host port is its client's to open. The container that serves it can't turn it round, and reach whoever has the
//! client's port by then.

use std::{net::SocketAddr, thread};

use rstest::rstest;
use underpass_abi::flow::protocol;
use underpass_tests::{
    frame,
    prelude::*,
    traffic::{SILENCE, raw::RawLink},
};

use super::{HOST, INSIDE, SOURCE, Scene, both, mapped};

/// Another process of the node listens where one was that had asked the container.
#[rstest]
fn a_container_opens_no_connection_to_a_process_of_the_node(
    #[values(V4, V6)] family: Family,
    #[values("loopback", "node")] by: &str,
    #[values("closed", "reset")] end: &str,
) -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    let pod = lab.pod_with("server", &mapped(&lab, &both()))?;
    let host = lab.node.netns();
    let ip = if by == "node" {
        family.node()
    } else {
        family.loopback()
    };
    let (own, asked) = (SocketAddr::new(ip, SOURCE), SocketAddr::new(ip, HOST));
    let seen = {
        let _server = tcp::Server::start(pod.netns(), family.port(INSIDE))?;
        let mut client = tcp::Client::connect_between(host, own, asked)?;
        let seen = client.chat(3)?;
        if end == "reset" {
            client.reset()?;
        }
        seen
    };
    ensure!(seen.ip() == family.pod_gateway(), "{seen}");
    thread::sleep(SILENCE / 4);
    let listener = tcp::Server::start(host, own)?;
    let meter = Meter::start(&lab.node)?;
    let opened = pod.netns().run(|| {
        let from = Some(pod.at(family, INSIDE));
        tcp::dial(from, seen, &[], SILENCE)
    });
    ensure!(opened.is_err(), "the container reached {own}: {opened:?}");
    meter.expect(Counter::DropNoFlow, 1)?;
    drop(listener);
    // The client may come again.
    let _server = tcp::Server::start(pod.netns(), family.port(INSIDE))?;
    tcp::Client::connect_between(host, own, asked)?.chat(3)?;
    Ok(())
}

/// Nor while it lasts, which a segment like that does not end.
#[rstest]
fn a_connection_outlives_what_would_open_another(#[values(V4, V6)] family: Family) -> Result<()> {
    needs_root!();
    let scene = Scene::set(family)?;
    let at = SocketAddr::new(family.loopback(), HOST);
    let mut client = tcp::Client::connect(scene.lab.node.netns(), at)?;
    let seen = client.chat(3)?;
    let meter = Meter::start(&scene.lab.node)?;
    let ends = scene.server.ends(seen.ip())?;
    let link = RawLink::open(scene.server.netns(), Pod::IFNAME)?;
    for frame in [
        ends.syn(INSIDE, seen.port()),
        ends.syn_fin(INSIDE, seen.port()),
    ] {
        link.send(&frame)?;
    }
    meter.expect(Counter::DropNoFlow, 2)?;
    client.chat(3)?;
    Ok(())
}

/// What follows the end of a packet in its frame is for nobody to read: the flags come with the second piece.
#[rstest]
fn flags_beside_a_piece_open_no_connection(#[values(V4, V6)] family: Family) -> Result<()> {
    /// Bytes of the TCP header that the first piece has.
    const PIECE: usize = 8;
    const FLAGS: usize = 13;
    const ACK: u8 = 16;
    needs_root!();
    let scene = Scene::set(family)?;
    scene.lab.firewall.tolerate_invalid();
    let at = SocketAddr::new(family.loopback(), HOST);
    let seen = tcp::Client::connect(scene.lab.node.netns(), at)?.chat(3)?;
    let ends = scene.server.ends(seen.ip())?;
    let syn = ends.syn(INSIDE, seen.port());
    let (start, rest) = syn[14 + family.header_len()..].split_at(PIECE);
    let mut beside = rest.to_vec();
    beside[FLAGS - PIECE] = ACK;
    let first = frame::as_fragment(&ends.protocol(protocol::TCP, start), 0, true);
    let meter = Meter::start(&scene.lab.node)?;
    let link = RawLink::open(scene.server.netns(), Pod::IFNAME)?;
    link.send(&[first, beside].concat())?;
    meter.expect(Counter::DropMalformed, 1)
}
