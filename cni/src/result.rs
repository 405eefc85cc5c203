//! What a successful ADD answers, in the shape of 1.1.0, and its forms in every other version.

use std::net::IpAddr;

use ipnet::IpNet;
use serde::de::Error as _;
use serde::{Deserialize, Deserializer, Serialize};
use serde_json::ser::{PrettyFormatter, Serializer};

use crate::address;
use crate::error::Error;
use crate::version::Version;

mod down;
mod previous;

/// The result of an ADD.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct CniResult {
    /// Devices, the host's end first.
    pub interfaces: Vec<Interface>,
    /// Addresses; each may point to a device.
    pub ips: Vec<IpConfig>,
    /// Routes inside the container.
    pub routes: Vec<Route>,
    /// Resolver settings.
    pub dns: Dns,
}

/// A device that the attachment consists of.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct Interface {
    /// The device's name.
    pub name: String,
    /// Its MAC address, lower-case hexadecimal with colons; empty when it has none.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub mac: String,
    /// Its MTU in bytes.
    #[serde(deserialize_with = "given", skip_serializing_if = "Option::is_none")]
    pub mtu: Option<u32>,
    /// The netns as the runtime wrote it; empty for a device of the host.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub sandbox: String,
    /// The socket of a user-space device.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub socket_path: String,
    /// The PCI address of a hardware device.
    #[serde(rename = "pciID", skip_serializing_if = "String::is_empty")]
    pub pci_id: String,
}

/// An address of the container.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct IpConfig {
    /// Index into [`CniResult::interfaces`].
    #[serde(
        default,
        deserialize_with = "index",
        skip_serializing_if = "Option::is_none"
    )]
    pub interface: Option<u32>,
    /// The address, with the length of its network's prefix.
    #[serde(deserialize_with = "address::cidr")]
    pub address: IpNet,
    /// The network's gateway.
    #[serde(
        default,
        deserialize_with = "address::optional_ip",
        skip_serializing_if = "Option::is_none"
    )]
    pub gateway: Option<IpAddr>,
}

/// A route inside the container. Attributes that are zero count as not given, except for `table`
/// and `scope`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Route {
    /// The destination.
    #[serde(deserialize_with = "address::cidr")]
    pub dst: IpNet,
    /// The next hop; without one, the first gateway of the family.
    #[serde(
        default,
        deserialize_with = "address::optional_ip",
        skip_serializing_if = "Option::is_none"
    )]
    pub gw: Option<IpAddr>,
    /// Path MTU in bytes.
    #[serde(
        default,
        deserialize_with = "given",
        skip_serializing_if = "Option::is_none"
    )]
    pub mtu: Option<u32>,
    /// The MSS to announce, in bytes.
    #[serde(
        default,
        deserialize_with = "given",
        skip_serializing_if = "Option::is_none"
    )]
    pub advmss: Option<u32>,
    /// The kernel's metric: the lowest wins.
    #[serde(
        default,
        deserialize_with = "given",
        skip_serializing_if = "Option::is_none"
    )]
    pub priority: Option<u32>,
    /// The routing table's number.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub table: Option<u32>,
    /// The scope's number, as in `rtnetlink(7)`: 0 universe, 253 link, 254 host.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub scope: Option<u8>,
}

impl Route {
    /// A route without attributes.
    #[must_use]
    pub fn new(dst: IpNet, gw: Option<IpAddr>) -> Self {
        Self {
            dst,
            gw,
            mtu: None,
            advmss: None,
            priority: None,
            table: None,
            scope: None,
        }
    }
}

/// Resolver settings.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Dns {
    /// Servers in order of preference.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub nameservers: Vec<String>,
    /// The local domain.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub domain: String,
    /// Domains to search, in order.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub search: Vec<String>,
    /// Options for the resolver.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub options: Vec<String>,
}

impl Dns {
    /// Whether nothing is set.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }
}

/// A number that others may write as 0 where it is not given, as a plugin in Go does that knows no "absent".
fn given<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<u32>, D::Error> {
    Option::deserialize(deserializer).map(|number| number.filter(|number| *number != 0))
}

/// A number that others may write as less than 0 where it is not given.
fn index<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<u32>, D::Error> {
    match Option::<i64>::deserialize(deserializer)? {
        Some(index @ 0..) => u32::try_from(index).map(Some).map_err(D::Error::custom),
        _ => Ok(None),
    }
}

impl CniResult {
    /// The document for stdout, in the form of `version`.
    ///
    /// Fails only for 0.1.0 and 0.2.0, which cannot express a result without addresses.
    pub fn to_json(&self, version: Version) -> Result<String, Error> {
        Ok(match version {
            Version::V1_0_0 | Version::V1_1_0 => pretty(&down::Current::new(self, version)),
            Version::V0_3_0 | Version::V0_3_1 | Version::V0_4_0 => {
                pretty(&down::Versioned::new(self, version))
            }
            Version::V0_1_0 | Version::V0_2_0 => pretty(&down::PerFamily::new(self, version)?),
        })
    }
}

/// JSON as the reference library prints it: four spaces deep, no newline at the end.
pub(crate) fn pretty(document: &impl Serialize) -> String {
    let mut text = Vec::new();
    let mut serializer =
        Serializer::with_formatter(&mut text, PrettyFormatter::with_indent(b"    "));
    match document.serialize(&mut serializer) {
        Ok(()) => String::from_utf8_lossy(&text).into_owned(),
        // Our documents have text keys and finite numbers, and memory does not fail to be written.
        Err(error) => unreachable!("a document of plain values always serializes: {error}"),
    }
}

#[cfg(test)]
mod tests;
