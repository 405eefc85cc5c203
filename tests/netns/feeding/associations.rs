//! Associations of SCTP and rules that come later.

use std::{thread, time::Instant};

use rstest::rstest;
use underpass_tests::{frame::sctp::chunk, patience, prelude::*, traffic::SILENCE, world::World};

use super::{PAUSE, PORT, SOURCE, expect_end, heard};
use crate::sctp::{End, play};

/// Sends a packet with a chunk of this type. Whether it arrives.
fn arrives(from: &End, packet: &[u8], to: &End, kind: u8) -> Result<bool> {
    let before = heard(to, kind);
    from.link.send(packet)?;
    let end = Instant::now() + patience::here(SILENCE);
    while heard(to, kind) == before {
        if Instant::now() > end {
            return Ok(false);
        }
        thread::sleep(PAUSE / 8);
    }
    Ok(true)
}

/// A rule on data, and one on what acknowledges them.
#[rstest]
fn a_rule_that_comes_later_ends_an_association(
    #[values(V4, V6)] family: Family,
    #[values("dport", "sport")] direction: &str,
) -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    let pod = lab.pod("a")?;
    let client = End::of(pod.netns(), Pod::IFNAME)?;
    let server = End::of(lab.world.netns(), World::LINK)?;
    let ends = pod.ends(family.remote())?;
    let back = lab.ends_from_world(family.remote(), family.node())?;
    let seen = play(&client, (ends, SOURCE, PORT), &server, back)?;
    let data = ends.sctp(SOURCE, PORT, chunk::DATA, &[7; 100]);
    let sack = back.sctp(PORT, seen.port(), chunk::SACK, &[7; 12]);
    let exchange = || -> Result<[bool; 2]> {
        Ok([
            arrives(&client, &data, &server, chunk::DATA)?,
            arrives(&server, &sack, &client, chunk::SACK)?,
        ])
    };
    let meter = Meter::start(&lab.node)?;
    for _ in 0..20 {
        ensure!(exchange()? == [true; 2], "{:?}", meter.read());
    }
    let counted = meter.read()?;
    ensure!(counted.bypassed() > 20, "{counted:?}");
    lab.firewall
        .drop_forwarded(&format!("sctp {direction} {PORT}"))?;
    let at = usize::from(direction == "sport");
    expect_end(|| exchange().is_ok_and(|arrived| !arrived[at]))
}
