//! Keys of the plugin where it follows another in a chain. It serves host ports, and takes the
//! config of the reference plugin `portmap`.

use std::path::PathBuf;

use serde::Deserialize;
use serde_json::Value;
use underpass_cni::{Error, NetConf, Request};

use super::{bandwidth, port, root};
use crate::glob::Glob;

/// The name that the plugin was called by.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Name {
    /// `underpass`, or any other name: one that could also make interfaces.
    Underpass,
    /// `portmap`: one that configs of the reference plugin were written for.
    Portmap,
}

/// What a chained ADD, CHECK and STATUS need to know.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Chained {
    /// The folder on a bpffs where this node's pins are.
    pub bpf_root: PathBuf,
    /// Names of uplinks; if none are said, they are found by their addresses and routes.
    pub uplinks: Option<Vec<Glob>>,
    /// Host ports that lead to the container.
    pub ports: Vec<port::PortMapping>,
}

#[derive(Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
struct Keys {
    bpf_root: String,
    uplinks: Option<Vec<String>>,
    // Of the reference plugin. It has to translate the client's address where answers would not come
    // back else; here they come back by themselves.
    #[serde(rename = "snat")]
    _snat: Option<bool>,
    masq_all: bool,
    mark_masq_bit: Option<i64>,
    external_set_mark_chain: Option<String>,
    conditions_v4: Vec<String>,
    conditions_v6: Vec<String>,
    backend: String,
}

/// Keys for interfaces, which the plugin before has made already.
#[derive(Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
struct InterfaceKeys {
    ip_masq: bool,
    mtu: i64,
}

#[derive(Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
struct RuntimeKeys {
    port_mappings: Vec<port::Entry>,
    bandwidth: Option<bandwidth::Keys>,
}

impl Chained {
    /// Decodes and checks what concerns the whole network.
    pub fn of_network(conf: &NetConf, name: Name) -> Result<Self, Error> {
        let keys: Keys = conf.plugin()?;
        keys.refuse_unsupported()?;
        if name == Name::Underpass {
            refuse_interface(conf)?;
        }
        Ok(Self {
            bpf_root: root(keys.bpf_root)?,
            uplinks: keys
                .uplinks
                .map(|list| list.into_iter().map(Glob::new).collect()),
            ports: Vec::new(),
        })
    }

    /// Decodes and checks everything that concerns one attachment.
    pub fn of_attachment(request: &Request, name: Name) -> Result<Self, Error> {
        let mut decoded = Self::of_network(&request.conf, name)?;
        let runtime: RuntimeKeys = request.conf.runtime()?;
        if name == Name::Portmap {
            for (index, entry) in runtime.port_mappings.iter().enumerate() {
                entry.refuse_like_portmap(index)?;
            }
        }
        decoded.ports = port::mappings(&runtime.port_mappings)?;
        if let Some(keys) = runtime.bandwidth {
            let place = "runtimeConfig.bandwidth.";
            refuse_limits(place, keys.limits(place)?)?;
        }
        Ok(decoded)
    }
}

impl Keys {
    fn refuse_unsupported(&self) -> Result<(), Error> {
        for (key, conditions) in [
            ("conditionsV4", &self.conditions_v4),
            ("conditionsV6", &self.conditions_v6),
        ] {
            if !conditions.is_empty() {
                let value = Value::from(conditions.clone());
                return Err(Error::unsupported(key, value)
                    .with_details("host ports are served without netfilter"));
            }
        }
        if let Some(chain) = self
            .external_set_mark_chain
            .as_ref()
            .filter(|c| !c.is_empty())
        {
            return Err(Error::unsupported("externalSetMarkChain", chain)
                .with_details("no packet is marked, and none needs to be"));
        }
        if self.masq_all {
            return Err(Error::unsupported("masqAll", true)
                .with_details("the container always sees the client's own address"));
        }
        // Without effect, as nothing is marked; but a mistake stays one.
        if let Some(bit) = self.mark_masq_bit.filter(|bit| !(0..32).contains(bit)) {
            return Err(Error::config(format!(
                "MasqMarkBit must be between 0 and 31: markMasqBit is {bit}"
            )));
        }
        if !matches!(self.backend.as_str(), "" | "iptables" | "nftables") {
            return Err(Error::config(format!(
                "unrecognized backend {:?}",
                self.backend
            ))
            .with_details(
                "backend must be \"iptables\" or \"nftables\", which mean the same here, or left out",
            ));
        }
        Ok(())
    }
}

/// Refuses what only the plugin that makes the interface could do.
fn refuse_interface(conf: &NetConf) -> Result<(), Error> {
    let keys: InterfaceKeys = conf.plugin()?;
    if keys.ip_masq {
        return Err(late("ipMasq", true));
    }
    if keys.mtu != 0 {
        return Err(late("mtu", keys.mtu));
    }
    if let Some(ipam) = conf.ipam_type()? {
        return Err(late("ipam.type", ipam));
    }
    match bandwidth::of_network(conf)? {
        Some(limits) => refuse_limits("", limits),
        None => Ok(()),
    }
}

/// Refuses limits; `place` is what stands before their keys.
fn refuse_limits(place: &str, limits: bandwidth::Bandwidth) -> Result<(), Error> {
    match limits.first() {
        Some((key, limit)) => Err(Error::unsupported(&format!("{place}{key}"), limit.rate).with_details(
            "after another plugin of the chain, which made the interface, only host ports are served; the same executable \
             limits under the name `bandwidth`: add { \"type\": \"bandwidth\" } with these keys to the chain",
        )),
        None => Ok(()),
    }
}

fn late(key: &str, value: impl std::fmt::Display) -> Error {
    Error::unsupported(key, value).with_details(
        "after another plugin of the chain, which made the interface, only host ports are served",
    )
}

#[cfg(test)]
mod tests;
