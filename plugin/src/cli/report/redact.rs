//! Which values of a network's config are shown: those of keys that the specification, the reference plugins or we have. In any
//! other there may be a secret.

use serde_json::{Map, Value};

/// In place of a value that is not shown.
const REDACTED: &str = "(left out)";

/// Keys whose values are objects, or lists of objects, of which each key is judged.
const NESTED: [&str; 3] = ["plugins", "ipam", "delegate"];

/// Keys whose values are shown.
const SHOWN: [&str; 63] = [
    "addresses",
    "antiSpoof",
    "backend",
    "bpfRoot",
    "bridge",
    "bypass",
    "capabilities",
    "cniVersion",
    "cniVersions",
    "conditionsV4",
    "conditionsV6",
    "conntrackLiberal",
    "dataDir",
    "device",
    "disableCheck",
    "disableGC",
    "dns",
    "egressBurst",
    "egressRate",
    "enabledad",
    "externalSetMarkChain",
    "firewallZone",
    "forceAddress",
    "gateway",
    "hairpinMode",
    "ingressBurst",
    "ingressPolicy",
    "ingressRate",
    "ipMasq",
    "ipMasqBackend",
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
    "ranges",
    "resolvConf",
    "routes",
    "shapedSubnets",
    "snat",
    "subnet",
    "sysctl",
    "tunnelPort",
    "type",
    "unshapedSubnets",
    "uplinks",
    "vlan",
    "vlanId",
    "vlanTrunk",
    "vrfname",
    "xdp",
];

/// Copies a network without the values that are not shown.
pub(super) fn network(document: &Map<String, Value>) -> Value {
    let entries = document.iter().map(|(key, value)| {
        let shown = if NESTED.contains(&key.as_str()) {
            nested(value)
        } else if SHOWN.contains(&key.as_str()) {
            value.clone()
        } else {
            Value::from(REDACTED)
        };
        (key.clone(), shown)
    });
    Value::Object(entries.collect())
}

fn nested(value: &Value) -> Value {
    match value {
        Value::Object(object) => network(object),
        Value::Array(list) => list.iter().map(nested).collect(),
        _ => Value::from(REDACTED),
    }
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
    fn keys_are_in_order_and_there_once() {
        assert!(SHOWN.is_sorted());
        let mut once = SHOWN.to_vec();
        once.dedup();
        assert_eq!(once, SHOWN);
    }
}
