//! Several entries of one list: which of them has made the interface, and what is each one's own.

use rstest::rstest;
use serde_json::{Value, json};
use underpass_tests::{leak::Traces, prelude::*};

use crate::chain::Chain;

/// An entry for host ports alone.
fn ports(kind: &str) -> Value {
    json!({ "type": kind, "capabilities": { "portMappings": true } })
}

fn mappings() -> Value {
    json!([{ "hostPort": 8080, "containerPort": 80, "protocol": "tcp" }])
}

/// Nomad's list begins with `loopback`: what that has made is no interface to serve ports for.
#[test]
fn another_interface_was_made_before() -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    let netns = lab.node.netns().sibling("chained")?;
    // What the first container changes on a node is there then.
    let _other = lab.pod_with("other", &lab.conf().with_host_port(9_090, 90))?;
    let before = Traces::of(&lab.node)?;
    let loopback = lab
        .conf()
        .with("type", "loopback")
        .with("ipam", Value::Null);
    let chain = Chain::new(&lab.node, &loopback, [lab.conf().json().clone()]);
    let result = chain.add(&netns)?;
    chain.check(&netns, &result)?;
    for family in Family::BOTH {
        ping::ping(&netns, family.remote())?;
    }
    chain.del(&netns, &result)?;
    before.expect_same(&lab.node)
}

/// The DEL of the last entry comes first, and `sbr` fails if the interface is gone by then.
#[test]
fn the_interface_is_there_until_the_del_of_its_own_entry() -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    let netns = lab.node.netns().sibling("chained")?;
    // What the first container changes on a node is there then.
    let _other = lab.pod_with("other", &lab.conf().with_host_port(9_090, 90))?;
    let before = Traces::of(&lab.node)?;
    let others = [json!({ "type": "sbr" }), ports("underpass")];
    let chain = Chain::new(&lab.node, &lab.conf(), others).runtime("portMappings", mappings());
    let result = chain.add(&netns)?;
    chain.check(&netns, &result)?;
    chain.del(&netns, &result)?;
    before.expect_same(&lab.node)
}

/// It judges its ports, and not an interface whose settings are another entry's.
#[test]
fn an_entry_for_ports_has_none() -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    let netns = lab.node.netns().sibling("chained")?;
    let first = lab.conf().with("macspoofchk", false);
    let tuning =
        json!({ "type": "tuning", "mac": "02:00:00:00:00:77", "dataDir": "/run/cni/tuning" });
    let chain = Chain::new(&lab.node, &first, [tuning, ports("underpass")]);
    let result = chain.add(&netns)?;
    chain.check(&netns, &result)?;
    chain.del(&netns, &result)
}

/// Whoever appends `portmap` to a list of ours has the ports served twice, at the same place.
#[rstest]
fn two_entries_serve_the_same_ports(#[values(V4, V6)] family: Family) -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    let netns = lab.node.netns().sibling("chained")?;
    // What the first container changes on a node is there then.
    let _other = lab.pod_with("other", &lab.conf().with_host_port(9_090, 90))?;
    let before = Traces::of(&lab.node)?;
    let first = lab
        .conf()
        .with("capabilities", json!({ "portMappings": true }));
    let chain =
        Chain::new(&lab.node, &first, [ports("underpass")]).runtime("portMappings", mappings());
    let result = chain.add(&netns)?;
    chain.check(&netns, &result)?;
    let _server = tcp::Server::start(&netns, family.port(80))?;
    let at = std::net::SocketAddr::new(family.node(), 8080);
    tcp::Client::connect(lab.world.netns(), at)?.exchange(1_000, 1_000)?;
    chain.check(&netns, &result)?;
    chain.del(&netns, &result)?;
    before.expect_same(&lab.node)
}
