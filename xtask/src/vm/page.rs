//! docs/kernels.md: kernels, and on each of them programs, features and tests. Only what is between marks is written here; the rest of the page
//! is written by people.

use std::fs;
use std::iter;
use std::path::Path;

use anyhow::Context as _;

use super::kept::{Kept, Known};
use super::record::{Outcome, Program};
use super::results::Results;
use crate::report;

/// The page.
const PAGE: &str = "docs/kernels.md";

/// Replaces what the page says of programs and features, which takes a minute to measure.
pub(super) fn write_programs(root: &Path, results: &mut [Results]) -> anyhow::Result<()> {
    results.sort_by_key(|results| numbers(&results.version));
    write(root, "programs", &programs(results))
}

/// Replaces what the page says of tests, by all that is known of those with these names.
pub(super) fn write_tests(root: &Path, names: &[String]) -> anyhow::Result<()> {
    let mut kernels = Kept::all(root)?;
    for kept in &mut kernels {
        kept.keep_only(names);
    }
    kernels.sort_by_key(|kept| numbers(&kept.kernel));
    write(root, "tests", &tests(&kernels, names))
}

fn write(root: &Path, word: &str, text: &str) -> anyhow::Result<()> {
    let path = root.join(PAGE);
    let page =
        fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
    let page = replace(&page, word, text)
        .with_context(|| format!("{} is not as expected", path.display()))?;
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

/// How many tests passed, by kernel and by file of tests.
fn tests(kernels: &[Kept], names: &[String]) -> String {
    let mut sums = row([
        "kernel",
        "package",
        "passed",
        "at the second try",
        "failed",
        "not on this kernel",
        "not yet run",
        "revisions",
    ]);
    sums += &row(["---"; 8]);
    for kept in kernels {
        sums += &sum(kept, names);
    }
    let mut modules: Vec<&str> = Vec::new();
    for name in names {
        if !modules.contains(&module(name)) {
            modules.push(module(name));
        }
    }
    let mut table = row(iter::once("tests").chain(kernels.iter().map(|kept| &*kept.kernel)));
    table += &row(iter::repeat_n("---", kernels.len() + 1));
    for wanted in modules {
        let names: Vec<&String> = names.iter().filter(|name| module(name) == wanted).collect();
        let cells: Vec<String> = kernels.iter().map(|kept| cell(kept, &names)).collect();
        let first = format!("`{wanted}`");
        table += &row(iter::once(&*first).chain(cells.iter().map(String::as_str)));
    }
    format!("{sums}\n{table}")
}

/// The row of a kernel.
fn sum(kept: &Kept, names: &[String]) -> String {
    let count = |wanted: fn(&Outcome) -> bool| {
        let count = kept.tests().filter(|known| wanted(&known.outcome)).count();
        count.to_string()
    };
    let mut by_age: Vec<_> = kept.tests().collect();
    by_age.sort_by_key(|known| known.at);
    let unique = |field: fn(&Known) -> &str| {
        let mut values: Vec<&str> = Vec::new();
        for known in &by_age {
            if !values.contains(&field(known)) {
                values.push(field(known));
            }
        }
        values.join(", ")
    };
    row([
        &*kept.kernel,
        &unique(|known| &known.package),
        &count(|outcome| *outcome == Outcome::Passed),
        &count(|outcome| *outcome == Outcome::Unsteady),
        &count(|outcome| *outcome == Outcome::Failed),
        &count(|outcome| matches!(outcome, Outcome::NotHere(_))),
        &(names.len() - by_age.len()).to_string(),
        &unique(|known| &known.revision),
    ])
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
pub(super) fn short(version: &str) -> String {
    let parts: Vec<String> = numbers(version).iter().map(u64::to_string).collect();
    parts.get(..2).unwrap_or(&parts).join(".")
}

/// How many of these tests passed of how many, and why not the others.
fn cell(kept: &Kept, names: &[&String]) -> String {
    let known: Vec<&Known> = names.iter().filter_map(|name| kept.get(name)).collect();
    let passed = known
        .iter()
        .filter(|known| known.outcome == Outcome::Passed);
    let passed = passed.count();
    if known.is_empty() {
        return String::new();
    }
    if passed == names.len() {
        return passed.to_string();
    }
    let mut reasons: Vec<String> = Vec::new();
    for known in &known {
        let name = &known.name[module(&known.name).len() + 2..];
        let reason = match &known.outcome {
            Outcome::Passed | Outcome::NotRun => continue,
            Outcome::Unsteady => format!("at the second try `{name}`"),
            Outcome::Failed => format!("**failed** `{name}`"),
            Outcome::NotHere(reason) => format!("not on this kernel: {reason}"),
        };
        if !reasons.contains(&reason) {
            reasons.push(reason);
        }
    }
    if known.len() < names.len() {
        reasons.push(format!("{} not yet run", names.len() - known.len()));
    }
    format!("{passed} of {} ({})", names.len(), reasons.join("; "))
}

/// The file of tests that a name is from, with the module: all before the second `::`.
fn module(name: &str) -> &str {
    let end = name.match_indices("::").nth(1);
    end.map_or(name, |(at, _)| &name[..at])
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::vm::record::Record;

    /// What is known where these tests ended like that.
    fn kept(outcomes: &[(&str, Outcome)]) -> Kept {
        let root = tempfile::tempdir().expect("a folder");
        let records: Vec<Record> = outcomes
            .iter()
            .map(|(name, outcome)| Record::Test {
                name: (*name).to_owned(),
                outcome: outcome.clone(),
                seconds: 1.0,
            })
            .collect();
        let mut kept = Kept::read(root.path(), "5.10").expect("nothing is known");
        kept.join(&Results::of("5.10-1", &records), "abc")
            .expect("a clock");
        kept
    }

    #[test]
    fn tests_are_one_cell_that_hides_no_failure() {
        let [one, two] = ["netns::hops::one::v4", "netns::hops::one::v6"];
        let names = [one, two].map(str::to_owned);
        let names: Vec<&String> = names.iter().collect();
        let excused = Outcome::NotHere("no tcx before 6.6".to_owned());
        for (outcomes, expected) in [
            (&[(one, Outcome::Passed), (two, Outcome::Passed)][..], "2"),
            (
                &[(one, Outcome::Passed), (two, Outcome::Failed)],
                "1 of 2 (**failed** `one::v6`)",
            ),
            (
                &[(one, Outcome::Unsteady), (two, Outcome::Passed)],
                "1 of 2 (at the second try `one::v4`)",
            ),
            (
                &[(one, excused.clone()), (two, excused)],
                "0 of 2 (not on this kernel: no tcx before 6.6)",
            ),
            (&[(one, Outcome::Passed)], "1 of 2 (1 not yet run)"),
            (&[], ""),
        ] {
            assert_eq!(cell(&kept(outcomes), &names), expected);
        }
    }

    #[test]
    fn a_kernel_has_a_row_of_sums() {
        let names = ["netns::hops::one", "netns::hops::two"].map(str::to_owned);
        let kept = kept(&[("netns::hops::one", Outcome::Passed)]);
        assert_eq!(
            sum(&kept, &names),
            "| 5.10 | 5.10-1 | 1 | 0 | 0 | 0 | 1 | abc |\n"
        );
    }

    #[test]
    fn a_module_ends_before_the_test() {
        assert_eq!(module("netns::hops::one::family_1_V4"), "netns::hops");
        assert_eq!(module("odd"), "odd");
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
