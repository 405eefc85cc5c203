//! What can be seen of a node, a line for each thing: to compare before and after.

use std::{collections::BTreeSet, fs, path::Path, process::Command};

use serde_json::Value;
use underpass_tests::{netns::Netns, prelude::*};

use crate::cluster::member::Member;

/// Whatever is in these folders.
const FOLDERS: [&str; 4] = ["/run/opt", "/run/underpass", "/var/lib/cni", "/sys/fs/bpf"];

/// Looks at devices, addresses, routes, neighbours, entries of the forwarding database, filters, files, sysctls of those devices that stay, and tables of
/// nftables.
pub(super) fn look(member: &Member) -> Result<BTreeSet<String>> {
    let netns = member.node.netns();
    let mut seen = BTreeSet::new();
    for arguments in [
        &["link"][..],
        &["address"],
        &["-4", "rule"],
        &["-6", "rule"],
        &["neighbour", "show", "nud", "permanent"],
    ] {
        let what = arguments.join(" ");
        let list = netns.ip_json(arguments)?;
        seen.extend(each(&list).map(|one| format!("{what}: {one}")));
    }
    for family in ["-4", "-6"] {
        let list = netns.ip_json(&[family, "-d", "route", "show", "table", "all"])?;
        // Those of the kernel follow from addresses and sysctls.
        let set = each(&list).filter(|route| route["protocol"] != "kernel");
        seen.extend(set.map(|route| format!("route: {route}")));
    }
    seen.extend(forwarding_entries(netns)?);
    seen.extend(filters(netns)?);
    let tables = netns.expect(Command::new("nft").args(["list", "tables"]), &[])?;
    seen.extend(tables.lines().map(|table| format!("nft: {table}")));
    netns.run(|| -> Result<()> {
        for folder in FOLDERS {
            files(Path::new(folder), &mut seen)?;
        }
        sysctls(&mut seen)
    })?;
    Ok(seen)
}

fn each(list: &Value) -> impl Iterator<Item = &Value> {
    list.as_array().into_iter().flatten()
}

/// Those that lead somewhere: others a device has for the groups that it listens to.
fn forwarding_entries(netns: &Netns) -> Result<Vec<String>> {
    let text = netns.expect(Command::new("bridge").args(["-json", "fdb", "show"]), &[])?;
    let list: Value = serde_json::from_str(&text).context("read the JSON of bridge")?;
    let leading = each(&list).filter(|entry| entry["dst"].is_string());
    Ok(leading.map(|entry| format!("fdb: {entry}")).collect())
}

/// The places for filters, and what is there.
fn filters(netns: &Netns) -> Result<Vec<String>> {
    let tc = |arguments: &[&str]| netns.expect(Command::new("tc").args(arguments), &[]);
    let mut seen = Vec::new();
    for queue in tc(&["qdisc", "show"])?.lines() {
        let words: Vec<&str> = queue.split_whitespace().collect();
        let device = words.iter().skip_while(|word| **word != "dev").nth(1);
        let device = device.context("a queue of no device")?;
        if !queue.contains("clsact") {
            continue;
        }
        seen.push(format!("clsact: {device}"));
        for direction in ["ingress", "egress"] {
            let text = tc(&["filter", "show", "dev", device, direction])?;
            let lines = text.lines();
            seen.extend(lines.map(|line| format!("filter: {device} {direction} {line}")));
        }
    }
    Ok(seen)
}

fn files(folder: &Path, seen: &mut BTreeSet<String>) -> Result<()> {
    let Ok(entries) = fs::read_dir(folder) else {
        return Ok(());
    };
    for entry in entries {
        let path = entry?.path();
        if path.is_dir() && !path.is_symlink() {
            seen.insert(format!("folder: {}", path.display()));
            files(&path, seen)?;
        } else {
            seen.insert(format!("file: {}", path.display()));
        }
    }
    Ok(())
}

fn sysctls(seen: &mut BTreeSet<String>) -> Result<()> {
    let root = Path::new("/proc/sys/net");
    let mut keys = vec![
        "ipv4/ip_forward".to_owned(),
        "netfilter/nf_conntrack_tcp_be_liberal".to_owned(),
    ];
    for family in ["ipv4", "ipv6"] {
        for device in ["all", "default", "lo", Node::UPLINK] {
            let folder = format!("{family}/conf/{device}");
            for entry in fs::read_dir(root.join(&folder))? {
                let name = entry?.file_name();
                keys.push(format!("{folder}/{}", name.display()));
            }
        }
    }
    for key in keys {
        // Some have no value yet.
        if let Ok(value) = fs::read_to_string(root.join(&key)) {
            seen.insert(format!("sysctl: {key} {}", value.trim()));
        }
    }
    Ok(())
}
