//! Where the routing table alone does not say how a flow goes: several next hops, marks, answers by another way than the questions, pods
//! that the bypass can't reach. Both directions take it, or none: whatever is in the stack is complete there.

use std::{net::SocketAddr, thread, time::Duration};

use rstest::rstest;
use serde_json::json;
use underpass_tests::{
    capture::Capture,
    frame,
    kernel::Facility,
    netns::Netns,
    prelude::*,
    rtnl::Route,
    runtime::Conf,
    second::{Kind, Second},
    traffic::SILENCE,
    wire::Wire,
    world::World,
};

const PORT: u16 = 443;
/// Transfers at a time, and the bytes of each, both ways.
const TRANSFERS: usize = 12;
const BYTES: u64 = 1_000_000;
/// Questions of a chat.
const MANY: usize = 30;

/// What leaves the world with this mark does not arrive.
const LOST: u32 = 0x77;

/// What leaves with this mark is routed by this table.
const MARK: u32 = 7;
const TABLE: u32 = 200;

/// What may have the table as well: low delay, as a TOS and as a traffic class.
const CLASS: u8 = 0x10;

/// Fails unless every transfer between a client and a server comes to its end.
fn all_finish(client: &Netns, server: SocketAddr) -> Result<()> {
    let transfer = || -> Result<()> {
        tcp::Client::connect(client, server)?.exchange(BYTES, BYTES)?;
        Ok(())
    };
    let ends = thread::scope(|scope| {
        let all: Vec<_> = (0..TRANSFERS).map(|_| scope.spawn(transfer)).collect();
        all.into_iter()
            .map(|one| one.join().expect("a transfer does not panic"))
            .collect::<Vec<_>>()
    });
    let finished = ends.iter().filter(|end| end.is_ok()).count();
    ends.into_iter()
        .collect::<Result<()>>()
        .with_context(|| format!("{finished} of {TRANSFERS} transfers finish"))
}

/// A network whose pods the world has routes to, or not.
fn network(lab: &Lab, masquerade: bool) -> Result<Conf> {
    lab.world.route_pods()?;
    Ok(lab.conf().with("ipMasq", masquerade))
}

/// From a pod to the world and, where the world may, the other way.
fn both_ways(lab: &Lab, pod: &Pod, family: Family, masquerade: bool) -> Result<()> {
    let remote = family.remote_at(PORT);
    let _server = tcp::Server::start(lab.world.netns(), remote)?;
    all_finish(pod.netns(), remote).context("to the world")?;
    if masquerade {
        return Ok(());
    }
    let _inside = tcp::Server::start(pod.netns(), family.port(PORT))?;
    all_finish(lab.world.netns(), pod.at(family, PORT)).context("from the world")
}

/// A node that leaves by two uplinks at once.
fn two_uplinks() -> Result<(Lab, Second)> {
    let lab = Lab::new()?;
    let second = Second::connect(&lab, Kind::Wire(Wire::Ethernet))?;
    Second::share(&lab)?;
    Ok((lab, second))
}

/// Has the firewall drop answers to SYNs that are INVALID without a word, where they may be. A client that asks again does so with another
/// flow label, and with that by another uplink, whose address its masqueraded flow gets, as nobody has answered yet: an answer to the
/// first SYN comes too late.
fn ignore_late_answers(lab: &Lab, family: Family, masquerade: bool) -> Result<()> {
    if family == V4 || !masquerade {
        return Ok(());
    }
    lab.firewall.load(
        "insert rule inet lab tracked tcp flags & (syn | ack) == syn | ack ct state invalid drop",
    )
}

#[rstest]
#[case(V4, "net/ipv4", 0)]
#[case(V4, "net/ipv4", 1)]
#[case(V6, "net/ipv6", 0)]
#[case(V6, "net/ipv6", 1)]
#[case(V6, "net/ipv6", 2)]
#[case(V4, "net/ipv4", 2)]
fn two_next_hops(
    #[case] family: Family,
    #[case] folder: &str,
    #[case] policy: u32,
    #[values(true, false)] masquerade: bool,
) -> Result<()> {
    needs_root!();
    let (lab, _second) = two_uplinks()?;
    let key = format!("{folder}/fib_multipath_hash_policy");
    lab.node.netns().set_sysctl(&key, &policy.to_string())?;
    let pod = lab.pod_with("a", &network(&lab, masquerade)?)?;
    ignore_late_answers(&lab, family, masquerade)?;
    both_ways(&lab, &pod, family, masquerade)
}

/// Loses the world's first answer to each client's SYN, behind its back: a server that is told of the loss (as it is when its own firewall
/// drops the answer) forgets whom it has answered, and meets the rest of the handshake with a RST.
fn lose_first_answers(world: &Netns) -> Result<()> {
    world.nft(&format!(
        "add table inet loss
         add set inet loss lost {{ type inet_service; flags dynamic; }}
         add chain inet loss answers {{ type filter hook output priority filter; }}
         add rule inet loss answers tcp flags & (syn | ack) == syn | ack tcp dport != @lost add @lost {{ tcp dport }} meta mark set {LOST}",
    ))?;
    // The mark is read (an extension of the packet, at SKF_AD_OFF + SKF_AD_MARK); with that one the packet is stolen (4), others go on (0).
    let stolen = format!("4,32 0 0 4294963220,21 0 1 {LOST},6 0 0 4,6 0 0 0");
    let tc = |words: &[&str]| world.expect(std::process::Command::new("tc").args(words), &[]);
    for link in [World::LINK, Second::LINK] {
        let bpf = ["bpf", "direct-action", "bytecode", &stolen];
        tc(&["qdisc", "add", "dev", link, "clsact"])?;
        tc(&[&["filter", "add", "dev", link, "egress"], &bpf[..]].concat())?;
    }
    Ok(())
}

/// The first answer to a SYN is lost: the client asks again, by another uplink where the flow label decides, and the server answers what
/// it was asked first once more. Either answer arrives, or a later one.
#[rstest]
fn a_connection_is_asked_for_twice(
    #[values(V4, V6)] family: Family,
    #[values(true, false)] masquerade: bool,
) -> Result<()> {
    needs_root!();
    let (lab, _second) = two_uplinks()?;
    let pod = lab.pod_with("a", &network(&lab, masquerade)?)?;
    ignore_late_answers(&lab, family, masquerade)?;
    lose_first_answers(lab.world.netns())?;
    both_ways(&lab, &pod, family, masquerade)
}

/// Has the node leave by its second uplink with what a rule of its routing selects.
fn leave_by_second(lab: &Lab, selector: &str) -> Result<()> {
    for (family, option) in [(V4, "-4"), (V6, "-6")] {
        let route = format!(
            "route add {} {} table {TABLE}",
            family.everywhere(),
            Second::way(family)
        );
        let rule = format!("rule add {selector} lookup {TABLE}");
        for line in [route, rule] {
            let mut ip = std::process::Command::new("ip");
            ip.arg(option).args(line.split(' '));
            lab.node.netns().expect(&mut ip, &[])?;
        }
    }
    Ok(())
}

#[rstest]
fn a_mark_chooses_the_route(
    #[values(V4, V6)] family: Family,
    #[values(true, false)] masquerade: bool,
) -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    let _second = Second::connect(&lab, Kind::Wire(Wire::Ethernet))?;
    leave_by_second(&lab, &format!("fwmark {MARK}"))?;
    lab.firewall.load(&format!(
        "add chain inet lab marking {{ type filter hook prerouting priority -150; }}
         add rule inet lab marking ip saddr {} ip daddr != {} meta mark set {MARK}
         add rule inet lab marking ip6 saddr {} ip6 daddr != {} meta mark set {MARK}",
        V4.pods(),
        V4.pods(),
        V6.pods(),
        V6.pods(),
    ))?;
    let pod = lab.pod_with("a", &network(&lab, masquerade)?)?;
    both_ways(&lab, &pod, family, masquerade)
}

/// Has all that a pod sends be of [`CLASS`].
fn classify(pod: &Pod) -> Result<()> {
    let dscp = CLASS >> 2;
    pod.netns().nft(&format!(
        "table inet classes {{
             chain output {{
                 type filter hook output priority mangle
                 ip dscp set {dscp}
                 ip6 dscp set {dscp}
             }}
         }}",
    ))
}

/// How many frames with this port at either end arrived in the world by its first link, and by its second.
struct Links([Capture; 2]);

impl Links {
    fn watch(lab: &Lab) -> Result<Self> {
        let watch = |link| Capture::start(lab.world.netns(), link);
        Ok(Self([watch(World::LINK)?, watch(Second::LINK)?]))
    }

    fn arrived(&self) -> [usize; 2] {
        // The last ones are on their way into the captures.
        thread::sleep(SILENCE / 8);
        let is_ours = |bytes: &&Vec<u8>| {
            let ports = frame::read(bytes).and_then(|seen| seen.ports);
            ports.is_some_and(|(from, to)| [from, to].contains(&PORT))
        };
        let Self(captures) = self;
        captures
            .each_ref()
            .map(|capture| capture.frames().iter().filter(is_ours).count())
    }
}

/// The TOS of IPv4, the traffic class of IPv6: those of one pod go another way than those of the next, by the stack and past it.
#[rstest]
fn a_class_chooses_the_route(
    #[values(V4, V6)] family: Family,
    #[values(true, false)] masquerade: bool,
) -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    let _second = Second::connect(&lab, Kind::Wire(Wire::Ethernet))?;
    leave_by_second(&lab, &format!("tos {CLASS:#x}"))?;
    let conf = network(&lab, masquerade)?;
    let (urgent, plain) = (lab.pod_with("a", &conf)?, lab.pod_with("b", &conf)?);
    classify(&urgent)?;
    for (pod, link, address) in [
        (&urgent, 1, Second::node(family)),
        (&plain, 0, family.node()),
    ] {
        let links = Links::watch(&lab)?;
        let meter = Meter::start(&lab.node)?;
        both_ways(&lab, pod, family, masquerade).with_context(|| pod.name().to_owned())?;
        meter.expect(Counter::BypassWire, 100)?;
        let arrived = links.arrived();
        ensure!(
            arrived[link] > 100 && arrived[1 - link] == 0,
            "{}: {arrived:?}",
            pod.name()
        );
        let remote = family.remote_at(PORT);
        let _server = tcp::Server::start(lab.world.netns(), remote)?;
        let seen = tcp::visit(pod.netns(), remote)?;
        let expected = if masquerade { address } else { pod.ip(family) };
        ensure!(seen == expected, "{} is {seen}", pod.name());
    }
    Ok(())
}

/// The way of a flow is looked at again with a packet of now: it is the way of the class that the flow has now.
#[rstest]
fn a_flow_that_changes_its_class_changes_its_way(#[values(V4, V6)] family: Family) -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    let _second = Second::connect(&lab, Kind::Wire(Wire::Ethernet))?;
    leave_by_second(&lab, &format!("tos {CLASS:#x}"))?;
    let pod = lab.pod_with("a", &network(&lab, false)?)?;
    let remote = family.remote_at(PORT);
    let _server = udp::Server::start(lab.world.netns(), remote)?;
    let mut client = udp::Client::open(pod.netns(), family)?;
    let links = Links::watch(&lab)?;
    client.chat(remote, MANY)?;
    ensure!(links.arrived()[1] == 0, "{:?}", links.arrived());
    classify(&pod)?;
    eventually("it leaves by the second uplink", || {
        let [_, before] = links.arrived();
        client.ask(remote, 100)?;
        let [_, after] = links.arrived();
        ensure!(after > before, "{:?}", links.arrived());
        Ok(())
    })?;
    let ([before, _], meter) = (links.arrived(), Meter::start(&lab.node)?);
    client.chat(remote, MANY)?;
    let [after, _] = links.arrived();
    ensure!(after == before, "{} by the first again", after - before);
    meter.expect(Counter::BypassWire, MANY as u64 / 2)
}

/// By another network card, and by a tunnel that the bypass does not serve.
#[rstest]
fn answers_come_by_another_uplink(
    #[values(V4, V6)] family: Family,
    #[values(Kind::Wire(Wire::Ethernet), Kind::Wire(Wire::WireGuard), Kind::Tunnel)] kind: Kind,
) -> Result<()> {
    needs_root!();
    if let Kind::Wire(wire) = kind
        && wire.is_missing()?
    {
        return Ok(());
    }
    let lab = Lab::new()?;
    let _second = Second::connect(&lab, kind)?;
    let conf = network(&lab, false)?;
    Second::answer(&lab)?;
    let pod = lab.pod_with("a", &conf)?;
    both_ways(&lab, &pod, family, false)
}

/// What a shaped pod gets passes its queue, and with that its MAC, which it may have changed: there is no bypass to it.
#[rstest]
fn a_pod_that_may_change_its_mac(
    #[values(V4, V6)] family: Family,
    #[values("shaped", "netkit")] what: &str,
    #[values("world", "pod")] peer: &str,
) -> Result<()> {
    needs_root!();
    if what == "netkit" && Facility::Netkit.is_missing()? {
        return Ok(());
    }
    let lab = Lab::new()?;
    let plain = network(&lab, false)?;
    let free = plain.clone().with("macspoofchk", false);
    let (conf, other) = if what == "shaped" {
        let limit = json!({ "ingressRate": 800_000_000, "ingressBurst": 8_000_000 });
        let shaped = free.with("runtimeConfig", json!({ "bandwidth": limit }));
        (shaped, plain)
    } else {
        (free.with("device", "veth"), plain.with("device", "netkit"))
    };
    let pod = lab.pod_with("a", &conf)?;
    if peer == "world" {
        return both_ways(&lab, &pod, family, false);
    }
    let other = lab.pod_with("b", &other)?;
    for (client, server) in [(&pod, &other), (&other, &pod)] {
        let _server = tcp::Server::start(server.netns(), family.port(PORT))?;
        all_finish(client.netns(), server.at(family, PORT))
            .with_context(|| format!("from {} to {}", client.name(), server.name()))?;
    }
    Ok(())
}

#[rstest]
fn a_learned_flow_follows_a_change_of_route(#[values(V4, V6)] family: Family) -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    let pod = lab.pod("a")?;
    let server = family.remote_at(PORT);
    let _server = udp::Server::start(lab.world.netns(), server)?;
    let mut client = udp::Client::open(pod.netns(), family)?;
    client.chat(server, 5)?;
    let to = format!("{}/{}", family.remote(), family.host_bits());
    let nowhere = Route::to(&to).blackhole();
    lab.node.netns().rtnl(|node| node.add_route(nowhere))?;
    // A flow is checked again about once a second.
    thread::sleep(Duration::from_millis(2500));
    client.hears_nothing(server)
}
