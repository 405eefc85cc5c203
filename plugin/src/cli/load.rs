//! `underpass load`: what ADDs would wait for, done ahead of them.

use std::{io, path::Path};

use underpass_abi::map;
use underpass_dataplane::{
    Maps,
    lock::Lock,
    object::{self, FLOWS_ASKED},
    policy::{self, Rules},
};

use super::{BAD, Failure};
use crate::left_behind::left_behind;

pub(super) fn run(
    root: &Path,
    flows: Option<u32>,
    out: &mut impl io::Write,
) -> Result<(), Failure> {
    let maps = Maps::open_or_load_sized(root, flows)?;
    let pins = maps.pins().clone();
    let node = maps.node()?;
    let (loaded, of_ipv6) = (node.flows, node.flows6());
    match flows {
        Some(asked) if asked != loaded => return Err(Failure::Loaded { loaded, asked }),
        _ => policy::refresh(&maps, Rules::known).map(drop)?,
    }
    let lock = Lock::acquire(root)?;
    object::load_missing(&lock, &pins, map::PROGRAMS.iter().copied())?;
    writeln!(
        out,
        "all programs are loaded and pinned at {}, with flow tables of {loaded} entries{}",
        pins.folder().display(),
        if of_ipv6 == loaded {
            String::new()
        } else {
            format!(" for IPv4, and of {of_ipv6} for IPv6, which this kernel was started without")
        }
    )?;
    say_left_behind(root, &maps, out)
}

/// Names the containers that the maps do not know, a line each. The agent of a cluster knows them by how they begin.
pub(super) fn say_left_behind(
    root: &Path,
    maps: &Maps,
    out: &mut impl io::Write,
) -> Result<(), Failure> {
    for finding in left_behind(root, Some(maps), |_| true)?.iter() {
        writeln!(out, "{BAD}left behind{BAD:#}: {finding}")?;
    }
    Ok(())
}

/// The size of a flow table.
pub(super) fn flows(text: &str) -> Result<u32, String> {
    let asked = text.parse().ok();
    asked
        .filter(|flows: &u32| flows.is_power_of_two() && FLOWS_ASKED.contains(flows))
        .ok_or_else(|| {
            format!(
                "it must be a power of two from {} to {}",
                FLOWS_ASKED.start(),
                FLOWS_ASKED.end()
            )
        })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_size_of_a_table_is_a_power_of_two_within_bounds() {
        for good in [1_024, 65_536, 4_194_304] {
            assert_eq!(flows(&good.to_string()), Ok(good));
        }
        for bad in [
            "0",
            "512",
            "1000",
            "65535",
            "8388608",
            "4294967296",
            "-1024",
            "many",
            "",
        ] {
            let error = flows(bad).expect_err(bad);
            assert!(
                error.contains("power of two from 1024 to 4194304"),
                "{error}"
            );
        }
    }
}
