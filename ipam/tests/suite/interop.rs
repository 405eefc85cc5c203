//! Ours and the reference plugin on one directory.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{BufRead as _, BufReader};
use std::path::Path;
use std::process::Stdio;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::channel;
use std::thread;
use std::time::Duration;

use serde_json::{Value, json};

use crate::network::{Network, Of, Via, ours};

pub(crate) const REFERENCE: &str = "/usr/lib/cni/host-local";

/// The reference plugin, if it is installed. Under CI it has to be.
pub(crate) fn reference() -> Option<Via<'static>> {
    let path = Path::new(REFERENCE);
    if path.exists() {
        return Some(Via::Executable(path));
    }
    let missing =
        format!("{REFERENCE} is missing: install Debian's package containernetworking-plugins");
    assert!(
        std::env::var_os("CI").is_none_or(|ci| ci != "true"),
        "{missing}"
    );
    eprintln!("skipped: {missing}");
    None
}

/// A network in a version that Debian's plugins speak, which may be older than 1.1.0.
fn network(ipam: Value) -> Network {
    let mut network = Network::new(ipam);
    network.set("cniVersion", "1.0.0".into());
    network
}

fn full_config() -> Network {
    network(json!({
        "ranges": [
            [{"subnet": "10.1.0.0/23", "rangeStart": "10.1.0.10", "gateway": "10.1.0.254"}],
            [{"subnet": "2001:db8:1::/64"}],
        ],
        "routes": [{"dst": "0.0.0.0/0"}, {"dst": "2001:db8::/32", "gw": "2001:db8:1::1"}],
    }))
}

#[test]
fn a_hundred_of_each_in_parallel_lose_nothing_and_lease_nothing_twice() {
    let Some(reference) = reference() else { return };
    let network = full_config();
    let held: Mutex<BTreeMap<String, usize>> = Mutex::new(BTreeMap::new());
    let next = AtomicUsize::new(0);
    let plugins = [ours(), reference];
    let work = || {
        loop {
            let job = next.fetch_add(1, Ordering::Relaxed);
            if job >= 200 {
                return;
            }
            let id = format!("container-{job}");
            let of = Of(&id, "eth0");
            let ips = network.add(plugins[job % 2], of).expect("room for all");
            assert_eq!(ips.len(), 2);
            let mut map = held.lock().expect("no other worker failed");
            for ip in ips {
                assert_eq!(map.insert(ip, job), None, "an address was leased twice");
            }
            drop(map);
            // Three of four go again, in the four ways in which adders and deleters pair up.
            if job % 8 < 6 {
                held.lock()
                    .expect("no other worker failed")
                    .retain(|_, holder| *holder != job);
                network.del(plugins[(job / 2) % 2], of);
            }
        }
    };
    thread::scope(|scope| {
        for _ in 0..12 {
            scope.spawn(work);
        }
    });
    let held = held.into_inner().expect("no worker failed");
    let expected: BTreeMap<_, _> = held
        .iter()
        .map(|(ip, job)| (ip.clone(), format!("container-{job}\r\neth0")))
        .collect();
    assert_eq!(network.leases(), expected);
    // Each removes what the other left.
    for (job, plugin) in (0..200).zip([reference, ours()].into_iter().cycle()) {
        network.del(plugin, Of(&format!("container-{job}"), "eth0"));
    }
    assert_eq!(network.leases(), BTreeMap::new());
}

#[test]
fn taking_turns_both_write_the_same_files_and_print_the_same_results() {
    let Some(reference) = reference() else { return };
    let (mixed, pure) = (full_config(), full_config());
    for turn in 0..12 {
        let id = format!("c{turn}");
        let of = Of(&id, "eth0");
        let plugin = if turn % 2 == 0 { ours() } else { reference };
        let result = |network: &Network, plugin| {
            let mut result = network.call(plugin, "ADD", of).expect("an address");
            // Older plugins print an empty one.
            result
                .as_object_mut()
                .expect("a result")
                .retain(|key, value| key != "dns" || *value != json!({}));
            result
        };
        assert_eq!(result(&mixed, plugin), result(&pure, reference));
        if turn % 3 == 0 {
            mixed.del(ours(), of);
            pure.del(reference, of);
        }
        assert_eq!(mixed.leases(), pure.leases());
        for file in ["last_reserved_ip.0", "last_reserved_ip.1"] {
            assert_eq!(mixed.read(file), pure.read(file));
        }
        assert_eq!(
            mixed.call(reference, "CHECK", Of("c1", "eth0")),
            pure.call(reference, "CHECK", Of("c1", "eth0"))
        );
    }
    // A lease of one is a duplicate to the other, in the same words.
    let refusal = |plugin| {
        mixed
            .add(plugin, Of("c1", "eth0"))
            .expect_err("a duplicate")
            .1
    };
    let (ours, theirs) = (refusal(ours()), refusal(reference));
    assert!(ours.starts_with(&theirs), "{ours} and {theirs}");
}

#[test]
fn configs_that_make_no_sense_are_refused_in_the_same_words() {
    let Some(reference) = reference() else { return };
    let sets = [
        r#"{"ranges": [[]]}"#,
        r#"{"ranges": [[{}]]}"#,
        r"{}",
        r#"{"subnet": "192.0.2.0/31"}"#,
        r#"{"subnet": "192.0.2.7/24"}"#,
        r#"{"subnet": "2001:db8::1/64"}"#,
        r#"{"subnet": "192.0.2.0/24", "rangeStart": "192.0.3.1"}"#,
        r#"{"subnet": "192.0.2.0/24", "rangeEnd": "192.0.3.1"}"#,
        r#"{"subnet": "192.0.2.0/24", "rangeStart": "192.0.2.9", "rangeEnd": "192.0.2.8"}"#,
        r#"{"ranges": [[{"subnet": "192.0.2.0/24"}, {"subnet": "2001:db8::/64"}]]}"#,
        r#"{"ranges": [[{"subnet": "192.0.2.0/24"}, {"subnet": "192.0.2.128/25"}]]}"#,
        r#"{"ranges": [[{"subnet": "192.0.2.0/24"}], [{"subnet": "192.0.2.128/25"}]]}"#,
    ];
    for set in sets {
        let ipam: Value = serde_json::from_str(set).expect("JSON");
        let network = network(ipam);
        let refusal = |plugin| network.add(plugin, Of("c1", "eth0")).expect_err(set);
        let (code, words) = refusal(ours());
        assert_eq!((code, words), (7, refusal(reference).1), "{set}");
    }
}

/// Whoever looks at a node whose ADDs take long has to be told by whom they are held.
#[test]
fn who_waits_for_another_says_so() {
    const LIMIT: Duration = Duration::from_secs(30);
    let network = Network::with_subnets(&["10.0.0.0/24", "2001:db8::/64"]);
    network.add(Via::Library, Of("c1", "eth0")).expect("room");
    let path = network.dir().join("lock");
    let lock = File::open(&path).expect("a lock file");
    lock.lock().expect("it is free");
    let (heard, told) = channel::<()>();
    thread::spawn(move || {
        // Who says nothing is not waited for, either.
        let _ = told.recv_timeout(LIMIT);
        drop(lock);
    });
    let Via::Executable(plugin) = ours() else {
        unreachable!("ours is an executable")
    };
    let mut add = network.start_heard(plugin, "ADD", Of("c2", "eth0"), Stdio::piped());
    let mut said = String::new();
    let stderr = add.stderr.take().expect("a pipe");
    BufReader::new(stderr).read_line(&mut said).expect("text");
    let expected = format!("waiting for the lock {}, which another", path.display());
    assert!(said.starts_with(&expected), "{said:?}");
    drop(heard);
    let output = add.wait_with_output().expect("it ends");
    assert!(output.status.success(), "{output:?}");
    assert_eq!(network.leases().len(), 4);
}
