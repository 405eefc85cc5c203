//! Whose a lease is, as a lease file says it.

use std::fmt;

use underpass_cni::{Attachment, AttachmentId};

use crate::shorten::shortened;

/// The longest name that a network device can have, in bytes.
const IFNAME_MAX: usize = 15;

/// Room for an owner in a message, in bytes: an id as runtimes make them, and an interface.
const SHOWN: usize = 88;

/// The owner of a lease: a container's interface.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Owner {
    /// The container's id.
    pub container_id: String,
    /// The interface's name. Absent in files from before interfaces were recorded: then every
    /// interface of the container is meant.
    pub ifname: Option<String>,
}

impl Owner {
    /// The owner with an interface.
    #[must_use]
    pub fn new(container_id: &str, ifname: &str) -> Self {
        Self {
            container_id: container_id.trim().to_owned(),
            ifname: Some(ifname.to_owned()),
        }
    }

    /// The owner as a file from before interfaces were recorded knows it.
    #[must_use]
    pub fn legacy(&self) -> Self {
        Self {
            container_id: self.container_id.clone(),
            ifname: None,
        }
    }

    /// What a lease file holds: id, CR LF, interface; nothing after it.
    #[must_use]
    pub fn content(&self) -> String {
        match &self.ifname {
            Some(ifname) => format!("{}\r\n{ifname}", self.container_id),
            None => self.container_id.clone(),
        }
    }

    /// Reads a lease file. White space around the content does not count; nothing else than that is
    /// no owner.
    #[must_use]
    pub fn parse(content: &[u8]) -> Option<Self> {
        let content = String::from_utf8_lossy(content);
        let content = content.trim();
        if content.is_empty() {
            return None;
        }
        Some(match content.split_once("\r\n") {
            Some((id, ifname)) => Self {
                container_id: id.to_owned(),
                ifname: Some(ifname.to_owned()),
            },
            None => Self {
                container_id: content.to_owned(),
                ifname: None,
            },
        })
    }

    /// Whether this is what a plugin of today writes for an attachment, and not a note of somebody who
    /// reserved an address by hand: both parts are there, and are such names as a runtime gives.
    #[must_use]
    pub fn is_attachment(&self) -> bool {
        let is_plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '.' | '-');
        let is_id = |id: &str| {
            id.starts_with(|first: char| first.is_ascii_alphanumeric()) && id.chars().all(is_plain)
        };
        let is_ifname = |name: &str| {
            !name.is_empty()
                && name.len() <= IFNAME_MAX
                && !name.contains(|c: char| c.is_whitespace() || matches!(c, '/' | ':'))
        };
        is_id(&self.container_id) && self.ifname.as_deref().is_some_and(is_ifname)
    }

    /// Whether a lease of `self` is one of `owner`, who has an interface: exactly, or as a legacy
    /// lease.
    #[must_use]
    pub fn covers(&self, owner: &Self) -> bool {
        self.container_id == owner.container_id
            && (self.ifname.is_none() || self.ifname == owner.ifname)
    }
}

/// For people: in one line, and short, whatever a file holds.
impl fmt::Display for Owner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let text = match &self.ifname {
            Some(ifname) => format!("{} ({ifname})", self.container_id),
            None => self.container_id.clone(),
        };
        let line = text.replace(char::is_control, " ");
        f.write_str(&shortened(&line, SHOWN))
    }
}

impl From<&Attachment> for Owner {
    fn from(attachment: &Attachment) -> Self {
        Self::new(&attachment.container_id, &attachment.ifname)
    }
}

impl From<&AttachmentId> for Owner {
    fn from(attachment: &AttachmentId) -> Self {
        Self::new(&attachment.container_id, &attachment.ifname)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn content_is_read_as_it_is_written() {
        let owner = Owner::new("c1", "eth0");
        assert_eq!(owner.content(), "c1\r\neth0");
        assert_eq!(Owner::parse(b" c1\r\neth0\n"), Some(owner.clone()));
        assert_eq!(Owner::parse(b"c1\n"), Some(owner.legacy()));
        assert_eq!(Owner::parse(b" \r\n"), None);
    }

    #[test]
    fn an_attachment_is_told_from_a_note() {
        let is_attachment =
            |content: &[u8]| Owner::parse(content).is_some_and(|owner| owner.is_attachment());
        assert!(is_attachment(b"c1\r\neth0") && is_attachment(b"0a_b.c-d\r\nnet1\n"));
        for note in [
            &b"printer"[..],
            b"the printer\r\neth0",
            b"c1\neth0",
            b"c1\r\neth0\r\nand more",
            b"-c1\r\neth0",
            b"c1\r\nan-interface-nobody-has",
        ] {
            assert!(!is_attachment(note), "{note:?}");
        }
    }

    #[test]
    fn a_legacy_lease_is_of_every_interface() {
        let owner = Owner::new("c1", "eth0");
        assert!(owner.covers(&owner) && owner.legacy().covers(&owner));
        assert!(!Owner::new("c1", "eth1").covers(&owner));
        assert!(!Owner::new("c2", "eth0").legacy().covers(&owner));
    }
}
