//! A folder of leases in any state, and any calls on it: an address has one owner, a foreign lease stays, and no state is fatal.
#![no_main]

use std::{collections::BTreeMap, ffi::OsString, fs, net::IpAddr, path::Path};

use libfuzzer_sys::{Corpus, arbitrary::Unstructured, fuzz_target};
use serde_json::{Value, json};
use underpass_cni::{About, Version, serve::answer};
use underpass_ipam::{HostLocal, Owner};

const NETWORK: &str = "net";
/// Names that mean something, or nearly so, in a folder of leases.
const NAMES: [&str; 16] = [
    "10.0.0.1",
    "10.0.0.2",
    "10.0.0.3",
    "10.0.0.4",
    "10.0.0.5",
    "10.0.0.6",
    "10.0.0.7",
    "fd00::2",
    "fd00::3",
    "FD00::4",
    "010.0.0.3",
    "last_reserved_ip.0",
    "last_reserved_ip.1",
    "lock",
    "nonsense",
    "10.0.0.300",
];
const CONTENTS: [&str; 12] = [
    "",
    "c0\r\neth0",
    "c1\r\neth0",
    "c0",
    "c1",
    " c0\r\neth0\n",
    "c0\r\neth1",
    "\r\n",
    "10.0.0.4",
    "fd00::3",
    "\u{fffd}",
    "c0\neth0",
];

fuzz_target!(|input: &[u8]| -> Corpus {
    let mut input = Unstructured::new(input);
    match play(&mut input) {
        Ok(()) => Corpus::Keep,
        Err(_) => Corpus::Reject,
    }
});

fn play(input: &mut Unstructured<'_>) -> libfuzzer_sys::arbitrary::Result<()> {
    // In memory where that is possible: most of the time is spent on making files.
    let folder = tempfile::tempdir_in("/dev/shm")
        .or_else(|_| tempfile::tempdir())
        .expect("a temporary folder");
    let leases = folder.path().join(NETWORK);
    while !input.is_empty() {
        match input.int_in_range(0..=7)? {
            // What others, crashes and operators leave.
            0 | 1 => {
                let name = input.choose(&NAMES)?;
                let path = leases.join(name);
                fs::create_dir_all(&leases).expect("a folder");
                let content = if input.ratio(3, 4)? {
                    input.choose(&CONTENTS)?.as_bytes().to_vec()
                } else {
                    input.bytes(4.min(input.len()))?.to_vec()
                };
                // A lease is made anew, as the reference does it; nobody writes over one.
                let _ = fs::remove_file(&path);
                let _ = fs::write(path, content);
            }
            2 => {
                let path = leases.join(input.choose(&NAMES)?);
                let _ = fs::remove_file(path);
            }
            3 => {
                // The index is gone, or its mark is.
                let state = folder.path().join(".underpass").join(NETWORK);
                let _ = if input.arbitrary()? {
                    fs::remove_dir_all(state)
                } else {
                    fs::write(state.join("mark"), input.bytes(4.min(input.len()))?)
                };
            }
            _ => call(input, folder.path(), &leases)?,
        }
    }
    Ok(())
}

fn call(
    input: &mut Unstructured<'_>,
    folder: &Path,
    leases: &Path,
) -> libfuzzer_sys::arbitrary::Result<()> {
    let verb = *input.choose(&["ADD", "ADD", "DEL", "CHECK", "GC", "STATUS"])?;
    let container = *input.choose(&["c0", "c1", "c2"])?;
    let conf = json!({
        "cniVersion": "1.1.0",
        "name": NETWORK,
        "ipam": { "dataDir": folder, "ranges": [[{ "subnet": "10.0.0.0/29" }], [{ "subnet": "fd00::/125" }]] },
        "cni.dev/valid-attachments": [{ "containerID": "c0", "ifname": "eth0" }],
    });
    let before = owners(leases);
    let lookup = |name: &str| {
        let value = match name {
            "CNI_COMMAND" => verb,
            "CNI_CONTAINERID" => container,
            "CNI_NETNS" | "CNI_PATH" => "/nonexistent",
            "CNI_IFNAME" => "eth0",
            _ => return None,
        };
        Some(OsString::from(value))
    };
    let about = About {
        name: "fuzz",
        version: "0",
        supported: &Version::ALL,
    };
    let outcome = answer(&about, &HostLocal, lookup, conf.to_string().as_bytes());
    let after = owners(leases);
    let caller = Owner::new(container, "eth0");
    let unchanged = |ip: &&IpAddr| before.get(*ip) == after.get(*ip);
    match (verb, outcome.success) {
        ("ADD", true) => {
            let result: Value = serde_json::from_str(&outcome.stdout).expect("a result is JSON");
            let ips: Vec<IpAddr> = result["ips"]
                .as_array()
                .expect("addresses")
                .iter()
                .filter_map(|ip| ip["address"].as_str()?.split('/').next()?.parse().ok())
                .collect();
            assert_eq!(ips.len(), 2, "one of each pool");
            for ip in &ips {
                assert!(!before.contains_key(ip), "{ip} had an owner: {before:?}");
                assert_eq!(after.get(ip), Some(&caller));
            }
            assert!(
                before.keys().all(|ip| unchanged(&ip)),
                "{before:?} became {after:?}"
            );
        }
        ("ADD" | "CHECK" | "STATUS", _) => assert_eq!(before, after, "{verb} changes no lease"),
        ("DEL", success) => {
            assert!(success, "{}", outcome.stdout);
            assert!(after.values().all(|owner| *owner != caller), "{after:?}");
            let others = before
                .iter()
                .filter(|(_, owner)| owner.container_id != container);
            assert!(
                others.map(|(ip, _)| ip).all(|ip| unchanged(&ip)),
                "{before:?} became {after:?}"
            );
        }
        (_, success) => {
            assert!(success, "{}", outcome.stdout);
            let kept = before
                .iter()
                .filter(|(_, owner)| **owner == Owner::new("c0", "eth0"));
            assert!(
                kept.map(|(ip, _)| ip).all(|ip| unchanged(&ip)),
                "{before:?} became {after:?}"
            );
            let gone = Owner::new("c1", "eth0");
            assert!(after.values().all(|owner| *owner != gone), "{after:?}");
        }
    }
    Ok(())
}

/// Every lease that has an owner, by address.
fn owners(leases: &Path) -> BTreeMap<IpAddr, Owner> {
    let Ok(entries) = fs::read_dir(leases) else {
        return BTreeMap::new();
    };
    entries
        .flatten()
        .filter_map(|entry| {
            let name = entry.file_name();
            let name = name.to_str()?;
            let ip: IpAddr = name.parse().ok()?;
            // Another spelling is no lease.
            (ip.to_string() == name).then_some(())?;
            Some((ip, Owner::parse(&fs::read(entry.path()).ok()?)?))
        })
        .collect()
}
