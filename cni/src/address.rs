//! Addresses as the reference library reads them: an empty text is no address, and an IPv4 address
//! written as an IPv4-mapped IPv6 one is an IPv4 address.

use std::net::IpAddr;

use ipnet::IpNet;
use serde::{Deserialize, Deserializer, de};

/// Reads one address.
#[must_use]
pub fn parse_ip(text: &str) -> Option<IpAddr> {
    text.parse().ok().map(|ip: IpAddr| ip.to_canonical())
}

/// Reads `address/prefix length`; host bits are kept.
#[must_use]
pub fn parse_cidr(text: &str) -> Option<IpNet> {
    let (address, length) = text.split_once('/')?;
    // As a number a sign could stand before it.
    if !length.bytes().all(|byte| byte.is_ascii_digit()) {
        return None;
    }
    let length: u8 = length.parse().ok()?;
    let ip = parse_ip(address)?;
    // ::ffff:10.0.0.0/104 is 10.0.0.0/8.
    let is_mapped = ip.is_ipv4() && address.contains(':');
    let length = length.checked_sub(if is_mapped { 96 } else { 0 })?;
    IpNet::new(ip, length).ok()
}

/// For `#[serde(deserialize_with)]`: an address, or nothing for `""` and null.
pub fn optional_ip<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<IpAddr>, D::Error> {
    let Some(text) = Option::<String>::deserialize(deserializer)?.filter(|text| !text.is_empty())
    else {
        return Ok(None);
    };
    parse_ip(&text).map(Some).ok_or_else(|| {
        de::Error::invalid_value(de::Unexpected::Str(&text), &"an IPv4 or IPv6 address")
    })
}

/// For `#[serde(deserialize_with)]`: an address with its prefix length.
pub fn cidr<'de, D: Deserializer<'de>>(deserializer: D) -> Result<IpNet, D::Error> {
    let text = String::deserialize(deserializer)?;
    parse_cidr(&text).ok_or_else(|| {
        de::Error::invalid_value(
            de::Unexpected::Str(&text),
            &"an address with a prefix length, like 10.1.2.3/24",
        )
    })
}

/// For `#[serde(deserialize_with)]`: a network to give addresses of, or nothing for null. Other allocators take no IPv4 network in the
/// words of IPv6.
pub fn optional_network<'de, D: Deserializer<'de>>(
    deserializer: D,
) -> Result<Option<IpNet>, D::Error> {
    let Some(text) = Option::<String>::deserialize(deserializer)? else {
        return Ok(None);
    };
    let expected = match parse_cidr(&text) {
        Some(net) if net.addr().is_ipv6() || !text.contains(':') => return Ok(Some(net)),
        Some(_) => "an IPv4 network as IPv4 writes it, like 10.1.2.0/24",
        None => "a network like 10.1.2.0/24 or fd00::/64",
    };
    Err(de::Error::invalid_value(
        de::Unexpected::Str(&text),
        &expected,
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mapped_addresses_are_ipv4() {
        assert_eq!(parse_ip("::ffff:10.0.0.1"), parse_ip("10.0.0.1"));
        assert_eq!(parse_cidr("::ffff:10.0.0.1/104"), parse_cidr("10.0.0.1/8"));
        assert_eq!(parse_cidr("::ffff:10.0.0.1/64"), None);
        assert_eq!(
            parse_cidr("10.1.2.3/24")
                .map(|net| net.to_string())
                .as_deref(),
            Some("10.1.2.3/24")
        );
    }

    #[test]
    fn no_octet_begins_with_a_zero() {
        assert_eq!(parse_ip("010.0.0.1"), None);
        for text in ["010.0.0.0/8", "10.022.0.0/24", "::ffff:010.0.0.0/104"] {
            assert_eq!(parse_cidr(text), None, "{text}");
        }
        assert_eq!(parse_cidr("0.0.0.0/0"), Some(IpNet::default()));
    }

    #[test]
    fn what_is_no_prefix_length() {
        for text in [
            "10.0.0.0",
            "10.0.0.0/",
            "10.0.0.0/33",
            "10.0.0.0/+8",
            "10.0.0.0/-1",
            "10.0.0.0/ 8",
            "fd00::/129",
            "/8",
            "",
            "10.0.0.0/8/8",
        ] {
            assert_eq!(parse_cidr(text), None, "{text}");
        }
    }
}
