//! What this kernel can do beyond the oldest one supported, and why not where it can't.

use underpass_abi::node::feature;

/// A facility of newer kernels that the programs use where it is there.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Feature {
    /// Bit in [`underpass_abi::node::Node::features`].
    pub(crate) bit: u32,
    /// As people call it.
    pub(crate) name: &'static str,
    /// What it is good for.
    pub(crate) purpose: &'static str,
    since: (u16, u16),
}

/// All of them.
pub(crate) const FEATURES: [Feature; 2] = [
    Feature {
        bit: feature::FIB_SRC,
        name: "BPF_FIB_LOOKUP_SRC",
        purpose: "the source address of masqueraded packets is looked up for each flow",
        since: (6, 7),
    },
    Feature {
        bit: feature::CSUM_IPV6,
        name: "BPF_F_IPV6",
        purpose: "checksums of translated IPv6 packets stay right where the network card computed them",
        since: (6, 16),
    },
];

impl Feature {
    /// Whether the running kernel has it. By version: a backport is not noticed, which is safe.
    pub(crate) fn is_present(&self) -> bool {
        self.is_in(kernel())
    }

    fn is_in(&self, kernel: (u16, u16)) -> bool {
        kernel >= self.since
    }

    /// The version that it came with, `major.minor`.
    pub(crate) fn since(&self) -> String {
        format!("{}.{}", self.since.0, self.since.1)
    }
}

/// The bits of the features that this kernel has.
pub(crate) fn present() -> u32 {
    FEATURES
        .iter()
        .filter(|feature| feature.is_present())
        .fold(0, |bits, feature| bits | feature.bit)
}

/// Release of the running kernel, as `uname -r` prints it.
pub(crate) fn release() -> String {
    nix::sys::utsname::uname()
        .map(|name| name.release().to_string_lossy().into_owned())
        .unwrap_or_default()
}

fn kernel() -> (u16, u16) {
    parse(&release())
}

/// Major and minor number; zeros where the text has none.
fn parse(release: &str) -> (u16, u16) {
    let mut numbers = release
        .split(|c: char| !c.is_ascii_digit())
        .map(|digits| digits.parse().unwrap_or(0));
    (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn releases_are_read() {
        assert_eq!(parse("5.10.0-28-amd64"), (5, 10));
        assert_eq!(parse("6.18.44-fc"), (6, 18));
        assert_eq!(parse("7.0-rc1"), (7, 0));
        assert_eq!(parse(""), (0, 0));
    }

    #[test]
    fn a_feature_is_there_from_its_version_on() {
        let [source, checksum] = FEATURES;
        for (release, expected) in [
            ("5.10.0", [false, false]),
            ("6.1.0-18-amd64", [false, false]),
            ("6.6.30", [false, false]),
            ("6.7.0", [true, false]),
            ("6.16.1", [true, true]),
            ("7.0.0", [true, true]),
        ] {
            let kernel = parse(release);
            assert_eq!(
                [source.is_in(kernel), checksum.is_in(kernel)],
                expected,
                "{release}"
            );
        }
    }
}
