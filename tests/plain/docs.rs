//! Tables in docs/, against what they are about.

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
