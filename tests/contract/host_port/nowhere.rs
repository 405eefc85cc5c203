//! Results whose addresses name no interface of theirs.

use std::net::SocketAddr;

use rstest::rstest;
use serde_json::{Value, json};
use underpass_tests::prelude::*;

use super::{HOST, INSIDE, address_of, chained, foreign, mappings, node_at, portmap};
use crate::chain::Chain;

/// An address that names no interface of the result is taken as one that names none, as the reference does.
#[rstest]
fn an_address_of_no_interface_is_the_containers(
    #[values(V4, V6)] family: Family,
    #[values(json!(7), json!(-1), Value::Null)] interface: Value,
) -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    let link = portmap()?;
    let chain = Chain::new(
        &lab.node,
        &foreign(&lab, "ptp", family),
        [chained(&lab.node, "portmap")],
    )
    .ours(&link.path)
    .runtime("portMappings", mappings(HOST));
    let netns = lab.node.netns().sibling("a")?;
    let [first, ours] = chain.plugins() else {
        anyhow::bail!("two plugins");
    };
    let mut result = chain.call("ADD", first, &netns, None)?.result()?;
    result["ips"][0]["interface"] = interface;
    let remembered = chain.call("ADD", ours, &netns, Some(&result))?.result()?;
    let at = SocketAddr::new(address_of(&result)?, INSIDE);
    let _server = tcp::Server::start(&netns, at)?;
    tcp::visit(lab.world.netns(), node_at(family, HOST))?;
    chain
        .call("CHECK", ours, &netns, Some(&remembered))?
        .silence()?;
    chain
        .call("DEL", ours, &netns, Some(&remembered))?
        .silence()?;
    chain
        .call("DEL", first, &netns, Some(&remembered))
        .map(drop)
}
