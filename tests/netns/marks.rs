//! What a pod's own traffic control writes beside its packets (`skb->tc_index`), where our programs tell each other of them: to ours it says nothing.

use std::{os::fd::AsFd as _, thread};

use rstest::rstest;
use rtnetlink::LinkVlan;
use underpass_netlink::{
    Netlink,
    filter::Direction,
    link::{By, Device},
};
use underpass_tests::{
    capture::Capture,
    frame::{self, Tag},
    prelude::*,
    program::{Instruction, load},
    traffic::{PATIENCE, SILENCE, raw::RawLink},
    world::World,
};

/// Where the first of the marks' frames comes from: the others are from the ports behind it.
const SOURCE: u16 = 41_000;
const PORT: u16 = 443;
const PAYLOAD: &[u8] = b"not to be looked at";

/// Offset of `tc_index` in `struct __sk_buff` of `linux/bpf.h`.
const TC_INDEX: i16 = 44;
/// `TC_ACT_UNSPEC` of `linux/pkt_cls.h`: whoever is next decides.
const UNSPEC: i32 = -1;

/// All that our programs write there by themselves, a number of one of the pods' packets, and the arrival by the node's first device.
fn marks() -> impl Iterator<Item = i32> {
    (0x7550..=0x7556).chain([0x2001, 0x8002])
}

/// A program of the pod's own writes a mark beside all that leaves.
fn write_mark(pod: &Pod, mark: i32) -> Result<()> {
    const CONTEXT: u8 = 1;
    const MARK: u8 = 2;
    let program = load(&[
        Instruction::set(MARK, mark),
        Instruction::store_word(CONTEXT, TC_INDEX, MARK),
        Instruction::set(0, UNSPEC),
        Instruction::EXIT,
    ])?;
    pod.netns().run(|| -> Result<()> {
        let netlink = Netlink::open()?;
        let link = netlink.link(By::Name(Pod::IFNAME))?.context("its device")?;
        let device = Device::from(&link);
        netlink.add_clsact(&device)?;
        let (side, program) = (Direction::Egress, program.as_fd());
        Ok(netlink.set_filter(&device, side, program, "mark")?)
    })
}

fn is_it(bytes: &[u8]) -> bool {
    bytes.windows(PAYLOAD.len()).any(|part| part == PAYLOAD)
}

/// With a priority alone in its tag the kernel carries a packet as if it had none.
#[rstest]
fn a_packet_with_a_mark_leaves_as_the_node_s(
    #[values(V4, V6)] family: Family,
    #[values(None, Some(Tag::customer(0)))] tag: Option<Tag>,
    #[values("learned", "off")] bypass: &str,
) -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    let conf = lab.conf().with("antiSpoof", false).with("ipMasq", true);
    let pod = lab.pod_with("a", &conf.with("bypass", bypass))?;
    let seen = Capture::start(lab.world.netns(), World::LINK)?;
    let link = RawLink::open(pod.netns(), Pod::IFNAME)?;
    let ends = pod.ends(family.remote())?;
    for (mark, port) in marks().zip(SOURCE..) {
        write_mark(&pod, mark)?;
        let plain = ends.udp(port, PORT, PAYLOAD);
        link.send(&tag.map_or(plain.clone(), |tag| tag.put_on(&plain)))?;
    }
    thread::sleep(SILENCE);
    let frames = seen.frames();
    let frames = frames.iter().filter_map(|bytes| frame::read(bytes));
    let sent: Vec<_> = frames
        .filter(|seen| seen.dst == family.remote() && seen.ports.is_some_and(|(_, to)| to == PORT))
        .collect();
    ensure!(sent.len() == marks().count(), "not all of them: {sent:?}");
    let others: Vec<_> = sent
        .iter()
        .filter(|seen| seen.src != family.node())
        .collect();
    ensure!(others.is_empty(), "by its own address: {others:?}");
    Ok(())
}

/// `macspoofchk` without `antiSpoof` is about a frame with such a tag as well.
#[rstest]
fn a_tag_is_no_disguise_for_a_mac(#[values(V4, V6)] family: Family) -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    let conf = lab
        .conf()
        .with("antiSpoof", false)
        .with("macspoofchk", true);
    let pod = lab.pod_with("a", &conf)?;
    let seen = Capture::start(lab.world.netns(), World::LINK)?;
    let meter = Meter::start(&lab.node)?;
    let forged = pod.ends(family.remote())?.from_mac([2, 0, 0, 0, 0, 9]);
    let forged = forged.udp(SOURCE, PORT, PAYLOAD);
    let link = RawLink::open(pod.netns(), Pod::IFNAME)?;
    link.send(&Tag::customer(0).put_on(&forged))?;
    ensure!(seen.wait_for(SILENCE, is_it).is_none(), "it left");
    meter.expect(Counter::DropSourceMac, 1)
}

/// With a priority alone in its tag a packet finds the container that serves a host port, as any other does.
#[rstest]
fn a_priority_does_not_hide_a_host_port(
    #[values(V4, V6)] family: Family,
    #[values("learned", "off")] bypass: &str,
) -> Result<()> {
    const INSIDE: u16 = 80;
    needs_root!();
    let lab = Lab::new()?;
    let conf = lab.conf().with("antiSpoof", false).with("bypass", bypass);
    let server = lab.pod_with("server", &conf.clone().with_host_port(PORT, INSIDE))?;
    let pod = lab.pod_with("a", &conf)?;
    let seen = Capture::start(server.netns(), Pod::IFNAME)?;
    let link = RawLink::open(pod.netns(), Pod::IFNAME)?;
    let plain = pod.ends(family.node())?.udp(SOURCE, PORT, PAYLOAD);
    link.send(&Tag::customer(0xa000).put_on(&plain))?;
    let arrived = seen.wait_for(PATIENCE, is_it).context("nobody got it")?;
    ensure!(frame::tag(&arrived).is_none(), "with its tag");
    // Two of them nobody takes off here, and the kernel would.
    let meter = Meter::start(&lab.node)?;
    let twice = Tag::provider(0).put_on(&Tag::customer(0).put_on(&plain));
    link.send(&twice)?;
    meter.expect(Counter::DropVlanTag, 1)
}

/// A frame of a VLAN is left to a device of that one on the host's end.
#[rstest]
fn a_vlan_has_a_device_of_its_own(#[values(V4, V6)] family: Family) -> Result<()> {
    const VLAN: u16 = 7;
    const DEVICE: &str = "vlan7";
    needs_root!();
    let lab = Lab::new()?;
    let pod = lab.pod_with("a", &lab.conf().with("antiSpoof", false))?;
    let node = lab.node.netns();
    let below = node.ifindex(pod.host_veth())?;
    let made = node.rtnl(|rtnl| {
        rtnl.add(LinkVlan::new(DEVICE, below, VLAN).build())?;
        rtnl.set_up(DEVICE)
    });
    if let Err(error) = made {
        anstream::eprintln!("not on this kernel: a VLAN device: {error:#}");
        return Ok(());
    }
    let seen = Capture::start(node, DEVICE)?;
    let plain = pod.ends(family.remote())?.udp(SOURCE, PORT, PAYLOAD);
    let link = RawLink::open(pod.netns(), Pod::IFNAME)?;
    link.send(&Tag::customer(VLAN).put_on(&plain))?;
    seen.wait_for(PATIENCE, is_it).context("it did not come")?;
    Ok(())
}
