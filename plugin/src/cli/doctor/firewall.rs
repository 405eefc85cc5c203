//! Whether the node's firewall may drop what containers send to the world, and what comes back: no rule at the hook `forward`
//! accepts it, and then it is dropped.
//!
//! The rules are read by the commands `nft` and `iptables`, and asked about two packets of each container: TCP to the world at
//! large that begins, and its answer. A rule with a condition that can't be judged counts as one that may accept, and never as
//! one that drops; so what is found is likely, and what is not found may be there all the same.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
    path::Path,
};

use ipnet::IpNet;
use serde_json::Value;

use super::{Diagnosis, Node, Report, networks::calls_us, some};
use crate::error::Error;

pub(in crate::cli) mod command;
mod iptables;
mod nft;
mod rule;

use command::Answer;
use rule::{Family, Packet, Ruleset, Way};

/// In place of a container's device, where there are no containers yet: like those that an ADD makes.
const ANY_POD: &str = "veth0123456789a";
const ID: &str = "forward-policy";

/// An address of a container, or one that a container may get.
#[derive(Clone, PartialEq, Eq, Debug)]
struct Pod {
    address: IpAddr,
    device: String,
    /// The range that the address is from.
    range: IpNet,
}

pub(super) fn check(node: &Node<'_>, report: &mut Report) -> Result<(), Error> {
    let pods = pods(node);
    if pods.is_empty() {
        return Ok(());
    }
    let uplinks = ways_out(node)?;
    let mut rulesets = Vec::new();
    let mut not_checked = |why: String| report.not_checked(ID, why);
    let mut iptables_own = Vec::new();
    for (family, program, legacy) in [
        (Family::V4, "iptables", command::LEGACY4),
        (Family::V6, "ip6tables", command::LEGACY6),
    ] {
        match command::iptables(program, Path::new(legacy)) {
            Answer::Text(text) => {
                rulesets.push(iptables::parse(family, program, &text));
                iptables_own.push(family);
            }
            Answer::Absent => {}
            Answer::Unknown(why) => not_checked(why),
        }
    }
    match command::nft(&["-j", "list", "ruleset"]) {
        Answer::Text(text) => match nft::parse(&text, &iptables_own) {
            Ok(ruleset) => rulesets.push(ruleset),
            Err(error) => not_checked(format!("the answer of nft is no JSON: {error}")),
        },
        Answer::Absent if iptables_own.is_empty() => {
            not_checked("there is neither nft nor iptables to ask for rules".to_owned());
        }
        Answer::Absent => not_checked("there is no nft to ask for rules but iptables'".to_owned()),
        Answer::Unknown(why) => not_checked(why),
    }
    for ruleset in &rulesets {
        report.add(dropped(ruleset, &pods, &uplinks));
    }
    Ok(())
}

/// Names the uplinks; where nothing is loaded yet, the devices that default routes lead by.
fn ways_out(node: &Node<'_>) -> Result<Vec<String>, Error> {
    if !node.uplinks.is_empty() {
        let names = node.uplinks.iter().map(|uplink| uplink.name.clone());
        return Ok(names.collect());
    }
    let routes = node.netlink.default_routes()?;
    let names = routes.iter().filter_map(|route| node.name(route.index));
    Ok(names.map(str::to_owned).collect())
}

/// Lists the containers' addresses, or one of each range that our networks give addresses from.
fn pods(node: &Node<'_>) -> Vec<Pod> {
    let pods = node.endpoints.iter().filter_map(|(address, endpoint)| {
        let prefix = u8::try_from(endpoint.prefix_len).ok()?;
        let range = IpNet::new(*address, prefix).ok()?.trunc();
        Some(Pod {
            address: *address,
            device: node.name(endpoint.ifindex)?.to_owned(),
            range,
        })
    });
    let pods: Vec<_> = pods.collect();
    if !pods.is_empty() {
        return pods;
    }
    let networks = node.networks.iter().flatten();
    networks
        .filter(|network| calls_us(network))
        .flat_map(|network| ranges(&network.plugins()))
        .filter_map(|range| {
            Some(Pod {
                address: range.hosts().next()?,
                device: ANY_POD.to_owned(),
                range,
            })
        })
        .collect()
}

/// Lists the ranges of a network, unless a plugin in its chain lets each container pass.
fn ranges(plugins: &[&serde_json::Map<String, Value>]) -> BTreeSet<IpNet> {
    let firewall = |plugin: &&serde_json::Map<String, Value>| {
        plugin.get("type").and_then(Value::as_str) == Some("firewall")
    };
    let mut ranges = BTreeSet::new();
    if plugins.iter().any(firewall) {
        return ranges;
    }
    for plugin in plugins {
        let Some(ipam) = plugin.get("ipam") else {
            continue;
        };
        let sets = ipam.get("ranges").and_then(Value::as_array);
        let sets = sets.into_iter().flatten().filter_map(Value::as_array);
        for range in sets.flatten().chain([ipam]) {
            let subnet = range.get("subnet").and_then(Value::as_str);
            ranges.extend(subnet.and_then(|subnet| subnet.parse::<IpNet>().ok()));
        }
    }
    ranges
}

/// What a chain does to the containers of a family.
#[derive(Default)]
struct Victims {
    ranges: BTreeSet<IpNet>,
    addresses: BTreeSet<IpAddr>,
    out: bool,
    back: bool,
}

/// Asks each chain at the hook about each container, and says which may be dropped where.
fn dropped(ruleset: &Ruleset, pods: &[Pod], uplinks: &[String]) -> Vec<Diagnosis> {
    let mut victims: BTreeMap<(usize, Family), Victims> = BTreeMap::new();
    for pod in pods {
        for way in [Way::Out, Way::Back] {
            let packet = Packet {
                way,
                pod: pod.address,
                device: &pod.device,
                uplinks,
            };
            for chain in ruleset.droppers(&packet) {
                let found = victims.entry((chain, packet.family())).or_default();
                found.ranges.insert(pod.range);
                found.addresses.insert(pod.address);
                found.out |= way == Way::Out;
                found.back |= way == Way::Back;
            }
        }
    }
    victims
        .iter()
        .map(|((chain, family), victims)| describe(ruleset, *chain, *family, victims))
        .collect()
}

fn describe(ruleset: &Ruleset, chain: usize, family: Family, victims: &Victims) -> Diagnosis {
    let what = match (victims.out, victims.back) {
        (true, false) => "what containers send to the world",
        (false, true) => "answers from the world to containers",
        _ => "what containers send to the world, and the answers",
    };
    let addresses: Vec<_> = victims.addresses.iter().map(IpAddr::to_string).collect();
    let mut fix = Vec::new();
    for range in &victims.ranges {
        for (is_asked, source) in [(victims.out, true), (victims.back, false)] {
            if is_asked {
                fix.push(ruleset.exception(chain, family, *range, source));
            }
        }
    }
    Diagnosis::error(
        ID,
        format!(
            "the firewall may drop {what}: {} has no rule that accepts it for {}",
            ruleset.title(chain),
            some(addresses.iter().map(String::as_str))
        ),
        format!(
            "{}; where a program manages the firewall, have that allow the range in both directions",
            fix.join(" && ")
        ),
    )
}

#[cfg(test)]
mod tests;
