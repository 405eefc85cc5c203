//! What is refused before anything is touched: the same replies by every name that we answer to.

use std::{
    fs::File,
    io::Read as _,
    process::{Command, Stdio},
};

use anyhow::{Context as _, Result, ensure};
use rstest::rstest;
use serde_json::Value;
use underpass_tests::runtime::Call;

use crate::plugins::{NAMES, run_here};

const CONF: &str = r#"{"cniVersion":"1.1.0","name":"lab","type":"any","ipam":{"type":"host-local","subnet":"10.88.0.0/24"}}"#;
const VERSIONS: [&str; 7] = [
    "0.1.0", "0.2.0", "0.3.0", "0.3.1", "0.4.0", "1.0.0", "1.1.0",
];

fn add() -> Call {
    Call::new("ADD")
        .env("CNI_PATH", "/nowhere")
        .attachment("c1", "/run/netns/nowhere", "eth0")
        .stdin(CONF.as_bytes())
}

/// Every name answers with this error, which is the reference's; its details begin with these, and go on with what to do.
fn refused(call: &Call, code: u64, msg: &str, details: &str) -> Result<()> {
    for name in NAMES {
        let installed = name.install()?;
        let error = run_here(&installed.path, call)?
            .error()
            .with_context(|| format!("as {name:?}"))?;
        ensure!(
            error.code == code && error.msg == msg,
            "expected code {code}: {msg}; {} answers {error}",
            name.name
        );
        ensure!(error.details.starts_with(details), "{error}");
        ensure!(!error.details.is_empty(), "nothing to do about {error}");
    }
    Ok(())
}

#[rstest]
#[case("ADD", &["CNI_NETNS", "CNI_IFNAME", "CNI_PATH"], "CNI_NETNS,CNI_IFNAME,CNI_PATH")]
#[case("ADD", &["CNI_CONTAINERID"], "CNI_CONTAINERID")]
#[case("DEL", &["CNI_CONTAINERID", "CNI_NETNS", "CNI_IFNAME", "CNI_PATH"], "CNI_CONTAINERID,CNI_IFNAME,CNI_PATH")]
#[case("CHECK", &["CNI_CONTAINERID", "CNI_NETNS", "CNI_IFNAME", "CNI_PATH"], "CNI_CONTAINERID,CNI_NETNS,CNI_IFNAME,CNI_PATH")]
#[case("GC", &["CNI_CONTAINERID", "CNI_NETNS", "CNI_IFNAME", "CNI_PATH"], "CNI_PATH")]
#[case("STATUS", &["CNI_CONTAINERID", "CNI_NETNS", "CNI_IFNAME", "CNI_PATH"], "CNI_PATH")]
fn missing_variables(
    #[case] verb: &str,
    #[case] without: &[&str],
    #[case] named: &str,
) -> Result<()> {
    let call = add().env("CNI_COMMAND", verb);
    // Empty and absent are the same.
    let absent = without
        .iter()
        .fold(call.clone(), |call, name| call.without(name));
    let empty = without.iter().fold(call, |call, name| call.env(name, ""));
    for call in [absent, empty] {
        refused(
            &call,
            4,
            &format!("required env variables [{named}] missing"),
            &format!("the caller has to set them for {verb}"),
        )?;
    }
    Ok(())
}

#[rstest]
#[case(
    "CNI_CONTAINERID",
    "some%$%id",
    "invalid characters in containerID",
    "some%$%id"
)]
#[case("CNI_CONTAINERID", "_id", "invalid characters in containerID", "_id")]
#[case(
    "CNI_IFNAME",
    "1234567890123456",
    "interface name is too long",
    "CNI_IFNAME is \"1234567890123456\": "
)]
#[case(
    "CNI_IFNAME",
    ".",
    "interface name is . or ..",
    "CNI_IFNAME is \".\": "
)]
#[case(
    "CNI_IFNAME",
    "..",
    "interface name is . or ..",
    "CNI_IFNAME is \"..\": "
)]
#[case(
    "CNI_IFNAME",
    "et h0",
    "interface name contains / or : or whitespace characters",
    "CNI_IFNAME is "
)]
#[case(
    "CNI_IFNAME",
    "a/b",
    "interface name contains / or : or whitespace characters",
    "CNI_IFNAME is "
)]
#[case(
    "CNI_IFNAME",
    "a:b",
    "interface name contains / or : or whitespace characters",
    "CNI_IFNAME is "
)]
fn invalid_variables(
    #[case] name: &str,
    #[case] value: &str,
    #[case] msg: &str,
    #[case] details: &str,
) -> Result<()> {
    // Told at once, before what is missing.
    refused(&add().env(name, value).without("CNI_PATH"), 4, msg, details)
}

#[rstest]
#[case("ADD", "{}", 7, "missing network name", "give the config a \"name\"")]
#[case("GC", r#"{"cniVersion":"1.1.0"}"#, 7, "missing network name", "")]
#[case(
    "STATUS",
    r#"{"cniVersion":"1.1.0","name":""}"#,
    7,
    "missing network name",
    ""
)]
#[case(
    "ADD",
    r#"{"name":"a b"}"#,
    7,
    "invalid characters found in network name",
    "a b"
)]
#[case(
    "DEL",
    r#"{"name":"../up"}"#,
    7,
    "invalid characters found in network name",
    "../up"
)]
#[case("ADD", r#"{"cniVersion":"99.9.9","name":"lab"}"#, 1, "incompatible CNI versions",
    r#"config is "99.9.9", plugin supports ["0.1.0" "0.2.0" "0.3.0" "0.3.1" "0.4.0" "1.0.0" "1.1.0"]"#)]
#[case(
    "DEL",
    r#"{"cniVersion":"1.1","name":"lab"}"#,
    1,
    "incompatible CNI versions",
    ""
)]
#[case(
    "CHECK",
    r#"{"cniVersion":"0.3.1","name":"lab"}"#,
    1,
    "config version does not allow CHECK",
    "CHECK came with 0.4.0: set cniVersion"
)]
#[case(
    "CHECK",
    r#"{"name":"lab"}"#,
    1,
    "config version does not allow CHECK",
    ""
)]
#[case(
    "GC",
    r#"{"cniVersion":"1.0.0","name":"lab"}"#,
    1,
    "config version does not allow GC",
    ""
)]
#[case(
    "STATUS",
    r#"{"cniVersion":"1.0.0","name":"lab"}"#,
    1,
    "config version does not allow STATUS",
    ""
)]
#[case(
    "NOPE",
    CONF,
    4,
    "unknown CNI_COMMAND: NOPE",
    "it must be one of ADD, DEL, CHECK"
)]
#[case("NOPE", "{}", 7, "missing network name", "")]
fn invalid_configs(
    #[case] verb: &str,
    #[case] conf: &str,
    #[case] code: u64,
    #[case] msg: &str,
    #[case] details: &str,
) -> Result<()> {
    let call = add().env("CNI_COMMAND", verb).stdin(conf.as_bytes());
    refused(&call, code, msg, details)
}

#[rstest]
#[case("", "nothing came on standard input")]
#[case(" \n", "nothing came on standard input")]
#[case("garbage", "it is no JSON: ")]
#[case("[]", "it must be an object")]
#[case(
    r#"{"name":7}"#,
    "key \"name\" cannot be 7: it must be a text in quotes"
)]
#[case(r#"{"cniVersion":"1.1.0","name":"lab""#, "it is no JSON: ")]
fn undecodable_configs(#[case] conf: &str, #[case] words: &str) -> Result<()> {
    for name in NAMES {
        let installed = name.install()?;
        let error = run_here(&installed.path, &add().stdin(conf.as_bytes()))?.error()?;
        ensure!(
            error.code == 6
                && error
                    .msg
                    .starts_with(&format!("error unmarshall network config: {words}")),
            "{}: {error}",
            name.name
        );
    }
    Ok(())
}

#[rstest]
#[case("CHECK", "banana")]
#[case("GC", "1.x")]
#[case("STATUS", "1.2.3.4")]
fn versions_that_are_none(#[case] verb: &str, #[case] version: &str) -> Result<()> {
    let conf = CONF.replace("1.1.0", version);
    for name in NAMES {
        let installed = name.install()?;
        let call = add().env("CNI_COMMAND", verb).stdin(conf.as_bytes());
        let error = run_here(&installed.path, &call)?.error()?;
        ensure!(error.code == 6, "{}: {error}", name.name);
    }
    Ok(())
}

#[test]
fn an_unreadable_input_is_an_io_error() -> Result<()> {
    for name in NAMES {
        let installed = name.install()?;
        let output = Command::new(&installed.path)
            .env_clear()
            .envs([
                ("CNI_COMMAND", "ADD"),
                ("CNI_CONTAINERID", "c1"),
                ("CNI_NETNS", "/run/netns/nowhere"),
                ("CNI_IFNAME", "eth0"),
                ("CNI_PATH", "/nowhere"),
            ])
            // A folder can be opened, and not read.
            .stdin(File::open("/")?)
            .output()?;
        let error: Value = serde_json::from_slice(&output.stdout)?;
        ensure!(error["code"] == 5, "{error}");
        let msg = error["msg"].as_str().unwrap_or_default();
        ensure!(msg.starts_with("error reading from stdin: "), "{error}");
    }
    Ok(())
}

#[test]
fn version_never_waits_for_its_input() -> Result<()> {
    for name in NAMES {
        let installed = name.install()?;
        let mut child = Command::new(&installed.path)
            .env_clear()
            .env("CNI_COMMAND", "VERSION")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()?;
        // Held open, with nothing in it.
        let open = child.stdin.take();
        let mut text = String::new();
        child
            .stdout
            .take()
            .context("a pipe")?
            .read_to_string(&mut text)?;
        let status = child.wait()?;
        drop(open);
        ensure!(status.success(), "{status}");
        ensure!(
            text.ends_with("}\n") && text.lines().count() == 1,
            "{text:?}"
        );
        let answer: Value = serde_json::from_str(&text)?;
        ensure!(answer["cniVersion"] == "1.1.0", "{answer}");
        ensure!(
            answer["supportedVersions"] == serde_json::json!(VERSIONS),
            "{answer}"
        );
    }
    Ok(())
}

#[test]
fn version_looks_at_nothing_else() -> Result<()> {
    let call = Call::new("VERSION")
        .attachment("%%%", "/nowhere", "a/b:c")
        .stdin(b"garbage");
    for name in NAMES {
        let installed = name.install()?;
        run_here(&installed.path, &call)?.result()?;
    }
    Ok(())
}

#[test]
fn without_a_verb_it_introduces_itself() -> Result<()> {
    for name in NAMES {
        let installed = name.install()?;
        let answer = run_here(&installed.path, &Call::new("").without("CNI_PATH"))?;
        ensure!(answer.success && answer.stdout.is_empty(), "{answer:?}");
        let lines: Vec<&str> = answer.stderr.lines().collect();
        ensure!(lines.len() == 2, "{lines:?}");
        ensure!(
            lines[0].starts_with(&format!("CNI {} plugin ", name.name)),
            "{lines:?}"
        );
        ensure!(
            lines[1] == format!("CNI protocol versions supported: {}", VERSIONS.join(", ")),
            "{lines:?}"
        );
    }
    Ok(())
}

/// With arguments, and nobody who calls it as a plugin, it is a command.
#[test]
fn without_a_verb_its_arguments_are_a_command_line() -> Result<()> {
    for (arguments, expected) in [
        (&["--help"][..], "Usage: underpass"),
        (&["--version"], env!("CARGO_PKG_VERSION")),
        (&["status", "--help"], "Usage: underpass status"),
    ] {
        let output = Command::new(underpass_tests::node::plugin())
            .args(arguments)
            .env_remove("CNI_COMMAND")
            .output()?;
        let said = String::from_utf8_lossy(&output.stdout).into_owned();
        ensure!(output.status.success(), "{arguments:?}: {output:?}");
        ensure!(said.contains(expected), "{arguments:?}: {said}");
    }
    Ok(())
}
