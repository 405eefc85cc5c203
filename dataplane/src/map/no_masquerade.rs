//! Which destinations of a network see the container's own address.

use std::net::IpAddr;

use aya::maps::{
    Map, MapData,
    lpm_trie::{Key as TrieKey, LpmTrie},
};
use ipnet::IpNet;
use underpass_abi::{
    endpoint::{Destination, excluded},
    map,
};

use super::{Maps, gone, open};
use crate::Error;

/// Bits of a [`Destination`] before its address.
const NETWORK_BITS: u32 = 32;
/// Bits of a mapped address before its IPv4 part.
const MAPPED_BITS: u32 = 96;

impl Maps {
    /// Lists the destinations of a network that see the container's own address.
    pub fn no_masquerade(&self, network: u32) -> Result<Vec<IpNet>, Error> {
        let trie = self.trie()?;
        let mut nets = Vec::new();
        for key in trie.keys() {
            let key = key.map_err(Error::map(map::NO_MASQUERADE))?;
            let destination = key.data();
            if destination.network == network {
                nets.extend(net(key.prefix_len(), destination.addr));
            }
        }
        Ok(nets)
    }

    /// Adds destinations of a network that see the container's own address.
    pub fn add_no_masquerade(&self, network: u32, nets: &[IpNet]) -> Result<(), Error> {
        if nets.is_empty() {
            return Ok(());
        }
        let mut trie = self.trie()?;
        nets.iter()
            .try_for_each(|net| trie.insert(&key(network, *net), family(*net), 0))
            .map_err(Error::map(map::NO_MASQUERADE))
    }

    /// Removes all destinations of a network that see the container's own address.
    pub fn clear_no_masquerade(&self, network: u32) -> Result<(), Error> {
        self.remove_no_masquerade(network, &self.no_masquerade(network)?)
    }

    /// Removes some destinations of a network that see the container's own address.
    pub fn remove_no_masquerade(&self, network: u32, nets: &[IpNet]) -> Result<(), Error> {
        let mut trie = self.trie()?;
        nets.iter()
            .try_for_each(|net| gone(trie.remove(&key(network, *net)), map::NO_MASQUERADE))
    }

    fn trie(&self) -> Result<LpmTrie<MapData, Destination, u32>, Error> {
        open(&self.pins, map::NO_MASQUERADE, Map::LpmTrie)
    }
}

fn family(net: IpNet) -> u32 {
    match net {
        IpNet::V4(_) => excluded::V4,
        IpNet::V6(_) => excluded::V6,
    }
}

fn key(network: u32, net: IpNet) -> TrieKey<Destination> {
    let family_bits = match net {
        IpNet::V4(_) => MAPPED_BITS,
        IpNet::V6(_) => 0,
    };
    let bytes = match net.network() {
        IpAddr::V4(v4) => v4.to_ipv6_mapped().octets(),
        IpAddr::V6(v6) => v6.octets(),
    };
    TrieKey::new(
        NETWORK_BITS + family_bits + u32::from(net.prefix_len()),
        Destination {
            network,
            addr: bytes,
        },
    )
}

fn net(prefix_len: u32, bytes: [u8; 16]) -> Option<IpNet> {
    let addr = IpAddr::from(bytes);
    let canonical = addr.to_canonical();
    let bits = prefix_len.checked_sub(NETWORK_BITS)?;
    let (addr, bits) = match bits.checked_sub(MAPPED_BITS) {
        Some(bits) if canonical.is_ipv4() => (canonical, bits),
        _ => (addr, bits),
    };
    IpNet::new(addr, u8::try_from(bits).ok()?).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_destination_survives_the_round_trip() {
        for text in [
            "10.0.0.0/8",
            "0.0.0.0/0",
            "192.0.2.1/32",
            "::/0",
            "fd00::/64",
            "2001:db8::1/128",
        ] {
            let expected: IpNet = text.parse().expect("a prefix");
            let key = key(7, expected);
            let destination = key.data();
            assert_eq!(destination.network, 7);
            assert_eq!(
                net(key.prefix_len(), destination.addr),
                Some(expected),
                "{text}"
            );
        }
    }

    #[test]
    fn a_destination_has_the_length_that_the_programs_look_up() {
        let v4: IpNet = "10.0.0.0/8".parse().expect("a prefix");
        let v6: IpNet = "fd00::/8".parse().expect("a prefix");
        assert_eq!(key(1, v4).prefix_len(), 32 + 96 + 8);
        assert_eq!(key(1, v6).prefix_len(), 32 + 8);
    }
}
