//! Ordinary traffic with headers and checksums that few send, through masquerade with another port and through host ports.

use std::net::SocketAddr;

use etherparse::{SlicedPacket, TransportSlice};
use rstest::rstest;
use serde_json::json;
use underpass_tests::{
    capture::Capture,
    frame,
    netns::Netns,
    prelude::*,
    traffic::{
        PATIENCE, offload,
        option::{Extension, Setting},
    },
    world::World,
};

const PORT: u16 = 443;
const SOURCE: u16 = 45_678;
const HOST: u16 = 8080;
const INSIDE: u16 = 80;

/// Two containers, of which the first serves a port of the node, and a server in the world.
struct Scene {
    _tcp: [tcp::Server; 2],
    _udp: [udp::Server; 2],
    server: Pod,
    client: Pod,
    family: Family,
    lab: Lab,
}

impl Scene {
    fn set(family: Family, options: &[Setting]) -> Result<Self> {
        Self::around(Lab::new()?, family, options)
    }

    fn around(lab: Lab, family: Family, options: &[Setting]) -> Result<Self> {
        let mappings = ["tcp", "udp"].map(
            |protocol| json!({ "hostPort": HOST, "containerPort": INSIDE, "protocol": protocol }),
        );
        let conf = lab
            .conf()
            .with("runtimeConfig", json!({ "portMappings": mappings }));
        let (server, client) = (lab.pod_with("server", &conf)?, lab.pod("client")?);
        let inside = (server.netns(), family.port(INSIDE));
        let beyond = (lab.world.netns(), family.remote_at(PORT));
        let (a, b) = (
            tcp::Server::start(inside.0, inside.1)?,
            tcp::Server::start(beyond.0, beyond.1)?,
        );
        let (c, d) = (
            udp::Server::start_with(inside.0, inside.1, options)?,
            udp::Server::start_with(beyond.0, beyond.1, options)?,
        );
        Ok(Self {
            _tcp: [a, b],
            _udp: [c, d],
            server,
            client,
            family,
            lab,
        })
    }

    /// Traffic with these options on every way; each client has the port that another one has already.
    fn talk(&self, options: &[Setting], since: Since) -> Result<()> {
        let family = self.family;
        let remote = family.remote_at(PORT);
        let asked = SocketAddr::new(family.node(), HOST);
        let meter = Meter::start(&self.lab.node)?;
        let mut open = Vec::new();
        for pod in [&self.server, &self.client] {
            let netns = pod.netns();
            open.push(converse(netns, SOURCE, remote, options, since)?);
        }
        meter.expect(Counter::PortChanged, 2)?;
        for (netns, seen) in [
            (self.lab.world.netns(), family.gateway()),
            (self.client.netns(), self.client.ip(family)),
        ] {
            let ends = converse(netns, SOURCE + 1, asked, options, since)?;
            ensure!(ends.by_tcp.ip() == seen, "{ends:?}");
            ensure!(ends.by_udp.ip() == seen, "{ends:?}");
        }
        for ends in open {
            ensure!(ends.by_tcp.ip() == family.node(), "{ends:?}");
            ensure!(ends.by_udp.ip() == family.node(), "{ends:?}");
        }
        ensure!(meter.read()?.dropped() == 0, "{:?}", meter.read()?);
        Ok(())
    }
}

/// Whom the server saw.
#[derive(Debug)]
struct Seen {
    by_tcp: SocketAddr,
    by_udp: SocketAddr,
}

/// Since when the packets of a connection have options.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Since {
    Opening,
    /// Connection tracking has not seen the packets before by then, and takes what it sees now only if it is not strict about windows.
    Middle,
}

impl Since {
    /// A lab whose connection tracking takes such packets.
    fn lab(self) -> Result<Lab> {
        let lab = Lab::new()?;
        lab.firewall.set_liberal(self == Self::Middle)?;
        Ok(lab)
    }
}

fn converse(
    netns: &Netns,
    source: u16,
    to: SocketAddr,
    options: &[Setting],
    since: Since,
) -> Result<Seen> {
    let is_for_both = |setting: &&Setting| !setting.is_of_udp();
    let settings: Vec<Setting> = options.iter().filter(is_for_both).cloned().collect();
    let first = if since == Since::Opening {
        &settings[..]
    } else {
        &[]
    };
    let from = Family::of(to.ip()).port(source);
    let mut stream = tcp::Client::connect_with(netns, from, to, first)?;
    stream.chat(2)?;
    stream.set(&settings)?;
    let by_tcp = stream.exchange(300_000, 300_000)?.seen;
    let mut socket = udp::Client::open_at(netns, Family::of(to.ip()), source)?;
    socket.set(options)?;
    let mut by_udp = socket.chat(to, 5)?.seen;
    for len in [0, 1, 1300] {
        by_udp = socket.ask(to, len)?.seen;
    }
    Ok(Seen { by_tcp, by_udp })
}

#[rstest]
fn without_checksum_offload(
    #[values(V4, V6)] family: Family,
    #[values("containers", "uplink", "everywhere")] place: &str,
) -> Result<()> {
    needs_root!();
    let scene = Scene::set(family, &[])?;
    let (node, world) = (scene.lab.node.netns(), scene.lab.world.netns());
    if place != "uplink" {
        for pod in [&scene.server, &scene.client] {
            offload::take_off(pod.netns(), Pod::IFNAME)?;
            offload::take_off(node, pod.host_veth())?;
        }
    }
    if place != "containers" {
        offload::take_off(node, Node::UPLINK)?;
        offload::take_off(world, World::LINK)?;
    }
    scene.talk(&[], Since::Opening)
}

#[rstest]
fn with_a_checksum_of_zero(#[values(V4, V6)] family: Family) -> Result<()> {
    needs_root!();
    let options = Setting::no_checksum(family);
    let scene = Scene::set(family, &options)?;
    let captures = [
        Capture::start(scene.lab.world.netns(), World::LINK)?,
        Capture::start(scene.server.netns(), Pod::IFNAME)?,
    ];
    scene.talk(&options, Since::Middle)?;
    for capture in captures {
        let datagram = |bytes: &[u8]| checksum(bytes).is_some();
        capture
            .wait_for(PATIENCE, datagram)
            .context("datagrams were captured")?;
        for bytes in capture.frames() {
            let sum = checksum(&bytes).unwrap_or(0);
            ensure!(
                sum == 0,
                "{:?} has the checksum {sum:x}",
                frame::read(&bytes)
            );
        }
    }
    Ok(())
}

/// The checksum of a datagram.
fn checksum(frame: &[u8]) -> Option<u16> {
    match SlicedPacket::from_ethernet(frame).ok()?.transport? {
        TransportSlice::Udp(udp) => Some(udp.checksum()),
        _ => None,
    }
}

#[rstest]
fn with_options_in_the_header(#[values(Since::Opening, Since::Middle)] since: Since) -> Result<()> {
    needs_root!();
    let options = [Setting::padded_header()];
    let scene = Scene::around(since.lab()?, V4, &[])?;
    let capture = Capture::start(scene.lab.world.netns(), World::LINK)?;
    scene.talk(&options, since)?;
    let is_long = |bytes: &[u8]| frame::read(bytes).is_some() && bytes[14] & 0xf > 5;
    capture
        .wait_for(PATIENCE, is_long)
        .context("no header with options arrived")?;
    Ok(())
}

#[rstest]
fn with_extension_headers(
    #[values(Extension::HopByHop, Extension::Destination)] kind: Extension,
    #[values(Since::Opening, Since::Middle)] since: Since,
) -> Result<()> {
    needs_root!();
    let options = [Setting::extension_header(kind)];
    let scene = Scene::around(since.lab()?, V6, &[])?;
    // GSO packets with such a header stall where they are forwarded: the node answers that they are too big.
    for pod in [&scene.server, &scene.client] {
        offload::take_off(pod.netns(), Pod::IFNAME)?;
    }
    offload::take_off(scene.lab.world.netns(), World::LINK)?;
    let capture = Capture::start(scene.lab.world.netns(), World::LINK)?;
    scene.talk(&options, since)?;
    let next = match kind {
        Extension::HopByHop => 0,
        Extension::Destination => 60,
    };
    for protocol in [6, 17] {
        let is_it = |bytes: &[u8]| {
            frame::read(bytes).is_some_and(|read| read.protocol == protocol) && bytes[20] == next
        };
        capture
            .wait_for(PATIENCE, is_it)
            .with_context(|| format!("no extension header before protocol {protocol} arrived"))?;
    }
    Ok(())
}
