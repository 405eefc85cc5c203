use super::*;

use underpass_cni::{Attachment, Code, Delegation};

fn network(keys: &str) -> Result<Conf, Error> {
    let document = format!(r#"{{"cniVersion":"1.1.0","name":"n1","type":"underpass",{keys}}}"#);
    Conf::of_network(&NetConf::parse(document.as_bytes())?)
}

fn attachment(keys: &str, args: &str) -> Result<AttachmentConf, Error> {
    let document = format!(r#"{{"cniVersion":"1.1.0","name":"n1","type":"underpass",{keys}}}"#);
    let conf = NetConf::parse(document.as_bytes())?;
    AttachmentConf::of(&Request {
        delegation: Delegation {
            path: Vec::new(),
            stdin: document.into_bytes(),
            version: conf.cni_version,
        },
        conf,
        attachment: Attachment {
            container_id: "c1".to_owned(),
            ifname: "eth0".to_owned(),
            netns: None,
            args: args.to_owned(),
            path: Vec::new(),
        },
    })
}

#[track_caller]
fn refused(keys: &str, code: Code, word: &str) {
    let error = attachment(keys, "").expect_err("a config that can't be obeyed");
    assert_eq!(error.code, code, "{error}");
    assert!(error.to_string().contains(word), "{error}");
}

#[test]
fn an_empty_config_has_the_documented_defaults() {
    let conf = network(r#""ipam":{}"#).expect("a valid config");
    assert_eq!(
        conf,
        Conf {
            device: Device::Veth,
            mtu: None,
            masquerade: Masquerade::Off,
            non_masquerade: None,
            uplinks: None,
            masquerade_addresses: Vec::new(),
            half_open_limit: None,
            bypass: Bypass::Learned,
            conntrack: Conntrack::AsItIs,
            xdp: Xdp::Off,
            spoofing: Spoofing::Dropped,
            mac_check: MacCheck::On,
            tunnel_port: None,
            default_gateway: DefaultGateway::FromIpam,
            dad: Dad::Off,
            bpf_root: PathBuf::from(BPF_ROOT),
            dns: None,
            bandwidth: None,
        }
    );
}

#[test]
fn null_is_the_default_and_keys_have_no_case() {
    let conf =
        network(r#""mtu":null,"uplinks":null,"IPMASQ":true,"antispoof":false,"bypass":null"#)
            .expect("a valid config");
    assert_eq!(conf.mtu, None);
    assert_eq!(conf.uplinks, None);
    assert_eq!(conf.masquerade, Masquerade::On);
    assert_eq!(conf.spoofing, Spoofing::Allowed);
    assert_eq!(conf.bypass, Bypass::Learned);
}

#[test]
fn every_key_is_obeyed() {
    let conf = network(
        r#""mtu":9000,"ipMasq":true,"nonMasqueradeCIDRs":["10.1.2.3/8","fd00::/8"],"uplinks":["eth*"],
           "bypass":"off","conntrackLiberal":true,"xdp":"native","isDefaultGateway":true,"enabledad":true,"bpfRoot":"/run/b","ipMasqBackend":"nftables""#,
    )
    .expect("a valid config");
    assert_eq!(conf.mtu, Some(9000));
    let nets: Vec<_> = conf
        .non_masquerade
        .iter()
        .flatten()
        .map(ToString::to_string)
        .collect();
    assert_eq!(nets, ["10.0.0.0/8", "fd00::/8"]);
    assert_eq!(conf.uplinks, Some(vec![Glob::new("eth*".to_owned())]));
    assert_eq!(conf.bypass, Bypass::Off);
    assert_eq!(conf.conntrack, Conntrack::Liberal);
    assert_eq!(conf.xdp, Xdp::Native);
    assert_eq!(conf.default_gateway, DefaultGateway::Add);
    assert_eq!(conf.dad, Dad::On);
    assert_eq!(conf.bpf_root, PathBuf::from("/run/b"));

    let conf = network(
        r#""ipMasq":true,"masqueradeAddress":["192.0.2.7","2001:db8::7"],"maxHalfOpenFlows":100"#,
    )
    .expect("a valid config");
    assert_eq!(conf.masquerade_addresses.len(), 2);
    assert_eq!(conf.half_open_limit, Some(100));
}

#[test]
fn a_quota_is_a_number_that_can_be_kept() {
    for value in ["0", "-1", "1000001", "4294967297"] {
        let key = "maxHalfOpenFlows";
        refused(
            &format!(r#""{key}":{value}"#),
            Code::InvalidConfig,
            &format!("{key} {value}"),
        );
    }
}

#[test]
fn a_tunnel_has_a_port() {
    let port = |text: &str| network(text).expect("a valid config").tunnel_port;
    assert_eq!(port(r#""tunnelPort":4789"#), NonZeroU16::new(4789));
    assert_eq!(port(r#""tunnelPort":null"#), None);
    for value in ["0", "-1", "65536"] {
        let key = "tunnelPort";
        refused(
            &format!(r#""{key}":{value}"#),
            Code::InvalidConfig,
            &format!("{key} {value}"),
        );
    }
}

#[test]
fn keys_of_the_bridge_plugin_that_fit_are_accepted() {
    let conf = network(
        r#""bridge":"cni0","isGateway":true,"hairpinMode":true,"macspoofchk":true,"antiSpoof":false,"vlan":0,"vlanTrunk":[]"#,
    )
    .expect("a valid config");
    assert_eq!(
        conf.spoofing,
        Spoofing::Allowed,
        "macspoofchk is about MACs alone"
    );
    assert_eq!(conf.mac_check, MacCheck::On);
}

#[test]
fn what_only_a_bridge_can_do_is_refused_by_key_and_value() {
    refused(r#""vlan":100"#, Code::UnsupportedField, "100");
    refused(
        r#""vlanTrunk":[{"id":5}]"#,
        Code::UnsupportedField,
        "vlanTrunk",
    );
    for key in [
        "promiscMode",
        "forceAddress",
        "preserveDefaultVlan",
        "portIsolation",
        "disableContainerInterface",
    ] {
        refused(&format!(r#""{key}":true"#), Code::UnsupportedField, key);
    }
}

#[test]
fn the_runtimes_bandwidth_counts_if_the_network_has_none() {
    let runtime = r#""runtimeConfig":{"bandwidth":{"ingressRate":1000,"ingressBurst":2000}}"#;
    let rate = |keys: &str| {
        let bandwidth = attachment(keys, "")
            .expect("a valid config")
            .network
            .bandwidth;
        bandwidth.and_then(|limits| Some(limits.ingress?.rate))
    };
    assert_eq!(rate(runtime), Some(1000));
    let fixed = r#""ingressRate":7,"ingressBurst":7"#;
    assert_eq!(rate(&format!("{fixed},{runtime}")), Some(7));
    // One key of the network is enough.
    let zero = r#""egressRate":0"#;
    assert_eq!(rate(&format!("{zero},{runtime}")), None);
    refused(
        r#""runtimeConfig":{"bandwidth":{"ingressRate":1000}}"#,
        Code::InvalidConfig,
        "runtimeConfig.bandwidth.ingressRate 1000",
    );
    let nothing = r#""runtimeConfig":{"portMappings":[],"bandwidth":{"ingressRate":0},"other":1}"#;
    assert!(attachment(nothing, "").is_ok());
}

#[test]
fn host_ports_come_from_the_runtime_alone() {
    let ports = r#""portMappings":[{"hostPort":8080,"containerPort":80}]"#;
    let conf = attachment(&format!(r#""runtimeConfig":{{{ports}}}"#), "").expect("a valid config");
    assert_eq!(conf.ports.len(), 1);
    assert_eq!(attachment(ports, "").expect("a valid config").ports, []);
    refused(
        r#""runtimeConfig":{"portMappings":[{"hostPort":8080}]}"#,
        Code::InvalidConfig,
        "containerPort 0",
    );
}

#[test]
fn wrong_values_are_named() {
    refused(r#""mtu":-1"#, Code::InvalidConfig, "-1");
    refused(r#""mtu":70000"#, Code::InvalidConfig, "70000");
    refused(r#""mtu":"1500""#, Code::Decode, "mtu");
    refused(r#""ipMasq":"true""#, Code::Decode, "ipMasq");
    refused(r#""bypass":"sometimes""#, Code::Decode, "sometimes");
    refused(r#""xdp":"offload""#, Code::Decode, "offload");
    refused(
        r#""nonMasqueradeCIDRs":["10.0.0.0"]"#,
        Code::InvalidConfig,
        "10.0.0.0",
    );
    refused(r#""bpfRoot":"pins""#, Code::InvalidConfig, "pins");
    refused(r#""ipMasqBackend":"ipfw""#, Code::InvalidConfig, "ipfw");
    refused(
        r#""runtimeConfig":{"mac":"01:00:5e:00:00:01"}"#,
        Code::InvalidConfig,
        "01:00:5e",
    );
    refused(
        r#""runtimeConfig":{"mac":"02:00"}"#,
        Code::InvalidConfig,
        "02:00",
    );
}

#[test]
fn a_mode_that_is_gone_says_so() {
    for keys in [r#""bypass":"eager""#, r#""BYPASS":"eager","mtu":"1500""#] {
        refused(keys, Code::InvalidConfig, "this mode is gone");
    }
    refused(
        r#""bypass":"eager""#,
        Code::InvalidConfig,
        "use \"learned\"",
    );
}

#[test]
fn the_mac_comes_from_the_strongest_source() {
    let runtime = r#""runtimeConfig":{"mac":"02:00:00:00:00:01"}"#;
    let args = r#""args":{"cni":{"mac":"02-00-00-00-00-02"}}"#;
    let environment = "MAC=02:00:00:00:00:03";
    let mac = |keys: &str, args: &str| {
        attachment(keys, args)
            .expect("a valid config")
            .mac
            .map(|mac| mac.0[5])
    };
    assert_eq!(mac(&format!("{runtime},{args}"), environment), Some(1));
    assert_eq!(mac(args, environment), Some(2));
    assert_eq!(mac(r#""ipam":{}"#, environment), Some(3));
    assert_eq!(mac(r#""ipam":{}"#, "K8S_POD_NAME=x;IgnoreUnknown=1"), None);
}

#[test]
fn unknown_arguments_are_refused_unless_they_may_be_ignored() {
    let error = attachment(r#""ipam":{}"#, "K8S_POD_NAME=x").expect_err("an unknown argument");
    assert_eq!(error.code, Code::InvalidEnvironment);
}

#[test]
fn name_servers_of_the_runtime_replace_those_of_the_config() {
    let conf = attachment(
        r#""dns":{"nameservers":["10.0.0.1"],"domain":"d"},"runtimeConfig":{"dns":{"servers":["10.0.0.2"],"searches":["s"]}}"#,
        "",
    )
    .expect("a valid config");
    let dns = conf.network.dns.expect("set twice");
    assert_eq!(dns.nameservers, ["10.0.0.2"]);
    assert_eq!(dns.search, ["s"]);
    assert_eq!(dns.domain, "d");
}

#[test]
fn cleaning_up_needs_one_key_only() {
    let document = br#"{"name":"n1","type":"underpass","mtu":"wrong","vlan":7,"bpfRoot":"/run/b"}"#;
    let conf = NetConf::parse(document).expect("a name is enough");
    assert_eq!(Conf::bpf_root(&conf), Ok(PathBuf::from("/run/b")));
}
