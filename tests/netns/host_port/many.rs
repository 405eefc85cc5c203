//! Ten thousand host ports on a node.

use std::{net::SocketAddr, process::Command};

use aya::maps::{HashMap, Map};
use serde_json::{Value, json};
use underpass_abi::{
    addr::Addr,
    flow::protocol,
    map,
    port::{HostPort, IPV4, IPV6, PortTarget},
};
use underpass_tests::{counter, leak::Traces, prelude::*};

use super::{INSIDE, mapped, node_at};

/// Ports of containers that the maps know and nobody made.
const OTHERS: u16 = 9_900;

/// What `tc` and `nft` show of a node.
fn surroundings(lab: &Lab) -> Result<[String; 3]> {
    let show = |program: &str, arguments: &[&str]| {
        let mut command = Command::new(program);
        lab.node.netns().expect(command.args(arguments), &[])
    };
    Ok([
        show("tc", &["filter", "show", "dev", "lo", "egress"])?,
        show("tc", &["qdisc", "show", "dev", "lo"])?,
        show("nft", &["list", "ruleset"])?,
    ])
}

#[test]
fn they_are_entries_of_a_map_and_nothing_else() -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    let one = json!({ "hostPort": 1_024, "containerPort": INSIDE });
    let _first = lab.pod_with("first", &mapped(&lab, &[one]))?;
    let before = Traces::of(&lab.node)?;
    let around = surroundings(&lab)?;

    let mut ports: HashMap<_, HostPort, PortTarget> =
        Map::HashMap(counter::open(&lab.node, map::PORTS)?).try_into()?;
    for (family, others) in [(IPV4, V4), (IPV6, V6)] {
        for at in 0..OTHERS {
            let port = HostPort {
                port: (30_000 + at).to_be(),
                protocol: protocol::TCP,
                family,
                ..HostPort::default()
            };
            let target = PortTarget {
                addr: Addr::from(others.unused_pod()),
                owner: [7; 16],
                serial: 1,
                ifindex: 99_999,
                port: INSIDE.to_be(),
                reserved: 0,
            };
            ports.insert(port, target, 0)?;
        }
    }

    let hundred: Vec<Value> = (0..100)
        .map(|at| json!({ "hostPort": 20_000 + at, "containerPort": INSIDE }))
        .collect();
    let pod = lab.pod_with("hundred", &mapped(&lab, &hundred))?;
    let during = Traces::of(&lab.node)?;
    let grown = during.registry.ports.len() - before.registry.ports.len();
    ensure!(grown == 2 * (100 + usize::from(OTHERS)), "{grown} entries");
    ensure!(during.registry.shadowed_ports == 0);
    // What one container without ports would add: a device with its routes and neighbours.
    ensure!(during.devices.len() == before.devices.len() + 1);
    ensure!(during.registry.pods.len() == before.registry.pods.len() + 1);
    ensure!(during.pins == before.pins, "a pin more");
    ensure!(surroundings(&lab)? == around, "a filter or rule more");

    for family in [V4, V6] {
        let _server = tcp::Server::start(pod.netns(), family.port(INSIDE))?;
        for at in [20_000, 20_099] {
            let seen = tcp::visit(lab.world.netns(), node_at(family, at))?;
            ensure!(seen == family.gateway(), "{at}: {seen}");
            let local = SocketAddr::new(family.loopback(), at);
            let seen = tcp::visit(lab.node.netns(), local)?;
            ensure!(seen == family.pod_gateway(), "{at}: {seen}");
        }
    }
    pod.call_with_result("CHECK").run(&lab.node)?.silence()?;
    pod.del()?;
    let after = Traces::of(&lab.node)?;
    let left = after.registry.ports.len() - before.registry.ports.len();
    ensure!(left == 2 * usize::from(OTHERS), "{left} entries");
    ensure!(surroundings(&lab)? == around, "a filter or rule more");
    Ok(())
}
