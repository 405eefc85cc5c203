//! `underpass apply`: what changes on the node behind our back is put right without a call of the runtime, once.

use std::{fs, net::SocketAddr, process::Command};

use aya::maps::{HashMap, Map};
use rstest::rstest;
use serde_json::{Value, json};
use underpass_abi::{addr::Addr, map};
use underpass_tests::{
    counter,
    leak::Traces,
    prelude::*,
    runtime::Call,
    second::{Kind, Second},
    traffic::serve,
    wire::Wire,
};

use crate::{
    net_dir::{self, NET_DIR},
    uplinks::{BRIDGE, put_at_bridge},
};

mod sysctls;

const PORT: u16 = 443;
const HOST: u16 = 8080;
const INSIDE: u16 = 80;
const APPLY: [&str; 3] = ["apply", "--net-dir", NET_DIR];
const NOTHING: &str = "nothing to change\n";

fn epoch(lab: &Lab) -> Result<u64> {
    let status: Value = serde_json::from_str(&lab.node.underpass(&["status", "--json"])?)?;
    status["epoch"].as_u64().context("no epoch")
}

/// Changes something, and says so; the second run has nothing to do, and leaves the epoch alone.
fn apply_once(lab: &Lab, expected: &[&str]) -> Result<()> {
    let said = lab.node.underpass(&APPLY)?;
    for line in expected {
        ensure!(
            said.lines().any(|said| said == *line),
            "{line:?} is missing in {said:?}"
        );
    }
    let before = epoch(lab)?;
    let said = lab.node.underpass(&APPLY)?;
    ensure!(said == NOTHING, "the second run: {said:?}");
    ensure!(epoch(lab)? == before, "the epoch was raised for nothing");
    Ok(())
}

/// A lab whose network is in the folder.
fn lab() -> Result<Lab> {
    let lab = Lab::new()?;
    net_dir::put(&lab.node, "10-lab.conflist", &lab.conf())?;
    Ok(lab)
}

#[rstest]
fn an_uplink_that_comes_masquerades(#[values(V4, V6)] family: Family) -> Result<()> {
    needs_root!();
    let lab = lab()?;
    let pod = lab.pod("a")?;
    let said = lab.node.underpass(&APPLY)?;
    ensure!(said == NOTHING, "after an ADD: {said:?}");
    let _second = Second::connect(&lab, Kind::Wire(Wire::Ethernet))?;
    let way = format!(
        "route replace {} {}",
        family.everywhere(),
        Second::way(family)
    );
    lab.node.netns().ip(&[way])?;
    apply_once(
        &lab,
        &["eth1: known now", "eth1: attached from_wire, to_wire"],
    )?;
    let remote = family.remote_at(PORT);
    let _server = tcp::Server::start(lab.world.netns(), remote)?;
    let seen = tcp::visit(pod.netns(), remote)?;
    ensure!(seen == Second::node(family), "seen {seen}");
    // And goes.
    let index = lab.node.netns().ifindex(Second::LINK)?;
    lab.node.netns().delete_link(Second::LINK)?;
    apply_once(&lab, &[&format!("device {index} is gone: forgotten")])?;
    pod.call_with_result("CHECK").run(&lab.node)?.silence()
}

/// A cluster's conflist gets the ranges of a node that joins, and loses those of one that leaves.
#[rstest]
fn destinations_of_now_see_a_pod_of_before(#[values(V4, V6)] family: Family) -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    lab.world.route_pods()?;
    let conf = |destinations: &[String]| lab.conf().with("nonMasqueradeCIDRs", destinations);
    let put =
        |destinations: &[String]| net_dir::put(&lab.node, "10-lab.conflist", &conf(destinations));
    let own = Family::BOTH.map(|family| family.pods().to_owned());
    put(&own)?;
    let pod = lab.pod_with("a", &conf(&own))?;
    let said = lab.node.underpass(&APPLY)?;
    ensure!(said == NOTHING, "after an ADD: {said:?}");
    let remote = family.remote_at(PORT);
    let _server = tcp::Server::start(lab.world.netns(), remote)?;
    ensure!(tcp::visit(pod.netns(), remote)? == family.node());

    let joined = format!("{}/{}", remote.ip(), family.host_bits());
    put(&[&own[..], std::slice::from_ref(&joined)].concat())?;
    apply_once(
        &lab,
        &[&format!("network lab: not masqueraded to {joined}")],
    )?;
    let seen = tcp::visit(pod.netns(), remote)?;
    ensure!(seen == pod.ip(family), "seen {seen}");

    put(&own)?;
    apply_once(&lab, &[&format!("network lab: masqueraded to {joined}")])?;
    let seen = tcp::visit(pod.netns(), remote)?;
    ensure!(seen == family.node(), "seen {seen}");

    // Without a container there is nothing to bring up to date.
    pod.del()?;
    put(&[joined])?;
    let said = lab.node.underpass(&APPLY)?;
    ensure!(said == NOTHING, "without a pod: {said:?}");
    Ok(())
}

#[rstest]
fn another_address_and_mtu_count(#[values(V4, V6)] family: Family) -> Result<()> {
    needs_root!();
    let lab = lab()?;
    let pod = lab.pod("a")?;
    let (label, new) = match family {
        V4 => ("IPv4", "192.0.2.77"),
        V6 => ("IPv6", "2001:db8:1::77"),
    };
    let old = family.node();
    // The new one is what the default route asks for.
    lab.node.netns().ip(&[
        format!(
            "address add {new}/{} dev {} {}",
            family.link_bits(),
            Node::UPLINK,
            nodad(family)
        ),
        format!(
            "route replace {} {} src {new}",
            family.everywhere(),
            Second::other_way(family)
        ),
    ])?;
    lab.node.netns().set_mtu(Node::UPLINK, 1400)?;
    let line = format!("eth0: MTU 1400 instead of 1500, {label} address {new} instead of {old}");
    apply_once(&lab, &[&line])?;
    let remote = family.remote_at(PORT);
    let _server = tcp::Server::start(lab.world.netns(), remote)?;
    let seen = tcp::visit(pod.netns(), remote)?;
    ensure!(seen.to_string() == new, "seen {seen}");
    Ok(())
}

#[rstest]
fn programs_come_back(
    #[values(V4, V6)] family: Family,
    #[values("eth0", "lo")] device: &str,
) -> Result<()> {
    needs_root!();
    let lab = lab()?;
    let pod = lab.pod_with("a", &lab.conf().with_host_port(HOST, INSIDE))?;
    let _server = tcp::Server::start(pod.netns(), pod.at(family, INSIDE))?;
    let node = lab.node.netns();
    node.take_filters_off(device, "egress")?;
    let (line, client, at) = if device == "lo" {
        ("lo: attached from_host", node, family.loopback())
    } else {
        node.take_filters_off(device, "ingress")?;
        (
            "eth0: attached from_wire, to_wire",
            lab.world.netns(),
            family.node(),
        )
    };
    apply_once(&lab, &[line])?;
    tcp::visit(client, SocketAddr::new(at, HOST))?;
    pod.call_with_result("CHECK").run(&lab.node)?.silence()
}

/// The stack's sysctls, and the addresses of Services, count as they are now.
#[rstest]
fn sysctls_and_services_are_read_again(#[values(V4, V6)] family: Family) -> Result<()> {
    needs_root!();
    let lab = lab()?;
    let _pod = lab.pod_with("a", &lab.conf().with_host_port(HOST, INSIDE))?;
    let node = lab.node.netns();
    let key = "net/netfilter/nf_conntrack_tcp_be_liberal";
    node.set_sysctl(key, if node.sysctl(key)? == "0" { "1" } else { "0" })?;
    // It is on no device: not every kernel has dummies.
    let mut services: HashMap<_, Addr, u32> =
        Map::HashMap(counter::open(&lab.node, map::SERVICE_ADDRESSES)?).try_into()?;
    services.insert(Addr::from(family.service()), 1, 0)?;
    apply_once(
        &lab,
        &[
            "network stack: the programs go by its sysctls and IPsec policies as they are now",
            "host ports: not served at the addresses of Services as they are now",
        ],
    )?;
    ensure!(services.keys().next().is_none(), "an address is left");
    Ok(())
}

/// Each network's own uplinks, whatever the first one says; a broken file is named, and stops nothing.
#[test]
fn each_network_counts_and_a_broken_one_is_named() -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    let _pod = lab.pod_with("a", &lab.conf().with("uplinks", json!(["eth0"])))?;
    let only = |uplink: &str| lab.conf().with("uplinks", json!([uplink]));
    net_dir::put(&lab.node, "10-lab.conflist", &only("eth0"))?;
    net_dir::write(&lab.node, "20-broken.conflist", "{ \"name\": ")?;
    let _second = Second::connect(&lab, Kind::Wire(Wire::Ethernet))?;
    let status = lab.node.underpass_error(&APPLY)?;
    ensure!(status.contains("20-broken.conflist"), "{status}");
    // None of ours, and one that no plugin of ours understands.
    net_dir::write(
        &lab.node,
        "20-broken.conflist",
        r#"{ "cniVersion": "1.1.0", "name": "b", "plugins": [{ "type": "bridge" }] }"#,
    )?;
    ensure!(lab.node.underpass(&APPLY)? == NOTHING);
    let wrong = lab.conf().with("name", "wrong");
    net_dir::put(
        &lab.node,
        "30-wrong.conflist",
        &wrong.clone().with("mtu", -1),
    )?;
    let misplaced = only("eth0").with("name", "misplaced");
    net_dir::put(
        &lab.node,
        "35-misplaced.conflist",
        &misplaced
            .with("uplinks", Value::Null)
            .with("ipam", "host-local"),
    )?;
    net_dir::put(
        &lab.node,
        "40-other.conflist",
        &only("eth1").with("name", "other"),
    )?;
    let status = lab.node.underpass_error(&APPLY)?;
    for file in ["30-wrong.conflist", "35-misplaced.conflist"] {
        ensure!(status.contains(file), "{status}");
    }
    let devices = lab.node.underpass(&["status"])?;
    let attached = devices
        .lines()
        .any(|line| line.contains("eth1") && line.contains("from_wire"));
    ensure!(attached, "{devices}");
    Ok(())
}

/// An entry for host ports, behind one that names its uplinks: neither its GC nor a look at its list adds any.
#[rstest]
fn an_entry_for_ports_adds_no_uplinks(#[values("GC", "apply")] how: &str) -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    let first = lab.conf().with("uplinks", json!(["eth0"]));
    let pod = lab.pod_with("a", &first)?;
    let _second = Second::connect(&lab, Kind::Wire(Wire::Ethernet))?;
    let ports = lab.conf().with("ipMasq", false).with("ipam", json!({}));
    if how == "GC" {
        let valid = json!([{ "containerID": pod.name(), "ifname": Pod::IFNAME }]);
        let conf = ports.with("cni.dev/valid-attachments", valid);
        Call::new("GC").conf(&conf).run(&lab.node)?.silence()?;
    } else {
        let plugins = [first.json(), ports.json()];
        let list = json!({ "cniVersion": "1.1.0", "name": first.name(), "plugins": plugins });
        net_dir::write(&lab.node, "10-lab.conflist", &list.to_string())?;
        let said = lab.node.underpass(&APPLY)?;
        ensure!(said == NOTHING, "{said}");
    }
    let devices = lab.node.underpass(&["status"])?;
    ensure!(!devices.contains("eth1"), "{devices}");
    pod.call_with_result("CHECK").run(&lab.node)?.silence()
}

#[test]
fn what_is_not_loaded_is_not_loaded_and_no_attachment_goes() -> Result<()> {
    needs_root!();
    let lab = Lab::unloaded()?;
    net_dir::put(&lab.node, "10-lab.conflist", &lab.conf())?;
    let said = lab.node.underpass(&APPLY)?;
    ensure!(said.starts_with("nothing is loaded"), "{said}");
    // A lost DEL is none of its business.
    let lost = lab.pod("lost")?;
    let living = lab.pod("living")?;
    lost.netns().delete_link(Pod::IFNAME)?;
    let before = Traces::of(&lab.node)?;
    let said = lab.node.underpass(&APPLY)?;
    ensure!(said == NOTHING, "{said}");
    before.expect_same(&lab.node)?;
    living.call_with_result("CHECK").run(&lab.node)?.silence()
}

/// What an address needs, to be usable at once.
fn nodad(family: Family) -> &'static str {
    match family {
        V4 => "",
        V6 => "nodad",
    }
}

/// One network names what has become the port of a bridge, the other one what leads out now: neither takes from the other what it has
/// put there.
#[test]
fn two_networks_agree_on_what_is_a_part() -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    let ranges = json!([[{ "subnet": "10.77.0.0/24" }], [{ "subnet": "fd00:77::/64" }]]);
    let other = lab.conf().with("name", "other").with_ipam("ranges", ranges);
    let named = lab.conf().with("uplinks", json!([Node::UPLINK]));
    let pods = [
        Pod::add(&lab.node, "named", &named)?,
        Pod::add(&lab.node, "other", &other)?,
    ];
    let node = lab.node.netns();
    put_at_bridge(node, vec![2, 0, 0, 0, 0xbb, 1], &Family::BOTH)?;
    node.set_mtu(BRIDGE, 1400)?;
    // Whoever comes last.
    Pod::add(&lab.node, "later-other", &other)?;
    let later = Pod::add(&lab.node, "later-named", &named)?;
    let link = later
        .netns()
        .ip_json(&["link", "show", "dev", Pod::IFNAME])?;
    ensure!(link[0]["mtu"] == 1400, "{link}");
    for pod in &pods {
        pod.call_with_result("CHECK").run(&lab.node)?.silence()?;
    }
    net_dir::put(&lab.node, "10-other.conflist", &other)?;
    net_dir::put(&lab.node, "20-named.conflist", &named)?;
    let said = lab.node.underpass(&APPLY)?;
    ensure!(said == NOTHING, "{said}");
    // Whichever network is left looks after it.
    node.run(|| fs::remove_file(format!("{NET_DIR}/10-other.conflist")))?;
    node.expect(
        Command::new("tc").args(["qdisc", "del", "dev", BRIDGE, "clsact"]),
        &[],
    )?;
    let said = lab.node.underpass(&APPLY)?;
    ensure!(said.contains(&format!("{BRIDGE}: attached")), "{said}");
    for (family, pod) in Family::BOTH
        .iter()
        .flat_map(|family| pods.iter().map(move |pod| (*family, pod)))
    {
        ping::ping(node, family.gateway())?;
        let remote = family.remote_at(PORT);
        let _server = serve(lab.world.netns(), remote)?;
        let seen = tcp::visit(pod.netns(), remote)?;
        ensure!(seen == family.node(), "{} is {seen}", pod.name());
    }
    Ok(())
}
