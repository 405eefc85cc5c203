//! Sysctls of the node that containers need, and that somebody has set back.

use rstest::rstest;
use serde_json::json;
use underpass_tests::{prelude::*, runtime::Call};

use super::{APPLY, HOST, INSIDE, NOTHING, apply_once, lab, nodad};
use crate::net_dir;

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
