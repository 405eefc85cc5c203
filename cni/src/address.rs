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
    let net: IpNet = text.parse().ok()?;
    match (net.addr().to_canonical(), net.addr()) {
        // ::ffff:10.0.0.0/104 is 10.0.0.0/8.
        (IpAddr::V4(ip), IpAddr::V6(_)) => {
            IpNet::new(ip.into(), net.prefix_len().checked_sub(96)?).ok()
        }
        _ => Some(net),
    }
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

/// For `#[serde(deserialize_with)]`: as [`cidr`], or nothing for `""` and null.
pub fn optional_cidr<'de, D: Deserializer<'de>>(
    deserializer: D,
) -> Result<Option<IpNet>, D::Error> {
    let Some(text) = Option::<String>::deserialize(deserializer)?.filter(|text| !text.is_empty())
    else {
        return Ok(None);
    };
    parse_cidr(&text).map(Some).ok_or_else(|| {
        de::Error::invalid_value(
            de::Unexpected::Str(&text),
            &"an address with a prefix length, like 10.1.2.3/24",
        )
    })
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
        assert_eq!(parse_ip("010.0.0.1"), None);
    }
}
