//! What is asked for: whose limits count, and what is refused.

use serde_json::{Value, json};
use underpass_tests::{leak::Traces, netns::Netns, prelude::*, runtime::CniError};

use super::{RATE, bandwidth, both, first, host_end, keys, ours, root_qdisc, tc};
use crate::chain::{Chain, IFNAME};

/// The error of a chain's last plugin, after an ADD of those before it; and a DEL of all of them.
fn refused(chain: &Chain<'_>, netns: &Netns) -> Result<CniError> {
    let [interface, limits] = chain.plugins() else {
        unreachable!("two plugins");
    };
    let made = chain.call("ADD", interface, netns, None)?.result()?;
    let error = chain.call("ADD", limits, netns, Some(&made))?.error()?;
    chain.del(netns, &made)?;
    Ok(error)
}

/// Two plugins that limit one direction: the second says who was first, unless both say the same.
#[test]
fn a_direction_has_one_limit() -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    lab.pod("warm")?.del()?;
    let before = Traces::of(&lab.node)?;
    let netns = lab.node.netns().sibling("a")?;
    let link = ours("bandwidth")?;
    let chain = |own: Value, chained: Value| {
        let conf = own
            .as_object()
            .into_iter()
            .flatten()
            .fold(lab.conf(), |conf, (key, value)| {
                conf.with(key, value.clone())
            });
        Chain::new(&lab.node, &conf, [bandwidth(&lab.node)])
            .ours(&link.path)
            .runtime("bandwidth", chained)
    };
    for direction in ["ingress", "egress"] {
        let error = refused(&chain(keys(direction, RATE * 2), both()), &netns)?;
        let words = [
            &format!("invalid {direction}Rate"),
            "is limited to 40000000 bit/s already",
            "tbf 1:",
            "one plugin of the chain",
        ];
        ensure!(
            error.code == 7 && words.iter().all(|word| error.msg.contains(*word)),
            "{error}"
        );
        before.expect_same(&lab.node)?;
    }
    for (own, chained) in [
        (both(), both()),
        (keys("ingress", RATE), keys("egress", RATE)),
        (keys("egress", RATE), keys("ingress", RATE)),
    ] {
        let chain = chain(own, chained);
        let result = chain.add(&netns)?;
        chain.check(&netns, &result)?;
        chain.del(&netns, &result)?;
        before.expect_same(&lab.node)?;
    }
    // Somebody else's qdisc.
    let chain = chain(json!({}), keys("ingress", RATE));
    let [interface, limits] = chain.plugins() else {
        unreachable!("two plugins");
    };
    let made = chain.call("ADD", interface, &netns, None)?.result()?;
    let host = host_end(&lab, &netns)?;
    tc(
        lab.node.netns(),
        &format!("qdisc add dev {host} root handle 7: pfifo"),
    )?;
    let error = chain.call("ADD", limits, &netns, Some(&made))?.error()?;
    ensure!(error.code == 7 && error.msg.contains("pfifo 7:"), "{error}");
    // A DEL takes off what is ours only.
    chain.call("DEL", limits, &netns, Some(&made))?.silence()?;
    ensure!(root_qdisc(lab.node.netns(), &host)?["kind"] == "pfifo");
    chain.del(&netns, &made)
}

#[test]
fn what_can_not_be_had_is_refused() -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    lab.pod("warm")?.del()?;
    let before = Traces::of(&lab.node)?;
    let netns = lab.node.netns().sibling("a")?;
    let link = ours("bandwidth")?;
    let chain = |plugin: Value, limits: Value| {
        Chain::new(&lab.node, &lab.conf(), [plugin])
            .ours(&link.path)
            .runtime("bandwidth", limits)
    };
    let plain = bandwidth(&lab.node);
    let mut static_list = plain.clone();
    static_list["shapedSubnets"] = json!(["10.0.0.0/8"]);
    let mut elsewhere = plain.clone();
    elsewhere["bpfRoot"] = json!("/sys/fs/bpf/elsewhere");
    for (plugin, limits, code, word) in [
        (
            &plain,
            json!({ "ingressRate": 8 }),
            7,
            "burst must also be set",
        ),
        (
            &plain,
            json!({ "egressBurst": 8 }),
            7,
            "rate must also be set",
        ),
        (
            &plain,
            json!({ "unshapedSubnets": ["10.0.0.0/8"] }),
            2,
            "unshapedSubnets",
        ),
        (&static_list, both(), 2, "shapedSubnets"),
        (
            &elsewhere,
            both(),
            7,
            "invalid bpfRoot /sys/fs/bpf/elsewhere",
        ),
    ] {
        let error = refused(&chain(plugin.clone(), limits.clone()), &netns)?;
        ensure!(
            error.code == code && error.msg.contains(word),
            "{limits}: {error}"
        );
        before.expect_same(&lab.node)?;
    }
    // Not in a chain.
    let alone = chain(plain, both());
    let limits = &alone.plugins()[1];
    let error = alone.call("ADD", limits, &netns, None)?.error()?;
    ensure!(
        error.code == 7 && error.msg == "must be called as chained plugin",
        "{error}"
    );
    let error = alone.call("CHECK", limits, &netns, None)?.error()?;
    ensure!(
        error.code == 7 && error.msg.contains("prevResult"),
        "{error}"
    );
    // An interface without an end on the host.
    netns.ip(&[format!("link add {IFNAME} type bridge")])?;
    let made = json!({ "cniVersion": "1.0.0", "interfaces": [{ "name": IFNAME, "sandbox": netns.path() }] });
    let error = alone.call("ADD", limits, &netns, Some(&made))?.error()?;
    ensure!(
        error.code == 2 && error.msg.contains("ingressRate"),
        "{error}"
    );
    alone.call("DEL", limits, &netns, Some(&made))?.silence()?;
    Ok(())
}

/// Without limits everything is passed on and nothing is looked at; without a namespace there is nothing to take off.
#[test]
fn nothing_to_limit() -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    let netns = lab.node.netns().sibling("a")?;
    let link = ours("bandwidth")?;
    let made = json!({
        "cniVersion": "1.0.0",
        "interfaces": [{ "name": "any", "sandbox": "/run/netns/any" }],
        "ips": [{ "interface": 0, "address": "fd00::2/64" }],
    });
    for limits in [json!({}), json!({ "ingressRate": 0, "ingressBurst": 0 })] {
        let chain = Chain::new(&lab.node, &lab.conf(), [bandwidth(&lab.node)])
            .ours(&link.path)
            .runtime("bandwidth", limits);
        let plugin = &chain.plugins()[1];
        let call = |verb| chain.call(verb, plugin, &netns, Some(&made));
        let passed = call("ADD")?.result()?;
        for key in ["interfaces", "ips"] {
            ensure!(passed[key] == made[key], "{passed} instead of {made}");
        }
        call("CHECK")?.silence()?;
        call("DEL")?.silence()?;
        netns.unlink().ok();
        call("DEL")?.silence()?;
    }
    Ok(())
}

/// As in the reference: if the config has limits of its own, the runtime's don't count.
#[test]
fn whose_limits_count() -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    let netns = lab.node.netns().sibling("a")?;
    let link = ours("bandwidth")?;
    let options = |chain: Chain<'_>| -> Result<Value> {
        let result = chain.add(&netns)?;
        let root = root_qdisc(lab.node.netns(), &host_end(&lab, &netns)?)?;
        chain.del(&netns, &result)?;
        ensure!(root["kind"] == "tbf", "{root}");
        Ok(root["options"].clone())
    };
    let mut plugin = bandwidth(&lab.node);
    for own in [json!({}), keys("ingress", RATE * 2)] {
        for (key, value) in own.as_object().into_iter().flatten() {
            plugin[key] = value.clone();
        }
        let chain = Chain::new(&lab.node, &first(&lab, "ptp", V4), [plugin.clone()])
            .runtime("bandwidth", keys("ingress", RATE));
        let theirs = options(chain.clone())?;
        let ours = options(chain.ours(&link.path))?;
        ensure!(ours == theirs, "{ours} instead of {theirs}");
    }
    Ok(())
}
