//! Delegates that answer with something else than the contract has for it: who it was is named, and what it printed.

use std::fs;

use rstest::rstest;
use underpass_tests::prelude::*;

use super::Witness;

/// What a delegate prints in the place of a result.
#[rstest]
#[case("", 6, "plugin \"witness\" succeeded, but printed no result")]
#[case("hello", 6, "it begins with \"hello\"")]
#[case(
    r#"{"cniVersion":"9.0.0"}"#,
    6,
    "result of plugin \"witness\": unsupported CNI result version \"9.0.0\""
)]
#[case(r#"{"cniVersion":"9.0.0"}"#, 6, "it must be one of 0.1.0, ")]
#[case(
    r#"{"ips":[{"address":"10.88.0.77"}]}"#,
    6,
    "key \"ips[0].address\" cannot be \"10.88.0.77\": it must be an address with a prefix length"
)]
#[case(
    r#"{"ips":[{"address":"10.88.0.77/24","gateway":"fd00:88::1"}]}"#,
    7,
    "invalid gateway fd00:88::1 of the address 10.88.0.77/24"
)]
#[case(
    r#"{"ips":[{"address":"fd00:88::77/64","gateway":"10.88.0.1"}]}"#,
    7,
    "invalid gateway 10.88.0.1 of the address fd00:88::77/64"
)]
#[case(
    r#"{"ips":[{"address":"10.88.0.77/24"},{"address":"10.88.0.77/24"}]}"#,
    7,
    "invalid address 10.88.0.77/24 from the IPAM: it gave it twice"
)]
#[case(
    r#"{"ips":[{"address":"fd00:88::77/64"},{"address":"fd00:88::77/64"}]}"#,
    7,
    "invalid address fd00:88::77/64 from the IPAM: it gave it twice"
)]
fn what_is_no_result_is_told(
    #[case] printed: &str,
    #[case] code: u64,
    #[case] words: &str,
) -> Result<()> {
    needs_root!();
    let (lab, before, witness) = Witness::beside()?;
    fs::write(witness.folder.path().join("result"), printed)?;
    let netns = lab.node.netns().sibling("a")?;
    let error = witness
        .call("ADD", &netns, &Witness::conf(&lab))
        .run(&lab.node)?
        .error()?;
    ensure!(
        error.code == code && error.to_string().contains(words),
        "expected code {code} and {words:?}: {error}"
    );
    ensure!(witness.calls()? == ["ADD a eth0", "DEL a eth0"]);
    before.expect_same(&lab.node)
}

/// What a delegate says when it fails, where that is no error of the contract.
#[rstest]
#[case(
    "exit 3",
    999,
    "plugin \"witness\" failed (exit status: 3): no error message"
)]
#[case("kill -SEGV $$", 999, "plugin \"witness\" failed (signal: 11")]
#[case(
    "echo \"$CNI_COMMAND: why\" >&2; exit 1",
    999,
    "plugin \"witness\" failed (exit status: 1): ADD: why"
)]
#[case(
    "echo '{\"code\":0,\"msg\":\"\"}'; exit 1",
    999,
    "plugin \"witness\" failed (exit status: 1), code 0: no message"
)]
#[case(
    "echo '{\"code\":117}'; exit 1",
    117,
    "plugin \"witness\" failed (exit status: 1), code 117: no message"
)]
#[case("yes x | head -c 100000; exit 1", 999, "could not be decoded")]
#[case("yes x | head -c 100000 >&2; echo the end >&2; exit 1", 999, "the end")]
fn a_failure_without_a_word_names_who_failed(
    #[case] script: &str,
    #[case] code: u64,
    #[case] words: &str,
) -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    let witness = Witness::new()?;
    let program = witness.folder.path().join(Witness::NAME);
    fs::write(&program, format!("#!/bin/sh\n{script}\n"))?;
    let netns = lab.node.netns().sibling("a")?;
    let error = witness
        .call("ADD", &netns, &Witness::conf(&lab))
        .run(&lab.node)?
        .error()?;
    ensure!(
        error.code == code && error.msg.contains(words),
        "expected code {code} and {words:?}: {error}"
    );
    ensure!(error.msg.len() < 600, "the rest is on stderr: {error}");
    Ok(())
}

/// Whoever asks STATUS is told that no ADD would work, not that something went wrong.
#[rstest]
#[case(None, "failed to find plugin \"witness\" in path", 999)]
#[case(Some("#!/nowhere/sh\n"), "cannot start the plugin ", 5)]
#[case(Some("no program"), "cannot start the plugin ", 5)]
fn a_delegate_that_cannot_be_run(
    #[case] text: Option<&str>,
    #[case] words: &str,
    #[case] code: u64,
) -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    let witness = Witness::new()?;
    let program = witness.folder.path().join(Witness::NAME);
    match text {
        Some(text) => fs::write(&program, text)?,
        None => fs::remove_file(&program)?,
    }
    let netns = lab.node.netns().sibling("a")?;
    for (verb, code) in [("ADD", code), ("DEL", code), ("STATUS", 50)] {
        let error = witness
            .call(verb, &netns, &Witness::conf(&lab))
            .run(&lab.node)?
            .error()?;
        ensure!(
            error.code == code
                && error.to_string().contains(words)
                && error.to_string().contains("install"),
            "{verb}: expected code {code} and {words:?}: {error}"
        );
    }
    Ok(())
}

/// A limit of processes is reached, of the runtime's user or its control group. What its call has made by then is undone.
#[test]
fn without_a_thread_nothing_is_asked() -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    let witness = Witness::new()?;
    let netns = lab.node.netns().sibling("a")?;
    let status = witness.call("STATUS", &netns, &Witness::conf(&lab));
    let error = status.run_without_threads(&lab.node)?.error()?;
    ensure!(error.code == 50, "{error}");
    for part in ["Resource temporarily unavailable", "pids.max"] {
        ensure!(error.to_string().contains(part), "{error}");
    }
    status.run(&lab.node)?.silence()
}
