//! Whatever a program drops is counted, once and under one name; what it does not drop is not.

use std::collections::BTreeSet;

use rstest::rstest;
use serde_json::json;
use underpass_abi::{
    counter::{Counter, Kind},
    map,
};
use underpass_tests::{
    counter::Counters,
    frame::{UNKNOWN_PROTOCOL, as_fragment, sctp::chunk},
    prelude::*,
    test_run::{Bench, SHOT, STOLEN},
};

const PORT: u16 = 8080;
const SOURCE: u16 = 45_678;

#[rstest]
fn every_drop_has_one_reason(#[values(V4, V6)] family: Family) -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    let mapping = json!({ "hostPort": PORT, "containerPort": 80, "protocol": "udp" });
    let conf = lab
        .conf()
        .with("maxHalfOpenFlows", 8)
        .with("runtimeConfig", json!({ "portMappings": [mapping] }));
    let (a, b) = (lab.pod_with("a", &conf)?, lab.pod("b")?);
    let _server = udp::Server::start(b.netns(), family.port(PORT))?;
    udp::Client::open_at(a.netns(), family, SOURCE)?.chat(b.at(family, PORT), 5)?;

    let (echo, redirect, dhcp) = match family {
        V4 => (8, 5, (67, 68)),
        V6 => (128, 137, (547, 546)),
    };
    let mut frames = Vec::new();
    for (pod, dst) in [
        (&a, family.remote()),
        (&b, family.remote()),
        (&a, b.ip(family)),
        (&b, family.node()),
    ] {
        let ends = pod.ends(dst)?;
        let answer = lab.ends_from_world(dst, family.node())?;
        let whole = ends.udp(SOURCE, PORT, b"payload");
        frames.extend([
            whole.clone(),
            ends.syn(SOURCE, PORT),
            ends.ack(SOURCE, PORT, b"middle"),
            ends.sctp(SOURCE, PORT, chunk::INIT, b"open"),
            ends.icmp(echo, 0, [0, 1, 0, 1], b"ping"),
            ends.icmp(redirect, 0, [0; 4], &[0; 40]),
            ends.icmp(3, 1, [0; 4], &whole[14..]),
            ends.icmp(134, 0, [0; 4], &[0; 8]),
            ends.udp(dhcp.0, dhcp.1, &[2; 240]),
            ends.from_ip(family.unused_pod()).udp(1, 2, b"forged"),
            ends.from_mac([2, 0, 0, 0, 0, 9]).udp(1, 2, b"forged"),
            ends.protocol(UNKNOWN_PROTOCOL, &[1; 40]),
            ends.protocol(6, &[1; 3]),
            as_fragment(&ends.protocol(17, &[1; 16]), 100, true),
            as_fragment(&ends.sctp(SOURCE, PORT, chunk::DATA, &[1; 40]), 0, true),
            ends.ether_type(0x0806, &[0; 46]),
            ends.ether_type(0x88cc, &[0; 46]),
            answer.udp(PORT, SOURCE, b"answer"),
            answer.udp(SOURCE, PORT, b"to a host port"),
            answer.ack(PORT, SOURCE, b"answer"),
        ]);
        // More flows than the quota of one pod has room for.
        frames.extend((0..16).map(|port| ends.udp(SOURCE, 1000 + port, b"flood")));
    }

    let mut reasons = BTreeSet::new();
    let mut passed = 0;
    // Fragments that wait for the first of their datagram. It is sent through the program again, and they behind it: each may be dropped there.
    let mut waiting = 0;
    for (program, device) in [
        (map::FROM_POD, a.host_veth()),
        (map::FROM_POD, b.host_veth()),
        (map::TO_POD, a.host_veth()),
        (map::TO_POD, b.host_veth()),
        (map::FROM_WIRE, Node::UPLINK),
        (map::TO_WIRE, Node::UPLINK),
    ] {
        let bench = Bench::open(&lab.node, program, device)?;
        for frame in &frames {
            let before = Counters::read(&lab.node)?;
            let verdict = bench.run(frame)?;
            let counted = Counters::read(&lab.node)?.since(&before);
            let dropped = u64::from(verdict.action == SHOT);
            waiting += u64::from(verdict.action == STOLEN);
            let late = counted.get(Counter::DropFragment).min(waiting);
            ensure!(
                (dropped..=dropped + late).contains(&counted.dropped()),
                "{program} returned {} and counted {counted:?} for {frame:02x?}",
                verdict.action
            );
            waiting -= counted.dropped() - dropped;
            passed += 1 - dropped;
            reasons.extend(
                Counter::ALL
                    .iter()
                    .filter(|counter| counter.kind() == Kind::Drop && counted.get(**counter) == 1)
                    .map(|counter| counter.name()),
            );
        }
    }
    for expected in [
        Counter::DropSourceAddress,
        Counter::DropSourceMac,
        Counter::DropRedirect,
        Counter::DropDhcpServer,
        Counter::DropEtherType,
        Counter::DropArp,
        Counter::DropMalformed,
        Counter::DropUntranslated,
        Counter::DropFragment,
        Counter::DropFlowQuota,
    ] {
        ensure!(
            reasons.contains(expected.name()),
            "nothing was a {}: {reasons:?}",
            expected.name()
        );
    }
    ensure!(passed > 0, "nothing passed");
    Ok(())
}
