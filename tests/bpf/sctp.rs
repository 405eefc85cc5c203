//! SCTP packets through the programs: ports, and a checksum that is right or left to the device.

use rstest::rstest;
use underpass_abi::map;
use underpass_tests::{
    frame::sctp::{self, chunk},
    prelude::*,
    test_run::{Bench, UNSPEC},
};

const SOURCE: u16 = 45_678;
const PORT: u16 = 3868;

#[rstest]
fn the_checksum_follows_the_ports_there_and_back(#[values(V4, V6)] family: Family) -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    let pods = [lab.pod("a")?, lab.pod("b")?];
    let out = Bench::open(&lab.node, map::TO_WIRE, Node::UPLINK)?;
    let back = Bench::open(&lab.node, map::FROM_WIRE, Node::UPLINK)?;
    for (pod, keeps) in pods.iter().zip([true, false]) {
        for len in [0, 1, 2, 3, 4, 100, 253, 1023, 1400] {
            let content: Vec<u8> = (0u8..=u8::MAX).cycle().take(len).collect();
            let sent = pod
                .ends(family.remote())?
                .sctp(SOURCE, PORT, chunk::DATA, &content);
            let verdict = out.run(&sent)?;
            ensure!(verdict.action == UNSPEC, "{verdict:?}");
            let packet = sctp::read(&verdict.frame).context("no SCTP came out")?;
            ensure!(packet.sum == packet.expected_sum, "{len}: {packet:x?}");
            ensure!(
                packet.src.ip() == family.node() && (packet.src.port() == SOURCE) == keeps,
                "{packet:?}"
            );

            let answer = lab.ends_from_world(family.remote(), family.node())?.sctp(
                PORT,
                packet.src.port(),
                chunk::DATA,
                &content,
            );
            let verdict = back.run(&answer)?;
            let packet = sctp::read(&verdict.frame).context("no SCTP came back")?;
            ensure!(packet.sum == packet.expected_sum, "{len}: {packet:x?}");
            ensure!(packet.dst == pod.at(family, SOURCE), "{packet:?}");
        }
    }
    Ok(())
}

#[rstest]
fn a_checksum_left_to_the_device_is_not_touched(#[values(V4, V6)] family: Family) -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    let pods = [lab.pod("a")?, lab.pod("b")?];
    let out = Bench::open(&lab.node, map::TO_WIRE, Node::UPLINK)?;
    for (pod, keeps) in pods.iter().zip([true, false]) {
        let sent = pod
            .ends(family.remote())?
            .unsummed_sctp(SOURCE, PORT, chunk::DATA, b"later");
        let packet = sctp::read(&out.run(&sent)?.frame).context("no SCTP came out")?;
        ensure!(
            (packet.src.port() == SOURCE) == keeps && packet.sum == 0,
            "{packet:?}"
        );
    }
    Ok(())
}
