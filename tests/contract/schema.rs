//! Results against the schemas of their versions.

use anyhow::{Context as _, Result, ensure};
use serde_json::Value;

/// Fails if `result` is not a result of exactly that version.
pub(crate) fn validate(version: &str, result: &Value) -> Result<()> {
    let text = match version {
        "0.1.0" | "0.2.0" => include_str!("schema/0.1.0.json"),
        "0.3.0" | "0.3.1" | "0.4.0" => include_str!("schema/0.3.0.json"),
        _ => include_str!("schema/1.0.0.json"),
    };
    ensure!(
        result["cniVersion"] == version,
        "expected a result of version {version}: {result}"
    );
    let schema: Value = serde_json::from_str(text).context("read a schema")?;
    let validator = jsonschema::validator_for(&schema).context("compile a schema")?;
    let errors: Vec<String> = validator
        .iter_errors(result)
        .map(|error| format!("{}: {error}", error.instance_path()))
        .collect();
    ensure!(
        errors.is_empty(),
        "no result of version {version}: {errors:#?} in {result:#}"
    );
    Ok(())
}

#[test]
fn a_schema_tells_results_from_anything_else() {
    let result = |text: &str| serde_json::from_str::<Value>(text).expect("JSON");
    for (version, text) in [
        ("1.1.0", r#"{"cniVersion":"1.1.0"}"#),
        ("0.4.0", r#"{"cniVersion":"0.4.0","dns":{}}"#),
        (
            "0.2.0",
            r#"{"cniVersion":"0.2.0","dns":{},"ip4":{"ip":"10.0.0.2/24"}}"#,
        ),
    ] {
        validate(version, &result(text)).expect(text);
    }
    for (version, text) in [
        ("1.1.0", r#"{"cniVersion":"1.0.0"}"#),
        (
            "1.1.0",
            r#"{"cniVersion":"1.1.0","ips":[{"version":"4","address":"10.0.0.2/24"}]}"#,
        ),
        (
            "1.1.0",
            r#"{"cniVersion":"1.1.0","interfaces":[{"name":"eth0","mac":"AA:00:00:00:00:00"}]}"#,
        ),
        ("0.4.0", r#"{"cniVersion":"0.4.0"}"#),
        (
            "0.4.0",
            r#"{"cniVersion":"0.4.0","dns":{},"ips":[{"address":"10.0.0.2/24"}]}"#,
        ),
        (
            "0.3.1",
            r#"{"cniVersion":"0.3.1","dns":{},"interfaces":[{"name":"eth0","mtu":1500}]}"#,
        ),
        ("0.2.0", r#"{"cniVersion":"0.2.0","dns":{}}"#),
        (
            "0.1.0",
            r#"{"cniVersion":"0.1.0","dns":{},"interfaces":[],"ip4":{"ip":"10.0.0.2/24"}}"#,
        ),
    ] {
        assert!(validate(version, &result(text)).is_err(), "{text}");
    }
}
