//! SCTP through masquerade and host ports, with other ports than its sender chose: checksums are right, and answers find back.

use std::net::SocketAddr;

use rstest::rstest;
use serde_json::json;
use underpass_tests::{
    capture::Capture,
    frame::{
        Ends, as_fragment,
        sctp::{self, chunk},
    },
    netns::Netns,
    prelude::*,
    traffic::{PATIENCE, raw::RawLink, sctp as sockets},
    world::World,
};

const PORT: u16 = 3868;
const SOURCE: u16 = 45_678;
/// A port of the node, and the port of the container that it leads to.
const HOST: u16 = 9000;
const INSIDE: u16 = 36_412;
/// What is said in an association, there and back. A kernel that speaks SCTP aborts what it did not open, so nothing is said by
/// which it might be misunderstood.
const TALK: [(u8, u8); 4] = [
    (chunk::INIT, chunk::INIT_ACK),
    (chunk::COOKIE_ECHO, chunk::COOKIE_ACK),
    (chunk::DATA, chunk::SACK),
    (chunk::HEARTBEAT, chunk::HEARTBEAT_ACK),
];

/// One end of an association, played by hand.
pub(crate) struct End {
    pub(crate) link: RawLink,
    pub(crate) seen: Capture,
}

impl End {
    pub(crate) fn of(netns: &Netns, interface: &str) -> Result<Self> {
        // A kernel with SCTP would answer as well, and sets the checksum of a packet to zero for a moment while it checks it.
        netns.nft(
            "table inet silence {
                chain prerouting { type filter hook prerouting priority raw; meta l4proto sctp drop; }
            }",
        )?;
        Ok(Self {
            link: RawLink::open(netns, interface)?,
            seen: Capture::start(netns, interface)?,
        })
    }

    /// The packet with a chunk of this type, its checksum right.
    fn hears(&self, kind: u8) -> Result<sctp::Sctp> {
        let is_it = |frame: &[u8]| sctp::read(frame).is_some_and(|packet| packet.chunk == kind);
        let packet = self
            .seen
            .wait_for(PATIENCE, is_it)
            .and_then(|frame| sctp::read(&frame))
            .with_context(|| format!("no packet with a chunk of type {kind}"))?;
        ensure!(packet.sum == packet.expected_sum, "{packet:x?}");
        Ok(packet)
    }
}

/// Plays the opening of an association and some more; whom the server saw.
pub(crate) fn play(
    client: &End,
    (ends, source, dport): (Ends, u16, u16),
    server: &End,
    server_macs: Ends,
) -> Result<SocketAddr> {
    let asked = SocketAddr::new(ends.dst, dport);
    let mut seen = None;
    for ((there, back), len) in TALK.into_iter().zip([16, 20, 1, 1000]) {
        client
            .link
            .send(&ends.sctp(source, dport, there, &vec![back; len]))?;
        let init = server.hears(there)?;
        ensure!(
            *seen.get_or_insert(init.src) == init.src,
            "{init:?} after {seen:?}"
        );
        let answer = server_macs.from_ip(init.dst.ip()).to_ip(init.src.ip());
        server.link.send(&answer.sctp(
            init.dst.port(),
            init.src.port(),
            back,
            &vec![back; len + 3],
        ))?;
        let ack = client.hears(back)?;
        ensure!(ack.src == asked, "{ack:?}");
        ensure!(ack.dst == SocketAddr::new(ends.src, source), "{ack:?}");
    }
    seen.context("nothing was seen")
}

#[rstest]
fn masqueraded_associations_with_one_source_port_are_told_apart(
    #[values(V4, V6)] family: Family,
) -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    let pods = [lab.pod("a")?, lab.pod("b")?];
    let from_world = lab.ends_from_world(family.remote(), family.node())?;
    let meter = Meter::start(&lab.node)?;
    let kept = SocketAddr::new(family.node(), SOURCE);
    for (pod, keeps) in pods.iter().zip([true, false]) {
        let end = End::of(pod.netns(), Pod::IFNAME)?;
        let world = End::of(lab.world.netns(), World::LINK)?;
        let ends = pod.ends(family.remote())?;
        let seen = play(&end, (ends, SOURCE, PORT), &world, from_world)?;
        ensure!(seen.ip() == family.node(), "{seen}");
        ensure!((seen == kept) == keeps, "{seen}");
    }
    meter.expect(Counter::PortChanged, 1)?;
    // What opens, keeps and ends an association is for connection tracking to see, and so is what it is fed with.
    let counted = meter.read()?;
    let past = counted.bypassed() + counted.get(Counter::Fed);
    ensure!(past >= 4, "{counted:?}");
    Ok(())
}

#[rstest]
fn a_host_port_leads_to_another_port(#[values(V4, V6)] family: Family) -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    let mapping = json!({ "hostPort": HOST, "containerPort": INSIDE, "protocol": "sctp" });
    let conf = lab
        .conf()
        .with("runtimeConfig", json!({ "portMappings": [mapping] }));
    let pod = lab.pod_with("a", &conf)?;
    let server = End::of(pod.netns(), Pod::IFNAME)?;
    let server_ends = pod.ends(family.remote())?;

    let world = End::of(lab.world.netns(), World::LINK)?;
    let from_world = lab.ends_from_world(family.remote(), family.node())?;
    let seen = play(&world, (from_world, SOURCE, HOST), &server, server_ends)?;
    ensure!(seen == family.remote_at(SOURCE), "{seen}");

    let other = lab.pod("b")?;
    let client = End::of(other.netns(), Pod::IFNAME)?;
    let server = End::of(pod.netns(), Pod::IFNAME)?;
    let seen = play(
        &client,
        (other.ends(family.node())?, SOURCE, HOST),
        &server,
        server_ends,
    )?;
    ensure!(seen == other.at(family, SOURCE), "{seen}");
    let arrived = server.hears(chunk::INIT)?;
    ensure!(arrived.dst == pod.at(family, INSIDE), "{arrived:?}");
    Ok(())
}

#[rstest]
fn two_flows_that_would_look_the_same_get_two_ports(
    #[values(V4, V6)] family: Family,
) -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    let mapping = json!({ "hostPort": HOST, "containerPort": INSIDE, "protocol": "sctp" });
    let conf = lab
        .conf()
        .with("runtimeConfig", json!({ "portMappings": [mapping] }));
    let (server, client) = (lab.pod_with("server", &conf)?, lab.pod("client")?);
    let back = server.ends(family.remote())?;
    let meter = Meter::start(&lab.node)?;
    for (to, port, keeps) in [
        (server.ip(family), INSIDE, true),
        (family.node(), HOST, false),
        (server.ip(family), INSIDE, true),
    ] {
        let [here, there] = [&client, &server].map(|pod| End::of(pod.netns(), Pod::IFNAME));
        let seen = play(&here?, (client.ends(to)?, SOURCE, port), &there?, back)?;
        ensure!(seen.ip() == client.ip(family), "at {to} it saw {seen}");
        ensure!((seen.port() == SOURCE) == keeps, "at {to} it saw {seen}");
    }
    // The container itself, which its gateway stands for.
    let own = End::of(server.netns(), Pod::IFNAME)?;
    let ends = server.ends(family.node())?;
    let seen = play(&own, (ends, SOURCE, HOST), &own, back)?;
    ensure!(seen.ip() == family.pod_gateway(), "it saw {seen}");
    ensure!(meter.read()?.dropped() == 0, "{:?}", meter.read()?);
    Ok(())
}

#[rstest]
fn pieces_whose_port_must_change_are_dropped_and_counted(
    #[values(V4, V6)] family: Family,
) -> Result<()> {
    needs_root!();
    // Connection tracking would keep them, and wait for the others.
    let lab = Lab::open()?;
    let (a, b) = (lab.pod("a")?, lab.pod("b")?);
    let world = End::of(lab.world.netns(), World::LINK)?;
    let meter = Meter::start(&lab.node)?;
    for (pod, dropped) in [(&a, 0), (&b, 2)] {
        let link = RawLink::open(pod.netns(), Pod::IFNAME)?;
        let ends = pod.ends(family.remote())?;
        let whole = ends.sctp(SOURCE, PORT, chunk::DATA, &[7; 100]);
        link.send(&as_fragment(&whole, 0, true))?;
        link.send(&as_fragment(
            &ends.protocol(sctp::PROTOCOL, &[7; 40]),
            20,
            false,
        ))?;
        meter.expect(Counter::DropFragment, dropped)?;
        let arrived = || {
            let frames = world.seen.frames();
            frames
                .iter()
                .filter(|frame| {
                    sctp::read(frame).is_some() || underpass_tests::frame::is_fragment(frame)
                })
                .count()
        };
        world.seen.wait_for(PATIENCE, |_| arrived() == 2);
        ensure!(arrived() == 2, "{} pieces arrived", arrived());
    }
    meter.expect_none(Counter::DropMalformed)
}

#[rstest]
fn sockets_talk_through_masquerade_and_host_ports(#[values(V4, V6)] family: Family) -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    if sockets::is_missing(lab.node.netns()) {
        return Ok(());
    }
    let remote = family.remote_at(PORT);
    let _server = sockets::Server::start(lab.world.netns(), remote)?;
    let kept = SocketAddr::new(family.node(), SOURCE);
    let mapping = json!({ "hostPort": HOST, "containerPort": INSIDE, "protocol": "sctp" });
    let conf = lab
        .conf()
        .with("runtimeConfig", json!({ "portMappings": [mapping] }));
    let (a, b) = (lab.pod_with("a", &conf)?, lab.pod("b")?);
    let seen = sockets::call(a.netns(), a.at(family, SOURCE), remote)?;
    ensure!(seen == kept, "{seen}");
    let seen = sockets::call(b.netns(), b.at(family, SOURCE), remote)?;
    ensure!(seen.ip() == family.node() && seen != kept, "{seen}");

    let _inside = sockets::Server::start(a.netns(), a.at(family, INSIDE))?;
    let asked = SocketAddr::new(family.node(), HOST);
    let from = SocketAddr::new(family.gateway(), SOURCE);
    let seen = sockets::call(lab.world.netns(), from, asked)?;
    ensure!(seen == from, "{seen}");
    let from = b.at(family, SOURCE + 1);
    let seen = sockets::call(b.netns(), from, asked)?;
    ensure!(seen == from, "{seen}");
    Ok(())
}
