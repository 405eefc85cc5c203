//! Packets that are cut short or changed at any byte: never a wrong turn, never a changed byte of what goes to the stack.

use rstest::rstest;
use underpass_abi::map;
use underpass_tests::{
    frame::as_fragment,
    prelude::*,
    second::{Kind, Second},
    test_run::{Bench, REDIRECT, SHOT, UNSPEC},
};

const PORT: u16 = 8080;
const SOURCE: u16 = 45_678;

/// Every position of a device and its program, on a node that has learned flows.
fn benches<'a>(lab: &'a Lab, pod: &Pod) -> Result<[Bench<'a>; 4]> {
    Ok([
        Bench::open(&lab.node, map::FROM_POD, pod.host_veth())?,
        Bench::open(&lab.node, map::TO_POD, pod.host_veth())?,
        Bench::open(&lab.node, map::FROM_WIRE, Node::UPLINK)?,
        Bench::open(&lab.node, map::TO_WIRE, Node::UPLINK)?,
    ])
}

fn check(bench: &Bench<'_>, what: &str, frame: &[u8]) -> Result<()> {
    let verdict = bench.run(frame)?;
    ensure!(
        [UNSPEC, SHOT, REDIRECT].contains(&verdict.action),
        "{what}: {verdict:?}"
    );
    ensure!(
        verdict.frame.len() == frame.len(),
        "{what}: {} bytes became {}",
        frame.len(),
        verdict.frame.len()
    );
    Ok(())
}

/// A device may have headers of its own before the network header. What is behind them can't be translated, and stays here, whatever
/// they look like: as no packet of IP at all, or as one of a tunnel.
#[rstest]
fn what_is_behind_unknown_headers_does_not_leave(
    #[values(V4, V6)] family: Family,
    #[values("a MAC header", "none")] before: &str,
) -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    let _second = Second::connect(&lab, Kind::Tunnel)?;
    let pod = lab.pod("a")?;
    let ends = pod.ends(family.remote())?;
    let frame = ends.udp(SOURCE, PORT, b"payload");
    let (program, expected) = match before {
        "none" => (map::TO_WIRE, UNSPEC),
        _ => (map::TO_WIRE_L3, SHOT),
    };
    let meter = Meter::start(&lab.node)?;
    let verdict = Bench::open(&lab.node, program, Node::UPLINK)?.run(&frame)?;
    ensure!(verdict.action == expected, "{verdict:?}");
    let counted = meter.read()?.get(Counter::DropUntranslated);
    ensure!(counted == u64::from(expected == SHOT), "{counted}");
    Ok(())
}

#[rstest]
fn cut_short(#[values(V4, V6)] family: Family) -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    let (a, b) = (lab.pod("a")?, lab.pod("b")?);
    let _server = udp::Server::start(b.netns(), family.port(PORT))?;
    udp::Client::open_at(a.netns(), family, SOURCE)?.chat(b.at(family, PORT), 5)?;
    let ends = a.ends(b.ip(family))?;
    let echo = match family {
        V4 => 8,
        V6 => 128,
    };
    let whole = [
        ends.udp(SOURCE, PORT, b"payload"),
        ends.syn(SOURCE, PORT),
        ends.icmp(echo, 0, [0, 1, 0, 1], b"payload"),
        as_fragment(&ends.udp(SOURCE, PORT, b"payload"), 0, true),
        ends.ether_type(0x0806, &[0; 60]),
    ];
    for bench in benches(&lab, &a)? {
        for frame in &whole {
            // The kernel refuses to run a program on less than an IP header.
            let shortest = 14 + family.header_len();
            for len in shortest..frame.len() {
                check(
                    &bench,
                    &format!("{len} of {} bytes", frame.len()),
                    &frame[..len],
                )?;
            }
        }
    }
    Ok(())
}

/// The stack has cut off what followed in the frame, where `from_pod` has read the ports.
#[rstest]
fn what_ends_before_its_ports_does_not_leave(#[values(V4, V6)] family: Family) -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    let pod = lab.pod("a")?;
    let echo = match family {
        V4 => 8,
        V6 => 128,
    };
    let shortest = 14 + family.header_len();
    let bench = Bench::open(&lab.node, map::TO_WIRE, Node::UPLINK)?;
    for (src, action) in [(pod.ip(family), SHOT), (family.node(), UNSPEC)] {
        let ends = pod.ends(family.remote())?.from_ip(src);
        for whole in [
            ends.udp(SOURCE, PORT, b"payload"),
            ends.syn(SOURCE, PORT),
            ends.icmp(echo, 0, [0, 1, 0, 1], b"payload"),
        ] {
            for len in shortest..shortest + 4 {
                let verdict = bench.run(&whole[..len])?;
                ensure!(verdict.action == action, "{len} bytes: {verdict:?}");
            }
        }
    }
    Ok(())
}

#[rstest]
fn changed_at_any_byte(#[values(V4, V6)] family: Family) -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    let (a, b) = (lab.pod("a")?, lab.pod("b")?);
    let _server = udp::Server::start(b.netns(), family.port(PORT))?;
    udp::Client::open_at(a.netns(), family, SOURCE)?.chat(b.at(family, PORT), 5)?;
    let ends = a.ends(b.ip(family))?;
    let whole = [ends.udp(SOURCE, PORT, b"payload"), ends.syn(SOURCE, PORT)];
    for bench in benches(&lab, &a)? {
        for frame in &whole {
            for at in 0..frame.len() {
                for change in [1, 0x10, 0x80, 0xff] {
                    let mut changed = frame.clone();
                    changed[at] ^= change;
                    check(&bench, &format!("byte {at} xor {change:#x}"), &changed)?;
                }
            }
        }
    }
    Ok(())
}

#[rstest]
fn headers_that_the_bypass_does_not_know(#[values(V4, V6)] family: Family) -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    let (a, b) = (lab.pod("a")?, lab.pod("b")?);
    let _server = udp::Server::start(b.netns(), family.port(PORT))?;
    udp::Client::open_at(a.netns(), family, SOURCE)?.chat(b.at(family, PORT), 5)?;
    let plain = a.ends(b.ip(family))?.udp(SOURCE, PORT, b"payload");
    let frame = match family {
        V4 => with_option(&plain),
        V6 => with_destination_options(&plain),
    };
    let verdict = Bench::open(&lab.node, map::FROM_POD, a.host_veth())?.run(&frame)?;
    ensure!(verdict.action == UNSPEC, "{verdict:?}");
    ensure!(verdict.frame == frame, "the packet was changed");
    Ok(())
}

/// An IPv4 packet with four bytes of no-operation options.
fn with_option(frame: &[u8]) -> Vec<u8> {
    let (header, rest) = frame.split_at(14 + 20);
    let mut changed = header.to_vec();
    changed[14] = 0x46;
    let len = u16::from_be_bytes([changed[16], changed[17]]) + 4;
    changed[16..18].copy_from_slice(&len.to_be_bytes());
    changed.extend([1; 4]);
    changed[24..26].fill(0);
    let sum = changed[14..38].chunks(2).fold(0u32, |sum, pair| {
        sum + u32::from(u16::from_be_bytes([pair[0], pair[1]]))
    });
    let folded = (sum & 0xffff) + (sum >> 16);
    let [.., high, low] = (!folded).to_be_bytes();
    changed[24..26].copy_from_slice(&[high, low]);
    changed.extend(rest);
    changed
}

/// An IPv6 packet with an empty header of destination options.
fn with_destination_options(frame: &[u8]) -> Vec<u8> {
    let (header, rest) = frame.split_at(14 + 40);
    let mut changed = header.to_vec();
    let next = std::mem::replace(&mut changed[20], 60);
    let len = u16::from_be_bytes([changed[18], changed[19]]) + 8;
    changed[18..20].copy_from_slice(&len.to_be_bytes());
    changed.extend([next, 0, 1, 4, 0, 0, 0, 0]);
    changed.extend(rest);
    changed
}
