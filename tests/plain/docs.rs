//! Tables in docs/, against what they are about.

use std::{collections::BTreeSet, fs, path::Path};

use underpass_abi::counter::Counter;

#[test]
fn every_counter_has_its_row_in_drops_md() {
    let page = include_str!("../../docs/drops.md");
    let rows: Vec<&str> = page
        .lines()
        .filter_map(|line| line.strip_prefix("| `")?.split('`').next())
        .collect();
    let names: Vec<&str> = Counter::ALL.iter().map(|counter| counter.name()).collect();
    for name in &names {
        assert!(rows.contains(name), "docs/drops.md has no row for {name}");
    }
    for row in &rows {
        assert!(
            names.contains(row),
            "docs/drops.md has a row for {row}, which nothing counts"
        );
    }
}

/// The names that the doctor's sources give to findings, test modules apart.
fn ids_of_findings(folder: &Path, ids: &mut BTreeSet<String>) {
    let entries = fs::read_dir(folder).expect("the doctor has a folder");
    for path in entries.map(|entry| entry.expect("a file").path()) {
        if path.is_dir() {
            ids_of_findings(&path, ids);
            continue;
        }
        if path.ends_with("tests.rs") {
            continue;
        }
        let source = fs::read_to_string(&path).expect("a source is text");
        let named = ["error(", "warning(", "hint("];
        let calls = source.split("Diagnosis::").filter_map(|rest| {
            let arguments = named.iter().find_map(|name| rest.strip_prefix(name))?;
            arguments.trim_start().strip_prefix('"')
        });
        let constants = source.split("const ID: &str = \"").skip(1);
        let ends = calls.chain(constants);
        ids.extend(ends.filter_map(|rest| rest.split('"').next().map(str::to_owned)));
    }
}

#[test]
fn every_finding_of_the_doctor_has_its_row_in_operating_md() {
    let page = include_str!("../../docs/operating.md");
    let section = page.split("\n## Doctor\n").nth(1).expect("a section");
    let section = section.split("\n## ").next().unwrap_or_default();
    let rows: BTreeSet<String> = section
        .lines()
        .filter_map(|line| line.strip_prefix("| `")?.split('`').next())
        .map(str::to_owned)
        .collect();
    let mut ids = BTreeSet::new();
    let sources = Path::new(env!("CARGO_MANIFEST_DIR")).join("../plugin/src/cli/doctor");
    ids_of_findings(&sources, &mut ids);
    assert_eq!(rows, ids);
}
