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

/// What [`is_plain`] asks for, for people.
const PLAIN: &str =
    "it must begin with a letter or digit, and have only such, \"_\", \".\" and \"-\"";

/// A container's id: code 4 unless it is plain.
pub(crate) fn container_id(text: &str) -> Result<(), Error> {
    if is_plain(text) {
        return Ok(());
    }
    Err(Error::environment("invalid characters in containerID")
        .with_details(format!("{text}: CNI_CONTAINERID is wrong, {PLAIN}")))
}

/// A network's name: code 7 unless it is there and plain. It names a directory, too.
pub(crate) fn network(text: &str) -> Result<(), Error> {
    if text.is_empty() {
        return Err(
            Error::config("missing network name").with_details("give the config a \"name\"")
        );
    }
    if !is_plain(text) {
        return Err(Error::config("invalid characters found in network name")
            .with_details(format!("{text}: correct \"name\" in the config, {PLAIN}")));
    }
    Ok(())
}

/// A device's name, by the kernel's rules: code 4 otherwise.
pub(crate) fn interface(text: &str) -> Result<(), Error> {
    let refused = |msg: &str, rule: &str| {
        let details = format!("CNI_IFNAME is {text:?}: {rule}");
        Err(Error::environment(msg).with_details(details))
    };
    if text.is_empty() {
        return refused("interface name is empty", "give it one such as eth0");
    }
    if text.len() > IFNAME_MAX {
        return refused(
            "interface name is too long",
            &format!(
                "interface name should be less than {} characters",
                IFNAME_MAX + 1
            ),
        );
    }
    if matches!(text, "." | "..") {
        return refused(
            "interface name is . or ..",
            "the kernel has no such interfaces, give it another",
        );
    }
    if text.contains(|c: char| matches!(c, '/' | ':') || c.is_whitespace()) {
        return refused(
            "interface name contains / or : or whitespace characters",
            "leave them out",
        );
    }
    if text.contains('%') {
        return refused(
            "interface name contains %",
            "leave it out, the kernel would put a number of its own there",
        );
    }
    Ok(())
}
