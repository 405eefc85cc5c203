//! The text of the conflist: our entry anew, and everything of others as it is.
//!
//! Other programs write into it, too: service meshes and policy engines append themselves to the first conflist of a
//! node. What they added, wherever in the document, survives every installation.

use std::path::PathBuf;

use serde_json::{Map, Value, json};
use underpass_cni::net_dir::NetworkFile;

use super::{PLUGIN, network::Network};

/// The name of the file, which never changes: another one would leave two networks, of which the runtime takes the first.
pub const FILE: &str = "10-underpass.conflist";

/// Its name while an uninstall is under way, which may still put it back. Runtimes read it no more: libcni's `ConfFiles`, by which containerd
/// and CRI-O go, asks for the endings `.conf`, `.conflist` and `.json`.
pub const ASIDE: &str = ".10-underpass.conflist.uninstall";

/// Its permissions, as benchmarks of Kubernetes' security want them; all who use it are root.
pub const MODE: u32 = 0o600;

/// The file, as it was found.
#[derive(Clone, PartialEq, Debug)]
pub enum Found {
    /// There was none.
    Nothing,
    /// It was no network: why. A power failure leaves such files, of writers that do not wait for the disk.
    Unreadable(String),
    /// It was a network of a single plugin, which somebody else has written.
    Single(NetworkFile),
    /// It was a conflist, if with an empty list.
    Conflist(NetworkFile),
}

impl Found {
    /// Reads what is there.
    #[must_use]
    pub fn read(path: PathBuf, text: Option<&[u8]>) -> Self {
        let Some(text) = text else {
            return Self::Nothing;
        };
        if text.trim_ascii().is_empty() {
            return Self::Unreadable("it is empty".to_owned());
        }
        let document = match serde_json::from_slice(text) {
            Ok(Value::Object(document)) => document,
            Ok(_) => Map::new(),
            Err(error) => return Self::Unreadable(format!("it is no JSON: {error}")),
        };
        let file = NetworkFile { path, document };
        if file.document.get("plugins").is_some_and(Value::is_array) {
            Self::Conflist(file)
        } else if file.plugins().is_empty() {
            Self::Unreadable("it has no list of plugins".to_owned())
        } else {
            Self::Single(file)
        }
    }

    /// The network that a runtime finds in it.
    #[must_use]
    pub fn network(&self) -> Option<&NetworkFile> {
        match self {
            Self::Single(file) | Self::Conflist(file) => {
                Some(file).filter(|file| !file.plugins().is_empty())
            }
            Self::Nothing | Self::Unreadable(_) => None,
        }
    }

    /// The types of the entries that are not ours, in the order of the file.
    #[must_use]
    pub fn others(&self) -> Vec<String> {
        let Self::Conflist(file) = self else {
            return Vec::new();
        };
        let others = entries(&file.document)
            .iter()
            .filter(|entry| !is_ours(entry));
        others
            .map(|entry| match entry.get("type").and_then(Value::as_str) {
                Some(kind) => kind.to_owned(),
                None => "an entry without a type".to_owned(),
            })
            .collect()
    }

    /// Makes the document that has to be there.
    #[must_use]
    pub fn with(&self, network: &Network) -> Map<String, Value> {
        let mut document = match self {
            Self::Conflist(file) => file.document.clone(),
            Self::Nothing | Self::Unreadable(_) | Self::Single(_) => Map::new(),
        };
        let ours = Value::Object(network.entry());
        let mut list = entries(&document).to_vec();
        match list.iter_mut().find(|entry| is_ours(entry)) {
            Some(entry) => *entry = ours,
            // The others in a chain get the interface of the first.
            None => list.insert(0, ours),
        }
        document.insert("cniVersion".to_owned(), json!(network.version().as_str()));
        document.insert("name".to_owned(), json!(network.name()));
        document.insert("plugins".to_owned(), Value::Array(list));
        document
    }

    /// Tells whether the file says what it has to, however it is laid out.
    #[must_use]
    pub fn is(&self, document: &Map<String, Value>) -> bool {
        matches!(self, Self::Conflist(file) if file.document == *document)
    }
}

/// Writes a document as people read it.
#[must_use]
pub fn text(document: &Map<String, Value>) -> Vec<u8> {
    format!("{:#}\n", Value::Object(document.clone())).into_bytes()
}

fn entries(document: &Map<String, Value>) -> &[Value] {
    match document.get("plugins") {
        Some(Value::Array(list)) => list,
        _ => &[],
    }
}

fn is_ours(entry: &Value) -> bool {
    entry.get("type").and_then(Value::as_str) == Some(PLUGIN)
}

#[cfg(test)]
mod tests {
    use underpass_cni::Version;

    use super::*;
    use crate::{conf::BPF_ROOT, install::network::Wish};

    fn network(range: &str) -> Network {
        Network::new(Wish {
            name: "pods".to_owned(),
            version: Version::V1_0_0,
            ranges: vec![range.parse().expect("a prefix")],
            cluster: Vec::new(),
            mtu: None,
            tunnel_port: None,
            bpf_root: PathBuf::from(BPF_ROOT),
            keys: Map::new(),
        })
        .expect("it makes sense")
    }

    fn found(text: &[u8]) -> Found {
        Found::read(PathBuf::from(FILE), Some(text))
    }

    fn types(document: &Map<String, Value>) -> Vec<&str> {
        let kind = |entry: &'_ Value| entry["type"].as_str().map(str::len);
        let list = entries(document);
        assert!(list.iter().all(|entry| kind(entry).is_some()));
        list.iter()
            .filter_map(|entry| entry["type"].as_str())
            .collect()
    }

    #[test]
    fn the_first_one_is_a_whole_network() {
        let before = Found::read(PathBuf::from(FILE), None);
        assert_eq!(before, Found::Nothing);
        let document = before.with(&network("10.22.0.0/24"));
        assert_eq!(document["cniVersion"], "1.0.0");
        assert_eq!(document["name"], "pods");
        assert_eq!(types(&document), ["underpass"]);
        let again = found(&text(&document));
        assert!(again.is(&again.with(&network("10.22.0.0/24"))));
        assert!(!again.is(&again.with(&network("10.23.0.0/24"))));
    }

    #[test]
    fn what_others_added_stays_where_it_is() {
        let theirs = json!({
            "cniVersion": "0.3.1", "name": "old", "disableCheck": true, "mesh": { "since": 7 },
            "plugins": [
                { "type": "underpass", "bypass": "off", "ipam": {} },
                { "type": "istio-cni", "log_level": "debug" },
                { "kubernetes": 1 },
            ],
        });
        let before = found(theirs.to_string().as_bytes());
        assert_eq!(before.others(), ["istio-cni", "an entry without a type"]);
        let document = before.with(&network("10.22.0.0/24"));
        assert_eq!(document["disableCheck"], true);
        assert_eq!(document["mesh"], json!({ "since": 7 }));
        assert_eq!(document["name"], "pods");
        assert_eq!(document["plugins"][0]["type"], "underpass");
        assert!(document["plugins"][0].get("bypass").is_none());
        assert_eq!(document["plugins"][1], theirs["plugins"][1]);
        assert_eq!(document["plugins"][2], theirs["plugins"][2]);
    }

    #[test]
    fn without_an_entry_of_ours_it_goes_first() {
        let theirs = json!({ "plugins": [{ "type": "tuning" }] });
        let before = found(theirs.to_string().as_bytes());
        let document = before.with(&network("fd00:22::/64"));
        assert_eq!(types(&document), ["underpass", "tuning"]);
    }

    #[test]
    fn another_layout_of_the_same_document_is_the_same() {
        let network = network("10.22.0.0/24");
        let document = Found::Nothing.with(&network);
        let compact = Value::Object(document.clone()).to_string();
        assert!(found(compact.as_bytes()).is(&document));
    }

    #[test]
    fn a_network_of_one_plugin_is_somebodys() {
        let single = found(br#"{"name": "mine", "type": "bridge"}"#);
        assert!(matches!(single, Found::Single(_)), "{single:?}");
        assert_eq!(single.network().map(NetworkFile::name), Some("mine"));
        assert!(single.others().is_empty());
        // A runtime takes none of these, and the first keeps what else is in it.
        let empty = found(br#"{"mesh": 7, "plugins": []}"#);
        assert_eq!(empty.with(&network("10.22.0.0/24"))["mesh"], 7);
        for none in [empty, found(b"[]"), found(br#"{"type": 7, "plugins": 7}"#)] {
            assert_eq!(none.network(), None);
        }
    }

    #[test]
    fn what_is_no_conflist_is_replaced_and_says_why() {
        for (bad, why) in [
            ("", "it is empty"),
            (" \n", "it is empty"),
            ("{\"plugins\": [", "it is no JSON"),
            ("\0\0\0\0", "it is no JSON"),
            ("[]", "no list of plugins"),
            ("{}", "no list of plugins"),
        ] {
            let before = found(bad.as_bytes());
            let Found::Unreadable(said) = &before else {
                panic!("{bad:?} is {before:?}");
            };
            assert!(said.contains(why), "{said}");
            assert_eq!(types(&before.with(&network("10.22.0.0/24"))), ["underpass"]);
        }
    }
}
