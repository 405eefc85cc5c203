//! Pins that can't be used: those of another node, and those that somebody has broken. The doctor says why, and so does `status`.

use std::{fs, path::Path, process::Command};

use rstest::rstest;
use underpass_abi::map;
use underpass_tests::{counter::map_pin, node::plugin, prelude::*};

use super::{Said, ask, ask_as, lab};

/// What is found where the pins can't be used.
const UNUSABLE: &str = "pins-unusable";

/// Fails unless these are the findings, the first one with these words, and `status` fails on that node by the same reason.
fn only(said: &Said, ids: &[&str], words: &[&str], node: &Node, bpf_root: &Path) -> Result<()> {
    said.expect(ids)?;
    said.expect_words(words)?;
    ensure!(said.first("severity") == "error", "{said:#?}");
    let what = said.first("what");
    let (_, reason) = what
        .split_once("every ADD fails: ")
        .with_context(|| format!("no reason in {what}"))?;
    let root = bpf_root.display().to_string();
    let error = node.underpass_error(&["--bpf-root", &root, "status"])?;
    ensure!(error.contains(reason), "{reason}: {error}");
    Ok(())
}

/// Two nodes see one bpffs, as nodes in containers do that were given the host's.
#[test]
fn pins_of_another_node_are_found() -> Result<()> {
    needs_root!();
    let lab = lab()?;
    let _pod = lab.pod("a")?;
    let other = lab.node.beside()?;
    let root = lab.node.bpf_root();
    let said = ask_as(other.netns(), root, Command::new(plugin()))?;
    // It has no uplinks either.
    let ids = [UNUSABLE, "no-uplink"];
    only(&said, &ids, &["another network namespace"], &other, root)?;
    ask(&lab)?.expect(&[])
}

/// A map's pin is not there any more, or has the number of a layout that is yet to come.
#[rstest]
#[case::gone("aside", &[map::OWNERS])]
#[case::newer("OWNERS-99-8", &["other entries in OWNERS", "underpass upgrade"])]
fn pins_that_are_broken_are_found(#[case] name: &str, #[case] words: &[&str]) -> Result<()> {
    needs_root!();
    let lab = lab()?;
    let _pod = lab.pod("a")?;
    let node = &lab.node;
    let pin = map_pin(node, map::OWNERS);
    let moved = pin.with_file_name(name);
    node.netns().run(|| fs::rename(&pin, &moved))?;
    only(&ask(&lab)?, &[UNUSABLE], words, node, node.bpf_root())?;
    node.netns().run(|| fs::rename(&moved, &pin))?;
    ask(&lab)?.expect(&[])
}
