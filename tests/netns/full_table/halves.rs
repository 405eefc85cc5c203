//! Half of a flow in a full table: of its two entries one is gone, and finds no room.

use std::{net::SocketAddr, thread, time::Duration};

use rstest::rstest;
use underpass_abi::flow::{protocol, state};
use underpass_tests::{
    capture::Capture,
    flow_table::{self, Then},
    netns::Netns,
    patience,
    prelude::*,
    traffic,
    world::World,
};

use super::{FLOWS, HOST, INSIDE, PORT, fill, small};

/// After so long a flow of UDP that was answered is a conversation, which a full table keeps.
const AGED: Duration = Duration::from_secs(5);

/// After so many connections in a row that found no place there is none: each looks with every packet.
const REFUSED: usize = 32;

/// What is sent without a way back.
const LOST: &[u8] = b"without a way back";

/// Sends three packets, and fails unless the first, at least, is dropped for want of a place, and no dropped one is seen: later ones may find a place.
fn drops(
    lab: &Lab,
    client: &udp::Client,
    to: SocketAddr,
    (netns, interface): (&Netns, &str),
) -> Result<()> {
    let meter = Meter::start(&lab.node)?;
    let line = Capture::start(netns, interface)?;
    for _ in 0..3 {
        client.send(to, LOST)?;
    }
    thread::sleep(patience::here(Duration::from_secs(1)));
    meter.expect(Counter::DropMapFull, 1)?;
    let dropped = meter.read()?.get(Counter::DropMapFull);
    let frames = line.frames().into_iter();
    let seen = frames.filter(|frame| frame.ends_with(LOST)).count();
    ensure!(
        u64::try_from(seen)? + dropped == 3,
        "{seen} were seen, {dropped} dropped"
    );
    Ok(())
}

/// Removes the entries of UDP that are, or are not, those of outer tuples.
fn remove(lab: &Lab, family: Family, outer: bool) -> Result<()> {
    let mut removed = 0;
    flow_table::walk(&lab.node, family, |entry| {
        let is_assured = entry.state & state::ASSURED != 0;
        if entry.protocol == protocol::UDP && is_assured && entry.is_outer() == outer {
            removed += 1;
            Then::Goes
        } else {
            Then::Stays
        }
    })?;
    ensure!(removed == 1, "{removed}");
    Ok(())
}

/// Fills a table with conversations, and takes this away of what was in it before. Two containers go on until they have the last place.
fn fill_all(
    lab: &Lab,
    [from, to]: [&Pod; 2],
    remote: SocketAddr,
    outer: bool,
) -> Result<impl Sized> {
    let family = Family::of(remote.ip());
    let inside = to.at(family, PORT);
    let server = tcp::Server::start(to.netns(), inside)?;
    let masqueraded = fill(from, remote)?;
    remove(lab, family, outer)?;
    let (mut between, mut refused) = (Vec::new(), 0);
    while refused < REFUSED {
        ensure!(between.len() < FLOWS.into(), "all find room");
        let meter = Meter::start(&lab.node)?;
        let mut client = tcp::Client::connect(from.netns(), inside)?;
        client.chat(5)?;
        between.push(client);
        let is_refused = meter.read()?.get(Counter::TableFull) > 0;
        refused = if is_refused { refused + 1 } else { 0 };
    }
    Ok((server, masqueraded, between))
}

/// Whoever got what the container sends could only answer to the node.
#[rstest]
fn a_masqueraded_packet_does_not_leave_without_its_way_back(
    #[values(V4, V6)] family: Family,
    #[values("learned", "off")] bypass: &str,
) -> Result<()> {
    needs_root!();
    let lab = small()?;
    let pod = lab.pod_with("a", &lab.conf().with("bypass", bypass))?;
    let (b, c) = (lab.pod("b")?, lab.pod("c")?);
    let remote = family.remote_at(PORT);
    let _server = traffic::serve(lab.world.netns(), remote)?;
    let mut client = udp::Client::open(pod.netns(), family)?;
    client.chat(remote, 2)?;
    thread::sleep(AGED);
    client.chat(remote, 2)?;
    let open = fill_all(&lab, [&b, &c], remote, true)?;
    drops(&lab, &client, remote, (lab.world.netns(), World::LINK))?;
    drop(open);
    eventually("there is room again", || {
        client.ask_once(remote, 100)?.context("no answer")?;
        Ok(())
    })
}

/// What the container would answer would not be known as that.
#[rstest]
fn a_question_to_a_host_port_does_not_arrive_without_its_way_back(
    #[values(V4, V6)] family: Family,
    #[values("learned", "off")] bypass: &str,
    #[values("world", "container", "process")] who: &str,
) -> Result<()> {
    needs_root!();
    let lab = small()?;
    let conf = lab.conf().with_host_port(HOST, INSIDE);
    let pod = lab.pod_with("a", &conf.with("bypass", bypass))?;
    let (b, c) = (lab.pod("b")?, lab.pod("c")?);
    let remote = family.remote_at(PORT);
    let _world = traffic::serve(lab.world.netns(), remote)?;
    let _server = udp::Server::start(pod.netns(), family.port(INSIDE))?;
    let netns = match who {
        "world" => lab.world.netns(),
        "container" => c.netns(),
        _ => lab.node.netns(),
    };
    let at = SocketAddr::new(family.node(), HOST);
    let mut client = udp::Client::open(netns, family)?;
    client.chat(at, 2)?;
    thread::sleep(AGED);
    client.chat(at, 2)?;
    // What a process asks is found by the inner entry, anything else by the outer one.
    let open = fill_all(&lab, [&b, &c], remote, who == "process")?;
    drops(&lab, &client, at, (pod.netns(), Pod::IFNAME))?;
    drop(open);
    eventually("there is room again", || {
        client.ask_once(at, 100)?.context("no answer")?;
        Ok(())
    })
}
