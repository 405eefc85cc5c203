//! Maps that this build can't open.

use std::fs;

use rstest::rstest;
use serde_json::{Value, json};
use underpass_abi::map;
use underpass_tests::{counter::map_pin, prelude::*};

use super::{Container, HOST, chained, foreign, mappings, portmap};
use crate::chain::Chain;

/// Does some work while the map of attachments has a name that this build does not know.
fn while_unknown(node: &Node, work: impl FnOnce() -> Result<()>) -> Result<()> {
    let pin = map_pin(node, map::OWNERS);
    let renamed = pin.with_file_name("OWNERS-9-96");
    node.netns().run(|| fs::rename(&pin, &renamed))?;
    work()?;
    Ok(node.netns().run(|| fs::rename(&renamed, &pin))?)
}

/// What fails is the DEL of a container that has something in them. Whatever fails keeps the DELs of the plugins before it from being called.
#[rstest]
fn a_del_that_can_do_nothing_stops_no_chain_without_ports(
    #[values("portmap", "underpass")] name: &str,
    #[values(V4, V6)] family: Family,
) -> Result<()> {
    needs_root!();
    let lab = Lab::unloaded()?;
    let link = portmap()?;
    let first = foreign(&lab, "ptp", family);
    let chain = |ports| {
        Chain::new(&lab.node, &first, [chained(&lab.node, name)])
            .ours(&link.path)
            .runtime("portMappings", ports)
    };
    let mapped = Container::add(&lab.node, "mapped", chain(mappings(HOST)), family)?;
    let plain = Container::add(&lab.node, "plain", chain(json!([])), family)?;
    let devices = || -> Result<usize> {
        let list = lab
            .node
            .netns()
            .ip_json(&["link", "show", "type", "veth"])?;
        Ok(list.as_array().map_or(0, Vec::len))
    };
    while_unknown(&lab.node, || {
        let before = devices()?;
        plain.del()?;
        let after = devices()?;
        ensure!(after + 1 == before, "{before} devices became {after}");
        let refused = mapped.chain.del(&mapped.netns, &mapped.result);
        let said = format!("{:#}", refused.err().context("its DEL succeeds")?);
        ensure!(said.contains("underpass upgrade"), "{said}");
        Ok(())
    })?;
    mapped.del()
}

/// Without the maps nobody knows what the entry has made: what has addresses that it did not give is another's. Its own host ports it can't take away, and says so.
#[rstest]
#[case::without_ports(json!([]), None)]
#[case::with_ports(mappings(HOST), Some("underpass upgrade"))]
fn a_later_entry_leaves_the_interface(
    #[case] ports: Value,
    #[case] complaint: Option<&str>,
    #[values(V4, V6)] family: Family,
) -> Result<()> {
    needs_root!();
    let lab = Lab::unloaded()?;
    let others = [chained(&lab.node, "underpass")];
    let chain = Chain::new(&lab.node, &lab.conf(), others).runtime("portMappings", ports);
    let netns = lab.node.netns().sibling("a")?;
    let result = chain.add(&netns)?;
    while_unknown(&lab.node, || {
        let later = &chain.plugins()[1];
        let answer = chain.call("DEL", later, &netns, Some(&result))?;
        let refused = answer.silence().err();
        let said = refused.map(|refused| format!("{refused:#}"));
        ensure!(said.is_some() == complaint.is_some(), "{said:?}");
        let is_told = said
            .iter()
            .all(|said| complaint.is_some_and(|text| said.contains(text)));
        ensure!(is_told, "{said:?}");
        ping::ping(&netns, family.gateway()).map(drop)
    })?;
    chain.del(&netns, &result)
}
