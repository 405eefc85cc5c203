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
    net_dir::put(&lab.node, "30-wrong.conflist", &lab.conf().with("mtu", -1))?;
    net_dir::put(
        &lab.node,
        "40-other.conflist",
        &only("eth1").with("name", "other"),
    )?;
    let status = lab.node.underpass_error(&APPLY)?;
    ensure!(status.contains("30-wrong.conflist"), "{status}");
    let devices = lab.node.underpass(&["status"])?;
    let attached = devices
        .lines()
        .any(|line| line.contains("eth1") && line.contains("from_wire"));
    ensure!(attached, "{devices}");
    Ok(())
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

/// What switches a family's forwarding off and on, and its name.
fn forwarding(family: Family) -> [&'static str; 2] {
    match family {
        V4 => ["net/ipv4/ip_forward", "net.ipv4.ip_forward"],
        V6 => [
            "net/ipv6/conf/all/forwarding",
            "net.ipv6.conf.all.forwarding",
        ],
    }
}

/// As whoever applies the files of sysctls anew does it, of which one says 0.
#[rstest]
fn forwarding_comes_back(
    #[values(V4, V6)] family: Family,
    #[values("apply", "GC")] how: &str,
) -> Result<()> {
    needs_root!();
    let lab = lab()?;
    let conf = lab.conf().with("bypass", "off");
    let pods = [lab.pod_with("a", &conf)?, lab.pod_with("b", &conf)?];
    let node = lab.node.netns();
    let [key, name] = forwarding(family);
    ensure!(node.sysctl(key)? == "1", "the ADD has not set it");
    node.set_sysctl(key, "0")?;
    ensure!(
        ping::ping(pods[0].netns(), pods[1].ip(family)).is_err(),
        "they reach each other without it"
    );
    if how == "apply" {
        apply_once(&lab, &[&format!("{name}: 1 instead of 0")])?;
    } else {
        let valid = ["a", "b"].map(|id| json!({ "containerID": id, "ifname": Pod::IFNAME }));
        let conf = conf.with("cni.dev/valid-attachments", valid.to_vec());
        Call::new("GC").conf(&conf).run(&lab.node)?.silence()?;
    }
    ensure!(node.sysctl(key)? == "1", "it is off still");
    ping::ping(pods[0].netns(), pods[1].ip(family))?;
    pods[0].call_with_result("CHECK").run(&lab.node)?.silence()
}

/// Where containers have one family, or there are none, the node stays what somebody wants it to be.
#[rstest]
fn forwarding_that_nobody_needs_stays_off(#[values(V4, V6)] family: Family) -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    let other = if family == V4 { V6 } else { V4 };
    let range = json!([[{ "subnet": family.pods() }]]);
    let routes = json!([{ "dst": family.everywhere() }]);
    let conf = lab.conf().with_ipam("ranges", range);
    let conf = conf.with_ipam("routes", routes);
    net_dir::put(&lab.node, "10-lab.conflist", &conf)?;
    lab.node.underpass(&["load"])?;
    let node = lab.node.netns();
    let off = || {
        let keys = Family::BOTH.map(|family| forwarding(family)[0]);
        keys.iter().try_for_each(|key| node.set_sysctl(key, "0"))
    };
    let is_on = |family| -> Result<bool> { Ok(node.sysctl(forwarding(family)[0])? == "1") };
    off()?;
    // It may find the uplinks.
    lab.node.underpass(&APPLY)?;
    let said = lab.node.underpass(&APPLY)?;
    ensure!(said == NOTHING, "before the first ADD: {said:?}");
    ensure!(!is_on(family)? && !is_on(other)?, "nobody is attached");

    let pod = lab.pod_with("a", &conf)?;
    off()?;
    let [_, name] = forwarding(family);
    let said = lab.node.underpass(&APPLY)?;
    ensure!(said == format!("{name}: 1 instead of 0\n"), "{said:?}");
    ensure!(is_on(family)? && !is_on(other)?, "{family:?} alone");

    pod.del()?;
    off()?;
    let said = lab.node.underpass(&APPLY)?;
    ensure!(said == NOTHING, "after the DEL: {said:?}");
    ensure!(!is_on(family)? && !is_on(other)?, "nobody is attached");
    Ok(())
}

/// Host ports for the interface of another plugin: that one's ADD has forwarding as it wants it, and ours has not asked.
#[rstest]
fn forwarding_stays_off_for_interfaces_of_others(#[values(V4, V6)] family: Family) -> Result<()> {
    needs_root!();
    let lab = lab()?;
    let node = lab.node.netns();
    let container = node.sibling("theirs")?;
    let sandbox = container.path().display().to_string();
    let (address, prefix) = match family {
        V4 => ("10.99.0.2", 32),
        V6 => ("fd00:99::2", 128),
    };
    node.ip(&[
        format!("link add name theirs type veth peer name eth0 netns {sandbox}"),
        "link set theirs up".to_owned(),
        format!("route add {address}/{prefix} dev theirs"),
    ])?;
    container.ip(&[
        format!("address add {address}/{prefix} dev eth0 {}", nodad(family)),
        "link set eth0 up".to_owned(),
    ])?;
    let earlier = json!({
        "cniVersion": "1.0.0",
        "interfaces": [{ "name": "theirs" }, { "name": "eth0", "sandbox": sandbox }],
        "ips": [{ "address": format!("{address}/{prefix}"), "interface": 1 }],
    });
    let conf = lab
        .conf()
        .with("ipMasq", false)
        .with("ipam", json!({}))
        .with("prevResult", earlier)
        .with_host_port(HOST, INSIDE);
    let call = |verb| {
        Call::new(verb)
            .attachment("theirs", &sandbox, "eth0")
            .conf(&conf)
    };
    call("ADD").run(&lab.node)?.result()?;
    let [key, _] = forwarding(family);
    node.set_sysctl(key, "0")?;
    lab.node.underpass(&APPLY)?;
    ensure!(node.sysctl(key)? == "0", "nobody has asked for it");
    call("DEL").run(&lab.node)?.silence()
}

/// A node that forwards again goes on to hear of its default route, as after an ADD.
#[test]
fn routers_are_heard_when_forwarding_comes_back() -> Result<()> {
    needs_root!();
    let lab = lab()?;
    let _pod = lab.pod("a")?;
    let node = lab.node.netns();
    let accept = format!("net/ipv6/conf/{}/accept_ra", Node::UPLINK);
    let [key, name] = forwarding(V6);
    node.set_sysctl(key, "0")?;
    node.set_sysctl(&accept, "1")?;
    let heard = format!("net.ipv6.conf.{}.accept_ra: 2 instead of 1", Node::UPLINK);
    apply_once(&lab, &[&heard, &format!("{name}: 1 instead of 0")])?;
    ensure!(node.sysctl(&accept)? == "2", "{}", node.sysctl(&accept)?);
    Ok(())
}

/// Where a network asks for it and has containers, and not for one that only asks.
#[test]
fn liberal_tracking_comes_back() -> Result<()> {
    const KEY: &str = "net/netfilter/nf_conntrack_tcp_be_liberal";
    needs_root!();
    let lab = Lab::new()?;
    let asking = lab.conf().with("conntrackLiberal", true);
    let ranges = json!([[{ "subnet": "10.77.0.0/24" }], [{ "subnet": "fd00:77::/64" }]]);
    let silent = lab.conf().with("name", "silent");
    let silent = silent.with_ipam("ranges", ranges);
    net_dir::put(&lab.node, "10-lab.conflist", &asking)?;
    let node = lab.node.netns();
    node.set_sysctl(KEY, "0")?;
    let _silent = lab.pod_with("silent", &silent)?;
    let said = lab.node.underpass(&APPLY)?;
    ensure!(said == NOTHING, "nobody needs it: {said:?}");
    ensure!(node.sysctl(KEY)? == "0");

    let pod = lab.pod_with("a", &asking)?;
    ensure!(node.sysctl(KEY)? == "1", "the ADD has not set it");
    node.set_sysctl(KEY, "0")?;
    // The programs have gone by 1 all the time.
    let said = lab.node.underpass(&APPLY)?;
    let changed = "net.netfilter.nf_conntrack_tcp_be_liberal: 1 instead of 0\n";
    ensure!(said == changed, "{said:?}");
    let said = lab.node.underpass(&APPLY)?;
    ensure!(said == NOTHING, "the second run: {said:?}");
    ensure!(node.sysctl(KEY)? == "1");
    pod.call_with_result("CHECK").run(&lab.node)?.silence()
}
