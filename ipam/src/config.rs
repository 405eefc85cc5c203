//! The `ipam` part of a network config, and what else asks for addresses.

use std::fs;
use std::net::IpAddr;
use std::path::PathBuf;

use ipnet::IpNet;
use serde::Deserialize;
use serde_json::Value;
use underpass_cni::args::CniArgs;
use underpass_cni::{Attachment, Dns, Error, NetConf, Route, Version, address};

use crate::pool::Pool;
use crate::range::Bounds;
use crate::resolv;
use crate::shorten;

const DEFAULT_DATA_DIR: &str = "/var/lib/cni/networks";

/// The keys of `CNI_ARGS` that are understood here or by the interface plugin that calls us.
const KNOWN_ARGS: [&str; 2] = ["IP", "MAC"];

#[derive(Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
struct RawRange {
    #[serde(deserialize_with = "address::optional_network")]
    subnet: Option<IpNet>,
    #[serde(deserialize_with = "address::optional_ip")]
    range_start: Option<IpAddr>,
    #[serde(deserialize_with = "address::optional_ip")]
    range_end: Option<IpAddr>,
    #[serde(deserialize_with = "address::optional_ip")]
    gateway: Option<IpAddr>,
}

#[derive(Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
struct RawIpam {
    resolv_conf: String,
    ranges: Vec<Vec<RawRange>>,
    routes: Vec<Route>,
}

#[derive(Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
struct RawRuntime {
    ips: Vec<String>,
    ip_ranges: Vec<Vec<RawRange>>,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct RawArgs {
    ips: Vec<String>,
}

impl From<&RawRange> for Bounds {
    fn from(raw: &RawRange) -> Self {
        Self {
            subnet: raw.subnet,
            start: raw.range_start,
            end: raw.range_end,
            gateway: raw.gateway,
        }
    }
}

/// The folder that holds a folder per network: `ipam.dataDir`, or `/var/lib/cni/networks`. A relative one is taken as it is,
/// as the reference plugin does: networks that work with one would lose their leases.
pub fn data_dir(conf: &NetConf) -> Result<PathBuf, Error> {
    #[derive(Default, Deserialize)]
    #[serde(default, rename_all = "camelCase")]
    struct DataDir {
        data_dir: String,
    }
    let DataDir { data_dir } = conf.ipam()?;
    Ok(PathBuf::from(if data_dir.is_empty() {
        DEFAULT_DATA_DIR
    } else {
        &data_dir
    }))
}

/// Whether no range is known before the runtime names one at an ADD, by the capability `ipRanges`.
fn waits_for_ranges(conf: &NetConf) -> Result<bool, Error> {
    let capability = conf.get("capabilities").and_then(|all| all.get("ipRanges"));
    let is_asked_for = capability.and_then(Value::as_bool);
    Ok(is_asked_for == Some(true) && sets(conf)?.is_empty())
}

/// The pools to lease from, one address each. The order is the result's, and names
/// `last_reserved_ip.<n>`: what the runtime gave, then the range at the top level of `ipam`, then
/// `ipam.ranges`.
///
/// Code 7 if they make no sense.
pub(crate) fn pools(conf: &NetConf) -> Result<Vec<Pool>, Error> {
    let sets = sets(conf)?;
    if sets.is_empty() {
        return Err(Error::config("no IP ranges specified")
            .with_details("give ipam a \"subnet\", or \"ranges\" with one list for each family"));
    }
    let mut pools = Vec::with_capacity(sets.len());
    for (index, Set { place, ranges }) in sets.iter().enumerate() {
        let bounds: Vec<_> = ranges.iter().map(Bounds::from).collect();
        let pool = Pool::new(&bounds).map_err(|error| {
            Error::config(format!("invalid range set {index}: {error}"))
                .with_details(format!("correct {place}: {}", error.remedy()))
        })?;
        pools.push(pool);
    }
    one_per_family(conf.cni_version, &pools)?;
    for (index, pool) in pools.iter().enumerate() {
        if let Some(other) = pools[index + 1..]
            .iter()
            .position(|other| pool.overlaps(other))
        {
            let other = index + 1 + other;
            return Err(
                Error::config(format!("range set {index} overlaps with {other}")).with_details(
                    format!(
                        "{} has {}, and {} has {}: no address may be in both",
                        sets[index].place,
                        shorten::part(pool),
                        sets[other].place,
                        shorten::part(&pools[other])
                    ),
                ),
            );
        }
    }
    Ok(pools)
}

/// The pools that are known before an ADD: none where the runtime names them. Code 7 if they make no sense.
pub fn known_pools(conf: &NetConf) -> Result<Vec<Pool>, Error> {
    if waits_for_ranges(conf)? {
        return Ok(Vec::new());
    }
    pools(conf)
}

/// A range set as it is written.
struct Set {
    /// Where it is written, for messages: sets are counted over all places.
    place: String,
    ranges: Vec<RawRange>,
}

impl Set {
    /// The sets of a list that is written at `key`.
    fn list(key: &str, sets: Vec<Vec<RawRange>>) -> impl Iterator<Item = Self> {
        sets.into_iter()
            .enumerate()
            .map(move |(index, ranges)| Self {
                place: format!("{key}[{index}]"),
                ranges,
            })
    }
}

/// All range sets.
fn sets(conf: &NetConf) -> Result<Vec<Set>, Error> {
    if conf.get("ipam").is_none() {
        return Err(Error::config("IPAM config missing 'ipam' key")
            .with_details("give the network an \"ipam\" with a \"subnet\", or with \"ranges\""));
    }
    let runtime: RawRuntime = conf.runtime()?;
    let single: RawRange = conf.ipam()?;
    let ipam: RawIpam = conf.ipam()?;
    let mut sets: Vec<_> = Set::list("runtimeConfig.ipRanges", runtime.ip_ranges).collect();
    if single.subnet.is_some() {
        sets.push(Set {
            place: "the range at the top level of ipam".to_owned(),
            ranges: vec![single],
        });
    }
    sets.extend(Set::list("ipam.ranges", ipam.ranges));
    Ok(sets)
}

/// The results of 0.1.0 and 0.2.0 have room for one address of each family.
fn one_per_family(version: Version, pools: &[Pool]) -> Result<(), Error> {
    let v4 = pools.iter().filter(|pool| pool.is_ipv4()).count();
    if version < Version::V0_3_0 && (v4 > 1 || pools.len() - v4 > 1) {
        return Err(Error::config(format!(
            "CNI version {version} does not support more than 1 address per family"
        ))
        .with_details(
            "set cniVersion to 0.3.0 or later, or name one range set of each family at most",
        ));
    }
    Ok(())
}

/// The addresses that were asked for: `CNI_ARGS`, then `args.cni.ips`, then `runtimeConfig.ips`;
/// each once. A prefix length is accepted and ignored, the range has its own.
pub(crate) fn requested(conf: &NetConf, attachment: &Attachment) -> Result<Vec<IpAddr>, Error> {
    let args = CniArgs::parse(&attachment.args)?;
    args.require_known(&KNOWN_ARGS)?;
    let structured: RawArgs = conf.args_cni()?;
    let runtime: RawRuntime = conf.runtime()?;
    let from_args = args
        .get("IP")
        .filter(|text| !text.is_empty())
        .map(str::to_owned);
    let texts = [
        ("IP of CNI_ARGS", Vec::from_iter(from_args)),
        ("args.cni.ips", structured.ips),
        ("runtimeConfig.ips", runtime.ips),
    ];
    let mut requested = Vec::new();
    for (place, texts) in &texts {
        for text in texts {
            let ip = address_in(text, place)?;
            if !requested.contains(&ip) {
                requested.push(ip);
            }
        }
    }
    Ok(requested)
}

/// The address in a text that was found at `place`.
fn address_in(text: &str, place: &str) -> Result<IpAddr, Error> {
    let bare = address::parse_cidr(text).map(|net| net.addr());
    bare.or_else(|| address::parse_ip(text)).ok_or_else(|| {
        Error::config(format!("cannot understand ip: {}", shorten::part(text))).with_details(
            format!("{place} must have addresses such as 10.0.0.5 or fd00::5"),
        )
    })
}

/// What goes to the result as it is: routes, and the settings of `resolvConf`.
pub(crate) fn routes_and_dns(conf: &NetConf) -> Result<(Vec<Route>, Dns), Error> {
    let ipam: RawIpam = conf.ipam()?;
    if ipam.resolv_conf.is_empty() {
        return Ok((ipam.routes, Dns::default()));
    }
    let text = fs::read(&ipam.resolv_conf).map_err(|error| {
        Error::io(
            format!(
                "cannot read resolvConf {}",
                shorten::part(&ipam.resolv_conf)
            ),
            &error,
        )
        .with_details("set ipam.resolvConf to a file that can be read, or take it out")
    })?;
    // Comments are written in any encoding.
    Ok((ipam.routes, resolv::parse(&String::from_utf8_lossy(&text))))
}

#[cfg(test)]
mod tests;
