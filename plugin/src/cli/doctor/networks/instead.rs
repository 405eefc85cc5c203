//! What containers get in the place of a network of ours: runtimes take the first network of the folder, and where that is Multus' it hands
//! containers on to another one, as far as its config says so.

use std::path::Path;

use serde_json::{Map, Value};
use underpass_cni::{Error as CniError, net_dir::NetworkFile};

use crate::cli::NAME;

/// Multus, also where a daemon of it does the work.
const MULTUS: [&str; 2] = ["multus", "multus-shim"];
/// Further plugins that hand containers over to networks of others. What they go by is not in the folder.
const META: [&str; 2] = ["danm", "genie"];
/// The key by which Multus knows the network of every pod: a path, or a name, which the API is asked for first. With it [`DELEGATES`] counts for
/// nothing. Where it has neither it attaches nobody, and where that is a shim its daemon knows.
pub(in crate::cli) const CLUSTER_NETWORK: &str = "clusterNetwork";
/// The key of Multus with whole networks, of which the first is that of every pod.
pub(in crate::cli) const DELEGATES: &str = "delegates";

/// What containers get in the place of a network of ours.
pub(in crate::cli) enum Instead<'a> {
    /// The first network of the folder.
    First(&'a NetworkFile),
    /// The network that Multus' config has at this key.
    Named {
        multus: &'a NetworkFile,
        key: &'static str,
        name: String,
    },
    /// Nothing: the file that comes first is no network.
    Broken(&'a CniError),
}

impl Instead<'_> {
    /// Says which file is to blame.
    pub(in crate::cli) fn by(&self) -> String {
        match self {
            Self::First(first) => first.path.display().to_string(),
            Self::Named { multus, .. } => multus.path.display().to_string(),
            Self::Broken(_) => "a broken file".to_owned(),
        }
    }

    /// Says why no container gets to `ours`.
    pub(in crate::cli) fn what(&self, ours: &str) -> String {
        match self {
            Self::First(first) => format!(
                "runtimes take the first network by name, which is {:?} in {}: no container gets to {ours}",
                first.name(),
                first.path.display()
            ),
            Self::Named { multus, key, name } => format!(
                "Multus in {} hands containers on to {name:?}, which its {key:?} says: no container gets to {ours}",
                multus.path.display()
            ),
            Self::Broken(error) => format!(
                "containerd stops at it, so that no container gets to {ours}, and CRI-O passes over it: {error}"
            ),
        }
    }

    /// Says what changes it.
    pub(in crate::cli) fn fix(&self) -> String {
        match self {
            Self::First(other) => {
                let other = other.path.display();
                format!("mv {other} {other}.disabled, if nobody needs it")
            }
            Self::Named { multus, key, .. } => format!(
                "have {key:?} in {} say ours; where Multus writes that file itself, move the other network out of the folder and start Multus anew",
                multus.path.display()
            ),
            Self::Broken(_) => "mend the file, or move it out of the folder".to_owned(),
        }
    }
}

/// Finds what containers get in the place of the networks that `is_own` accepts, in a folder with these files. `None` if they get to one of those, or
/// if who hands them on does not say so in the folder.
pub(in crate::cli) fn in_place_of_ours<'a>(
    files: &[Result<&'a NetworkFile, &'a CniError>],
    is_own: impl Fn(&NetworkFile) -> bool,
) -> Option<Instead<'a>> {
    let first = match *files.first()? {
        Ok(first) => first,
        Err(error) => return Some(Instead::Broken(error)),
    };
    if is_multus(first) {
        return behind(first, files, is_own);
    }
    (!is_own(first) && !is_meta(first)).then_some(Instead::First(first))
}

/// The same, where containers come to Multus first: it goes by what its config says.
fn behind<'a>(
    multus: &'a NetworkFile,
    files: &[Result<&'a NetworkFile, &'a CniError>],
    is_own: impl Fn(&NetworkFile) -> bool,
) -> Option<Instead<'a>> {
    let config = maker(&multus.document)?;
    if let Some(name) = cluster_network(config) {
        if !is_file(name) {
            // What a name stands for, or which files another folder has, can't be known here.
            return None;
        }
        let mut others = files.iter().copied().flatten();
        // It may be a path inside of its own container.
        let meant = others.find(|other| Path::new(name).file_name() == other.path.file_name());
        let is_well = meant.is_some_and(|other| is_own(other) || is_meta(other));
        return (!is_well).then(|| Instead::Named {
            multus,
            key: CLUSTER_NETWORK,
            name: name.to_owned(),
        });
    }
    let delegate = delegate(config)?;
    let name = ["name", "type"]
        .into_iter()
        .find_map(|key| delegate.get(key)?.as_str());
    (!attaches(delegate)).then(|| Instead::Named {
        multus,
        key: DELEGATES,
        name: name.unwrap_or_default().to_owned(),
    })
}

/// Tells whether a network's containers are attached by this plugin: it makes the interface, or is called by who is asked for it. An entry
/// further down the list only adds to what that has made.
pub(in crate::cli) fn is_ours(network: &NetworkFile) -> bool {
    attaches(&network.document)
}

/// Tells whether this plugin is called for a network's containers, and be it for host ports in the chain of another plugin.
pub(in crate::cli) fn calls_us(network: &NetworkFile) -> bool {
    network.plugins().into_iter().any(attaches)
}

/// Tells whether a network is Multus' own.
pub(in crate::cli) fn is_multus(network: &NetworkFile) -> bool {
    is_one_of(network, &MULTUS)
}

fn is_meta(network: &NetworkFile) -> bool {
    is_one_of(network, &META)
}

fn is_one_of(network: &NetworkFile, kinds: &[&str]) -> bool {
    let kind = maker(&network.document).and_then(kind);
    kind.is_some_and(|kind| kinds.contains(&kind))
}

/// Tells whether this plugin attaches the containers of a network, as that stands in a file or in another network.
fn attaches(network: &Map<String, Value>) -> bool {
    let Some(maker) = maker(network) else {
        return false;
    };
    let called = maker.get("delegate").and_then(Value::as_object);
    let handed = delegate(maker).filter(|_| cluster_network(maker).is_none());
    kind(maker) == Some(NAME) || called.into_iter().chain(handed).any(attaches)
}

/// The entry that makes the interface, by itself or by others: the first one, but for `loopback`, which may stand before it.
fn maker(network: &Map<String, Value>) -> Option<&Map<String, Value>> {
    let Some(list) = network.get("plugins") else {
        return Some(network);
    };
    let mut entries = list.as_array()?.iter().filter_map(Value::as_object);
    entries.find(|entry| kind(entry) != Some("loopback"))
}

fn kind(entry: &Map<String, Value>) -> Option<&str> {
    entry.get("type").and_then(Value::as_str)
}

fn cluster_network(entry: &Map<String, Value>) -> Option<&str> {
    let name = entry.get(CLUSTER_NETWORK).and_then(Value::as_str);
    name.filter(|name| !name.is_empty())
}

fn delegate(entry: &Map<String, Value>) -> Option<&Map<String, Value>> {
    entry.get(DELEGATES)?.as_array()?.first()?.as_object()
}

/// Tells whether Multus takes this for the path of a single network.
fn is_file(name: &str) -> bool {
    let end = Path::new(name).extension();
    name.contains('/') && end.is_some_and(|end| end == "conf" || end == "conflist")
}

#[cfg(test)]
mod tests {
    use super::*;

    const OURS: &str = r#"{"name": "pods", "plugins": [{"type": "underpass"}]}"#;
    const OTHER: &str = r#"{"name": "other", "plugins": [{"type": "bridge"}]}"#;
    const CHAIN: &str =
        r#"{"name": "chain", "plugins": [{"type": "bridge"}, {"type": "underpass"}]}"#;

    fn network(number: usize, text: &str) -> Result<NetworkFile, CniError> {
        NetworkFile::parse(format!("/n/{number}.conflist").into(), text.as_bytes())
    }

    /// What is to blame where files have these texts; empty where nothing is.
    fn by(texts: &[&str]) -> String {
        let numbered = texts.iter().enumerate();
        let networks: Vec<_> = numbered
            .map(|(number, text)| network(number, text))
            .collect();
        let files: Vec<_> = networks.iter().map(Result::as_ref).collect();
        let found = in_place_of_ours(&files, is_ours);
        found.map(|found| found.by()).unwrap_or_default()
    }

    #[test]
    fn who_makes_the_interface_has_the_container() {
        for (text, ours, called) in [
            (OURS, true, true),
            (r#"{"type": "underpass"}"#, true, true),
            (
                r#"{"name": "n", "plugins": [{"type": "loopback"}, {"type": "underpass"}]}"#,
                true,
                true,
            ),
            (
                r#"{"name": "n", "plugins": [{"type": "flannel", "delegate": {"type": "underpass"}}, {"type": "portmap"}]}"#,
                true,
                true,
            ),
            (
                r#"{"type": "multus", "delegates": [{"plugins": [{"type": "underpass"}]}]}"#,
                true,
                true,
            ),
            (CHAIN, false, true),
            (
                r#"{"type": "multus", "delegates": [{"type": "bridge"}, {"type": "underpass"}]}"#,
                false,
                false,
            ),
            (
                r#"{"name": "n", "plugins": [{"type": "flannel", "delegate": {"mtu": 1400}}]}"#,
                false,
                false,
            ),
            (OTHER, false, false),
        ] {
            let network = network(0, text).expect("a network");
            assert_eq!(
                (is_ours(&network), calls_us(&network)),
                (ours, called),
                "{text}"
            );
        }
    }

    #[test]
    fn the_first_file_decides() {
        assert_eq!(by(&[OURS, OTHER]), "");
        assert_eq!(by(&[OTHER, OURS]), "/n/0.conflist");
        assert_eq!(by(&[CHAIN, OURS]), "/n/0.conflist");
        assert_eq!(by(&["{", OURS]), "a broken file");
        assert_eq!(by(&[OURS, "{"]), "");
        assert_eq!(by(&[r#"{"type": "genie"}"#, OTHER, OURS]), "");
        assert_eq!(by(&[]), "");
    }

    #[test]
    fn what_multus_does_not_say_is_not_known() {
        for kind in MULTUS {
            let multus = format!(r#"{{"name": "m", "type": "{kind}", "delegates": []}}"#);
            for others in [[OURS, OTHER], [OTHER, OURS], ["{", OURS]] {
                assert_eq!(by(&[&multus, others[0], others[1]]), "", "{others:?}");
            }
        }
    }

    #[test]
    fn what_multus_names_decides() {
        for (name, is_well) in [
            ("/host/etc/cni/net.d/2.conflist", true),
            ("/host/etc/cni/net.d/1.conflist", false),
            ("/etc/cni/multus/net.d/some.conf", false),
            // Names of objects of the API, whatever networks are called here, and a folder of Multus' container.
            ("pods", true),
            ("other", true),
            ("/etc/cni/multus/net.d", true),
        ] {
            // Its own file may have the name of ours, and what else is in it counts for nothing.
            let multus = format!(
                r#"{{"name": "pods", "type": "multus-shim", "clusterNetwork": "{name}", "delegates": [{OTHER}]}}"#
            );
            let expected = if is_well { "" } else { "/n/0.conflist" };
            assert_eq!(by(&[&multus, OTHER, OURS]), expected, "{name}");
        }
    }

    #[test]
    fn what_multus_has_in_it_decides() {
        for (first, is_well) in [
            (OURS, true),
            (r#"{"type": "underpass"}"#, true),
            (OTHER, false),
            (CHAIN, false),
        ] {
            let multus = format!(r#"{{"type": "multus", "delegates": [{first}, {OURS}]}}"#);
            let expected = if is_well { "" } else { "/n/0.conflist" };
            assert_eq!(by(&[&multus, OTHER, OURS]), expected, "{first}");
            assert_eq!(by(&[&multus, OURS, OTHER]), expected, "{first}");
        }
    }

    #[test]
    fn what_it_says_has_file_and_reason() {
        let multus = r#"{"type": "multus", "delegates": [{"type": "bridge"}]}"#;
        for texts in [[OTHER, OURS], ["{", OURS], [multus, OURS]] {
            let networks = [network(0, texts[0]), network(1, texts[1])];
            let files: Vec<_> = networks.iter().map(Result::as_ref).collect();
            let found = in_place_of_ours(&files, is_ours).expect("it is not ours");
            let what = found.what("that one");
            assert!(what.contains("no container gets to that one"), "{what}");
            assert!(what.contains("/n/"), "{what}");
            let is_broken = texts.contains(&"{");
            assert_eq!(what.contains("it is no JSON"), is_broken, "{what}");
        }
    }
}
