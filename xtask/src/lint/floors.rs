//! The floors of the programs: what is above may know what is below, never the other way round.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, bail};

/// The modules of `ebpf/src/main.rs`, from the bottom up. Below all of them is the library
/// (`ebpf/src/lib.rs`), which the compiler keeps from knowing them.
const FLOORS: [&str; 11] = [
    "model",
    "kernel",
    "trace",
    "fragment",
    "parse",
    "filter",
    "flow",
    "nat",
    "icmp_error",
    "bypass",
    "hook",
];

/// Looks at every module of the programs.
pub(super) fn check(root: &Path) -> anyhow::Result<()> {
    let sources = root.join("ebpf/src");
    let main = read(&sources.join("main.rs"))?;
    let mut found: Vec<String> = modules(&main)
        .filter(|module| !FLOORS.contains(module))
        .map(|module| format!("ebpf/src/main.rs: `{module}` is on no floor of {}", file!()))
        .collect();
    for (height, floor) in FLOORS.iter().enumerate() {
        for path in files(&sources, floor)? {
            let text = read(&path)?;
            let name = path.strip_prefix(root).unwrap_or(&path).display();
            for (line, above) in known(&text) {
                if FLOORS[height + 1..].contains(&above.as_str()) {
                    found.push(format!(
                        "{name}:{line}: the floor `{floor}` knows `{above}`, which is above it"
                    ));
                }
            }
        }
    }
    if !found.is_empty() {
        bail!(
            "what is below must not know what is above: {}",
            found.join("; ")
        );
    }
    Ok(())
}

/// The modules that a file declares.
fn modules(text: &str) -> impl Iterator<Item = &str> {
    text.lines()
        .filter_map(|line| line.strip_prefix("mod ")?.strip_suffix(';'))
}

/// The files of a module: its own, and those of the folder of its name.
fn files(sources: &Path, module: &str) -> anyhow::Result<Vec<PathBuf>> {
    let mut files = vec![sources.join(module).with_extension("rs")];
    let mut folders = vec![sources.join(module)];
    while let Some(folder) = folders.pop() {
        if !folder.is_dir() {
            continue;
        }
        let entries =
            fs::read_dir(&folder).with_context(|| format!("cannot list {}", folder.display()))?;
        for entry in entries {
            let path = entry?.path();
            if path.is_dir() {
                folders.push(path);
            } else {
                files.push(path);
            }
        }
    }
    files.sort();
    Ok(files)
}

fn read(path: &Path) -> anyhow::Result<String> {
    fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))
}

/// The modules of its own crate that a file names in its code, each with the line.
fn known(text: &str) -> Vec<(usize, String)> {
    const CRATE: &str = "crate::";
    let code = without_comments(text);
    code.match_indices(CRATE)
        .flat_map(|(at, _)| {
            let start = at + CRATE.len();
            firsts(&code[start..])
                .into_iter()
                .map(move |(offset, module)| (start + offset, module))
        })
        .map(|(at, module)| (code[..at].lines().count().max(1), module))
        .collect()
}

/// The first name of each path that begins here, with its offset: one, or those of a list in braces.
fn firsts(code: &str) -> Vec<(usize, String)> {
    let name = |at: usize| -> String {
        code[at..]
            .chars()
            .take_while(|letter| letter.is_alphanumeric() || *letter == '_')
            .collect()
    };
    if !code.starts_with('{') {
        return vec![(0, name(0))];
    }
    let mut found = Vec::new();
    let mut depth = 0;
    let mut begins = false;
    for (at, letter) in code.char_indices() {
        match letter {
            '{' => {
                depth += 1;
                begins = depth == 1;
            }
            '}' if depth == 1 => break,
            '}' => depth -= 1,
            ',' => begins = depth == 1,
            _ if begins && !letter.is_whitespace() => {
                found.push((at, name(at)));
                begins = false;
            }
            _ => {}
        }
    }
    found
}

/// The text with its comments emptied, so that lines keep their numbers.
fn without_comments(text: &str) -> String {
    text.lines()
        .map(|line| line.split("//").next().unwrap_or_default())
        .collect::<Vec<_>>()
        .join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_path_into_the_crate_is_found_with_its_line() {
        let text = "//! See [`a`](crate::hook::a).\n\nuse crate::{\n    flow::{entry::find, table},\n    nat,\n};\nuse crate::trace;\n\nfn f() {\n    crate::parse::g(); // crate::bypass\n}\n";
        let found: Vec<_> = known(text);
        let expected = [(4, "flow"), (5, "nat"), (7, "trace"), (10, "parse")];
        assert_eq!(
            found,
            expected.map(|(line, module)| (line, module.to_owned()))
        );
    }

    #[test]
    fn the_programs_keep_to_their_floors() -> anyhow::Result<()> {
        let workspace = Path::new(env!("CARGO_MANIFEST_DIR")).parent();
        check(workspace.context("this crate lies in a workspace")?)
    }

    #[test]
    fn a_floor_that_knows_one_above_is_named() -> anyhow::Result<()> {
        let root = tempfile::tempdir()?;
        let sources = root.path().join("ebpf/src");
        fs::create_dir_all(sources.join("flow"))?;
        for floor in FLOORS {
            fs::write(sources.join(floor).with_extension("rs"), "")?;
        }
        fs::write(sources.join("main.rs"), "mod flow;\n\nmod nat;\n")?;
        fs::write(
            sources.join("nat.rs"),
            "use crate::{flow::entry, kernel::maps};\n",
        )?;
        check(root.path())?;

        fs::write(
            sources.join("flow/learn.rs"),
            "//! Learns.\n\nuse crate::{\n    kernel::maps,\n    nat::mapping,\n};\n",
        )?;
        let error = check(root.path()).expect_err("flow knows nat");
        let told = "ebpf/src/flow/learn.rs:5: the floor `flow` knows `nat`, which is above it";
        assert!(error.to_string().contains(told), "{error}");
        Ok(())
    }

    #[test]
    fn a_module_on_no_floor_is_named() -> anyhow::Result<()> {
        let root = tempfile::tempdir()?;
        let sources = root.path().join("ebpf/src");
        fs::create_dir_all(&sources)?;
        for floor in FLOORS {
            fs::write(sources.join(floor).with_extension("rs"), "")?;
        }
        fs::write(sources.join("main.rs"), "mod attic;\n")?;
        let error = check(root.path()).expect_err("the attic is on no floor");
        assert!(
            error.to_string().contains("`attic` is on no floor"),
            "{error}"
        );
        Ok(())
    }
}
