//! The network of an installation: what was asked for, checked as a whole, and our entry in a conflist.

use std::{
    num::NonZeroU16,
    path::{Path, PathBuf},
};

use ipnet::IpNet;
use serde_json::{Map, Value, json};
use underpass_cni::{Error, NetConf, Version};
use underpass_ipam::{pool::Pool, range::Bounds};

use super::PLUGIN;
use crate::conf::{BPF_ROOT, Conf};

/// The smallest MTU that IPv6 works with, in bytes.
const MTU_MIN_IPV6: u32 = 1280;

/// What a network is made of.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Wish {
    /// The network's name.
    pub name: String,
    /// The version of the specification that the conflist declares.
    pub version: Version,
    /// Where containers' addresses come from, in the order of results.
    pub ranges: Vec<IpNet>,
    /// Destinations that see the container's own address; none means the network's own ranges.
    pub cluster: Vec<IpNet>,
    /// The MTU in bytes; if it is not said, the smallest of the uplinks.
    pub mtu: Option<u32>,
    /// The UDP port of the tunnels between the nodes.
    pub tunnel_port: Option<NonZeroU16>,
    /// The folder on a bpffs where the node's pins are.
    pub bpf_root: PathBuf,
    /// Further keys of our entry.
    pub keys: Map<String, Value>,
}

/// Keys of our entry that can be asked for.
const FREE: [&str; 17] = [
    "antiSpoof",
    "bypass",
    "conntrackLiberal",
    "device",
    "dns",
    "egressBurst",
    "egressRate",
    "enabledad",
    "ingressBurst",
    "ingressRate",
    "ipMasq",
    "isDefaultGateway",
    "macspoofchk",
    "masqueradeAddress",
    "maxHalfOpenFlows",
    "uplinks",
    "xdp",
];

/// Keys that are decided here, and by what.
const DECIDED: [(&str, &str); 10] = [
    ("bpfRoot", "--bpf-root says it"),
    ("capabilities", "it says what the plugin can do"),
    ("cniVersion", "--cni-version says it"),
    ("ipam", "--range says it"),
    ("mtu", "--mtu says it"),
    ("name", "--name says it"),
    ("nonMasqueradeCIDRs", "--cluster-cidr says it"),
    ("plugins", "only the entry of underpass is written"),
    ("tunnelPort", "--tunnel-port says it"),
    ("type", "it is always underpass"),
];

/// A network that makes sense.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Network {
    wish: Wish,
}

impl Network {
    /// Checks a wish. Code 7 if a network of it would be refused by the first ADD.
    pub fn new(wish: Wish) -> Result<Self, Error> {
        if wish.ranges.is_empty() {
            return Err(Error::config(
                "no range: name one for each family of the containers' addresses, such as 10.22.0.0/24",
            ));
        }
        for (index, range) in wish.ranges.iter().enumerate() {
            let addresses = pool(*range)?;
            for other in &wish.ranges[index + 1..] {
                if addresses.overlaps(&pool(*other)?) {
                    return Err(Error::config(format!(
                        "the ranges {range} and {other} overlap: no address may be in both"
                    )));
                }
            }
        }
        if let Some(mtu) = wish.mtu.filter(|mtu| *mtu < MTU_MIN_IPV6)
            && wish.ranges.iter().any(is_ipv6)
        {
            return Err(Error::config(format!(
                "the MTU {mtu} is too small for IPv6: it must be {MTU_MIN_IPV6} or more, or no range may be of IPv6"
            )));
        }
        free(&wish.keys)?;
        let network = Self { wish };
        // All that an ADD would check: the name, and each key.
        Conf::of_network(&network.conf()?)?;
        Ok(network)
    }

    /// Makes what the plugin will be given.
    pub fn conf(&self) -> Result<NetConf, Error> {
        let mut conf = self.entry();
        conf.insert("name".to_owned(), self.name().into());
        conf.insert("cniVersion".to_owned(), self.version().as_str().into());
        NetConf::parse(Value::Object(conf).to_string().as_bytes())
    }

    /// The network's name.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.wish.name
    }

    /// The version of the specification that the conflist declares.
    #[must_use]
    pub fn version(&self) -> Version {
        self.wish.version
    }

    /// Makes our entry of a conflist.
    #[must_use]
    pub fn entry(&self) -> Map<String, Value> {
        let Wish {
            ranges,
            cluster,
            mtu,
            tunnel_port,
            bpf_root,
            keys,
            ..
        } = &self.wish;
        // A container gets one address from each list, so ranges of a family are in one.
        let v4_first = ranges.first().is_some_and(|range| !is_ipv6(range));
        let families = [!v4_first, v4_first];
        let of = |ipv6: bool| ranges.iter().filter(move |range| is_ipv6(range) == ipv6);
        let present = families
            .into_iter()
            .filter(|ipv6| of(*ipv6).next().is_some());
        let lists: Vec<Value> = present
            .clone()
            .map(|ipv6| of(ipv6).map(|range| json!({ "subnet": range })).collect())
            .collect();
        let routes: Vec<Value> = present
            .map(|ipv6| json!({ "dst": if ipv6 { "::/0" } else { "0.0.0.0/0" } }))
            .collect();
        let mut entry = Map::from_iter([
            ("type".to_owned(), json!(PLUGIN)),
            ("ipMasq".to_owned(), json!(true)),
            (
                "capabilities".to_owned(),
                json!({ "portMappings": true, "bandwidth": true }),
            ),
            (
                "ipam".to_owned(),
                json!({ "type": "host-local", "ranges": lists, "routes": routes }),
            ),
        ]);
        if !cluster.is_empty() {
            entry.insert("nonMasqueradeCIDRs".to_owned(), json!(cluster));
        }
        if let Some(mtu) = mtu {
            entry.insert("mtu".to_owned(), json!(mtu));
        }
        if let Some(port) = tunnel_port {
            entry.insert("tunnelPort".to_owned(), json!(port));
        }
        if bpf_root != Path::new(BPF_ROOT) {
            entry.insert("bpfRoot".to_owned(), json!(bpf_root));
        }
        entry.extend(keys.clone());
        entry
    }
}

/// Refuses keys that mean nothing, which are most likely misspelt, and those that are decided here.
fn free(keys: &Map<String, Value>) -> Result<(), Error> {
    for key in keys.keys() {
        if FREE.contains(&key.as_str()) {
            continue;
        }
        let decided = DECIDED.iter().find(|(decided, _)| decided == key);
        return Err(match decided {
            Some((_, why)) => Error::config(format!("the key {key:?} can't be given: {why}")),
            None => Error::config(format!("there is no key {key:?} that could be given"))
                .with_details(format!("those that can are {}", FREE.join(", "))),
        });
    }
    Ok(())
}

fn is_ipv6(range: &IpNet) -> bool {
    matches!(range, IpNet::V6(_))
}

fn pool(range: IpNet) -> Result<Pool, Error> {
    let bounds = Bounds {
        subnet: Some(range),
        ..Bounds::default()
    };
    Pool::new(&[bounds]).map_err(|error| {
        Error::config(format!("invalid range {range}: {error}"))
            .with_details(error.remedy().replace("\"subnet\"", "it"))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn wish(ranges: &[&str]) -> Wish {
        Wish {
            name: "pods".to_owned(),
            version: Version::V1_0_0,
            ranges: ranges
                .iter()
                .map(|range| range.parse().expect("a prefix"))
                .collect(),
            cluster: Vec::new(),
            mtu: None,
            tunnel_port: None,
            bpf_root: PathBuf::from(BPF_ROOT),
            keys: Map::new(),
        }
    }

    #[test]
    fn families_keep_their_order_and_each_has_one_list() {
        let entry = |ranges: &[&str]| Network::new(wish(ranges)).expect("it makes sense").entry();
        let ipam = &entry(&["10.22.0.0/24", "fd00:22::/64", "10.23.0.0/24"])["ipam"];
        assert_eq!(
            ipam["ranges"],
            json!([
                [{ "subnet": "10.22.0.0/24" }, { "subnet": "10.23.0.0/24" }],
                [{ "subnet": "fd00:22::/64" }]
            ])
        );
        let ipam = &entry(&["fd00:22::/64", "10.22.0.0/24"])["ipam"];
        assert_eq!(
            ipam["routes"],
            json!([{ "dst": "::/0" }, { "dst": "0.0.0.0/0" }])
        );
        let ipam = &entry(&["fd00:22::/64"])["ipam"];
        assert_eq!(ipam["routes"], json!([{ "dst": "::/0" }]));
    }

    #[test]
    fn only_what_was_asked_for_is_written() {
        let entry = Network::new(wish(&["10.22.0.0/24"]))
            .expect("it makes sense")
            .entry();
        for key in ["nonMasqueradeCIDRs", "mtu", "tunnelPort", "bpfRoot"] {
            assert!(!entry.contains_key(key), "{key}");
        }
        let all = Wish {
            cluster: vec!["10.0.0.0/8".parse().expect("a prefix")],
            mtu: Some(1400),
            tunnel_port: NonZeroU16::new(4789),
            bpf_root: PathBuf::from("/sys/fs/bpf/other"),
            ..wish(&["10.22.0.0/24"])
        };
        let entry = Network::new(all).expect("it makes sense").entry();
        assert_eq!(entry["nonMasqueradeCIDRs"], json!(["10.0.0.0/8"]));
        assert_eq!(entry["mtu"], 1400);
        assert_eq!(entry["tunnelPort"], 4789);
        assert_eq!(entry["bpfRoot"], "/sys/fs/bpf/other");
    }

    #[test]
    fn what_an_add_would_refuse_is_refused() {
        let refusal = |wish| {
            Network::new(wish)
                .expect_err("it makes no sense")
                .to_string()
        };
        assert!(refusal(wish(&[])).contains("no range"));
        for overlapping in [
            ["10.22.0.0/16", "10.22.3.0/24"],
            ["fd00::/48", "fd00:0:0:1::/64"],
        ] {
            assert!(refusal(wish(&overlapping)).contains("overlap"));
        }
        assert!(refusal(wish(&["10.22.0.1/24"])).contains("write it as 10.22.0.0/24"));
        assert!(refusal(wish(&["10.22.0.0/31"])).contains("/30 or larger"));
        let small = Wish {
            mtu: Some(1000),
            ..wish(&["10.22.0.0/24", "fd00:22::/64"])
        };
        assert!(refusal(small).contains("1280"));
        let named = Wish {
            name: "a/b".to_owned(),
            ..wish(&["10.22.0.0/24"])
        };
        assert!(refusal(named).contains("network name"));
    }

    fn with_keys(keys: Value) -> Result<Map<String, Value>, String> {
        let Value::Object(keys) = keys else {
            panic!("{keys} is no object");
        };
        let wish = Wish {
            keys,
            ..wish(&["10.22.0.0/24", "fd00:22::/64"])
        };
        match Network::new(wish) {
            Ok(network) => Ok(network.entry()),
            Err(error) => Err(format!("{error}: {}", error.details)),
        }
    }

    #[test]
    fn further_keys_are_in_the_entry() {
        let entry =
            with_keys(json!({ "bypass": "off", "ipMasq": false })).expect("they make sense");
        assert_eq!(entry["bypass"], "off");
        assert_eq!(entry["ipMasq"], false);
        assert_eq!(entry["type"], PLUGIN);
    }

    #[test]
    fn what_the_plugin_would_refuse_or_ignore_is_refused() {
        for (keys, said) in [
            (json!({ "bypass": "sometimes" }), "bypass"),
            (json!({ "maxHalfOpenFlows": 0 }), "maxHalfOpenFlows"),
            (json!({ "ingressRate": 1000 }), "ingressBurst"),
            (
                json!({ "bypas": "off" }),
                "those that can are antiSpoof, bypass",
            ),
            // The plugin would take it, and the exact one beside it.
            (json!({ "Bypass": "off" }), "no key \"Bypass\""),
        ] {
            let error = with_keys(keys.clone()).expect_err("it makes no sense");
            assert!(error.contains(said), "{keys}: {error}");
        }
        for (key, _) in DECIDED {
            let error = with_keys(json!({ key: "x" })).expect_err(key);
            assert!(
                error.contains(&format!("{key:?} can't be given")),
                "{error}"
            );
        }
    }
}
