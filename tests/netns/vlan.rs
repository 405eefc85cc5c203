//! VLAN tags of a pod's frames: none gets out, on whatever flow.

use std::thread;

use rstest::rstest;
use underpass_tests::{
    capture::Capture,
    frame::{self, Tag},
    prelude::*,
    traffic::{SILENCE, raw::RawLink},
    world::World,
};

const PORT: u16 = 443;
const SOURCE: u16 = 45_678;
const PAYLOAD: &[u8] = b"by another network";
const FRAMES: u16 = 50;

/// A VLAN of others, a priority that costs, and both by a provider's tag.
const TAGS: [Tag; 4] = [
    Tag::customer(100),
    Tag::customer(0xe000),
    Tag::provider(100),
    Tag::provider(0xe000),
];

#[rstest]
fn a_tag_does_not_leave_on_a_learned_flow(
    #[values(V4, V6)] family: Family,
    #[values("world", "pod")] peer: &str,
    #[values(true, false)] checked: bool,
) -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    let conf = lab.conf().with("antiSpoof", checked);
    let (pod, neighbour) = (lab.pod_with("a", &conf)?, lab.pod_with("b", &conf)?);
    let (netns, device, at) = match peer {
        "world" => (lab.world.netns(), World::LINK, family.remote_at(PORT)),
        _ => (neighbour.netns(), Pod::IFNAME, neighbour.at(family, PORT)),
    };
    let _server = udp::Server::start(netns, at)?;
    udp::Client::open_at(pod.netns(), family, SOURCE)?.chat(at, 10)?;
    let seen = Capture::start(netns, device)?;
    let meter = Meter::start(&lab.node)?;
    let link = RawLink::open(pod.netns(), Pod::IFNAME)?;
    let plain = pod.ends(at.ip())?.udp(SOURCE, PORT, PAYLOAD);
    for tag in TAGS {
        for _ in 0..FRAMES {
            link.send(&tag.put_on(&plain))?;
        }
    }
    thread::sleep(SILENCE);
    let frames = seen.frames();
    let tagged = frames.iter().filter(|bytes| frame::tag(bytes).is_some());
    let tagged = tagged.count();
    ensure!(tagged == 0, "{tagged} frames arrived with a tag");
    if !checked {
        return Ok(());
    }
    let marked = frames
        .iter()
        .filter(|bytes| bytes.windows(PAYLOAD.len()).any(|part| part == PAYLOAD))
        .count();
    ensure!(marked == 0, "{marked} frames arrived");
    meter.expect(Counter::DropVlanTag, u64::from(FRAMES) * 4)
}

/// The fixture sees tags, as they are told beside the frame.
#[test]
fn a_capture_sees_tags() -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    let seen = Capture::start(lab.world.netns(), World::LINK)?;
    let plain = lab
        .ends_from_world(V4.node(), V4.remote())?
        .udp(SOURCE, PORT, PAYLOAD);
    let link = RawLink::open(lab.node.netns(), Node::UPLINK)?;
    for tag in TAGS {
        link.send(&tag.put_on(&plain))?;
    }
    thread::sleep(SILENCE / 4);
    let tags: Vec<Tag> = seen
        .frames()
        .iter()
        .filter_map(|bytes| frame::tag(bytes))
        .collect();
    ensure!(tags == TAGS, "{tags:?}");
    Ok(())
}
