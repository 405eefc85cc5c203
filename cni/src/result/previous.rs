//! Results that others wrote: `prevResult`, and what a delegated IPAM plugin answers.

use std::net::IpAddr;

use ipnet::IpNet;
use serde::Deserialize;
use serde_json::Value;

use super::{CniResult, Dns, IpConfig, Route};
use crate::address;
use crate::error::Error;
use crate::go_json;
use crate::version::Version;

/// `ip4` or `ip6` of 0.1.0 and 0.2.0.
#[derive(Deserialize)]
struct FamilyIp {
    #[serde(deserialize_with = "address::cidr")]
    ip: IpNet,
    #[serde(default, deserialize_with = "address::optional_ip")]
    gateway: Option<IpAddr>,
    #[serde(default)]
    routes: Vec<Route>,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct PerFamily {
    ip4: Option<FamilyIp>,
    ip6: Option<FamilyIp>,
    dns: Dns,
}

impl From<PerFamily> for CniResult {
    fn from(old: PerFamily) -> Self {
        let mut result = Self {
            dns: old.dns,
            ..Self::default()
        };
        for family in [old.ip4, old.ip6].into_iter().flatten() {
            result.ips.push(IpConfig {
                interface: None,
                address: family.ip,
                gateway: family.gateway,
            });
            result.routes.extend(family.routes);
        }
        result
    }
}

/// The versions whose results may stand in a config of version `config`.
fn accepted(config: Version) -> &'static [Version] {
    match config {
        Version::V0_1_0 | Version::V0_2_0 => &[Version::V0_1_0, Version::V0_2_0],
        Version::V0_3_0 | Version::V0_3_1 | Version::V0_4_0 => {
            &[Version::V0_3_0, Version::V0_3_1, Version::V0_4_0]
        }
        Version::V1_0_0 | Version::V1_1_0 => &[Version::V1_0_0, Version::V1_1_0],
    }
}

impl CniResult {
    /// Decodes a result of any released version; without a `cniVersion` it is one of `default`.
    /// Code 6 otherwise.
    pub fn from_value(document: &Value, default: Version) -> Result<Self, Error> {
        Self::decode(document, declared(document, default)?)
    }

    /// As [`Self::from_value`], but only in a version that goes with a config of version `config`.
    pub fn from_previous(document: &Value, config: Version) -> Result<Self, Error> {
        let version = declared(document, config)?;
        let accepted = accepted(config);
        if !accepted.contains(&version) {
            let list: Vec<_> = accepted.iter().map(|version| version.as_str()).collect();
            return Err(Error::decode(format!(
                "result type supports [{}] but unmarshalled CNIVersion is {:?}",
                list.join(" "),
                version.as_str()
            ))
            .with_details(format!(
                "the config says {config}: all plugins of a chain have to answer in its cniVersion",
            )));
        }
        Self::decode(document, version)
    }

    fn decode(document: &Value, version: Version) -> Result<Self, Error> {
        let decoded = if version < Version::V0_3_0 {
            go_json::from_value::<PerFamily>(document).map(Self::from)
        } else {
            go_json::from_value(document)
        };
        decoded.map_err(|error| Error::decode(error.to_string()))
    }
}

fn declared(document: &Value, default: Version) -> Result<Version, Error> {
    #[derive(Default, Deserialize)]
    #[serde(default)]
    struct Header {
        #[serde(rename = "cniVersion")]
        cni_version: String,
    }
    let header: Header =
        go_json::from_value(document).map_err(|error| Error::decode(error.to_string()))?;
    if header.cni_version.is_empty() {
        return Ok(default);
    }
    Version::from_text(&header.cni_version).ok_or_else(|| {
        let known = Version::ALL.map(Version::as_str).join(", ");
        Error::decode(format!(
            "unsupported CNI result version {:?}",
            header.cni_version
        ))
        .with_details(format!("it must be one of {known}"))
    })
}
