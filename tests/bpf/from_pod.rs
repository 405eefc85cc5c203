//! Verdicts of `from_pod` on packets of a pod.

use rstest::rstest;
use underpass_abi::map;
use underpass_tests::{
    frame::Ends,
    prelude::*,
    test_run::{Bench, REDIRECT, SHOT, UNSPEC},
};

const PORT: u16 = 8080;
const SOURCE: u16 = 45_678;

fn pair(bypass: &str) -> Result<(Lab, Pod, Pod)> {
    let lab = Lab::new()?;
    let conf = lab.conf().with("bypass", bypass);
    let (a, b) = (lab.pod_with("a", &conf)?, lab.pod_with("b", &conf)?);
    Ok((lab, a, b))
}

#[rstest]
fn an_unlearned_packet_goes_to_the_stack_untouched(
    #[values(V4, V6)] family: Family,
    #[values("learned", "off")] bypass: &str,
) -> Result<()> {
    needs_root!();
    let (lab, a, b) = pair(bypass)?;
    let bench = Bench::open(&lab.node, map::FROM_POD, a.host_veth())?;
    for dst in [b.ip(family), family.remote()] {
        let ends = a.ends(dst)?;
        for frame in [
            ends.udp(SOURCE, PORT, b"hello"),
            ends.syn(SOURCE, PORT),
            ends.ack(SOURCE, PORT, b"middle"),
        ] {
            let verdict = bench.run(&frame)?;
            ensure!(verdict.action == UNSPEC, "{verdict:?}");
            ensure!(verdict.frame == frame, "the packet was changed");
        }
    }
    Ok(())
}

#[rstest]
fn a_learned_packet_is_rewritten_and_redirected(#[values(V4, V6)] family: Family) -> Result<()> {
    needs_root!();
    let (lab, a, b) = pair("learned")?;
    let _server = udp::Server::start(b.netns(), family.port(PORT))?;
    let mut client = udp::Client::open_at(a.netns(), family, SOURCE)?;
    let bench = Bench::open(&lab.node, map::FROM_POD, a.host_veth())?;
    let frame = a.ends(b.ip(family))?.udp(SOURCE, PORT, b"hello");
    // Connection tracking hears of a young flow once a second; on a slow machine that may be this packet.
    let mut verdict = bench.run(&frame)?;
    for _ in 0..5 {
        if verdict.action == REDIRECT {
            break;
        }
        client.chat(b.at(family, PORT), 5)?;
        verdict = bench.run(&frame)?;
    }
    ensure!(verdict.action == REDIRECT, "{verdict:?}");
    let delivered = Ends {
        src_mac: b.host_mac()?,
        dst_mac: b.mac()?,
        ..a.ends(b.ip(family))?
    };
    let expected =
        delivered.udp_with_hops(SOURCE, PORT, b"hello", underpass_tests::frame::HOPS - 1);
    ensure!(
        verdict.frame == expected,
        "MACs, hop limit and checksum:\n{:02x?}\n{expected:02x?}",
        verdict.frame
    );
    Ok(())
}

#[rstest]
fn a_learned_packet_in_doubt_goes_to_the_stack_untouched(
    #[values(V4, V6)] family: Family,
) -> Result<()> {
    needs_root!();
    let (lab, a, b) = pair("learned")?;
    let _server = udp::Server::start(b.netns(), family.port(PORT))?;
    udp::Client::open_at(a.netns(), family, SOURCE)?.chat(b.at(family, PORT), 5)?;
    let bench = Bench::open(&lab.node, map::FROM_POD, a.host_veth())?;
    let ends = a.ends(b.ip(family))?;
    for (what, frame) in [
        (
            "the hop limit is used up",
            ends.udp_with_hops(SOURCE, PORT, b"x", 1),
        ),
        ("larger than the MTU", ends.udp(SOURCE, PORT, &[0; 1600])),
        ("another port", ends.udp(SOURCE, PORT + 1, b"x")),
        ("another protocol", ends.protocol(132, &[0; 20])),
    ] {
        let verdict = bench.run(&frame)?;
        ensure!(verdict.action == UNSPEC, "{what}: {verdict:?}");
        ensure!(verdict.frame == frame, "{what}: the packet was changed");
    }
    Ok(())
}

#[rstest]
fn forged_packets_are_shot(#[values(V4, V6)] family: Family) -> Result<()> {
    needs_root!();
    let (lab, a, b) = pair("learned")?;
    let bench = Bench::open(&lab.node, map::FROM_POD, a.host_veth())?;
    let ends = a.ends(b.ip(family))?;
    let (redirect, server, client) = match family {
        V4 => (5, 67, 68),
        V6 => (137, 547, 546),
    };
    let mut forged = vec![
        ("address", ends.from_ip(family.unused_pod()).udp(1, 2, b"x")),
        (
            "another pod's address",
            ends.from_ip(b.ip(family)).udp(1, 2, b"x"),
        ),
        ("MAC", ends.from_mac([2, 0, 0, 0, 0, 9]).udp(1, 2, b"x")),
        ("redirect", ends.icmp(redirect, 0, [0; 4], &[0; 40])),
        ("DHCP server", ends.udp(server, client, &[2; 240])),
        ("frame", ends.ether_type(0x88cc, &[0; 50])),
    ];
    if family == V6 {
        forged.push(("router advertisement", ends.icmp(134, 0, [0; 4], &[0; 8])));
    }
    for (what, frame) in forged {
        let verdict = bench.run(&frame)?;
        ensure!(verdict.action == SHOT, "{what}: {verdict:?}");
    }
    Ok(())
}

#[rstest]
fn a_device_that_is_not_ours_is_left_alone(#[values(V4, V6)] family: Family) -> Result<()> {
    needs_root!();
    let (lab, a, b) = pair("learned")?;
    let frame = a.ends(b.ip(family))?.udp(SOURCE, PORT, b"hello");
    for program in [map::FROM_POD, map::TO_POD] {
        let bench = Bench::open(&lab.node, program, "lo")?;
        let verdict = bench.run(&frame)?;
        ensure!(verdict.action == UNSPEC, "{program}: {verdict:?}");
        ensure!(verdict.frame == frame, "{program}: the packet was changed");
    }
    Ok(())
}
