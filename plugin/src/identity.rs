//! Who an attachment is: (network, container, interface), and the names and numbers that follow
//! from it.
//!
//! DEL and GC have nothing else to go by, so everything here is stable for ever: another release
//! finds what this one made.

use sha2::{Digest as _, Sha256};
use underpass_abi::endpoint::{ALIAS_PREFIX, Owner};
use underpass_netlink::{Mac, link::Link};

/// Longest text that the kernel takes as an alias of a device, in bytes.
const ALIAS_MAX: usize = 255;
/// Begins the name of every host's end.
const HOST_PREFIX: &str = "veth";
/// In place of the three parts, where they are too long for an alias: network and owner in
/// hexadecimal.
const HASHED: &str = "#";

/// An attachment of one container to one network, by one interface.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Identity {
    /// The network's name.
    pub network: String,
    /// The container's id.
    pub container: String,
    /// The interface's name in the container.
    pub ifname: String,
}

/// What the alias of a host veth says.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Alias {
    /// The number of the network, as [`network_id`] gives it.
    pub network: u32,
    /// The owner, as [`Identity::owner`] gives it.
    pub owner: Owner,
}

/// Gives a network its number in maps, which is never 0.
#[must_use]
pub fn network_id(network: &str) -> u32 {
    let digest = Sha256::digest(network.as_bytes());
    let [a, b, c, d, ..] = digest[..] else {
        return 1;
    };
    u32::from_be_bytes([a, b, c, d]).max(1)
}

impl Identity {
    fn digest(&self) -> [u8; 32] {
        let mut hash = Sha256::new();
        for (separator, part) in [
            ("", &self.network),
            ("\0", &self.container),
            ("\0", &self.ifname),
        ] {
            hash.update(separator.as_bytes());
            hash.update(part.as_bytes());
        }
        hash.finalize().into()
    }

    /// Gives the key of `OWNERS`.
    #[must_use]
    pub fn owner(&self) -> Owner {
        let digest = self.digest();
        std::array::from_fn(|i| digest[i])
    }

    /// Gives the key of `OWNERS` for the host ports of a container that another plugin attached. That plugin
    /// may be ours, under the same network, container and interface.
    #[must_use]
    pub fn chained_owner(&self) -> Owner {
        let mut hash = Sha256::new();
        hash.update(self.digest());
        hash.update(b"chained");
        let digest: [u8; 32] = hash.finalize().into();
        std::array::from_fn(|i| digest[i])
    }

    /// Gives the network its number in maps.
    #[must_use]
    pub fn network_id(&self) -> u32 {
        network_id(&self.network)
    }

    /// Gives the host's end its name: 15 characters, beginning with `veth` so that `NetworkManager`
    /// leaves it alone.
    #[must_use]
    pub fn host_name(&self) -> String {
        host_name(self.owner())
    }

    /// Gives the host's end its MAC: locally administered.
    #[must_use]
    pub fn host_mac(&self) -> Mac {
        local_mac(&self.digest()[16..22])
    }

    /// Gives the container's end its MAC where nobody asks for another: locally administered.
    #[must_use]
    pub fn container_mac(&self) -> Mac {
        local_mac(&self.digest()[22..28])
    }

    /// Gives the host's end its alias: readable where it fits.
    #[must_use]
    pub fn alias(&self) -> String {
        // None of the three can contain a colon: the contract checks names and ids.
        let readable = format!(
            "{ALIAS_PREFIX}{}:{}:{}",
            self.network, self.container, self.ifname
        );
        if readable.len() <= ALIAS_MAX {
            return readable;
        }
        format!(
            "{ALIAS_PREFIX}{HASHED}:{:08x}:{}",
            self.network_id(),
            hex(&self.owner())
        )
    }
}

impl Alias {
    /// Reads the alias of a device; `None` if the device is not ours.
    #[must_use]
    pub fn of(link: &Link) -> Option<Self> {
        Self::parse(link.alias.as_deref()?)
    }

    /// Reads the alias of a device; `None` if the device is not ours.
    #[must_use]
    pub fn parse(alias: &str) -> Option<Self> {
        let mut parts = alias.strip_prefix(ALIAS_PREFIX)?.split(':');
        let (first, second, third) = (parts.next()?, parts.next()?, parts.next()?);
        if parts.next().is_some() {
            return None;
        }
        if first == HASHED {
            return Some(Self {
                network: u32::from_str_radix(second, 16).ok()?,
                owner: u128::from_str_radix(third, 16).ok()?.to_be_bytes(),
            });
        }
        let identity = Identity {
            network: first.to_owned(),
            container: second.to_owned(),
            ifname: third.to_owned(),
        };
        Some(Self {
            network: identity.network_id(),
            owner: identity.owner(),
        })
    }
}

/// Tells whether a device is the host's end of a pair of a network, made by an ADD that has not yet said by the alias whose
/// it is: one that is at it, or was killed.
#[must_use]
pub fn is_unfinished(link: &Link, network: u32) -> bool {
    link.alias.is_none()
        && link.is_paired()
        && link.group == network
        && link.name.starts_with(HOST_PREFIX)
}

/// Gives the name of the host's end that belongs to an owner.
#[must_use]
pub fn host_name(owner: Owner) -> String {
    let mut name = format!("{HOST_PREFIX}{}", hex(&owner));
    name.truncate(15);
    name
}

fn local_mac(bytes: &[u8]) -> Mac {
    let mut mac: [u8; 6] = std::array::from_fn(|i| bytes[i]);
    mac[0] = mac[0] & !1 | 2;
    Mac(mac)
}

fn hex(bytes: &[u8]) -> String {
    use std::fmt::Write as _;
    bytes.iter().fold(String::new(), |mut text, byte| {
        // Writing to a string can't fail.
        let _ = write!(text, "{byte:02x}");
        text
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn identity(container: &str) -> Identity {
        Identity {
            network: "n1".to_owned(),
            container: container.to_owned(),
            ifname: "eth0".to_owned(),
        }
    }

    #[test]
    fn an_alias_leads_back_to_its_attachment() {
        for container in ["c1".to_owned(), "x".repeat(300)] {
            let identity = identity(&container);
            let alias = identity.alias();
            assert!(alias.len() <= ALIAS_MAX, "{alias}");
            let read = Alias::parse(&alias).expect("an alias of ours");
            assert_eq!(read.owner, identity.owner());
            assert_eq!(read.network, identity.network_id());
        }
    }

    #[test]
    fn foreign_aliases_are_not_ours() {
        for alias in [
            "",
            "underpass",
            "underpass:",
            "underpass:a:b",
            "underpass:a:b:c:d",
            "uplink",
        ] {
            assert_eq!(Alias::parse(alias), None, "{alias:?}");
        }
    }

    #[test]
    fn names_follow_from_all_three_parts_and_stay_what_they_are() {
        let one = identity("c1");
        assert_eq!(one.host_name(), "veth836d7657cb1");
        assert_eq!(one.host_name().len(), 15);
        let moved = Identity {
            network: "n1\0".to_owned(),
            ..one.clone()
        };
        assert_ne!(one.owner(), moved.owner());
        assert_ne!(one.owner(), identity("c2").owner());
    }

    #[test]
    fn macs_are_unicast_and_local() {
        for n in 0..100 {
            let identity = identity(&format!("c{n}"));
            for mac in [identity.host_mac(), identity.container_mac()] {
                assert_eq!(mac.0[0] & 3, 2, "{mac}");
            }
            assert_ne!(identity.host_mac(), identity.container_mac());
        }
    }
}
