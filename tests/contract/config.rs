//! Configs as runtimes and operators write them: lenient where Go is, strict where a wrong value would be obeyed.

use rstest::rstest;
use serde_json::{Value, json};
use underpass_tests::{
    leak::Traces,
    prelude::*,
    runtime::{Call, CniError, Conf, Reply},
};

fn add(lab: &Lab, conf: &Conf, args: &str) -> Result<Reply> {
    let netns = lab.node.netns().sibling("a")?;
    Call::new("ADD")
        .attachment("a", &netns.path().display().to_string(), Pod::IFNAME)
        .env("CNI_ARGS", args)
        .conf(conf)
        .run(&lab.node)
}

/// The network of the lab with these keys, whose leases are in the lab whatever `ipam` is.
fn with(lab: &Lab, keys: &Value) -> Conf {
    let conf = keys
        .as_object()
        .into_iter()
        .flatten()
        .fold(lab.conf(), |conf, (key, value)| {
            conf.with(key, value.clone())
        });
    if conf.json()["ipam"].is_object() {
        return conf.with_ipam("dataDir", json!(lab.node.data_dir()));
    }
    conf
}

/// The error of an ADD that must leave nothing behind.
fn refused(keys: &Value, args: &str) -> Result<CniError> {
    let lab = Lab::new()?;
    lab.pod("warm")?.del()?;
    let before = Traces::of(&lab.node)?;
    let error = add(&lab, &with(&lab, keys), args)?.error()?;
    before.expect_same(&lab.node)?;
    Ok(error)
}

#[test]
fn what_runtimes_leave_in_a_config_is_no_obstacle() -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    let conf = with(
        &lab,
        &json!({
            "capabilities": { "mac": true, "portMappings": true, "bandwidth": true, "ips": true },
            "cniVersions": ["0.4.0", "1.0.0", "1.1.0"],
            "disableCheck": true,
            "disableGC": true,
            "loadOnlyInlinedPlugins": true,
            "cni.dev/something": { "a": 1 },
            "nobodyKnows": ["this", { "key": null }],
            "dns": null,
            "mtu": null,
            "IPMASQ": false,
            "prevResult": null,
            "runtimeConfig": {
                "portMappings": [],
                "bandwidth": { "ingressRate": 0, "ingressBurst": 0 },
                "aliases": ["web"],
                "infinibandGUID": "c2:11:22:33:44:55:66:77",
                "deviceID": "0000:04:00.5",
                "cgroupPath": "/kubelet",
                "MAC": "02:00:00:00:00:09",
                "ips": null
            },
            "args": { "cni": { "labels": [{ "key": "app", "value": "web" }], "aliases": { "lab": ["web"] } }, "other": 7 }
        }),
    );
    let kubelet = "IgnoreUnknown=1;K8S_POD_NAMESPACE=default;K8S_POD_NAME=web-0;K8S_POD_INFRA_CONTAINER_ID=abc;K8S_POD_UID=1-2";
    let result = add(&lab, &conf, kubelet)?.result()?;
    ensure!(
        result["interfaces"][1]["mac"] == "02:00:00:00:00:09",
        "keys have no case: {result}"
    );
    Ok(())
}

#[rstest]
// Requested addresses, from the weakest source to the strongest, which are merged.
#[case(json!({}), "IP=10.88.0.40", &["10.88.0.40/24"])]
#[case(json!({ "args": { "cni": { "ips": ["10.88.0.41/16"] } } }), "", &["10.88.0.41/24"])]
#[case(json!({ "runtimeConfig": { "ips": ["10.88.0.42", "fd00:88::42/64"] } }), "", &["10.88.0.42/24", "fd00:88::42/64"])]
#[case(json!({ "runtimeConfig": { "ipRanges": [[{ "subnet": "10.99.0.0/24" }]] } }), "", &["10.99.0.2/24"])]
fn addresses_that_the_runtime_asks_for(
    #[case] keys: Value,
    #[case] args: &str,
    #[case] expected: &[&str],
) -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    let result = add(&lab, &with(&lab, &keys), args)?.result()?;
    let ips = result["ips"].as_array().into_iter().flatten();
    let addresses: Vec<_> = ips.filter_map(|ip| ip["address"].as_str()).collect();
    for address in expected {
        ensure!(
            addresses.contains(address),
            "{address} is missing: {result}"
        );
    }
    Ok(())
}

#[rstest]
#[case(json!({ "runtimeConfig": { "ips": ["10.88.0.1"] } }), 7, "failed to allocate for range 0: requested ip 10.88.0.1 is subnet's gateway")]
#[case(json!({ "runtimeConfig": { "ips": ["192.0.2.9"] } }), 7, "failed to allocate all requested IPs: 192.0.2.9")]
#[case(json!({ "runtimeConfig": { "ips": ["nonsense"] } }), 7, "cannot understand ip: nonsense")]
#[case(json!({ "vlan": 7 }), 2, "key \"vlan\", value 7")]
#[case(json!({ "promiscMode": true }), 2, "key \"promiscMode\", value true")]
#[case(json!({ "forceAddress": true }), 2, "key \"forceAddress\", value true")]
#[case(json!({ "vlanTrunk": [{ "id": 3 }] }), 2, "key \"vlanTrunk\"")]
#[case(json!({ "ipMasqBackend": "pf" }), 7, "unknown ipmasq backend \"pf\"")]
#[case(json!({ "mtu": "1500" }), 6, "key \"mtu\" cannot be \"1500\"")]
#[case(json!({ "device": "macvlan" }), 6, "key \"device\" cannot be \"macvlan\"")]
#[case(json!({ "ipMasq": "true" }), 6, "key \"ipMasq\" cannot be \"true\"")]
#[case(json!({ "mtu": 12 }), 7, "invalid mtu 12")]
#[case(json!({ "runtimeConfig": { "mac": "02:00:00" } }), 7, "runtimeConfig.mac \"02:00:00\"")]
#[case(json!({ "runtimeConfig": { "portMappings": [{ "hostPort": 80, "containerPort": 80, "hostIP": "224.0.0.1" }] } }), 7, "invalid hostIP \"224.0.0.1\" in runtimeConfig.portMappings[0]")]
#[case(json!({ "runtimeConfig": { "portMappings": [{ "hostPort": 80, "containerPort": 80, "hostIP": "ff02::1" }] } }), 7, "invalid hostIP \"ff02::1\" in runtimeConfig.portMappings[0]")]
#[case(json!({ "dns": { "nameservers": "10.0.0.1" } }), 6, "nameservers")]
#[case(json!({ "ipam": "host-local" }), 6, "ipam")]
#[case(json!({ "ipam": { "type": "host-local" } }), 7, "no IP ranges specified")]
#[case(json!({ "ipam": { "type": "host-local", "ranges": [[{ "subnet": "10.0.0.0/31" }]] } }), 7, "invalid range set 0: Network 10.0.0.0/31 too small to allocate from")]
#[case(json!({ "ipam": { "type": "host-local", "ranges": [[{ "subnet": "10.0.0.0/400" }]] } }), 6, "10.0.0.0/400")]
// Others read an octet that begins with a zero as octal.
#[case(json!({ "ipam": { "type": "host-local", "ranges": [[{ "subnet": "010.022.0.0/24" }]] } }), 6,
    "key \"ipam.ranges[0][0].subnet\" cannot be \"010.022.0.0/24\": it must be a network like 10.1.2.0/24 or fd00::/64")]
#[case(json!({ "ipam": { "type": "host-local", "subnet": "10.88.0.0/24", "routes": [{ "dst": "010.0.0.0/8" }] } }), 6, "key \"ipam.routes[0].dst\" cannot be \"010.0.0.0/8\"")]
#[case(json!({ "nonMasqueradeCIDRs": ["010.0.0.0/8"] }), 7, "invalid nonMasqueradeCIDRs entry \"010.0.0.0/8\"")]
#[case(json!({ "ipam": { "type": "host-local", "subnet": "" } }), 6, "key \"ipam.subnet\" cannot be \"\": it must be a network like 10.1.2.0/24")]
#[case(json!({ "ipam": { "type": "host-local", "subnet": "::ffff:10.1.0.0/120" } }), 6,
    "key \"ipam.subnet\" cannot be \"::ffff:10.1.0.0/120\": it must be an IPv4 network as IPv4 writes it, like 10.1.2.0/24")]
#[case(json!({ "ipam": { "type": "host-local", "subnet": "10.88.0.0/24", "routes": [{ "dst": "0.0.0.0/0", "mtu": 67 }] } }), 7, "invalid mtu 67 of the route to 0.0.0.0/0")]
#[case(json!({ "ipam": { "type": "host-local", "subnet": "fd00:88::/64", "routes": [{ "dst": "::/0", "mtu": 65536 }] } }), 7, "invalid mtu 65536 of the route to ::/0")]
#[case(json!({ "mtu": 1400.5 }), 6, "key \"mtu\" cannot be 1400.5: it must be a whole number")]
#[case(json!({ "uplinks": "eth0" }), 6, "key \"uplinks\" cannot be \"eth0\": it must be a list")]
#[case(json!({ "bpfRoot": 7 }), 6, "key \"bpfRoot\" cannot be 7: it must be a text in quotes")]
#[case(json!({ "ipMasq": 1 }), 6, "key \"ipMasq\" cannot be 1: it must be true or false")]
#[case(json!({ "bypass": "on" }), 6, "key \"bypass\" cannot be \"on\": it must be \"learned\" or \"off\"")]
#[case(json!({ "bypass": 1 }), 6, "key \"bypass\" cannot be 1: it must be \"learned\" or \"off\"")]
#[case(json!({ "device": 1 }), 6, "key \"device\" cannot be 1: it must be \"veth\" or \"netkit\" or \"auto\"")]
#[case(json!({ "xdp": false }), 6, "key \"xdp\" cannot be false: it must be \"off\" or \"native\" or \"generic\"")]
#[case(json!({ "ingressRate": -1, "ingressBurst": 1 }), 6, "key \"ingressRate\" cannot be -1: it must be a whole number, and not below zero")]
#[case(json!({ "runtimeConfig": [] }), 6, "key \"runtimeConfig\" cannot be []: it must be an object")]
#[case(json!({ "args": 7 }), 6, "key \"args\" cannot be 7: it must be an object")]
#[case(json!({ "ipam": { "type": "host-local", "subnet": "10.88.0.0/24", "routes": [{ "gw": "10.88.0.1" }] } }), 6,
    "key \"ipam.routes[0]\" cannot be {\"gw\":\"10.88.0.1\"}: it needs a key \"dst\"")]
#[case(json!({ "ipam": { "type": "host-local", "subnet": "10.88.0.0/24", "routes": [{ "dst": "0.0.0.0/0", "scope": 300 }] } }), 6,
    "key \"ipam.routes[0].scope\" cannot be 300: it must be a whole number from 0 to 255")]
#[case(json!({ "prevResult": 7 }), 6, "could not parse prevResult: it must be an object")]
#[case(json!({ "ipMasqBackend": "pf" }), 7, "ipMasqBackend must be \"iptables\" or \"nftables\"")]
#[case(json!({ "ipam": { "type": "../host-local" } }), 7, "ipam.type must be the name of a file in CNI_PATH")]
#[case(json!({ "runtimeConfig": { "ips": ["nonsense"] } }), 7, "runtimeConfig.ips must have addresses such as")]
#[case(json!({ "runtimeConfig": { "ips": ["10.88.0.1"] } }), 7, "ask for another address")]
#[case(json!({ "runtimeConfig": { "ips": ["10.88.0.8", "10.88.0.9"] } }), 7, "a range set gives one address only")]
#[case(json!({ "ipam": { "type": "host-local" } }), 7, "give ipam a \"subnet\", or \"ranges\"")]
#[case(json!({ "ipam": { "type": "host-local", "ranges": [[{ "subnet": "10.0.0.0/31" }]] } }), 7, "correct ipam.ranges[0]: \"subnet\" must be a /30 or larger")]
#[case(json!({ "ipam": { "type": "host-local", "ranges": [[{ "subnet": "fd00::5/64" }]] } }), 7, "correct ipam.ranges[0]: write \"subnet\" as fd00::/64")]
#[case(json!({ "ipam": { "type": "host-local", "ranges": [[{ "subnet": "10.0.0.0/24", "rangeStart": "10.0.0.9", "rangeEnd": "10.0.0.3" }]] } }), 7,
    "\"rangeStart\" must not be behind \"rangeEnd\", which is 10.0.0.3")]
#[case(json!({ "ipam": { "type": "host-local", "ranges": [[{ "subnet": "10.0.0.0/24" }], [{ "subnet": "10.0.0.0/25" }]] } }), 7,
    "ipam.ranges[0] has 10.0.0.1-10.0.0.254, and ipam.ranges[1] has 10.0.0.1-10.0.0.126: no address may be in both")]
#[case(json!({ "ipam": { "type": "host-local", "ranges": [[{ "subnet": "10.0.0.0/24" }, { "subnet": "fd00::/64" }]] } }), 7, "give each family a list of its own")]
#[case(json!({ "ipam": { "type": "host-local", "subnet": "10.88.0.0/24", "resolvConf": "/nowhere" } }), 5, "set ipam.resolvConf to a file that can be read")]
#[case(json!({ "ipam": { "type": "host-local", "subnet": "10.88.0.0/24", "resolvConf": "/run" } }), 5, "set ipam.resolvConf to a file that can be read")]
// The kernel would take the first bytes of an IPv6 address for an IPv4 gateway.
#[case(json!({ "ipam": { "type": "host-local", "subnet": "10.88.0.0/24", "routes": [{ "dst": "0.0.0.0/0", "gw": "fd00:88::1" }] } }), 7,
    "invalid gw fd00:88::1 of the route to 0.0.0.0/0: it must be an IPv4 address that a router can have, or left out")]
#[case(json!({ "ipam": { "type": "host-local", "subnet": "fd00:88::/64", "routes": [{ "dst": "::/0", "gw": "10.88.0.1" }] } }), 7,
    "invalid gw 10.88.0.1 of the route to ::/0: it must be an IPv6 address that a router can have, or left out")]
#[case(json!({ "ipam": { "type": "host-local", "subnet": "10.88.0.0/24", "routes": [{ "dst": "0.0.0.0/0", "gw": "255.255.255.255" }] } }), 7, "invalid gw 255.255.255.255")]
#[case(json!({ "ipam": { "type": "host-local", "subnet": "fd00:88::/64", "routes": [{ "dst": "::/0", "gw": "ff02::2" }] } }), 7, "invalid gw ff02::2")]
#[case(json!({ "ipam": { "type": "host-local", "subnet": "10.88.0.0/24", "routes": [{ "dst": "198.51.100.0/24", "scope": 254 }] } }), 7,
    "invalid scope 254 of the route to 198.51.100.0/24")]
#[case(json!({ "ipam": { "type": "host-local", "subnet": "10.88.0.0/24", "gateway": "fd00:88::1" } }), 7,
    "fd00:88::1 of the address 10.88.0.")]
#[case(json!({ "ipam": { "type": "host-local", "subnet": "fd00:88::/64", "gateway": "10.88.0.1" } }), 7,
    "invalid gateway 10.88.0.1 of the address fd00:88::")]
#[case(json!({ "ipam": { "type": "host-local", "subnet": "224.0.0.0/24" } }), 7, "invalid address 224.0.0.2/24 from the IPAM: no interface can have it")]
#[case(json!({ "ipam": { "type": "host-local", "subnet": "ff05::/64" } }), 7, "invalid address ff05::2/64 from the IPAM: no interface can have it")]
fn wrong_values_are_named_and_nothing_is_done(
    #[case] keys: Value,
    #[case] code: u64,
    #[case] words: &str,
) -> Result<()> {
    needs_root!();
    let error = refused(&keys, "")?;
    ensure!(
        error.code == code && error.to_string().contains(words),
        "expected code {code} and {words:?}: {error}"
    );
    Ok(())
}

#[rstest]
#[case("IP=10.88.0.40;", 4, "ARGS: invalid pair \"\"")]
#[case("A=b=c", 4, "ARGS: invalid pair \"A=b=c\"")]
#[case("K8S_POD_NAME=web-0", 4, "ARGS: unknown args [\"K8S_POD_NAME=web-0\"]")]
#[case("IgnoreUnknown=perhaps", 4, "IgnoreUnknown=perhaps")]
#[case("MAC=zz", 7, "MAC of CNI_ARGS \"zz\"")]
#[case("A=b;", 4, "KEY=value with a semicolon between two")]
#[case(
    "K8S_POD_NAME=web-0",
    4,
    "take them out of CNI_ARGS, or add IgnoreUnknown=1; known here are IP, GATEWAY, MAC"
)]
#[case("IgnoreUnknown=perhaps", 4, "it must be 1, true, 0 or false")]
#[case("IP=nonsense", 7, "IP of CNI_ARGS must have addresses such as")]
fn arguments_are_parsed_as_by_the_reference(
    #[case] args: &str,
    #[case] code: u64,
    #[case] words: &str,
) -> Result<()> {
    needs_root!();
    let error = refused(&json!({}), args)?;
    ensure!(
        error.code == code && error.to_string().contains(words),
        "expected code {code} and {words:?}: {error}"
    );
    Ok(())
}

#[rstest]
#[case(Value::Null, Value::Null, json!({ "nameservers": ["192.0.2.53"], "search": ["ipam.example"] }))]
#[case(json!({ "domain": "conf.example" }), Value::Null, json!({ "domain": "conf.example" }))]
#[case(json!({ "nameservers": ["10.0.0.10"] }), Value::Null, json!({ "nameservers": ["10.0.0.10"] }))]
#[case(json!({ "options": ["ndots:5"] }), Value::Null, json!({ "options": ["ndots:5"] }))]
#[case(json!({ "search": [] }), Value::Null, Value::Null)]
#[case(json!({}), Value::Null, json!({ "nameservers": ["192.0.2.53"], "search": ["ipam.example"] }))]
#[case(json!({ "nameservers": ["10.0.0.10"] }), json!({ "servers": ["10.0.0.11"], "searches": ["run.example"], "options": ["debug"] }),
    json!({ "nameservers": ["10.0.0.11"], "search": ["run.example"], "options": ["debug"] }))]
fn name_servers(
    #[case] conf: Value,
    #[case] runtime: Value,
    #[case] expected: Value,
) -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    lab.node.netns().run(|| {
        std::fs::write(
            "/run/resolv.conf",
            "nameserver 192.0.2.53\nsearch ipam.example\n",
        )
    })?;
    let conf = lab
        .conf()
        .with_ipam("resolvConf", "/run/resolv.conf")
        .with("dns", conf)
        .with("runtimeConfig", json!({ "dns": runtime }));
    let result = add(&lab, &conf, "")?.result()?;
    let dns = result.get("dns").cloned().unwrap_or_default();
    ensure!(dns == expected, "expected {expected}: {result}");
    Ok(())
}

/// Comments are written in whatever encoding the node's administrator has.
#[test]
fn name_servers_from_a_file_that_is_no_utf_8() -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    lab.node.netns().run(|| {
        std::fs::write(
            "/run/resolv.conf",
            b"# caf\xe9\nnameserver 192.0.2.53\nnameserver fd00::53\nsearch b\xfccher.example\n",
        )
    })?;
    let conf = lab.conf().with_ipam("resolvConf", "/run/resolv.conf");
    let result = add(&lab, &conf, "")?.result()?;
    ensure!(
        result["dns"]
            == json!({ "nameservers": ["192.0.2.53", "fd00::53"], "search": ["b\u{fffd}cher.example"] }),
        "{result}"
    );
    Ok(())
}

#[test]
fn a_gateway_without_being_asked_for_is_the_first_address() -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    let pod = lab.pod_with(
        "b",
        &with(
            &lab,
            &json!({ "isGateway": false, "hairpinMode": false, "enabledad": true }),
        ),
    )?;
    let gateways: Vec<_> = pod.result()["ips"]
        .as_array()
        .into_iter()
        .flatten()
        .map(|ip| &ip["gateway"])
        .collect();
    ensure!(gateways == ["10.88.0.1", "fd00:88::1"], "{}", pod.result());
    for family in [V4, V6] {
        ping::ping(pod.netns(), family.remote())?;
    }
    Ok(())
}
