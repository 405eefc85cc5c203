//! `underpass metrics`: one picture of the node in numbers, as `OpenMetrics` text for whoever collects them.

use std::{io, net::IpAddr, path::Path};

use underpass_abi::{
    ABI,
    counter::{Counter, Kind as Counted},
    endpoint::device,
};
use underpass_dataplane::{Maps, Pins, attach, object};
use underpass_ipam::Usage;
use underpass_netlink::Netlink;

use self::openmetrics::{Exposition, Kind, Seconds};
use super::{Failure, folders::NetDir, networks::Networks, status::port::State};
use crate::{error::Error, left_behind::left_behind, step::lease, stopwatch::Times};

mod openmetrics;

/// Begins the names of counters of drops, which have a family of their own.
const DROP: &str = "drop_";

pub(super) fn run(root: &Path, net_dir: &NetDir, out: &mut impl io::Write) -> Result<(), Failure> {
    let text = collect(root, net_dir)?;
    out.write_all(text.as_bytes())?;
    Ok(())
}

/// All or nothing: half a text would be half a truth.
fn collect(root: &Path, net_dir: &NetDir) -> Result<String, Error> {
    let mut text = Exposition::default();
    let maps = Maps::open_existing(&Pins::at(root))?;
    text.family("underpass_build", Kind::Info, "What this executable is.")
        .sample(
            &[
                ("version", env!("CARGO_PKG_VERSION")),
                ("layout", &ABI.to_string()),
                ("build", &format!("{:08x}", object::build())),
            ],
            1,
        );
    text.single(
        "underpass_loaded",
        Kind::Gauge,
        "1 if the programs are loaded and pinned, else 0.",
        u8::from(maps.is_some()),
    );
    let findings = left_behind(root, maps.as_ref(), |_| true)?;
    text.single(
        "underpass_left_behind",
        Kind::Gauge,
        "Devices of containers that the maps do not know: recreate the containers.",
        findings.iter().count(),
    );
    pools(net_dir, root, &mut text)?;
    if let Some(maps) = maps {
        let loaded_by = maps.node()?.build;
        text.single(
            "underpass_other_build_loaded",
            Kind::Gauge,
            "1 if another build has loaded the programs, else 0.",
            u8::from(loaded_by != object::build()),
        );
        containers(&maps, &mut text)?;
        flows(&maps, &mut text)?;
        counters(&maps, &mut text)?;
        uplinks(&maps, &mut text)?;
    }
    last_add(root, &mut text);
    Ok(text.finish())
}

/// The pools of the networks in the folder. What is wrong with one is said on stderr, and counted.
fn pools(net_dir: &NetDir, root: &Path, text: &mut Exposition) -> Result<(), Error> {
    let networks = Networks::read(net_dir, root)?;
    let mut usages: Vec<(&str, Usage)> = Vec::new();
    let mut broken = 0;
    for network in &networks.ours {
        let name = network.conf.name.as_str();
        match lease::usage(&network.conf) {
            Ok(pools) => usages.extend(pools.into_iter().map(|pool| (name, pool))),
            // It is among those that are broken.
            Err(_) if network.is_refused => {}
            Err(error) => {
                tracing::warn!("the pools of network {name:?} are not known: {error}");
                broken += 1;
            }
        }
    }
    // Another file may have the same network: it is the same folder of leases.
    let key = |(name, pool): &(&str, Usage)| ((*name).to_owned(), pool.ranges.clone());
    usages.sort_by_key(key);
    usages.dedup_by_key(|usage| key(usage));
    let mut size = text.family(
        "underpass_pool_addresses",
        Kind::Gauge,
        "Addresses that a network's pool can lease.",
    );
    for (network, pool) in &usages {
        size.sample(&[("network", network), ("pool", &pool.ranges)], pool.size);
    }
    let mut in_use = text.family(
        "underpass_pool_addresses_in_use",
        Kind::Gauge,
        "Addresses that a network's pool has leased.",
    );
    for (network, pool) in &usages {
        in_use.sample(&[("network", network), ("pool", &pool.ranges)], pool.in_use);
    }
    for error in networks.broken() {
        tracing::warn!("{error}");
        broken += 1;
    }
    text.single(
        "underpass_broken_networks",
        Kind::Gauge,
        "Files of networks that can't be read or used; stderr names them.",
        broken,
    );
    Ok(())
}

fn containers(maps: &Maps, text: &mut Exposition) -> Result<(), Error> {
    text.single(
        "underpass_attachments",
        Kind::Gauge,
        "Attachments of containers, those whose DEL was lost included.",
        maps.attachments()?.len(),
    );
    let endpoints = maps.endpoints()?;
    let mut family = text.family(
        "underpass_endpoints",
        Kind::Gauge,
        "Addresses of containers.",
    );
    let v4 = endpoints.iter().filter(|(addr, _)| addr.is_ipv4()).count();
    for (name, count) in [("ipv4", v4), ("ipv6", endpoints.len() - v4)] {
        family.sample(&[("family", name)], count);
    }
    let ports = State::of_all(maps)?;
    let mut family = text.family(
        "underpass_host_ports",
        Kind::Gauge,
        "Mappings of host ports, by address and protocol; one that waits serves when the newer ones are gone, a closed one is of a port that tunnels have.",
    );
    for state in State::ALL {
        let count = ports.iter().filter(|(_, _, one)| *one == state).count();
        family.sample(&[("state", state.into())], count);
    }
    Ok(())
}

fn flows(maps: &Maps, text: &mut Exposition) -> Result<(), Error> {
    let tables = [
        ("ipv4", maps.count_flows4()?),
        ("ipv6", maps.count_flows6()?),
    ];
    let mut family = text.family(
        "underpass_flows",
        Kind::Gauge,
        "Entries of the tables of flows, by the way that their packets take; those whose time is over count until they are removed.",
    );
    for (name, count) in tables {
        family.sample(&[("family", name), ("path", "bypass")], count.bypass);
        family.sample(&[("family", name), ("path", "stack")], count.stack);
    }
    let node = maps.node()?;
    let mut family = text.family(
        "underpass_flow_table_entries",
        Kind::Gauge,
        "Entries that the tables of flows have room for.",
    );
    for (name, entries) in [("ipv4", node.flows), ("ipv6", node.flows6())] {
        family.sample(&[("family", name)], entries);
    }
    Ok(())
}

fn counters(maps: &Maps, text: &mut Exposition) -> Result<(), Error> {
    let counters = maps.counters()?;
    let mut family = text.family(
        "underpass_packets",
        Kind::Counter,
        "What happened to packets and flows, by the names that `underpass status` has.",
    );
    for (counter, count) in &counters {
        if counter.kind() == Counted::Event {
            family.sample(&[("event", counter.name())], count);
        }
    }
    let mut family = text.family(
        "underpass_drops",
        Kind::Counter,
        "Packets that a program dropped, by reason.",
    );
    for (counter, count) in &counters {
        if counter.kind() == Counted::Drop {
            let name = counter.name();
            family.sample(
                &[("reason", name.strip_prefix(DROP).unwrap_or(name))],
                count,
            );
        }
    }
    let sum = |wanted: &[Counter]| -> u64 {
        let counted = counters.iter();
        counted
            .filter(|(counter, _)| wanted.contains(counter))
            .map(|(_, count)| count)
            .sum()
    };
    let mut family = text.family(
        "underpass_bypass_packets",
        Kind::Counter,
        "Packets of flows that take the bypass: those that went past the stack, and those that went through it all the same.",
    );
    let bypassed = [Counter::BypassPeer, Counter::BypassWire, Counter::BypassXdp];
    family.sample(&[("path", "bypass")], sum(&bypassed));
    family.sample(
        &[("path", "stack")],
        sum(&[Counter::Fed, Counter::CameBack]),
    );
    Ok(())
}

fn uplinks(maps: &Maps, text: &mut Exposition) -> Result<(), Error> {
    let node = Netlink::open()?;
    let devices: Vec<_> = maps
        .devices()?
        .into_iter()
        .filter(|(_, entry)| entry.flags & (device::POD | device::LOOPBACK) == 0)
        .collect();
    text.single(
        "underpass_uplinks",
        Kind::Gauge,
        "Devices that lead to the world.",
        devices.len(),
    );
    let links = node.links_where(|index| devices.iter().any(|(known, _)| *known == index))?;
    let wanted: Vec<_> = devices
        .iter()
        .map(|(index, entry)| (*index, attach::places(entry.flags)))
        .collect();
    let missing = attach::missing(&node, maps.pins(), &wanted)?;
    let mut programs = text.family(
        "underpass_uplink_missing_programs",
        Kind::Gauge,
        "Programs that somebody took off an uplink: `underpass apply` puts them back.",
    );
    for link in &links {
        let count = missing.iter().filter(|(index, _)| *index == link.index);
        programs.sample(&[("device", &link.name)], count.count());
    }
    let mut masquerade = text.family(
        "underpass_uplink",
        Kind::Info,
        "The addresses that masqueraded packets leave an uplink with.",
    );
    for link in &links {
        let Some((_, entry)) = devices.iter().find(|(index, _)| *index == link.index) else {
            continue;
        };
        let [v4, v6] = [entry.masquerade4, entry.masquerade6].map(|addr| {
            let addr = IpAddr::from(addr);
            if addr.is_unspecified() {
                String::new()
            } else {
                addr.to_string()
            }
        });
        masquerade.sample(&[("device", &link.name), ("ipv4", &v4), ("ipv6", &v6)], 1);
    }
    Ok(())
}

fn last_add(root: &Path, text: &mut Exposition) {
    let Some(times) = Times::of_last_add(root) else {
        return;
    };
    text.single(
        "underpass_last_add_duration_seconds",
        Kind::Gauge,
        "How long the last successful ADD took that made an interface.",
        Seconds(times.total_us),
    );
    let mut family = text.family(
        "underpass_last_add_seconds",
        Kind::Gauge,
        "How long each step of that ADD took.",
    );
    let mut steps: Vec<(&str, u64)> = Vec::new();
    for step in &times.steps {
        match steps.iter_mut().find(|(name, _)| *name == step.step) {
            Some((_, us)) => *us += step.us,
            None => steps.push((&step.step, step.us)),
        }
    }
    for (step, us) in steps {
        family.sample(&[("step", step)], Seconds(us));
    }
}
