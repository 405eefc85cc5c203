//! What no compiler looks at: paths of one developer's machine in public files, and files that grow too long.

use std::fs;
use std::path::Path;
use std::process::Command;

use anyhow::{Context as _, bail};

use crate::report;

/// Lines from which on a source file is better split.
const LONG: usize = 450;

/// Folders that every machine has: a workspace just below one gives nothing away.
const SHARED: [&str; 9] = [
    "/", "/home", "/root", "/tmp", "/var/tmp", "/opt", "/src", "/usr/src", "/mnt",
];

/// Looks at every file that is or could be committed.
pub(super) fn check(root: &Path) -> anyhow::Result<()> {
    let private = private_folders(root);
    let mut found = Vec::new();
    for name in public_files(root)? {
        // Not text, or deleted but not yet committed.
        let Ok(text) = fs::read_to_string(root.join(&name)) else {
            continue;
        };
        for (number, line) in (1..).zip(text.lines()) {
            if let Some(folder) = private.iter().find(|folder| mentions(line, folder)) {
                found.push(format!("{name}:{number} names {folder}"));
            }
        }
        let lines = text.lines().count();
        if lines > LONG
            && Path::new(&name)
                .extension()
                .is_some_and(|extension| extension == "rs")
        {
            report::warn(&format!(
                "{name} has {lines} lines: split it by what its parts decide"
            ));
        }
    }
    if !found.is_empty() {
        bail!(
            "public files name folders of this machine, write them relative to the workspace: {}",
            found.join(", ")
        );
    }
    Ok(())
}

/// Tracked files, and new ones that git does not ignore.
fn public_files(root: &Path) -> anyhow::Result<Vec<String>> {
    let output = Command::new("git")
        .arg("-C")
        .arg(root)
        .args([
            "ls-files",
            "-z",
            "--cached",
            "--others",
            "--exclude-standard",
        ])
        .output()
        .context("cannot start git: install it")?;
    if !output.status.success() {
        bail!(
            "git cannot list the files of {}: lint a clone of the repository",
            root.display()
        );
    }
    let names =
        String::from_utf8(output.stdout).context("a file's name is not UTF-8: rename it")?;
    Ok(names.split_terminator('\0').map(str::to_owned).collect())
}

/// The workspace, and the folder around it unless that is a common one.
fn private_folders(root: &Path) -> Vec<String> {
    let around = root
        .parent()
        .filter(|folder| !SHARED.iter().any(|shared| Path::new(shared) == *folder));
    [Some(root), around]
        .into_iter()
        .flatten()
        .map(|folder| format!("{}/", folder.display()))
        .collect()
}

/// Whether the text holds the folder as an absolute path, not as the end of another one.
fn mentions(text: &str, folder: &str) -> bool {
    text.match_indices(folder).any(|(at, _)| {
        text[..at]
            .chars()
            .next_back()
            .is_none_or(|before| !before.is_alphanumeric() && !"._-}*~".contains(before))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_absolute_path_is_told_from_the_end_of_another() {
        assert!(mentions("see /build/notes.md", "/build/"));
        assert!(mentions("/build/notes.md", "/build/"));
        assert!(mentions("`/build/x`", "/build/"));
        assert!(!mentions("see target/build/x", "/build/"));
        assert!(!mentions("${root}/build/x", "/build/"));
        assert!(!mentions("/builder/x", "/build/"));
    }

    #[test]
    fn the_folder_around_the_workspace_is_private_unless_common() {
        assert_eq!(
            private_folders(Path::new("/projects/mine")),
            ["/projects/mine/", "/projects/"]
        );
        assert_eq!(
            private_folders(Path::new("/home/underpass")),
            ["/home/underpass/"]
        );
        assert_eq!(
            private_folders(Path::new("/tmp/x/underpass")),
            ["/tmp/x/underpass/", "/tmp/x/"]
        );
    }

    #[test]
    fn a_file_that_names_the_workspace_is_found() -> anyhow::Result<()> {
        let root = tempfile::tempdir()?;
        let git = |arguments: &[&str]| {
            Command::new("git")
                .arg("-C")
                .arg(root.path())
                .args(arguments)
                .status()
        };
        assert!(git(&["init", "--quiet"])?.success());
        fs::write(root.path().join("clean.md"), "see docs/here.md\n")?;
        check(root.path())?;
        fs::write(
            root.path().join("leak.md"),
            format!("one\nsee {}/docs\n", root.path().display()),
        )?;
        let error = check(root.path()).expect_err("leak.md names the workspace");
        assert!(error.to_string().contains("leak.md:2 names"), "{error}");
        Ok(())
    }
}
