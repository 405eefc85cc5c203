//! Which kernel runs.

/// Asks for the release of the running kernel, as `uname -r` prints it.
#[must_use]
pub fn release() -> String {
    nix::sys::utsname::uname()
        .map(|name| name.release().to_string_lossy().into_owned())
        .unwrap_or_default()
}

/// Asks for the first two numbers of the release; they are zero if it has none.
#[must_use]
pub fn version() -> (u32, u32) {
    numbers(&release())
}

fn numbers(release: &str) -> (u32, u32) {
    let mut numbers = release
        .split(|c: char| !c.is_ascii_digit())
        .map(|number| number.parse().unwrap_or(0));
    let mut next = || numbers.next().unwrap_or(0);
    (next(), next())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_release_begins_with_two_numbers() {
        assert_eq!(numbers("5.10.0-33-amd64"), (5, 10));
        assert_eq!(numbers("7.3-rc1"), (7, 3));
        assert_eq!(numbers(""), (0, 0));
    }
}
