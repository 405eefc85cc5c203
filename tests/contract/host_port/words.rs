//! What it answers: results unchanged, and errors, in the reference plugin's words under its name.

use rstest::rstest;
use serde_json::{Value, json};
use underpass_tests::{
    leak::Traces,
    netns::Netns,
    prelude::*,
    runtime::{Call, CniError},
};

use super::{chained, foreign, mappings, portmap};
use crate::{
    chain::{Chain, IFNAME},
    plugins::{Answer, run},
};

fn ask(lab: &Lab, verb: &str, netns: &Netns, conf: &Value) -> Result<Answer> {
    let path = netns.path().display().to_string();
    let call = Call::new(verb)
        .attachment(netns.name(), &path, IFNAME)
        .stdin(conf.to_string().as_bytes());
    run(&lab.node, &portmap()?.path, &call)
}

fn conf(lab: &Lab, version: &str) -> Value {
    let mut conf = chained(&lab.node, "portmap");
    conf["cniVersion"] = json!(version);
    conf["name"] = json!("foreign");
    conf
}

/// A result as another plugin would print it.
fn result(version: &str) -> Value {
    match version {
        "0.1.0" | "0.2.0" => json!({
            "cniVersion": version,
            "ip4": { "ip": "10.99.0.2/24", "gateway": "10.99.0.1", "routes": [{ "dst": "0.0.0.0/0" }] },
            "dns": { "nameservers": ["10.99.0.1"] },
        }),
        "0.3.0" | "0.3.1" | "0.4.0" => json!({
            "cniVersion": version,
            "interfaces": [{ "name": "br0", "mac": "0a:00:00:00:00:01" }, { "name": IFNAME, "sandbox": "/run/netns/x" }],
            "ips": [{ "version": "4", "interface": 1, "address": "10.99.0.2/24", "gateway": "10.99.0.1" }],
            "routes": [{ "dst": "0.0.0.0/0", "gw": "10.99.0.1" }],
            "dns": {},
        }),
        _ => json!({
            "cniVersion": version,
            "interfaces": [{ "name": "br0", "mac": "0a:00:00:00:00:01" }, { "name": IFNAME, "sandbox": "/run/netns/x" }],
            "ips": [{ "interface": 1, "address": "10.99.0.2/24", "gateway": "10.99.0.1" }],
            "routes": [{ "dst": "0.0.0.0/0", "gw": "10.99.0.1" }],
            "dns": { "search": ["example"] },
        }),
    }
}

#[rstest]
fn without_ports_nothing_is_done_and_the_result_passes(
    #[values("0.1.0", "0.2.0", "0.3.0", "0.3.1", "0.4.0", "1.0.0", "1.1.0")] version: &str,
    #[values(json!({}), json!({ "portMappings": [] }), Value::Null)] runtime: Value,
) -> Result<()> {
    needs_root!();
    let lab = Lab::unloaded()?;
    let netns = lab.node.netns().sibling("a")?;
    let mut conf = conf(&lab, version);
    conf["runtimeConfig"] = runtime;
    conf["prevResult"] = result(version);
    let passed = ask(&lab, "ADD", &netns, &conf)?.result()?;
    ensure!(passed == result(version), "{passed}");
    if !["0.1.0", "0.2.0", "0.3.0", "0.3.1"].contains(&version) {
        ask(&lab, "CHECK", &netns, &conf)?.silence()?;
    }
    ask(&lab, "DEL", &netns, &conf)?.silence()?;
    let pins = Traces::of(&lab.node)?.pins;
    ensure!(pins.is_empty(), "nothing has to be loaded: {pins:?}");
    Ok(())
}

#[rstest]
fn the_result_of_the_chain_is_that_of_its_first_plugin(
    #[values("0.3.1", "0.4.0", "1.0.0")] version: &str,
) -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    let netns = lab.node.netns().sibling("a")?;
    let first = foreign(&lab, "bridge", V4);
    let link = portmap()?;
    let ours = chained(&lab.node, "portmap");
    let chain = Chain::new(&lab.node, &first, [ours.clone()])
        .ours(&link.path)
        .version(version)
        .runtime("portMappings", mappings(super::HOST));
    let mut made = chain.call("ADD", first.json(), &netns, None)?.result()?;
    // Since 1.0.0 settings that set nothing may be left out.
    if version == "1.0.0" && made["dns"] == json!({}) {
        made.as_object_mut().map(|made| made.remove("dns"));
    }
    let passed = chain.call("ADD", &ours, &netns, Some(&made))?.result()?;
    ensure!(passed == made, "{passed} instead of {made}");
    let error = chain.call("ADD", &ours, &netns, Some(&made))?.error()?;
    ensure!(error.code == 101, "a second ADD without a DEL: {error}");
    chain.del(&netns, &made)
}

/// What makes a good config a bad one.
type Change<'a> = &'a dyn Fn(&mut Value);

#[test]
fn errors() -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    let netns = lab.node.netns().sibling("a")?;
    let before = Traces::of(&lab.node)?;
    let refused = |verb: &str, change: Change<'_>| -> Result<CniError> {
        let mut conf = conf(&lab, "1.0.0");
        conf["prevResult"] = result("1.0.0");
        change(&mut conf);
        ask(&lab, verb, &netns, &conf)?.error()
    };
    let port = |host: i64, inside: i64| {
        move |conf: &mut Value| {
            conf["runtimeConfig"]["portMappings"] =
                json!([{ "hostPort": host, "containerPort": inside, "protocol": "tcp" }]);
        }
    };
    let at = |host: &'static str| {
        move |conf: &mut Value| {
            conf["runtimeConfig"]["portMappings"] =
                json!([{ "hostPort": 80, "containerPort": 80, "hostIP": host }]);
        }
    };
    let key = |key: &'static str, value: Value| move |conf: &mut Value| conf[key] = value.clone();
    let alone = |conf: &mut Value| conf["prevResult"] = Value::Null;
    let table: [(&str, Change<'_>, u64, &str); 19] = [
        ("ADD", &alone, 7, "must be called as chained plugin"),
        ("ADD", &alone, 7, "put it behind the plugin that makes"),
        ("CHECK", &alone, 7, "hand the result of the ADD to CHECK"),
        ("ADD", &port(0, 80), 7, "Invalid host port number: 0"),
        (
            "ADD",
            &port(0, 80),
            7,
            "hostPort in runtimeConfig.portMappings[0] must be",
        ),
        (
            "ADD",
            &key("backend", json!("ipfw")),
            7,
            "backend must be \"iptables\" or \"nftables\"",
        ),
        (
            "ADD",
            &port(8080, 80),
            7,
            "put this plugin behind the one that makes the interface",
        ),
        ("CHECK", &port(-1, 80), 7, "Invalid host port number: -1"),
        ("ADD", &port(8080, 0), 7, "Invalid container port number: 0"),
        ("ADD", &port(70_000, 80), 7, "hostPort 70000"),
        ("ADD", &at("224.0.0.1"), 7, "invalid hostIP \"224.0.0.1\""),
        ("ADD", &at("ff02::1"), 7, "invalid hostIP \"ff02::1\""),
        (
            "ADD",
            &key("conditionsV4", json!(["-s", "10.0.0.0/8"])),
            2,
            "conditionsV4",
        ),
        (
            "ADD",
            &key("conditionsV6", json!(["!", "x"])),
            2,
            "conditionsV6",
        ),
        (
            "ADD",
            &key("externalSetMarkChain", json!("MARK")),
            2,
            "externalSetMarkChain",
        ),
        ("ADD", &key("masqAll", json!(true)), 2, "masqAll"),
        (
            "ADD",
            &key("markMasqBit", json!(32)),
            7,
            "MasqMarkBit must be between 0 and 31",
        ),
        (
            "ADD",
            &key("backend", json!("ipfw")),
            7,
            "unrecognized backend \"ipfw\"",
        ),
        ("ADD", &port(8080, 80), 7, "the container does not have"),
    ];
    for (verb, change, code, text) in table {
        let error = refused(verb, change)?;
        ensure!(
            error.code == code && error.to_string().contains(text),
            "{text:?}: {error}"
        );
        before.expect_same(&lab.node)?;
    }
    // Whatever the mappings say, DEL cleans up.
    let mut conf = conf(&lab, "1.0.0");
    conf["runtimeConfig"]["portMappings"] = json!([{ "hostPort": 0 }]);
    ask(&lab, "DEL", &netns, &conf)?.silence()
}

/// A container that the node has no way to, of either family.
#[rstest]
fn a_container_that_the_node_does_not_reach(#[values(V4, V6)] family: Family) -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    let pod = lab.pod("a")?;
    let (address, subnet) = match family {
        V4 => ("10.99.0.2/24", "10.99.0.0/24"),
        V6 => ("fd00:99::2/64", "fd00:99::/64"),
    };
    let option = match family {
        V4 => "-4",
        V6 => "-6",
    };
    let mut route = std::process::Command::new("ip");
    route.args([option, "route", "add", "blackhole", subnet]);
    lab.node.netns().expect(&mut route, &[])?;
    let mut conf = conf(&lab, "1.0.0");
    conf["prevResult"] = result("1.0.0");
    conf["prevResult"]["ips"] = json!([{ "interface": 1, "address": address }]);
    conf["runtimeConfig"]["portMappings"] = mappings(8080);
    let error = ask(&lab, "ADD", pod.netns(), &conf)?.error()?;
    let words = format!(
        "host ports can't lead to the container: the host has no route to {}",
        address.split('/').next().unwrap_or_default()
    );
    ensure!(error.code == 7 && error.msg.contains(&words), "{error}");
    Ok(())
}

#[test]
fn an_interface_without_an_end_on_the_host_is_refused() -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    let netns = lab.node.netns().sibling("a")?;
    let link = portmap()?;
    let first = foreign(&lab, "macvlan", V4).with("master", Node::UPLINK);
    let chain = Chain::new(&lab.node, &first, [chained(&lab.node, "portmap")]).ours(&link.path);
    let mapped = chain.clone().runtime("portMappings", mappings(8080));
    let error = format!(
        "{:#}",
        mapped.add(&netns).expect_err("no way from the host")
    );
    ensure!(
        error.contains("code 2") && error.contains("macvlan"),
        "{error}"
    );
    mapped.del(&netns, &json!({ "cniVersion": "1.0.0" }))?;
    let result = chain.add(&netns)?;
    chain.check(&netns, &result)?;
    chain.del(&netns, &result)
}
