//! What this kernel can do beyond the oldest one supported, and why not where it can't.

use aya::{
    EbpfLoader, TestRunOptions,
    programs::{SchedClassifier, TestRun as _},
};
use underpass_abi::node::feature;

use super::{Error, object::raise_memory_limit};

/// A facility of newer kernels that the programs use where it is there.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Feature {
    /// Bit in [`underpass_abi::node::Node::features`].
    pub(crate) bit: u32,
    /// As people call it.
    pub(crate) name: &'static str,
    /// What it is good for.
    pub(crate) purpose: &'static str,
    /// The version of Linux that brought it; stable kernels before that may have it too.
    pub(crate) since: &'static str,
}

/// All of them.
pub(crate) const FEATURES: [Feature; 2] = [
    Feature {
        bit: feature::FIB_SRC,
        name: "BPF_FIB_LOOKUP_SRC",
        purpose: "the source address of masqueraded packets is looked up for each flow",
        since: "6.7",
    },
    Feature {
        bit: feature::CSUM_IPV6,
        name: "BPF_F_IPV6",
        purpose: "checksums of translated IPv6 packets stay right where the network card computed them",
        since: "6.16",
    },
];

/// A program that answers with the bits of the features that the kernel has.
static OBJECT: &[u8] = aya::include_bytes_aligned!(concat!(env!("OUT_DIR"), "/underpass-probe"));
const PROGRAM: &str = "probe";

/// The bits of the features that this kernel has. The kernel is asked by a run of a small program, which takes less than a
/// millisecond: its version does not tell, since flags of helpers are carried back to older kernels.
pub(crate) fn present() -> Result<u32, Error> {
    raise_memory_limit();
    let mut object = EbpfLoader::new().load(OBJECT)?;
    let probe = object.program_mut(PROGRAM).ok_or(Error::Missing(PROGRAM))?;
    let probe: &mut SchedClassifier = probe.try_into().map_err(Error::program(PROGRAM))?;
    probe.load().map_err(Error::program(PROGRAM))?;
    let answer = probe.test_run(TestRunOptions {
        data_in: Some(&[0; feature::PROBE_LENGTH]),
        ..TestRunOptions::new()
    });
    Ok(answer.map_err(Error::program(PROGRAM))?.return_value)
}

/// Release of the running kernel, as `uname -r` prints it.
pub(crate) fn release() -> String {
    nix::sys::utsname::uname()
        .map(|name| name.release().to_string_lossy().into_owned())
        .unwrap_or_default()
}

/// The first two numbers of that; zeros if it has none.
pub(crate) fn version() -> (u32, u32) {
    numbers(&release())
}

fn numbers(release: &str) -> (u32, u32) {
    let mut numbers = release
        .split(|c: char| !c.is_ascii_digit())
        .map(|number| number.parse().unwrap_or(0));
    let mut next = || numbers.next().unwrap_or(0);
    (next(), next())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_release_begins_with_two_numbers() {
        assert_eq!(numbers("5.10.0-33-amd64"), (5, 10));
        assert_eq!(numbers("7.3-rc1"), (7, 3));
        assert_eq!(numbers(""), (0, 0));
    }
}
