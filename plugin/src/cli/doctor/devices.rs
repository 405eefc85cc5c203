//! Whether the programs sit on the devices of containers and uplinks, what others have put before them, and whether what a
//! container sends fits into its way out.

use underpass_abi::endpoint::device;
use underpass_dataplane::{
    attach::{self, Hook, Place},
    tcx,
};
use underpass_netlink::filter::{Direction, Filter};

use super::{Diagnosis, Node, Report, some};
use crate::{
    error::Error,
    finding::Finding,
    left_behind::left_behind,
    uplink::{InheritedMtu, inherited_mtu},
};

pub(super) fn check(node: &Node<'_>, report: &mut Report) -> Result<(), Error> {
    // Where the pins can't be used nobody knows who is left behind.
    if !node.unusable {
        let left = left_behind(node.places.bpf_root, node.maps.as_ref(), |_| true)?;
        report.add(left.iter().filter_map(|finding| match finding {
            Finding::LeftBehind { device, .. } => Some(is_left_behind(device)),
            _ => None,
        }));
    }
    if node.maps.is_none() {
        return Ok(());
    }
    let places: Vec<_> = node
        .devices
        .iter()
        .map(|(index, entry)| (*index, attach::places(entry.flags)))
        .collect();
    for (index, place) in attach::missing(&node.netlink, &node.pins, &places)? {
        let entry = node.devices.iter().find(|(known, _)| *known == index);
        // A device that is gone took its filters along.
        if let (Some(name), Some((_, entry))) = (node.name(index), entry) {
            report.add([is_missing(name, entry.flags, place)]);
        }
    }
    let pods = node.pods().map(|link| (link.name.as_str(), link.mtu));
    report.add(too_large(
        &pods.collect::<Vec<_>>(),
        inherited_mtu(&node.uplinks),
    ));
    Ok(())
}

/// Looks for what others have put before our programs.
pub(super) fn check_filters(node: &Node<'_>, report: &mut Report) -> Result<(), Error> {
    for (index, entry) in &node.devices {
        let Some(name) = node.name(*index) else {
            continue;
        };
        for place in attach::places(entry.flags) {
            let Hook::Tc(direction) = place.hook else {
                continue;
            };
            report.add(before_ours(
                name,
                direction,
                &node.netlink.filters(*index, direction)?,
                tcx::programs(*index, direction).len(),
            ));
        }
    }
    Ok(())
}

fn is_left_behind(device: &str) -> Diagnosis {
    Diagnosis::error(
        "left-behind",
        format!(
            "{device} leads to a container that the maps do not know: its programs were unloaded, or the bpffs was wiped or mounted anew; after the next ADD it has no masquerade, host ports and bypass"
        ),
        format!(
            "`ip link show {device}` names the container in its alias: recreate that (in Kubernetes, delete the pod)"
        ),
    )
}

fn is_missing(name: &str, flags: u32, place: Place) -> Diagnosis {
    let hook = place.hook.name();
    let program = place.program;
    let what = format!(
        "the program {program} is not at the {hook} of {name}, where another call has put it"
    );
    let fix = if flags & device::POD == 0 {
        "underpass apply (the next ADD or GC does the same)".to_owned()
    } else {
        format!(
            "recreate the container (in Kubernetes, delete the pod); `ip link show {name}` names it in its alias"
        )
    };
    Diagnosis::error("program-missing", what, fix)
}

/// A filter that is asked before ours decides what ours get to see.
fn before_ours(
    name: &str,
    direction: Direction,
    filters: &[Filter],
    at_tcx: usize,
) -> Option<Diagnosis> {
    let before = filters.iter().filter(|filter| filter.is_before_ours());
    let mut others: Vec<_> = before
        .map(|filter| {
            let title = filter.name.as_ref().unwrap_or(&filter.kind);
            format!("{title} at priority {}", filter.priority)
        })
        .collect();
    if at_tcx > 0 {
        others.push(format!(
            "{at_tcx} program{} at tcx",
            if at_tcx == 1 { "" } else { "s" }
        ));
    }
    if others.is_empty() {
        return None;
    }
    let direction = direction.name();
    let fix = if at_tcx > 0 {
        format!(
            "`bpftool net show dev {name}` tells whose it is; let one of the two serve the device"
        )
    } else {
        format!(
            "`tc filter show dev {name} {direction}` tells whose it is; set \"bypass\": \"off\" where that program is wanted, and take it off where not"
        )
    };
    Some(Diagnosis::warning(
        "foreign-filter",
        format!(
            "the {direction} of {name} has {}: what it answers with TC_ACT_OK, drops or redirects never gets to our program, and what takes the bypass may never get to it",
            some(others.iter().map(String::as_str))
        ),
        fix,
    ))
}

fn too_large(pods: &[(&str, u32)], way_out: Option<InheritedMtu<'_>>) -> Option<Diagnosis> {
    let InheritedMtu { mtu, uplink } = way_out?;
    let large: Vec<_> = pods
        .iter()
        .filter(|(_, pod)| *pod > mtu)
        .map(|(name, pod)| format!("{name} ({pod})"))
        .collect();
    (!large.is_empty()).then(|| {
        Diagnosis::warning(
            "mtu",
            format!(
                "the uplink {uplink} has an MTU of {mtu}, and containers a larger one: {}; large packets are cut up or refused, and stall where ICMP is dropped on the way",
                some(large.iter().map(String::as_str))
            ),
            format!(
                "ip link set {uplink} mtu <theirs> if the network beyond carries that; else set \"mtu\": {mtu} in the network, or leave it out, and recreate the containers"
            ),
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn filter(priority: u16, name: Option<&str>) -> Filter {
        Filter {
            priority,
            kind: "bpf".to_owned(),
            name: name.map(str::to_owned),
        }
    }

    #[test]
    fn only_what_comes_before_ours_matters() {
        let ours = filter(0xC0DE, Some("underpass_from_pod"));
        let found =
            |filters: &[Filter], tcx| before_ours("veth1", Direction::Ingress, filters, tcx);
        assert_eq!(found(&[], 0), None);
        assert_eq!(found(&[ours.clone(), filter(0xFFFF, None)], 0), None);
        let cilium = filter(1, Some("cil_from_container"));
        let text = found(&[cilium, ours], 0).expect("a finding").what;
        assert!(text.contains("cil_from_container at priority 1"), "{text}");
        let text = found(&[], 1).expect("a finding").what;
        assert!(text.contains("1 program at tcx"), "{text}");
    }

    #[test]
    fn a_container_has_to_fit_into_its_way_out() {
        let way_out = |mtu| {
            Some(InheritedMtu {
                mtu,
                uplink: "eth0",
            })
        };
        assert_eq!(too_large(&[("a", 1500)], way_out(1500)), None);
        assert_eq!(too_large(&[("a", 1450)], way_out(1500)), None);
        assert_eq!(too_large(&[("a", 9000)], None), None);
        let found = too_large(&[("a", 1500), ("b", 1400)], way_out(1450)).expect("a finding");
        assert!(found.what.contains(": a (1500);"), "{}", found.what);
    }
}
