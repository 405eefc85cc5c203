//! Processes of the host itself as clients.

use std::net::{IpAddr, Ipv6Addr, SocketAddr};

use rstest::rstest;
use serde_json::json;
use underpass_tests::{netfilter::kube_proxy::Mode, prelude::*};

use super::{HOST, INSIDE, Scene, both, mapped, misses, node_at, reaches, serve};

/// The addresses by which a process of the host reaches its own host port.
fn own_addresses(family: Family) -> [SocketAddr; 3] {
    [family.loopback(), family.node(), family.pod_gateway()].map(|ip| SocketAddr::new(ip, HOST))
}

/// One of them, by its name.
fn own_address(family: Family, name: &str) -> SocketAddr {
    let [loopback, node, _] = own_addresses(family);
    if name == "node" { node } else { loopback }
}

#[rstest]
fn a_process_of_the_host_reaches_the_container(#[values(V4, V6)] family: Family) -> Result<()> {
    needs_root!();
    let scene = Scene::set(family)?;
    let host = scene.lab.node.netns();
    let meter = Meter::start(&scene.lab.node)?;
    for at in own_addresses(family) {
        reaches(host, at, family.pod_gateway()).with_context(|| format!("to {at}"))?;
    }
    meter.expect(Counter::HostPort, 6)?;
    ensure!(meter.read()?.dropped() == 0, "{:?}", meter.read()?);
    Ok(())
}

/// Without a permanent neighbour the kernel has to ask for the container's MAC first.
#[rstest]
fn a_first_datagram_waits_for_the_mac(
    #[values(V4, V6)] family: Family,
    #[values("loopback", "node")] by: &str,
) -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    let conf = mapped(&lab, &both()).with("macspoofchk", false);
    let scene = Scene::in_network(family, lab, &conf)?;
    let host = scene.lab.node.netns();
    // One that is lost is not sent again.
    let seen = udp::Client::open(host, family)?
        .ask(own_address(family, by), 100)?
        .seen;
    ensure!(seen.ip() == family.pod_gateway(), "{seen}");
    Ok(())
}

#[rstest]
fn content_is_carried_whole(
    #[values(V4, V6)] family: Family,
    #[values("loopback", "node")] by: &str,
) -> Result<()> {
    needs_root!();
    let scene = Scene::set(family)?;
    let host = scene.lab.node.netns();
    let at = own_address(family, by);
    tcp::Client::connect(host, at)?.exchange(5_000_000, 5_000_000)?;
    let mut client = udp::Client::open(host, family)?;
    let whole = 1500 - family.header_len() - 8;
    // The server adds a line to what it sends back: the last answer comes in pieces.
    for len in [0, 1, 1000, whole - 100, whole] {
        client.ask(at, len)?;
    }
    Ok(())
}

#[rstest]
fn sockets_of_every_kind(#[values(V4, V6)] family: Family) -> Result<()> {
    needs_root!();
    let scene = Scene::set(family)?;
    // In its iptables mode it forbids what goes to 127.0.0.1 from another address, also to the node itself.
    scene.lab.firewall.proxy(Mode::Nftables, &[])?;
    let host = scene.lab.node.netns();
    let gateway = family.pod_gateway();
    for at in own_addresses(family) {
        for from in [family.any(), family.loopback(), family.node()] {
            let from = SocketAddr::new(from, 0);
            let seen = tcp::Client::connect_between(host, from, at)?.chat(3)?;
            ensure!(seen.ip() == gateway, "{from} to {at}: {seen}");
            let mut unconnected = udp::Client::open_bound(host, from)?;
            let seen = unconnected.chat(at, 3)?.seen;
            ensure!(seen.ip() == gateway, "{from} to {at}: {seen}");
            let mut connected = udp::Client::open_bound(host, from)?;
            connected.connect(at)?;
            connected.chat(at, 3)?;
        }
    }
    // One socket, all addresses in turn.
    let mut client = udp::Client::open(host, family)?;
    for _ in 0..3 {
        for at in own_addresses(family) {
            client.chat(at, 2)?;
        }
    }
    Ok(())
}

#[test]
fn mapped_sockets_reach_it_by_ipv4() -> Result<()> {
    needs_root!();
    let scene = Scene::set(V4)?;
    let host = scene.lab.node.netns();
    for ip in [V4.loopback(), V4.node()] {
        let IpAddr::V4(ip) = ip else { continue };
        let at = SocketAddr::new(ip.to_ipv6_mapped().into(), HOST);
        let seen = tcp::visit(host, at)?;
        ensure!(seen == V4.pod_gateway(), "{at}: {seen}");
        let mut client = udp::Client::open_bound(host, (Ipv6Addr::UNSPECIFIED, 0).into())?;
        let seen = client.chat(at, 3)?.seen;
        ensure!(seen.ip() == V4.pod_gateway(), "{at}: {seen}");
    }
    Ok(())
}

#[rstest]
fn a_chosen_source_port_is_kept_and_an_ephemeral_one_is_not(
    #[values(V4, V6)] family: Family,
) -> Result<()> {
    needs_root!();
    let scene = Scene::set(family)?;
    let host = scene.lab.node.netns();
    let at = SocketAddr::new(family.loopback(), HOST);
    for chosen in [700, 2049] {
        let seen = tcp::Client::connect_from(host, chosen, at)?.chat(1)?;
        ensure!(seen.port() == chosen, "{chosen}: {seen}");
    }
    // The second comes to have the same address as the first.
    let first = tcp::Client::connect_from(host, 2050, at)?.chat(1)?;
    let second = tcp::Client::connect_between(
        host,
        SocketAddr::new(family.node(), 2050),
        node_at(family, HOST),
    )?
    .chat(1)?;
    ensure!(
        first.port() == 2050 && second.port() != 2050,
        "{first} {second}"
    );
    let seen = tcp::Client::connect(host, at)?.chat(1)?;
    ensure!(
        seen.port() < 30_000,
        "{seen}: the host may choose it, for the container itself"
    );
    Ok(())
}

#[rstest]
fn a_closed_port_refuses(#[values(V4, V6)] family: Family) -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    let _pod = lab.pod_with("server", &mapped(&lab, &both()))?;
    let host = lab.node.netns();
    for at in own_addresses(family) {
        tcp::is_refused(host, at)?;
        udp::Client::open(host, family)?.is_refused(at)?;
    }
    Ok(())
}

#[rstest]
fn an_unmapped_port_is_the_hosts_own(#[values(V4, V6)] family: Family) -> Result<()> {
    needs_root!();
    let scene = Scene::set(family)?;
    let host = scene.lab.node.netns();
    let own = family.port(INSIDE);
    let _tcp = tcp::Server::start(host, own)?;
    let _udp = udp::Server::start(host, own)?;
    let meter = Meter::start(&scene.lab.node)?;
    for ip in [family.loopback(), family.node()] {
        reaches(host, SocketAddr::new(ip, INSIDE), ip)?;
    }
    meter.expect_none(Counter::HostPort)
}

#[rstest]
fn the_containers_own_loopback_is_its_own(#[values(V4, V6)] family: Family) -> Result<()> {
    needs_root!();
    let scene = Scene::set(family)?;
    let client = scene.lab.pod("client")?;
    let at = SocketAddr::new(family.loopback(), HOST);
    for pod in [&client, &scene.server] {
        misses(pod.netns(), at)?;
        let _servers = (
            tcp::Server::start(pod.netns(), at)?,
            udp::Server::start(pod.netns(), at)?,
        );
        reaches(pod.netns(), at, family.loopback())?;
    }
    Ok(())
}

#[rstest]
fn another_node_of_the_machine_is_left_alone(#[values(V4, V6)] family: Family) -> Result<()> {
    needs_root!();
    let scene = Scene::set(family)?;
    let other = Lab::new()?;
    let at = SocketAddr::new(family.loopback(), HOST);
    misses(other.node.netns(), at)?;
    let _servers = (
        tcp::Server::start(other.node.netns(), at)?,
        udp::Server::start(other.node.netns(), at)?,
    );
    reaches(other.node.netns(), at, family.loopback())?;
    reaches(scene.lab.node.netns(), at, family.pod_gateway())
}

#[rstest]
fn the_firewall_is_asked(#[values(V4, V6)] family: Family) -> Result<()> {
    needs_root!();
    let scene = Scene::set(family)?;
    let host = scene.lab.node.netns();
    let firewall = &scene.lab.firewall;
    firewall.load(&format!(
        "insert rule inet lab input iif lo ct state new drop
         insert rule inet lab output {} daddr {} meta l4proto {{ tcp, udp }} th dport {HOST} drop",
        family.nft(),
        family.node(),
    ))?;
    misses(host, node_at(family, HOST))?;
    // Answers belong to connections that the host's connection tracking knows.
    reaches(
        host,
        SocketAddr::new(family.loopback(), HOST),
        family.pod_gateway(),
    )
}

#[rstest]
fn an_address_is_meant_exactly(#[values(V4, V6)] family: Family) -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    let mappings = both().map(|mut mapping| {
        mapping["hostIP"] = json!(family.loopback());
        mapping
    });
    let conf = mapped(&lab, &mappings);
    let scene = Scene::in_network(family, lab, &conf)?;
    let host = scene.lab.node.netns();
    let at = SocketAddr::new(family.loopback(), HOST);
    reaches(host, at, family.pod_gateway())?;
    misses(host, node_at(family, HOST))
}

#[rstest]
fn the_newest_serves_and_the_older_serves_again(#[values(V4, V6)] family: Family) -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    let conf = mapped(&lab, &both());
    let host = lab.node.netns();
    let at = SocketAddr::new(family.loopback(), HOST);
    let older = lab.pod_with("older", &conf)?;
    let old = serve(&older, family)?;
    // Open all the time, like a resolver's socket.
    let mut busy = udp::Client::open(host, family)?;
    busy.chat(at, 3)?;
    let newer = lab.pod_with("newer", &conf)?;
    {
        let _new = serve(&newer, family)?;
        drop(old);
        reaches(host, at, family.pod_gateway())?;
        busy.chat(at, 3).context("the newer one must answer")?;
    }
    let _old = serve(&older, family)?;
    newer.del()?;
    reaches(host, at, family.pod_gateway())?;
    busy.chat(at, 3)
        .context("the older one must answer again")?;
    older.del()?;
    misses(host, at)
}

#[rstest]
fn a_connection_of_the_host_survives_the_mapping_of_its_port(
    #[values(V4, V6)] family: Family,
) -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    let _first = lab.pod("first")?;
    let host = lab.node.netns();
    let at = SocketAddr::new(family.loopback(), HOST);
    let _host = tcp::Server::start(host, at)?;
    let mut old = tcp::Client::connect(host, at)?;
    old.chat(3)?;
    let pod = lab.pod_with("server", &mapped(&lab, &both()))?;
    old.chat(3)?;
    let mut new = {
        let _server = tcp::Server::start(pod.netns(), family.port(INSIDE))?;
        let mut new = tcp::Client::connect(host, at)?;
        ensure!(new.chat(3)?.ip() == family.pod_gateway());
        new
    };
    old.chat(3)?;
    pod.del()?;
    ensure!(new.chat(1).is_err());
    old.chat(3)?;
    tcp::visit(host, at).map(drop)
}

#[rstest]
fn the_host_still_reaches_the_container_itself(#[values(V4, V6)] family: Family) -> Result<()> {
    needs_root!();
    let scene = Scene::set(family)?;
    let host = scene.lab.node.netns();
    let direct = scene.server.at(family, INSIDE);
    let at = SocketAddr::new(family.loopback(), HOST);
    // The same address, seen from the container, and the same port, seen from the host.
    let mut one = tcp::Client::connect_from(host, 2051, at)?;
    let mut other = tcp::Client::connect(host, direct)?;
    for _ in 0..3 {
        one.chat(2)?;
        other.chat(2)?;
    }
    let mut client = udp::Client::open(host, family)?;
    for _ in 0..3 {
        client.chat(at, 2)?;
        client.chat(direct, 2)?;
    }
    Ok(())
}

#[rstest]
fn a_datagram_larger_than_the_containers_mtu_is_counted(
    #[values(V4, V6)] family: Family,
) -> Result<()> {
    needs_root!();
    let scene = Scene::set(family)?;
    let meter = Meter::start(&scene.lab.node)?;
    let at = SocketAddr::new(family.loopback(), HOST);
    let client = udp::Client::open(scene.lab.node.netns(), family)?;
    client.send(at, &[0; 1500])?;
    meter.expect(Counter::DropTooLarge, 1)
}
