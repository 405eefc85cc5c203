//! How the findings are printed for people.

use std::io;

use super::{
    super::{BAD, FAINT, GOOD, HEADING},
    Diagnosis, NotChecked, Report, Severity,
};

/// Prints findings, then hints, then what could not be looked at.
pub(super) fn report(report: &Report, out: &mut impl io::Write) -> io::Result<()> {
    if report.findings.is_empty() {
        writeln!(out, "{GOOD}nothing to complain about{GOOD:#}")?;
    }
    for Diagnosis {
        id,
        severity,
        what,
        fix,
    } in &report.findings
    {
        let (style, word) = match severity {
            Severity::Error => (BAD, "error"),
            Severity::Warning | Severity::Hint => (HEADING, "warning"),
        };
        writeln!(out, "{style}{word}{style:#}: {id}: {what}\n  fix: {fix}")?;
    }
    if !report.hints.is_empty() {
        writeln!(out, "\n{HEADING}Could be better{HEADING:#}")?;
    }
    for Diagnosis { id, what, fix, .. } in &report.hints {
        writeln!(out, "  {id}: {what}\n    {FAINT}{fix}{FAINT:#}")?;
    }
    if !report.not_checked.is_empty() {
        writeln!(out, "\n{HEADING}Not checked{HEADING:#}")?;
    }
    for NotChecked { id, why } in &report.not_checked {
        writeln!(out, "  {id}: {why}")?;
    }
    Ok(())
}
