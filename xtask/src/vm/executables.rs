//! What runs in guests: the plugins, the tests, and this very program. Each guest gets copies, so that a build meanwhile changes nothing.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::{env, io::BufRead as _, io::BufReader};

use anyhow::{Context as _, bail};
use serde_json::Value;

use crate::build::EXECUTABLES;
use crate::setup;
use crate::workspace::Workspace;

/// The files of tests that need a kernel, the quicker one first.
pub(super) const TESTS: [&str; 2] = ["bpf", "netns"];

/// The plugin of others that tests run, where set-up has one.
pub(super) const FLANNEL: &str = "flannel";

/// Executables by the names they have in a guest.
pub(super) struct Executables(Vec<(String, PathBuf)>);

impl Executables {
    /// Builds the tests; the plugins are built already.
    pub(super) fn build(workspace: &Workspace) -> anyhow::Result<Self> {
        let mut found = vec![(
            "xtask".to_owned(),
            env::current_exe().context("this program does not know where it is")?,
        )];
        for name in EXECUTABLES {
            found.push((name.to_owned(), workspace.released(name)));
        }
        if let Some(flannel) = setup::flannel(workspace) {
            found.push((FLANNEL.to_owned(), flannel));
        }
        let mut cargo = workspace.cargo();
        // With the whole workspace, dependencies have the features that they have for `cargo xtask test`:
        // nothing is built twice.
        cargo.args(["test", "--locked", "--no-run", "--workspace"]);
        cargo.args(["--message-format", "json-render-diagnostics"]);
        for name in TESTS {
            cargo.args(["--test", name]);
        }
        let mut child = cargo
            .stdout(Stdio::piped())
            .spawn()
            .context("cannot start cargo")?;
        let messages = child.stdout.take().context("cargo has no output")?;
        for line in BufReader::new(messages).lines() {
            let line = line.context("cannot read what cargo says")?;
            found.extend(test_executable(&line));
        }
        let status = child.wait().context("cannot wait for cargo")?;
        if !status.success() {
            bail!("the tests do not build ({status})");
        }
        for name in TESTS {
            if !found.iter().any(|(known, _)| known == name) {
                bail!("cargo built no executable for the tests of {name}");
            }
        }
        Ok(Self(found))
    }

    /// Copies them below `folder`; returns the folder of the copies.
    pub(super) fn copy_to(&self, folder: &Path) -> anyhow::Result<PathBuf> {
        let bin = folder.join(BIN);
        fs::create_dir_all(&bin).with_context(|| format!("cannot create {}", bin.display()))?;
        for (name, path) in &self.0 {
            fs::copy(path, bin.join(name))
                .with_context(|| format!("cannot copy {}", path.display()))?;
        }
        Ok(bin)
    }

    /// Whether the copies in `folder` are copies of these. This program itself decides nothing about a result.
    pub(super) fn are_those_in(&self, folder: &Path) -> bool {
        self.0
            .iter()
            .filter(|(name, _)| name != "xtask")
            .all(
                |(name, path)| match (fs::read(path), fs::read(folder.join(BIN).join(name))) {
                    (Ok(here), Ok(there)) => here == there,
                    _ => false,
                },
            )
    }
}

/// The folder of the copies, in that of the guest.
pub(super) const BIN: &str = "bin";

/// The executable that a message of cargo is about, if it is one of tests.
fn test_executable(message: &str) -> Option<(String, PathBuf)> {
    let message: Value = serde_json::from_str(message).ok()?;
    let name = message["target"]["name"].as_str()?;
    let path = message["executable"].as_str()?;
    TESTS
        .contains(&name)
        .then(|| (name.to_owned(), PathBuf::from(path)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cargo_names_the_executables() {
        let message =
            r#"{"reason":"compiler-artifact","target":{"name":"netns"},"executable":"/t/netns-1"}"#;
        assert_eq!(
            test_executable(message),
            Some(("netns".to_owned(), PathBuf::from("/t/netns-1")))
        );
        let library =
            r#"{"reason":"compiler-artifact","target":{"name":"netns"},"executable":null}"#;
        assert_eq!(test_executable(library), None);
        assert_eq!(test_executable("not JSON"), None);
    }
}
