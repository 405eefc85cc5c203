//! Every route across a node, in every mode, for both families: all that is sent arrives, the server sees the client that it should, and
//! the packets go the way that they should.

use std::{
    net::{IpAddr, SocketAddr},
    time::Instant,
};

use rstest::rstest;
use underpass_tests::{netns::Netns, prelude::*, traffic::serve};

use Mode::{Learned, LearnedWithoutFirewall, Off, OffWithoutFirewall};
use Route::{PodToHostPort, PodToPod, PodToWorld, WorldToHostPort, WorldToPod};

/// Where all servers listen.
const PORT: u16 = 80;
/// The port of the node that leads to the server of a pod.
const HOST: u16 = 8080;

/// Who asks, and where.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Route {
    /// A pod asks another one at its address.
    PodToPod,
    /// A pod asks another one at the node's address.
    PodToHostPort,
    /// A pod asks a server of the world, and is masqueraded.
    PodToWorld,
    /// The world asks a pod at its address, to which it has a route.
    WorldToPod,
    /// The world asks a pod at the node's address.
    WorldToHostPort,
}

/// What the node does with the packets.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Mode {
    Learned,
    Off,
    /// There is no connection tracking either.
    LearnedWithoutFirewall,
    OffWithoutFirewall,
}

impl Mode {
    const fn bypass(self) -> &'static str {
        match self {
            Learned | LearnedWithoutFirewall => "learned",
            Off | OffWithoutFirewall => "off",
        }
    }

    fn lab(self) -> Result<Lab> {
        match self {
            Learned | Off => Lab::new(),
            LearnedWithoutFirewall | OffWithoutFirewall => Lab::open(),
        }
    }
}

/// A client and a server at the two ends of a route.
struct Scene {
    _servers: (tcp::Server, udp::Server),
    /// A pod in the client's place, if one is, and the other one.
    client: Pod,
    server: Pod,
    lab: Lab,
    route: Route,
    family: Family,
}

impl Scene {
    fn set(route: Route, family: Family, lab: Lab, mode: Mode) -> Result<Self> {
        let conf = lab.conf().with("bypass", mode.bypass());
        let client = lab.pod_with("client", &conf)?;
        let server = lab.pod_with("server", &conf.with_host_port(HOST, PORT))?;
        if route == WorldToPod {
            lab.world.route_pods()?;
        }
        let servers = match route {
            PodToWorld => serve(lab.world.netns(), family.remote_at(PORT))?,
            _ => serve(server.netns(), family.port(PORT))?,
        };
        Ok(Self {
            _servers: servers,
            client,
            server,
            lab,
            route,
            family,
        })
    }

    /// Where the client is.
    fn client(&self) -> &Netns {
        match self.route {
            PodToPod | PodToHostPort | PodToWorld => self.client.netns(),
            WorldToPod | WorldToHostPort => self.lab.world.netns(),
        }
    }

    /// Where it finds the server.
    fn server(&self) -> SocketAddr {
        match self.route {
            PodToPod | WorldToPod => self.server.at(self.family, PORT),
            PodToHostPort | WorldToHostPort => SocketAddr::new(self.family.node(), HOST),
            PodToWorld => self.family.remote_at(PORT),
        }
    }

    /// Whom the server must see.
    fn seen(&self) -> IpAddr {
        match self.route {
            PodToPod | PodToHostPort => self.client.ip(self.family),
            PodToWorld => self.family.node(),
            WorldToPod | WorldToHostPort => self.family.gateway(),
        }
    }

    /// Whether an echo request has somebody to go to.
    fn has_echo(&self) -> bool {
        !matches!(self.route, PodToHostPort | WorldToHostPort)
    }

    fn carries_streams(&self, lengths: &[u64]) -> Result<()> {
        let mut client = tcp::Client::connect(self.client(), self.server())?;
        let port = client.local()?.port();
        for &length in lengths {
            let seen = client.exchange(length, length)?.seen;
            ensure!(
                seen == SocketAddr::new(self.seen(), port),
                "by TCP the server saw {seen}, the client's port is {port}"
            );
        }
        Ok(())
    }

    /// Whole packets and fragments: an answer is longer than the question by the asker's address.
    fn carries_datagrams(&self, mtu: u16) -> Result<()> {
        let whole = usize::from(mtu) - self.family.header_len() - 8;
        let mut unconnected = udp::Client::open(self.client(), self.family)?;
        let mut connected = udp::Client::open(self.client(), self.family)?;
        connected.connect(self.server())?;
        for length in [0, 1, 1000, whole - 60, whole, whole + 1, 30_000] {
            for client in [&mut unconnected, &mut connected] {
                // An answer from another address or port than was asked fails.
                let seen = client.ask(self.server(), length)?.seen;
                ensure!(seen.ip() == self.seen(), "by UDP the server saw {seen}");
            }
        }
        Ok(())
    }

    /// Fails unless as many packets as this took the bypass in each direction.
    fn expect_bypass(&self, meter: &Meter<'_>, packets: u64) -> Result<()> {
        match self.route {
            PodToPod | PodToHostPort => meter.expect(Counter::BypassPeer, 2 * packets)?,
            PodToWorld | WorldToPod | WorldToHostPort => {
                meter.expect(Counter::BypassWire, packets)?;
                meter.expect(Counter::BypassPeer, packets)?;
            }
        }
        match self.route {
            PodToWorld => meter.expect(Counter::Masqueraded, 1),
            PodToHostPort | WorldToHostPort => meter.expect(Counter::HostPort, 1),
            PodToPod | WorldToPod => meter.expect_none(Counter::Masqueraded),
        }
    }
}

#[rstest]
fn everything_is_carried(
    #[values(PodToPod, PodToHostPort, PodToWorld, WorldToPod, WorldToHostPort)] route: Route,
    #[values(V4, V6)] family: Family,
    #[values(Learned, Off, LearnedWithoutFirewall, OffWithoutFirewall)] mode: Mode,
) -> Result<()> {
    needs_root!();
    let scene = Scene::set(route, family, mode.lab()?, mode)?;
    let meter = Meter::start(&scene.lab.node)?;
    scene.carries_streams(&[1, 1_448, 8_948, 65_536, 5_000_000])?;
    scene.carries_datagrams(1500)?;
    if scene.has_echo() {
        let mut ping = ping::Ping::new(scene.client(), scene.server().ip())?;
        for length in [56, 4000] {
            ping.echo(length)?;
        }
    }
    if mode.bypass() == "off" {
        meter.expect_none(Counter::Learned)?;
        return meter.expect_no_bypass();
    }
    scene.expect_bypass(&meter, 10)
}

#[rstest]
fn large_frames_are_carried(
    #[values(PodToPod, PodToHostPort, PodToWorld, WorldToPod, WorldToHostPort)] route: Route,
    #[values(V4, V6)] family: Family,
) -> Result<()> {
    const MTU: u16 = 9000;
    needs_root!();
    let scene = Scene::set(route, family, Lab::with_mtu(MTU.into())?, Learned)?;
    scene.carries_streams(&[8_948, 12_000_000])?;
    scene.carries_datagrams(MTU)
}

#[rstest]
fn a_connection_takes_the_bypass_after_its_first_packets(
    #[values(PodToPod, PodToHostPort, PodToWorld, WorldToPod, WorldToHostPort)] route: Route,
    #[values(V4, V6)] family: Family,
) -> Result<()> {
    needs_root!();
    let scene = Scene::set(route, family, Lab::new()?, Learned)?;
    let firewall = &scene.lab.firewall;
    for end in ["dport", "sport"] {
        firewall.count_forwarded("flow", &format!("tcp {end} {PORT}"))?;
    }
    let meter = Meter::start(&scene.lab.node)?;
    let mut client = tcp::Client::connect(scene.client(), scene.server())?;
    client.chat(50)?;
    client.exchange(5_000_000, 5_000_000)?;
    firewall.expect_opening("flow")?;
    meter.expect(Counter::Learned, 1)?;
    scene.expect_bypass(&meter, 75)
}

#[rstest]
fn datagrams_take_the_bypass_after_the_first(
    #[values(PodToPod, PodToHostPort, PodToWorld, WorldToPod, WorldToHostPort)] route: Route,
    #[values(V4, V6)] family: Family,
) -> Result<()> {
    needs_root!();
    let scene = Scene::set(route, family, Lab::new()?, Learned)?;
    let firewall = &scene.lab.firewall;
    for end in ["dport", "sport"] {
        firewall.count_forwarded("flow", &format!("udp {end} {PORT}"))?;
    }
    let meter = Meter::start(&scene.lab.node)?;
    let start = Instant::now();
    udp::Client::open(scene.client(), family)?.chat(scene.server(), 100)?;
    firewall.expect_fed("flow", start)?;
    scene.expect_bypass(&meter, 96)
}

#[rstest]
fn echoes_take_the_bypass_after_the_first(
    #[values(PodToPod, PodToWorld, WorldToPod)] route: Route,
    #[values(V4, V6)] family: Family,
) -> Result<()> {
    needs_root!();
    let scene = Scene::set(route, family, Lab::new()?, Learned)?;
    let firewall = &scene.lab.firewall;
    firewall.count_forwarded("echo", "meta l4proto { icmp, icmpv6 }")?;
    let meter = Meter::start(&scene.lab.node)?;
    let start = Instant::now();
    ping::Ping::new(scene.client(), scene.server().ip())?.series(50)?;
    firewall.expect_fed("echo", start)?;
    scene.expect_bypass(&meter, 46)
}

/// The node's firewall has the last word on every flow.
#[rstest]
fn what_the_firewall_drops_never_arrives(
    #[values(PodToPod, PodToHostPort, PodToWorld, WorldToPod, WorldToHostPort)] route: Route,
    #[values(V4, V6)] family: Family,
) -> Result<()> {
    needs_root!();
    let scene = Scene::set(route, family, Lab::new()?, Learned)?;
    let firewall = &scene.lab.firewall;
    firewall.drop_forwarded(&format!("th dport {PORT}"))?;
    firewall.drop_forwarded("icmp type echo-request")?;
    firewall.drop_forwarded("icmpv6 type echo-request")?;
    let meter = Meter::start(&scene.lab.node)?;
    for _ in 0..2 {
        tcp::refuses(scene.client(), scene.server())?;
        udp::Client::open(scene.client(), family)?.hears_nothing(scene.server())?;
    }
    if scene.has_echo() {
        let mut ping = ping::Ping::new(scene.client(), scene.server().ip())?;
        ping.hears_nothing()?;
        ping.hears_nothing()?;
    }
    meter.expect_no_bypass()?;
    // What comes first in the chain lets all pass again.
    firewall.accept_forwarded(&format!("th dport {PORT}"))?;
    tcp::visit(scene.client(), scene.server())?;
    udp::Client::open(scene.client(), family)?.chat(scene.server(), 5)?;
    Ok(())
}

#[rstest]
fn the_node_and_its_neighbour_answer_echoes(#[values(V4, V6)] family: Family) -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    let pod = lab.pod("a")?;
    ping::ping(pod.netns(), family.gateway())?;
    ping::ping(pod.netns(), family.node())
}
