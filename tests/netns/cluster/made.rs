//! All that an agent has made of a node, and all that it should have made: a line for each thing, and two where something is there twice.

use std::process::Command;

use serde_json::Value;
use underpass_tests::prelude::*;

use super::{
    fixture::Cluster,
    member::{Member, TUNNEL},
};

/// What the kernel says of an address that stays until somebody removes it, in seconds.
const FOR_EVER: u32 = u32::MAX;

/// What the kernel says of the entries of the VXLAN device's forwarding database.
fn forwarding(member: &Member) -> Result<Vec<Value>> {
    let mut command = Command::new("bridge");
    command.args(["-json", "fdb", "show", "dev", TUNNEL]);
    let text = member.node.netns().expect(&mut command, &[])?;
    serde_json::from_str(&text).context("a list")
}

/// What `ip -json` says, as a list.
fn list(member: &Member, arguments: &[&str]) -> Result<Vec<Value>> {
    let said = member.node.netns().ip_json(arguments)?;
    Ok(said.as_array().context("a list")?.clone())
}

/// The agent's routes of a family.
fn routes(member: &Member, family: Family) -> Result<Vec<Value>> {
    let family = if family == V4 { "-4" } else { "-6" };
    list(member, &[family, "-d", "route", "show", "proto", "117"])
}

/// The addresses of the VXLAN device, without those that the kernel gives any device by itself.
fn addresses(member: &Member) -> Result<Vec<Value>> {
    let device = list(member, &["address", "show", "dev", TUNNEL])?;
    let device = device.first().context("a device")?;
    let mut addresses = device["addr_info"].as_array().context("a list")?.clone();
    addresses.retain(|address| address["scope"] != "link");
    Ok(addresses)
}

/// The neighbours on the VXLAN device that somebody has made.
fn neighbours(member: &Member) -> Result<Vec<Value>> {
    list(
        member,
        &["neighbour", "show", "dev", TUNNEL, "nud", "permanent"],
    )
}

/// All of it, with each detail: what is the same before and after.
pub(super) fn all(member: &Member) -> Result<Vec<String>> {
    let mut lines = Vec::new();
    for family in Family::BOTH {
        let routes = routes(member, family)?;
        lines.extend(routes.iter().map(|route| format!("route {route}")));
    }
    let devices = list(member, &["-d", "link", "show", "dev", TUNNEL])?;
    let device = devices.first().context("a device")?;
    lines.extend(
        ["address", "mtu", "flags", "linkinfo"].map(|key| format!("{key} {}", device[key])),
    );
    for address in addresses(member)? {
        lines.push(format!("{}/{}", address["local"], address["prefixlen"]));
    }
    lines.extend(neighbours(member)?.iter().map(Value::to_string));
    lines.extend(forwarding(member)?.iter().map(Value::to_string));
    lines.sort();
    Ok(lines)
}

/// All of it, in the words of [`should_be`].
pub(super) fn is(member: &Member) -> Result<Vec<String>> {
    fn text<'a>(of: &'a Value, key: &str) -> &'a str {
        of[key].as_str().unwrap_or("?")
    }
    let mut lines = Vec::new();
    for family in Family::BOTH {
        for route in routes(member, family)? {
            let (to, device) = (text(&route, "dst"), text(&route, "dev"));
            lines.push(match route["gateway"].as_str() {
                _ if route["type"] == "unreachable" => format!("{to} unreachable"),
                Some(via) => format!("{to} via {via} dev {device}"),
                None => format!("{to} dev {device}"),
            });
        }
    }
    for address in addresses(member)? {
        lines.push(address_line(text(&address, "local")));
    }
    for neighbour in neighbours(member)? {
        let (address, mac) = (text(&neighbour, "dst"), text(&neighbour, "lladdr"));
        lines.push(format!("{address} is {mac}"));
    }
    for entry in forwarding(member)? {
        let (mac, outside) = (text(&entry, "mac"), text(&entry, "dst"));
        lines.push(format!("{mac} is at {outside}, {}", text(&entry, "state")));
    }
    lines.sort();
    Ok(lines)
}

/// How the VXLAN device's own address is said.
pub(super) fn address_line(address: &str) -> String {
    format!("{address} on {TUNNEL}")
}

/// All that a member's agent should have made, by where the others are. Those beyond the router must have their devices.
pub(super) fn should_be(cluster: &Cluster, member: &Member) -> Result<Vec<String>> {
    let mut lines = Vec::new();
    for family in Family::BOTH {
        let own = member.tunnel_address(family)?;
        lines.push(address_line(&own.to_string()));
        let all = cluster.members.iter();
        lines.extend(all.map(|other| other.route(family, member)));
    }
    let members = cluster.members.iter();
    for other in members.filter(|other| other.link != member.link) {
        let device = list(other, &["link", "show", "dev", TUNNEL])?;
        let mac = device[0]["address"].as_str().context("a MAC")?;
        for family in Family::BOTH {
            let gateway = other.tunnel_address(family)?;
            lines.push(format!("{gateway} is {mac}"));
            if family == V6 {
                lines.push(format!("{gateway} dev {TUNNEL}"));
            }
        }
        let outside = other.address(other.outside);
        lines.push(format!("{mac} is at {outside}, permanent"));
    }
    lines.sort();
    Ok(lines)
}

/// Fails if there is not exactly what these lines say.
pub(super) fn expect(member: &Member, expected: &[String]) -> Result<()> {
    let there = is(member)?;
    ensure!(
        there == expected,
        "{there:#?} instead of {expected:#?}; the agent of {} said\n{}",
        member.name,
        member.log()?
    );
    Ok(())
}

/// Fails if anything of it would go by itself one day.
pub(super) fn lasts(member: &Member) -> Result<()> {
    for family in Family::BOTH {
        let routes = routes(member, family)?;
        ensure!(!routes.is_empty(), "no route of {family:?}");
        for route in routes {
            ensure!(route.get("expires").is_none(), "{route}");
        }
    }
    for address in addresses(member)? {
        for key in ["valid_life_time", "preferred_life_time"] {
            ensure!(address[key] == FOR_EVER, "{address}");
        }
    }
    // What the kernel finds by itself, and so forgets, is here as well.
    for neighbour in list(member, &["neighbour", "show", "dev", TUNNEL])? {
        let state = neighbour["state"].as_array().context("a state")?;
        ensure!(state.len() == 1 && state[0] == "PERMANENT", "{neighbour}");
    }
    for entry in forwarding(member)? {
        ensure!(entry["state"] == "permanent", "{entry}");
    }
    Ok(())
}
