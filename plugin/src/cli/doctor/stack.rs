//! Whether the node's network stack forwards what containers send, and what it keeps the bypass from.

use std::net::IpAddr;

use underpass_abi::endpoint::device;
use underpass_dataplane::{
    Error as Dataplane,
    policy::{Ipsec, Rules, Stack, Tracking},
};
use underpass_netlink::sysctl::Tree;

use super::{Diagnosis, Node, Report, some};
use crate::error::Error;

/// A family, and what has to be 1 for its containers.
struct Forwarding {
    family: &'static str,
    is_of: fn(&IpAddr) -> bool,
    /// Below `/proc/sys/net`.
    path: &'static str,
    sysctl: &'static str,
}

const FORWARDING: [Forwarding; 2] = [
    Forwarding {
        family: "IPv4",
        is_of: IpAddr::is_ipv4,
        path: "ipv4/ip_forward",
        sysctl: "net.ipv4.ip_forward",
    },
    Forwarding {
        family: "IPv6",
        is_of: IpAddr::is_ipv6,
        path: "ipv6/conf/all/forwarding",
        sysctl: "net.ipv6.conf.all.forwarding",
    },
];

pub(super) fn check(node: &Node<'_>, report: &mut Report) -> Result<(), Error> {
    let tree = Tree::of_this_thread();
    for family in &FORWARDING {
        let endpoints = node.endpoints.iter();
        let containers = endpoints.filter(|(addr, _)| (family.is_of)(addr)).count();
        report.add(not_forwarding(family, containers, tree.number(family.path)));
    }
    let stack = Stack::look();
    report.add(tracking(stack.tracking));
    if let Ipsec::Unknown(errno) = stack.ipsec {
        report.not_checked("ipsec-policies", Dataplane::IpsecUnknown(errno).to_string());
    } else if let Some(maps) = &node.maps {
        let is_current = Rules::in_force(&maps.state()?) == Rules::for_stack(&stack);
        report.add(outdated(is_current));
    }
    report.add(ipsec(stack.ipsec));
    let uplinks = node.uplinks.iter();
    let strict = |flags: u32| flags & device::STRICT_REVERSE_PATH != 0;
    let uplinks = uplinks.map(|uplink| (uplink.name.as_str(), strict(uplink.device.flags)));
    report.add(reverse_path(&uplinks.collect::<Vec<_>>()));
    Ok(())
}

/// An ADD switches forwarding on, so it matters where containers are that somebody has switched it off for. Who has no such
/// setting has no such family.
fn not_forwarding(family: &Forwarding, containers: usize, value: Option<u32>) -> Option<Diagnosis> {
    let Forwarding { family, sysctl, .. } = family;
    (containers > 0 && value == Some(0)).then(|| {
        Diagnosis::error(
            "forwarding-off",
            format!(
                "{sysctl} is 0: the node does not forward what containers send and get by {family}"
            ),
            format!("sysctl -w {sysctl}=1, and look for the file below /etc/sysctl.d that says 0"),
        )
    })
}

fn ipsec(policies: Ipsec) -> Option<Diagnosis> {
    (policies == Ipsec::Present).then(|| {
        Diagnosis::warning(
            "ipsec-policies",
            "the node has policies of IPsec: all packets go through the stack, nothing takes the bypass while they are there",
            "`ip xfrm policy` lists them; if nobody needs them: ip xfrm policy flush, and then underpass load",
        )
    })
}

fn tracking(tracking: Tracking) -> Option<Diagnosis> {
    match tracking {
        Tracking::Absent | Tracking::Liberal => None,
        Tracking::Strict => Some(Diagnosis::hint(
            "tcp-strict",
            "net.netfilter.nf_conntrack_tcp_be_liberal is 0: TCP that took the bypass can't come back to connection tracking, and connections to Services stay in the stack",
            "sysctl -w net.netfilter.nf_conntrack_tcp_be_liberal=1 && underpass load, or \"conntrackLiberal\": true in the network; `underpass status` says what it changes",
        )),
    }
}

fn outdated(is_current: bool) -> Option<Diagnosis> {
    (!is_current).then(|| {
        Diagnosis::warning(
            "stack-outdated",
            "the sysctls of connection tracking or the policies of IPsec have changed, and the programs go by what was there before",
            "underpass load (the next ADD or GC does the same)",
        )
    })
}

/// With one uplink there is no other device by which an answer could leave.
fn reverse_path(uplinks: &[(&str, bool)]) -> Option<Diagnosis> {
    let strict = uplinks.iter().filter(|(_, is_strict)| *is_strict);
    let strict: Vec<_> = strict.map(|(name, _)| *name).collect();
    (uplinks.len() > 1 && !strict.is_empty()).then(|| {
        Diagnosis::hint(
            "rp-filter-strict",
            format!(
                "rp_filter is 1 on {}, and the node has {} uplinks: packets that come in by another uplink than their answers leave by are dropped",
                some(strict.iter().copied()),
                uplinks.len()
            ),
            "if routes differ between directions: sysctl -w net.ipv4.conf.all.rp_filter=2",
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn forwarding_matters_where_containers_are() {
        for family in &FORWARDING {
            let found = not_forwarding(family, 1, Some(0)).expect("a finding");
            assert!(found.fix.contains(family.sysctl), "{}", found.fix);
            assert_eq!(not_forwarding(family, 0, Some(0)), None);
            assert_eq!(not_forwarding(family, 1, Some(1)), None);
            assert_eq!(not_forwarding(family, 1, None), None);
        }
    }

    #[test]
    fn the_strict_filter_matters_between_uplinks() {
        assert_eq!(reverse_path(&[("eth0", true)]), None);
        assert_eq!(reverse_path(&[("eth0", false), ("eth1", false)]), None);
        let found = reverse_path(&[("eth0", true), ("eth1", false)]).expect("a hint");
        assert!(found.what.contains("on eth0,"), "{}", found.what);
    }

    #[test]
    fn strict_tracking_is_no_finding() {
        let found = tracking(Tracking::Strict).expect("a hint");
        assert_eq!(found.severity, super::super::Severity::Hint);
        assert_eq!(tracking(Tracking::Liberal), None);
        assert_eq!(tracking(Tracking::Absent), None);
    }
}
