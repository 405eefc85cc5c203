//! The licences of what others wrote and is a part of our executables: they ask to be passed on with them.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::env::consts::ARCH;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, bail};
use serde::Deserialize;
use underpass_toolchain::Compiler;

use crate::build::{EXECUTABLES, Musl};
use crate::process;
use crate::workspace::Workspace;

/// What the eBPF programs are made of, which are a part of the plugin.
const PROGRAMS: &str = "underpass-ebpf";

/// How the names of files with a licence begin, in capitals.
const BEGINNINGS: [&str; 5] = ["LICENSE", "LICENCE", "COPYING", "COPYRIGHT", "NOTICE"];

/// What is there already where rustup has Rust, below its root.
const STANDARD_LIBRARY: &str = "share/doc/rust/COPYRIGHT-library.html";

/// Begins the list of crates.
const HEAD: &str = "\
The executables of underpass have these crates in them, each under the licence that is named. What follows the list are the texts
that come with them; a crate whose archive has none is under the common text of the licence that it names, at its address.
";

#[derive(Deserialize)]
struct Metadata {
    packages: Vec<Package>,
    resolve: Resolve,
}

#[derive(Deserialize)]
struct Package {
    id: String,
    name: String,
    version: String,
    license: Option<String>,
    repository: Option<String>,
    /// None of those of this workspace.
    source: Option<String>,
    manifest_path: PathBuf,
}

#[derive(Deserialize)]
struct Resolve {
    nodes: Vec<Node>,
}

#[derive(Deserialize)]
struct Node {
    id: String,
    deps: Vec<Dependency>,
}

#[derive(Deserialize)]
struct Dependency {
    pkg: String,
    dep_kinds: Vec<Kind>,
}

#[derive(Deserialize)]
struct Kind {
    /// None is a dependency of what is built, and not of its build or tests.
    kind: Option<String>,
}

/// Writes them into `target/licences`, which has nothing else: that folder.
pub(crate) fn gather(workspace: &Workspace) -> anyhow::Result<PathBuf> {
    let folder = workspace.target.join("licences");
    if folder.exists() {
        fs::remove_dir_all(&folder)
            .with_context(|| format!("cannot remove the old {}", folder.display()))?;
    }
    fs::create_dir_all(&folder).with_context(|| format!("cannot create {}", folder.display()))?;
    let write = |name: &str, text: Vec<u8>| {
        let file = folder.join(name);
        fs::write(&file, text).with_context(|| format!("cannot write {}", file.display()))
    };
    write("crates.txt", crates(workspace)?.into_bytes())?;
    for (name, path) in libraries() {
        let text = fs::read(&path)
            .with_context(|| format!("cannot read {}, a licence to pass on", path.display()))?;
        write(name, text)?;
    }
    Ok(folder)
}

/// What no crate is: the C libraries and Rust's own, as far as what built them has their licences on this machine.
fn libraries() -> Vec<(&'static str, PathBuf)> {
    let documentation = Path::new("/usr/share/doc");
    let mut known = vec![("glibc.txt", documentation.join("libc6-dev/copyright"))];
    if Musl::find().is_some() {
        known.push(("musl.txt", documentation.join("musl-dev/copyright")));
    }
    if let Some(compiler) = Compiler::find() {
        let text = compiler.root().join(STANDARD_LIBRARY);
        known.push(("rust-standard-library.html", text));
    }
    known.retain(|(_, path)| path.is_file());
    known
}

/// The crates with their licences' texts, each text once.
fn crates(workspace: &Workspace) -> anyhow::Result<String> {
    let mut cargo = workspace.cargo();
    cargo.args(["metadata", "--format-version", "1", "--locked"]);
    cargo.args(["--filter-platform", &format!("{ARCH}-unknown-linux-gnu")]);
    let metadata: Metadata = serde_json::from_str(&process::output(&mut cargo)?)
        .context("cargo metadata is not as it is known")?;
    let mut lines = vec![HEAD.to_owned()];
    let mut texts: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    for package in parts(&metadata)? {
        let name = format!("{} {}", package.name, package.version);
        let found = texts_of(package)?;
        let license = package.license.as_deref().unwrap_or("see below");
        lines.push(if found.is_empty() {
            let address = package.repository.as_deref().unwrap_or("no address");
            format!("{name}: {license} ({address})")
        } else {
            format!("{name}: {license}")
        });
        for text in found {
            texts.entry(text).or_default().insert(name.clone());
        }
    }
    for (text, names) in texts {
        let names: Vec<_> = names.into_iter().collect();
        let line = "=".repeat(80);
        lines.push(format!(
            "\n{line}\n{}\n\n{}",
            names.join(", "),
            text.trim_end()
        ));
    }
    lines.push(String::new());
    Ok(lines.join("\n"))
}

/// What others wrote of the executables' parts, by name.
fn parts(metadata: &Metadata) -> anyhow::Result<Vec<&Package>> {
    let packages: HashMap<_, _> = metadata
        .packages
        .iter()
        .map(|package| (&*package.id, package))
        .collect();
    let nodes: HashMap<_, _> = metadata
        .resolve
        .nodes
        .iter()
        .map(|node| (&*node.id, node))
        .collect();
    let ours = |name: &str| EXECUTABLES.contains(&name) || name == PROGRAMS;
    let mut waiting: Vec<&str> = metadata
        .packages
        .iter()
        .filter(|package| package.source.is_none() && ours(&package.name))
        .map(|package| &*package.id)
        .collect();
    if waiting.len() != EXECUTABLES.len() + 1 {
        bail!("cargo metadata does not name every executable's package");
    }
    let mut seen: BTreeSet<&str> = waiting.iter().copied().collect();
    while let Some(id) = waiting.pop() {
        let node = nodes
            .get(id)
            .with_context(|| format!("cargo metadata has no node of {id}"))?;
        for dependency in &node.deps {
            let built = dependency.dep_kinds.iter().any(|kind| kind.kind.is_none());
            if built && seen.insert(&dependency.pkg) {
                waiting.push(&dependency.pkg);
            }
        }
    }
    let mut parts: Vec<&Package> = seen
        .into_iter()
        .filter_map(|id| packages.get(id).copied())
        .filter(|package| package.source.is_some())
        .collect();
    parts.sort_by(|one, other| (&one.name, &one.version).cmp(&(&other.name, &other.version)));
    Ok(parts)
}

/// The texts that lie beside a crate's manifest.
fn texts_of(package: &Package) -> anyhow::Result<Vec<String>> {
    let folder = package
        .manifest_path
        .parent()
        .context("a manifest without a folder")?;
    let entries =
        fs::read_dir(folder).with_context(|| format!("cannot list {}", folder.display()))?;
    let mut texts = Vec::new();
    for entry in entries {
        let path = entry
            .with_context(|| format!("cannot list {}", folder.display()))?
            .path();
        let name = path.file_name().unwrap_or_default();
        let name = name.to_string_lossy().to_uppercase();
        if path.is_file()
            && BEGINNINGS
                .iter()
                .any(|beginning| name.starts_with(beginning))
        {
            let text =
                fs::read(&path).with_context(|| format!("cannot read {}", path.display()))?;
            texts.push(String::from_utf8_lossy(&text).into_owned());
        }
    }
    Ok(texts)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_executables_have_in_them_is_named_with_its_licence() {
        let workspace = Workspace::find().expect("the workspace");
        let text = crates(&workspace).expect("the licences of crates");
        let line = |name: &str| {
            let start = format!("{name} ");
            text.lines().find(|line| line.starts_with(&start))
        };
        // Of the plugin, of the programs and of the agent; and what only tests use.
        for name in ["aya", "aya-ebpf", "kube", "serde"] {
            let line = line(name).unwrap_or_else(|| panic!("{name} is not named"));
            assert!(line.contains("Apache-2.0"), "{line}");
        }
        assert_eq!(line("rstest"), None);
        assert!(text.contains("TERMS AND CONDITIONS FOR USE, REPRODUCTION, AND DISTRIBUTION"));
    }
}
