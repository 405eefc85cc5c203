//! What the kernel is told of the VXLAN device by sysctls.

use std::fs;
use std::io::ErrorKind;

use anyhow::Context as _;

use crate::kernel::Notes;

/// A sysctl of the device, and why it has that value.
struct Sysctl {
    path: &'static str,
    value: &'static str,
    otherwise: &'static str,
}

/// Somebody may change one, and nothing tells of that. The first two are not there where the kernel has no IPv6.
const SYSCTLS: [Sysctl; 3] = [
    Sysctl {
        path: "/proc/sys/net/ipv6/conf/underpass-vxlan/accept_ra",
        value: "0",
        otherwise: "whoever gets a datagram to the VXLAN port may become this node's IPv6 router",
    },
    Sysctl {
        path: "/proc/sys/net/ipv6/conf/underpass-vxlan/autoconf",
        value: "0",
        otherwise: "whoever gets a datagram to the VXLAN port may give this node addresses",
    },
    // A node that is behind VXLAN for us may have us on its link, and then one of the two ways is not the other's. IPv6 has no such filter. The
    // larger one of this and that of all devices counts.
    Sysctl {
        path: "/proc/sys/net/ipv4/conf/underpass-vxlan/rp_filter",
        value: "2",
        otherwise: "where it or that of \"all\" is 1, packets are dropped that come through VXLAN from a node to which the way back is direct",
    },
];

/// A new device has what the node says of all new ones (`net.ipv6.conf.default`), which hardened images set to 1.
const DISABLE_IPV6: Sysctl = Sysctl {
    path: "/proc/sys/net/ipv6/conf/underpass-vxlan/disable_ipv6",
    value: "0",
    otherwise: "the kernel refuses the device's IPv6 address, without which no network is installed",
};

/// Makes them what they should be. A device without an IPv6 address gets no IPv6 from us.
pub(super) fn keep(has_ipv6: bool, notes: &mut Notes) {
    // With IPv6 a device hears routers: by then it is told not to.
    let ipv6 = has_ipv6.then_some(&DISABLE_IPV6);
    for sysctl in SYSCTLS.iter().chain(ipv6) {
        if let Err(error) = sysctl.keep(notes) {
            notes.warnings.push(error);
        }
    }
}

impl Sysctl {
    fn keep(&self, notes: &mut Notes) -> anyhow::Result<()> {
        let Self {
            path,
            value,
            otherwise,
        } = self;
        let now = match fs::read_to_string(path) {
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(()),
            now => now.with_context(|| format!("cannot read {path}"))?,
        };
        if now.trim() == *value {
            return Ok(());
        }
        fs::write(path, value)
            .with_context(|| format!("cannot write {value} to {path}: {otherwise}"))?;
        notes.changes.push(format!("{path} is {value}"));
        Ok(())
    }
}
