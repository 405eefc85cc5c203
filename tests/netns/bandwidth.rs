//! Bandwidth limits: both directions are shaped, and everything else of the container goes on working.

use std::{
    net::{SocketAddr, UdpSocket},
    process::Command,
    thread,
    time::{Duration, Instant},
};

use nix::sys::socket::{setsockopt, sockopt};
use rstest::rstest;
use serde_json::{Value, json};
use underpass_tests::{
    leak::Traces,
    netns::Netns,
    patience,
    prelude::*,
    runtime::{Call, Conf},
    traffic::PATIENCE,
};

const PORT: u16 = 8080;
/// 20 Mbit/s, in bytes per second.
const RATE: u64 = 2_500_000;
/// In bytes.
const BURST: u64 = 125_000;
/// In bytes.
const AMOUNT: u64 = 1_500_000;
const DATAGRAMS: usize = 500;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Shaped {
    Ingress,
    Egress,
    Both,
}

/// The default network, for containers with [`RATE`] and [`BURST`].
fn limited(conf: &Conf, shaped: Shaped) -> Conf {
    let mut keys = json!({});
    for (direction, other) in [("ingress", Shaped::Egress), ("egress", Shaped::Ingress)] {
        if shaped != other {
            keys[format!("{direction}Rate")] = json!(RATE * 8);
            keys[format!("{direction}Burst")] = json!(BURST * 8);
        }
    }
    conf.clone()
        .with("runtimeConfig", json!({ "bandwidth": keys }))
}

/// The least time that so many bytes take, which no fast machine can beat and a slow one only exceeds.
fn least(bytes: u64) -> Duration {
    Duration::from_millis((bytes - BURST) * 1000 / RATE)
}

/// The root qdisc of a device, with its statistics.
fn root_qdisc(netns: &Netns, device: &str) -> Result<Value> {
    let mut command = Command::new("tc");
    command.args(["-s", "-j", "qdisc", "show", "dev", device]);
    let text = netns.expect(&mut command, &[])?;
    let all: Vec<Value> = serde_json::from_str(&text).with_context(|| text.clone())?;
    all.into_iter()
        .find(|qdisc| qdisc["root"] == true)
        .with_context(|| format!("no root qdisc on {device}: {text}"))
}

#[rstest]
fn what_a_container_receives_is_shaped_on_the_bypass(
    #[values(V4, V6)] family: Family,
    #[values("world", "pod")] from: &str,
) -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    let pod = lab.pod_with("a", &limited(&lab.conf(), Shaped::Ingress))?;
    let other = lab.pod("b")?;
    let (netns, at) = match from {
        "world" => (lab.world.netns(), family.remote_at(PORT)),
        _ => (other.netns(), other.at(family, PORT)),
    };
    let _server = tcp::Server::start(netns, at)?;
    let meter = Meter::start(&lab.node)?;
    let mut client = tcp::Client::connect(pod.netns(), at)?;
    let elapsed = client.exchange(0, AMOUNT)?.elapsed;
    ensure!(elapsed >= least(AMOUNT), "{AMOUNT} bytes in {elapsed:?}");
    meter.expect(Counter::BypassPeer, 20)?;
    let sent = root_qdisc(lab.node.netns(), pod.host_veth())?["bytes"].as_u64();
    ensure!(
        sent.is_some_and(|sent| sent > AMOUNT * 9 / 10),
        "the qdisc let {sent:?} bytes pass"
    );
    Ok(())
}

#[rstest]
fn what_a_container_sends_is_shaped(
    #[values(V4, V6)] family: Family,
    #[values("world", "pod")] to: &str,
) -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    let pod = lab.pod_with("a", &limited(&lab.conf(), Shaped::Egress))?;
    let other = lab.pod("b")?;
    let (netns, at) = match to {
        "world" => (lab.world.netns(), family.remote_at(PORT)),
        _ => (other.netns(), other.at(family, PORT)),
    };
    let _server = tcp::Server::start(netns, at)?;
    let meter = Meter::start(&lab.node)?;
    let mut client = tcp::Client::connect(pod.netns(), at)?;
    let elapsed = client.exchange(AMOUNT, 0)?.elapsed;
    ensure!(elapsed >= least(AMOUNT), "{AMOUNT} bytes in {elapsed:?}");
    meter.expect(
        match to {
            "world" => Counter::BypassWire,
            _ => Counter::BypassPeer,
        },
        20,
    )
}

/// The queue is on the container's own interface: a socket that sends too fast has to wait, and loses nothing.
#[rstest]
fn a_sender_is_held_back(#[values(V4, V6)] family: Family) -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    let pod = lab.pod_with("a", &limited(&lab.conf(), Shaped::Egress))?;
    let at = family.remote_at(PORT);
    let receiver = lab.world.netns().run(|| UdpSocket::bind(at))?;
    setsockopt(&receiver, sockopt::RcvBufForce, &(16 << 20))?;
    receiver.set_read_timeout(Some(patience::here(PATIENCE)))?;
    let client = udp::Client::open(pod.netns(), family)?;
    let start = Instant::now();
    let counting = thread::spawn(move || {
        let mut buffer = [0; 2048];
        (0..DATAGRAMS)
            .take_while(|_| receiver.recv_from(&mut buffer).is_ok())
            .count()
    });
    let payload = [0x5a; 1400];
    for _ in 0..DATAGRAMS {
        client.send(at, &payload)?;
    }
    let received = counting.join().expect("a count");
    let elapsed = start.elapsed();
    ensure!(received == DATAGRAMS, "{received} of {DATAGRAMS} arrived");
    let bytes = (DATAGRAMS * payload.len()) as u64;
    ensure!(elapsed >= least(bytes), "{bytes} bytes in {elapsed:?}");
    Ok(())
}

#[rstest]
fn a_limited_container_serves_its_host_port(#[values(V4, V6)] family: Family) -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    let mut conf = limited(&lab.conf(), Shaped::Both);
    let mut runtime = conf.json()["runtimeConfig"].clone();
    runtime["portMappings"] = json!(
        ["tcp", "udp"]
            .map(|protocol| json!({ "hostPort": PORT, "containerPort": 80, "protocol": protocol }))
    );
    conf = conf.with("runtimeConfig", runtime);
    let pod = lab.pod_with("a", &conf)?;
    let other = lab.pod("b")?;
    let _tcp = tcp::Server::start(pod.netns(), family.port(80))?;
    let _udp = udp::Server::start(pod.netns(), family.port(80))?;
    let at = SocketAddr::new(family.node(), PORT);
    for (client, expected) in [
        (lab.world.netns(), family.gateway()),
        (other.netns(), other.ip(family)),
    ] {
        let meter = Meter::start(&lab.node)?;
        let mut stream = tcp::Client::connect(client, at)?;
        ensure!(stream.chat(20)?.ip() == expected);
        let elapsed = stream.exchange(AMOUNT, 0)?.elapsed;
        ensure!(elapsed >= least(AMOUNT), "{AMOUNT} bytes in {elapsed:?}");
        let seen = udp::Client::open(client, family)?.chat(at, 20)?.seen;
        ensure!(seen.ip() == expected, "{seen}");
        meter.expect(Counter::BypassPeer, 50)?;
    }
    pod.call_with_result("CHECK").run(&lab.node)?.silence()
}

/// A burst smaller than a packet would stop all of them.
#[rstest]
fn a_tiny_burst_lets_whole_packets_pass(#[values(V4, V6)] family: Family) -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    let conf = lab
        .conf()
        .with("ingressRate", RATE * 8)
        .with("ingressBurst", 8)
        .with("egressRate", RATE * 8)
        .with("egressBurst", 8);
    let pod = lab.pod_with("a", &conf)?;
    let at = family.remote_at(PORT);
    let _tcp = tcp::Server::start(lab.world.netns(), at)?;
    let _udp = udp::Server::start(lab.world.netns(), at)?;
    tcp::Client::connect(pod.netns(), at)?.exchange(100_000, 100_000)?;
    let whole = 1500 - family.header_len() - 8;
    udp::Client::open(pod.netns(), family)?.ask(at, whole - 60)?;
    pod.call_with_result("CHECK").run(&lab.node)?.silence()
}

#[test]
fn check_names_a_limit_that_was_changed() -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    let pod = lab.pod_with("a", &limited(&lab.conf(), Shaped::Both))?;
    let check = || pod.call_with_result("CHECK").run(&lab.node);
    check()?.silence()?;
    for (netns, device, direction) in [
        (lab.node.netns(), pod.host_veth(), "ingress"),
        (pod.netns(), Pod::IFNAME, "egress"),
    ] {
        let tc = |arguments: &str| {
            let mut command = Command::new("tc");
            command.args(arguments.split_whitespace());
            netns.expect(&mut command, &[])
        };
        let says = |words: &[&str]| -> Result<()> {
            let error = check()?.error()?;
            for word in words {
                ensure!(error.msg.contains(word), "{error}");
            }
            Ok(())
        };
        let to = |rate, burst, limit| {
            tc(&format!(
                "qdisc change dev {device} root tbf rate {rate} burst {burst} limit {limit}"
            ))
        };
        to("5mbit", 125_000, 187_500)?;
        says(&[direction, "5000000 bit/s", "20000000", device])?;
        to("20mbit", 125_000, 500_000)?;
        says(&["500000", "187500", device])?;
        tc(&format!("qdisc del dev {device} root"))?;
        says(&[direction, "no token bucket filter", device])?;
        tc(&format!(
            "qdisc add dev {device} root tbf rate 20mbit burst 125000 limit 187500"
        ))?;
        check()?.silence()?;
    }
    Ok(())
}

#[test]
fn nonsense_is_refused_and_changes_nothing() -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    lab.pod("first")?.del()?;
    let before = Traces::of(&lab.node)?;
    let netns = lab.node.netns().sibling("a")?;
    let path = netns.path().display().to_string();
    let table = [
        (json!({ "ingressRate": 1000 }), 7, "burst must also be set"),
        (json!({ "egressBurst": 1000 }), 7, "rate must also be set"),
        (
            json!({ "egressRate": 1000, "egressBurst": 34_359_738_360_u64 }),
            7,
            "more than 4GB",
        ),
        (json!({ "ingressRate": "fast" }), 6, "ingressRate"),
        (
            json!({ "unshapedSubnets": ["10.0.0.0/8"] }),
            2,
            "unshapedSubnets",
        ),
    ];
    for (bad, code, word) in table {
        let conf = lab
            .conf()
            .with("runtimeConfig", json!({ "bandwidth": bad.clone() }));
        let call = |verb| Call::new(verb).attachment("a", &path, "eth0").conf(&conf);
        let error = call("ADD").run(&lab.node)?.error()?;
        ensure!(
            error.code == code && error.to_string().contains(word),
            "{bad}: {error}"
        );
        call("DEL").run(&lab.node)?.silence()?;
        before.expect_same(&lab.node)?;
    }
    Ok(())
}
