//! Datagrams larger than any packet: through masquerade and host ports, in both directions.

use std::{
    net::{IpAddr, SocketAddr, UdpSocket},
    process::Command,
    thread,
};

use rstest::rstest;
use underpass_tests::{
    capture::Capture,
    frame::{self, Ends, as_fragment_of},
    netns::Netns,
    patience,
    prelude::*,
    traffic::{PATIENCE, SILENCE, raw::RawLink},
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
    #[values("learned", "off")] bypass: &str,
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
    meter.expect_none(Counter::HeldFragment)?;
    ensure!(meter.read()?.dropped() == 0, "{:?}", meter.read()?);
    Ok(())
}

#[rstest]
fn to_a_host_port(#[values(V4, V6)] family: Family) -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    let conf = lab.conf().with_host_port(HOST, INSIDE);
    let (server, client) = (lab.pod_with("server", &conf)?, lab.pod("client")?);
    let _server = udp::Server::start(server.netns(), family.port(INSIDE))?;
    let asked = SocketAddr::new(family.node(), HOST);
    for (who, netns) in [
        ("world", lab.world.netns()),
        ("pod", client.netns()),
        ("itself", server.netns()),
    ] {
        let meter = Meter::start(&lab.node)?;
        let mut client = udp::Client::open(netns, family)?;
        for len in SIZES {
            client.ask(asked, len)?;
        }
        meter
            .expect_none(Counter::HeldFragment)
            .with_context(|| format!("from {who}"))?;
    }
    Ok(())
}

/// With connection tracking, which puts pieces together before the firewall sees them, or without.
type Make = fn() -> Result<Lab>;

/// A datagram cut to pieces of so many bytes, the last first. Its length is its identification too.
fn reversed(ends: &Ends, ports: (u16, u16), payload: &[u8], length: usize) -> Vec<Vec<u8>> {
    let whole = ends.udp(ports.0, ports.1, payload);
    let datagram = &whole[whole.len() - payload.len() - 8..];
    let name = u16::try_from(payload.len()).expect("a datagram has 64 KiB at most");
    let count = datagram.len().div_ceil(length);
    let pieces = datagram.chunks(length).enumerate().map(|(at, piece)| {
        let offset = u16::try_from(at * length / 8).expect("not more than the length");
        as_fragment_of(name, &ends.protocol(17, piece), offset, at + 1 < count)
    });
    let mut pieces: Vec<_> = pieces.collect();
    pieces.reverse();
    pieces
}

/// A socket that waits for a datagram.
fn receiver(netns: &Netns, at: SocketAddr) -> Result<UdpSocket> {
    let socket = netns.run(|| UdpSocket::bind(at))?;
    socket.set_read_timeout(Some(patience::here(PATIENCE)))?;
    Ok(socket)
}

/// Fails unless exactly this datagram arrives, with that source address.
fn receives(socket: &UdpSocket, payload: &[u8], from: IpAddr) -> Result<SocketAddr> {
    let mut bytes = vec![0; 65_536];
    let (len, sender) = socket
        .recv_from(&mut bytes)
        .with_context(|| format!("{} bytes do not arrive", payload.len()))?;
    ensure!(bytes[..len] == *payload, "{len} other bytes came");
    ensure!(sender.ip() == from, "they came from {sender}");
    Ok(sender)
}

/// Sends a datagram of each length, the last piece first: all must arrive whole, with that source address. Returns how many pieces
/// came before their first.
fn carries(
    link: &RawLink,
    ends: &Ends,
    ports: (u16, u16),
    to: &UdpSocket,
    from: IpAddr,
) -> Result<u64> {
    let mut early = 0;
    for len in REVERSED {
        let payload = payload(len);
        let pieces = reversed(ends, ports, &payload, PIECE);
        early += pieces.len() as u64 - 1;
        for piece in &pieces {
            link.send(piece)?;
        }
        receives(to, &payload, from)?;
    }
    Ok(early)
}

fn payload(len: usize) -> Vec<u8> {
    (0..len).map(|at| (at % 251).to_le_bytes()[0]).collect()
}

/// In bytes, of which pieces are cut; as they fit an MTU of 1500.
const PIECE: usize = 1440;
/// Two pieces, a few, and nearly as many as there can be.
const REVERSED: [usize; 3] = [2000, 9000, 60_000];

#[rstest]
fn pieces_from_a_container_may_come_in_any_order(#[values(V4, V6)] family: Family) -> Result<()> {
    needs_root!();
    let lab = Lab::open()?;
    let pod = lab.pod("a")?;
    let link = RawLink::open(pod.netns(), Pod::IFNAME)?;
    let server = receiver(lab.world.netns(), family.remote_at(PORT))?;
    let meter = Meter::start(&lab.node)?;
    let ends = pod.ends(family.remote())?;
    let early = carries(&link, &ends, (SOURCE, PORT), &server, family.node())?;
    meter.expect(Counter::HeldFragment, early)?;
    meter.expect(Counter::ReleasedFragment, early)?;
    ensure!(meter.read()?.dropped() == 0, "{:?}", meter.read()?);
    Ok(())
}

#[rstest]
fn pieces_of_an_answer_may_come_in_any_order(
    #[values(V4, V6)] family: Family,
    #[values(Lab::new, Lab::open)] lab: Make,
) -> Result<()> {
    needs_root!();
    let lab = lab()?;
    let pod = lab.pod("a")?;
    let server = receiver(lab.world.netns(), family.remote_at(PORT))?;
    let client = receiver(pod.netns(), family.port(SOURCE))?;
    client.send_to(b"ask", family.remote_at(PORT))?;
    let asker = receives(&server, b"ask", family.node())?;
    let link = RawLink::open(lab.world.netns(), World::LINK)?;
    let ends = lab.ends_from_world(family.remote(), family.node())?;
    carries(&link, &ends, (PORT, asker.port()), &client, family.remote())?;
    Ok(())
}

#[rstest]
fn pieces_to_a_host_port_may_come_in_any_order(
    #[values(V4, V6)] family: Family,
    #[values("world", "pod")] from: &str,
    #[values(Lab::new, Lab::open)] lab: Make,
) -> Result<()> {
    needs_root!();
    let lab = lab()?;
    let conf = lab.conf().with_host_port(HOST, INSIDE);
    // What a netkit sends can't be brought back to where its program saw it.
    let veth = lab.conf().with("device", "veth");
    let (server, client) = (
        lab.pod_with("server", &conf)?,
        lab.pod_with("client", &veth)?,
    );
    let (link, ends) = if from == "world" {
        let ends = lab.ends_from_world(family.remote(), family.node())?;
        (RawLink::open(lab.world.netns(), World::LINK)?, ends)
    } else {
        let ends = client.ends(family.node())?;
        (RawLink::open(client.netns(), Pod::IFNAME)?, ends)
    };
    let inside = receiver(server.netns(), family.port(INSIDE))?;
    carries(&link, &ends, (SOURCE, HOST), &inside, ends.src)?;
    Ok(())
}

#[rstest]
fn a_process_of_the_node_gets_its_own_pieces(
    #[values(V4, V6)] family: Family,
    #[values(Lab::new, Lab::open)] lab: Make,
) -> Result<()> {
    needs_root!();
    let lab = lab()?;
    let pod = lab.pod("a")?;
    let own = receiver(lab.node.netns(), family.port(PORT))?;
    let link = RawLink::open(lab.world.netns(), World::LINK)?;
    let ends = lab.ends_from_world(family.remote(), family.node())?;
    let meter = Meter::start(&lab.node)?;
    let remote = receiver(lab.world.netns(), family.remote_at(PORT))?;
    let inside = receiver(pod.netns(), family.port(PORT))?;
    for len in REVERSED {
        let payload = payload(len);
        for (socket, at, from) in [
            (&remote, family.node(), family.remote()),
            (&inside, family.pod_gateway(), pod.ip(family)),
        ] {
            socket.send_to(&payload, SocketAddr::new(at, PORT))?;
            receives(&own, &payload, from).context("in order")?;
        }
    }
    // Nobody keeps a piece whose first was seen.
    meter.expect_none(Counter::HeldFragment)?;
    carries(&link, &ends, (SOURCE, PORT), &own, family.remote())?;
    meter.expect_none(Counter::ReleasedFragment)?;
    pod.del()
}

#[rstest]
fn a_piece_too_long_to_be_kept_is_a_counted_drop(#[values(V4, V6)] family: Family) -> Result<()> {
    needs_root!();
    let lab = Lab::open_with_mtu(9000)?;
    let pod = lab.pod("a")?;
    let link = RawLink::open(pod.netns(), Pod::IFNAME)?;
    let meter = Meter::start(&lab.node)?;
    let ends = pod.ends(family.remote())?;
    let pieces = reversed(&ends, (SOURCE, PORT), &payload(16_000), 8000);
    // Its first piece, and the last that comes after it, get out.
    for piece in [&pieces[1], &pieces[2], &pieces[0]] {
        link.send(piece)?;
    }
    meter.expect(Counter::DropFragment, 1)?;
    meter.expect_none(Counter::HeldFragment)
}

#[rstest]
fn a_piece_without_its_first_never_gets_out(#[values(V4, V6)] family: Family) -> Result<()> {
    needs_root!();
    let lab = Lab::open()?;
    let pod = lab.pod("a")?;
    let link = RawLink::open(pod.netns(), Pod::IFNAME)?;
    let world = Capture::start(lab.world.netns(), World::LINK)?;
    let meter = Meter::start(&lab.node)?;
    let ends = pod.ends(family.remote())?;
    let pieces = reversed(&ends, (SOURCE, PORT), &payload(2000), PIECE);
    // More than are kept of one datagram.
    for _ in 0..50 {
        link.send(&pieces[0])?;
    }
    meter.expect(Counter::HeldFragment, 48)?;
    meter.expect(Counter::DropFragment, 2)?;
    let seen = world.frames();
    let out = seen.iter().filter(|bytes| frame::is_fragment(bytes));
    ensure!(out.count() == 0, "pieces came out");
    Ok(())
}

/// A queue that is full when pieces come in disorder costs these pieces, and nothing else.
#[rstest]
fn a_full_queue_costs_pieces_and_no_mapping(#[values(V4, V6)] family: Family) -> Result<()> {
    needs_root!();
    let lab = Lab::open()?;
    let pod = lab.pod("a")?;
    let link = RawLink::open(pod.netns(), Pod::IFNAME)?;
    let remote = family.remote_at(PORT);
    let server = receiver(lab.world.netns(), remote)?;
    let ends = pod.ends(remote.ip())?;
    link.send(&ends.udp(SOURCE, PORT, b"before"))?;
    let seen = receives(&server, b"before", family.node()).context("before")?;
    let flows = || lab.node.flows([pod.at(family, SOURCE), remote]);
    ensure!(!flows()?.is_empty(), "the flow is not known");
    let queue = |arguments: &str| {
        let mut tc = Command::new("tc");
        tc.args(arguments.split(' '));
        lab.node.netns().expect(&mut tc, &[])
    };
    // No packet has so few bytes: each is too much for the queue.
    queue("qdisc add dev eth0 root bfifo limit 1")?;
    let leaving = Capture::start(lab.world.netns(), World::LINK)?;
    for piece in reversed(&ends, (SOURCE, PORT), &payload(2000), PIECE) {
        link.send(&piece)?;
    }
    thread::sleep(SILENCE);
    ensure!(!flows()?.is_empty(), "the flow is forgotten");
    queue("qdisc del dev eth0 root")?;
    link.send(&ends.udp(SOURCE, PORT, b"after"))?;
    let then = receives(&server, b"after", family.node()).context("after")?;
    ensure!(then == seen, "it was {seen} and is {then}");
    for frame in leaving.frames() {
        ensure!(
            frame::read(&frame).is_none_or(|packet| packet.src != pod.ip(family)),
            "the pod's address got out: {frame:02x?}"
        );
    }
    Ok(())
}
