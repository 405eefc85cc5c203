//! Services by kube-proxy's own rules, in both of its modes. Connection tracking is strict here, so connections that they translate stay in
//! the stack, and datagrams take the bypass ([`translated`](crate::translated)), unless the node is one end or neither, or masquerades
//! them a second time. What goes straight to the same place always does.

use std::net::{IpAddr, SocketAddr};

use rstest::rstest;
use underpass_tests::{
    netfilter::{
        Transport,
        kube_proxy::{
            Mode::{self, Iptables, Nftables},
            Policy, Service,
        },
    },
    netns::Netns,
    prelude::*,
    traffic,
};

/// Where the backends listen.
pub(crate) const PORT: u16 = 8080;
pub(crate) const SOURCE: u16 = 45_678;

/// Ports of the Services, all at one cluster IP.
pub(crate) const BY_POD: u16 = 80;
pub(crate) const BY_WORLD: u16 = 81;
const BY_NOBODY: u16 = 82;

/// How much higher the port of the node is.
pub(crate) const NODE_PORT: u16 = 30_000;

/// A pod that asks, a pod and a server in the world that answer, and Services in front of these and of nobody.
pub(crate) struct Scene {
    _servers: [(tcp::Server, udp::Server); 2],
    pub(crate) client: Pod,
    pub(crate) backend: Pod,
    pub(crate) lab: Lab,
}

impl Scene {
    pub(crate) fn set(family: Family, mode: Mode) -> Result<Self> {
        Self::with(family, mode, Policy::Cluster)
    }

    pub(crate) fn with(family: Family, mode: Mode, policy: Policy) -> Result<Self> {
        Self::in_lab(Lab::new()?, family, mode, policy, true)
    }

    /// The world sees the addresses of the pods.
    pub(crate) fn routed(family: Family, mode: Mode, policy: Policy) -> Result<Self> {
        let lab = Lab::new()?;
        lab.world.route_pods()?;
        Self::in_lab(lab, family, mode, policy, false)
    }

    pub(crate) fn in_lab(
        lab: Lab,
        family: Family,
        mode: Mode,
        policy: Policy,
        masquerade: bool,
    ) -> Result<Self> {
        let conf = lab.conf().with("ipMasq", masquerade);
        let (client, backend) = (
            lab.pod_with("client", &conf)?,
            lab.pod_with("backend", &conf)?,
        );
        let server = family.remote_at(PORT);
        let services = [
            ("pod", BY_POD, vec![backend.at(family, PORT)]),
            ("world", BY_WORLD, vec![server]),
            ("nobody", BY_NOBODY, vec![]),
        ];
        let services: Vec<Service> = services
            .into_iter()
            .flat_map(|(name, port, endpoints)| {
                [Transport::Tcp, Transport::Udp].map(|transport| Service {
                    name: name.to_owned(),
                    transport,
                    cluster: family.service_at(port),
                    node_port: Some(NODE_PORT + port),
                    policy,
                    endpoints: endpoints.clone(),
                })
            })
            .collect();
        lab.firewall.proxy(mode, &services)?;
        lab.firewall
            .count_forwarded("translated", "ct status dnat")?;
        Ok(Self {
            _servers: [
                traffic::serve(backend.netns(), family.port(PORT))?,
                traffic::serve(lab.world.netns(), server)?,
            ],
            client,
            backend,
            lab,
        })
    }
}

pub(crate) fn node_at(family: Family, port: u16) -> SocketAddr {
    SocketAddr::new(family.node(), NODE_PORT + port)
}

/// At least so many of the datagrams of one [`reaches`] pass the stack by.
const DATAGRAMS: u64 = 34;

/// Talks to a Service, by TCP and by UDP: the backend must see this address.
fn reaches(netns: &Netns, service: SocketAddr, expected: IpAddr) -> Result<()> {
    let mut client = tcp::Client::connect(netns, service)?;
    let seen = client.chat(20)?.ip();
    ensure!(seen == expected, "TCP to {service} came from {seen}");
    client.exchange(1_000_000, 1_000_000)?;
    let mut client = udp::Client::open(netns, Family::of(service.ip()))?;
    let seen = client.chat(service, 20)?.seen.ip();
    ensure!(seen == expected, "UDP to {service} came from {seen}");
    Ok(())
}

/// At least so many packets between a pod and the world have passed the stack by, half of them in each direction.
pub(crate) fn crosses(meter: &Meter<'_>, packets: u64) -> Result<()> {
    meter.expect(Counter::BypassWire, packets / 2)?;
    meter.expect(Counter::BypassPeer, packets / 2)
}

/// Tries to talk to a Service without endpoints, by TCP and by UDP.
fn is_refused(netns: &Netns, service: SocketAddr) -> Result<()> {
    tcp::is_refused(netns, service)?;
    udp::Client::open(netns, Family::of(service.ip()))?.is_refused(service)
}

#[rstest]
fn a_pod_reaches_another_by_a_cluster_ip(
    #[values(V4, V6)] family: Family,
    #[values(Iptables, Nftables)] mode: Mode,
) -> Result<()> {
    needs_root!();
    let scene = Scene::set(family, mode)?;
    let client = &scene.client;
    let meter = Meter::start(&scene.lab.node)?;
    reaches(client.netns(), family.service_at(BY_POD), client.ip(family))?;
    scene.lab.firewall.expect_many("translated", 40)?;
    meter.expect(Counter::BypassPeer, DATAGRAMS)
}

#[rstest]
fn a_pod_reaches_the_world_by_a_cluster_ip(
    #[values(V4, V6)] family: Family,
    #[values(Iptables, Nftables)] mode: Mode,
) -> Result<()> {
    needs_root!();
    let scene = Scene::set(family, mode)?;
    let meter = Meter::start(&scene.lab.node)?;
    let service = family.service_at(BY_WORLD);
    reaches(scene.client.netns(), service, family.node())?;
    scene.lab.firewall.expect_many("translated", 80)?;
    meter.expect_no_bypass()
}

#[rstest]
fn all_reach_a_pod_by_a_node_port(
    #[values(V4, V6)] family: Family,
    #[values(Iptables, Nftables)] mode: Mode,
) -> Result<()> {
    needs_root!();
    let scene = Scene::set(family, mode)?;
    let meter = Meter::start(&scene.lab.node)?;
    // A node port is masqueraded: whoever asks comes from the device towards the backend.
    let service = node_at(family, BY_POD);
    reaches(scene.lab.world.netns(), service, family.pod_gateway())?;
    scene.lab.firewall.expect_many("translated", 40)?;
    crosses(&meter, DATAGRAMS)?;
    let meter = Meter::start(&scene.lab.node)?;
    reaches(scene.client.netns(), service, family.pod_gateway())?;
    meter.expect(Counter::BypassPeer, DATAGRAMS)
}

#[rstest]
fn a_local_node_port_shows_who_asks(
    #[values(V4, V6)] family: Family,
    #[values(Iptables, Nftables)] mode: Mode,
) -> Result<()> {
    needs_root!();
    let scene = Scene::with(family, mode, Policy::Local)?;
    let (world, client) = (&scene.lab.world, &scene.client);
    let meter = Meter::start(&scene.lab.node)?;
    let service = node_at(family, BY_POD);
    reaches(world.netns(), service, family.gateway())?;
    scene.lab.firewall.expect_many("translated", 40)?;
    crosses(&meter, DATAGRAMS)?;
    let meter = Meter::start(&scene.lab.node)?;
    reaches(client.netns(), service, client.ip(family))?;
    meter.expect(Counter::BypassPeer, DATAGRAMS)
}

#[rstest]
fn all_reach_the_world_by_a_node_port(
    #[values(V4, V6)] family: Family,
    #[values(Iptables, Nftables)] mode: Mode,
) -> Result<()> {
    needs_root!();
    let scene = Scene::set(family, mode)?;
    let meter = Meter::start(&scene.lab.node)?;
    let service = node_at(family, BY_WORLD);
    reaches(scene.lab.world.netns(), service, family.node())?;
    // The node is a router here: neither end is a pod.
    meter.expect_no_bypass()?;
    reaches(scene.client.netns(), service, family.node())?;
    crosses(&meter, DATAGRAMS)
}

#[rstest]
fn the_node_reaches_a_pod_by_its_service(
    #[values(V4, V6)] family: Family,
    #[values(Iptables, Nftables)] mode: Mode,
) -> Result<()> {
    needs_root!();
    let scene = Scene::set(family, mode)?;
    let node = scene.lab.node.netns();
    let meter = Meter::start(&scene.lab.node)?;
    let mut services = vec![family.service_at(BY_POD), node_at(family, BY_POD)];
    if (family, mode) == (V4, Iptables) {
        services.push(SocketAddr::new(family.loopback(), NODE_PORT + BY_POD));
    }
    for service in services {
        reaches(node, service, family.pod_gateway())?;
    }
    meter.expect_no_bypass()
}

#[rstest]
fn a_pod_reaches_itself_by_its_service(
    #[values(V4, V6)] family: Family,
    #[values(Iptables, Nftables)] mode: Mode,
    #[values(Policy::Cluster, Policy::Local)] policy: Policy,
) -> Result<()> {
    needs_root!();
    let scene = Scene::with(family, mode, policy)?;
    let meter = Meter::start(&scene.lab.node)?;
    for service in [family.service_at(BY_POD), node_at(family, BY_POD)] {
        reaches(scene.backend.netns(), service, family.pod_gateway())?;
    }
    scene.lab.firewall.expect_many("translated", 80)?;
    meter.expect(Counter::BypassPeer, 2 * DATAGRAMS)
}

#[rstest]
fn a_service_without_endpoints_refuses(
    #[values(V4, V6)] family: Family,
    #[values(Iptables, Nftables)] mode: Mode,
) -> Result<()> {
    needs_root!();
    let scene = Scene::set(family, mode)?;
    let (node, world) = (scene.lab.node.netns(), scene.lab.world.netns());
    let meter = Meter::start(&scene.lab.node)?;
    let (cluster_ip, node_port) = (family.service_at(BY_NOBODY), node_at(family, BY_NOBODY));
    // A second time, as by then something could have been learned.
    for _ in 0..2 {
        is_refused(scene.client.netns(), cluster_ip)?;
        for client in [scene.client.netns(), world] {
            is_refused(client, node_port)?;
        }
        // A process of the node itself may not even send a datagram that its own firewall rejects.
        for service in [cluster_ip, node_port] {
            tcp::is_refused(node, service)?;
        }
    }
    meter.expect_no_bypass()
}

#[rstest]
fn a_port_that_no_service_has_is_refused(#[values(V4, V6)] family: Family) -> Result<()> {
    needs_root!();
    let scene = Scene::set(family, Nftables)?;
    is_refused(scene.client.netns(), family.service_at(BY_NOBODY + 1))
}

#[rstest]
fn connections_are_spread_over_endpoints(
    #[values(V4, V6)] family: Family,
    #[values(Iptables, Nftables)] mode: Mode,
) -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    let (client, backend) = (lab.pod("client")?, lab.pod("backend")?);
    let ports = [PORT, PORT + 1, PORT + 2];
    let mut servers = Vec::new();
    for port in ports {
        servers.push(udp::Server::start(backend.netns(), family.port(port))?);
        lab.firewall
            .count_forwarded(&format!("to_{port}"), &format!("udp dport {port}"))?;
    }
    let service = Service {
        name: "many".to_owned(),
        transport: Transport::Udp,
        cluster: family.service_at(BY_POD),
        node_port: None,
        policy: Policy::Cluster,
        endpoints: ports.map(|port| backend.at(family, port)).to_vec(),
    };
    lab.firewall.proxy(mode, &[service])?;
    let meter = Meter::start(&lab.node)?;
    // That one of three is never drawn happens once in four million runs.
    // One port twice would be one flow, and its second question on the bypass.
    for from in 40_000..40_040 {
        udp::Client::open_at(client.netns(), family, from)?.ask(family.service_at(BY_POD), 100)?;
    }
    for port in ports {
        lab.firewall.expect_many(&format!("to_{port}"), 1)?;
    }
    meter.expect_no_bypass()
}

#[rstest]
fn a_source_port_goes_from_the_service_to_its_backend(
    #[values(V4, V6)] family: Family,
    #[values(Iptables, Nftables)] mode: Mode,
    #[values(BY_POD, BY_WORLD)] service: u16,
) -> Result<()> {
    needs_root!();
    let scene = Scene::set(family, mode)?;
    let client = scene.client.netns();
    let direct = match service {
        BY_POD => scene.backend.at(family, PORT),
        _ => family.remote_at(PORT),
    };
    let service = family.service_at(service);
    // Connection tracking holds the source port for the Service: what goes straight gets another one as long as it does.
    for to in [service, direct, service, direct] {
        let mut tcp = tcp::Client::connect_from(client, SOURCE, to)?;
        tcp.chat(20)?;
        tcp.exchange(300_000, 300_000)?;
        udp::Client::open_at(client, family, SOURCE)?.chat(to, 20)?;
    }
    scene.lab.firewall.outlast(family, &["udp"])?;
    udp::Client::open_at(client, family, SOURCE)?.chat(direct, 20)?;
    Ok(())
}

#[rstest]
fn what_goes_straight_to_a_backend_takes_the_bypass(
    #[values(V4, V6)] family: Family,
    #[values(Iptables, Nftables)] mode: Mode,
    #[values(BY_POD, BY_WORLD)] service: u16,
) -> Result<()> {
    needs_root!();
    let scene = Scene::set(family, mode)?;
    let client = scene.client.netns();
    let (direct, counter) = match service {
        BY_POD => (scene.backend.at(family, PORT), Counter::BypassPeer),
        _ => (family.remote_at(PORT), Counter::BypassWire),
    };
    let service = family.service_at(service);
    let mut translated = udp::Client::open(client, family)?;
    translated.chat(service, 20)?;
    let meter = Meter::start(&scene.lab.node)?;
    udp::Client::open(client, family)?.chat(direct, 20)?;
    meter.expect(counter, 17)?;
    tcp::Client::connect(client, direct)?.chat(20)?;
    meter.expect(counter, 34)
}
