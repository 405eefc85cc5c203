//! docs/kernels.md: kernels, and on each of them programs, features and tests. Only what is between marks is written here; the rest of the page
//! is written by people.

use std::collections::BTreeMap;
use std::fs;
use std::iter;
use std::path::Path;

use anyhow::Context as _;

use super::record::{Outcome, Program};
use super::results::Results;
use crate::report;

/// A part of the page, by the word in its marks.
#[derive(Clone, Copy)]
pub(super) enum Part {
    /// Programs and features, which take a minute to measure.
    Programs,
    /// All tests, which take an hour.
    Tests,
}

impl Part {
    const fn word(self) -> &'static str {
        match self {
            Self::Programs => "programs",
            Self::Tests => "tests",
        }
    }

    fn measured(self, results: &[Results]) -> String {
        match self {
            Self::Programs => programs(results),
            Self::Tests => tests(results),
        }
    }
}

/// Replaces parts of the page.
pub(super) fn write(root: &Path, parts: &[Part], results: &mut [Results]) -> anyhow::Result<()> {
    let path = root.join("docs/kernels.md");
    let mut page =
        fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
    results.sort_by_key(|results| numbers(&results.version));
    for part in parts {
        page = replace(&page, part.word(), &part.measured(results))
            .with_context(|| format!("{} is not as expected", path.display()))?;
    }
    fs::write(&path, page).with_context(|| format!("cannot write {}", path.display()))?;
    report::step("written", &path.display().to_string());
    Ok(())
}

/// Replaces what is between the two marks of a word.
fn replace(page: &str, word: &str, text: &str) -> anyhow::Result<String> {
    let begin = format!("<!-- {word}: written by `cargo xtask test vm` -->");
    let end = format!("<!-- /{word} -->");
    let (before, rest) = page
        .split_once(&begin)
        .with_context(|| format!("no line {begin}"))?;
    let (_, after) = rest
        .split_once(&end)
        .with_context(|| format!("no line {end}"))?;
    Ok(format!("{before}{begin}\n\n{text}\n{end}{after}"))
}

/// The numbers of a version, for ordering.
fn numbers(version: &str) -> Vec<u64> {
    version
        .split(|c: char| !c.is_ascii_digit())
        .filter_map(|digits| digits.parse().ok())
        .collect()
}

fn programs(results: &[Results]) -> String {
    let programs = table("program", results, |kernel| {
        let cell = |program: &Program| {
            let Program {
                name,
                verified,
                stack,
                milliseconds,
            } = program;
            let cell = format!("{verified}; {stack} B; {milliseconds} ms");
            (format!("`{name}`"), cell)
        };
        // They are loaded at the same time, and end in any order.
        let mut cells: Vec<_> = kernel.programs().map(cell).collect();
        cells.sort();
        cells
    });
    let features = table("feature", results, |kernel| {
        let features = kernel.features();
        features
            .map(|(name, present, purpose)| {
                let present = if present { "yes" } else { "no" };
                (format!("{name}: {purpose}"), present.to_owned())
            })
            .collect()
    });
    format!("{programs}\n{features}")
}

fn tests(results: &[Results]) -> String {
    let mut kernels = row(["kernel", "package", "result"]);
    kernels.push_str(&row(["---"; 3]));
    for kernel in results {
        kernels.push_str(&row([kernel.release(), &kernel.version, &kernel.summary()]));
    }
    let tests = table("test", results, |kernel| {
        groups(kernel).into_iter().collect()
    });
    format!("{kernels}\n{tests}")
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
fn groups(kernel: &Results) -> BTreeMap<String, String> {
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
    fn only_what_is_between_the_marks_is_replaced() {
        let page = "a\n<!-- x: written by `cargo xtask test vm` -->\nold\n<!-- /x -->\nb\n";
        let new = replace(page, "x", "new\n").expect("both marks are there");
        assert_eq!(
            new,
            "a\n<!-- x: written by `cargo xtask test vm` -->\n\nnew\n\n<!-- /x -->\nb\n"
        );
        assert_eq!(replace(&new, "x", "new\n").expect("still there"), new);
        assert!(replace(page, "y", "new").is_err());
    }

    #[test]
    fn versions_are_ordered_as_numbers() {
        assert!(numbers("6.1.192-2") < numbers("6.12.107-1"));
        assert!(numbers("6.12.107-1") < numbers("7.3~rc7-1~exp1"));
        assert_eq!(short("7.3~rc7-1~exp1"), "7.3");
    }
}
