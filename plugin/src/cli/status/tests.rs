use std::net::Ipv6Addr;

use super::*;
use crate::stopwatch::Step;

fn status() -> Status {
    Status {
        version: "1.2.3",
        abi: 1,
        kernel: "6.1.0".to_owned(),
        bpf_root: "/run/b".to_owned(),
        loaded: true,
        other_build: true,
        other_layouts: vec![6],
        left_behind: vec!["veth9".to_owned()],
        epoch: 3,
        features: vec![Feature {
            name: "BPF_F_IPV6",
            present: false,
            reason: "needs kernel 6.16".to_owned(),
            purpose: "checksums",
        }],
        network_stack: NetworkStack {
            tcp_tracking: stack::TcpTracking::Absent,
            ipsec_policies: Some(false),
            feed_ms: stack::FeedMs {
                tcp: None,
                udp: 9_216,
                icmp: 9_216,
                sctp: 9_216,
            },
            in_force: Some(true),
        },
        devices: vec![Device {
            name: "eth0".to_owned(),
            ifindex: 2,
            kind: DeviceKind::Uplink,
            programs: vec![Program {
                name: "from_wire",
                hook: "ingress",
                attached: false,
            }],
        }],
        endpoints: vec![Endpoint {
            address: "10.0.0.2/24".to_owned(),
            device: "veth0".to_owned(),
            attachment: "n1:c1:eth0".to_owned(),
        }],
        host_ports: [
            ("n1:c2:eth0", "tcp", port::State::Serving),
            ("n1:c1:eth0", "tcp", port::State::Waiting),
            ("n1:c1:eth0", "udp", port::State::Closed),
        ]
        .map(|(attachment, protocol, state)| port::HostPort {
            address: Ipv6Addr::UNSPECIFIED.into(),
            port: 8080,
            protocol,
            container_address: Ipv6Addr::LOCALHOST.into(),
            container_port: 80,
            attachment: attachment.to_owned(),
            state,
        })
        .into(),
        last_add: Some(Times {
            total_us: 4_709,
            steps: [("config", 204), ("link", 2_505), ("maps", 2_000)]
                .map(|(step, us)| Step {
                    step: step.to_owned(),
                    us,
                })
                .into(),
        }),
        counters: BTreeMap::from([("learned", 0), ("bypass_peer", 7)]),
    }
}

fn printed(status: &Status) -> String {
    let mut out = Vec::new();
    status
        .print(&mut anstream::StripStream::new(&mut out))
        .expect("a vector takes everything");
    String::from_utf8(out).expect("text")
}

#[test]
fn a_node_reads_well() {
    let text: Vec<_> = printed(&status())
        .lines()
        .map(|line| line.trim_end().to_owned())
        .collect();
    insta::assert_snapshot!(text.join("\n"), @r"
    underpass 1.2.3 on kernel 6.1.0
    programs: loaded, pinned at /run/b (layout 1)
    by another build: this one uses what is loaded, and takes over by `underpass upgrade`
    also there: layout 6 of another version; `underpass unload` removes it, too
    left behind: veth9 leads to a container that no map here knows; recreate the container

    Kernel features
      BPF_F_IPV6           no   needs kernel 6.16: checksums

    Network stack
      IPsec policies       none
      TCP tracking         absent
        The kernel has no connection tracking now. TCP is carried as if it were strict, which it is by default.
      Fed every            UDP 9.2 s, ICMP 9.2 s, SCTP 9.2 s
        So often a packet of each direction goes through the stack: connection tracking keeps the flow, and the
        firewall is asked again. It is a third of the shortest net.netfilter.nf_conntrack_*_timeout* that applies,
        and at most 10 s.

    Devices
      eth0             uplink  ingress: from_wire MISSING

    Endpoints
      10.0.0.2/24                              veth0            n1:c1:eth0

    Host ports
      [::]:8080/tcp                    [::1]:80                     n1:c2:eth0
      [::]:8080/tcp                    [::1]:80                     n1:c1:eth0 (waits: a newer mapping serves the port)
      [::]:8080/udp                    [::1]:80                     n1:c1:eth0 (closed: the port of a tunnel of the node)

    Last ADD
      4.70 ms, most of it in:
              2.50 ms  link
              2.00 ms  maps
              0.20 ms  config

    Counters (those that are not zero)
                 7  bypass_peer                packets put straight into a pod, past the stack
    ");
}

#[test]
fn a_node_without_programs_says_what_loads_them() {
    let text = printed(&Status {
        loaded: false,
        ..status()
    });
    assert!(
        text.contains("not loaded at /run/b: the first ADD loads them"),
        "{text}"
    );
    assert!(!text.contains("Devices"), "{text}");
}

#[test]
fn scripts_find_every_field() {
    let json = serde_json::to_value(status()).expect("plain data");
    assert_eq!(json["bpfRoot"], "/run/b");
    assert_eq!(json["leftBehind"][0], "veth9");
    assert_eq!(json["devices"][0]["kind"], "uplink");
    assert_eq!(json["devices"][0]["programs"][0]["program"], "from_wire");
    assert_eq!(json["devices"][0]["programs"][0]["attached"], false);
    assert_eq!(json["endpoints"][0]["address"], "10.0.0.2/24");
    assert_eq!(json["hostPorts"][0]["containerAddress"], "::1");
    assert_eq!(json["hostPorts"][1]["state"], "waiting");
    assert_eq!(json["lastAdd"]["totalUs"], 4_709);
    assert_eq!(json["lastAdd"]["steps"][1]["step"], "link");
    assert_eq!(json["counters"]["bypass_peer"], 7);
}
