//! Ours under the name `bandwidth`, after every plugin that makes a veth: both directions are limited, whatever carries the packets.

mod config;
mod others;

use std::{net::SocketAddr, process::Command, time::Duration};

use rstest::rstest;
use serde_json::{Value, json};
use underpass_dataplane::kernel::version;
use underpass_tests::{kernel::Facility, leak::Traces, netns::Netns, prelude::*, runtime::Conf};

use crate::{
    chain::{Chain, IFNAME},
    plugins::{Installed, Name, Program},
    schema,
};

const PORT: u16 = 8080;
/// 20 Mbit/s, in bytes per second.
const RATE: u64 = 2_500_000;
/// In bytes.
const BURST: u64 = 125_000;
/// In bytes.
const AMOUNT: u64 = 1_500_000;

/// What makes the interface, with addresses of one family: Debian's plugins wait seconds for those of IPv6.
fn first(lab: &Lab, kind: &str, family: Family) -> Conf {
    let conf = lab.conf();
    match kind {
        "underpass" => return conf,
        "netkit" => return conf.with("device", "netkit"),
        _ => {}
    }
    let subnet = match family {
        V4 => "10.99.0.0/24",
        V6 => "fd00:99::/64",
    };
    conf.with("name", "foreign")
        .with("type", kind)
        .with("bridge", "br0")
        .with("isGateway", true)
        .with_ipam("ranges", json!([[{ "subnet": subnet }]]))
        .with_ipam("routes", json!([{ "dst": family.everywhere() }]))
}

/// A direction's keys, in bits.
fn keys(direction: &str, rate: u64) -> Value {
    json!({ format!("{direction}Rate"): rate * 8, format!("{direction}Burst"): BURST * 8 })
}

/// Both directions' keys: what is sent has half the rate of what is received.
fn both() -> Value {
    let mut both = keys("ingress", RATE);
    both["egressRate"] = json!(RATE / 2 * 8);
    both["egressBurst"] = json!(BURST * 8);
    both
}

fn bandwidth(node: &Node) -> Value {
    json!({ "type": "bandwidth", "bpfRoot": node.bpf_root(), "capabilities": { "bandwidth": true } })
}

fn ours(name: &'static str) -> Result<Installed> {
    Name::new(name, Program::Underpass).install()
}

/// What makes the interface, and both directions' limits of it.
fn limited<'a>(lab: &'a Lab, link: &Installed, kind: &str, family: Family) -> Chain<'a> {
    Chain::new(&lab.node, &first(lab, kind, family), [bandwidth(&lab.node)])
        .ours(&link.path)
        .runtime("bandwidth", both())
}

/// The least time that so many bytes take, which no fast machine can beat and a slow one only exceeds.
fn least(bytes: u64, rate: u64) -> Duration {
    Duration::from_millis((bytes - BURST) * 1000 / rate)
}

/// The root qdisc of a device, with its statistics.
fn root_qdisc(netns: &Netns, device: &str) -> Result<Value> {
    let mut command = Command::new("tc");
    command.args(["-s", "-j", "qdisc", "show", "dev", device, "root"]);
    let text = netns.expect(&mut command, &[])?;
    let all: Value = serde_json::from_str(&text).context(text)?;
    Ok(all[0].clone())
}

fn tc(netns: &Netns, arguments: &str) -> Result<()> {
    let mut command = Command::new("tc");
    command.args(arguments.split_whitespace());
    netns.expect(&mut command, &[]).map(drop)
}

/// The host's end, by the way that the kernel has it: results name it at different places.
fn host_end(lab: &Lab, netns: &Netns) -> Result<String> {
    let inside = netns.ip_json(&["link", "show", "dev", IFNAME])?;
    let peer = inside[0]["link_index"].as_u64().context("a peer")?;
    let links = lab.node.netns().ip_json(&["link", "show"])?;
    links
        .as_array()
        .into_iter()
        .flatten()
        .find(|link| link["ifindex"] == peer)
        .and_then(|link| link["ifname"].as_str().map(str::to_owned))
        .context("no device of the host is the peer")
}

/// Fails unless the root qdisc is a token bucket filter of that rate, made in a chain.
fn expect_filter(netns: &Netns, device: &str, rate: u64) -> Result<()> {
    let root = root_qdisc(netns, device)?;
    let options = &root["options"];
    let handle = root["handle"]
        .as_str()
        .and_then(|handle| handle.strip_suffix(':'));
    let number = handle.and_then(|handle| u16::from_str_radix(handle, 16).ok());
    ensure!(
        root["kind"] == "tbf"
            && number.is_some_and(|number| (0x1000..0x8000).contains(&number))
            && options["rate"] == rate
            && options["burst"] == BURST,
        "{device} has {root}"
    );
    Ok(())
}

/// Fails unless most of [`AMOUNT`] passed the device's queue, and some of it waited there.
fn expect_queued(netns: &Netns, device: &str) -> Result<()> {
    let root = root_qdisc(netns, device)?;
    let is_over = |key: &str, least| root[key].as_u64().is_some_and(|number| number > least);
    ensure!(
        is_over("bytes", AMOUNT * 9 / 10) && is_over("overlimits", 0),
        "{device} has {root}"
    );
    Ok(())
}

/// Downloads and uploads over a connection, neither faster than the limits of [`both`].
fn both_ways(client: &mut tcp::Client) -> Result<()> {
    let down = client.exchange(0, AMOUNT)?.elapsed;
    ensure!(down >= least(AMOUNT, RATE), "{AMOUNT} bytes in {down:?}");
    let up = client.exchange(AMOUNT, 0)?.elapsed;
    ensure!(up >= least(AMOUNT, RATE / 2), "{AMOUNT} bytes in {up:?}");
    Ok(())
}

/// Uploads and downloads by a port of the host, neither faster than the limits of [`both`] let the container receive and send. The
/// connection ends before the container does.
fn by_host_port(lab: &Lab, netns: &Netns, family: Family) -> Result<()> {
    let _server = tcp::Server::start(netns, family.port(80))?;
    let at = SocketAddr::new(family.node(), PORT);
    let mut client = tcp::Client::connect(lab.world.netns(), at)?;
    let up = client.exchange(AMOUNT, 0)?.elapsed;
    ensure!(up >= least(AMOUNT, RATE), "{AMOUNT} bytes in {up:?}");
    let down = client.exchange(0, AMOUNT)?.elapsed;
    ensure!(
        down >= least(AMOUNT, RATE / 2),
        "{AMOUNT} bytes in {down:?}"
    );
    Ok(())
}

/// A host port that leads to [`by_host_port`]'s server.
fn mapping() -> Value {
    json!([{ "hostPort": PORT, "containerPort": 80, "protocol": "tcp" }])
}

/// A result without what says nothing: the reference writes empty `dns`.
fn facts(result: &Value) -> Value {
    let mut facts = result.clone();
    if let Some(keys) = facts.as_object_mut() {
        keys.retain(|_, value| *value != json!({}));
    }
    facts
}

#[rstest]
fn both_directions(
    #[values(V4, V6)] family: Family,
    #[values("underpass", "netkit", "bridge", "ptp")] kind: &str,
) -> Result<()> {
    needs_root!();
    if kind == "netkit" && Facility::Netkit.is_missing()? {
        return Ok(());
    }
    let lab = Lab::new()?;
    lab.pod("warm")?.del()?;
    let netns = lab.node.netns().sibling("a")?;
    let link = ours("bandwidth")?;
    let chain = limited(&lab, &link, kind, family);
    let [interface, limits] = chain.plugins() else {
        unreachable!("two plugins");
    };
    let made = chain.call("ADD", interface, &netns, None)?.result()?;
    let before = Traces::of(&lab.node)?;
    let passed = chain.call("ADD", limits, &netns, Some(&made))?.result()?;
    ensure!(facts(&passed) == facts(&made), "{passed} instead of {made}");
    let host = host_end(&lab, &netns)?;
    expect_filter(lab.node.netns(), &host, RATE)?;
    expect_filter(&netns, IFNAME, RATE / 2)?;
    chain.check(&netns, &made)?;

    let at = family.remote_at(PORT);
    let _server = tcp::Server::start(lab.world.netns(), at)?;
    let meter = Meter::start(&lab.node)?;
    both_ways(&mut tcp::Client::connect(&netns, at)?)?;
    expect_queued(lab.node.netns(), &host)?;
    expect_queued(&netns, IFNAME)?;
    if kind == "underpass" || kind == "netkit" {
        meter.expect(Counter::BypassPeer, 20)?;
        meter.expect(Counter::BypassWire, 20)?;
    }
    chain.check(&netns, &made).context("CHECK after traffic")?;

    for _ in 0..2 {
        chain.call("DEL", limits, &netns, Some(&made))?.silence()?;
        for (netns, device) in [(lab.node.netns(), host.as_str()), (&netns, IFNAME)] {
            let root = root_qdisc(netns, device)?;
            ensure!(root["kind"] != "tbf", "{device} has {root}");
        }
    }
    before.expect_same(&lab.node)?;
    chain
        .call("CHECK", interface, &netns, Some(&made))?
        .silence()?;
    tcp::Client::connect(&netns, at)?.exchange(AMOUNT, AMOUNT)?;
    chain.del(&netns, &made)
}

/// A flow that took the bypass before there was a limit, also where the uplink's driver put its frames into the container.
#[rstest]
fn a_known_flow_is_limited_from_then_on(
    #[values(V4, V6)] family: Family,
    #[values("off", "native")] xdp: &str,
) -> Result<()> {
    needs_root!();
    if xdp == "native" && version() < (5, 13) {
        anstream::println!("not on this kernel: xdp {xdp:?} needs Linux 5.13");
        return Ok(());
    }
    let lab = Lab::new()?;
    let conf = lab.conf().with("device", "veth").with("xdp", xdp);
    let pod = lab.pod_with("a", &conf)?;
    let at = family.remote_at(PORT);
    let _server = tcp::Server::start(lab.world.netns(), at)?;
    let mut client = tcp::Client::connect(pod.netns(), at)?;
    let meter = Meter::start(&lab.node)?;
    client.exchange(AMOUNT, AMOUNT)?;
    meter.expect(Counter::BypassPeer, 20)?;

    let link = ours("bandwidth")?;
    let chain = Chain::new(&lab.node, &conf, [bandwidth(&lab.node)])
        .version("1.1.0")
        .ours(&link.path)
        .runtime("bandwidth", both());
    let limits = &chain.plugins()[1];
    let call = |verb| chain.call(verb, limits, pod.netns(), Some(pod.result()));
    call("ADD")?.result()?;
    let meter = Meter::start(&lab.node)?;
    both_ways(&mut client)?;
    meter.expect(Counter::BypassPeer, 20)?;
    expect_queued(lab.node.netns(), pod.host_veth())?;
    expect_queued(pod.netns(), IFNAME)?;
    call("CHECK")?.silence()?;
    let check = || pod.call_with_result("CHECK").run(&lab.node)?.silence();
    check()?;
    call("DEL")?.silence()?;
    check().context("CHECK of the interface without the limit")
}

/// What Kubernetes' networks chain, with one file of ours under three names.
#[rstest]
fn the_usual_chain(
    #[values(V4, V6)] family: Family,
    #[values("0.4.0", "1.0.0")] version: &str,
) -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    // What a host port loads stays.
    let warm = lab.conf().with_host_port(PORT, 80);
    lab.pod_with("warm", &warm)?.del()?;
    let netns = lab.node.netns().sibling("a")?;
    let names = [ours("portmap")?, ours("bandwidth")?];
    let others = [
        json!({ "type": "portmap", "bpfRoot": lab.node.bpf_root(), "capabilities": { "portMappings": true } }),
        bandwidth(&lab.node),
        json!({ "type": "tuning", "sysctl": { "net.ipv4.conf.eth0.arp_filter": "1" }, "dataDir": "/run/cni/tuning" }),
        json!({ "type": "firewall", "backend": "iptables" }),
        json!({ "type": "sbr" }),
    ];
    let chain = Chain::new(&lab.node, &lab.conf(), others)
        .version(version)
        .ours(&names[0].path)
        .ours(&names[1].path)
        .runtime("bandwidth", both())
        .runtime("portMappings", mapping());
    let before = Traces::of(&lab.node)?;
    let result = chain.add(&netns)?;
    schema::validate(version, &result)?;
    chain.check(&netns, &result)?;
    by_host_port(&lab, &netns, family)?;
    chain
        .check(&netns, &result)
        .context("CHECK after traffic")?;
    chain.del(&netns, &result)?;
    // Debian's `sbr` wants its interface to be there.
    for plugin in chain.plugins().iter().take(3).rev() {
        chain
            .call("DEL", plugin, &netns, Some(&result))?
            .silence()
            .context("a second DEL")?;
    }
    tcp::refuses(lab.world.netns(), SocketAddr::new(family.node(), PORT))?;
    before.expect_same(&lab.node)
}

/// A host port and limits of a container that is not ours, in either order.
#[rstest]
fn with_a_host_port(
    #[values(V4, V6)] family: Family,
    #[values("bridge", "ptp")] kind: &str,
    #[values("bandwidth", "portmap")] before: &str,
) -> Result<()> {
    needs_root!();
    let lab = match kind {
        // A bridge carries answers that a strict firewall has not seen the questions of.
        "bridge" => Lab::open()?,
        _ => Lab::new()?,
    };
    let netns = lab.node.netns().sibling("a")?;
    let names = [ours("portmap")?, ours("bandwidth")?];
    let portmap = json!({ "type": "portmap", "bpfRoot": lab.node.bpf_root(), "capabilities": { "portMappings": true } });
    let mut others = [bandwidth(&lab.node), portmap];
    if before == "portmap" {
        others.reverse();
    }
    let chain = Chain::new(&lab.node, &first(&lab, kind, family), others)
        .ours(&names[0].path)
        .ours(&names[1].path)
        .runtime("bandwidth", both())
        .runtime("portMappings", mapping());
    let result = chain.add(&netns)?;
    chain.check(&netns, &result)?;
    by_host_port(&lab, &netns, family)?;
    expect_queued(lab.node.netns(), &host_end(&lab, &netns)?)?;
    expect_queued(&netns, IFNAME)?;
    chain.check(&netns, &result)?;
    chain.del(&netns, &result)
}

#[rstest]
fn check_names_a_limit_that_was_changed(#[values("underpass", "ptp")] kind: &str) -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    let netns = lab.node.netns().sibling("a")?;
    let link = ours("bandwidth")?;
    let chain = limited(&lab, &link, kind, V4);
    let result = chain.add(&netns)?;
    let host = host_end(&lab, &netns)?;
    let check = || chain.call("CHECK", &chain.plugins()[1], &netns, Some(&result));
    check()?.silence()?;
    for (place, device, direction) in [
        (lab.node.netns(), host.as_str(), "ingress"),
        (&netns, IFNAME, "egress"),
    ] {
        let says = |word: &str| -> Result<()> {
            let error = check()?.error()?;
            ensure!(
                error.code == 100
                    && [word, direction, device]
                        .iter()
                        .all(|word| error.msg.contains(word)),
                "{error}"
            );
            Ok(())
        };
        tc(
            place,
            &format!("qdisc change dev {device} root tbf rate 5mbit burst 125000 limit 187500"),
        )?;
        says("5000000 bit/s")?;
        tc(place, &format!("qdisc del dev {device} root"))?;
        says("no token bucket filter")?;
        let rate = if direction == "ingress" {
            RATE
        } else {
            RATE / 2
        };
        let limit = BURST + rate * 25 / 1000;
        tc(
            place,
            &format!(
                "qdisc add dev {device} root handle 2: tbf rate {} burst {BURST} limit {limit}",
                rate * 8
            ),
        )?;
        check()?.silence()?;
    }
    chain.del(&netns, &result)
}
