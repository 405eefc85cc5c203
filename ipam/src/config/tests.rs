use serde_json::{Value, json};

use super::*;

fn conf(version: &str, document: Value) -> NetConf {
    let Value::Object(mut document) = document else {
        panic!("an object is a config")
    };
    document.insert("cniVersion".into(), version.into());
    document.insert("name".into(), "net".into());
    NetConf::parse(Value::Object(document).to_string().as_bytes()).expect("a config")
}

fn shown(document: Value) -> Result<Vec<String>, String> {
    match pools(&conf("1.0.0", document)) {
        Ok(pools) => Ok(pools.iter().map(ToString::to_string).collect()),
        Err(error) => {
            assert_eq!(error.code, underpass_cni::Code::InvalidConfig);
            Err(error.msg)
        }
    }
}

fn attachment(args: &str) -> Attachment {
    Attachment {
        container_id: "c".into(),
        ifname: "eth0".into(),
        netns: None,
        args: args.into(),
        path: Vec::new(),
    }
}

#[test]
fn the_runtime_comes_first_then_the_single_range_then_the_list() {
    let document = json!({
        "ipam": {"subnet": "10.0.1.0/30", "ranges": [[{"subnet": "10.0.2.0/30"}], [{"Subnet": "2001:db8::/126"}]]},
        "runtimeConfig": {"ipRanges": [[{"subnet": "10.0.3.0/30", "rangeStart": "", "gateway": null}]]},
    });
    let texts = [
        "10.0.3.1-10.0.3.2",
        "10.0.1.1-10.0.1.2",
        "10.0.2.1-10.0.2.2",
        "2001:db8::1-2001:db8::3",
    ];
    assert_eq!(shown(document), Ok(texts.map(str::to_owned).to_vec()));
}

#[test]
fn what_makes_no_sense_is_refused_in_the_known_words() {
    let ranges = |sets: Value| shown(json!({"ipam": {"ranges": sets}}));
    assert_eq!(
        shown(json!({})),
        Err("IPAM config missing 'ipam' key".into())
    );
    assert_eq!(
        shown(json!({"ipam": null})),
        Err("IPAM config missing 'ipam' key".into())
    );
    assert_eq!(
        shown(json!({"ipam": {}})),
        Err("no IP ranges specified".into())
    );
    assert_eq!(
        ranges(json!([[]])),
        Err("invalid range set 0: empty range set".into())
    );
    assert_eq!(
        ranges(json!([[{}]])),
        Err("invalid range set 0: IP <nil> not v4 nor v6".into())
    );
    let same = json!([[{"subnet": "10.0.0.0/24"}], [{"subnet": "10.0.0.0/25"}]]);
    assert_eq!(ranges(same), Err("range set 0 overlaps with 1".into()));
    let split = json!([[{"subnet": "10.0.0.0/24", "rangeEnd": "10.0.0.9"}], [{"subnet": "10.0.0.0/24", "rangeStart": "10.0.0.10"}]]);
    assert!(ranges(split).is_ok());
}

#[test]
fn what_to_do_is_said_and_where() {
    let refusal = |document: Value| {
        let error = pools(&conf("1.0.0", document)).expect_err("no pools");
        assert_eq!(error.code.number(), 7, "{error}");
        error.details
    };
    let of = |set: Value| refusal(json!({"ipam": {"ranges": [[{"subnet": "fd00::/64"}], set]}}));
    let v4 = |key: &str, text: &str| of(json!([{"subnet": "10.0.0.0/24", key: text}]));
    for (said, words) in [
        (refusal(json!({})), ["\"ipam\"", "\"subnet\""]),
        (refusal(json!({"ipam": {}})), ["\"ranges\"", "\"subnet\""]),
        (of(json!([])), ["ipam.ranges[1]", "take it out"]),
        (of(json!([{}])), ["ipam.ranges[1]", "\"subnet\""]),
        (
            of(json!([{"subnet": "10.0.0.0/31"}])),
            ["ipam.ranges[1]", "/30"],
        ),
        (
            of(json!([{"subnet": "fd01::/127"}])),
            ["ipam.ranges[1]", "/126"],
        ),
        (
            of(json!([{"subnet": "10.0.0.5/24"}])),
            ["ipam.ranges[1]", "10.0.0.0/24"],
        ),
        (
            v4("rangeStart", "10.0.1.1"),
            ["\"rangeStart\"", "10.0.0.0/24"],
        ),
        (v4("rangeEnd", "10.0.1.1"), ["\"rangeEnd\"", "10.0.0.0/24"]),
        (
            of(json!([{"subnet": "fd01::/64", "rangeStart": "fd01::9", "rangeEnd": "fd01::3"}])),
            ["must not be behind", "fd01::3"],
        ),
        (
            of(json!([{"subnet": "10.0.0.0/24"}, {"subnet": "fd01::/64"}])),
            ["ipam.ranges[1]", "each family"],
        ),
        (
            of(json!([{"subnet": "10.0.0.0/24"}, {"subnet": "10.0.0.0/25"}])),
            ["ipam.ranges[1]", "in both"],
        ),
        (
            of(json!([{"subnet": "fd00::/80"}])),
            ["ipam.ranges[0] has fd00::1-", "ipam.ranges[1] has fd00::1-"],
        ),
        (
            refusal(json!({"ipam": {"subnet": "10.0.0.1/24"}})),
            ["top level of ipam", "10.0.0.0/24"],
        ),
        (
            refusal(json!({"ipam": {}, "runtimeConfig": {"ipRanges": [[]]}})),
            ["runtimeConfig.ipRanges[0]", "take it out"],
        ),
    ] {
        for word in words {
            assert!(said.contains(word), "{word}: {said}");
        }
    }
}

#[test]
fn old_results_hold_one_address_per_family() {
    let sets = |subnets: &[&str]| {
        let sets: Vec<_> = subnets
            .iter()
            .map(|subnet| json!([{"subnet": subnet}]))
            .collect();
        pools(&conf("0.2.0", json!({"ipam": {"ranges": sets}})))
            .map(|pools| pools.len())
            .map_err(|error| error.msg)
    };
    assert_eq!(sets(&["10.0.0.0/24", "2001:db8::/64"]), Ok(2));
    let refusal =
        Err("CNI version 0.2.0 does not support more than 1 address per family".to_owned());
    assert_eq!(sets(&["10.0.0.0/24", "10.0.1.0/24"]), refusal);
    assert_eq!(sets(&["2001:db8::/64", "2001:db8:1::/64"]), refusal);
}

#[test]
fn requests_are_merged_and_prefix_lengths_ignored() {
    let document = json!({
        "args": {"cni": {"ips": ["10.0.0.3/24", "2001:db8::5"]}},
        "runtimeConfig": {"ips": ["10.0.0.4", "10.0.0.3"]},
    });
    let conf = conf("1.0.0", document);
    let found = requested(
        &conf,
        &attachment("IP=10.0.0.9/8;IgnoreUnknown=1;K8S_POD_NAME=x"),
    )
    .expect("addresses");
    let texts: Vec<_> = found.iter().map(ToString::to_string).collect();
    assert_eq!(texts, ["10.0.0.9", "10.0.0.3", "2001:db8::5", "10.0.0.4"]);
    assert!(requested(&conf, &attachment("K8S_POD_NAME=x")).is_err());
}

#[test]
fn a_request_that_is_no_address_is_refused() {
    for bad in [json!(""), json!("10.0.0"), json!(null)] {
        let conf = conf("1.0.0", json!({"runtimeConfig": {"ips": [bad]}}));
        let error = requested(&conf, &attachment("")).expect_err("no address");
        assert!(
            error.msg.starts_with("cannot understand ip: "),
            "{}",
            error.msg
        );
        assert!(error.details.starts_with("runtimeConfig.ips "), "{error}");
    }
    let empty = conf("1.0.0", json!({}));
    let error = requested(&empty, &attachment("IP=nonsense")).expect_err("no address");
    assert!(error.details.starts_with("IP of CNI_ARGS "), "{error}");
}

#[test]
fn resolv_conf_has_to_be_readable() {
    let error = routes_and_dns(&conf(
        "1.0.0",
        json!({"ipam": {"resolvConf": "/nonexistent/resolv.conf"}}),
    ))
    .expect_err("unreadable");
    assert_eq!(error.code, underpass_cni::Code::Io);
    assert!(
        error.msg.contains("/nonexistent/resolv.conf"),
        "{}",
        error.msg
    );
}
