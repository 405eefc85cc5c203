use proptest::prelude::*;
use serde_json::json;

use super::*;
use crate::error::Code;

fn conf(text: &str) -> NetConf {
    NetConf::parse(text.as_bytes()).expect("a valid config")
}

fn refusal(text: &str) -> (Code, String) {
    let error = NetConf::parse(text.as_bytes()).expect_err("an invalid config");
    (error.code, error.msg)
}

#[test]
fn the_document_is_judged_before_the_name_and_the_name_before_the_version() {
    assert_eq!(
        refusal("{}"),
        (Code::InvalidConfig, "missing network name".into())
    );
    assert_eq!(
        refusal("null"),
        (Code::InvalidConfig, "missing network name".into())
    );
    assert_eq!(
        refusal(r#"{"name":"a b","cniVersion":"99.9.9"}"#),
        (
            Code::InvalidConfig,
            "invalid characters found in network name".into()
        )
    );
    assert_eq!(
        refusal(r#"{"name":"a","cniVersion":"99.9.9"}"#),
        (
            Code::IncompatibleVersion,
            "incompatible CNI versions".into()
        )
    );
    for undecodable in ["garbage", "", "[]", r#"{"name":1}"#, r#"{"name":"a"} x"#] {
        let (code, msg) = refusal(undecodable);
        assert_eq!(code, Code::Decode);
        assert!(
            msg.starts_with("error unmarshall network config: "),
            "{msg}"
        );
    }
}

#[test]
fn no_version_is_the_first_version() {
    assert_eq!(conf(r#"{"name":"n"}"#).cni_version, Version::V0_1_0);
    assert_eq!(
        conf(r#"{"NAME":"n","cniversion":"0.4.0"}"#).cni_version,
        Version::V0_4_0
    );
}

#[test]
fn dns_replaces_only_if_it_sets_something() {
    let dns = |text: &str| {
        conf(&format!(r#"{{"name":"n","dns":{text}}}"#))
            .dns()
            .expect("decodes")
    };
    assert_eq!(dns("null"), None);
    assert_eq!(dns("{}"), None);
    assert_eq!(dns(r#"{"nameservers":null,"domain":""}"#), None);
    assert_eq!(dns(r#"{"search":[]}"#), Some(Dns::default()));
    assert_eq!(
        dns(r#"{"domain":"d"}"#),
        Some(Dns {
            domain: "d".into(),
            ..Dns::default()
        })
    );
}

#[test]
fn gc_knows_what_is_valid_only_from_a_key_that_is_there() {
    let valid = |text: &str| conf(&format!(r#"{{"name":"n"{text}}}"#)).valid_attachments();
    assert_eq!(valid("").expect_err("absent").code, Code::InvalidConfig);
    assert_eq!(
        valid(r#","cni.dev/valid-attachments":[]"#),
        Ok(Some(vec![]))
    );
    assert_eq!(valid(r#","cni.dev/valid-attachments":null"#), Ok(None));
    let one = Some(vec![AttachmentId {
        container_id: "c".into(),
        ifname: "e".into(),
    }]);
    assert_eq!(
        valid(r#","cni.dev/attachments":[{"containerID":"c","ifname":"e"}]"#),
        Ok(one.clone())
    );
    assert_eq!(
        valid(
            r#","cni.dev/attachments":[],"cni.dev/valid-attachments":[{"containerID":"c","ifname":"e"}]"#
        ),
        Ok(one)
    );
    for nameless in [
        r"null",
        r"{}",
        r#"{"containerID":"c"}"#,
        r#"{"ifname":"e"}"#,
        r#"{"container_id":"c","ifname":"e"}"#,
    ] {
        let entry = r#"{"containerID":"c","ifname":"e"}"#;
        let text = format!(r#","cni.dev/valid-attachments":[{entry},{nameless}]"#);
        let error = valid(&text).expect_err(nameless);
        assert_eq!(error.code, Code::InvalidConfig, "{nameless}");
        assert!(error.msg.contains("entry 1"), "{}", error.msg);
    }
    let error = valid(r#","cni.dev/attachments":[{"containerID":5}]"#).expect_err("wrong type");
    assert_eq!(error.code, Code::Decode);
    assert!(
        error
            .msg
            .contains(r#""cni.dev/attachments[0].containerID" cannot be 5"#),
        "{}",
        error.msg
    );
}

#[test]
fn every_part_is_decoded_on_its_own() {
    #[derive(Debug, Default, Deserialize, PartialEq)]
    #[serde(default)]
    struct Mac {
        mac: String,
    }
    let conf = conf(
        r#"{"name":"n","dns":7,"IPAM":{"type":"x"},"RuntimeConfig":{"MAC":"m"},"args":{"cni":{"mac":"a"}},"mac":"p"}"#,
    );
    assert_eq!(conf.ipam_type(), Ok(Some("x".into())));
    assert_eq!(conf.runtime(), Ok(Mac { mac: "m".into() }));
    assert_eq!(conf.args_cni(), Ok(Mac { mac: "a".into() }));
    assert_eq!(conf.plugin(), Ok(Mac { mac: "p".into() }));
    let error = conf.dns().expect_err("wrong type");
    assert!(
        error
            .msg
            .starts_with(r#"failed to load netconf: key "dns""#),
        "{}",
        error.msg
    );
}

/// Any JSON, most of it made of the keys and values that mean something.
fn document() -> impl Strategy<Value = Value> {
    let key = prop::sample::select(vec![
        "name",
        "cniVersion",
        "CNIVERSION",
        "ipam",
        "type",
        "dns",
        "nameservers",
        "search",
        "prevResult",
        "ips",
        "address",
        "routes",
        "dst",
        "gw",
        "interfaces",
        "mtu",
        "args",
        "cni",
        "runtimeConfig",
        "ip4",
        "ip",
        "cni.dev/attachments",
        "containerID",
        "ifname",
    ]);
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        prop::sample::select(vec![
            "",
            "net",
            "0.2.0",
            "0.4.0",
            "1.1.0",
            "10.0.0.1/24",
            "::ffff:1.2.3.4/120",
            "::"
        ])
        .prop_map(Value::from),
    ];
    leaf.prop_recursive(5, 60, 6, move |inner| {
        let map =
            prop::collection::btree_map(key.clone().prop_map(str::to_owned), inner.clone(), 0..6);
        prop_oneof![
            prop::collection::vec(inner, 0..4).prop_map(Value::from),
            map.prop_map(|map| Value::Object(map.into_iter().collect())),
        ]
    })
}

proptest! {
    #[test]
    fn no_document_is_too_strange(inner in document(), version in prop::sample::select(Version::ALL.to_vec())) {
        let mut document = json!({"ipam": inner, "dns": inner, "prevResult": inner, "args": inner});
        if let (Value::Object(strange), Some(document)) = (inner, document.as_object_mut()) {
            document.extend(strange);
        }
        document["name"] = "net".into();
        document["cniVersion"] = version.as_str().into();
        let Ok(conf) = NetConf::parse(document.to_string().as_bytes()) else { return Ok(()) };
        // Decoded or refused; what is refused says so with the code for it.
        let refusals = [
            conf.dns().err(), conf.ipam_type().err(), conf.prev_result().err(), conf.args_cni::<AttachmentId>().err(),
        ];
        for error in refusals.into_iter().flatten() {
            prop_assert_eq!(error.code, Code::Decode);
            prop_assert!(error.msg.starts_with("failed to load netconf: ") || error.msg.starts_with("could not parse"));
        }
        if let Ok(Some(previous)) = conf.prev_result() {
            prop_assert!(previous.to_json(conf.cni_version).is_ok() || previous.ips.is_empty());
        }
    }
}
