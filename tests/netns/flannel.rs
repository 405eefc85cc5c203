//! The plugin `flannel` calls ours: it makes our netconf of its own, remembers it, and sends it again at the DEL, without the result.

mod site;

use std::{fs, net::SocketAddr, path::Path};

use rstest::rstest;
use serde_json::Value;
use underpass_tests::{
    counter::Counters,
    leak::Traces,
    netns::Netns,
    node::flannel,
    runtime::{Call, Conf},
    traffic::serve,
};

use self::site::{
    Backend, DATA_DIR, MTU, SUBNET_FILE, Sender, Site, address, early, netconf, sent,
};
use super::net_dir;
use underpass_tests::prelude::*;

/// The port that pods serve.
const INSIDE: u16 = 80;
/// The node's port that leads there.
const HOST: u16 = 8080;
/// Enough bytes for the bypass to be taken.
const MUCH: u64 = 3_000_000;

/// The plugin; returns from a test where there is none.
macro_rules! needs_flannel {
    () => {{
        needs_root!();
        let Some(program) = flannel() else {
            return Ok(());
        };
        program
    }};
}

/// What the plugin has sent for a container.
fn remembered(node: &Node, container: &str) -> Result<Value> {
    let file = Path::new(DATA_DIR).join(container);
    let text = node.netns().run(|| fs::read(file)).context("read it")?;
    Ok(serde_json::from_slice(&text)?)
}

/// Fails unless a client that the server must see as `expected` gets through by TCP and UDP.
fn reaches(client: &Netns, to: SocketAddr, expected: std::net::IpAddr) -> Result<()> {
    let seen = tcp::Client::connect(client, to)?.exchange(MUCH, MUCH)?.seen;
    ensure!(seen.ip() == expected, "by TCP {to} saw {seen}");
    let mut client = udp::Client::open(client, Family::of(to.ip()))?;
    let seen = client.chat(to, 20)?.seen;
    ensure!(seen.ip() == expected, "by UDP {to} saw {seen}");
    Ok(())
}

#[rstest]
fn it_sends_what_we_know_and_every_verb_works(
    #[values("0.3.1", "0.4.0")] version: &str,
) -> Result<()> {
    let program = needs_flannel!();
    let site = Site::new(Backend::HostGateway)?;
    let node = site.node(1);
    let conf = netconf(node, version);
    Pod::add_by(node, "loads", &conf, &program)?.del()?;
    let before = Traces::of(node)?;

    let pod = Pod::add_by(node, "a", &conf, &program)?;
    let config = remembered(node, "a")?;
    let expected = sent(node, version, &early(node, 1));
    ensure!(config == expected, "{config} instead of {expected}");
    let addresses = pod.addresses();
    let is_inside = |address: &std::net::IpAddr| address.to_string().starts_with("10.42.1.");
    ensure!(
        addresses.len() == 1 && addresses.iter().all(is_inside),
        "{addresses:?}"
    );
    let links = pod.netns().ip_json(&["link", "show", "dev", Pod::IFNAME])?;
    ensure!(links[0]["mtu"] == MTU, "{links}");
    let routes = pod.netns().ip_json(&["route", "show", "default"])?;
    ensure!(routes[0]["gateway"] == "10.42.1.1", "{routes}");
    if version != "0.3.1" {
        pod.call_with_result("CHECK").run(node)?.silence()?;
    }

    let again = pod.call_with_result("DEL");
    pod.del()?;
    before.expect_same(node)?;
    ensure!(remembered(node, "a").is_err(), "it still remembers");
    again.run(node)?.silence()
}

/// CHECK stops at the plugin: what is wrong is found by who calls us with what it has remembered.
#[test]
fn it_passes_no_check_on() -> Result<()> {
    let program = needs_flannel!();
    let site = Site::new(Backend::HostGateway)?;
    let node = site.node(1);
    let pod = Pod::add_by(node, "a", &netconf(node, "0.4.0"), &program)?;
    let conf = Conf::of(remembered(node, "a")?).with("prevResult", pod.result().clone());
    let path = pod.netns().path().display().to_string();
    let ours = Call::new("CHECK")
        .attachment("a", &path, Pod::IFNAME)
        .conf(&conf);
    ours.run(node)?.silence()?;
    pod.netns().ip(&["route del default".to_owned()])?;
    pod.call_with_result("CHECK").run(node)?.silence()?;
    let error = ours.run(node)?.error()?;
    ensure!(error.code == 100, "{error}");
    Ok(())
}

#[rstest]
#[case::flannel(Sender::Flannel, V4)]
#[case::later(Sender::Later, V4)]
#[case::later(Sender::Later, V6)]
fn pods_reach_pods_of_both_nodes_and_the_world(
    #[case] sender: Sender,
    #[case] family: Family,
    #[values(Backend::HostGateway, Backend::Vxlan)] backend: Backend,
) -> Result<()> {
    needs_root!();
    if sender == Sender::Flannel {
        needs_flannel!();
    }
    let site = Site::new(backend)?;
    let pods = [(1, "a"), (1, "b"), (2, "c")]
        .into_iter()
        .map(|(number, name)| site.pod(sender, number, name, &[]))
        .collect::<Result<Vec<_>>>()?;
    let _servers = pods
        .iter()
        .map(|pod| serve(pod.netns(), pod.at(family, INSIDE)))
        .collect::<Result<Vec<_>>>()?;
    let [a, b, c] = [0, 1, 2].map(|index| &pods[index]);
    for (from, to) in [(a, b), (a, c), (c, a), (c, b)] {
        reaches(from.netns(), to.at(family, INSIDE), from.ip(family))
            .with_context(|| format!("from {} to {}", from.name(), to.name()))?;
    }
    let remote = family.remote_at(443);
    let _world = serve(&site.world, remote)?;
    for (number, pod) in [(1, a), (2, c)] {
        reaches(pod.netns(), remote, address(family, number))
            .with_context(|| format!("from {} to the world", pod.name()))?;
    }
    for (node, firewall) in site.nodes.iter().zip(&site.firewalls) {
        let counted = Counters::read(node)?;
        for counter in [
            Counter::BypassWire,
            Counter::BypassPeer,
            Counter::Masqueraded,
        ] {
            ensure!(counted.get(counter) > 0, "no {}", counter.name());
        }
        firewall.expect_no_invalid()?;
    }
    Ok(())
}

#[rstest]
#[case::flannel(Sender::Flannel, V4)]
#[case::later(Sender::Later, V4)]
#[case::later(Sender::Later, V6)]
fn host_ports_come_with_it(
    #[case] sender: Sender,
    #[case] family: Family,
    #[values(Backend::HostGateway, Backend::Vxlan)] backend: Backend,
) -> Result<()> {
    needs_root!();
    if sender == Sender::Flannel {
        needs_flannel!();
    }
    let site = Site::new(backend)?;
    let server = site.pod(sender, 1, "server", &[(HOST, INSIDE)])?;
    let neighbour = site.pod(sender, 1, "neighbour", &[])?;
    let elsewhere = site.pod(sender, 2, "elsewhere", &[])?;
    let _servers = serve(server.netns(), family.port(INSIDE))?;
    let at = SocketAddr::new(address(family, 1), HOST);
    reaches(&site.world, at, family.gateway()).context("from the world")?;
    reaches(neighbour.netns(), at, neighbour.ip(family)).context("from its node")?;
    // A node's address is outside of the network, so the other node masquerades.
    reaches(elsewhere.netns(), at, address(family, 2)).context("from the other node")?;
    server.del()?;
    tcp::refuses(&site.world, at)
}

#[test]
fn a_del_needs_neither_the_daemon_nor_the_namespace() -> Result<()> {
    let program = needs_flannel!();
    let site = Site::new(Backend::HostGateway)?;
    let node = site.node(1);
    let conf = netconf(node, "0.4.0").with_host_port(HOST, INSIDE);
    Pod::add_by(node, "loads", &conf, &program)?.del()?;
    let before = Traces::of(node)?;
    let pod = Pod::add_by(node, "a", &conf, &program)?;
    node.netns().run(|| fs::remove_file(SUBNET_FILE))?;
    pod.netns().unlink()?;
    pod.call("DEL").without("CNI_NETNS").run(node)?.silence()?;
    pod.abandon();
    before.expect_same(node)?;

    // Without the file no pod begins, and nothing is begun.
    let error = Pod::add_by(node, "b", &conf, &program)
        .err()
        .context("there is no subnet")?;
    ensure!(format!("{error:#}").contains(SUBNET_FILE), "{error:#}");
    before.expect_same(node)
}

/// A runtime that repeats an ADD hears our error through the plugin, and the container keeps what it has.
#[test]
fn our_error_comes_through() -> Result<()> {
    let program = needs_flannel!();
    let site = Site::new(Backend::HostGateway)?;
    let node = site.node(1);
    let conf = netconf(node, "0.4.0");
    let other = Pod::add_by(node, "other", &conf, &program)?;
    let before = Traces::of(node)?;
    let pod = Pod::add_by(node, "a", &conf, &program)?;
    let error = pod.call("ADD").run(node)?.error()?;
    ensure!(error.code == 101, "{error}");
    ping::ping(pod.netns(), other.ip(V4))?;
    pod.del()?;
    before.expect_same(node)
}

/// Only the delegate's name tells that the file has to stay where it is.
#[test]
fn uninstall_sees_who_is_delegated_to() -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    net_dir::put(
        &lab.node,
        "10-flannel.conflist",
        &netconf(&lab.node, "0.4.0"),
    )?;
    let bin = "/run/bin";
    lab.node.netns().run(|| -> Result<()> {
        fs::create_dir_all(bin)?;
        fs::copy(
            underpass_tests::node::plugin(),
            Path::new(bin).join("underpass"),
        )?;
        Ok(())
    })?;
    let said = lab.node.underpass_error(&[
        "uninstall",
        "--bin-dir",
        bin,
        "--net-dir",
        net_dir::NET_DIR,
    ])?;
    ensure!(said.contains("10-flannel.conflist"), "{said}");
    let stays = lab
        .node
        .netns()
        .run(|| Path::new(bin).join("underpass").exists());
    ensure!(stays, "the executable is gone: {said}");
    Ok(())
}
