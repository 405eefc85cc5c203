//! Which devices get programs because of host ports in a chain.

use std::{
    net::{IpAddr, SocketAddr},
    process::Command,
    thread,
};

use rstest::rstest;
use serde_json::{Value, json};
use underpass_tests::{
    netns::Netns,
    prelude::*,
    runtime::Call,
    second::{Kind, Second},
    traffic::{SILENCE, serve},
    wire::Wire,
};

use super::{Container, HOST, chained, foreign, mappings, portmap, reaches};
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

/// Fails unless the bridge is an uplink.
fn expect_bridge(lab: &Lab) -> Result<()> {
    let uplinks = uplinks(lab)?;
    ensure!(uplinks.contains(&"br0".to_owned()), "{uplinks:?}");
    Ok(())
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

/// A bridge by which another network's containers are reached becomes an uplink: what leaves by it is masqueraded, and they keep their
/// ports, there as well.
#[rstest]
fn a_bridge_of_others_can_become_an_uplink(#[values(V4, V6)] family: Family) -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    let conf = foreign(&lab, "bridge", family);
    let chain = Chain::new(&lab.node, &conf, [chained(&lab.node, "underpass")])
        .runtime("portMappings", mappings(HOST));
    let theirs = Container::add(&lab.node, "theirs", chain, family)?;
    ensure!(uplinks(&lab)? == [Node::UPLINK], "{:?}", uplinks(&lab)?);
    let lan = Lan::behind(&lab, family)?;
    let conf = lab.conf().with("uplinks", json!(["br0", Node::UPLINK]));
    let ours = lab.pod_with("ours", &conf)?;
    expect_bridge(&lab)?;
    ours.call_with_result("CHECK").run(&lab.node)?.silence()?;
    theirs.chain.check(&theirs.netns, &theirs.result)?;
    let _server = serve(&lan.netns, SocketAddr::new(lan.own, HOST))?;
    let seen = tcp::visit(ours.netns(), SocketAddr::new(lan.own, HOST))?;
    ensure!(seen == lan.node, "our container is {seen}");
    for (from, node, own) in [
        (&lan.netns, lan.node, lan.own),
        (lab.world.netns(), family.node(), family.gateway()),
    ] {
        reaches(from, SocketAddr::new(node, HOST), own)
            .with_context(|| format!("their port from {}", from.name()))?;
    }
    // The last packet of a connection that has ended would find nobody at the port.
    thread::sleep(SILENCE / 4);
    theirs.chain.del(&theirs.netns, &theirs.result)?;
    expect_bridge(&lab)?;
    let seen = tcp::visit(ours.netns(), SocketAddr::new(lan.own, HOST))?;
    ensure!(seen == lan.node, "our container is {seen}");
    ours.del()
}

/// A host on the bridge's link.
struct Lan {
    netns: Netns,
    own: IpAddr,
    /// The node's address there.
    node: IpAddr,
}

impl Lan {
    fn behind(lab: &Lab, family: Family) -> Result<Self> {
        let (own, node, length): (IpAddr, IpAddr, u8) = match family {
            V4 => ("198.18.77.9".parse()?, "198.18.77.1".parse()?, 24),
            V6 => ("2001:db8:99::9".parse()?, "2001:db8:99::1".parse()?, 64),
        };
        let netns = Netns::isolated("lan")?;
        lab.node.netns().cable("lan", &netns, "eth0", 1500)?;
        let nodad = if family == V6 { "nodad" } else { "" };
        lab.node.netns().ip(&[
            "link set lan master br0".to_owned(),
            format!("address add {node}/{length} dev br0 {nodad}"),
        ])?;
        netns.ip(&[format!("address add {own}/{length} dev eth0 {nodad}")])?;
        Ok(Self { netns, own, node })
    }
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
    expect_bridge(&lab)?;
    let netns = lab.node.netns().sibling("theirs")?;
    let chain = chain("underpass");
    let result = chain.add(&netns)?;
    expect_bridge(&lab)?;
    chain.check(&netns, &result)?;
    chain.del(&netns, &result)?;
    expect_bridge(&lab)?;
    pod.del()
}
