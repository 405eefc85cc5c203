//! The network config on stdin.
//!
//! A [`NetConf`] holds the whole document; each accessor decodes its own part when it is asked for,
//! so that a DEL works with a config in which something it does not need is wrong.

use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value};

use crate::env::{Verb, name};
use crate::error::Error;
use crate::go_json::{self, DecodeError};
use crate::result::{CniResult, Dns};
use crate::version::{self, Version};

/// The keys of [`NetConf::valid_attachments`]: the specification's, then what its tagged text once
/// said.
const VALID_ATTACHMENTS: [&str; 2] = ["cni.dev/valid-attachments", "cni.dev/attachments"];

/// A network config, its name and version checked.
#[derive(Clone, Debug, PartialEq)]
pub struct NetConf {
    /// The version to answer in.
    pub cni_version: Version,
    /// The network's name: never empty, fit for a file name.
    pub name: String,
    /// `type`: the plugin's name; empty when left out.
    pub plugin_type: String,
    raw: Map<String, Value>,
}

/// Which attachment: a container and the interface in it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Deserialize)]
#[serde(default)]
pub struct AttachmentId {
    /// The container's id.
    #[serde(rename = "containerID")]
    pub container_id: String,
    /// The interface's name in the container.
    pub ifname: String,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct Header {
    #[serde(rename = "cniVersion")]
    cni_version: String,
    name: String,
    r#type: String,
}

/// A document whose name is checked and whose version is not.
pub(crate) struct Document {
    header: Header,
    raw: Map<String, Value>,
}

impl Document {
    /// Decodes stdin. Code 6 if it is not a JSON object, 7 if the network has no usable name.
    pub(crate) fn parse(stdin: &[u8]) -> Result<Self, Error> {
        let undecodable = |reason: &dyn std::fmt::Display| {
            Error::decode(format!("error unmarshall network config: {reason}"))
        };
        if stdin.trim_ascii().is_empty() {
            return Err(undecodable(
                &"nothing came on standard input, where the runtime has to send it",
            ));
        }
        let value: Value = serde_json::from_slice(stdin)
            .map_err(|error| undecodable(&format_args!("it is no JSON: {error}")))?;
        let header: Header = go_json::from_value(&value).map_err(|error| undecodable(&error))?;
        name::network(&header.name)?;
        let Value::Object(raw) = value else {
            return Err(undecodable(&DecodeError::expected("an object")));
        };
        Ok(Self { header, raw })
    }

    /// Settles the version.
    pub(crate) fn negotiate(self, verb: Verb, supported: &[Version]) -> Result<NetConf, Error> {
        Ok(NetConf {
            cni_version: version::negotiate(verb, &self.header.cni_version, supported)?,
            name: self.header.name,
            plugin_type: self.header.r#type,
            raw: self.raw,
        })
    }

    /// The version to report an error in.
    pub(crate) fn version(&self) -> Option<Version> {
        Version::from_text(&self.header.cni_version)
    }
}

impl NetConf {
    /// Decodes a config as an ADD would, for any released version.
    pub fn parse(document: &[u8]) -> Result<Self, Error> {
        Document::parse(document)?.negotiate(Verb::Add, &Version::ALL)
    }

    /// The whole document as it came.
    #[must_use]
    pub fn raw(&self) -> &Map<String, Value> {
        &self.raw
    }

    /// The value of a top-level key, in any case; null counts as missing.
    #[must_use]
    pub fn get(&self, key: &str) -> Option<&Value> {
        go_json::get(&self.raw, key)
    }

    /// The plugin's own keys, from the top level of the document (see [`crate::go_json`] for how
    /// `T` looks).
    pub fn plugin<T: DeserializeOwned>(&self) -> Result<T, Error> {
        go_json::from_map(&self.raw).map_err(|error| invalid(&error))
    }

    /// The keys of `runtimeConfig`; missing means all defaults.
    pub fn runtime<T: DeserializeOwned>(&self) -> Result<T, Error> {
        self.object("runtimeConfig")
    }

    /// The keys of `ipam`; missing means all defaults.
    pub fn ipam<T: DeserializeOwned>(&self) -> Result<T, Error> {
        self.object("ipam")
    }

    /// The keys of `args.cni`; missing means all defaults.
    pub fn args_cni<T: DeserializeOwned>(&self) -> Result<T, Error> {
        let cni = match self.get("args") {
            None => None,
            Some(Value::Object(args)) => go_json::get(args, "cni"),
            Some(other) => {
                return Err(invalid(
                    &DecodeError::expected("an object").under("args", other),
                ));
            }
        };
        let cni = cni.unwrap_or(&Value::Null);
        go_json::from_value(cni).map_err(|error| invalid(&error.under("args.cni", cni)))
    }

    /// `ipam.type`; nothing when the network has no IPAM (an L2 network).
    pub fn ipam_type(&self) -> Result<Option<String>, Error> {
        #[derive(Default, Deserialize)]
        #[serde(default)]
        struct IpamType {
            r#type: String,
        }
        let ipam: IpamType = self.ipam()?;
        Ok(Some(ipam.r#type).filter(|kind| !kind.is_empty()))
    }

    /// The config's own `dns`. Present only if it sets something: then it replaces the IPAM's as a
    /// whole. An empty list sets something, null does not.
    pub fn dns(&self) -> Result<Option<Dns>, Error> {
        #[derive(Default, Deserialize)]
        #[serde(default)]
        struct Given {
            nameservers: Option<Vec<String>>,
            domain: String,
            search: Option<Vec<String>>,
            options: Option<Vec<String>>,
        }
        let given: Given = self.object("dns")?;
        let lists = [&given.nameservers, &given.search, &given.options];
        if given.domain.is_empty() && lists.into_iter().all(Option::is_none) {
            return Ok(None);
        }
        Ok(Some(Dns {
            nameservers: given.nameservers.unwrap_or_default(),
            domain: given.domain,
            search: given.search.unwrap_or_default(),
            options: given.options.unwrap_or_default(),
        }))
    }

    /// `prevResult`, in whichever version the specification accepts for this config's version.
    pub fn prev_result(&self) -> Result<Option<CniResult>, Error> {
        self.get("prevResult")
            .map(|value| CniResult::from_previous(value, self.cni_version))
            .transpose()
            .map_err(|error| error.context("could not parse prevResult"))
    }

    /// The attachments that a GC must keep, and no others; `None`, where it is not said.
    ///
    /// A missing key is an error. Null says nothing: a runtime in Go writes it for no containers, and CRI-O also for a network
    /// whose containers it has not attached itself, as behind Multus.
    pub fn valid_attachments(&self) -> Result<Option<Vec<AttachmentId>>, Error> {
        let Some((key, value)) = VALID_ATTACHMENTS
            .into_iter()
            .find_map(|key| self.raw.get_key_value(key))
        else {
            return Err(Error::config(format!(
                "missing {:?}: GC needs the list of attachments to keep; nothing was removed",
                VALID_ATTACHMENTS[0]
            )));
        };
        if value.is_null() {
            return Ok(None);
        }
        let list: Vec<AttachmentId> =
            go_json::from_value(value).map_err(|error| invalid(&error.under(key, value)))?;
        // What is misspelt or missing would name another attachment, and this one would be removed.
        let nameless = |id: &AttachmentId| id.container_id.is_empty() || id.ifname.is_empty();
        match list.iter().position(nameless) {
            Some(index) => Err(Error::config(format!(
                "invalid {key:?}: entry {index} has no containerID or no ifname; nothing was removed"
            ))),
            None => Ok(Some(list)),
        }
    }

    fn object<T: DeserializeOwned>(&self, key: &str) -> Result<T, Error> {
        let value = self.get(key).unwrap_or(&Value::Null);
        go_json::from_value(value).map_err(|error| invalid(&error.under(key, value)))
    }
}

fn invalid(error: &DecodeError) -> Error {
    Error::decode(format!("failed to load netconf: {error}"))
}

#[cfg(test)]
mod tests;
