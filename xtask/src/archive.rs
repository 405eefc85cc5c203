//! Debian's archive, whichever suites of it, read by an apt with a configuration of its own: the machine's sources and
//! package lists stay as they are, and nothing is ever installed from here.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context as _, bail};

use crate::process;

/// Suites by the label of the repository that has them.
pub(crate) type Suites = [(&'static str, &'static [&'static str])];

/// The archive as it was when opened.
pub(crate) struct Archive {
    folder: PathBuf,
    architecture: String,
}

impl Archive {
    /// Reads the index of these suites, for machines of that kind. The archive's address is the one that this machine's own apt
    /// uses.
    pub(crate) fn open(folder: &Path, suites: &Suites, architecture: &str) -> anyhow::Result<Self> {
        Self::read(folder, suites, architecture, &["deb"])
    }

    /// As [`Self::open`], with what the packages were built from.
    pub(crate) fn with_sources(
        folder: &Path,
        suites: &Suites,
        architecture: &str,
    ) -> anyhow::Result<Self> {
        Self::read(folder, suites, architecture, &["deb", "deb-src"])
    }

    fn read(
        folder: &Path,
        suites: &Suites,
        architecture: &str,
        kinds: &[&str],
    ) -> anyhow::Result<Self> {
        let archive = Self {
            folder: folder.to_path_buf(),
            architecture: architecture.to_owned(),
        };
        for part in ["state/lists/partial", "cache/archives/partial", "parts"] {
            fs::create_dir_all(folder.join(part))
                .with_context(|| format!("cannot create {}/{part}", folder.display()))?;
        }
        let sources = sources(&repositories()?, suites, architecture, kinds)?;
        fs::write(folder.join("sources.list"), sources)
            .with_context(|| format!("cannot write {}/sources.list", folder.display()))?;
        process::run(archive.apt("apt-get").args(["-qq", "update"]))
            .context("the archive's index cannot be read")?;
        Ok(archive)
    }

    /// The versions of a package, newest first.
    pub(crate) fn versions(&self, package: &str) -> anyhow::Result<Vec<String>> {
        let table = process::output(self.apt("apt-cache").args(["madison", package]))?;
        let mut versions: Vec<String> = table
            .lines()
            .filter_map(|line| Some(line.split('|').nth(1)?.trim().to_owned()))
            .collect();
        versions.dedup();
        Ok(versions)
    }

    /// The names that a package depends on; of alternatives the first.
    pub(crate) fn depends(&self, package: &str, version: &str) -> anyhow::Result<Vec<String>> {
        let fields = process::output(
            self.apt("apt-cache")
                .args(["show", &format!("{package}={version}")]),
        )?;
        let list = fields
            .lines()
            .find_map(|line| line.strip_prefix("Depends:"))
            .unwrap_or_default();
        Ok(list
            .split(',')
            .filter_map(|one| Some(one.split_whitespace().next()?.to_owned()))
            .collect())
    }

    /// Fetches a package and unpacks it into a folder.
    pub(crate) fn unpack(&self, package: &str, version: &str, into: &Path) -> anyhow::Result<()> {
        let fetched = into.join("fetched");
        fs::create_dir_all(&fetched)
            .with_context(|| format!("cannot create {}", fetched.display()))?;
        let wanted = format!("{package}={version}");
        process::run(
            self.apt("apt-get")
                .current_dir(&fetched)
                .args(["-qq", "download", &wanted]),
        )?;
        let file = fs::read_dir(&fetched)
            .and_then(|mut files| files.next().transpose())
            .with_context(|| format!("cannot list {}", fetched.display()))?
            .with_context(|| format!("apt-get left no file of {wanted}"))?;
        process::run(
            Command::new("dpkg-deb")
                .arg("--extract")
                .arg(file.path())
                .arg(into),
        )?;
        fs::remove_dir_all(&fetched).with_context(|| format!("cannot remove {}", fetched.display()))
    }

    /// Fetches packages and all that they need, as for a machine that has none yet, and unpacks them into a folder.
    pub(crate) fn unpack_with_dependencies(
        &self,
        packages: &[&str],
        into: &Path,
    ) -> anyhow::Result<()> {
        unpack_all(packages, into, |options| {
            process::run(
                self.apt("apt-get")
                    .env("DEBIAN_FRONTEND", "noninteractive")
                    .args(["-qq", "--yes", "--no-install-recommends"])
                    .args(options)
                    .arg("install")
                    .args(packages)
                    // What apt tells of what it would install.
                    .stdout(Stdio::null()),
            )
        })
    }

    /// Fetches the newest source of a package and unpacks it into a folder, with Debian's patches: where it is.
    pub(crate) fn source(&self, package: &str, into: &Path) -> anyhow::Result<PathBuf> {
        fs::create_dir_all(into).with_context(|| format!("cannot create {}", into.display()))?;
        process::run(
            self.apt("apt-get")
                .current_dir(into)
                .args(["-qq", "source", package])
                // What dpkg-source tells of its patches.
                .stdout(Stdio::null()),
        )?;
        let entries =
            fs::read_dir(into).with_context(|| format!("cannot list {}", into.display()))?;
        let mut folders = entries.filter_map(|entry| Some(entry.ok()?.path()));
        folders
            .find(|path| path.is_dir())
            .with_context(|| format!("apt-get left no source of {package} in {}", into.display()))
    }

    fn apt(&self, program: &str) -> Command {
        let mut command = Command::new(program);
        let own = |key: &str, path: &str| format!("{key}={}", self.folder.join(path).display());
        for option in [
            own("Dir::Etc::SourceList", "sources.list"),
            own("Dir::Etc::SourceParts", "parts"),
            own("Dir::State", "state"),
            own("Dir::Cache", "cache"),
            "Acquire::Languages=none".to_owned(),
            "Acquire::IndexTargets::deb::DEP-11::DefaultEnabled=false".to_owned(),
            "Acquire::Retries=2".to_owned(),
            format!("APT::Architecture={}", self.architecture),
            "APT::Sandbox::User=root".to_owned(),
        ] {
            command.args(["--option", &option]);
        }
        command
    }
}

/// The repositories of this machine's own apt: address by label.
fn repositories() -> anyhow::Result<BTreeMap<String, String>> {
    let listed = process::output(Command::new("apt-get").args([
        "indextargets",
        "--format",
        "$(LABEL)|$(REPO_URI)",
        "Created-By: Packages",
    ]))?;
    Ok(listed
        .lines()
        .filter_map(|line| line.split_once('|'))
        .map(|(label, address)| (label.to_owned(), address.to_owned()))
        .collect())
}

fn sources(
    repositories: &BTreeMap<String, String>,
    suites: &Suites,
    architecture: &str,
    kinds: &[&str],
) -> anyhow::Result<String> {
    let mut text = String::new();
    for (label, suites) in suites {
        let Some(address) = repositories.get(*label) else {
            continue;
        };
        for suite in *suites {
            for kind in kinds {
                let _ = writeln!(text, "{kind} [arch={architecture}] {address} {suite} main");
            }
        }
    }
    if text.is_empty() {
        bail!(
            "this machine's apt knows no archive of Debian, where packages of other suites come from: \
             run it on Debian, after `sudo apt-get update`"
        );
    }
    Ok(text)
}

/// Unpacks packages and all that they need into a folder, as for a machine that has none yet. `fetch` has an `apt-get install` of them download
/// by these options.
pub(crate) fn unpack_all(
    packages: &[&str],
    into: &Path,
    fetch: impl FnOnce(&[String]) -> anyhow::Result<()>,
) -> anyhow::Result<()> {
    let fetched = into.join("fetched");
    // The list of what is installed: nothing. It lies in a folder of our own because apt makes its lock beside it.
    let status = fetched.join("status");
    fs::create_dir_all(&fetched)
        .and_then(|()| fs::write(&status, []))
        .with_context(|| format!("cannot write to {}", fetched.display()))?;
    let settings = [
        format!("Dir::State::Status={}", status.display()),
        format!("Dir::Cache={}", fetched.display()),
        // The user that apt would download as may not write here.
        "APT::Sandbox::User=root".to_owned(),
    ];
    let mut options = vec!["--download-only".to_owned()];
    options.extend(settings.map(|setting| format!("--option={setting}")));
    fetch(&options).with_context(|| format!("the archive did not give {}", packages.join(", ")))?;
    let files = fs::read_dir(fetched.join("archives"))
        .with_context(|| format!("cannot list {}", fetched.display()))?;
    for file in files {
        let file = file
            .with_context(|| format!("cannot list {}", fetched.display()))?
            .path();
        if file.extension().is_some_and(|extension| extension == "deb") {
            let mut unpack = Command::new("dpkg-deb");
            process::run(unpack.arg("--extract").arg(file).arg(into))?;
        }
    }
    fs::remove_dir_all(&fetched).with_context(|| format!("cannot remove {}", fetched.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    const SUITES: &Suites = &[
        ("Debian", &["bullseye", "sid"]),
        ("Debian-Security", &["bullseye-security"]),
    ];

    #[test]
    fn a_machine_without_debian_is_told_so() {
        let error = sources(&BTreeMap::new(), SUITES, "amd64", &["deb"])
            .expect_err("no repository, no source");
        assert!(error.to_string().contains("apt-get update"), "{error}");
    }

    #[test]
    fn each_suite_is_read_from_its_repository() {
        let repositories = BTreeMap::from([
            ("Debian".to_owned(), "http://main.test/debian/".to_owned()),
            ("Other".to_owned(), "http://other.test/".to_owned()),
        ]);
        let text = sources(&repositories, SUITES, "arm64", &["deb", "deb-src"])
            .expect("Debian is among them");
        assert_eq!(text.lines().count(), 2 * SUITES[0].1.len());
        assert!(text.contains("deb [arch=arm64] http://main.test/debian/ bullseye main\n"));
        assert!(text.contains("deb-src [arch=arm64] http://main.test/debian/ sid main\n"));
        assert!(!text.contains("other"));
    }
}
