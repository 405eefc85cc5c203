//! Which devices get programs because of host ports in a chain.

use std::process::Command;

use rstest::rstest;
use serde_json::{Value, json};
use underpass_tests::{
    prelude::*,
    runtime::Call,
    second::{Kind, Second},
    wire::Wire,
};

use super::{HOST, chained, foreign, mappings, portmap};
use crate::{
    chain::{Chain, IFNAME},
    plugins::run,
};

/// The devices that the programs know as uplinks.
fn uplinks(lab: &Lab) -> Result<Vec<String>> {
    let status: Value = serde_json::from_str(&lab.node.underpass(&["status", "--json"])?)?;
    let devices = status["devices"].as_array().context("no devices")?;
    let uplinks = devices.iter().filter(|device| device["kind"] == "uplink");
    let names: Option<Vec<&str>> = uplinks.map(|uplink| uplink["name"].as_str()).collect();
    let names = names.context("a device without a name")?;
    Ok(names.into_iter().map(str::to_owned).collect())
}

/// Of an interface of ours the network has said by which devices its packets leave.
#[rstest]
#[case::no_port(json!([]))]
#[case::a_port(mappings(HOST))]
fn portmap_after_ours_adds_none(#[case] ports: Value) -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    let _second = Second::connect(&lab, Kind::Wire(Wire::Ethernet))?;
    let link = portmap()?;
    let conf = lab.conf().with("uplinks", json!([Node::UPLINK]));
    let chain = Chain::new(&lab.node, &conf, [chained(&lab.node, "portmap")])
        .version("1.1.0")
        .ours(&link.path)
        .runtime("portMappings", ports);
    let netns = lab.node.netns().sibling("a")?;
    let result = chain.add(&netns)?;
    ensure!(
        uplinks(&lab)? == [Node::UPLINK],
        "after ADD: {:?}",
        uplinks(&lab)?
    );
    chain.check(&netns, &result)?;
    let conf = json!({
        "cniVersion": "1.1.0", "name": conf.name(), "type": "portmap", "bpfRoot": lab.node.bpf_root(),
        "cni.dev/valid-attachments": [{ "containerID": netns.name(), "ifname": IFNAME }],
    });
    let gc = Call::new("GC").stdin(conf.to_string().as_bytes());
    run(&lab.node, &link.path, &gc)?.silence()?;
    ensure!(
        uplinks(&lab)? == [Node::UPLINK],
        "after GC: {:?}",
        uplinks(&lab)?
    );
    chain.check(&netns, &result)?;
    chain.del(&netns, &result)
}

/// A second `bpfRoot`, and be it by a forgotten key, takes nothing from the bridge of the first one's containers.
#[rstest]
fn a_bridge_keeps_the_programs_of_the_first_root(#[values(V4, V6)] family: Family) -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    let conf = foreign(&lab, "bridge", family);
    let chain = |root: Value| {
        let mut ours = chained(&lab.node, "underpass");
        if !root.is_null() {
            ours["bpfRoot"] = root;
        }
        Chain::new(&lab.node, &conf, [ours]).runtime("portMappings", mappings(HOST))
    };
    let [netns, other] = ["theirs", "second"].map(|name| lab.node.netns().sibling(name));
    let (netns, other) = (netns?, other?);
    let first = chain(json!(null));
    let result = first.add(&netns)?;
    let filters = || {
        let mut command = Command::new("tc");
        command.args(["filter", "show", "dev", "br0", "ingress"]);
        lab.node.netns().expect(&mut command, &[])
    };
    let before = filters()?;
    let second = chain(json!("/sys/fs/bpf/of/another/second"));
    let error = second.add(&other).err().context("it was attached")?;
    let error = format!("{error:#}");
    ensure!(error.contains("another bpfRoot"), "{error}");
    ensure!(filters()? == before, "{before} became {}", filters()?);
    first.check(&netns, &result)?;
    for plugin in second.plugins().iter().rev() {
        second.call("DEL", plugin, &other, None)?;
    }
    ensure!(filters()? == before, "{before} became {}", filters()?);
    first.check(&netns, &result)?;
    first.del(&netns, &result)
}

/// A bridge that is the uplink of one network stays that when another network's containers are at it.
#[rstest]
fn a_bridge_stays_another_networks_uplink(#[values(V4, V6)] family: Family) -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    // Debian's `bridge` makes it, or takes it as it is.
    let first = foreign(&lab, "bridge", family);
    let chain = |name: &'static str| {
        Chain::new(&lab.node, &first, [chained(&lab.node, name)])
            .runtime("portMappings", mappings(HOST))
    };
    lab.node.netns().expect(
        Command::new("ip").args(["link", "add", "br0", "type", "bridge"]),
        &[],
    )?;
    lab.node.netns().set_up("br0")?;
    let pod = lab.pod_with(
        "ours",
        &lab.conf().with("uplinks", json!(["br0", Node::UPLINK])),
    )?;
    ensure!(
        uplinks(&lab)?.contains(&"br0".to_owned()),
        "{:?}",
        uplinks(&lab)?
    );
    let netns = lab.node.netns().sibling("theirs")?;
    let chain = chain("underpass");
    let result = chain.add(&netns)?;
    ensure!(
        uplinks(&lab)?.contains(&"br0".to_owned()),
        "{:?}",
        uplinks(&lab)?
    );
    chain.check(&netns, &result)?;
    chain.del(&netns, &result)?;
    ensure!(
        uplinks(&lab)?.contains(&"br0".to_owned()),
        "{:?}",
        uplinks(&lab)?
    );
    pod.del()
}
