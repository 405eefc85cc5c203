//! CHECK compares every route of the result with one of its own, and the MTU of the host's end.

use rstest::rstest;
use serde_json::{Value, json};
use underpass_tests::prelude::*;

/// What is tampered with, in the words of `ip` (of the gateway `{gateway}`), and what CHECK must say then.
const TAMPERS: [(&[&str], &str); 5] = [
    (
        &["route change {everywhere} via {gateway} dev eth0 metric 7 onlink"],
        "the container's route to {everywhere} of priority 7 by eth0 has no mtu, and has to have the mtu 1400; \
         the container's route to {everywhere} of priority 7 by eth0 has no advmss, and has to have the advmss 1300",
    ),
    (
        &["route change {everywhere} via {gateway} dev eth0 metric 7 onlink mtu 1390 advmss 1300"],
        "the container's route to {everywhere} of priority 7 by eth0 has the mtu 1390, and has to have the mtu 1400",
    ),
    (
        &["route del {everywhere} metric 8"],
        "the container has no route to {everywhere} of priority 8 by eth0",
    ),
    (
        &[
            "route del {far} table 200",
            "route add {far} via {gateway} dev eth0 onlink table 77",
        ],
        "the container has no route to {far} in table 200 by eth0",
    ),
    // Another one of the same destination is not it.
    (
        &["route del {far} table main"],
        "the container has no route to {far} by eth0",
    ),
];

fn far(family: Family) -> &'static str {
    match family {
        V4 => "203.0.113.0/24",
        V6 => "2001:db8:3::/48",
    }
}

/// Routes that differ in one attribute only.
fn routes() -> Value {
    let of = |family: Family| {
        let (everywhere, far) = (family.everywhere(), far(family));
        [
            json!({ "dst": everywhere, "priority": 8 }),
            json!({ "dst": everywhere, "priority": 7, "mtu": 1400, "advmss": 1300 }),
            json!({ "dst": far }),
            json!({ "dst": far, "table": 200 }),
        ]
    };
    Family::BOTH.map(of).concat().into()
}

#[rstest]
fn a_route_that_was_tampered_with_is_named(#[values(V4, V6)] family: Family) -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    let conf = lab.conf().with_ipam("routes", routes());
    for (at, (commands, says)) in TAMPERS.into_iter().enumerate() {
        let pod = lab.pod_with(&format!("pod{at}"), &conf)?;
        let check = pod.call_with_result("CHECK");
        check.run(&lab.node)?.silence()?;
        let filled = |text: &str| {
            text.replace("{everywhere}", family.everywhere())
                .replace("{gateway}", &family.pod_gateway().to_string())
                .replace("{far}", far(family))
        };
        let commands: Vec<_> = commands.iter().map(|command| filled(command)).collect();
        pod.netns().ip(&commands)?;
        let error = check
            .run(&lab.node)?
            .error()
            .with_context(|| format!("CHECK after {commands:?}"))?;
        ensure!(error.msg.ends_with(&filled(says)), "{commands:?}: {error}");
    }
    Ok(())
}

/// Both of them are one, by the same gateway.
#[test]
fn a_route_that_is_asked_for_twice_is_installed_once() -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    let twice = [
        json!({ "dst": V6.everywhere() }),
        json!({ "dst": V6.everywhere(), "priority": 1024 }),
        json!({ "dst": V4.everywhere() }),
    ];
    let conf = lab
        .conf()
        .with_ipam("routes", twice)
        .with("isDefaultGateway", true);
    let pod = lab.pod_with("a", &conf)?;
    pod.call_with_result("CHECK").run(&lab.node)?.silence()
}

/// The kernel's limit is lower than the number's.
#[test]
fn an_attribute_that_the_kernel_lowers_is_none_that_differs() -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    let large = Family::BOTH
        .map(|family| json!({ "dst": family.everywhere(), "mtu": 65535, "advmss": 65535 }));
    let pod = lab.pod_with("a", &lab.conf().with_ipam("routes", large))?;
    pod.call_with_result("CHECK").run(&lab.node)?.silence()
}

#[test]
fn another_mtu_of_the_hosts_end_is_named() -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    let pod = lab.pod("a")?;
    let check = pod.call_with_result("CHECK");
    check.run(&lab.node)?.silence()?;
    let host = pod.host_veth();
    lab.node
        .netns()
        .ip(&[format!("link set {host} mtu 1300")])?;
    let error = check.run(&lab.node)?.error()?;
    let says = format!("{host} has the MTU 1300, and has to have 1500");
    ensure!(error.msg.contains(&says), "{error}");
    Ok(())
}
