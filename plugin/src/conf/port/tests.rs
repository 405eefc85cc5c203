use super::*;

use underpass_cni::{Code, NetConf};

fn decode(entries: &str) -> Result<Vec<PortMapping>, Error> {
    #[derive(Default, Deserialize)]
    #[serde(default, rename_all = "camelCase")]
    struct Runtime {
        port_mappings: Vec<Entry>,
    }
    let document = format!(
        r#"{{"name":"n1","type":"underpass","runtimeConfig":{{"portMappings":{entries}}}}}"#
    );
    let runtime: Runtime = NetConf::parse(document.as_bytes())?.runtime()?;
    mappings(&runtime.port_mappings)
}

#[track_caller]
fn one(entry: &str) -> PortMapping {
    decode(&format!("[{entry}]")).expect("a valid entry")[0]
}

#[track_caller]
fn refused(entries: &str, code: Code, words: &[&str]) {
    let error = decode(entries).expect_err("an entry that can't be obeyed");
    assert_eq!(error.code, code, "{error}");
    for word in words {
        assert!(error.to_string().contains(word), "{error}");
    }
}

/// The bindings of a container with one or two addresses, as a person writes them.
fn bound(entries: &str, addresses: &[&str]) -> Vec<String> {
    let addresses: Vec<IpAddr> = addresses
        .iter()
        .map(|text| text.parse().expect("an address"))
        .collect();
    bindings(&decode(entries).expect("valid entries"), &addresses)
        .iter()
        .map(|binding| {
            let HostPort {
                addr,
                port,
                protocol,
                family,
                ..
            } = binding.port;
            let host = if addr == Addr::default() {
                "every".to_owned()
            } else {
                IpAddr::from(addr).to_string()
            };
            let Binding {
                addr,
                container_port,
                ..
            } = binding;
            format!(
                "{protocol} family {family} {host} {} to {addr} {container_port}",
                u16::from_be(port)
            )
        })
        .collect()
}

#[test]
fn protocols_have_no_case_and_a_default() {
    for (text, protocol) in [
        ("", Protocol::Tcp),
        ("tcp", Protocol::Tcp),
        ("UDP", Protocol::Udp),
        ("Sctp", Protocol::Sctp),
    ] {
        let entry = format!(r#"{{"hostPort":80,"containerPort":80,"protocol":"{text}"}}"#);
        assert_eq!(one(&entry).protocol, protocol, "{text:?}");
    }
    assert_eq!(
        one(r#"{"hostPort":80,"containerPort":80,"protocol":null}"#).protocol,
        Protocol::Tcp
    );
}

#[test]
fn ports_reach_from_one_to_the_end() {
    let mapping = one(r#"{"hostPort":65535,"containerPort":1}"#);
    assert_eq!((mapping.host_port, mapping.container_port), (65535, 1));
    for (entry, value) in [
        (r#"{"hostPort":0,"containerPort":80}"#, "hostPort 0"),
        (r#"{"containerPort":80}"#, "hostPort 0"),
        (r#"{"hostPort":-1,"containerPort":80}"#, "hostPort -1"),
        (r#"{"hostPort":65536,"containerPort":80}"#, "hostPort 65536"),
        (r#"{"hostPort":80}"#, "containerPort 0"),
        (r#"{"hostPort":80,"containerPort":0}"#, "containerPort 0"),
        (
            r#"{"hostPort":80,"containerPort":70000}"#,
            "containerPort 70000",
        ),
    ] {
        let entries = format!(r#"[{{"hostPort":1,"containerPort":1}},{entry}]"#);
        refused(&entries, Code::InvalidConfig, &[value, "portMappings[1]"]);
    }
}

#[test]
fn other_values_are_named_with_their_entry() {
    refused(
        r#"[{"hostPort":80,"containerPort":80,"protocol":"icmp"}]"#,
        Code::InvalidConfig,
        &["icmp", "portMappings[0]"],
    );
    for host_ip in [
        "localhost",
        "10.0.0",
        "10.0.0.1/24",
        "fe80::1%eth0",
        "224.0.0.1",
        "::ffff:239.1.2.3",
        "255.255.255.255",
        "ff02::1",
    ] {
        refused(
            &format!(r#"[{{"hostPort":80,"containerPort":80,"hostIP":"{host_ip}"}}]"#),
            Code::InvalidConfig,
            &[host_ip, "portMappings[0]"],
        );
    }
    refused(
        r#"[{"hostPort":"80","containerPort":80}]"#,
        Code::Decode,
        &["hostPort"],
    );
    refused(r#"{"hostPort":80}"#, Code::Decode, &["portMappings"]);
}

#[test]
fn sctp_ports_may_differ() {
    let mapping = one(r#"{"hostPort":80,"containerPort":8080,"protocol":"sctp"}"#);
    assert_eq!((mapping.host_port, mapping.container_port), (80, 8080));
}

#[test]
fn a_host_port_leads_to_one_place() {
    let entry = |rest: &str| format!(r#"{{"hostPort":80,"containerPort":8080{rest}}}"#);
    let elsewhere = |rest: &str| format!(r#"{{"hostPort":80,"containerPort":81{rest}}}"#);
    for (first, second) in [
        ("", ""),
        (r#","protocol":"tcp""#, r#","protocol":"TCP""#),
        (r#","hostIP":"10.0.0.1""#, r#","hostIP":"::ffff:10.0.0.1""#),
        (r#","hostIP":"0.0.0.0""#, ""),
        ("", r#","hostIP":"::""#),
    ] {
        let entries = format!("[{},{}]", entry(first), elsewhere(second));
        refused(
            &entries,
            Code::InvalidConfig,
            &["[0] and [1]", "tcp port 80"],
        );
        let entries = format!("[{},{}]", entry(first), entry(second));
        assert!(decode(&entries).is_ok(), "{entries}");
    }
    for (first, second) in [
        ("", r#","protocol":"udp""#),
        ("", r#","hostIP":"10.0.0.1""#),
        (r#","hostIP":"0.0.0.0""#, r#","hostIP":"::""#),
        (r#","hostIP":"10.0.0.1""#, r#","hostIP":"10.0.0.2""#),
    ] {
        let entries = format!("[{},{}]", entry(first), entry(second));
        assert!(decode(&entries).is_ok(), "{entries}");
    }
}

#[test]
fn each_family_leads_to_the_first_address_of_its_own() {
    let addresses = ["10.0.0.2", "fd00::2", "10.0.0.3", "fd00::3"];
    let entries = r#"[{"hostPort":8080,"containerPort":80},
        {"hostPort":53,"containerPort":53,"protocol":"udp","hostIP":"0.0.0.0"},
        {"hostPort":53,"containerPort":54,"protocol":"udp","hostIP":"::"},
        {"hostPort":90,"containerPort":91,"hostIP":"192.0.2.1"},
        {"hostPort":90,"containerPort":92,"hostIP":"2001:db8::1"}]"#;
    assert_eq!(
        bound(entries, &addresses),
        [
            "6 family 2 every 8080 to 10.0.0.2 80",
            "6 family 10 every 8080 to fd00::2 80",
            "17 family 2 every 53 to 10.0.0.2 53",
            "17 family 10 every 53 to fd00::2 54",
            "6 family 2 192.0.2.1 90 to 10.0.0.2 91",
            "6 family 10 2001:db8::1 90 to fd00::2 92",
        ]
    );
}

#[test]
fn what_is_asked_for_twice_is_bound_once() {
    let entries = r#"[{"hostPort":8080,"containerPort":80,"hostIP":"0.0.0.0"},
        {"hostPort":8080,"containerPort":80},
        {"hostPort":8080,"containerPort":80,"hostIP":"::"}]"#;
    assert_eq!(
        bound(entries, &["10.0.0.2", "fd00::2"]),
        [
            "6 family 2 every 8080 to 10.0.0.2 80",
            "6 family 10 every 8080 to fd00::2 80",
        ]
    );
}

#[test]
fn a_family_that_the_container_lacks_is_left_out() {
    let entries = r#"[{"hostPort":8080,"containerPort":80},
        {"hostPort":90,"containerPort":91,"hostIP":"192.0.2.1"},
        {"hostPort":91,"containerPort":91,"hostIP":"::"}]"#;
    assert_eq!(
        bound(entries, &["10.0.0.2"]),
        [
            "6 family 2 every 8080 to 10.0.0.2 80",
            "6 family 2 192.0.2.1 90 to 10.0.0.2 91",
        ]
    );
    assert_eq!(bound(entries, &[]), Vec::<String>::new());
}
