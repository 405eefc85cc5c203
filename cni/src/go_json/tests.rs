use std::collections::BTreeMap;

use serde_json::json;

use super::*;

#[derive(Debug, Default, Deserialize, PartialEq)]
#[serde(default, rename_all = "camelCase")]
struct Outer {
    mtu: u16,
    ip_masq: bool,
    name: String,
    uplinks: Vec<String>,
    inner: Option<Inner>,
    nested: Inner,
    free: BTreeMap<String, Value>,
    mode: Mode,
    signed: i64,
    unsigned: Option<u64>,
}

#[derive(Debug, Default, Deserialize, PartialEq)]
#[serde(default)]
struct Inner {
    list: Vec<Vec<i32>>,
}

#[derive(Debug, Default, Deserialize, PartialEq)]
#[serde(rename_all = "lowercase")]
enum Mode {
    #[default]
    Learned,
    Off,
}

fn decode(value: &Value) -> Result<Outer, String> {
    from_value(value).map_err(|error| error.to_string())
}

#[test]
fn keys_match_in_any_case_and_an_exact_one_wins() {
    let outer = decode(&json!({"MTU": 1, "IPMASQ": true, "Name": "x", "name": "y", "mode": "off"}))
        .expect("decodes");
    assert_eq!(
        outer,
        Outer {
            mtu: 1,
            ip_masq: true,
            name: "y".into(),
            mode: Mode::Off,
            ..Outer::default()
        }
    );
}

#[test]
fn null_is_the_default_everywhere_and_unknown_keys_are_ignored() {
    let nulls = json!({"mtu": null, "ipMasq": null, "name": null, "uplinks": null, "inner": null, "nested": null,
        "free": null, "mode": null, "capabilities": {"x": true}});
    assert_eq!(decode(&nulls), Ok(Outer::default()));
    assert_eq!(decode(&Value::Null), Ok(Outer::default()));
    let outer = decode(&json!({"uplinks": [null], "nested": {"list": [null, [null, 3]]}}))
        .expect("decodes");
    assert_eq!(outer.uplinks, [""]);
    assert_eq!(outer.nested.list, [vec![], vec![0, 3]]);
}

#[test]
fn free_form_objects_keep_their_keys() {
    let outer = decode(&json!({"free": {"A": null, "a": 1}})).expect("decodes");
    assert_eq!(
        outer.free,
        BTreeMap::from([("A".into(), Value::Null), ("a".into(), json!(1))])
    );
}

#[test]
fn a_wrong_type_names_key_and_value() {
    let cases = [
        (
            json!({"mtu": "1500"}),
            r#"key "mtu" cannot be "1500": it must be a whole number from 0 to 65535"#,
        ),
        (
            json!({"mtu": 70000}),
            r#"key "mtu" cannot be 70000: it must be a whole number from 0 to 65535"#,
        ),
        (
            json!({"mtu": 1.5}),
            r#"key "mtu" cannot be 1.5: it must be a whole number from 0 to 65535"#,
        ),
        (
            json!({"ipmasq": "true"}),
            r#"key "ipMasq" cannot be "true": it must be true or false"#,
        ),
        (
            json!({"inner": {"LIST": [[], [1, "x"]]}}),
            r#"key "inner.list[1][1]" cannot be "x": it must be a whole number from -2147483648 to 2147483647"#,
        ),
        (
            json!({"nested": []}),
            r#"key "nested" cannot be []: it must be an object"#,
        ),
        (
            json!({"uplinks": "eth0"}),
            r#"key "uplinks" cannot be "eth0": it must be a list"#,
        ),
        (
            json!({"name": 7}),
            r#"key "name" cannot be 7: it must be a text in quotes"#,
        ),
        (
            json!({"free": []}),
            r#"key "free" cannot be []: it must be an object"#,
        ),
        (
            json!({"signed": "1M"}),
            r#"key "signed" cannot be "1M": it must be a whole number"#,
        ),
        (
            json!({"unsigned": -1}),
            r#"key "unsigned" cannot be -1: it must be a whole number, and not below zero"#,
        ),
        (
            json!({"mode": "fast"}),
            r#"key "mode" cannot be "fast": it must be "learned" or "off""#,
        ),
        // Not by its number either, which serde would accept.
        (
            json!({"mode": 1}),
            r#"key "mode" cannot be 1: it must be "learned" or "off""#,
        ),
        (
            json!({"mode": 2}),
            r#"key "mode" cannot be 2: it must be "learned" or "off""#,
        ),
        (
            json!({"mode": false}),
            r#"key "mode" cannot be false: it must be "learned" or "off""#,
        ),
        (
            json!({"mode": ["off"]}),
            r#"key "mode" cannot be ["off"]: it must be "learned" or "off""#,
        ),
        (
            json!({"mode": {"off": null}}),
            r#"key "mode" cannot be {"off":null}: it must be "learned" or "off""#,
        ),
    ];
    for (document, message) in cases {
        assert_eq!(decode(&document), Err(message.to_owned()));
    }
}

#[test]
fn long_values_are_cut() {
    let message = decode(&json!({"mtu": "x".repeat(500)})).expect_err("wrong type");
    assert!(
        message.starts_with("key \"mtu\" cannot be \"xxx"),
        "{message}"
    );
    assert!(message.contains("xxx...: it must be"), "{message}");
}
