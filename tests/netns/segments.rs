//! Connections whose every segment is written by hand, where kernels would send them in another order, or not at all.

use rstest::rstest;
use underpass_abi::flow::{protocol, state};
use underpass_tests::{
    capture::Capture,
    flow_table::{self, Then},
    frame::Ends,
    netns::Netns,
    prelude::*,
    traffic::{PATIENCE, raw::RawLink},
    world::World,
};

const PORT: u16 = 443;
const SOURCE: u16 = 45_678;

/// Ticks that what both ends have closed lives less than (a minute, and what it lived before), and what was reset (four of them).
const CLOSED: u32 = 90;
const RESET: u32 = 300;

/// One end of a connection, whose kernel says nothing.
struct End {
    link: RawLink,
    capture: Capture,
    ends: Ends,
    ports: (u16, u16),
}

impl End {
    fn open(netns: &Netns, interface: &str, ends: Ends, ports: (u16, u16)) -> Result<Self> {
        netns.nft(
            "add table inet mute
             add chain inet mute heard { type filter hook prerouting priority raw; }
             add rule inet mute heard meta l4proto tcp drop",
        )?;
        Ok(Self {
            link: RawLink::open(netns, interface)?,
            capture: Capture::start(netns, interface)?,
            ends,
            ports,
        })
    }

    /// Sends a segment, as [`Ends::segment`], and waits until the other end has it.
    fn says(&self, other: &Self, flags: &str, numbers: (u32, u32), payload: &[u8]) -> Result<()> {
        let frame = self.ends.segment(self.ports, flags, numbers, payload);
        self.link.send(&frame)?;
        let sent = tail(&frame, payload.len());
        let has_come = |bytes: &[u8]| tail(bytes, payload.len()) == sent;
        ensure!(
            other.capture.wait_for(PATIENCE, has_come).is_some(),
            "{flags} {numbers:?} did not arrive"
        );
        Ok(())
    }
}

/// Sequence number, acknowledgement and flags of a segment without options.
fn tail(frame: &[u8], payload: usize) -> Option<&[u8]> {
    let start = frame.len().checked_sub(payload + 20)?;
    frame.get(start + 4..start + 14)
}

/// The state of the only TCP entry of a node, and for how many ticks it lives on after it was made.
fn entry(node: &Node, family: Family) -> Result<(u32, u32)> {
    let mut found = Vec::new();
    flow_table::walk(node, family, |entry| {
        if entry.protocol == protocol::TCP {
            found.push((entry.state, entry.expires.wrapping_sub(entry.since)));
        }
        Then::Stays
    })?;
    ensure!(found.len() == 1, "{found:?}");
    Ok(found[0])
}

/// Fails unless both ends have closed the connection, and it lives no longer than such ones do.
fn ensure_over(lab: &Lab, family: Family) -> Result<()> {
    let (known, lives) = entry(&lab.node, family)?;
    ensure!(
        known & state::FINISHED == state::FINISHED && known & state::ASSURED == 0,
        "state {known:#x}"
    );
    ensure!(lives < CLOSED, "it lives for {lives} ticks");
    Ok(())
}

/// The question comes with the SYN (RFC 7413), so the server has said all, and closed, before its SYN-ACK is acknowledged: it is over when the
/// client has closed as well.
#[rstest]
fn an_answer_before_the_third_segment_ends_its_connection(
    #[values(V4, V6)] family: Family,
) -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    let (a, b) = (lab.pod("a")?, lab.pod("b")?);
    let ifname = Pod::IFNAME;
    let client = End::open(a.netns(), ifname, a.ends(b.ip(family))?, (SOURCE, PORT))?;
    let server = End::open(b.netns(), ifname, b.ends(a.ip(family))?, (PORT, SOURCE))?;
    client.says(&server, "S", (100, 0), b"question")?;
    server.says(&client, "SA", (200, 109), b"")?;
    server.says(&client, "A", (201, 109), b"answer")?;
    server.says(&client, "FA", (207, 109), b"")?;
    client.says(&server, "A", (109, 208), b"")?;
    client.says(&server, "FA", (109, 208), b"")?;
    server.says(&client, "A", (208, 110), b"")?;
    ensure_over(&lab, family)
}

/// A connection between the world and a container, which it has opened and in which both have spoken: the world's end, and the container's.
fn opened(lab: &Lab, pod: &Pod, family: Family) -> Result<(End, End)> {
    let peer = family.gateway();
    let ends = lab.ends_from_world(peer, pod.ip(family))?;
    let client = End::open(lab.world.netns(), World::LINK, ends, (SOURCE, PORT))?;
    let server = End::open(pod.netns(), Pod::IFNAME, pod.ends(peer)?, (PORT, SOURCE))?;
    client.says(&server, "S", (100, 0), b"")?;
    server.says(&client, "SA", (200, 101), b"")?;
    client.says(&server, "A", (101, 201), b"question")?;
    server.says(&client, "A", (201, 109), b"answer")?;
    let (known, _) = entry(&lab.node, family)?;
    ensure!(known & state::ASSURED != 0, "state {known:#x}");
    Ok((client, server))
}

/// A pod that the world has a route to.
fn routed(lab: &Lab) -> Result<Pod> {
    lab.world.route_pods()?;
    lab.pod_with("a", &lab.conf().with("ipMasq", false))
}

/// What was reset, and ends on the bypass, is no conversation again because somebody sends a SYN with its tuple.
#[rstest]
fn an_opening_revives_no_connection_that_was_reset(#[values(V4, V6)] family: Family) -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    let pod = routed(&lab)?;
    let (client, server) = opened(&lab, &pod, family)?;
    client.says(&server, "R", (109, 0), b"")?;
    client.says(&server, "S", (5000, 0), b"")?;
    let (known, lives) = entry(&lab.node, family)?;
    ensure!(
        known & state::RST != 0 && known & state::ASSURED == 0,
        "state {known:#x}"
    );
    ensure!(lives < RESET, "it lives for {lives} ticks");
    Ok(())
}

/// Nor does it keep one open that both ends close.
#[rstest]
fn an_opening_keeps_no_connection_open(#[values(V4, V6)] family: Family) -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    let pod = routed(&lab)?;
    let (client, server) = opened(&lab, &pod, family)?;
    client.says(&server, "FA", (109, 207), b"")?;
    client.says(&server, "S", (5000, 0), b"")?;
    server.says(&client, "FA", (207, 110), b"")?;
    client.says(&server, "A", (110, 208), b"")?;
    ensure_over(&lab, family)
}

/// Both close at the same time, so each acknowledges the other's end.
#[rstest]
fn what_closes_at_once_is_over_when_both_ends_were_acknowledged(
    #[values(V4, V6)] family: Family,
    #[values(true, false)] liberal: bool,
    #[values(true, false)] again: bool,
) -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    lab.firewall.set_liberal(liberal)?;
    let pod = routed(&lab)?;
    let (client, server) = opened(&lab, &pod, family)?;
    client.says(&server, "FA", (109, 207), b"")?;
    server.says(&client, "FA", (207, 109), b"")?;
    client.says(&server, "A", (110, 208), b"")?;
    if again {
        // It has not heard that its own arrived.
        client.says(&server, "FA", (109, 208), b"")?;
    }
    server.says(&client, "A", (208, 110), b"")?;
    ensure_over(&lab, family)
}

/// Who closes last waits to hear that it has arrived, and says so again: until then the connection is one, also in a full table.
#[rstest]
fn what_closes_last_is_acknowledged_before_its_connection_is_over(
    #[values(V4, V6)] family: Family,
    #[values(true, false)] liberal: bool,
    #[values("off", "native")] xdp: &str,
) -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    lab.firewall.set_liberal(liberal)?;
    let pod = lab.pod_with("a", &lab.conf().with("device", "veth").with("xdp", xdp))?;
    let remote = family.remote();
    let client = End::open(pod.netns(), Pod::IFNAME, pod.ends(remote)?, (SOURCE, PORT))?;
    let ends = lab.ends_from_world(remote, family.node())?;
    let server = End::open(lab.world.netns(), World::LINK, ends, (PORT, SOURCE))?;
    client.says(&server, "S", (100, 0), b"")?;
    server.says(&client, "SA", (200, 101), b"")?;
    client.says(&server, "A", (101, 201), b"question")?;
    server.says(&client, "A", (201, 109), b"answer")?;
    client.says(&server, "A", (109, 207), b"more")?;
    server.says(&client, "FA", (207, 113), b"")?;
    client.says(&server, "A", (113, 208), b"")?;
    client.says(&server, "FA", (113, 208), b"")?;
    let both = |has: u32, what: &str| -> Result<()> {
        let mut states = Vec::new();
        flow_table::walk(&lab.node, family, |entry| {
            if entry.protocol == protocol::TCP {
                states.push(entry.state & (state::FINISHED | state::ASSURED));
            }
            Then::Stays
        })?;
        ensure!(states == [has; 2], "{what}: {states:x?}");
        Ok(())
    };
    both(state::FINISHED | state::ASSURED, "both have closed")?;
    client.says(&server, "FA", (113, 208), b"")?;
    both(state::FINISHED | state::ASSURED, "once again")?;
    client.says(&server, "A", (113, 208), b"")?;
    both(
        state::FINISHED | state::ASSURED,
        "what its FIN has overtaken",
    )?;
    server.says(&client, "A", (208, 114), b"")?;
    both(state::FINISHED, "acknowledged")?;
    // What was on its way when both were acknowledged.
    client.says(&server, "A", (114, 208), b"")?;
    both(state::FINISHED, "acknowledged once more")?;
    // A stray offer, which nobody takes up.
    server.says(&client, "SA", (900, 114), b"")?;
    both(state::FINISHED, "offered once more")
}
