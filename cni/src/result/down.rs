//! A result in the words of older versions.
//!
//! | version | interfaces | addresses | routes | `dns` |
//! |---|---|---|---|---|
//! | 1.0.0, 1.1.0 | all | all | all | left out when empty |
//! | 0.3.0 to 0.4.0 | name, mac, sandbox | all, with `version` | all | always |
//! | 0.1.0, 0.2.0 | none | the first of each family | destination and next hop, below their family's address | always |

use std::net::IpAddr;

use ipnet::IpNet;
use serde::Serialize;

use super::{CniResult, Dns, Interface, IpConfig, Route};
use crate::error::Error;
use crate::version::Version;

/// 1.0.0 and 1.1.0.
#[derive(Serialize)]
pub(super) struct Current<'a> {
    #[serde(rename = "cniVersion")]
    cni_version: Version,
    #[serde(skip_serializing_if = "Dns::is_empty")]
    dns: &'a Dns,
    #[serde(skip_serializing_if = "<[_]>::is_empty")]
    interfaces: &'a [Interface],
    #[serde(skip_serializing_if = "<[_]>::is_empty")]
    ips: &'a [IpConfig],
    #[serde(skip_serializing_if = "<[_]>::is_empty")]
    routes: &'a [Route],
}

impl<'a> Current<'a> {
    pub(super) fn new(result: &'a CniResult, cni_version: Version) -> Self {
        let CniResult {
            interfaces,
            ips,
            routes,
            dns,
        } = result;
        Self {
            cni_version,
            dns,
            interfaces,
            ips,
            routes,
        }
    }
}

/// 0.3.0 to 0.4.0.
#[derive(Serialize)]
pub(super) struct Versioned<'a> {
    #[serde(rename = "cniVersion")]
    cni_version: Version,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    interfaces: Vec<Interface>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    ips: Vec<VersionedIp<'a>>,
    #[serde(skip_serializing_if = "<[_]>::is_empty")]
    routes: &'a [Route],
    dns: &'a Dns,
}

#[derive(Serialize)]
struct VersionedIp<'a> {
    version: &'static str,
    #[serde(flatten)]
    ip: &'a IpConfig,
}

impl<'a> Versioned<'a> {
    pub(super) fn new(result: &'a CniResult, cni_version: Version) -> Self {
        let reduced = |interface: &Interface| Interface {
            name: interface.name.clone(),
            mac: interface.mac.clone(),
            sandbox: interface.sandbox.clone(),
            ..Interface::default()
        };
        let versioned = |ip: &'a IpConfig| VersionedIp {
            version: match ip.address {
                IpNet::V4(_) => "4",
                IpNet::V6(_) => "6",
            },
            ip,
        };
        Self {
            cni_version,
            interfaces: result.interfaces.iter().map(reduced).collect(),
            ips: result.ips.iter().map(versioned).collect(),
            routes: &result.routes,
            dns: &result.dns,
        }
    }
}

/// 0.1.0 and 0.2.0.
#[derive(Serialize)]
pub(super) struct PerFamily<'a> {
    #[serde(rename = "cniVersion")]
    cni_version: Version,
    #[serde(skip_serializing_if = "Option::is_none")]
    ip4: Option<FamilyIp>,
    #[serde(skip_serializing_if = "Option::is_none")]
    ip6: Option<FamilyIp>,
    dns: &'a Dns,
}

#[derive(Serialize)]
struct FamilyIp {
    ip: IpNet,
    #[serde(skip_serializing_if = "Option::is_none")]
    gateway: Option<IpAddr>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    routes: Vec<Route>,
}

impl<'a> PerFamily<'a> {
    pub(super) fn new(result: &'a CniResult, cni_version: Version) -> Result<Self, Error> {
        let family = |is_ours: fn(&IpNet) -> bool| {
            let first = result.ips.iter().find(|ip| is_ours(&ip.address))?;
            let routes = result.routes.iter().filter(|route| is_ours(&route.dst));
            Some(FamilyIp {
                ip: first.address,
                gateway: first.gateway,
                routes: routes
                    .map(|route| Route::new(route.dst, route.gw))
                    .collect(),
            })
        };
        let ip4 = family(|net| matches!(net, IpNet::V4(_)));
        let ip6 = family(|net| matches!(net, IpNet::V6(_)));
        if ip4.is_none() && ip6.is_none() {
            return Err(Error::internal("cannot convert: no valid IP addresses").with_details(
                format!("a result of {cni_version} needs one: give the network an ipam, or set cniVersion to 0.3.0 or later"),
            ));
        }
        Ok(Self {
            cni_version,
            ip4,
            ip6,
            dns: &result.dns,
        })
    }
}
