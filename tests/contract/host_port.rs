//! Ours after Debian's `bridge` and `ptp`: it serves their containers' host ports, and passes their result on.

mod answers;
mod nowhere;
mod unopened;
mod uplinks;
mod words;

use std::net::{IpAddr, SocketAddr};

use rstest::rstest;
use serde_json::{Value, json};
use underpass_tests::{
    counter::Registry,
    kernel::Facility,
    netns::Netns,
    prelude::*,
    runtime::{Call, Conf},
};

use crate::{
    chain::{Chain, IFNAME},
    plugins::{Installed, Name, Program},
    schema,
};

const HOST: u16 = 8080;
const INSIDE: u16 = 80;

/// A network of another plugin, with addresses of one family; Debian's wait seconds for those of IPv6.
fn foreign(lab: &Lab, kind: &str, family: Family) -> Conf {
    let subnet = match family {
        V4 => "10.99.0.0/24",
        V6 => "fd00:99::/64",
    };
    lab.conf()
        .with("name", "foreign")
        .with("type", kind)
        .with("bridge", "br0")
        .with("isGateway", true)
        .with_ipam("ranges", json!([[{ "subnet": subnet }]]))
        .with_ipam("routes", json!([{ "dst": family.everywhere() }]))
}

/// Our part of the chain, under a name.
fn chained(node: &Node, name: &str) -> Value {
    json!({
        "type": name,
        "bpfRoot": node.bpf_root(),
        "capabilities": { "portMappings": true },
        "snat": true,
    })
}

/// A host port to [`INSIDE`], by TCP and UDP.
fn mappings(port: u16) -> Value {
    let mapping =
        |protocol: &str| json!({ "hostPort": port, "containerPort": INSIDE, "protocol": protocol });
    json!(["tcp", "udp"].map(mapping))
}

fn portmap() -> Result<Installed> {
    Name::new("portmap", Program::Underpass).install()
}

/// A container in a chain, and servers in it.
struct Container<'a> {
    chain: Chain<'a>,
    netns: Netns,
    result: Value,
    ip: IpAddr,
    _servers: (tcp::Server, udp::Server),
}

impl<'a> Container<'a> {
    fn add(node: &'a Node, name: &str, chain: Chain<'a>, family: Family) -> Result<Self> {
        let new = Self::add_unchecked(node, name, chain, family)?;
        let checked = new.chain.check(&new.netns, &new.result);
        checked.context("CHECK at once")?;
        Ok(new)
    }

    /// For a bridge that has the container's interface's name, which Debian's CHECK takes for the same.
    fn add_unchecked(node: &'a Node, name: &str, chain: Chain<'a>, family: Family) -> Result<Self> {
        let netns = node.netns().sibling(name)?;
        let result = chain.add(&netns)?;
        schema::validate("1.0.0", &result)?;
        let ip = address_of(&result)?;
        let servers = (
            tcp::Server::start(&netns, family.port(INSIDE))?,
            udp::Server::start(&netns, family.port(INSIDE))?,
        );
        Ok(Self {
            chain,
            netns,
            result,
            ip,
            _servers: servers,
        })
    }

    fn del(self) -> Result<()> {
        self.chain.del(&self.netns, &self.result)?;
        self.chain.del(&self.netns, &self.result)
    }
}

/// The first address of a result.
fn address_of(result: &Value) -> Result<IpAddr> {
    let address = result["ips"][0]["address"].as_str().unwrap_or_default();
    Ok(address.split('/').next().unwrap_or_default().parse()?)
}

fn node_at(family: Family, port: u16) -> SocketAddr {
    SocketAddr::new(family.node(), port)
}

/// Fails unless a client reaches a server at `to` by TCP and UDP, more than once, and the server sees `expected`.
fn reaches(client: &Netns, to: SocketAddr, expected: IpAddr) -> Result<()> {
    for _ in 0..2 {
        let mut stream = tcp::Client::connect(client, to)?;
        let seen = stream.exchange(300_000, 300_000)?.seen.ip();
        ensure!(seen == expected, "by TCP the server saw {seen}");
        let answer = udp::Client::open(client, Family::of(to.ip()))?.chat(to, 3)?;
        ensure!(
            answer.seen.ip() == expected,
            "by UDP the server saw {answer:?}"
        );
    }
    Ok(())
}

#[rstest]
fn everybody_reaches_the_container(
    #[values(V4, V6)] family: Family,
    #[values("bridge", "filtered bridge", "ptp")] kind: &str,
    #[values("portmap", "underpass")] name: &str,
    #[values(true, false)] masquerade: bool,
) -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    let is_filtered = kind == "filtered bridge";
    let kind = kind.trim_start_matches("filtered ");
    let is_there = !Facility::BridgeNetfilter.is_missing()?;
    if is_filtered && !is_there {
        return Ok(());
    }
    if is_there {
        for setting in ["iptables", "ip6tables"] {
            let setting = format!("net/bridge/bridge-nf-call-{setting}");
            let value = if is_filtered { "1" } else { "0" };
            lab.node.netns().set_sysctl(&setting, value)?;
        }
    }
    let pod = lab.pod("pod")?;
    let before = Registry::read(&lab.node)?;
    let link = portmap()?;
    let first = foreign(&lab, kind, family).with("ipMasq", masquerade);
    let chain = |port: u16| {
        Chain::new(&lab.node, &first, [chained(&lab.node, name)])
            .ours(&link.path)
            .runtime("portMappings", mappings(port))
    };
    let server = Container::add(&lab.node, "server", chain(HOST), family)?;
    // On a bridge a neighbour needs no port of its own to be seen as a client.
    let neighbour = match kind {
        "bridge" => chain(HOST).runtime("portMappings", json!([])),
        _ => chain(HOST + 1),
    };
    let neighbour = Container::add(&lab.node, "neighbour", neighbour, family)?;
    let mapped = Container::add(&lab.node, "mapped", chain(HOST + 2), family)?;
    let at = node_at(family, HOST);
    let meter = Meter::start(&lab.node)?;
    for (client, ip) in [
        (lab.world.netns(), family.gateway()),
        (pod.netns(), pod.ip(family)),
        (&neighbour.netns, neighbour.ip),
        (&mapped.netns, mapped.ip),
    ] {
        reaches(client, at, ip).with_context(|| format!("from {}", client.name()))?;
        // Its own address and port go on working, between packets to the host port.
        if client.name() != lab.world.netns().name() {
            reaches(client, SocketAddr::new(server.ip, INSIDE), ip)
                .with_context(|| format!("from {}, directly", client.name()))?;
            reaches(client, at, ip).with_context(|| format!("from {}, again", client.name()))?;
        }
    }
    meter.expect(Counter::HostPort, 16)?;
    // The container as a client of a pod, and of the world.
    ping::ping(&server.netns, pod.ip(family))?;
    server.chain.check(&server.netns, &server.result)?;
    if kind == "bridge" {
        // As the bridge's address changes where the port goes that it had it from.
        let other = "link set br0 address 02:00:00:00:00:99";
        lab.node.netns().ip(&[other.to_owned()])?;
        neighbour.netns.ip(&["neighbour flush all".to_owned()])?;
        reaches(&neighbour.netns, at, neighbour.ip).context("at another address")?;
    }
    for container in [mapped, neighbour, server] {
        container.del()?;
    }
    tcp::refuses(lab.world.netns(), at)?;
    let after = Registry::read(&lab.node)?;
    ensure!(after == before, "{after:#?} instead of {before:#?}");
    Ok(())
}

/// The host's end of a veth of `ptp` has the gateway's address, which stands for whom the container could not answer.
#[rstest]
fn the_node_and_the_container_itself_are_served(
    #[values(V4, V6)] family: Family,
    #[values("bridge", "ptp")] kind: &str,
    #[values(true, false)] masquerade: bool,
) -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    let chain = Chain::new(
        &lab.node,
        &foreign(&lab, kind, family).with("ipMasq", masquerade),
        [chained(&lab.node, "underpass")],
    )
    .runtime("portMappings", mappings(HOST));
    let server = Container::add(&lab.node, "server", chain, family)?;
    let gateway: IpAddr = match family {
        V4 => "10.99.0.1".parse()?,
        V6 => "fd00:99::1".parse()?,
    };
    let node = lab.node.netns();
    let meter = Meter::start(&lab.node)?;
    for to in [
        node_at(family, HOST),
        SocketAddr::new(family.loopback(), HOST),
    ] {
        // Not even the first datagram is lost.
        let first = udp::Client::open(node, family)?.ask(to, 100)?;
        ensure!(first.seen.ip() == gateway, "{first:?}");
        reaches(node, to, gateway).with_context(|| format!("from the node, at {to}"))?;
    }
    reaches(&server.netns, node_at(family, HOST), gateway).context("from itself")?;
    // What needs no port of the node goes on.
    reaches(node, SocketAddr::new(server.ip, INSIDE), gateway).context("directly")?;
    reaches(lab.world.netns(), node_at(family, HOST), family.gateway())?;
    ensure!(meter.read()?.dropped() == 0, "{:?}", meter.read()?);
    server.chain.check(&server.netns, &server.result)?;
    server.del()
}

#[rstest]
fn the_newest_serves(#[values(V4, V6)] family: Family) -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    let first = foreign(&lab, "bridge", family);
    let chain = || {
        Chain::new(&lab.node, &first, [chained(&lab.node, "underpass")])
            .runtime("portMappings", mappings(HOST))
    };
    let at = node_at(family, HOST);
    let mut client = udp::Client::open(lab.world.netns(), family)?;
    let older = Container::add(&lab.node, "older", chain(), family)?;
    client.chat(at, 3)?;
    let newer = Container::add(&lab.node, "newer", chain(), family)?;
    // That another serves is no fault of this one.
    chain().check(&older.netns, &older.result)?;
    client.chat(at, 3)?;
    let Container {
        chain: old,
        netns,
        result,
        _servers: servers,
        ..
    } = older;
    drop(servers);
    // Its servers are gone with it: who answers is the newer one.
    client.chat(at, 3)?;
    newer.del()?;
    let _again = udp::Server::start(&netns, family.port(INSIDE))?;
    client.chat(at, 3)?;
    old.check(&netns, &result)?;
    old.del(&netns, &result)
}

/// A pod of ours and its host port may come from two plugins of a chain.
#[rstest]
fn after_ours_as_after_others(
    #[values(V4, V6)] family: Family,
    #[values("portmap", "underpass")] name: &str,
) -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    let pod = lab.pod("pod")?;
    let before = Registry::read(&lab.node)?;
    let link = portmap()?;
    let chain = Chain::new(&lab.node, &lab.conf(), [chained(&lab.node, name)])
        .ours(&link.path)
        .runtime("portMappings", mappings(HOST));
    let server = Container::add(&lab.node, "server", chain, family)?;
    let at = node_at(family, HOST);
    let meter = Meter::start(&lab.node)?;
    reaches(lab.world.netns(), at, family.gateway())?;
    reaches(pod.netns(), at, pod.ip(family))?;
    reaches(lab.node.netns(), at, family.pod_gateway()).context("from the node")?;
    reaches(&server.netns, at, family.pod_gateway()).context("from itself")?;
    meter.expect(Counter::BypassPeer, 50)?;
    server.chain.check(&server.netns, &server.result)?;
    server.del()?;
    tcp::refuses(lab.world.netns(), at)?;
    let after = Registry::read(&lab.node)?;
    ensure!(after == before, "{after:#?} instead of {before:#?}");
    Ok(())
}

#[rstest]
fn gc_frees_the_ports_of_lost_containers(
    #[values("portmap", "underpass")] name: &str,
) -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    lab.pod("warm")?.del()?;
    let link = portmap()?;
    let first = foreign(&lab, "ptp", V4);
    let chain = |port| {
        Chain::new(&lab.node, &first, [chained(&lab.node, name)])
            .ours(&link.path)
            .runtime("portMappings", mappings(port))
    };
    let kept = Container::add(&lab.node, "kept", chain(HOST), V4)?;
    let before = Registry::read(&lab.node)?;
    let lost = Container::add(&lab.node, "lost", chain(HOST + 1), V4)?;
    lost.netns.delete_link(IFNAME)?;
    let mut conf = chained(&lab.node, name);
    conf["cniVersion"] = json!("1.1.0");
    conf["name"] = json!("foreign");
    conf["cni.dev/valid-attachments"] = json!([{ "containerID": "kept", "ifname": IFNAME }]);
    let program = match name {
        "portmap" => link.path.clone(),
        _ => underpass_tests::node::plugin().to_owned(),
    };
    let call = |verb: &str, conf: &Value| {
        crate::plugins::run(
            &lab.node,
            &program,
            &Call::new(verb).stdin(conf.to_string().as_bytes()),
        )
    };
    call("STATUS", &conf)?.silence()?;
    call("GC", &conf)?.silence()?;
    let after = Registry::read(&lab.node)?;
    ensure!(after == before, "{after:#?} instead of {before:#?}");
    reaches(lab.world.netns(), node_at(V4, HOST), V4.gateway())?;
    tcp::refuses(lab.world.netns(), node_at(V4, HOST + 1))?;
    kept.del()
}

#[test]
fn check_says_what_is_missing() -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    let chain = Chain::new(
        &lab.node,
        &foreign(&lab, "bridge", V4),
        [chained(&lab.node, "underpass")],
    )
    .runtime("portMappings", mappings(HOST));
    let server = Container::add(&lab.node, "server", chain, V4)?;
    let veth = server.result["interfaces"][1]["name"]
        .as_str()
        .context("bridge names its veth second")?;
    for device in [veth, "br0", Node::UPLINK] {
        lab.node.netns().take_filters_off(device, "ingress")?;
        let error = server
            .chain
            .check(&server.netns, &server.result)
            .expect_err("a program is missing");
        let text = format!("{error:#}");
        ensure!(
            text.contains("not attached") && text.contains(device),
            "{text}"
        );
    }
    server.del()
}

/// The older qdisc has one list of filters for both directions: ours would take each other's place.
#[test]
fn a_qdisc_without_room_for_both_programs_is_an_error() -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    lab.pod("warm")?.del()?;
    let before = Registry::read(&lab.node)?;
    let bandwidth =
        json!({ "type": "bandwidth", "egressRate": 1_000_000, "egressBurst": 1_000_000 });
    let first = foreign(&lab, "ptp", V4);
    let chain = Chain::new(
        &lab.node,
        &first,
        [bandwidth, chained(&lab.node, "underpass")],
    )
    .runtime("portMappings", mappings(HOST));
    let netns = lab.node.netns().sibling("a")?;
    let error = format!("{:#}", chain.add(&netns).expect_err("no room"));
    ensure!(error.contains("qdisc ingress"), "{error}");
    let after = Registry::read(&lab.node)?;
    ensure!(after == before, "{after:#?} instead of {before:#?}");
    chain.del(&netns, &json!({ "cniVersion": "1.0.0" }))
}

/// Nobody needs the namespace, or the result, to clean up.
#[rstest]
fn del_needs_nothing(#[values("bridge", "ptp")] kind: &str) -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    lab.pod("warm")?.del()?;
    let before = Registry::read(&lab.node)?;
    let chain = Chain::new(
        &lab.node,
        &foreign(&lab, kind, V4),
        [chained(&lab.node, "underpass")],
    )
    .runtime("portMappings", mappings(HOST));
    let server = Container::add(&lab.node, "server", chain, V4)?;
    server.netns.delete_link(IFNAME)?;
    let conf = Conf::new(&lab.node)
        .with("name", "foreign")
        .with("ipam", Value::Null);
    Call::new("DEL")
        .attachment("server", "", IFNAME)
        .conf(&conf)
        .run(&lab.node)?
        .silence()?;
    let after = Registry::read(&lab.node)?;
    ensure!(after == before, "{after:#?} instead of {before:#?}");
    ensure!(Pod::IFNAME == IFNAME);
    Ok(())
}
