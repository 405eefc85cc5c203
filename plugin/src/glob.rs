//! Patterns for names of devices: `*` is any run of characters, `?` any one.

use std::fmt;

/// A pattern.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Glob(String);

impl Glob {
    /// Takes the pattern as it is written; every text is a pattern.
    #[must_use]
    pub fn new(pattern: String) -> Self {
        Self(pattern)
    }

    /// Tells whether the whole of `name` fits.
    #[must_use]
    pub fn matches(&self, name: &str) -> bool {
        fits(self.0.as_bytes(), name.as_bytes())
    }
}

/// Device names are at most 15 bytes long, so trying every length of a `*` costs nothing.
fn fits(pattern: &[u8], name: &[u8]) -> bool {
    match (pattern, name) {
        ([], []) => true,
        ([b'*', rest @ ..], _) => (0..=name.len()).any(|skip| fits(rest, &name[skip..])),
        ([b'?', pattern @ ..], [_, name @ ..]) => fits(pattern, name),
        ([wanted, pattern @ ..], [byte, name @ ..]) => wanted == byte && fits(pattern, name),
        _ => false,
    }
}

impl fmt::Display for Glob {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patterns_fit_whole_names() {
        let cases = [
            ("eth0", "eth0", true),
            ("eth0", "eth01", false),
            ("eth*", "eth0", true),
            ("eth*", "eth", true),
            ("eth?", "eth", false),
            ("eth?", "eth7", true),
            ("*.10", "bond0.10", true),
            ("*.10", "bond0.100", false),
            ("en*s?f*", "enp3s0f1np1", true),
            ("*", "", true),
            ("", "x", false),
        ];
        for (pattern, name, expected) in cases {
            assert_eq!(
                Glob::new(pattern.to_owned()).matches(name),
                expected,
                "{pattern} {name}"
            );
        }
    }
}
