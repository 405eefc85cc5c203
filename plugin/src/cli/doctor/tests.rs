use super::*;

#[test]
fn hints_are_no_findings() {
    let mut report = Report::default();
    report.add([Diagnosis::hint("h", "it could be better", "do this")]);
    report.not_checked("n", "nobody knows");
    let mut out = Vec::new();
    print::report(&report, &mut out).expect("a vector takes it");
    let text = anstream::adapter::strip_str(std::str::from_utf8(&out).expect("text")).to_string();
    insta::assert_snapshot!(text, @r"
    nothing to complain about

    Could be better
      h: it could be better
        do this

    Not checked
      n: nobody knows
    ");
    assert_eq!(report.errors(), 0);
}

#[test]
fn findings_are_printed_with_what_mends_them() {
    let mut report = Report::default();
    report.add([
        Diagnosis::warning("w", "it is odd", "look at it"),
        Diagnosis::error("e", "it is broken", "mend it"),
    ]);
    assert_eq!(report.errors(), 1);
    let json = serde_json::to_value(&report).expect("it has text keys");
    assert_eq!(json["findings"][1]["severity"], "error");
    assert_eq!(json["notChecked"], serde_json::json!([]));
    let mut out = Vec::new();
    print::report(&report, &mut out).expect("a vector takes it");
    let text = anstream::adapter::strip_str(std::str::from_utf8(&out).expect("text")).to_string();
    assert!(
        text.contains("error: e: it is broken\n  fix: mend it"),
        "{text}"
    );
    assert!(!text.contains("nothing to complain"), "{text}");
}

#[test]
fn of_many_the_first_few_are_named() {
    assert_eq!(some(["a"]), "a");
    assert_eq!(some(["a", "b", "c"]), "a, b, c");
    assert_eq!(some(["a", "b", "c", "d", "e"]), "a, b, c and 2 more");
}
