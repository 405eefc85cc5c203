//! Keys of our entry in the conflist that an administrator asks for.

use rstest::rstest;
use underpass_tests::prelude::*;

use super::fixture::{Machine, ranges};

#[test]
fn they_are_in_the_entry_as_long_as_they_are_asked_for() -> Result<()> {
    needs_root!();
    let machine = Machine::new()?;
    let config = ["--config", r#"{"bypass": "off", "ipMasq": false}"#];
    machine.install(&Family::BOTH, &config)?;
    let ours = || -> Result<serde_json::Value> {
        Ok(machine.conflist()?.context("a conflist")?["plugins"][0].clone())
    };
    ensure!(ours()?["bypass"] == "off" && ours()?["ipMasq"] == false);
    let before = machine.files()?;
    machine.install(&Family::BOTH, &config)?;
    ensure!(machine.files()? == before, "the second one wrote something");
    machine.pod("a")?.del()?;
    machine.install(&Family::BOTH, &["--no-self-test"])?;
    ensure!(ours()?.get("bypass").is_none() && ours()?["ipMasq"] == true);
    Ok(())
}

#[rstest]
#[case::decided(r#"{"ipam": {}}"#, "\"ipam\" can't be given: --range says it")]
#[case::misspelt(r#"{"bypas": "off"}"#, "no key \"bypas\"")]
#[case::refused(r#"{"bypass": "sometimes"}"#, "bypass")]
#[case::no_object("[1]", "object")]
#[case::no_json("bypass=off", "no JSON")]
fn one_that_makes_no_sense_changes_nothing(#[case] config: &str, #[case] said: &str) -> Result<()> {
    needs_root!();
    let machine = Machine::new()?;
    let arguments = [&ranges(&Family::BOTH)[..], &["--config", config]].concat();
    let error = machine.error("install", &arguments)?;
    ensure!(error.contains(said), "{error}");
    ensure!(machine.files()?.is_empty(), "{:?}", machine.files()?);
    Ok(())
}
