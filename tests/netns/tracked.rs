//! What Kubernetes' own tests ask of connection tracking beside kube-proxy (its `conntrack.go` and `kube_proxy.go`), where that takes segments
//! written by hand, or a timer of the node.

use std::{
    io::{Read as _, Write as _},
    net::{Shutdown, SocketAddr, TcpListener, TcpStream},
};

use anyhow::bail;
use etherparse::{SlicedPacket, TcpSlice, TransportSlice};
use rstest::rstest;
use underpass_tests::{
    capture::Capture,
    frame,
    netfilter::kube_proxy::Mode::{self, Iptables, Nftables},
    prelude::*,
    traffic::{PATIENCE, raw::RawLink},
    world::World,
};

use crate::kube_proxy::{BY_POD, PORT, Scene};

/// So many exchanges are more than it takes until a flow bypasses.
const MANY: usize = 20;
/// Farther than any window reaches.
const FAR: u32 = 1 << 30;
/// What a segment carries that belongs to no window.
const STRAY: &[u8] = b"once more, much too late";

/// Whom a container talks to.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum To {
    /// A container, by the address of a Service.
    Service,
    /// The same, by its own address.
    Pod,
    /// A server in the world, masqueraded.
    World,
}

/// A segment far outside of the window, as it may come again much later, is INVALID for a connection tracking that is strict, so nothing
/// translates it. A client that got one from the backend's own address would answer with a reset, and so would the node if it came to no client:
/// the backend then ends a connection that has no fault (kubernetes/kubernetes#74839). It comes to its connection, or to nobody.
#[rstest]
fn a_stray_segment_ends_no_connection(
    #[values(V4, V6)] family: Family,
    #[values(Iptables, Nftables)] mode: Mode,
    #[values(true, false)] liberal: bool,
    #[values(To::Service, To::Pod, To::World)] to: To,
) -> Result<()> {
    needs_root!();
    let scene = Scene::set(family, mode)?;
    let (lab, backend, client) = (&scene.lab, &scene.backend, &scene.client);
    lab.firewall.set_liberal(liberal)?;
    lab.node.underpass(&["load"])?;
    lab.firewall.tolerate_invalid();
    lab.firewall
        .count_forwarded("invalid", "ct state invalid")?;
    if mode == Iptables {
        // The rule of kube-proxy alone drops it. The nftables mode has none: it leaves that to the node's firewall, or has connection tracking
        // be liberal.
        lab.firewall.accept_forwarded("ct state invalid")?;
    }
    let (server, device, at) = match to {
        To::Service => (backend.netns(), Pod::IFNAME, family.service_at(BY_POD)),
        To::Pod => (backend.netns(), Pod::IFNAME, backend.at(family, PORT)),
        To::World => (lab.world.netns(), World::LINK, family.remote_at(PORT)),
    };
    let heard = Capture::start(server, device)?;
    let mut connection = tcp::Client::connect(client.netns(), at)?;
    let seen = connection.chat(MANY)?;
    let mut last = (0, 0);
    eventually("all is heard that was said", || {
        last = last_of(&heard, seen, MANY)?;
        Ok(())
    })?;
    let (next, acknowledged) = last;

    let ends = match to {
        To::World => lab.ends_from_world(at.ip(), seen.ip())?,
        _ => backend.ends(seen.ip())?,
    };
    let numbers = (acknowledged.wrapping_add(FAR), next);
    let stray = ends.segment((PORT, seen.port()), "A", numbers, STRAY);
    let arrived = Capture::start(client.netns(), Pod::IFNAME)?;
    RawLink::open(server, device)?.send(&stray)?;
    // It is translated like all others.
    let comes = to == To::Service && liberal;
    if comes {
        let found = arrived.wait_for(PATIENCE, |frame| frame.ends_with(STRAY));
        ensure!(found.is_some(), "it did not arrive");
    }
    if to == To::Service && !liberal {
        eventually("connection tracking has seen it", || {
            lab.firewall.expect_many("invalid", 1)
        })?;
    }
    connection.chat(MANY).context("after the segment")?;
    let strangers = arrived.frames().into_iter().filter_map(|frame| {
        let from = frame::read(&frame)?.src;
        (frame.ends_with(STRAY) && from != at.ip()).then_some(from)
    });
    let strangers: Vec<_> = strangers.collect();
    ensure!(strangers.is_empty(), "it came from {strangers:?}");
    for frame in heard.frames() {
        let is_reset = segment_of(&frame, seen).is_some_and(|segment| segment.rst());
        ensure!(!is_reset, "somebody answered with a reset");
    }
    connection.exchange(500_000, 500_000)?;
    Ok(())
}

/// A segment that this end has sent.
fn segment_of(frame: &[u8], from: SocketAddr) -> Option<TcpSlice<'_>> {
    if frame::read(frame)?.src != from.ip() {
        return None;
    }
    match SlicedPacket::from_ethernet(frame).ok()?.transport? {
        TransportSlice::Tcp(segment) if segment.source_port() == from.port() => Some(segment),
        _ => None,
    }
}

/// The sequence number of what that end will send next, and what it has acknowledged, once so many of its segments are heard.
fn last_of(heard: &Capture, end: SocketAddr, many: usize) -> Result<(u32, u32)> {
    let frames = heard.frames();
    let segments = frames.iter().filter_map(|frame| segment_of(frame, end));
    let segments: Vec<_> = segments.collect();
    ensure!(segments.len() >= many, "{} segments", segments.len());
    let last = segments.last().context("no segment")?;
    let length = u32::try_from(last.payload().len())?;
    Ok((
        last.sequence_number().wrapping_add(length),
        last.acknowledgment_number(),
    ))
}

/// Where connection tracking is liberal it sees that one end has closed a connection, whose other end still talks, and gives it the timer that
/// the node has for such ones: kube-proxy sets it to an hour.
#[rstest]
fn a_connection_of_one_end_has_its_own_timer(
    #[values(V4, V6)] family: Family,
    #[values("world", "pod")] peer: &str,
) -> Result<()> {
    /// Seconds, more than any other timer of these tests.
    const TIMER: u64 = 3600;
    needs_root!();
    let lab = Lab::new()?;
    lab.firewall.set_liberal(true)?;
    let key = "net/netfilter/nf_conntrack_tcp_timeout_close_wait";
    lab.node.netns().set_sysctl(key, &TIMER.to_string())?;
    let (pod, other) = (lab.pod("a")?, lab.pod("b")?);
    let (netns, at) = match peer {
        "world" => (lab.world.netns(), family.remote_at(PORT)),
        _ => (other.netns(), other.at(family, PORT)),
    };
    let listener = netns.run(|| TcpListener::bind(at))?;
    let patience = underpass_tests::patience::here(PATIENCE);
    let client = pod.netns().run(|| tcp::dial(None, at, &[], patience))?;
    let (server, _) = listener.accept()?;
    for end in [&client, &server] {
        end.set_read_timeout(Some(patience))?;
        end.set_nodelay(true)?;
    }
    let meter = Meter::start(&lab.node)?;
    for _ in 0..MANY {
        says(&client, &server)?;
        says(&server, &client)?;
    }
    client.shutdown(Shutdown::Write)?;
    eventually("connection tracking has seen that it is closed", || {
        let port = format!("dport={PORT}");
        let entries = lab.firewall.entries(family, &["CLOSE_WAIT", &port])?;
        let [entry] = &entries[..] else {
            bail!("{:?}", lab.firewall.entries(family, &[&port])?);
        };
        // Family and protocol, each with its number, stand before the seconds.
        let left: u64 = entry
            .split_whitespace()
            .nth(4)
            .context("no timer")?
            .parse()?;
        ensure!((TIMER / 2..=TIMER).contains(&left), "{entry}");
        Ok(())
    })?;
    for _ in 0..MANY {
        says(&server, &client)?;
    }
    let counter = if peer == "world" {
        Counter::BypassWire
    } else {
        Counter::BypassPeer
    };
    meter.expect(counter, 10)
}

/// Sends a little from one end of a connection to the other.
fn says(mut from: &TcpStream, mut to: &TcpStream) -> Result<()> {
    const WORD: &[u8] = b"word";
    from.write_all(WORD)?;
    let mut heard = [0; WORD.len()];
    to.read_exact(&mut heard)?;
    ensure!(heard == WORD, "{heard:?}");
    Ok(())
}
