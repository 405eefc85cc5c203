//! Several entries of one list: which of them has made the interface, and what is each one's own.

use rstest::rstest;
use serde_json::{Value, json};
use underpass_tests::{leak::Traces, netns::Netns, prelude::*, runtime::Call};

use crate::chain::Chain;

/// An entry for host ports alone.
fn ports(kind: &str) -> Value {
    json!({ "type": kind, "capabilities": { "portMappings": true } })
}

fn mappings() -> Value {
    json!([{ "hostPort": 8080, "containerPort": 80, "protocol": "tcp" }])
}

/// A lab with a container, so that what the first one changes on a node is there, and a namespace for a list.
fn lab() -> Result<(Lab, Pod, Netns)> {
    let lab = Lab::new()?;
    let other = lab.pod_with("other", &lab.conf().with_host_port(9_090, 90))?;
    let netns = lab.node.netns().sibling("chained")?;
    Ok((lab, other, netns))
}

/// ADD, what is to hold then, CHECK, DEL, and nothing is left.
fn comes_and_goes(
    lab: &Lab,
    chain: &Chain<'_>,
    netns: &Netns,
    holds: impl FnOnce() -> Result<()>,
) -> Result<()> {
    let before = Traces::of(&lab.node)?;
    let result = chain.add(netns)?;
    holds()?;
    chain.check(netns, &result)?;
    chain.del(netns, &result)?;
    before.expect_same(&lab.node)
}

/// Nomad's list begins with `loopback`: what that has made is no interface to serve ports for.
#[test]
fn another_interface_was_made_before() -> Result<()> {
    needs_root!();
    let (lab, _other, netns) = lab()?;
    let loopback = lab.conf().with("type", "loopback");
    let loopback = loopback.with("ipam", Value::Null);
    let chain = Chain::new(&lab.node, &loopback, [lab.conf().json().clone()]);
    comes_and_goes(&lab, &chain, &netns, || {
        Family::BOTH
            .into_iter()
            .try_for_each(|family| ping::ping(&netns, family.remote()).map(drop))
    })
}

/// The DEL of the last entry comes first, and `sbr` fails if the interface is gone by then.
#[test]
fn the_interface_is_there_until_the_del_of_its_own_entry() -> Result<()> {
    needs_root!();
    let (lab, _other, netns) = lab()?;
    let others = [json!({ "type": "sbr" }), ports("underpass")];
    let chain = Chain::new(&lab.node, &lab.conf(), others).runtime("portMappings", mappings());
    comes_and_goes(&lab, &chain, &netns, || Ok(()))
}

/// It judges its ports, and not an interface whose settings are another entry's.
#[test]
fn an_entry_for_ports_has_none() -> Result<()> {
    needs_root!();
    let (lab, _other, netns) = lab()?;
    let first = lab.conf().with("macspoofchk", false);
    let tuning =
        json!({ "type": "tuning", "mac": "02:00:00:00:00:77", "dataDir": "/run/cni/tuning" });
    let chain = Chain::new(&lab.node, &first, [tuning, ports("underpass")]);
    comes_and_goes(&lab, &chain, &netns, || Ok(()))
}

/// Whoever appends an entry for ports to a list of ours has them served twice, at the same place.
#[rstest]
fn two_entries_serve_the_same_ports(#[values(V4, V6)] family: Family) -> Result<()> {
    needs_root!();
    let (lab, _other, netns) = lab()?;
    let served = json!({ "portMappings": true });
    let first = lab.conf().with("capabilities", served);
    let chain = Chain::new(&lab.node, &first, [ports("underpass")]);
    let chain = chain.runtime("portMappings", mappings());
    comes_and_goes(&lab, &chain, &netns, || {
        let _server = tcp::Server::start(&netns, family.port(80))?;
        let at = std::net::SocketAddr::new(family.node(), 8080);
        let mut client = tcp::Client::connect(lab.world.netns(), at)?;
        client.exchange(1_000, 1_000).map(drop)
    })
}

/// One of the list that makes no interface says so by a result without any: the one that has addresses given to its own makes that.
#[test]
fn a_result_without_interfaces_comes_from_before() -> Result<()> {
    needs_root!();
    let (lab, _other, netns) = lab()?;
    let path = netns.path().display().to_string();
    let before = Traces::of(&lab.node)?;
    let call = |verb| Call::new(verb).attachment("chained", &path, Pod::IFNAME);
    let nothing = lab
        .conf()
        .with("prevResult", json!({ "cniVersion": "1.0.0" }));
    let result = call("ADD").conf(&nothing).run(&lab.node)?.json()?;
    for family in Family::BOTH {
        ping::ping(&netns, family.remote())?;
    }
    let conf = lab.conf().with("prevResult", result);
    call("CHECK").conf(&conf).run(&lab.node)?.silence()?;
    call("DEL").conf(&conf).run(&lab.node)?.silence()?;
    before.expect_same(&lab.node)
}
