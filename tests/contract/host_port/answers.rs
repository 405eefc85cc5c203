//! Who asks a host port of another plugin's container is answered by the way that the container's packets have, and by no other.

use std::{
    net::{IpAddr, SocketAddr},
    process::Command,
};

use rstest::rstest;
use serde_json::{Value, json};
use underpass_tests::{
    capture::Capture,
    frame::Ends,
    netns::Netns,
    prelude::*,
    traffic::{PATIENCE, raw::RawLink},
    wire::Wire,
    world::World,
};

use super::{Container, HOST, chained, foreign, mappings, node_at, reaches};
use crate::chain::{Chain, IFNAME};

/// Nothing but the way back tells whose address a packet from another plugin's container has.
#[rstest]
fn what_a_container_forges_keeps_no_client_from_a_port(
    #[values(V4, V6)] family: Family,
    #[values("bridge", "ptp")] kind: &str,
    #[values("the server", "its neighbour")] who: &str,
) -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    lab.firewall.tolerate_invalid();
    let chain = |port: u16| {
        Chain::new(
            &lab.node,
            &foreign(&lab, kind, family),
            [chained(&lab.node, "underpass")],
        )
        .runtime("portMappings", mappings(port))
    };
    let server = Container::add(&lab.node, "server", chain(HOST), family)?;
    let neighbour = Container::add(&lab.node, "neighbour", chain(HOST + 1), family)?;
    let attacker = match who {
        "the server" => &server,
        _ => &neighbour,
    };
    let near_end = attacker.result["interfaces"][0]["name"]
        .as_str()
        .context("a device of the node")?;
    let (client, at) = (
        SocketAddr::new(family.gateway(), 42_000),
        node_at(family, HOST),
    );
    let ends = Ends {
        src_mac: attacker.netns.mac(IFNAME)?,
        dst_mac: lab.node.netns().mac(near_end)?,
        src: client.ip(),
        dst: at.ip(),
    };
    let link = RawLink::open(&attacker.netns, IFNAME)?;
    let arrived = Capture::start(lab.node.netns(), near_end)?;
    for frame in [
        ends.syn(client.port(), HOST),
        ends.udp(client.port(), HOST, b"first"),
        ends.udp(client.port(), HOST, b"last"),
    ] {
        link.send(&frame)?;
    }
    let last = arrived.wait_for(PATIENCE, |bytes| bytes.ends_with(b"last"));
    ensure!(last.is_some(), "it did not arrive");
    let world = lab.world.netns();
    tcp::Client::connect_between(world, client, at)?.chat(3)?;
    udp::Client::open_bound(world, client)?.chat(at, 3)?;
    neighbour.del()?;
    server.del()
}

/// Where the node's own address has a route of its own, out of the node, that says nothing of the container's.
#[rstest]
fn a_rule_about_the_nodes_address_keeps_no_neighbour_from_a_port(
    #[values(V4, V6)] family: Family,
) -> Result<()> {
    needs_root!();
    let lab = Lab::open()?;
    let node = lab.node.netns();
    let (own, gateway) = (family.node(), family.gateway());
    for command in [
        format!("rule add from {own} lookup 100"),
        format!(
            "route add default via {gateway} dev {} table 100",
            Node::UPLINK
        ),
    ] {
        let flag = if own.is_ipv4() { "-4" } else { "-6" };
        node.expect(Command::new("ip").arg(flag).args(command.split(' ')), &[])?;
    }
    let first = foreign(&lab, "bridge", family);
    let chain = |ports: Value| {
        Chain::new(&lab.node, &first, [chained(&lab.node, "underpass")])
            .runtime("portMappings", ports)
    };
    let server = Container::add(&lab.node, "server", chain(mappings(HOST)), family)?;
    let neighbour = Container::add(&lab.node, "neighbour", chain(json!([])), family)?;
    reaches(&neighbour.netns, node_at(family, HOST), neighbour.ip)?;
    neighbour.del()?;
    server.del()
}

/// An answer that the bridge carries past the host's stack.
#[rstest]
fn a_client_of_the_lan_is_answered(#[values(V4, V6)] family: Family) -> Result<()> {
    needs_root!();
    let lab = Lab::over(Wire::Bridge, 1500)?;
    let (gateway, own, bits) = match family {
        V4 => ("10.99.0.1".parse()?, "10.99.0.50".parse()?, 24),
        V6 => ("fd00:99::1".parse()?, "fd00:99::50".parse()?, 64),
    };
    let (node, world) = (lab.node.netns(), lab.world.netns());
    node.rtnl(|link| link.add_address(Node::UPLINK, gateway, bits))?;
    world.rtnl(|link| link.add_address(World::LINK, own, bits))?;
    // What "isGateway" would do besides.
    for forwarding in ["net/ipv4/ip_forward", "net/ipv6/conf/all/forwarding"] {
        node.set_sysctl(forwarding, "1")?;
    }
    let first = foreign(&lab, "bridge", family)
        .with("bridge", Node::UPLINK)
        .with("isGateway", false);
    let readdress = |mac: &str| {
        let link = ["link", "set", Node::UPLINK, "address", mac];
        node.expect(Command::new("ip").args(link), &[])
    };
    readdress("06:00:00:00:00:01")?;
    let chain = |port| {
        Chain::new(&lab.node, &first, [chained(&lab.node, "underpass")])
            .runtime("portMappings", mappings(port))
    };
    let server = Container::add_unchecked(&lab.node, "server", chain(HOST), family)?;
    let neighbour = Container::add_unchecked(&lab.node, "neighbour", chain(HOST + 1), family)?;
    let at = node_at(family, HOST);
    let asks = |client: &Netns, ip: IpAddr, port: u16| -> Result<()> {
        let own = SocketAddr::new(ip, port);
        tcp::Client::connect_between(client, own, at)
            .with_context(|| format!("from {own}"))?
            .chat(3)?;
        udp::Client::open_bound(client, own)?.chat(at, 3)?;
        Ok(())
    };
    asks(&neighbour.netns, neighbour.ip, 42_000)?;
    asks(world, own, 42_000)?;
    asks(world, family.gateway(), 42_000)?;
    // As when the port goes that it had its address from.
    readdress("06:00:00:00:00:02")?;
    for netns in [world, &server.netns] {
        netns.expect(Command::new("ip").args(["neighbour", "flush", "all"]), &[])?;
    }
    asks(world, own, 42_001)?;
    asks(world, family.gateway(), 42_001)?;
    neighbour.del()?;
    server.del()
}
