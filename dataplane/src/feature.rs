//! What this kernel can do beyond the oldest one supported, and why not where it can't.

use aya::{EbpfLoader, programs::SchedClassifier};
use underpass_abi::node::feature;

use crate::{
    Error,
    bpf::raise_memory_limit,
    kernel::{may_have_ipv6, version},
    netkit,
    object::inflate,
    test_run::Run,
};

/// A facility of newer kernels that the programs use where it is there.
#[derive(Clone, Copy, Debug)]
pub struct Feature {
    /// Bit in [`underpass_abi::node::Node::features`].
    pub bit: u32,
    /// The name that people have for it.
    pub name: &'static str,
    /// The purpose that it serves.
    pub purpose: &'static str,
    /// The version of Linux that brought it; stable kernels before that may have it too.
    pub since: &'static str,
}

/// These features are looked for.
pub const FEATURES: [Feature; 3] = [
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
    Feature {
        bit: feature::REDIRECT_LONG,
        name: "long bpf_redirect",
        purpose: "IPv4 datagrams that came in pieces to an uplink that is a bridge are shown to connection tracking",
        since: "5.12",
    },
];

/// A program that answers with the bits of the features that the kernel has.
static OBJECT: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/underpass-probe"));
const PROGRAM: &str = "probe";

/// Asks for the bits of the features that this kernel has. The kernel is asked by a run of a small program, which takes less than a
/// millisecond: its version does not tell, since flags of helpers are carried back to older kernels. It does tell what no helper answers.
pub fn present() -> Result<u32, Error> {
    raise_memory_limit();
    let mut object = EbpfLoader::new().load(&inflate(OBJECT))?;
    let probe = object.program_mut(PROGRAM).ok_or(Error::Missing(PROGRAM))?;
    let probe: &mut SchedClassifier = probe.try_into().map_err(Error::program(PROGRAM))?;
    probe.load().map_err(Error::program(PROGRAM))?;
    let answer = Run::on(&[0; feature::PROBE_LENGTH]).of(probe);
    let answer = answer.map_err(Error::program(PROGRAM))?.return_value;
    let redirects_long = if version() < (5, 12) {
        0
    } else {
        feature::REDIRECT_LONG
    };
    let claimed_protocol = if version() < (6, 10) && netkit::is_supported() {
        feature::CLAIMED_PROTOCOL
    } else {
        0
    };
    Ok(answer | redirects_long | claimed_protocol | of_boot())
}

/// Asks for those that how the kernel was started decides.
pub(crate) fn of_boot() -> u32 {
    if may_have_ipv6() { 0 } else { feature::NO_IPV6 }
}
