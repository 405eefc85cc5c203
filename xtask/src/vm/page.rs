//! docs/kernels.md: kernels, and on each of them programs, features and tests. Only what is between the two marks is written here; the rest
//! of the page is written by people.

use std::collections::BTreeMap;
use std::fs;
use std::iter;
use std::path::Path;

use anyhow::Context as _;

use super::record::Outcome;
use super::results::Results;
use crate::report;

const BEGIN: &str = "<!-- measured: written by `cargo xtask test vm`, down to the next mark -->";
const END: &str = "<!-- /measured -->";

/// Replaces the page's measured part.
pub(super) fn write(root: &Path, mut results: Vec<Results>) -> anyhow::Result<()> {
    let path = root.join("docs/kernels.md");
    let page =
        fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
    let (before, rest) = page
        .split_once(BEGIN)
        .with_context(|| format!("{} lacks the line {BEGIN}", path.display()))?;
    let (_, after) = rest
        .split_once(END)
        .with_context(|| format!("{} lacks the line {END}", path.display()))?;
    results.sort_by_key(|results| numbers(&results.version));
    let measured = measured(&results);
    fs::write(&path, format!("{before}{BEGIN}\n\n{measured}{END}{after}"))
        .with_context(|| format!("cannot write {}", path.display()))?;
    report::step("written", &path.display().to_string());
    Ok(())
}

/// The numbers of a version, for ordering.
fn numbers(version: &str) -> Vec<u64> {
    version
        .split(|c: char| !c.is_ascii_digit())
        .filter_map(|digits| digits.parse().ok())
        .collect()
}

fn measured(results: &[Results]) -> String {
    let mut text = String::from("## Kernels\n\n| kernel | package | result |\n|---|---|---|\n");
    for kernel in results {
        text.push_str(&row([kernel.release(), &kernel.version, &kernel.summary()]));
    }
    text += "\n## Programs\n\nInstructions the verifier went through; bytes of stack of the deepest chain of calls, as the oldest kernels \
             reckon;\nmilliseconds to load, in emulation, where everything takes ten to twenty times as long.\n\n";
    text += &table("program", results, |kernel| {
        let cell = |program: &super::record::Program| {
            let cell = format!(
                "{}; {} B; {} ms",
                program.verified, program.stack, program.milliseconds
            );
            (format!("`{}`", program.name), cell)
        };
        kernel.programs().map(cell).collect()
    });
    text += "\n## Features\n\nWhat the programs use where it is there.\n\n";
    text += &table("feature", results, |kernel| {
        let title = |name, purpose| format!("`{name}`: {purpose}");
        let features = kernel.features();
        features
            .map(|(name, present, purpose)| {
                (
                    title(name, purpose),
                    if present { "yes" } else { "no" }.to_owned(),
                )
            })
            .collect()
    });
    text += "\n## Tests\n\nHow many cases of each test passed; what did not is named.\n\n";
    text += &table("test", results, |kernel| {
        tests(kernel).into_iter().collect()
    });
    text.push('\n');
    text
}

/// A row for everything that a kernel has a cell for, in the order of the kernel that has it first.
fn table(
    what: &str,
    results: &[Results],
    cells: impl Fn(&Results) -> Vec<(String, String)>,
) -> String {
    let columns: Vec<Vec<(String, String)>> = results.iter().map(cells).collect();
    let mut rows: Vec<&str> = Vec::new();
    for (name, _) in columns.iter().flatten() {
        if !rows.contains(&name.as_str()) {
            rows.push(name);
        }
    }
    let kernels: Vec<String> = results
        .iter()
        .map(|kernel| short(&kernel.version))
        .collect();
    let mut text = row(iter::once(what).chain(kernels.iter().map(String::as_str)));
    text.push_str(&row(iter::repeat_n("---", results.len() + 1)));
    for name in rows {
        let cells = columns.iter().map(|column| {
            let cell = column.iter().find(|(known, _)| known == name);
            cell.map_or("", |(_, cell)| cell)
        });
        text.push_str(&row(iter::once(name).chain(cells)));
    }
    text
}

/// A row of a table.
fn row<'a>(cells: impl IntoIterator<Item = &'a str>) -> String {
    let cells: Vec<&str> = cells.into_iter().collect();
    format!("| {} |\n", cells.join(" | "))
}

/// `6.12.107-1` as `6.12`.
fn short(version: &str) -> String {
    let parts: Vec<String> = numbers(version).iter().map(u64::to_string).collect();
    parts.get(..2).unwrap_or(&parts).join(".")
}

/// By test, without its case: how many of how many passed, and why not the others.
fn tests(kernel: &Results) -> BTreeMap<String, String> {
    let mut groups: BTreeMap<String, Vec<(&str, &Outcome)>> = BTreeMap::new();
    for (name, outcome) in kernel.tests() {
        let (test, case) = split(name);
        groups
            .entry(format!("`{test}`"))
            .or_default()
            .push((case, outcome));
    }
    groups
        .into_iter()
        .map(|(test, cases)| (test, cell(&cases)))
        .collect()
}

fn cell(cases: &[(&str, &Outcome)]) -> String {
    let passed = cases
        .iter()
        .filter(|(_, outcome)| **outcome == Outcome::Passed);
    let passed = passed.count();
    if passed == cases.len() {
        return passed.to_string();
    }
    let text = format!("{passed} of {}", cases.len());
    let mut reasons: Vec<String> = Vec::new();
    for (case, outcome) in cases {
        let reason = match outcome {
            Outcome::Passed => continue,
            Outcome::Failed => format!("**failed** {case}").trim_end().to_owned(),
            Outcome::NotHere(reason) => format!("not on this kernel: {reason}"),
            Outcome::NotRun => "not run".to_owned(),
        };
        if !reasons.contains(&reason) {
            reasons.push(reason);
        }
    }
    text + " (" + &reasons.join("; ") + ")"
}

/// `file::module::test` and the case, which may be empty.
fn split(name: &str) -> (&str, &str) {
    match name.match_indices("::").nth(2) {
        Some((at, separator)) => (&name[..at], &name[at + separator.len()..]),
        None => (name, ""),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cases_are_one_cell_that_hides_no_failure() {
        let excused = Outcome::NotHere("no tcx before 6.6".to_owned());
        assert_eq!(
            cell(&[("v4", &Outcome::Passed), ("v6", &Outcome::Passed)]),
            "2"
        );
        assert_eq!(
            cell(&[("v4", &Outcome::Passed), ("v6", &Outcome::Failed)]),
            "1 of 2 (**failed** v6)"
        );
        assert_eq!(
            cell(&[("v4", &excused), ("v6", &excused)]),
            "0 of 2 (not on this kernel: no tcx before 6.6)"
        );
    }

    #[test]
    fn a_case_is_what_follows_the_test() {
        assert_eq!(
            split("netns::hops::one::family_1_V4"),
            ("netns::hops::one", "family_1_V4")
        );
        assert_eq!(split("netns::hops::one"), ("netns::hops::one", ""));
    }

    #[test]
    fn versions_are_ordered_as_numbers() {
        assert!(numbers("6.1.192-2") < numbers("6.12.107-1"));
        assert!(numbers("6.12.107-1") < numbers("7.3~rc7-1~exp1"));
        assert_eq!(short("7.3~rc7-1~exp1"), "7.3");
    }
}
