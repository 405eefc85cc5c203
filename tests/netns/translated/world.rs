//! The same between a pod of the node and the world.

use std::{
    net::{IpAddr, SocketAddr},
    thread,
    time::Duration,
};

use rstest::rstest;
use underpass_tests::{
    capture::Capture,
    frame,
    netfilter::{
        Transport,
        kube_proxy::{
            Mode::{self, Iptables, Nftables},
            Policy, Service,
        },
    },
    netns::Netns,
    prelude::*,
    rtnl::Route,
    second::{Kind, Second},
    wire::Wire,
    world::World,
};

use super::{MANY, MOST, ask_until_moved, at_once, service, set_liberal, talk_on};
use crate::{
    kube_proxy::{BY_POD, BY_WORLD, PORT, SOURCE, Scene, crosses, node_at},
    routers,
};

/// Talks to a Service, by UDP and by TCP, in which half of the packets leave the node and half come to it. The one who answers must see
/// this address.
fn reaches(scene: &Scene, netns: &Netns, service: SocketAddr, expected: IpAddr) -> Result<()> {
    let meter = Meter::start(&scene.lab.node)?;
    let mut client = udp::Client::open(netns, Family::of(service.ip()))?;
    let seen = client.chat(service, MANY)?.seen.ip();
    ensure!(seen == expected, "UDP to {service} came from {seen}");
    crosses(&meter, MOST)?;
    for _ in 0..3 {
        let meter = Meter::start(&scene.lab.node)?;
        let mut client = tcp::Client::connect(netns, service)?;
        let seen = client.chat(MANY)?.ip();
        ensure!(seen == expected, "TCP to {service} came from {seen}");
        client.exchange(3_000_000, 3_000_000)?;
        crosses(&meter, MOST)?;
    }
    Ok(())
}

/// The endpoint is on another node: the answer comes back to the pod's own address.
#[rstest]
fn a_pod_reaches_the_world_by_a_cluster_ip(
    #[values(V4, V6)] family: Family,
    #[values(Iptables, Nftables)] mode: Mode,
) -> Result<()> {
    needs_root!();
    let scene = Scene::routed(family, mode, Policy::Cluster)?;
    set_liberal(&scene.lab, true)?;
    let client = &scene.client;
    let service = family.service_at(BY_WORLD);
    reaches(&scene, client.netns(), service, client.ip(family))
}

/// kube-proxy masquerades what comes to a port of the node: the answer comes back to the node.
#[rstest]
fn a_pod_reaches_the_world_by_a_node_port(
    #[values(V4, V6)] family: Family,
    #[values(Iptables, Nftables)] mode: Mode,
) -> Result<()> {
    needs_root!();
    let scene = Scene::routed(family, mode, Policy::Cluster)?;
    set_liberal(&scene.lab, true)?;
    let service = node_at(family, BY_WORLD);
    reaches(&scene, scene.client.netns(), service, family.node())
}

/// The client, or the node in its place, is seen by a pod that may be masqueraded itself.
#[rstest]
fn the_world_reaches_a_pod_by_a_node_port(
    #[values(V4, V6)] family: Family,
    #[values(Iptables, Nftables)] mode: Mode,
    #[values(Policy::Cluster, Policy::Local)] policy: Policy,
    #[values("masqueraded", "routed")] how: &str,
) -> Result<()> {
    needs_root!();
    let scene = if how == "routed" {
        Scene::routed(family, mode, policy)?
    } else {
        Scene::with(family, mode, policy)?
    };
    set_liberal(&scene.lab, true)?;
    let seen = match policy {
        Policy::Cluster => family.pod_gateway(),
        Policy::Local => family.gateway(),
    };
    let world = scene.lab.world.netns();
    reaches(&scene, world, node_at(family, BY_POD), seen)
}

/// An address that no device has and that is routed to the node, as that of a load balancer. kube-proxy masquerades what comes to a cluster
/// IP from outside.
#[rstest]
fn the_world_reaches_a_pod_by_an_address_of_nobody(
    #[values(V4, V6)] family: Family,
    #[values(Iptables, Nftables)] mode: Mode,
) -> Result<()> {
    needs_root!();
    let scene = Scene::routed(family, mode, Policy::Cluster)?;
    set_liberal(&scene.lab, true)?;
    let world = scene.lab.world.netns();
    let address = format!("{}/{}", family.service(), family.host_bits());
    world.rtnl(|world| world.add_route(Route::to(&address).via(family.node())))?;
    let service = family.service_at(BY_POD);
    reaches(&scene, world, service, family.pod_gateway())
}

/// Which way such a flow goes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Ask {
    /// A pod, for an endpoint in the world, by the cluster IP.
    ClusterIp,
    /// A pod, for an endpoint in the world, by a port of the node.
    Outwards,
    /// The world, for a pod, by a port of the node.
    Inwards,
}

impl Ask {
    /// Who asks, and whom.
    fn ends(self, scene: &Scene, family: Family) -> (&Netns, SocketAddr) {
        match self {
            Self::ClusterIp => (scene.client.netns(), family.service_at(BY_WORLD)),
            Self::Outwards => (scene.client.netns(), node_at(family, BY_WORLD)),
            Self::Inwards => (scene.lab.world.netns(), node_at(family, BY_POD)),
        }
    }
}

/// Connection tracking forgets everything: datagrams go on, by a translation that is made anew.
#[rstest]
fn connection_tracking_is_flushed(
    #[values(V4, V6)] family: Family,
    #[values(Ask::ClusterIp, Ask::Outwards, Ask::Inwards)] ask: Ask,
) -> Result<()> {
    needs_root!();
    let scene = Scene::routed(family, Iptables, Policy::Cluster)?;
    let (client, service) = ask.ends(&scene, family);
    let mut client = udp::Client::open(client, family)?;
    for _ in 0..3 {
        let meter = Meter::start(&scene.lab.node)?;
        talk_on(&mut client, service)?;
        crosses(&meter, MOST)?;
        scene.lab.firewall.delete_entries(family, "udp")?;
    }
    Ok(())
}

/// An endpoint in the world goes, and kube-proxy deletes what connection tracking has of it.
#[rstest]
fn an_endpoint_goes(
    #[values(V4, V6)] family: Family,
    #[values(Iptables, Nftables)] mode: Mode,
) -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    lab.world.route_pods()?;
    let client = lab.pod_with("client", &lab.conf().with("ipMasq", false))?;
    let [old, new] = [family.remote(), family.other_remote()].map(|ip| SocketAddr::new(ip, PORT));
    let cluster = family.service_at(BY_POD);
    let proxy = |endpoint| {
        lab.firewall
            .proxy(mode, &[service(family, Transport::Udp, vec![endpoint])])
    };
    proxy(old)?;
    let _servers = [old, new]
        .into_iter()
        .map(|at| udp::Server::start(lab.world.netns(), at))
        .collect::<Result<Vec<_>>>()?;
    let mut asking = udp::Client::open(client.netns(), family)?;
    let meter = Meter::start(&lab.node)?;
    asking.chat(cluster, MANY)?;
    meter.expect(Counter::BypassWire, MOST / 2)?;

    proxy(new)?;
    lab.firewall.delete_entries(family, "udp")?;
    let line = Capture::start(lab.world.netns(), World::LINK)?;
    ask_until_moved(&mut asking, cluster)?;
    let frames_to = |at: SocketAddr| {
        let is_to =
            |bytes: &&Vec<u8>| frame::read(bytes).is_some_and(|packet| packet.dst == at.ip());
        line.frames().iter().filter(is_to).count()
    };
    let before = frames_to(old);
    let meter = Meter::start(&lab.node)?;
    asking.chat(cluster, MANY)?;
    meter.expect(Counter::BypassWire, MOST / 2)?;
    let (after, at_new) = (frames_to(old), frames_to(new));
    // A node that is slow to take the rules feeds connection tracking with the first question: the old one gets none then.
    ensure!(
        after == before && at_new >= MANY,
        "the old one got {before} frames while it was still asked, {after} in all, and the new one {at_new}"
    );
    Ok(())
}

/// A lab with another uplink, by which nothing leaves yet.
fn two_uplinks(family: Family) -> Result<(Second, Scene)> {
    let lab = Lab::new()?;
    let second = Second::connect(&lab, Kind::Wire(Wire::Ethernet))?;
    lab.world.route_pods()?;
    let scene = Scene::in_lab(lab, family, Iptables, Policy::Cluster, false)?;
    set_liberal(&scene.lab, true)?;
    Ok((second, scene))
}

/// Has the node send by the other uplink what goes to this address, and waits until whatever is known is looked at again: a second.
fn leave_by_second(scene: &Scene, to: IpAddr) -> Result<()> {
    let family = Family::of(to);
    let to = format!("{to}/{}", family.host_bits());
    let route = Route::to(&to).via(Second::gateway(family)).by(Second::LINK);
    scene
        .lab
        .node
        .netns()
        .rtnl(|node| node.replace_route(route))?;
    thread::sleep(Duration::from_millis(1500));
    Ok(())
}

/// The way of what is learned changes: to another uplink, for those that ask and those that answer.
#[rstest]
fn the_route_changes(
    #[values(V4, V6)] family: Family,
    #[values(Ask::ClusterIp, Ask::Inwards)] ask: Ask,
) -> Result<()> {
    needs_root!();
    let (_second, scene) = two_uplinks(family)?;
    let (client, service) = ask.ends(&scene, family);
    let mut datagrams = udp::Client::open(client, family)?;
    let mut connection = tcp::Client::connect(client, service)?;
    let mut talk = || -> Result<()> {
        let meter = Meter::start(&scene.lab.node)?;
        datagrams.chat(service, MANY)?;
        connection.chat(MANY)?;
        connection.exchange(1_000_000, 1_000_000)?;
        crosses(&meter, 2 * MOST)
    };
    talk()?;
    let world = match ask {
        Ask::Inwards => family.gateway(),
        Ask::ClusterIp | Ask::Outwards => family.remote(),
    };
    leave_by_second(&scene, world)?;
    let line = Capture::start(scene.lab.world.netns(), Second::LINK)?;
    talk()?;
    let by_second = line.frames().len();
    ensure!(by_second > MANY, "{by_second} frames by the new way");
    Ok(())
}

/// What the stack masquerades has an address of the uplink by which it left: by another one the stack itself gives such a flow up, and
/// begins anew with its next datagram.
#[rstest]
fn the_route_changes_under_a_masquerade(#[values(V4, V6)] family: Family) -> Result<()> {
    needs_root!();
    let (_second, scene) = two_uplinks(family)?;
    let (client, service) = Ask::Outwards.ends(&scene, family);
    let mut datagrams = udp::Client::open(client, family)?;
    let seen = datagrams.chat(service, MANY)?.seen.ip();
    ensure!(seen == family.node(), "{seen}");
    leave_by_second(&scene, family.remote())?;
    let _lost = datagrams.ask(service, 100);
    let meter = Meter::start(&scene.lab.node)?;
    let seen = datagrams.chat(service, MANY)?.seen.ip();
    ensure!(seen == Second::node(family), "{seen}");
    meter.expect(Counter::BypassWire, MOST / 2)
}

/// Where the node has two ways, each flow has the one that the stack has chosen: transfers come to their end whoever decides.
#[rstest]
#[case(V4, "net/ipv4", 0)]
#[case(V4, "net/ipv4", 1)]
#[case(V6, "net/ipv6", 0)]
#[case(V6, "net/ipv6", 1)]
#[case(V6, "net/ipv6", 2)]
#[case(V4, "net/ipv4", 2)]
fn two_next_hops(
    #[case] family: Family,
    #[case] folder: &str,
    #[case] policy: u32,
    #[values(Ask::ClusterIp, Ask::Outwards, Ask::Inwards)] ask: Ask,
) -> Result<()> {
    needs_root!();
    let (_second, scene) = two_uplinks(family)?;
    Second::share(&scene.lab)?;
    let key = format!("{folder}/fib_multipath_hash_policy");
    scene
        .lab
        .node
        .netns()
        .set_sysctl(&key, &policy.to_string())?;
    let (client, service) = ask.ends(&scene, family);
    at_once(12, |_| {
        tcp::Client::connect(client, service)?.exchange(1_000_000, 1_000_000)?;
        udp::Client::open(client, family)?.chat(service, 20)?;
        Ok(())
    })
}

/// From one source port to a Service and straight to its endpoint, in turn.
#[rstest]
fn a_source_port_is_shared(
    #[values(V4, V6)] family: Family,
    #[values(Ask::ClusterIp, Ask::Outwards, Ask::Inwards)] ask: Ask,
) -> Result<()> {
    needs_root!();
    let scene = Scene::routed(family, Nftables, Policy::Local)?;
    set_liberal(&scene.lab, true)?;
    let (client, service) = ask.ends(&scene, family);
    let direct = match ask {
        Ask::Inwards => scene.backend.at(family, PORT),
        Ask::ClusterIp | Ask::Outwards => family.remote_at(PORT),
    };
    let mut datagrams = udp::Client::open(client, family)?;
    for times in [1, 2, 3, 10, 1] {
        for to in [service, direct] {
            datagrams.chat(to, times)?;
            let mut tcp = tcp::Client::connect_from(client, SOURCE, to)?;
            tcp.chat(times)?;
            tcp.exchange(100_000, 100_000)?;
        }
    }
    Ok(())
}

/// Datagrams in pieces go by the stack, and the others stay where they are.
#[rstest]
fn pieces_between_whole_ones(
    #[values(V4, V6)] family: Family,
    #[values(Ask::ClusterIp, Ask::Outwards, Ask::Inwards)] ask: Ask,
) -> Result<()> {
    needs_root!();
    let scene = Scene::routed(family, Nftables, Policy::Cluster)?;
    let (client, service) = ask.ends(&scene, family);
    let mut client = udp::Client::open(client, family)?;
    client.chat(service, MANY)?;
    let meter = Meter::start(&scene.lab.node)?;
    for _ in 0..5 {
        client.ask(service, 4_000)?;
        client.chat(service, 20)?;
    }
    meter.expect_none(Counter::Forgotten)?;
    crosses(&meter, 150)
}

/// A router beyond the uplink says what is too long for the link behind it: about packets that have left the node by the bypass, with
/// addresses that their sender does not know.
#[rstest]
fn a_narrow_link_is_found_out(
    #[values(V4, V6)] family: Family,
    #[values(Policy::Cluster, Policy::Local)] policy: Policy,
) -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    lab.world.route_pods()?;
    let far = routers::far(&lab)?;
    let [_, host] = routers::beyond(family);
    let conf = lab.conf().with("ipMasq", false);
    let (client, backend) = (
        lab.pod_with("client", &conf)?,
        lab.pod_with("backend", &conf)?,
    );
    let service = |port, endpoint| Service {
        name: format!("at-{port}"),
        transport: Transport::Tcp,
        cluster: family.service_at(port),
        node_port: Some(node_at(family, port).port()),
        policy,
        endpoints: vec![endpoint],
    };
    let outside = SocketAddr::new(host, PORT);
    let services = [
        service(BY_WORLD, outside),
        service(BY_POD, backend.at(family, PORT)),
    ];
    lab.firewall.proxy(Iptables, &services)?;
    set_liberal(&lab, true)?;
    let _outside = tcp::Server::start(&far, outside)?;
    let _inside = tcp::Server::start(backend.netns(), backend.at(family, PORT))?;
    let meter = Meter::start(&lab.node)?;
    // To the endpoint by the cluster IP and by the port of the node, and from the endpoint by that.
    for asked in [family.service_at(BY_WORLD), node_at(family, BY_WORLD)] {
        tcp::Client::connect(client.netns(), asked)?.exchange(500_000, 1_000)?;
    }
    tcp::Client::connect(&far, node_at(family, BY_POD))?.exchange(1_000, 500_000)?;
    meter.expect(Counter::BypassWire, MOST)
}
