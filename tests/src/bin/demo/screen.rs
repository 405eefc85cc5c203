//! Standard output, for people: coloured on a terminal, plain in a pipe or with `NO_COLOR`.

use anstream::{eprintln, println};
use anstyle::{AnsiColor, Style};
use serde_json::Value;

const HEADING: Style = AnsiColor::Cyan.on_default().bold();
const GOOD: Style = AnsiColor::Green.on_default().bold();
const BAD: Style = AnsiColor::Red.on_default().bold();
const NUMBER: Style = Style::new().bold();
const QUIET: Style = Style::new().dimmed();

/// Columns that JSON may fill.
const WIDTH: usize = 100;

/// The title and what it is about.
pub(crate) fn title(title: &str, text: &str) {
    println!("{HEADING}{title}{HEADING:#}\n{text}");
}

/// The start of a step.
pub(crate) fn step(number: usize, title: &str) {
    println!("\n{HEADING}{number}. {title}{HEADING:#}");
}

/// A sentence.
pub(crate) fn say(text: &str) {
    println!("{text}");
}

/// A drawing, or what a machine says.
pub(crate) fn quote(text: &str) {
    for line in text.lines() {
        println!("   {QUIET}{line}{QUIET:#}");
    }
}

/// A command as one would type it.
pub(crate) fn command(text: &str) {
    println!("   {NUMBER}$ {text}{NUMBER:#}");
}

/// JSON, indented, with what is short on one line.
pub(crate) fn json(value: &Value) {
    quote(&indented(value, ""));
}

fn indented(value: &Value, margin: &str) -> String {
    let short = value.to_string();
    let deeper = format!("{margin}  ");
    let lines: Vec<String> = match value {
        _ if margin.len() + short.len() <= WIDTH && !margin.is_empty() => return short,
        Value::Object(entries) => entries
            .iter()
            .map(|(key, value)| format!("{deeper}\"{key}\": {}", indented(value, &deeper)))
            .collect(),
        Value::Array(entries) => entries
            .iter()
            .map(|value| format!("{deeper}{}", indented(value, &deeper)))
            .collect(),
        _ => return short,
    };
    let [open, close] = if value.is_object() {
        ["{", "}"]
    } else {
        ["[", "]"]
    };
    format!("{open}\n{}\n{margin}{close}", lines.join(",\n"))
}

/// Something that was tried and works.
pub(crate) fn works(what: &str, result: &str) {
    println!("   {GOOD}ok{GOOD:#}  {what:<46} {NUMBER}{result}{NUMBER:#}");
}

/// The end, when all went well.
pub(crate) fn success(text: &str) {
    println!("\n{GOOD}{text}{GOOD:#}");
}

/// The end, when it did not.
pub(crate) fn failure(what: &str, why: &str) {
    eprintln!("\n{BAD}{what}:{BAD:#} {why}");
}
