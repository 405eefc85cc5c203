//! Messages stay short, whatever names they hold.

use std::fmt;
use std::path::Path;

/// Room for a part that comes from outside (a path, a list of ranges), in bytes.
pub(crate) const PART: usize = 200;

/// Room for a whole message, in bytes.
pub(crate) const MESSAGE: usize = 1024;

const GAP: &str = "...";

/// A text with its middle left out, should it be longer than `max` bytes: what tells paths and ids
/// apart stands at their ends.
pub(crate) fn shortened(text: &str, max: usize) -> String {
    if text.len() <= max {
        return text.to_owned();
    }
    let half = max.saturating_sub(GAP.len()) / 2;
    let head = text.floor_char_boundary(half);
    let tail = text.ceil_char_boundary(text.len() - half);
    format!("{}{GAP}{}", &text[..head], &text[tail..])
}

/// What something displays as, in at most [`PART`] bytes.
pub(crate) fn part(text: impl fmt::Display) -> String {
    shortened(&text.to_string(), PART)
}

/// A path in at most [`PART`] bytes.
pub(crate) fn path(path: &Path) -> String {
    part(path.display())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_is_too_long_is_shortened_and_at_characters() {
        assert_eq!(shortened("abc", 3), "abc");
        assert_eq!(shortened("abcdefghij", 7), "ab...ij");
        let short = shortened(&"ä".repeat(1000), 100);
        assert!(short.len() <= 100 && short.len() > 90, "{short}");
    }
}
