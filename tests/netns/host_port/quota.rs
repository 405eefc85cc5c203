//! What the world may open to a container.

use std::thread;

use rstest::rstest;
use underpass_abi::flow::{protocol, state};
use underpass_tests::{
    capture::Capture,
    flow_table::{self, Then},
    prelude::*,
    traffic::{PATIENCE, SILENCE, raw::RawLink},
    world::World,
};

use super::{
    HOST, INSIDE,
    scope::{give, second},
};
use crate::full_table::ignore;

/// What the world may open to a container is one quota, by however many addresses of the node, and what it opens beyond that is the first to go:
/// also what has to be translated at both ends, because the container would see one source port twice.
#[rstest]
fn several_addresses_have_one_quota(#[values(V4, V6)] family: Family) -> Result<()> {
    const LIMIT: u16 = 8;
    const FIRST: u16 = 20_000;
    needs_root!();
    let lab = Lab::new()?;
    let second = second(family);
    give(&lab, "eth0", second)?;
    let conf = lab.conf().with_host_port(HOST, INSIDE);
    let pod = lab.pod_with("a", &conf.with("maxHalfOpenFlows", LIMIT))?;
    ignore(&pod, &INSIDE.to_string())?;
    let line = Capture::start(pod.netns(), Pod::IFNAME)?;
    let link = RawLink::open(lab.world.netns(), World::LINK)?;
    for port in FIRST..FIRST + 4 * LIMIT {
        for (to, said) in [(family.node(), b"one"), (second, b"two")] {
            let ends = lab.ends_from_world(family.gateway(), to)?;
            link.send(&ends.udp(port, HOST, said))?;
        }
    }
    let last = line.wait_for(PATIENCE, |bytes| bytes.ends_with(b"two"));
    ensure!(last.is_some(), "nothing arrives");
    thread::sleep(SILENCE / 4);
    let (mut paid, mut surplus) = (0, 0);
    flow_table::walk(&lab.node, family, |entry| {
        if entry.protocol == protocol::UDP && entry.is_outer() {
            match entry.state & state::SURPLUS {
                0 => paid += 1,
                _ => surplus += 1,
            }
        }
        Then::Stays
    })?;
    // Time gives one of them back.
    ensure!(
        paid <= LIMIT + 1 && paid + surplus == 8 * LIMIT,
        "{paid} and {surplus} surplus"
    );
    Ok(())
}
