//! ADD, DEL, CHECK and GC, as a runtime calls them.

use std::{
    collections::BTreeSet,
    thread,
    time::{Duration, Instant},
};

use rstest::rstest;
use serde_json::{Value, json};
use underpass_tests::{
    counter::Registry,
    frame,
    leak::Traces,
    patience,
    prelude::*,
    runtime::{Call, Conf},
    traffic::PATIENCE,
};

const PORT: u16 = 443;

#[test]
fn the_result_has_the_shape_of_ptp() -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    let pod = lab.pod("a")?;
    let result = pod.result();
    ensure!(result["cniVersion"] == "1.1.0", "{result}");
    let interfaces = result["interfaces"].as_array().context("interfaces")?;
    ensure!(interfaces.len() == 2, "{result}");
    ensure!(
        interfaces[0].get("sandbox").is_none(),
        "the host's end first: {result}"
    );
    ensure!(interfaces[1]["name"] == Pod::IFNAME, "{result}");
    ensure!(
        interfaces[1]["sandbox"] == pod.netns().path().display().to_string(),
        "{result}"
    );
    ensure!(pod.addresses().len() == 2, "{result}");
    for ip in result["ips"].as_array().into_iter().flatten() {
        ensure!(ip["interface"] == 1, "{result}");
        ensure!(ip["gateway"].is_string(), "{result}");
    }
    for (at, (netns, mac)) in [
        (lab.node.netns(), pod.host_mac()?),
        (pod.netns(), pod.mac()?),
    ]
    .into_iter()
    .enumerate()
    {
        let name = interfaces[at]["name"].as_str().unwrap_or_default();
        let link = netns.ip_json(&["link", "show", "dev", name])?;
        let real = link[0]["address"].as_str().unwrap_or_default();
        let told = frame::mac_text(mac);
        ensure!(real == told, "{name} has {real}, the result says {told}");
    }
    Ok(())
}

/// Adds a container to a namespace where the kernel looks for duplicates of every address that does not ask it not to, as it does wherever
/// nobody told it otherwise.
fn pod_where_duplicates_matter(lab: &Lab, conf: &Conf) -> Result<Pod> {
    let netns = lab.node.netns().sibling("a")?;
    for netns in [&netns, lab.node.netns()] {
        for device in ["all", "default"] {
            netns.set_sysctl(&format!("net/ipv6/conf/{device}/accept_dad"), "1")?;
        }
    }
    Pod::add_to(&lab.node, netns, conf)
}

#[rstest]
fn a_pod_is_configured_without_waiting(#[values(V4, V6)] family: Family) -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    let pod = pod_where_duplicates_matter(&lab, &lab.conf())?;
    for (netns, device) in [
        (pod.netns(), Pod::IFNAME),
        (lab.node.netns(), pod.host_veth()),
    ] {
        let listed = netns.ip_json(&["address", "show", "dev", device])?;
        let addresses: Vec<_> = listed[0]["addr_info"]
            .as_array()
            .into_iter()
            .flatten()
            .collect();
        // Of IPv6 one of each scope, which the kernel must not look for duplicates of.
        let at_once = addresses.iter().filter(|address| address["nodad"] == true);
        ensure!(at_once.count() == 2, "{device}: {listed}");
        ensure!(
            !listed.to_string().contains("tentative"),
            "{device}: {listed}"
        );
    }
    let version = match family {
        V4 => "-4",
        V6 => "-6",
    };
    let routes = pod.netns().ip_json(&[version, "route", "show"])?;
    let has_default = routes
        .as_array()
        .into_iter()
        .flatten()
        .any(|route| route["dst"] == "default");
    ensure!(has_default, "{routes}");
    let permanent = pod
        .netns()
        .ip_json(&[version, "neighbour", "show", "nud", "permanent"])?;
    ensure!(
        permanent.as_array().is_some_and(|list| !list.is_empty()),
        "the gateway's neighbour entry is permanent: {permanent}"
    );
    Ok(())
}

/// What the IPAM gave is used at once. Of an address that the container adds itself the kernel looks for duplicates, if it may.
#[rstest]
fn duplicates_are_looked_for_where_that_is_enabled(
    #[values(true, false)] enabled: bool,
) -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    let netns = lab.node.netns().sibling("a")?;
    // As the kernel has it for every device, before somebody changes it.
    netns.set_sysctl("net/ipv6/conf/default/accept_dad", "1")?;
    // So long that no machine is too slow to see it.
    netns.set_sysctl("net/ipv6/conf/default/dad_transmits", "100")?;
    // For a netkit, which has no ARP, the kernel never looks.
    let conf = lab.conf().with("device", "veth").with("enabledad", enabled);
    let pod = Pod::add_to(&lab.node, netns, &conf)?;
    let kept = pod.netns().sysctl("net/ipv6/conf/eth0/accept_dad")?;
    ensure!(kept == if enabled { "1" } else { "0" }, "accept_dad {kept}");
    let given = pod.ip(V6).to_string();
    let address = address_of(&pod, &given)?;
    ensure!(address["nodad"] == true, "{address}");
    ensure!(address.get("tentative").is_none(), "{address}");
    ping::Ping::new(pod.netns(), V6.remote())?.echo(56)?;

    let own = "2001:db8:5::5";
    pod.netns()
        .ip(&[format!("address add {own}/128 dev {}", Pod::IFNAME)])?;
    let end = Instant::now() + patience::here(PATIENCE);
    loop {
        // Every new address is tentative for a moment.
        let address = address_of(&pod, own)?;
        if (address["tentative"] == true) == enabled {
            return Ok(());
        }
        ensure!(Instant::now() < end, "{address}");
        thread::sleep(Duration::from_millis(10));
    }
}

/// An address of a container's interface, as `ip` describes it.
fn address_of(pod: &Pod, address: &str) -> Result<Value> {
    let listed = pod
        .netns()
        .ip_json(&["address", "show", "dev", Pod::IFNAME])?;
    let addresses = listed[0]["addr_info"].as_array().into_iter().flatten();
    let found = addresses.into_iter().find(|one| one["local"] == address);
    found
        .cloned()
        .with_context(|| format!("no {address} in {listed}"))
}

#[test]
fn a_second_add_fails_and_changes_nothing() -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    let pod = lab.pod("a")?;
    let before = Traces::of(&lab.node)?;
    pod.call("ADD").run(&lab.node)?.error()?;
    before.expect_same(&lab.node)?;
    pod.call_with_result("CHECK").run(&lab.node)?.silence()?;
    ping::ping(pod.netns(), V4.remote())?;
    ping::ping(pod.netns(), V6.remote())
}

/// Another network of the same node, with ranges of its own.
fn elsewhere(lab: &Lab) -> Conf {
    let ranges = json!([[{ "subnet": "10.99.0.0/24" }], [{ "subnet": "fd00:99::/64" }]]);
    lab.conf()
        .with("name", "elsewhere")
        .with_ipam("ranges", ranges)
}

#[test]
fn gc_frees_what_is_not_listed() -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    let (kept, lost) = (lab.pod("kept")?, lab.pod("lost")?);
    let other = lab.pod_with("other", &elsewhere(&lab))?;
    let address = lost.ip(V4);
    let veth = lost.host_veth().to_owned();
    lost.abandon();
    let conf = lab.conf().with(
        "cni.dev/valid-attachments",
        json!([{ "containerID": kept.name(), "ifname": Pod::IFNAME }]),
    );
    Call::new("GC").conf(&conf).run(&lab.node)?.silence()?;
    let traces = Traces::of(&lab.node)?;
    ensure!(!traces.devices.contains(&veth), "{traces:#?}");
    let lease = lab.node.data_dir().join("lab").join(address.to_string());
    ensure!(!traces.leases.contains(&lease), "{traces:#?}");
    kept.call_with_result("CHECK").run(&lab.node)?.silence()?;
    ensure!(
        traces.devices.contains(other.host_veth()),
        "another network is not touched: {traces:#?}"
    );
    Ok(())
}

/// What a runtime still has of a container may be the plugin's own namespace by now: all of the attachment goes.
#[rstest]
fn a_del_does_not_ask_whose_namespace_it_is(
    #[values("/proc/self/ns/net", "/proc/1/fd/0")] path: &str,
) -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    lab.pod("first")?.del()?;
    let before = Traces::of(&lab.node)?;
    let pod = lab.pod("a")?;
    pod.call("DEL")
        .env("CNI_NETNS", path)
        .run(&lab.node)?
        .silence()?;
    before.expect_same(&lab.node)?;
    pod.abandon();
    Ok(())
}

#[test]
fn the_namespace_of_the_plugin_is_refused() -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    let before = Traces::of(&lab.node)?;
    let error = Call::new("ADD")
        .attachment("self", "/proc/self/ns/net", "eth9")
        .conf(&lab.conf())
        .run(&lab.node)?
        .error()?;
    ensure!(error.code == 8, "{error}");
    before.expect_same(&lab.node)
}

#[test]
fn nodes_of_one_machine_are_told_apart() -> Result<()> {
    needs_root!();
    let labs = [Lab::new()?, Lab::new()?];
    // The same container, network and address on both: each has a state of its own.
    let pods = [labs[0].pod("a")?, labs[1].pod("a")?];
    ensure!(pods[0].ip(V4) == pods[1].ip(V4));
    for (pod, family) in [(&pods[0], V4), (&pods[1], V6)] {
        ping::ping(pod.netns(), family.remote())?;
    }
    Ok(())
}

/// The same container, network and address on two nodes whose folders are next to each other: `bpfRoot` and `ipam.dataDir` are all that
/// tells one node's state from the other's.
#[rstest]
fn folders_alone_tell_nodes_apart(#[values(V4, V6)] family: Family) -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    let labs = [lab.beside()?, lab];
    let [near, far] = &labs;
    let [ours, theirs] = add_at_once(&labs)?;
    ensure!(ours.addresses() == theirs.addresses());
    ensure!(ours.host_veth() == theirs.host_veth());
    let _servers = [near, far]
        .map(|lab| udp::Server::start(lab.world.netns(), family.remote_at(PORT)))
        .into_iter()
        .collect::<Result<Vec<_>>>()?;
    for (lab, pod, other) in [(near, &ours, far), (far, &theirs, near)] {
        let meters = [Meter::start(&lab.node)?, Meter::start(&other.node)?];
        talk(pod, family)?;
        meters[0].expect(Counter::Masqueraded, 1)?;
        meters[0].expect(Counter::BypassWire, 3)?;
        for counter in [Counter::Masqueraded, Counter::BypassWire, Counter::Learned] {
            meters[1].expect_none(counter)?;
        }
        pod.call_with_result("CHECK").run(&lab.node)?.silence()?;
    }

    let before = Traces::of(&far.node)?;
    ensure!(
        !before.leases.is_empty() && before.registry.owners.len() == 1,
        "{before:#?}"
    );
    ours.del()?;
    before.expect_same(&far.node)?;
    let again = near.pod("b")?;
    again.abandon();
    let nobody = near.conf().with("cni.dev/valid-attachments", json!([]));
    Call::new("GC").conf(&nobody).run(&near.node)?.silence()?;
    before.expect_same(&far.node)?;
    let after = Traces::of(&near.node)?;
    ensure!(
        after.leases.is_empty() && after.registry == Registry::default(),
        "{after:#?}"
    );
    ensure!(after.pins.is_disjoint(&before.pins), "{after:#?}");
    theirs.call_with_result("CHECK").run(&far.node)?.silence()?;
    talk(&theirs, family)?;
    theirs.del()
}

fn talk(pod: &Pod, family: Family) -> Result<()> {
    let seen = udp::Client::open(pod.netns(), family)?
        .chat(family.remote_at(PORT), 5)?
        .seen;
    ensure!(seen.ip() == family.node(), "seen {seen}");
    ping::ping(pod.netns(), family.remote())
}

/// A container of the same name on each of two nodes.
fn add_at_once(labs: &[Lab; 2]) -> Result<[Pod; 2]> {
    thread::scope(|scope| {
        let threads = labs.each_ref().map(|lab| scope.spawn(|| lab.pod("a")));
        let [one, other] = threads.map(|thread| thread.join().expect("an ADD does not panic"));
        Ok([one?, other?])
    })
}

#[rstest]
fn a_network_of_one_family(#[values(V4, V6)] family: Family) -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    let conf = lab
        .conf()
        .with_ipam("ranges", json!([[{ "subnet": family.pods() }]]))
        .with_ipam("routes", json!([{ "dst": family.everywhere() }]));
    let (a, b) = (lab.pod_with("a", &conf)?, lab.pod_with("b", &conf)?);
    ensure!(a.addresses() == [a.ip(family)], "{}", a.result());
    a.call_with_result("CHECK").run(&lab.node)?.silence()?;
    ping::ping(a.netns(), b.ip(family))?;
    ping::ping(a.netns(), family.remote())
}

#[test]
fn networks_of_one_node_reach_each_other() -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    let (a, b) = (lab.pod("a")?, lab.pod_with("b", &elsewhere(&lab))?);
    for family in Family::BOTH {
        ping::ping(a.netns(), b.ip(family))?;
        ping::ping(b.netns(), a.ip(family))?;
        ping::ping(b.netns(), family.remote())?;
    }
    Ok(())
}

#[test]
fn the_first_adds_may_come_all_at_once() -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    let names: Vec<String> = (0..8).map(|at| format!("pod{at}")).collect();
    let pods = thread::scope(|scope| {
        let threads: Vec<_> = names
            .iter()
            .map(|name| scope.spawn(|| lab.pod(name)))
            .collect();
        threads
            .into_iter()
            .map(|thread| thread.join().expect("an ADD does not panic"))
            .collect::<Result<Vec<_>>>()
    })?;
    let addresses: BTreeSet<_> = pods.iter().flat_map(Pod::addresses).collect();
    ensure!(addresses.len() == 16, "{addresses:?}");
    for pod in &pods {
        ping::ping(pod.netns(), pods[0].ip(V4))?;
        ping::ping(pod.netns(), V6.remote())?;
    }
    Ok(())
}

#[test]
fn the_command_line_shows_the_endpoints() -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    let pod = lab.pod("a")?;
    let (text, json) = (
        lab.node.underpass(&["status"])?,
        lab.node.underpass(&["status", "--json"])?,
    );
    let json: Value = serde_json::from_str(&json)?;
    for address in pod.addresses() {
        ensure!(text.contains(&address.to_string()), "{text}");
        ensure!(json.to_string().contains(&address.to_string()), "{json:#}");
    }
    ensure!(text.contains("Last ADD"), "{text}");
    let steps = json["lastAdd"]["steps"].as_array().map_or(0, Vec::len);
    ensure!(steps > 5, "{json:#}");
    for program in ["from_pod", "to_pod", "from_wire", "to_wire"] {
        ensure!(text.contains(program), "{text}");
    }
    Ok(())
}

#[test]
fn the_first_packet_after_an_add_is_not_lost() -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    let first = lab.pod("first")?;
    for round in 0..12 {
        let pod = lab.pod(&format!("pod{round}"))?;
        for family in Family::BOTH {
            // Both directions: what the new pod sends, and what it is sent.
            let there = ping::Ping::new(pod.netns(), first.ip(family))?.echo(56);
            there.with_context(|| format!("from pod {round}"))?;
        }
        let pod = lab.pod(&format!("silent{round}"))?;
        for family in Family::BOTH {
            let back = ping::Ping::new(lab.node.netns(), pod.ip(family))?.echo(56);
            back.with_context(|| format!("to silent pod {round}"))?;
        }
    }
    Ok(())
}

/// People label devices for what counts their packets.
#[rstest]
fn a_pair_with_somebodys_alias_goes(#[values("DEL", "GC")] verb: &str) -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    lab.pod("first")?.del()?;
    let before = Traces::of(&lab.node)?;
    let pod = lab.pod("a")?;
    let name = pod.host_veth().to_owned();
    lab.node
        .netns()
        .ip(&[format!("link set {name} alias web-1")])?;
    match verb {
        "GC" => {
            let conf = lab.conf().with("cni.dev/valid-attachments", json!([]));
            Call::new("GC").conf(&conf).run(&lab.node)?.silence()?;
            pod.abandon();
        }
        _ => pod.del()?,
    }
    ensure!(lab.node.netns().ifindex(&name).is_err(), "{name} is there");
    before.expect_same(&lab.node)
}
