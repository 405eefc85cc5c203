//! The text format of `OpenMetrics` 1.0: families of samples, each with its type and a sentence.

use std::fmt::{self, Write as _};

/// What the samples of a family are.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Kind {
    /// A number that goes up and down.
    Gauge,
    /// A number that only grows, until what counts is loaded anew.
    Counter,
    /// Labels that say what something is.
    Info,
}

impl Kind {
    const fn name(self) -> &'static str {
        match self {
            Self::Gauge => "gauge",
            Self::Counter => "counter",
            Self::Info => "info",
        }
    }

    /// Ends the name of every sample.
    const fn suffix(self) -> &'static str {
        match self {
            Self::Gauge => "",
            Self::Counter => "_total",
            Self::Info => "_info",
        }
    }
}

/// A text that is being written.
#[derive(Default)]
pub(super) struct Exposition(String);

/// A family whose samples are being written: all of them one after the other, as the format asks for.
pub(super) struct Family<'a> {
    text: &'a mut String,
    name: &'static str,
    kind: Kind,
}

impl Exposition {
    /// Begins a family. Its name has no suffix; where it ends in a unit, that is a base unit.
    pub(super) fn family(&mut self, name: &'static str, kind: Kind, help: &str) -> Family<'_> {
        let text = &mut self.0;
        let _ = writeln!(text, "# TYPE {name} {}", kind.name());
        if name.ends_with("_seconds") {
            let _ = writeln!(text, "# UNIT {name} seconds");
        }
        let _ = writeln!(text, "# HELP {name} {}", Escaped(help));
        Family { text, name, kind }
    }

    /// Writes a family of one sample without labels.
    pub(super) fn single(
        &mut self,
        name: &'static str,
        kind: Kind,
        help: &str,
        value: impl fmt::Display,
    ) {
        self.family(name, kind, help).sample(&[], value);
    }

    /// Ends the text.
    pub(super) fn finish(self) -> String {
        self.0 + "# EOF\n"
    }
}

impl Family<'_> {
    /// Writes a sample. Within a family no two have the same labels.
    pub(super) fn sample(&mut self, labels: &[(&str, &str)], value: impl fmt::Display) {
        // Writing to a string can't fail.
        let _ = write!(self.text, "{}{}", self.name, self.kind.suffix());
        for (index, (name, text)) in labels.iter().enumerate() {
            let before = if index == 0 { '{' } else { ',' };
            let _ = write!(self.text, "{before}{name}=\"{}\"", Escaped(text));
        }
        let end = if labels.is_empty() { "" } else { "}" };
        let _ = writeln!(self.text, "{end} {value}");
    }
}

/// A text between quotation marks, or of a sentence.
struct Escaped<'a>(&'a str);

impl fmt::Display for Escaped<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for c in self.0.chars() {
            match c {
                '\\' => f.write_str("\\\\")?,
                '"' => f.write_str("\\\"")?,
                '\n' => f.write_str("\\n")?,
                c => f.write_char(c)?,
            }
        }
        Ok(())
    }
}

/// Microseconds as seconds.
pub(super) struct Seconds(
    /// The microseconds.
    pub(super) u64,
);

impl fmt::Display for Seconds {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{:06}", self.0 / 1_000_000, self.0 % 1_000_000)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn families_read_as_the_format_has_them() {
        let mut text = Exposition::default();
        text.single("a_loaded", Kind::Gauge, "Whether it is.", 1);
        let mut packets = text.family("a_packets", Kind::Counter, "Packets.");
        packets.sample(&[("event", "one")], u64::MAX);
        packets.sample(&[("event", "two"), ("way", "out")], 0);
        let mut build = text.family("a_build", Kind::Info, "The build.");
        build.sample(&[("version", "0.1.0")], 1);
        let mut times = text.family("a_step_seconds", Kind::Gauge, "Times.");
        times.sample(&[("step", "link")], Seconds(1_000_250));
        assert_eq!(
            text.finish(),
            "# TYPE a_loaded gauge\n# HELP a_loaded Whether it is.\na_loaded 1\n\
             # TYPE a_packets counter\n# HELP a_packets Packets.\n\
             a_packets_total{event=\"one\"} 18446744073709551615\n\
             a_packets_total{event=\"two\",way=\"out\"} 0\n\
             # TYPE a_build info\n# HELP a_build The build.\na_build_info{version=\"0.1.0\"} 1\n\
             # TYPE a_step_seconds gauge\n# UNIT a_step_seconds seconds\n# HELP a_step_seconds Times.\n\
             a_step_seconds{step=\"link\"} 1.000250\n\
             # EOF\n"
        );
    }

    #[test]
    fn what_ends_a_label_or_a_line_is_escaped() {
        let mut text = Exposition::default();
        let mut family = text.family("a", Kind::Gauge, "One \"line\"\nof a\\b.");
        family.sample(&[("network", "a\"b\\c\nd{é}")], 1);
        assert_eq!(
            text.finish(),
            "# TYPE a gauge\n# HELP a One \\\"line\\\"\\nof a\\\\b.\n\
             a{network=\"a\\\"b\\\\c\\nd{é}\"} 1\n# EOF\n"
        );
    }
}
