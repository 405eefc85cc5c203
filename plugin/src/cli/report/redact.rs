//! Which values of a network's config are shown: those of keys that the specification, the reference plugins or we have. In any
//! other there may be a secret.

use serde_json::{Map, Value};

/// In place of a value that is not shown.
const REDACTED: &str = "(left out)";

/// Keys whose values are objects, or lists of objects, of which each key is judged.
const NESTED: [&str; 3] = ["plugins", "ipam", "delegate"];

/// Keys whose values are objects, or lists of objects, and the keys whose values are shown in these.
const OBJECTS: [(&str, &[&str]); 6] = [
    ("addresses", &["address", "gateway"]),
    (
        "capabilities",
        &[
            "aliases",
            "bandwidth",
            "cgroupPath",
            "deviceID",
            "dns",
            "infinibandGUID",
            "ipRanges",
            "ips",
            "mac",
            "portMappings",
        ],
    ),
    ("dns", &["domain", "nameservers", "options", "search"]),
    ("ranges", &["gateway", "rangeEnd", "rangeStart", "subnet"]),
    (
        "routes",
        &["advmss", "dst", "gw", "mtu", "priority", "scope", "table"],
    ),
    ("vlanTrunk", &["id", "maxID", "minID"]),
];

/// Holds settings of the kernel, of which some are secrets (`tcp_fastopen_key`, `stable_secret`). None of those is a number.
const SETTINGS: &str = "sysctl";

/// Keys whose values are shown, as long as they are no objects.
const SHOWN: [&str; 57] = [
    "antiSpoof",
    "backend",
    "bpfRoot",
    "bridge",
    "bypass",
    "cniVersion",
    "cniVersions",
    "conditionsV4",
    "conditionsV6",
    "conntrackLiberal",
    "dataDir",
    "device",
    "disableCheck",
    "disableGC",
    "egressBurst",
    "egressRate",
    "enabledad",
    "externalSetMarkChain",
    "firewalldZone",
    "forceAddress",
    "gateway",
    "hairpinMode",
    "ingressBurst",
    "ingressPolicy",
    "ingressRate",
    "ipMasq",
    "ipMasqBackend",
    "iptablesAdminChainName",
    "isDefaultGateway",
    "isGateway",
    "macspoofchk",
    "markMasqBit",
    "masqAll",
    "masqueradeAddress",
    "master",
    "maxHalfOpenFlows",
    "mode",
    "mtu",
    "name",
    "nonMasqueradeCIDRs",
    "portIsolation",
    "preserveDefaultVlan",
    "promiscMode",
    "rangeEnd",
    "rangeStart",
    "resolvConf",
    "shapedSubnets",
    "snat",
    "subnet",
    "tunnelPort",
    "type",
    "unshapedSubnets",
    "uplinks",
    "vlan",
    "vlanId",
    "vrfname",
    "xdp",
];

/// Copies a network without the values that are not shown.
pub(super) fn network(document: &Map<String, Value>) -> Value {
    entries(document, &of_network)
}

fn of_network(key: &str, value: &Value) -> Value {
    let inner = OBJECTS.iter().find(|(outer, _)| *outer == key);
    match inner {
        Some((_, keys)) => objects(value, &|key, value| shown_if(keys.contains(&key), value)),
        None if NESTED.contains(&key) => objects(value, &of_network),
        None if key == SETTINGS => objects(value, &|_, value| {
            shown_if(value.as_str().is_some_and(is_numbers), value)
        }),
        None => shown_if(SHOWN.contains(&key), value),
    }
}

/// Copies an object, or the objects of a list, with what becomes of each value by its key.
fn objects(value: &Value, judge: &dyn Fn(&str, &Value) -> Value) -> Value {
    match value {
        Value::Object(object) => entries(object, judge),
        Value::Array(list) => list.iter().map(|value| objects(value, judge)).collect(),
        _ => Value::from(REDACTED),
    }
}

fn entries(object: &Map<String, Value>, judge: &dyn Fn(&str, &Value) -> Value) -> Value {
    let judged = object
        .iter()
        .map(|(key, value)| (key.clone(), judge(key, value)));
    Value::Object(judged.collect())
}

/// Copies a value that is shown, without objects: nobody knows their keys.
fn shown_if(is_shown: bool, value: &Value) -> Value {
    match value {
        Value::Array(list) if is_shown => list.iter().map(|value| shown_if(true, value)).collect(),
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) if is_shown => {
            value.clone()
        }
        _ => Value::from(REDACTED),
    }
}

/// Numbers, with space between.
fn is_numbers(text: &str) -> bool {
    text.chars()
        .all(|char| char.is_ascii_digit() || char.is_ascii_whitespace())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn what_nobody_knows_is_left_out() {
        let whole = json!({
            "name": "n",
            "token": "s3cret",
            "plugins": [
                { "type": "underpass", "mtu": 1400, "ipam": { "type": "host-local", "ranges": [[{ "subnet": "10.0.0.0/8" }]] } },
                { "type": "other", "etcd": { "password": "s3cret" }, "ipam": { "type": "whereabouts", "kubernetes": "s3cret" } },
                { "type": "flannel", "delegate": { "isDefaultGateway": true, "key": ["s3cret"] } },
                "s3cret",
            ],
        });
        let shown = network(whole.as_object().expect("an object"));
        assert!(!shown.to_string().contains("s3cret"), "{shown:#}");
        assert_eq!(shown["plugins"][0], whole["plugins"][0]);
        assert_eq!(shown["plugins"][1]["etcd"], REDACTED);
        assert_eq!(shown["plugins"][2]["delegate"]["isDefaultGateway"], true);
    }

    #[test]
    fn what_nobody_knows_is_left_out_of_values_that_are_shown() {
        let keys = json!({
            "ranges": [[{ "subnet": "10.0.0.0/8", "rangeStart": "10.0.0.9", "key": "s3cret" }]],
            "addresses": [{ "address": "10.0.0.9/8", "key": "s3cret" }],
            "routes": [{ "dst": "::/0", "gw": "fd00::1", "mtu": 1400, "note": "s3cret" }, { "dst": { "key": "s3cret" } }],
            "dns": { "nameservers": ["10.0.0.1"], "options": [], "x": "s3cret" },
            "capabilities": { "portMappings": true, "x": "s3cret" },
            "sysctl": { "net.core.somaxconn": "4096", "net.ipv4.ip_local_port_range": "1024 65535", "net.ipv4.tcp_fastopen_key": "s3cret" },
            "vlanTrunk": [{ "id": 7, "x": "s3cret" }],
            "uplinks": ["eth*", { "key": "s3cret" }],
            "mtu": { "key": "s3cret" },
            "firewalldZone": "trusted",
            "iptablesAdminChainName": "CNI-ADMIN",
        });
        let shown = network(keys.as_object().expect("an object"));
        let text = shown.to_string();
        assert!(!text.contains("s3cret"), "{shown:#}");
        let left_out = keys.to_string().matches("s3cret").count();
        assert_eq!(text.matches(REDACTED).count(), left_out, "{shown:#}");
    }

    #[test]
    fn keys_are_in_order_and_there_once() {
        let mut lists = vec![SHOWN.to_vec()];
        lists.extend(OBJECTS.map(|(_, keys)| keys.to_vec()));
        lists.push(OBJECTS.map(|(key, _)| key).to_vec());
        for list in lists {
            assert!(list.is_sorted_by(|one, next| one < next), "{list:?}");
        }
        let twice = OBJECTS.iter().find(|(key, _)| SHOWN.contains(key));
        assert_eq!(twice, None);
    }
}
