//! What kernels have or lack beyond what everything here needs: some tests are about it.

use std::{fs, io, process::Command};

use anyhow::{Context as _, Result, ensure};
use underpass_dataplane::kernel::release;

use crate::netns::Netns;

/// Something that a kernel can be built without.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Facility {
    /// The netfilter hooks of IP for what comes to a port of a bridge. They act once they are there.
    BridgeNetfilter,
    /// VLAN devices (IEEE 802.1Q).
    Vlan,
    /// Devices with a MAC address of their own on another's wire.
    MacVlan,
    /// Devices that join others to one.
    Bond,
    /// Devices that hold addresses and send nothing.
    Dummy,
    /// WireGuard devices.
    WireGuard,
    /// Devices for virtual routing and forwarding.
    Vrf,
    /// The queue that delays, loses and reorders.
    Netem,
    /// The queue that paces.
    Fq,
    /// Pairs of devices whose one end runs programs on what the other sends (6.7).
    Netkit,
    /// The load balancer that kube-proxy can use in the place of rules.
    Ipvs,
}

impl Facility {
    /// All of them.
    pub const ALL: [Self; 11] = [
        Self::BridgeNetfilter,
        Self::Vlan,
        Self::MacVlan,
        Self::Bond,
        Self::Dummy,
        Self::WireGuard,
        Self::Vrf,
        Self::Netem,
        Self::Fq,
        Self::Netkit,
        Self::Ipvs,
    ];

    /// Its module, and the name of its option when the kernel is built.
    const fn names(self) -> (&'static str, &'static str) {
        match self {
            Self::BridgeNetfilter => ("br_netfilter", "CONFIG_BRIDGE_NETFILTER"),
            Self::Vlan => ("8021q", "CONFIG_VLAN_8021Q"),
            Self::MacVlan => ("macvlan", "CONFIG_MACVLAN"),
            Self::Bond => ("bonding", "CONFIG_BONDING"),
            Self::Dummy => ("dummy", "CONFIG_DUMMY"),
            Self::WireGuard => ("wireguard", "CONFIG_WIREGUARD"),
            Self::Vrf => ("vrf", "CONFIG_NET_VRF"),
            Self::Netem => ("sch_netem", "CONFIG_NET_SCH_NETEM"),
            Self::Fq => ("sch_fq", "CONFIG_NET_SCH_FQ"),
            Self::Netkit => ("netkit", "CONFIG_NETKIT"),
            Self::Ipvs => ("ip_vs", "CONFIG_IP_VS"),
        }
    }

    /// The command that only a kernel with it carries out, in a namespace of its own.
    const fn use_of_it(self) -> [&'static str; 2] {
        match self {
            Self::BridgeNetfilter => [
                "iptables",
                "-A FORWARD -m physdev --physdev-in veth -j ACCEPT",
            ],
            Self::Vlan => ["ip", "link add one link veth type vlan id 1"],
            Self::MacVlan => ["ip", "link add one link veth type macvlan"],
            Self::Bond => ["ip", "link add one type bond"],
            Self::Dummy => ["ip", "link add one type dummy"],
            Self::WireGuard => ["ip", "link add one type wireguard"],
            Self::Vrf => ["ip", "link add one type vrf table 100"],
            Self::Netem => ["tc", "qdisc add dev veth root netem delay 1ms"],
            Self::Fq => ["tc", "qdisc add dev veth root fq"],
            Self::Netkit => ["ip", "link add one type netkit"],
            Self::Ipvs => ["ipvsadm", "-A -t 192.0.2.1:80 -s rr"],
        }
    }

    /// What the kernel said when it was asked to use it; nothing if it did.
    pub fn refusal(self) -> Result<Option<String>> {
        let netns = Netns::isolated("probe")?;
        netns.rtnl(|rtnl| rtnl.add_veth("veth", 1500, "peer", None))?;
        let [program, arguments] = self.use_of_it();
        let output = netns.output(Command::new(program).args(arguments.split(' ')), &[])?;
        if output.status.success() {
            return Ok(None);
        }
        let said = String::from_utf8_lossy(&output.stderr);
        let line = said.lines().next().unwrap_or_default();
        Ok(Some(format!("`{program} {arguments}`: {line}")))
    }

    /// True if this kernel lacks it; that is printed, as `cargo xtask test vm` looks for it.
    pub fn is_missing(self) -> Result<bool> {
        let refusal = self.refusal()?;
        if let Some(refusal) = &refusal {
            let (module, _) = self.names();
            anstream::println!("not on this kernel: no module {module} ({refusal})");
        }
        Ok(refusal.is_some())
    }

    /// Whether the kernel's own lists have it: of its modules, of its symbols for what is never a module, and of what it was built
    /// with. `None` if there is no such list.
    pub fn is_listed(self) -> Result<Option<bool>> {
        let (module, option) = self.names();
        let release = release();
        let mut lists = Vec::new();
        for name in ["modules.dep", "modules.builtin"] {
            let path = format!("/lib/modules/{release}/{name}");
            match fs::read_to_string(&path) {
                Ok(list) => lists.push(has_module(&list, module)),
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                Err(error) => return Err(error).context(path),
            }
        }
        if self == Self::Netkit {
            let symbols =
                fs::read_to_string("/proc/kallsyms").context("read the kernel's symbols")?;
            lists.push(symbols.contains(" netkit_xmit"));
        }
        if fs::exists("/proc/config.gz")? {
            let output = Command::new("gzip")
                .args(["-dc", "/proc/config.gz"])
                .output()
                .context("run gzip")?;
            ensure!(output.status.success(), "gzip failed: {output:?}");
            let options = String::from_utf8_lossy(&output.stdout);
            lists.push(has_option(&options, option));
        }
        Ok((!lists.is_empty()).then(|| lists.contains(&true)))
    }
}

/// Lines are paths, some followed by a colon and what is needed.
fn has_module(list: &str, name: &str) -> bool {
    let file = format!("/{name}.ko");
    list.lines()
        .filter_map(|line| line.split([':', ' ']).next())
        .any(|path| {
            path.match_indices(&file)
                .any(|(at, _)| matches!(&path[at + file.len()..], "" | ".xz" | ".zst" | ".gz"))
        })
}

fn has_option(options: &str, name: &str) -> bool {
    options
        .lines()
        .any(|line| matches!(line.strip_prefix(name), Some("=y" | "=m")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_are_read_by_whole_names() {
        let list = "kernel/net/8021q/8021q.ko.xz: kernel/net/802/garp.ko.xz\nkernel/net/sched/sch_fq.ko:\n";
        assert!(has_module(list, "8021q") && has_module(list, "sch_fq"));
        assert!(!has_module(list, "garp") && !has_module(list, "fq"));
        let options =
            "CONFIG_NET_SCH_FQ=m\n# CONFIG_NET_VRF is not set\nCONFIG_VLAN_8021Q_GVRP=y\n";
        assert!(has_option(options, "CONFIG_NET_SCH_FQ"));
        assert!(
            !has_option(options, "CONFIG_NET_VRF") && !has_option(options, "CONFIG_VLAN_8021Q")
        );
    }
}
