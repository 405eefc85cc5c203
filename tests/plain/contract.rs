//! The environment, standard input and versions, as the protocol has them.

use anyhow::{Context as _, Result, ensure};
use rstest::rstest;
use underpass_tests::runtime::{Call, CniError};

const CONF: &str = r#"{"cniVersion":"1.1.0","name":"lab","type":"underpass","ipam":{"type":"host-local","subnet":"10.88.0.0/24"}}"#;

fn add() -> Call {
    Call::new("ADD")
        .attachment("c1", "/run/netns/nowhere", "eth0")
        .stdin(CONF.as_bytes())
}

fn expect(call: &Call, code: u64, msg: &str) -> Result<CniError> {
    let error = call.run_here()?.error()?;
    ensure!(error.code == code, "expected code {code}: {error}");
    ensure!(error.msg.contains(msg), "expected {msg:?}: {error}");
    Ok(error)
}

#[test]
fn version_needs_no_input() -> Result<()> {
    let reply = Call::new("VERSION")
        .without("CNI_PATH")
        .run_here()?
        .result()?;
    ensure!(reply["cniVersion"] == "1.1.0", "{reply}");
    let supported: Vec<_> = reply["supportedVersions"]
        .as_array()
        .context("supportedVersions")?
        .iter()
        .filter_map(|version| version.as_str())
        .collect();
    ensure!(
        supported
            == [
                "0.1.0", "0.2.0", "0.3.0", "0.3.1", "0.4.0", "1.0.0", "1.1.0"
            ],
        "{supported:?}"
    );
    Ok(())
}

#[test]
fn all_missing_variables_are_named_at_once() -> Result<()> {
    let call = add()
        .without("CNI_NETNS")
        .without("CNI_IFNAME")
        .without("CNI_PATH");
    expect(
        &call,
        4,
        "required env variables [CNI_NETNS,CNI_IFNAME,CNI_PATH] missing",
    )?;
    Ok(())
}

#[rstest]
#[case("some%$%id", "invalid characters in containerID")]
#[case(".leading", "invalid characters in containerID")]
fn a_container_id_has_plain_letters(#[case] id: &str, #[case] msg: &str) -> Result<()> {
    let error = expect(&add().env("CNI_CONTAINERID", id), 4, msg)?;
    ensure!(error.details.starts_with(id), "{error}");
    Ok(())
}

#[rstest]
#[case("1234567890123456", "interface name is too long")]
#[case("..", "interface name is . or ..")]
#[case("a/b", "interface name contains / or : or whitespace characters")]
#[case("a:b", "interface name contains / or : or whitespace characters")]
#[case("et h0", "interface name contains / or : or whitespace characters")]
fn an_interface_name_is_one_for_the_kernel(#[case] name: &str, #[case] msg: &str) -> Result<()> {
    expect(&add().env("CNI_IFNAME", name), 4, msg)?;
    Ok(())
}

#[rstest]
#[case("{}", 7, "missing network name")]
#[case(r#"{"name":"a b"}"#, 7, "invalid characters found in network name")]
#[case("garbage", 6, "error unmarshall network config")]
#[case("", 6, "error unmarshall network config")]
#[case(
    r#"{"cniVersion":"99.9.9","name":"lab"}"#,
    1,
    "incompatible CNI versions"
)]
fn a_configuration_is_checked_before_anything_is_done(
    #[case] conf: &str,
    #[case] code: u64,
    #[case] msg: &str,
) -> Result<()> {
    expect(&add().stdin(conf.as_bytes()), code, msg)?;
    Ok(())
}

#[rstest]
#[case("CHECK", "0.3.1", "config version does not allow CHECK")]
#[case("GC", "1.0.0", "config version does not allow GC")]
#[case("STATUS", "1.0.0", "config version does not allow STATUS")]
fn old_configurations_lack_new_verbs(
    #[case] verb: &str,
    #[case] version: &str,
    #[case] msg: &str,
) -> Result<()> {
    let conf = CONF.replace("1.1.0", version);
    let call = add().env("CNI_COMMAND", verb).stdin(conf.as_bytes());
    expect(&call, 1, msg)?;
    Ok(())
}

#[test]
fn an_unknown_verb_is_named() -> Result<()> {
    expect(
        &add().env("CNI_COMMAND", "NOPE"),
        4,
        "unknown CNI_COMMAND: NOPE",
    )?;
    Ok(())
}

#[test]
fn an_error_is_one_document_with_a_version() -> Result<()> {
    let reply = add().stdin(b"garbage").run_here()?;
    let error = reply.json()?;
    ensure!(error["cniVersion"].is_string(), "{error}");
    ensure!(error["code"].is_u64(), "{error}");
    ensure!(reply.status.code() == Some(1), "{}", reply.status);
    Ok(())
}
