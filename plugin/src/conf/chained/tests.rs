use serde_json::json;
use underpass_cni::Code;

use super::*;

fn network(keys: &Value, name: Name) -> Result<Chained, Error> {
    let mut document = json!({ "cniVersion": "1.1.0", "name": "n1", "type": "portmap" });
    for (key, value) in keys.as_object().expect("keys") {
        document[key] = value.clone();
    }
    Chained::of_network(&NetConf::parse(document.to_string().as_bytes())?, name)
}

#[test]
fn configs_of_the_reference_plugin_are_accepted() {
    for keys in [
        json!({}),
        json!({ "snat": true, "masqAll": false, "markMasqBit": 13, "backend": "iptables" }),
        json!({ "snat": false, "backend": "nftables", "conditionsV4": [], "externalSetMarkChain": null }),
    ] {
        for name in [Name::Portmap, Name::Underpass] {
            assert!(network(&keys, name).is_ok(), "{keys}");
        }
    }
    let conf = network(
        &json!({ "bpfRoot": "/run/b", "uplinks": ["eth*"] }),
        Name::Portmap,
    );
    let conf = conf.expect("keys of ours");
    assert_eq!(conf.bpf_root, PathBuf::from("/run/b"));
    assert_eq!(conf.uplinks, Some(vec![Glob::new("eth*".to_owned())]));
}

#[test]
fn what_only_netfilter_can_do_is_refused_by_key() {
    for (keys, code, word) in [
        (
            json!({ "conditionsV4": ["-s", "10.0.0.0/8"] }),
            2,
            "conditionsV4",
        ),
        (json!({ "conditionsV6": ["!", "x"] }), 2, "conditionsV6"),
        (
            json!({ "externalSetMarkChain": "MARK" }),
            2,
            "externalSetMarkChain",
        ),
        (json!({ "masqAll": true }), 2, "masqAll"),
        (
            json!({ "markMasqBit": 32 }),
            7,
            "MasqMarkBit must be between 0 and 31",
        ),
        (
            json!({ "backend": "ipfw" }),
            7,
            "unrecognized backend \"ipfw\"",
        ),
        (json!({ "conditionsV4": "-s" }), 6, "conditionsV4"),
    ] {
        let error = network(&keys, Name::Portmap).expect_err("not to be obeyed");
        assert_eq!(error.code, Code::from_number(code), "{error}");
        assert!(error.to_string().contains(word), "{error}");
    }
}

#[test]
fn what_the_interface_would_need_is_refused_unless_the_name_knows_no_such_key() {
    for (keys, word) in [
        (json!({ "ipMasq": true }), "ipMasq"),
        (json!({ "mtu": 1400 }), "mtu"),
        (json!({ "ipam": { "type": "host-local" } }), "ipam.type"),
        (
            json!({ "egressRate": 1000, "egressBurst": 1000 }),
            "key \"egressRate\", value 1000:",
        ),
    ] {
        let error = network(&keys, Name::Underpass).expect_err("too late");
        assert_eq!(error.code, Code::UnsupportedField, "{error}");
        assert!(error.to_string().contains(word), "{error}");
        assert!(network(&keys, Name::Portmap).is_ok());
    }
    let nothing = json!({ "ipMasq": false, "mtu": 0, "ipam": {}, "egressRate": 0 });
    assert!(network(&nothing, Name::Underpass).is_ok());
}
