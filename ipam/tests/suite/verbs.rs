//! Each verb, by what a runtime and an operator see of it.

use std::fs;

use serde_json::{Value, json};

use crate::network::{Network, Of, Via};

const C1: Of<'_> = Of("c1", "eth0");
const C2: Of<'_> = Of("c2", "eth0");

fn add(network: &Network, of: Of<'_>) -> Result<Vec<String>, (u64, String)> {
    network.add(Via::Library, of)
}

fn call(network: &Network, verb: &str, of: Of<'_>) -> Result<Value, (u64, String)> {
    network.call(Via::Library, verb, of)
}

fn texts(list: &[&str]) -> Vec<String> {
    list.iter().map(ToString::to_string).collect()
}

#[test]
fn a_dual_stack_result_has_everything_that_was_configured() {
    let folder = tempfile::TempDir::new().expect("a folder");
    let resolv_conf = folder.path().join("resolv.conf");
    fs::write(&resolv_conf, "nameserver 192.0.2.3\nsearch example.org\n").expect("written");
    let network = Network::new(json!({
        "ranges": [[{"subnet": "10.1.2.0/24"}, {"subnet": "10.2.2.0/24"}], [{"subnet": "2001:db8:1::/64"}]],
        "routes": [{"dst": "0.0.0.0/0"}, {"dst": "192.168.0.0/16", "gw": "10.10.5.1", "mtu": 1300, "table": 0}],
        "resolvConf": resolv_conf,
    }));
    let result = call(&network, "ADD", C1).expect("addresses");
    assert_eq!(
        result,
        json!({
            "cniVersion": "1.1.0",
            "dns": {"nameservers": ["192.0.2.3"], "search": ["example.org"]},
            "ips": [
                {"address": "10.1.2.2/24", "gateway": "10.1.2.1"},
                {"address": "2001:db8:1::2/64", "gateway": "2001:db8:1::1"},
            ],
            "routes": [{"dst": "0.0.0.0/0"}, {"dst": "192.168.0.0/16", "gw": "10.10.5.1", "mtu": 1300, "table": 0}],
        })
    );
    assert_eq!(network.read("10.1.2.2"), "c1\r\neth0");
    assert_eq!(network.read("last_reserved_ip.0"), "10.1.2.2");
    assert_eq!(network.read("last_reserved_ip.1"), "2001:db8:1::2");
    network.del(Via::Library, C1);
    assert!(network.leases().is_empty());
    assert_eq!(network.read("last_reserved_ip.0"), "10.1.2.2");
    assert_eq!(
        add(&network, C1),
        Ok(texts(&["10.1.2.3", "2001:db8:1::3"])),
        "a freed address rests"
    );
}

#[test]
fn a_second_add_is_refused_and_the_first_lease_stays() {
    let network = Network::with_subnets(&["10.0.0.0/29", "2001:db8::/125"]);
    assert_eq!(add(&network, C1), Ok(texts(&["10.0.0.2", "2001:db8::2"])));
    let (code, msg) = add(&network, C1).expect_err("a duplicate");
    let folder = network.dir().display().to_string();
    assert_eq!(code, 101);
    assert_eq!(
        msg,
        format!(
            "failed to allocate for range 0: 10.0.0.2 has been allocated to c1, duplicate allocation is not allowed: \
             the lease is in {folder}; DEL this attachment first, or wait for another ADD of it that is under way"
        )
    );
    assert_eq!(add(&network, C2), Ok(texts(&["10.0.0.3", "2001:db8::3"])));
    assert_eq!(
        add(&network, Of("c1", "eth1")),
        Ok(texts(&["10.0.0.4", "2001:db8::4"]))
    );
    assert_eq!(network.leases().len(), 6);
}

#[test]
fn a_failed_add_frees_what_it_took_and_no_more() {
    let network = Network::with_subnets(&["10.0.0.0/29", "2001:db8::/126"]);
    // An older lease of the same container, in the second pool only.
    network.write("2001:db8::2", "c1\r\neth0");
    let refusal = "failed to allocate for range 1: 2001:db8::2 has been allocated to c1, duplicate allocation is not allowed";
    let (code, msg) = add(&network, C1).expect_err("a duplicate");
    assert!(code == 101 && msg.starts_with(refusal), "{code}: {msg}");
    assert_eq!(
        network.leases().into_keys().collect::<Vec<_>>(),
        ["2001:db8::2"]
    );
    network.write("2001:db8::3", "c3\r\neth0");
    let refusal = "failed to allocate for range 1: no IP addresses available in range set: 2001:db8::1-2001:db8::3";
    let (code, msg) = add(&network, C2).expect_err("no address");
    assert!(code == 11 && msg.starts_with(refusal), "{code}: {msg}");
    assert_eq!(network.leases().len(), 2);
}

#[test]
fn requested_addresses_are_given_or_refused() {
    let mut network = Network::with_subnets(&["10.0.0.0/24", "10.0.1.0/24", "2001:db8::/64"]);
    network.set(
        "runtimeConfig",
        json!({"ips": ["2001:db8::77/64", "10.0.1.9"]}),
    );
    assert_eq!(
        add(&network, C1),
        Ok(texts(&["10.0.0.2", "10.0.1.9", "2001:db8::77"]))
    );
    let taken = "failed to allocate for range 1: requested IP address 10.0.1.9 is not available in range set 10.0.1.1-10.0.1.254";
    assert_eq!(add(&network, C2), Err((11, taken.into())));
    network.set("runtimeConfig", json!({"ips": ["10.0.0.1"]}));
    let gateway = "failed to allocate for range 0: requested ip 10.0.0.1 is subnet's gateway";
    assert_eq!(add(&network, C2), Err((7, gateway.into())));
    network.set(
        "runtimeConfig",
        json!({"ips": ["10.0.0.8", "10.0.0.9", "192.0.2.1"]}),
    );
    assert_eq!(
        add(&network, C2),
        Err((
            7,
            "failed to allocate all requested IPs: 10.0.0.9 192.0.2.1".into()
        ))
    );
    assert_eq!(network.leases().len(), 3);
}

#[test]
fn del_needs_neither_valid_ranges_nor_a_lease_nor_a_folder() {
    let mut network = Network::with_subnets(&["10.0.0.0/29"]);
    network.del(Via::Library, C1);
    assert!(!network.dir().exists());
    add(&network, C1).expect("an address");
    network.write("10.0.0.5", "c2\n");
    let data_dir = network.dir().parent().expect("a parent").to_owned();
    network.set(
        "ipam",
        json!({"dataDir": data_dir, "ranges": [[{"subnet": "10.0.0.1/31"}]]}),
    );
    network.set("prevResult", json!("nonsense"));
    assert_eq!(call(&network, "ADD", C1).expect_err("bad range").0, 7);
    network.del(Via::Library, Of("unknown", "eth0"));
    network.del(Via::Library, C1);
    network.del(Via::Library, C1);
    assert_eq!(
        network.leases().into_keys().collect::<Vec<_>>(),
        ["10.0.0.5"]
    );
    network.del(Via::Library, C2);
    assert!(network.leases().is_empty());
}

#[test]
fn check_compares_addresses() {
    let mut network = Network::with_subnets(&["10.0.0.0/29"]);
    let missing = Err((
        999,
        "host-local: Failed to find address added by container c1".to_owned(),
    ));
    assert_eq!(call(&network, "CHECK", C1), missing);
    let mut result = call(&network, "ADD", C1).expect("an address");
    assert_eq!(call(&network, "CHECK", C1), Ok(Value::Null));
    // Another plugin's address in the chain.
    let ips = result["ips"].as_array_mut().expect("addresses");
    ips.push(json!({"address": "192.0.2.1/24"}));
    network.set("prevResult", result.clone());
    assert_eq!(call(&network, "CHECK", C1), Ok(Value::Null));
    result["ips"][0]["address"] = json!("10.0.0.6/29");
    network.set("prevResult", result);
    assert_eq!(call(&network, "CHECK", C1), missing);
}

#[test]
fn gc_keeps_what_is_valid_and_what_is_not_a_lease() {
    let mut network = Network::with_subnets(&["10.0.0.0/24"]);
    for of in [C1, C2, Of("c2", "eth1")] {
        add(&network, of).expect("an address");
    }
    for (name, content) in [
        ("10.0.0.50", "c1"),
        ("10.0.0.51", "c9"),
        ("10.0.0.52", ""),
        ("notes", "c9"),
        ("10.0.0.53", "not a lease"),
    ] {
        network.write(name, content);
    }
    let refusal = call(&network, "GC", C1).expect_err("nobody said what is valid");
    assert_eq!(refusal.0, 7);
    assert_eq!(network.leases().len(), 8);
    network.set(
        "cni.dev/valid-attachments",
        json!([{"containerID": "c1", "ifname": "eth0"}, {"containerID": "c2", "ifname": "eth1"}]),
    );
    assert_eq!(call(&network, "GC", C1), Ok(Value::Null));
    assert_eq!(
        network.leases().into_keys().collect::<Vec<_>>(),
        ["10.0.0.2", "10.0.0.4", "10.0.0.50", "10.0.0.53", "notes"]
    );
    network.set("cni.dev/valid-attachments", json!([]));
    assert_eq!(call(&network, "GC", C1), Ok(Value::Null));
    assert_eq!(
        network.leases().into_keys().collect::<Vec<_>>(),
        ["10.0.0.53", "notes"]
    );
}

#[test]
fn status_tells_of_a_full_pool_and_touches_nothing() {
    let network = Network::with_subnets(&["10.0.0.0/29", "2001:db8::/126"]);
    assert_eq!(call(&network, "STATUS", C1), Ok(Value::Null));
    assert!(!network.dir().exists());
    add(&network, C1).expect("an address");
    assert_eq!(call(&network, "STATUS", C1), Ok(Value::Null));
    add(&network, C2).expect("the last IPv6 address");
    let full = "no IP addresses available in range set: 2001:db8::1-2001:db8::3";
    let (code, msg) = call(&network, "STATUS", C1).expect_err("full");
    assert!(code == 50 && msg.starts_with(full), "{code}: {msg}");
    network.del(Via::Library, C1);
    assert_eq!(call(&network, "STATUS", C1), Ok(Value::Null));
}

#[test]
fn a_pool_with_one_free_address_among_many_is_found_out() {
    let network = Network::with_subnets(&["10.0.0.0/24"]);
    for host in (2..=254).filter(|host| *host != 200) {
        network.write(&format!("10.0.0.{host}"), &format!("x{host}\r\neth0"));
    }
    assert_eq!(add(&network, C1), Ok(texts(&["10.0.0.200"])));
    assert_eq!(add(&network, C2).expect_err("full").0, 11);
    fs::remove_file(network.dir().join("10.0.0.77")).expect("removed");
    network.write("10.0.0.77", "");
    assert_eq!(
        add(&network, C2),
        Ok(texts(&["10.0.0.77"])),
        "an empty file is nobody's"
    );
}

/// Who was killed between two system calls has left a file without a word in it.
#[test]
fn status_counts_what_an_add_would_reclaim() {
    let network = Network::with_subnets(&["10.0.0.0/29", "2001:db8::/126"]);
    for host in 2..=6 {
        network.write(&format!("10.0.0.{host}"), &format!("x{host}\r\neth0"));
    }
    assert_eq!(call(&network, "STATUS", C1).expect_err("full").0, 50);
    network.write("10.0.0.4", "");
    assert_eq!(call(&network, "STATUS", C1), Ok(Value::Null));
    assert_eq!(add(&network, C1), Ok(texts(&["10.0.0.4", "2001:db8::2"])));
    assert_eq!(call(&network, "STATUS", C1).expect_err("full").0, 50);
}

#[test]
fn a_full_pool_names_the_folder_and_who_is_in_it() {
    let network = Network::with_subnets(&["10.0.0.0/29", "2001:db8::/64"]);
    let id = |number: u8| format!("{}{number}", "0123456789abcdef".repeat(4));
    for number in 2..=6 {
        add(&network, Of(&id(number), "eth0")).expect("an address");
    }
    let folder = network.dir().display().to_string();
    for verb in ["ADD", "STATUS"] {
        let (_, msg) = call(&network, verb, C1).expect_err("full");
        let phrase = "no IP addresses available in range set: 10.0.0.1-10.0.0.6: ";
        assert!(
            msg.trim_start_matches("failed to allocate for range 0: ")
                .starts_with(phrase),
            "{msg}"
        );
        let holders: Vec<_> = (2..=4)
            .map(|number| format!("10.0.0.{number} of {} (eth0)", id(number)))
            .collect();
        let said = format!("{folder} holds 10 leases, such as {};", holders.join(", "));
        assert!(msg.contains(&said), "{msg}");
        assert!(msg.contains("by DEL, by GC"), "{msg}");
    }
}

#[test]
fn no_message_is_longer_than_a_kibibyte() {
    let deep: String = "/a-long-name-of-a-folder-that-somebody-likes".repeat(20);
    let ranges: Vec<_> = (0..100)
        .map(|net| json!({"subnet": format!("10.0.{net}.0/30")}))
        .collect();
    let mut network = Network::new(json!({"ranges": [ranges]}));
    let data_dir = format!("{}{deep}", network.dir().display());
    network.set("ipam", json!({"dataDir": data_dir, "ranges": [ranges]}));
    let leases = std::path::Path::new(&data_dir).join("net");
    fs::create_dir_all(&leases).expect("a folder");
    let owner = |number: usize| format!("{}{number}", "long".repeat(100));
    for number in 0..100 {
        let lease = leases.join(format!("10.0.{number}.2"));
        fs::write(lease, format!("{}\r\neth0", owner(number))).expect("a lease");
    }
    let short = |(code, msg): (u64, String)| {
        assert!(msg.len() <= 1024, "{}: {msg}", msg.len());
        (code, msg)
    };
    let call = |verb, of| short(call(&network, verb, of).expect_err("a refusal"));
    assert_eq!(call("ADD", C1).0, 11);
    assert_eq!(call("STATUS", C1).0, 50);
    let (holder, nobody) = (owner(1), owner(200));
    assert_eq!(call("ADD", Of(&holder, "eth0")).0, 101);
    assert_eq!(call("CHECK", Of(&nobody, "eth0")).0, 999);
    // Folders in the place of leases can't be removed.
    for number in 0..100 {
        let lease = leases.join(format!("10.0.{number}.2"));
        fs::remove_file(&lease).expect("removed");
        fs::create_dir(&lease).expect("a folder");
    }
    fs::write(leases.join("10.0.1.1"), "c1\r\neth0").expect("a lease");
    fs::remove_file(leases.join("lock")).expect("removed");
    fs::create_dir(leases.join("lock")).expect("a folder");
    for verb in ["ADD", "DEL"] {
        assert_eq!(call(verb, C1).0, 5);
    }
}
