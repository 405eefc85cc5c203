use super::*;

const POD4: &str = "10.22.0.2";
const POD6: &str = "fd22::2";

fn pod(address: &str, device: &str) -> Pod {
    let address: IpAddr = address.parse().expect("an address");
    let prefix = if address.is_ipv4() { 24 } else { 64 };
    Pod {
        address,
        device: device.to_owned(),
        range: IpNet::new(address, prefix).expect("a range").trunc(),
    }
}

/// What may be dropped of one container by these rules: out and back.
fn ways(ruleset: &Ruleset, address: &str) -> [bool; 2] {
    let uplinks = ["eth0".to_owned()];
    [Way::Out, Way::Back].map(|way| {
        let packet = Packet {
            way,
            pod: address.parse().expect("an address"),
            device: "veth4676db05098",
            uplinks: &uplinks,
        };
        !ruleset.droppers(&packet).is_empty()
    })
}

fn iptables(rules: &str) -> [bool; 2] {
    let text = format!("-P INPUT ACCEPT\n-P FORWARD DROP\n-P OUTPUT ACCEPT\n{rules}");
    ways(&iptables::parse(Family::V4, "iptables", &text), POD4)
}

/// What nft prints of a chain at the hook `forward` of a table of both families, with these rules.
fn table(policy: &str, rules: &[Value]) -> String {
    let mut objects = vec![
        serde_json::json!({ "metainfo": { "json_schema_version": 1 } }),
        serde_json::json!({ "table": { "family": "inet", "name": "t" } }),
        serde_json::json!({ "chain": {
            "family": "inet", "table": "t", "name": "f", "type": "filter", "hook": "forward", "prio": 0, "policy": policy,
        } }),
    ];
    objects.extend(rules.iter().map(|expr| {
        serde_json::json!({ "rule": { "family": "inet", "table": "t", "chain": "f", "expr": expr } })
    }));
    serde_json::json!({ "nftables": objects }).to_string()
}

/// What may be dropped of an IPv4 container and of an IPv6 container.
fn nft(policy: &str, rules: &[Value]) -> [[bool; 2]; 2] {
    let ruleset = nft::parse(&table(policy, rules), &[]).expect("JSON");
    [POD4, POD6].map(|address| ways(&ruleset, address))
}

const ALL: [bool; 2] = [true, true];
const NONE: [bool; 2] = [false, false];

#[test]
fn a_policy_without_exceptions_drops() {
    assert_eq!(iptables(""), ALL);
    assert_eq!(iptables("-A FORWARD -s 10.99.0.0/16 -j ACCEPT"), ALL);
    assert_eq!(nft("drop", &[]), [ALL, ALL]);
    assert_eq!(nft("accept", &[]), [NONE, NONE]);
}

#[test]
fn docker_lets_its_own_containers_pass_alone() {
    let docker = "-N DOCKER\n-N DOCKER-USER\n-A FORWARD -j DOCKER-USER\n\
        -A FORWARD -o docker0 -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT\n\
        -A FORWARD -o docker0 -j DOCKER\n-A FORWARD -i docker0 ! -o docker0 -j ACCEPT\n\
        -A DOCKER-USER -j RETURN\n";
    assert_eq!(iptables(docker), ALL);
    let user =
        |rules: &str| docker.replace("-A DOCKER-USER -j", &format!("{rules}-A DOCKER-USER -j"));
    let out = "-A DOCKER-USER -s 10.22.0.0/24 -j ACCEPT\n";
    assert_eq!(iptables(&user(out)), [false, true]);
    let both = format!("{out}-A DOCKER-USER -d 10.22.0.0/24 -j ACCEPT\n");
    assert_eq!(iptables(&user(&both)), NONE);
    let ruleset = iptables::parse(
        Family::V4,
        "iptables",
        &format!("-P FORWARD DROP\n{docker}"),
    );
    let found = dropped(&ruleset, &[pod(POD4, "veth1")], &["eth0".to_owned()]);
    assert_eq!(found.len(), 1);
    assert!(
        found[0].fix.starts_with(
            "iptables -I DOCKER-USER -s 10.22.0.0/24 -j ACCEPT && iptables -I DOCKER-USER -d 10.22.0.0/24 -j ACCEPT;"
        ),
        "{}",
        found[0].fix
    );
}

/// Since its version 28 Docker asks for the ranges of its bridges by a set.
#[test]
fn docker_by_sets_lets_its_own_containers_pass_alone() {
    let docker = "-N DOCKER-FORWARD\n-N DOCKER-CT\n-N DOCKER-USER\n-A FORWARD -j DOCKER-USER\n-A FORWARD -j DOCKER-FORWARD\n\
        -A DOCKER-FORWARD -j DOCKER-CT\n-A DOCKER-FORWARD -i docker0 -j ACCEPT\n\
        -A DOCKER-CT -m set --match-set docker-ext-bridges-v4 dst -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT\n";
    assert_eq!(iptables(docker), ALL);
}

/// As the plugin `firewall` of the reference plugins has it, for this container and for another one.
#[test]
fn the_firewall_plugin_lets_each_container_pass() {
    let rules = |pod: &str| {
        iptables(&format!(
            "-N CNI-ADMIN\n-N CNI-FORWARD\n\
             -A FORWARD -m comment --comment \"CNI firewall plugin rules\" -j CNI-FORWARD\n\
             -A CNI-FORWARD -m comment --comment \"CNI firewall plugin admin overrides\" -j CNI-ADMIN\n\
             -A CNI-FORWARD -d {pod}/32 -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT\n\
             -A CNI-FORWARD -s {pod}/32 -j ACCEPT\n"
        ))
    };
    assert_eq!(rules(POD4), NONE);
    assert_eq!(rules("10.22.0.3"), ALL);
}

#[test]
fn ufw_lets_answers_pass_alone() {
    let rules = "-N ufw-before-forward\n-N ufw-user-forward\n-N ufw-after-logging-forward\n\
        -A FORWARD -j ufw-before-forward\n-A FORWARD -j ufw-after-logging-forward\n\
        -A ufw-before-forward -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT\n\
        -A ufw-before-forward -p icmp -m icmp --icmp-type 8 -j ACCEPT\n-A ufw-before-forward -j ufw-user-forward\n\
        -A ufw-after-logging-forward -m limit --limit 3/min --limit-burst 10 -j LOG --log-prefix \"[UFW BLOCK] \"\n";
    assert_eq!(iptables(rules), [true, false]);
}

/// firewalld has policy `accept`, and rejects at the end of the chain.
#[test]
fn firewalld_rejects_what_no_zone_has() {
    use serde_json::json;
    let ct = |key: &str, right: Value| json!({ "match": { "op": "in", "left": { "ct": { "key": key } }, "right": right } });
    let rules = [
        json!([ct("state", json!(["established", "related"])), { "accept": null }]),
        json!([ct("status", json!("dnat")), { "accept": null }]),
        json!([{ "match": { "op": "==", "left": { "meta": { "key": "iifname" } }, "right": "lo" } }, { "accept": null }]),
        json!([ct("state", json!("invalid")), { "drop": null }]),
        json!([{ "reject": { "type": "icmpx", "expr": "admin-prohibited" } }]),
    ];
    assert_eq!(nft("accept", &rules), [[true, false]; 2]);
}

#[test]
fn kube_proxy_accepts_what_it_has_marked() {
    let rules = "-N KUBE-FORWARD\n\
        -A FORWARD -m comment --comment \"kubernetes forwarding rules\" -j KUBE-FORWARD\n\
        -A KUBE-FORWARD -m conntrack --ctstate INVALID -j DROP\n\
        -A KUBE-FORWARD -m mark --mark 0x4000/0x4000 -j ACCEPT\n\
        -A KUBE-FORWARD -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT\n";
    assert_eq!(iptables(rules), [true, false]);
}

#[test]
fn what_drops_the_rest_is_a_policy_as_well() {
    let rest = "-P FORWARD ACCEPT\n-A FORWARD -m state --state RELATED,ESTABLISHED -j ACCEPT\n\
        -A FORWARD -p icmp -j ACCEPT\n-A FORWARD -j REJECT --reject-with icmp-host-prohibited";
    assert_eq!(iptables(rest), [true, false]);
    let reject = serde_json::json!([{ "reject": { "type": "icmp", "expr": "port-unreachable" } }]);
    assert_eq!(nft("accept", &[reject]), [ALL, NONE]);
}

#[test]
fn what_cannot_be_judged_may_accept_and_never_drops() {
    assert_eq!(
        iptables("-A FORWARD -m set --match-set pods src,dst -j ACCEPT"),
        NONE
    );
    assert_eq!(
        iptables("-A FORWARD -p tcp -m tcp --dport 80 -j ACCEPT"),
        NONE
    );
    assert_eq!(iptables("-A FORWARD -j NFQUEUE --queue-num 0"), NONE);
    assert_eq!(iptables("-A FORWARD -j LOG"), ALL);
    let unjudged = "-A FORWARD -m set --match-set bad src -j DROP\n-A FORWARD -i veth+ -j ACCEPT\n\
        -A FORWARD -o veth+ -j ACCEPT";
    assert_eq!(iptables(unjudged), NONE);
    assert_eq!(
        iptables("-A FORWARD ! -d 10.0.0.0/8 -j ACCEPT"),
        [false, true]
    );
}

#[test]
fn chains_call_each_other() {
    assert_eq!(
        iptables("-N A\n-N B\n-A FORWARD -j A\n-A A -j B\n-A B -j ACCEPT"),
        NONE
    );
    assert_eq!(
        iptables("-N A\n-A FORWARD -g A\n-A FORWARD -j ACCEPT\n-A A -i lo -j ACCEPT"),
        ALL
    );
    assert_eq!(
        iptables("-N A\n-A FORWARD -j A\n-A FORWARD -j ACCEPT\n-A A -j RETURN"),
        NONE
    );
    assert_eq!(
        iptables("-N A\n-A FORWARD -j A\n-A FORWARD -j ACCEPT\n-A A -i veth+ -j DROP"),
        [true, false]
    );
    // A circle, which no kernel has.
    assert_eq!(iptables("-N A\n-A FORWARD -j A\n-A A -j A"), NONE);
}

#[test]
fn conditions_of_nft() {
    use serde_json::json;
    let saddr = |family: &str, right: Value| {
        json!([
            { "match": { "op": "==", "left": { "payload": { "protocol": family, "field": "saddr" } }, "right": right } },
            { "counter": { "packets": 0, "bytes": 0 } },
            { "accept": null },
        ])
    };
    let tracked = json!([{ "vmap": { "key": { "ct": { "key": "state" } }, "data": { "set": [
        ["invalid", { "drop": null }],
        [{ "elem": { "val": "established" } }, { "accept": null }],
    ] } } }]);
    let prefix = json!({ "prefix": { "addr": "10.22.0.0", "len": 16 } });
    assert_eq!(
        nft("drop", &[saddr("ip", prefix), tracked.clone()]),
        [NONE, [true, false]]
    );
    let set = json!({ "set": ["10.1.1.1", { "range": ["10.22.0.1", "10.22.0.9"] }] });
    assert_eq!(
        nft("drop", &[saddr("ip", set), tracked.clone()]),
        [NONE, [true, false]]
    );
    assert_eq!(
        nft("drop", &[saddr("ip6", json!("@pods")), tracked]),
        [[true, false], NONE]
    );
    let device = |key: &str, op: &str, right: Value| {
        json!([
            { "match": { "op": op, "left": { "meta": { "key": key } }, "right": right } },
            { "accept": null },
        ])
    };
    assert_eq!(
        nft("drop", &[device("iifname", "==", json!("veth*"))]),
        [[false, true]; 2]
    );
    assert_eq!(
        nft(
            "drop",
            &[device("oifname", "==", json!({ "set": ["eth0", "eth1"] }))]
        ),
        [[false, true]; 2]
    );
    assert_eq!(
        nft("drop", &[device("iifname", "!=", json!("eth0"))]),
        [[false, true]; 2]
    );
    assert_eq!(
        nft(
            "drop",
            &[device("l4proto", "==", json!({ "set": ["udp", "icmp"] }))]
        ),
        [ALL, ALL]
    );
    assert_eq!(
        nft("drop", &[device("mark", "==", json!(16384))]),
        [ALL, ALL]
    );
    assert_eq!(
        nft("drop", &[device("nfproto", "==", json!("ipv6"))]),
        [ALL, NONE]
    );
}

/// `ip saddr != x` is a condition that the packet is of IPv4, too.
#[test]
fn an_opposite_is_about_the_same_header() {
    use serde_json::json;
    let rule = |protocol: &str, field: &str| {
        json!([
            { "match": { "op": "!=", "left": { "payload": { "protocol": protocol, "field": field } }, "right": "10.99.0.1" } },
            { "drop": null },
        ])
    };
    assert_eq!(nft("accept", &[rule("ip", "saddr")]), [ALL, NONE]);
    assert_eq!(nft("accept", &[rule("udp", "dport")]), [NONE, NONE]);
}

#[test]
fn what_iptables_was_asked_about_is_not_asked_twice() {
    let text = table("drop", &[])
        .replace(r#""inet""#, r#""ip""#)
        .replace(r#""t""#, r#""filter""#)
        .replace(r#""f""#, r#""FORWARD""#);
    let bases = |asked: &[Family]| nft::parse(&text, asked).expect("JSON").bases.len();
    assert_eq!(bases(&[]), 1);
    assert_eq!(bases(&[Family::V6]), 1);
    assert_eq!(bases(&[Family::V4]), 0);
    assert!(nft::parse("", &[]).is_err());
}

#[test]
fn each_chain_and_family_is_one_finding_with_its_command() {
    let ruleset = nft::parse(&table("drop", &[]), &[]).expect("JSON");
    let pods = [
        pod(POD4, "veth1"),
        pod("10.22.0.3", "veth2"),
        pod(POD6, "veth1"),
    ];
    let found = dropped(&ruleset, &pods, &["eth0".to_owned()]);
    assert_eq!(found.len(), 2);
    assert!(
        found[0].what.contains("for 10.22.0.2, 10.22.0.3"),
        "{}",
        found[0].what
    );
    assert!(
        found[1].fix.starts_with(
            "nft insert rule inet t f ip6 saddr fd22::/64 accept && nft insert rule inet t f ip6 daddr fd22::/64 accept;"
        ),
        "{}",
        found[1].fix
    );
}

#[test]
fn ranges_are_those_of_the_ipam() {
    let plugin = |text: &str| -> serde_json::Map<String, Value> {
        serde_json::from_str(text).expect("an object")
    };
    let main = plugin(
        r#"{"type": "underpass", "ipam": {"subnet": "10.1.0.0/16", "ranges": [[{"subnet": "10.2.0.0/24"}], [{"subnet": "fd00::/64"}]]}}"#,
    );
    assert_eq!(ranges(&[&main]).len(), 3);
    assert!(ranges(&[&main, &plugin(r#"{"type": "firewall"}"#)]).is_empty());
}
