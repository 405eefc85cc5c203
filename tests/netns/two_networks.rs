//! A container in two networks: each of its addresses is reached, whichever interface the answers leave by.

use std::{
    fs,
    net::{IpAddr, SocketAddr},
    os::unix::fs::MetadataExt as _,
    sync::Barrier,
    thread,
};

use rstest::rstest;
use serde_json::{Value, json};
use underpass_tests::{
    counter,
    leak::Traces,
    netns::Netns,
    rtnl::Route,
    runtime::{Call, Conf},
    traffic,
};

use underpass_tests::prelude::*;

/// The interface to the second network.
const SECOND: &str = "net1";
/// The port that the container serves at each of its addresses.
const INSIDE: u16 = 80;
/// The ports of the node that lead there: by the first network, and by the second.
const HOST: [u16; 2] = [8080, 8081];
/// Enough bytes for the bypass to be taken.
const MUCH: u64 = 3_000_000;

/// Which of its networks gives the container a default route.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Routed {
    First,
    Second,
    Both,
}

/// The range of the second network.
fn range(family: Family) -> &'static str {
    match family {
        V4 => "10.99.0.0/24",
        V6 => "fd00:99::/64",
    }
}

/// The second network; the first is the default one of the node.
fn second(lab: &Lab) -> Conf {
    let ranges = Family::BOTH.map(|family| json!([{ "subnet": range(family) }]));
    lab.conf()
        .with("name", "second")
        .with_ipam("ranges", ranges.to_vec())
}

fn without_routes(conf: Conf) -> Conf {
    conf.with_ipam("routes", Vec::<Value>::new())
}

/// A container in both networks, with servers at both its addresses.
struct Scene {
    _servers: Vec<(tcp::Server, udp::Server)>,
    ends: [Pod; 2],
    lab: Lab,
}

impl Scene {
    fn set(family: Family, routed: Routed) -> Result<Self> {
        let lab = Lab::new()?;
        lab.world.route_pods()?;
        let route = Route::to(range(family)).via(family.node());
        lab.world.netns().rtnl(|rtnl| rtnl.add_route(route))?;
        let (mut one, mut other) = (lab.conf(), second(&lab));
        if routed == Routed::First {
            other = without_routes(other);
        }
        if routed == Routed::Second {
            one = without_routes(one);
        }
        let first = lab.pod_with("both", &one.with_host_port(HOST[0], INSIDE))?;
        let also = first.also(SECOND, &other.with_host_port(HOST[1], INSIDE))?;
        let ends = [first, also];
        let servers = ends
            .iter()
            .map(|end| traffic::serve(end.netns(), end.at(family, INSIDE)))
            .collect::<Result<_>>()?;
        Ok(Self {
            _servers: servers,
            ends,
            lab,
        })
    }

    fn netns(&self) -> &Netns {
        self.ends[0].netns()
    }
}

/// Fails unless a client reaches a server by TCP and UDP and is seen as `expected`.
fn reaches(client: &Netns, from: IpAddr, to: SocketAddr, expected: IpAddr) -> Result<()> {
    let from = SocketAddr::new(from, 0);
    let seen = tcp::Client::connect_between(client, from, to)?
        .exchange(MUCH, MUCH)?
        .seen;
    ensure!(seen.ip() == expected, "by TCP {to} saw {seen}");
    let seen = udp::Client::open_bound(client, from)?.chat(to, 20)?.seen;
    ensure!(seen.ip() == expected, "by UDP {to} saw {seen}");
    Ok(())
}

#[rstest]
fn every_address_is_reached(
    #[values(V4, V6)] family: Family,
    #[values(Routed::First, Routed::Second, Routed::Both)] routed: Routed,
) -> Result<()> {
    needs_root!();
    let scene = Scene::set(family, routed)?;
    let lab = &scene.lab;
    let clients = [lab.pod("first")?, lab.pod_with("other", &second(lab))?];
    for end in &scene.ends {
        let at = end.at(family, INSIDE);
        for client in &clients {
            let meter = Meter::start(&lab.node)?;
            let own = client.ip(family);
            reaches(client.netns(), own, at, own).with_context(|| format!("{at} from {own}"))?;
            ensure!(meter.read()?.bypassed() > 0, "{at} from {own}: no bypass");
            ping::ping(client.netns(), at.ip())?;
        }
        let world = family.gateway();
        reaches(lab.world.netns(), world, at, world)
            .with_context(|| format!("{at} from the world"))?;
        reaches(
            lab.node.netns(),
            family.any(),
            at,
            end_gateway(end, family)?,
        )
        .with_context(|| format!("{at} from the node"))?;
    }
    lab.firewall.expect_no_invalid()
}

/// The address that the node has on its end of the veth.
fn end_gateway(end: &Pod, family: Family) -> Result<IpAddr> {
    let ips = end.result()["ips"].as_array().context("no ips")?;
    let gateways = ips
        .iter()
        .filter_map(|ip| ip["gateway"].as_str()?.parse().ok());
    gateways
        .into_iter()
        .find(|&gateway: &IpAddr| Family::of(gateway) == family)
        .context("no gateway")
}

/// By the ports of the node that either network maps, also from the container itself.
#[rstest]
fn host_ports_lead_to_either(
    #[values(V4, V6)] family: Family,
    #[values(Routed::First, Routed::Second, Routed::Both)] routed: Routed,
) -> Result<()> {
    needs_root!();
    let scene = Scene::set(family, routed)?;
    let lab = &scene.lab;
    let client = lab.pod("client")?;
    for (end, port) in scene.ends.iter().zip(HOST) {
        let at = SocketAddr::new(family.node(), port);
        let world = family.gateway();
        reaches(lab.world.netns(), world, at, world)
            .with_context(|| format!("{at} from the world"))?;
        let own = client.ip(family);
        reaches(client.netns(), own, at, own).with_context(|| format!("{at} from a pod"))?;
        let gateway = end_gateway(end, family)?;
        for own in &scene.ends {
            let own = own.ip(family);
            reaches(scene.netns(), own, at, gateway)
                .with_context(|| format!("{at} from the container's own {own}"))?;
        }
        tcp::visit(lab.node.netns(), SocketAddr::new(family.loopback(), port))
            .with_context(|| format!("{port} of the loopback device"))?;
    }
    lab.firewall.expect_no_invalid()
}

/// With either address as the source, by whichever interface has the route.
#[rstest]
fn the_world_is_reached_from_either_address(
    #[values(V4, V6)] family: Family,
    #[values(Routed::First, Routed::Second, Routed::Both)] routed: Routed,
) -> Result<()> {
    needs_root!();
    let scene = Scene::set(family, routed)?;
    let remote = family.remote_at(443);
    let _servers = traffic::serve(scene.lab.world.netns(), remote)?;
    for end in &scene.ends {
        let meter = Meter::start(&scene.lab.node)?;
        reaches(scene.netns(), end.ip(family), remote, family.node())
            .with_context(|| format!("from {}", end.ip(family)))?;
        meter.expect(Counter::Masqueraded, 2)?;
        meter.expect(Counter::BypassWire, 1)?;
    }
    scene.lab.firewall.expect_no_invalid()
}

/// The way out changes in the middle of a connection, inside the container.
#[rstest]
fn a_connection_changes_its_interface(#[values(V4, V6)] family: Family) -> Result<()> {
    needs_root!();
    let scene = Scene::set(family, Routed::First)?;
    let remote = family.remote_at(443);
    let _servers = traffic::serve(scene.lab.world.netns(), remote)?;
    let asked = SocketAddr::new(family.node(), HOST[0]);
    let mut outward = tcp::Client::connect(scene.netns(), remote)?;
    let mut inward = tcp::Client::connect(scene.lab.world.netns(), asked)?;
    for round in 0..4 {
        outward.exchange(MUCH, MUCH)?;
        inward.exchange(MUCH, MUCH)?;
        let other = &scene.ends[1 - round % 2];
        let interface = [SECOND, Pod::IFNAME][round % 2];
        let route = format!(
            "route replace {} via {} dev {interface}",
            family.everywhere(),
            end_gateway(other, family)?
        );
        scene.netns().ip(&[route])?;
    }
    outward.exchange(MUCH, MUCH)?;
    inward.exchange(MUCH, MUCH)?;
    scene.lab.firewall.expect_no_invalid()
}

/// Another container's address stays another's, and so does that of an interface that is gone.
#[rstest]
fn what_is_not_its_own_is_dropped(#[values(V4, V6)] family: Family) -> Result<()> {
    needs_root!();
    let scene = Scene::set(family, Routed::First)?;
    let lab = &scene.lab;
    let bystander = lab.pod_with("bystander", &second(lab))?;
    let remote = family.remote_at(443);
    let _server = udp::Server::start(lab.world.netns(), remote)?;
    let meter = Meter::start(&lab.node)?;
    let stolen = [bystander.ip(family), scene.ends[1].ip(family)];
    let [first, also] = scene.ends;
    also.del()?;
    for address in stolen {
        first
            .netns()
            .rtnl(|rtnl| rtnl.add_address("lo", address, family.host_bits()))?;
        let mut forger = udp::Client::open_bound(first.netns(), SocketAddr::new(address, 0))?;
        forger.hears_nothing(remote)?;
    }
    meter.expect(Counter::DropSourceAddress, 2)
}

/// Each attachment is checked and deleted by itself, in either order, and the other goes on.
#[rstest]
fn one_goes_and_the_other_stays(
    #[values(V4, V6)] family: Family,
    #[values(0, 1)] gone: usize,
) -> Result<()> {
    needs_root!();
    let Scene {
        _servers,
        ends,
        lab,
    } = Scene::set(family, Routed::Both)?;
    for end in &ends {
        end.call_with_result("CHECK").run(&lab.node)?.silence()?;
    }
    let [first, also] = ends;
    let (goes, stays) = if gone == 0 {
        (first, also)
    } else {
        (also, first)
    };
    let lost = goes.ip(family);
    goes.del()?;
    stays.call_with_result("CHECK").run(&lab.node)?.silence()?;
    let client = lab.pod("client")?;
    let own = client.ip(family);
    reaches(client.netns(), own, stays.at(family, INSIDE), own)?;
    let port = HOST[1 - gone];
    let world = family.gateway();
    reaches(
        lab.world.netns(),
        world,
        SocketAddr::new(family.node(), port),
        world,
    )?;
    ensure!(stays.ip(family) != lost, "both had {lost}");
    tcp::refuses(
        lab.world.netns(),
        SocketAddr::new(family.node(), HOST[gone]),
    )
}

/// A runtime may make both calls at the same time.
#[test]
fn both_at_once() -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    lab.pod_with("loads", &lab.conf().with_host_port(1, 1))?
        .del()?;
    let before = Traces::of(&lab.node)?;
    let netns = lab.node.netns().sibling("both")?;
    let path = netns.path().display().to_string();
    let attachments = [
        (Pod::IFNAME, lab.conf().with_host_port(HOST[0], INSIDE)),
        (SECOND, second(&lab).with_host_port(HOST[1], INSIDE)),
    ];
    for round in 0..10 {
        let at_once = |verb: &str| -> Result<Vec<Value>> {
            let start = Barrier::new(attachments.len());
            thread::scope(|scope| {
                let calls: Vec<_> = attachments
                    .iter()
                    .map(|(ifname, conf)| {
                        let (call, start) = (Call::new(verb), &start);
                        let call = call.attachment("both", &path, ifname).conf(conf);
                        let node = &lab.node;
                        scope.spawn(move || {
                            start.wait();
                            call.run(node)
                        })
                    })
                    .collect();
                calls
                    .into_iter()
                    .map(|call| {
                        let reply = call.join().expect("no panic")?;
                        if verb == "ADD" {
                            reply.result()
                        } else {
                            reply.silence().map(|()| Value::Null)
                        }
                    })
                    .collect()
            })
        };
        let results = at_once("ADD").with_context(|| format!("round {round}"))?;
        for ((ifname, conf), result) in attachments.iter().zip(results) {
            let conf = conf.clone().with("prevResult", result);
            let check = Call::new("CHECK").attachment("both", &path, ifname);
            check.conf(&conf).run(&lab.node)?.silence()?;
        }
        at_once("DEL").with_context(|| format!("round {round}"))?;
        before.expect_same(&lab.node)?;
    }
    Ok(())
}

/// One network twice: the answers of both addresses leave by the interface that came first.
#[rstest]
fn the_same_network_twice(#[values(V4, V6)] family: Family) -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    let first = lab.pod("both")?;
    let also = first.also(SECOND, &lab.conf())?;
    let client = lab.pod("client")?;
    for end in [&first, &also] {
        let at = end.at(family, INSIDE);
        let _servers = traffic::serve(first.netns(), at)?;
        let own = client.ip(family);
        reaches(client.netns(), own, at, own).with_context(|| format!("{at}"))?;
    }
    lab.firewall.expect_no_invalid()
}

/// A number of a network namespace is given away again: who has it now is not who had it.
#[rstest]
fn who_gets_a_used_number_gets_no_addresses(#[values(V4, V6)] family: Family) -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    let victim = lab.pod("victim")?;
    let remote = family.remote_at(443);
    let _server = udp::Server::start(lab.world.netns(), remote)?;
    let netns = lab.node.netns().sibling("heir")?;
    let number = netns
        .run(|| fs::metadata("/proc/thread-self/ns/net"))?
        .ino();
    counter::renumber(&lab.node, victim.host_veth(), u32::try_from(number)?)?;
    let heir = Pod::add_to(&lab.node, netns, &lab.conf())?;
    let meter = Meter::start(&lab.node)?;
    let stolen = victim.ip(family);
    heir.netns()
        .rtnl(|rtnl| rtnl.add_address("lo", stolen, family.host_bits()))?;
    udp::Client::open_bound(heir.netns(), SocketAddr::new(stolen, 0))?.hears_nothing(remote)?;
    meter.expect(Counter::DropSourceAddress, 1)?;
    udp::Client::open(victim.netns(), family)?.chat(remote, 3)?;
    Ok(())
}

/// The second network has no bypass: a connection that moves there goes on in the stack, and so do its answers.
#[rstest]
fn a_connection_moves_to_a_network_without_bypass(#[values(V4, V6)] family: Family) -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    lab.firewall.set_liberal(true)?;
    let first = lab.pod("both")?;
    let also = first.also(SECOND, &without_routes(second(&lab)).with("bypass", "off"))?;
    let server = lab.pod("server")?;
    let at = server.at(family, INSIDE);
    let _server = tcp::Server::start(server.netns(), at)?;
    let mut client =
        tcp::Client::connect_between(first.netns(), SocketAddr::new(first.ip(family), 0), at)?;
    let meter = Meter::start(&lab.node)?;
    client.exchange(MUCH, MUCH)?;
    meter.expect(Counter::BypassPeer, 1)?;
    let route = format!(
        "route replace {}/{} via {} dev {SECOND}",
        at.ip(),
        family.host_bits(),
        end_gateway(&also, family)?
    );
    first.netns().ip(&[route])?;
    client.exchange(MUCH, MUCH)?;
    let meter = Meter::start(&lab.node)?;
    client.exchange(MUCH, MUCH)?;
    meter.expect_no_bypass()?;
    lab.firewall.expect_no_invalid()
}

/// Of two default routes the first network's counts, for each packet: an answer is awaited where the question came from.
#[rstest]
fn of_two_default_routes_the_first_counts(#[values(V4, V6)] family: Family) -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    let pod = lab.pod("a")?;
    let also = pod.also(SECOND, &second(&lab))?;
    let remote = family.remote().to_string();
    for round in 0..8 {
        let route = pod.netns().ip_json(&["route", "get", &remote])?;
        ensure!(route[0]["dev"] == Pod::IFNAME, "round {round}: {route}");
    }
    also.call_with_result("CHECK").run(&lab.node)?.silence()?;
    pod.call_with_result("CHECK").run(&lab.node)?.silence()
}
