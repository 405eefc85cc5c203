//! What a host port captures, and what it leaves alone.

use std::net::{IpAddr, SocketAddr};

use aya::maps::{HashMap, Map};
use rstest::rstest;
use rtnetlink::LinkDummy;
use serde_json::json;
use underpass_abi::{addr::Addr, map};
use underpass_tests::{
    counter,
    kernel::Facility,
    leak::Traces,
    prelude::*,
    rtnl::Route,
    test_run::{Bench, UNSPEC},
};

use super::{HOST, INSIDE, Scene, both, mapped, misses, node_at, reaches, serve};

/// A second address of the node, on the link to the world.
pub(super) fn second(family: Family) -> IpAddr {
    match family {
        V4 => [192, 0, 2, 3].into(),
        V6 => [0x2001, 0xdb8, 1, 0, 0, 0, 0, 3].into(),
    }
}

pub(super) fn give(lab: &Lab, device: &str, ip: IpAddr) -> Result<()> {
    let bits = Family::of(ip).host_bits();
    lab.node
        .netns()
        .rtnl(|node| node.add_address(device, ip, bits))
}

#[rstest]
fn a_host_address_is_meant_exactly(#[values(V4, V6)] family: Family) -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    give(&lab, "eth0", second(family))?;
    let at = family.node().to_string();
    let mappings = both().map(|mut mapping| {
        mapping["hostIP"] = json!(at);
        mapping
    });
    let conf = mapped(&lab, &mappings);
    let scene = Scene::in_network(family, lab, &conf)?;
    let client = scene.lab.pod("client")?;
    let other = SocketAddr::new(second(family), HOST);
    let world = scene.lab.world.netns();
    reaches(world, node_at(family, HOST), family.gateway())?;
    reaches(client.netns(), node_at(family, HOST), client.ip(family))?;
    misses(world, other)?;
    misses(client.netns(), other)
}

#[rstest]
fn an_address_comes_before_every_address(#[values(V4, V6)] family: Family) -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    give(&lab, "eth0", second(family))?;
    let exact = json!({ "hostPort": HOST, "containerPort": INSIDE, "hostIP": second(family) });
    let precise = lab.pod_with("precise", &mapped(&lab, &[exact]))?;
    // Newer, but less exact.
    let general = lab.pod_with("general", &mapped(&lab, &both()))?;
    for (pod, ip) in [(&precise, second(family)), (&general, family.node())] {
        let _server = tcp::Server::start(pod.netns(), family.port(INSIDE))?;
        let seen = tcp::visit(lab.world.netns(), SocketAddr::new(ip, HOST))?;
        ensure!(seen == family.gateway(), "{ip}: {seen}");
    }
    Ok(())
}

#[rstest]
fn the_unspecified_address_means_its_family(#[values(V4, V6)] family: Family) -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    let mappings = both().map(|mut mapping| {
        mapping["hostIP"] = json!(family.any());
        mapping
    });
    let pod = lab.pod_with("server", &mapped(&lab, &mappings))?;
    for one in Family::BOTH {
        let _servers = serve(&pod, one)?;
        let at = node_at(one, HOST);
        if one == family {
            reaches(lab.world.netns(), at, one.gateway())?;
        } else {
            misses(lab.world.netns(), at)?;
        }
    }
    Ok(())
}

/// Whether a device forwards is one setting of each device to IPv4. To IPv6 it is one of the node, and that of a device says whether it hears routers,
/// as an uplink may that gets its address from one.
#[test]
fn a_port_is_served_where_only_the_node_forwards() -> Result<()> {
    needs_root!();
    let scene = Scene::set(V6)?;
    let node = scene.lab.node.netns();
    node.set_sysctl("net/ipv6/conf/eth0/forwarding", "0")?;
    let (world, at) = (scene.lab.world.netns(), node_at(V6, HOST));
    reaches(world, at, V6.gateway())?;
    // Without either nothing is forwarded, so nothing is served.
    node.set_sysctl("net/ipv6/conf/all/forwarding", "0")?;
    misses(world, at)
}

/// To Kubernetes the port of all addresses and that of one family's are two.
#[rstest]
fn a_port_may_be_asked_for_twice(#[values(V4, V6)] family: Family) -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    lab.pod_with("first", &mapped(&lab, &both()))?.del()?;
    let before = Traces::of(&lab.node)?;
    let again = both().map(|mut mapping| {
        mapping["hostIP"] = json!(family.any());
        mapping
    });
    let pod = lab.pod_with("server", &mapped(&lab, &[both(), again].concat()))?;
    for one in Family::BOTH {
        let _servers = serve(&pod, one)?;
        reaches(lab.world.netns(), node_at(one, HOST), one.gateway())?;
    }
    pod.call_with_result("CHECK").run(&lab.node)?.silence()?;
    pod.del()?;
    before.expect_same(&lab.node)
}

#[rstest]
fn addresses_that_come_and_go_count(#[values(V4, V6)] family: Family) -> Result<()> {
    needs_root!();
    let scene = Scene::set(family)?;
    let (lab, ip) = (&scene.lab, second(family));
    let at = SocketAddr::new(ip, HOST);
    let client = lab.pod("client")?;
    give(lab, "eth0", ip)?;
    reaches(lab.world.netns(), at, family.gateway())?;
    reaches(client.netns(), at, client.ip(family))?;
    lab.node
        .netns()
        .ip(&[format!("address del {ip}/{} dev eth0", family.host_bits())])?;
    misses(lab.world.netns(), at)
}

#[rstest]
fn what_passes_through_the_node_is_not_captured(#[values(V4, V6)] family: Family) -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    lab.world.route_pods()?;
    // Nobody listens in the container with the host port: whoever is sent there is refused.
    let _mapped = lab.pod_with("mapped", &mapped(&lab, &both()))?;
    let (server, client) = (lab.pod("server")?, lab.pod("client")?);
    let _tcp = tcp::Server::start(server.netns(), family.port(HOST))?;
    let _udp = udp::Server::start(server.netns(), family.port(HOST))?;
    let remote = family.remote_at(HOST);
    let _far_tcp = tcp::Server::start(lab.world.netns(), remote)?;
    let _far_udp = udp::Server::start(lab.world.netns(), remote)?;
    let inside = server.at(family, HOST);
    reaches(lab.world.netns(), inside, family.gateway())?;
    reaches(client.netns(), inside, client.ip(family))?;
    reaches(client.netns(), remote, family.node())
}

#[rstest]
fn an_unmapped_port_is_the_hosts_own(#[values(V4, V6)] family: Family) -> Result<()> {
    needs_root!();
    let scene = Scene::set(family)?;
    let host = scene.lab.node.netns();
    let own = node_at(family, INSIDE);
    let _tcp = tcp::Server::start(host, own)?;
    let _udp = udp::Server::start(host, own)?;
    let client = scene.lab.pod("client")?;
    reaches(scene.lab.world.netns(), own, family.gateway())?;
    reaches(client.netns(), own, client.ip(family))
}

#[rstest]
fn a_connection_of_the_host_survives_the_mapping_of_its_port(
    #[values(V4, V6)] family: Family,
) -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    // It is idle for longer than connection tracking usually remembers here.
    let established = "net/netfilter/nf_conntrack_tcp_timeout_established";
    lab.node.netns().set_sysctl(established, "600")?;
    let _first = lab.pod("first")?;
    let at = node_at(family, HOST);
    let _host = tcp::Server::start(lab.node.netns(), at)?;
    let mut old = tcp::Client::connect(lab.world.netns(), at)?;
    old.chat(3)?;
    let pod = lab.pod_with("server", &mapped(&lab, &both()))?;
    old.chat(3)?;
    let mut new = {
        let _server = tcp::Server::start(pod.netns(), family.port(INSIDE))?;
        let mut new = tcp::Client::connect(lab.world.netns(), at)?;
        new.chat(3)?;
        new
    };
    old.chat(3)?;
    pod.del()?;
    // The container's connection is gone with it; the host's is not, and the port is the host's again.
    ensure!(new.chat(1).is_err());
    old.chat(3)?;
    tcp::visit(lab.world.netns(), at)?;
    // Looked at before the container's connection ends: some kernels send its FIN at once, which belongs to nothing.
    lab.firewall.expect_no_invalid()
}

#[rstest]
fn addresses_of_services_are_not_captured(#[values(V4, V6)] family: Family) -> Result<()> {
    needs_root!();
    let scene = Scene::set(family)?;
    let lab = &scene.lab;
    // As local as any other to the kernel: what tells it apart is the map.
    give(lab, "lo", family.service())?;
    let service = format!("{}/{}", family.service(), family.host_bits());
    let route = Route::to(&service).via(family.node());
    lab.world.netns().rtnl(|world| world.add_route(route))?;
    let at = family.service_at(HOST);
    reaches(lab.world.netns(), at, family.gateway())?;
    let mut services: HashMap<_, Addr, u32> =
        Map::HashMap(counter::open(&lab.node, map::SERVICE_ADDRESSES)?).try_into()?;
    services.insert(Addr::from(family.service()), 1, 0)?;
    misses(lab.world.netns(), at)?;
    // It is on no dummy device, which the next ADD notices.
    let _next = lab.pod("next")?;
    let left = services.keys().count();
    ensure!(left == 0, "{left} addresses are left");
    reaches(lab.world.netns(), at, family.gateway())
}

#[test]
fn addresses_of_dummy_devices_are_those_of_services() -> Result<()> {
    needs_root!();
    if Facility::Dummy.is_missing()? {
        return Ok(());
    }
    let lab = Lab::new()?;
    let dummy = LinkDummy::new("kube-ipvs0").build();
    lab.node.netns().rtnl(|node| node.add(dummy))?;
    let services = || -> Result<Vec<IpAddr>> {
        let data = counter::open(&lab.node, map::SERVICE_ADDRESSES)?;
        let known: HashMap<_, Addr, u32> = Map::HashMap(data).try_into()?;
        let mut all = Vec::new();
        for addr in known.keys() {
            all.push(IpAddr::from(addr.context("read an address")?));
        }
        all.sort_unstable();
        Ok(all)
    };
    for family in Family::BOTH {
        give(&lab, "kube-ipvs0", family.service())?;
    }
    let plain = lab.pod("plain")?;
    ensure!(services()?.is_empty(), "no host port, no need to know");
    let mapped = lab.pod_with("mapped", &mapped(&lab, &both()))?;
    ensure!(services()? == Family::BOTH.map(Family::service));
    lab.node.netns().delete_link("kube-ipvs0")?;
    let attachments =
        [&plain, &mapped].map(|pod| json!({ "containerID": pod.name(), "ifname": Pod::IFNAME }));
    underpass_tests::runtime::Call::new("GC")
        .conf(
            &lab.conf()
                .with("cni.dev/valid-attachments", json!(attachments)),
        )
        .run(&lab.node)?
        .silence()?;
    ensure!(services()?.is_empty(), "GC forgets what is gone");
    Ok(())
}

/// What the host sends from a port that is mapped is answered to the host.
#[rstest]
fn answers_to_connected_sockets_of_the_host_are_its_own(
    #[values(V4, V6)] family: Family,
) -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    // Nobody listens in the container: what goes there is refused.
    let _mapped = lab.pod_with("mapped", &mapped(&lab, &both()))?;
    let host = lab.node.netns();
    let far = family.remote_at(INSIDE);
    let near = SocketAddr::new(family.loopback(), INSIDE);
    for (server, at, own) in [
        (lab.world.netns(), far, family.node()),
        (host, near, family.loopback()),
    ] {
        let _server = udp::Server::start(server, at)?;
        let mut client = udp::Client::open_bound(host, SocketAddr::new(own, HOST))?;
        client.connect(at)?;
        client.chat(at, 3).with_context(|| format!("from {at}"))?;
    }
    Ok(())
}

/// The kernel takes no packet to a loopback address from a device: nor do we.
#[rstest]
fn loopback_addresses_are_for_the_host_alone(#[values(V4, V6)] family: Family) -> Result<()> {
    needs_root!();
    let scene = Scene::set(family)?;
    let (lab, client) = (&scene.lab, scene.lab.pod("client")?);
    let loopback = family.loopback();
    for (program, device, ends) in [
        (
            map::FROM_WIRE,
            Node::UPLINK,
            lab.ends_from_world(family.remote(), loopback)?,
        ),
        (map::FROM_POD, client.host_veth(), client.ends(loopback)?),
    ] {
        let bench = Bench::open(&lab.node, program, device)?;
        for frame in [ends.udp(1234, HOST, b"hello"), ends.syn(1234, HOST)] {
            let verdict = bench.run(&frame)?;
            ensure!(verdict.action == UNSPEC, "{program}: {verdict:?}");
            ensure!(verdict.frame == frame, "{program} changed the packet");
        }
    }
    Ok(())
}
