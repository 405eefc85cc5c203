//! The source port outside of VXLAN, by which routers tell flows apart.

use std::collections::{BTreeMap, BTreeSet};

use underpass_tests::{
    capture::Capture,
    frame::{self, Summary},
    prelude::*,
    traffic::serve,
};

use super::{
    Cluster,
    tunnel::{beyond_a_router, overhead},
};

const PORT: u16 = 80;

/// A frame's VXLAN: the source port of its outside, and what is in it.
fn unwrapped(frame: &[u8]) -> Option<(u16, Summary)> {
    const VXLAN: u16 = 4_789;
    let outside = frame::read(frame)?;
    let (port, VXLAN) = outside.ports? else {
        return None;
    };
    let inside = frame.get(overhead(Family::of(outside.src))..)?;
    Some((port, frame::read(inside)?))
}

/// Source ports outside of VXLAN, of all flows that a line has seen.
fn outer_ports(line: &Capture) -> BTreeMap<String, BTreeSet<u16>> {
    let mut flows: BTreeMap<_, BTreeSet<_>> = BTreeMap::new();
    for (port, inside) in line.frames().iter().filter_map(|frame| unwrapped(frame)) {
        let Summary {
            src,
            dst,
            protocol,
            ports,
            ..
        } = inside;
        if ports.is_some() {
            flows
                .entry(format!("{protocol} {src} {dst} {ports:?}"))
                .or_default()
                .insert(port);
        }
    }
    flows
}

/// Talks by TCP and UDP from some ports, always the same ones. Returns the outer ports of each flow, in both directions, and the nodes, whose
/// programs nobody else is lent meanwhile.
fn talk() -> Result<(BTreeMap<String, BTreeSet<u16>>, Cluster)> {
    const SOURCES: std::ops::Range<u16> = 20_000..20_006;
    let (cluster, pods) = beyond_a_router(V4, &["learned"])?;
    let [here, there] = &pods[0];
    let lines = ["node1", "node2"].map(|port| Capture::start(&cluster.fabric, port));
    for family in Family::BOTH {
        let at = there.at(family, PORT);
        let _server = serve(there.netns(), at)?;
        for port in SOURCES {
            // Some packets by the stack, the others past it.
            udp::Client::open_at(here.netns(), family, port)?.chat(at, 20)?;
            let mut client = tcp::Client::connect_from(here.netns(), port, at)?;
            client.chat(20)?;
            client.exchange(100_000, 100_000)?;
        }
    }
    cluster.all_bypass()?;
    let mut flows = BTreeMap::new();
    for line in lines {
        flows.extend(outer_ports(&line?));
    }
    ensure!(
        flows.len() == 2 * 2 * 2 * SOURCES.len(),
        "{} flows",
        flows.len()
    );
    drop(pods);
    Ok((flows, cluster))
}

/// Routers that have several ways choose one by the ports outside: packets of a flow must not overtake each other, and flows must not
/// all go the same way. What is seen outside must not tell what the next node, or the same after a reboot, makes of the same flow.
#[test]
fn a_flow_has_one_port_outside() -> Result<()> {
    needs_root!();
    let (flows, _first) = talk()?;
    let many: Vec<_> = flows.iter().filter(|(_, ports)| ports.len() != 1).collect();
    ensure!(
        many.is_empty(),
        "{} of {}: {many:?}",
        many.len(),
        flows.len()
    );
    let different: BTreeSet<_> = flows.values().flatten().collect();
    ensure!(different.len() > flows.len() / 2, "{different:?}");
    let (others, _second) = talk()?;
    let same = flows
        .iter()
        .filter(|(flow, ports)| others.get(*flow) == Some(ports))
        .count();
    ensure!(
        flows.keys().eq(others.keys()),
        "{flows:?}, and then {others:?}"
    );
    ensure!(same < flows.len() / 2, "{same} of {}", flows.len());
    Ok(())
}
