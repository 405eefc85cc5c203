//! Whether a runtime that reads the folder of networks comes to one of ours, and whether an ADD to it could work.

use std::path::Path;

use underpass_cni::{Error as CniError, NetConf, net_dir::NetworkFile};

use instead::Instead;
pub(in crate::cli) use instead::{
    CLUSTER_NETWORK, DELEGATES, calls_us, in_place_of_ours, is_multus, is_ours,
};

use super::{Diagnosis, Node, Report};
use crate::{
    cli::{NAME, networks::usable},
    conf::Conf,
    error::Error,
    install::conflist,
    rehearsal::covered,
    step::lease,
    uplink::Uplinks,
};

mod instead;

pub(super) fn check(node: &Node<'_>, report: &mut Report) -> Result<(), Error> {
    let folder = node.places.net_dir;
    let aside = folder.join(conflist::ASIDE);
    report.add(order(folder, &node.networks, aside.exists()));
    for network in node.networks.iter().flatten() {
        report.add(refused(network));
        // What can't be understood is refused, and said.
        for conf in network.confs(&[NAME]).unwrap_or_default() {
            let Ok(decoded) = Conf::of_network(&conf) else {
                continue;
            };
            let patterns = decoded.uplinks.as_deref();
            let uplinks = Uplinks::look(&node.netlink, node.maps.as_ref(), patterns)?;
            report.add(overlapping(node, &network.path, &conf, &uplinks)?);
            report.add(without_uplink(&network.path, &decoded, &uplinks));
        }
    }
    Ok(())
}

/// Looks at the folder as a runtime does: it takes the first network. containerd takes none if it comes to a broken file
/// before that, and CRI-O goes past it. Where none has its containers attached by us, those count in whose chain we are; and where there is no such one
/// either, an uninstall that was killed may have set ours aside.
fn order(
    folder: &Path,
    networks: &[Result<NetworkFile, CniError>],
    is_set_aside: bool,
) -> Vec<Diagnosis> {
    let is_own: fn(&NetworkFile) -> bool = if networks.iter().flatten().any(is_ours) {
        is_ours
    } else {
        calls_us
    };
    let ours = networks
        .iter()
        .position(|network| network.as_ref().is_ok_and(is_own));
    let mut found = Vec::new();
    for (position, network) in networks.iter().enumerate() {
        let Err(error) = network else { continue };
        let fix = "mend the file, or move it out of the folder";
        let is_before = ours.is_none_or(|ours| position < ours);
        found.push(if is_before {
            let what = format!(
                "a network can't be read, and containerd stops at it before it comes to ours: {error}"
            );
            Diagnosis::error("network-broken", what, fix)
        } else {
            let what = format!("a network can't be read: {error}");
            Diagnosis::warning("network-broken", what, fix)
        });
    }
    let Some(ours) = ours else {
        found.push(if is_set_aside {
            set_aside(folder)
        } else {
            no_network(folder)
        });
        return found;
    };
    // What is broken was said.
    let readable: Vec<_> = networks.iter().flatten().map(Ok).collect();
    let instead = in_place_of_ours(&readable, is_own);
    if let (Some(instead), Some(Ok(own))) = (instead, networks.get(ours)) {
        let what = instead.what(&format!("ours in {}", own.path.display()));
        let mut fix = instead.fix();
        if matches!(instead, Instead::First(_)) {
            fix.push_str("; else give ours a name that sorts before");
        }
        found.push(Diagnosis::warning("network-order", what, fix));
    }
    found
}

fn no_network(folder: &Path) -> Diagnosis {
    Diagnosis::warning(
        "no-network",
        format!(
            "no network in {} is ours: a runtime that looks there never calls {NAME}",
            folder.display()
        ),
        format!(
            "write one, such as the README has, to {}; name the runtime's folder with --net-dir if it is another",
            folder.join(conflist::FILE).display()
        ),
    )
}

fn set_aside(folder: &Path) -> Diagnosis {
    Diagnosis::warning(
        "network-set-aside",
        format!(
            "an uninstall runs, or was killed: it has set our network aside as {}, which no runtime reads",
            folder.join(conflist::ASIDE).display()
        ),
        "if none runs: `underpass uninstall` to go on with it, `underpass install` to have the network back",
    )
}

/// Says why every ADD to a network of ours would be refused.
fn refused(network: &NetworkFile) -> Vec<Diagnosis> {
    let path = network.path.display();
    let refused = |reason: &dyn std::fmt::Display| {
        Diagnosis::error(
            "network-refused",
            format!("every ADD to a network of ours fails: {path}: {reason}"),
            format!("do what it says, or correct {path}; docs/configuration.md has every key"),
        )
    };
    let confs = match network.confs(&[NAME]) {
        Ok(confs) => confs,
        Err(error) => return vec![refused(&error)],
    };
    let reasons = confs.iter().filter_map(|conf| usable(conf).err());
    reasons.map(|error| refused(&error)).collect()
}

/// Says which addresses of an uplink's link a network of ours may give to a container.
fn overlapping(
    node: &Node<'_>,
    path: &Path,
    conf: &NetConf,
    uplinks: &Uplinks<'_>,
) -> Result<Vec<Diagnosis>, Error> {
    let path = path.display();
    if lease::pools(conf).is_err() {
        return Ok(Vec::new());
    }
    let overlaps = covered(conf, uplinks, &node.netlink)?.into_iter();
    Ok(overlaps.map(|overlap| {
        Diagnosis::warning(
            "range-overlap",
            format!("the ranges of a network of ours, in {path}, cover {overlap}: an ADD that is given it fails, or containers never reach that router"),
            format!("give the network in {path} a range that is on no link of the node, or leave the address out by \"rangeStart\" and \"rangeEnd\""),
        )
    }).collect())
}

/// Says that a network of ours should masquerade, and has no uplink to do it.
fn without_uplink(path: &Path, conf: &Conf, uplinks: &Uplinks<'_>) -> Option<Diagnosis> {
    let finding = uplinks.do_not_masquerade(conf.masquerade)?;
    Some(Diagnosis::warning(
        "no-uplink",
        format!("{}: {finding}", path.display()),
        "name the devices that lead out of the node in \"uplinks\" (`ip link` has their names), and then `underpass apply`; [] if none is meant",
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    const OURS: &str = r#"{"cniVersion": "1.0.0", "name": "ours", "plugins": [{"type": "underpass", "ipam": {"type": "host-local", "subnet": "10.22.0.0/24"}}]}"#;
    const OTHER: &str =
        r#"{"cniVersion": "1.0.0", "name": "other", "plugins": [{"type": "bridge"}]}"#;

    fn ids(texts: &[&str]) -> Vec<&'static str> {
        let networks: Vec<_> = texts
            .iter()
            .enumerate()
            .map(|(number, text)| {
                NetworkFile::parse(format!("/n/{number}.conflist").into(), text.as_bytes())
            })
            .collect();
        let found = order(Path::new("/n"), &networks, false);
        found.into_iter().map(|found| found.id).collect()
    }

    #[test]
    fn what_is_set_aside_counts_where_nothing_is_there() {
        let one = |text: &str| NetworkFile::parse("/n/x.conflist".into(), text.as_bytes());
        let ids = |networks: &[_]| {
            let found = order(Path::new("/n"), networks, true);
            found.into_iter().map(|found| found.id).collect::<Vec<_>>()
        };
        assert_eq!(ids(&[]), ["network-set-aside"]);
        assert_eq!(ids(&[one(OTHER)]), ["network-set-aside"]);
        assert_eq!(ids(&[one(OURS)]), [""; 0]);
    }

    #[test]
    fn the_first_network_is_the_one_that_counts() {
        assert_eq!(ids(&[OURS]), [""; 0]);
        assert_eq!(ids(&[OURS, OTHER]), [""; 0]);
        assert_eq!(ids(&[OTHER, OURS]), ["network-order"]);
        assert_eq!(ids(&[OTHER]), ["no-network"]);
        assert_eq!(ids(&[]), ["no-network"]);
    }

    #[test]
    fn others_that_lead_to_ours_are_no_fault() {
        let multus = OTHER.replace("bridge", "multus");
        assert_eq!(ids(&[&multus, OURS]), [""; 0]);
        assert_eq!(ids(&[&multus, OURS, OTHER]), [""; 0]);
        // It may have ours in it, and nobody else.
        let embedding = format!(r#"{{"name": "m", "type": "multus", "delegates": [{OURS}]}}"#);
        assert_eq!(ids(&[&embedding, OTHER]), [""; 0]);
        let flannel = OTHER.replace(
            r#""bridge""#,
            r#""flannel", "delegate": {"type": "underpass"}"#,
        );
        assert_eq!(ids(&[&flannel]), [""; 0]);
    }

    #[test]
    fn others_that_lead_elsewhere_are_a_fault() {
        let multus = OTHER.replace("bridge", "multus");
        let embedding = multus.replace(
            r#""multus""#,
            r#""multus", "delegates": [{"type": "bridge"}]"#,
        );
        assert_eq!(ids(&[&embedding, OURS]), ["network-order"]);
    }

    #[test]
    fn the_chain_of_another_plugin_hides_ours_and_is_called() {
        let chain = OTHER.replace("}]", r#"}, {"type": "underpass"}]"#);
        assert_eq!(ids(&[&chain, OURS]), ["network-order"]);
        assert_eq!(ids(&[&chain]), [""; 0]);
        assert_eq!(ids(&[&chain, OTHER]), [""; 0]);
        assert_eq!(ids(&[OTHER, &chain]), ["network-order"]);
        assert_eq!(
            ids(&["{", OTHER, OURS]),
            ["network-broken", "network-order"]
        );
    }

    #[test]
    fn a_broken_file_is_worse_before_ours_than_after() {
        let severity = |texts: &[&str]| {
            let parse = |text: &&str| NetworkFile::parse("/n/x.conflist".into(), text.as_bytes());
            let networks: Vec<_> = texts.iter().map(parse).collect();
            let mut found = order(Path::new("/n"), &networks, false);
            found.retain(|found| found.id == "network-broken");
            found.first().map(|found| found.severity)
        };
        assert_eq!(severity(&["", OURS]), Some(super::super::Severity::Error));
        assert_eq!(severity(&[OURS, ""]), Some(super::super::Severity::Warning));
        assert_eq!(severity(&[OURS]), None);
    }

    #[test]
    fn a_config_that_no_add_takes_is_found() {
        let parse = |text: &str| {
            NetworkFile::parse("/n/x.conflist".into(), text.as_bytes()).expect("a network")
        };
        assert_eq!(refused(&parse(OURS)), []);
        assert_eq!(refused(&parse(OTHER)), []);
        let wrong = OURS.replace(r#""ipam""#, r#""mtu": -3, "ipam""#);
        assert_eq!(refused(&parse(&wrong)).len(), 1);
        for ipam in [
            r#""type": "host-local""#,
            r#""type": "host-local", "subnet": "10.22.0.1/24""#,
            r#""type": "host-local", "subnet": "fd00:22::1/64""#,
            r#""type": "loopback""#,
            r#""type": "dhcp""#,
            r#""type": "nosuch""#,
        ] {
            let wrong = OURS.replace(r#""type": "host-local", "subnet": "10.22.0.0/24""#, ipam);
            assert_eq!(refused(&parse(&wrong)).len(), 1, "{ipam}");
        }
        let nameless = OURS.replace(r#""ours""#, r#""""#);
        assert_eq!(refused(&parse(&nameless)).len(), 1);
    }
}
