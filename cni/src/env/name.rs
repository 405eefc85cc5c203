//! Which texts may name a container, a network or an interface.

use crate::error::Error;

/// The longest name that a network device can have, in bytes.
const IFNAME_MAX: usize = 15;

/// One letter or digit, then letters, digits, `_`, `.` and `-`.
fn is_plain(text: &str) -> bool {
    text.starts_with(|first: char| first.is_ascii_alphanumeric())
        && text
            .chars()
            .all(|c| c.is_ascii_alphanumeric() || matches!(c, '_' | '.' | '-'))
}

/// A container's id: code 4 unless it is plain.
pub(crate) fn container_id(text: &str) -> Result<(), Error> {
    if is_plain(text) {
        return Ok(());
    }
    Err(Error::environment("invalid characters in containerID").with_details(text))
}

/// A network's name: code 7 unless it is there and plain. It names a directory, too.
pub(crate) fn network(text: &str) -> Result<(), Error> {
    if text.is_empty() {
        return Err(Error::config("missing network name"));
    }
    if !is_plain(text) {
        return Err(Error::config("invalid characters found in network name").with_details(text));
    }
    Ok(())
}

/// A device's name, by the kernel's rules: code 4 otherwise.
pub(crate) fn interface(text: &str) -> Result<(), Error> {
    if text.is_empty() {
        return Err(Error::environment("interface name is empty"));
    }
    if text.len() > IFNAME_MAX {
        return Err(
            Error::environment("interface name is too long").with_details(format!(
                "interface name should be less than {} characters",
                IFNAME_MAX + 1
            )),
        );
    }
    if matches!(text, "." | "..") {
        return Err(Error::environment("interface name is . or .."));
    }
    if text.contains(|c: char| matches!(c, '/' | ':') || c.is_whitespace()) {
        return Err(Error::environment(
            "interface name contains / or : or whitespace characters",
        ));
    }
    if text.contains('%') {
        return Err(
            Error::environment("interface name contains %").with_details(format!(
                "the kernel would put a number of its own into {text}"
            )),
        );
    }
    Ok(())
}
