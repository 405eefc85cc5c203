//! A DEL takes off its own limits, and nobody else's.

use rstest::rstest;
use serde_json::json;
use underpass_tests::{netns::Netns, prelude::*, runtime::Call};

use super::{RATE, both, expect_filter, host_end, limited, ours};
use crate::{chain::IFNAME, plugins::run};

/// A container that may make interfaces makes one with the numbers that another's pair has on the node. Its DEL takes nothing off there.
#[test]
fn a_pair_that_seems_to_be_another_s() -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    let victim = lab.pod("victim")?;
    let bandwidth = ours("bandwidth")?;
    let limited = lab.conf().with("type", "bandwidth").with("ipMasq", false);
    let limited = limited
        .with("ipam", json!({}))
        .with("runtimeConfig", json!({ "bandwidth": both() }));
    let call = |verb, pod: &Pod| {
        let conf = limited.clone().with("prevResult", pod.result().clone());
        let path = pod.netns().path().display().to_string();
        let call = Call::new(verb)
            .attachment(pod.name(), &path, IFNAME)
            .conf(&conf);
        run(&lab.node, &bandwidth.path, &call)
    };
    call("ADD", &victim)?.result()?;
    let host = lab.node.netns();
    expect_filter(host, victim.host_veth(), RATE)?;

    let attacker = lab.pod("attacker")?;
    let index = |netns: &Netns, name: &str| -> Result<u64> {
        let links = netns.ip_json(&["link", "show", name])?;
        links[0]["ifindex"].as_u64().context("ifindex")
    };
    let outside = index(host, victim.host_veth())?;
    let inside = index(victim.netns(), IFNAME)?;
    attacker.netns().ip(&[
        format!("link delete {IFNAME}"),
        format!("link add {IFNAME} index {inside} type veth peer name p index {outside}"),
    ])?;
    call("DEL", &attacker)?;
    expect_filter(host, victim.host_veth(), RATE)
}

/// The runtime calls late for a container that is gone, or for another network's that had the interface's name: whose
/// namespace it names now has its own limits.
#[rstest]
fn a_late_del_leaves_anothers_limits(
    #[values("another container", "another network")] whose: &str,
    #[values("bridge", "ptp")] kind: &str,
) -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    let netns = lab.node.netns().sibling("a")?;
    let link = ours("bandwidth")?;
    let chain = limited(&lab, &link, kind, V4);
    let result = chain.add(&netns)?;
    let host = host_end(&lab, &netns)?;
    let (container, network) = match whose {
        "another container" => ("gone", "foreign"),
        _ => (netns.name(), "another"),
    };
    let conf = json!({
        "cniVersion": "1.0.0", "name": network, "type": "bandwidth", "bpfRoot": lab.node.bpf_root(), "prevResult": result,
    });
    let late = Call::new("DEL")
        .attachment(container, &netns.path().display().to_string(), IFNAME)
        .stdin(conf.to_string().as_bytes());
    run(&lab.node, &link.path, &late)?.silence()?;
    expect_filter(lab.node.netns(), &host, RATE)?;
    expect_filter(&netns, IFNAME, RATE / 2)?;
    chain.check(&netns, &result)?;
    chain.del(&netns, &result)
}
