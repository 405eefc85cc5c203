//! TCP that began past strict connection tracking and has to come back to it, where the firewall drops what is INVALID: docs/limitations.md has the
//! list. Each of these stalls, and is counted.

use std::{thread, time::Duration};

use rstest::rstest;
use underpass_tests::{
    prelude::*,
    rtnl::Route,
    second::{Kind, Second},
    traffic::{
        offload,
        option::{Extension, Setting},
    },
    wire::Wire,
    world::World,
};

const PORT: u16 = 443;
const SOURCE: u16 = 45_678;
const INSIDE: u16 = 80;
const SOME: u64 = 1_000_000;
/// Longer than it takes until a flow asks for its way again.
const ASKED: Duration = Duration::from_millis(2_500);
/// So many bytes at most has a packet that leaves by a narrower uplink.
const NARROW: u32 = 1400;

/// What makes a connection come back.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Cause {
    /// Its route leads to a device without Ethernet headers.
    Tunnel,
    /// Its route leads to a device that is no uplink.
    NoUplink,
    /// It has no route any more.
    Nowhere,
    /// Its packets have IP options or an extension header.
    Options,
    /// Its packets have no hop left.
    LastHop,
    /// Its packets have to shrink, and the firewall lets nobody say so.
    Narrower,
}

impl Cause {
    /// Has it happen. What must live as long as it does is returned.
    fn happen(self, lab: &Lab, client: &tcp::Client, family: Family) -> Result<Option<Second>> {
        let to = format!("{}/{}", family.remote(), family.host_bits());
        let node = lab.node.netns();
        match self {
            Self::Tunnel => {
                let second = Second::connect(lab, Kind::Tunnel)?;
                node.ip(&[format!("route replace {to} {}", Second::way(family))])?;
                return Ok(Some(second));
            }
            Self::NoUplink => node.ip(&[
                "link add away type veth peer name gone".to_owned(),
                "link set gone up".to_owned(),
                "link set away up".to_owned(),
                format!("route replace {to} dev away"),
            ])?,
            Self::Nowhere => node.rtnl(|node| node.add_route(Route::to(&to).blackhole()))?,
            Self::Options if family == V4 => client.set(&[Setting::padded_header()])?,
            Self::Options => client.set(&[Setting::extension_header(Extension::Destination)])?,
            Self::LastHop => client.set(&[Setting::hops(family, 1)])?,
            Self::Narrower => {
                for (end, device) in [(lab.world.netns(), World::LINK), (node, Node::UPLINK)] {
                    end.set_mtu(device, NARROW)?;
                }
            }
        }
        Ok(None)
    }
}

#[rstest]
fn what_has_to_come_back_stalls_and_is_counted(
    #[values(V4, V6)] family: Family,
    #[values(
        Cause::Tunnel,
        Cause::NoUplink,
        Cause::Nowhere,
        Cause::Options,
        Cause::LastHop,
        Cause::Narrower
    )]
    cause: Cause,
) -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    // Where the fixture's firewall lets everybody hear it, that of others does not.
    lab.firewall.load(
        "insert rule inet lab output icmp type destination-unreachable ct state invalid drop
         insert rule inet lab output icmpv6 type packet-too-big ct state invalid drop",
    )?;
    lab.firewall.tolerate_invalid();
    // Else what comes back is a new connection in its middle, and what is said of it belongs to that.
    lab.firewall.know_openings_only()?;
    let pod = lab.pod("a")?;
    // Else segments are seen before they are cut.
    offload::take_off(pod.netns(), Pod::IFNAME)?;
    let remote = family.remote_at(PORT);
    let _server = tcp::Server::start(lab.world.netns(), remote)?;
    let mut client = tcp::Client::connect_from(pod.netns(), SOURCE, remote)?;
    let meter = Meter::start(&lab.node)?;
    client.exchange(SOME, SOME)?;
    meter.expect(Counter::BypassWire, 50)?;
    lab.firewall
        .outlast(family, &["tcp", &format!("sport={SOURCE}")])?;
    client.chat(5)?;
    meter.expect_none(Counter::CameBack)?;
    let _second = cause.happen(&lab, &client, family)?;
    // The routing table is asked about once a second.
    thread::sleep(ASKED);
    let outcome = client.exchange(SOME, SOME);
    ensure!(outcome.is_err(), "it goes on: {outcome:?}");
    meter.expect(Counter::CameBack, 1)
}

/// An uplink that does not filter reverse paths takes the packets of any connection, as the stack does; from one that does they go to the
/// stack, whose filter and firewall drop them.
#[rstest]
fn packets_arrive_by_another_uplink(
    #[values(V4, V6)] family: Family,
    #[values("0", "1", "2")] rp_filter: &str,
    #[values(true, false)] is_liberal: bool,
) -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    lab.firewall.set_liberal(is_liberal)?;
    lab.world.route_pods()?;
    let _second = Second::connect(&lab, Kind::Wire(Wire::Ethernet))?;
    for device in ["all", Node::UPLINK, Second::LINK] {
        let key = format!("net/ipv4/conf/{device}/rp_filter");
        lab.node.netns().set_sysctl(&key, rp_filter)?;
    }
    let pod = lab.pod_with("a", &lab.conf().with("ipMasq", false))?;
    let remote = family.remote_at(PORT);
    let _server = tcp::Server::start(lab.world.netns(), remote)?;
    let mut client = tcp::Client::connect_from(pod.netns(), SOURCE, remote)?;
    client.exchange(SOME, SOME)?;
    // It asks in the name of the address that it sends from, and a node with that filter does not answer.
    let link = lab
        .node
        .netns()
        .ip_json(&["link", "show", "dev", Second::LINK])?;
    let mac = link[0]["address"].as_str().context("a MAC")?;
    let neighbours = Family::BOTH.map(|family| {
        let node = Second::node(family);
        format!(
            "neighbour replace {node} lladdr {mac} dev {} nud permanent",
            Second::LINK
        )
    });
    lab.world.netns().ip(&neighbours)?;
    Second::answer(&lab)?;
    let meter = Meter::start(&lab.node)?;
    let is_strict = rp_filter == "1";
    if is_strict {
        lab.firewall.tolerate_invalid();
    }
    let outcome = client.exchange(SOME, SOME);
    // IPv6 has no such filter: what is let through by the stack is for connection tracking to judge.
    let goes_on = !is_strict || family == V6 && is_liberal;
    ensure!(outcome.is_ok() == goes_on, "{outcome:?}");
    if is_strict && !is_liberal {
        return meter.expect(Counter::CameBack, 1);
    }
    if goes_on {
        meter.expect_none(Counter::CameBack)?;
    }
    Ok(())
}

/// Who speaks first after a silence, and whose way is another one since.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Speaks {
    Pod,
    World,
}

/// Where connection tracking is liberal it is kept fed. Of a connection that was silent for longer than it remembers it knows nothing all the
/// same, and each way may have changed meanwhile: that goes on past it.
#[rstest]
fn ways_change_in_a_silence(
    #[values(V4, V6)] family: Family,
    #[values(Speaks::Pod, Speaks::World)] first: Speaks,
    #[values(Speaks::Pod, Speaks::World)] moved: Speaks,
) -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    lab.firewall.set_liberal(true)?;
    // What is nobody's is dropped as surely as what is invalid.
    lab.firewall.know_openings_only()?;
    lab.world.route_pods()?;
    let _second = Second::connect(&lab, Kind::Wire(Wire::Ethernet))?;
    for side in [lab.node.netns(), lab.world.netns()] {
        side.set_sysctl("net/ipv4/conf/all/rp_filter", "0")?;
    }
    let pod = lab.pod_with("a", &lab.conf().with("ipMasq", false))?;
    let (from, netns, at) = match first {
        Speaks::Pod => (pod.netns(), lab.world.netns(), family.remote_at(PORT)),
        Speaks::World => (lab.world.netns(), pod.netns(), pod.at(family, PORT)),
    };
    let _server = tcp::Server::start(netns, at)?;
    let mut client = tcp::Client::connect_from(from, SOURCE, at)?;
    client.exchange(SOME, SOME)?;
    lab.firewall
        .outlast(family, &["tcp", &format!("sport={SOURCE}")])?;
    if moved == Speaks::World {
        Second::answer(&lab)?;
    } else {
        let route = format!(
            "route replace {} {}",
            family.everywhere(),
            Second::way(family)
        );
        lab.node.netns().ip(&[route])?;
    }
    let meter = Meter::start(&lab.node)?;
    client.exchange(SOME, SOME)?;
    meter.expect_none(Counter::CameBack)?;
    meter.expect(Counter::BypassWire, 10)?;
    lab.firewall.expect_no_invalid()
}

/// Both directions or neither: when one has no way any more, the other leaves the bypass as well, and both are back when it has.
#[rstest]
fn a_direction_without_a_way_ends_both(
    #[values(V4, V6)] family: Family,
    #[values("blackhole", "away")] way: &str,
) -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    lab.world.route_pods()?;
    let node = lab.node.netns();
    // Else it is the stack that is asked first, every second.
    for key in ["udp_timeout", "udp_timeout_stream"] {
        node.set_sysctl(&format!("net/netfilter/nf_conntrack_{key}"), "60")?;
    }
    node.ip(&[
        "link add away type veth peer name gone",
        "link set gone up",
        "link set away up",
    ]
    .map(str::to_owned))?;
    let pod = lab.pod_with("a", &lab.conf().with("ipMasq", false))?;
    let remote = family.remote_at(PORT);
    let inside = pod.at(family, INSIDE);
    let _server = udp::Server::start(pod.netns(), inside)?;
    let mut client = udp::Client::open_bound(lab.world.netns(), remote)?;
    // Connection tracking makes a stream of it meanwhile.
    for _ in 0..10 {
        client.chat(inside, 5)?;
        thread::sleep(ASKED / 5);
    }
    let meter = Meter::start(&lab.node)?;
    client.chat(inside, 10)?;
    meter.expect(Counter::BypassPeer, 5)?;
    let to = format!("{}/{}", family.remote(), family.host_bits());
    let route = match way {
        "blackhole" => format!("blackhole {to}"),
        _ => format!("{to} dev away"),
    };
    node.ip(&[format!("route add {route}")])?;
    let meter = Meter::start(&lab.node)?;
    eventually("the flow is suspended", || {
        client.hears_nothing(inside)?;
        ensure!(meter.read()?.get(Counter::Suspended) > 0);
        Ok(())
    })?;
    let meter = Meter::start(&lab.node)?;
    for _ in 0..3 {
        client.hears_nothing(inside)?;
    }
    meter.expect_no_bypass()?;
    node.ip(&[format!("route delete {route}")])?;
    client.chat(inside, 10)?;
    let meter = Meter::start(&lab.node)?;
    client.chat(inside, 10)?;
    meter.expect(Counter::BypassPeer, 5)
}
