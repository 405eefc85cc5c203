//! What newer kernels have that this one may lack.

use std::{fs, io};

use serde::Serialize;
use underpass_dataplane::{
    feature::{self, FEATURES},
    netkit,
};

use super::{FAINT, GOOD, HEADING};

/// Why a feature is there.
const PRESENT: &str = "the kernel has it";

#[derive(Serialize)]
pub(in crate::cli) struct Feature {
    pub(in crate::cli) name: &'static str,
    pub(in crate::cli) present: bool,
    pub(in crate::cli) reason: String,
    pub(in crate::cli) purpose: &'static str,
}

/// All of them, used or not.
pub(in crate::cli) fn collect() -> Vec<Feature> {
    let known = feature::present();
    let mut features: Vec<_> = FEATURES
        .iter()
        .map(|feature| {
            let bits = known.as_ref().map(|bits| bits & feature.bit);
            Feature {
                name: feature.name,
                present: matches!(bits, Ok(bit) if bit != 0),
                reason: match bits {
                    Ok(0) => format!("came with Linux {}", feature.since),
                    Ok(_) => PRESENT.to_owned(),
                    Err(error) => format!("the kernel can't be asked: {error}"),
                },
                purpose: feature.purpose,
            }
        })
        .collect();
    let has_netkit = netkit::is_supported();
    features.push(Feature {
        name: "netkit",
        present: has_netkit,
        reason: if has_netkit {
            PRESENT.to_owned()
        } else {
            "came with Linux 6.7, if built with CONFIG_NETKIT".to_owned()
        },
        purpose: "containers can have netkit pairs instead of veths",
    });
    let switch = "/proc/sys/net/core/bpf_jit_enable";
    // Where the switch can't be read, the kernel was built to compile always.
    let compiled = fs::read_to_string(switch).map_or(true, |value| value.trim() != "0");
    features.push(Feature {
        name: "JIT",
        present: compiled,
        reason: if compiled {
            "on".to_owned()
        } else {
            format!("{switch} is 0")
        },
        purpose: "programs run as machine code, several times faster than interpreted",
    });
    features
}

/// Prints the section.
pub(super) fn print(features: &[Feature], out: &mut impl io::Write) -> io::Result<()> {
    writeln!(out, "\n{HEADING}Kernel features{HEADING:#}")?;
    for Feature {
        name,
        present,
        reason,
        purpose,
    } in features
    {
        let (style, word) = if *present {
            (GOOD, "yes")
        } else {
            (FAINT, "no ")
        };
        writeln!(
            out,
            "  {name:<20} {style}{word}{style:#}  {reason}: {purpose}"
        )?;
    }
    Ok(())
}
