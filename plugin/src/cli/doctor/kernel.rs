//! Whether the kernel can do what the programs need: its version, the bpffs, the compiler for BPF, and lockdown.

use std::fs;

use underpass_dataplane::{kernel, mount_command};

use super::{
    super::status::feature::{self, Feature},
    Diagnosis, Node, Report,
};
use crate::verb::status::OLDEST;

/// The row of the features that is no feature of newer kernels but a switch.
const JIT: &str = "JIT";
/// Who wants a netkit says so in the config.
const NETKIT: &str = "netkit";

/// Tells whether this process may ask the kernel about programs. To others a broken node and a clean one look alike.
pub(super) fn sees() -> bool {
    kernel::lets_load()
}

pub(super) fn check(node: &Node<'_>, report: &mut Report) {
    report.add(too_old(kernel::version(), &kernel::release()));
    report.add(kernel::interrupts_programs().then(|| {
        Diagnosis::error(
            "kernel-real-time",
            "the kernel (PREEMPT_RT) lets programs for packets interrupt each other: every ADD that has to load them fails",
            "boot a kernel without PREEMPT_RT, or one that has CONFIG_PREEMPT_RT_NEEDS_BH_LOCK=y, also in its /boot/config-*",
        )
    }));
    report.add(node.pins.require_bpffs().err().map(|error| {
        Diagnosis::error(
            "no-bpffs",
            format!("programs and maps can't be pinned, so every ADD fails: {error}"),
            mount_command(node.pins.root()),
        )
    }));
    report.add(lacking(&feature::collect()));
    let lockdown = fs::read_to_string(node.places.host("sys/kernel/security/lockdown"));
    report.add(locked_down(
        &lockdown.unwrap_or_default(),
        node.maps.is_some(),
    ));
}

fn too_old(version: (u32, u32), release: &str) -> Option<Diagnosis> {
    (version < OLDEST).then(|| {
        let (major, minor) = OLDEST;
        Diagnosis::error(
            "kernel-too-old",
            format!("Linux {release} can't load the programs: every ADD fails"),
            format!("boot Linux {major}.{minor} or newer"),
        )
    })
}

/// Says what the kernel goes without.
fn lacking(features: &[Feature]) -> Vec<Diagnosis> {
    let lacking = features
        .iter()
        .filter(|feature| !feature.present && feature.name != NETKIT);
    lacking
        .map(|feature| {
            let Feature {
                name,
                reason,
                purpose,
                ..
            } = feature;
            if *name == JIT {
                Diagnosis::warning(
                    "jit-off",
                    "the kernel interprets BPF programs: every packet costs several times more",
                    "sysctl -w net.core.bpf_jit_enable=1, and in a file below /etc/sysctl.d",
                )
            } else {
                Diagnosis::hint(
                    "kernel-feature",
                    format!("this kernel lacks {name} ({reason}), by which {purpose}"),
                    "a newer kernel has it; without it everything works as docs/kernels.md says",
                )
            }
        })
        .collect()
}

/// Reads the chosen mode of lockdown, which is in brackets. Where programs are loaded, the kernel has let them.
fn locked_down(text: &str, loaded: bool) -> Option<Diagnosis> {
    let chosen = text
        .split_ascii_whitespace()
        .any(|mode| mode == "[confidentiality]");
    (chosen && !loaded).then(|| {
        Diagnosis::warning(
            "lockdown",
            "the kernel's lockdown is at \"confidentiality\", which keeps BPF programs from kernel memory and may keep them from being loaded",
            "try `underpass load`; if the kernel refuses, boot with lockdown=integrity",
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ids(diagnoses: impl IntoIterator<Item = Diagnosis>) -> Vec<&'static str> {
        diagnoses.into_iter().map(|found| found.id).collect()
    }

    #[test]
    fn kernels_before_the_oldest_are_too_old() {
        assert_eq!(ids(too_old((5, 9), "5.9.16")), ["kernel-too-old"]);
        assert_eq!(ids(too_old((4, 19), "4.19.0")), ["kernel-too-old"]);
        assert_eq!(too_old((5, 10), "5.10.0"), None);
        assert_eq!(too_old((6, 0), "6.0.0"), None);
    }

    #[test]
    fn lockdown_counts_where_nothing_is_loaded() {
        let text = "none integrity [confidentiality]\n";
        assert_eq!(ids(locked_down(text, false)), ["lockdown"]);
        assert_eq!(locked_down(text, true), None);
        for text in [
            "none [integrity] confidentiality\n",
            "[none] integrity confidentiality\n",
            "",
        ] {
            assert_eq!(locked_down(text, false), None, "{text}");
        }
    }

    #[test]
    fn a_missing_compiler_is_a_finding_and_a_missing_feature_a_hint() {
        let feature = |name, present| Feature {
            name,
            present,
            reason: String::new(),
            purpose: "",
        };
        let found = lacking(&[
            feature("JIT", false),
            feature("BPF_F_IPV6", false),
            feature("BPF_FIB_LOOKUP_SRC", true),
            feature("netkit", false),
        ]);
        assert_eq!(ids(found), ["jit-off", "kernel-feature"]);
        assert_eq!(lacking(&[feature("JIT", true)]), []);
    }
}
