//! The same where somebody has the tuple that the stack has given to somebody else, or wants it.

use std::{net::SocketAddr, thread, time::Duration};

use rstest::rstest;
use serde_json::Value;
use underpass_tests::{
    capture::Capture,
    frame::{self, Ends},
    netfilter::{
        Transport,
        kube_proxy::{
            Mode::{Iptables, Nftables},
            Policy, Service,
        },
    },
    prelude::*,
    second::{Kind, Second},
    traffic::{PATIENCE, SILENCE, raw::RawLink},
    wire::Wire,
    world::World,
};

use super::{MANY, MOST, make_forgetful, set_liberal};
use crate::{
    impostors::forged::Stranger,
    kube_proxy::{BY_POD, PORT, Scene, crosses, node_at},
};

/// The source port that all want.
const SOURCE: u16 = 40_000;
/// Ports of the node.
const NODE_PORT: u16 = 30_500;
const ANOTHER_PORT: u16 = 30_501;

/// A lab whose stack sends what goes to the Service to a server in the world, and masquerades such pods. They keep their source port where
/// that is free.
fn masquerading(family: Family, pods: &[&str]) -> Result<(Lab, Vec<Pod>)> {
    let lab = Lab::new()?;
    let conf = lab.conf().with("ipMasq", false).with("maxHalfOpenFlows", 2);
    let pods = pods
        .iter()
        .map(|name| lab.pod_with(name, &conf))
        .collect::<Result<Vec<_>>>()?;
    let ip = family.nft();
    let service = family.service();
    let remote = match family {
        V4 => family.remote().to_string(),
        V6 => format!("[{}]", family.remote()),
    };
    let sources: Vec<String> = pods.iter().map(|pod| pod.ip(family).to_string()).collect();
    let sources = sources.join(", ");
    lab.firewall.load(&format!(
        "table inet somebody {{
            chain in {{
                type nat hook prerouting priority dstnat; policy accept;
                {ip} daddr {service} dnat {ip} to {remote}
            }}
            chain out {{
                type nat hook postrouting priority srcnat; policy accept;
                {ip} saddr {{ {sources} }} oifname {} masquerade
            }}
        }}",
        Node::UPLINK
    ))?;
    Ok((lab, pods))
}

/// The port that a server in the world sees of a pod that we masquerade, and that asks from this one.
fn port_of_ours(lab: &Lab, family: Family, source: u16) -> Result<u16> {
    let ours = lab.pod("ours")?;
    let mut client = udp::Client::open_at(ours.netns(), family, source)?;
    Ok(client.ask(family.remote_at(PORT), 100)?.seen.port())
}

/// Whoever asks once by the stack's masquerade, and is answered, pays for nothing; and nobody else gets its port, whether there is room in an
/// account or not.
#[rstest]
fn single_questions_cost_nothing(#[values(V4, V6)] family: Family) -> Result<()> {
    const QUESTIONS: u16 = 20;
    needs_root!();
    let (lab, pods) = masquerading(family, &["asking"])?;
    let server = family.remote_at(PORT);
    let _server = udp::Server::start(lab.world.netns(), server)?;
    let meter = Meter::start(&lab.node)?;
    for source in SOURCE..SOURCE + QUESTIONS {
        let mut client = udp::Client::open_at(pods[0].netns(), family, source)?;
        let seen = client.ask(server, 100)?.seen.port();
        ensure!(seen == source, "asked from {source}, seen from {seen}");
    }
    meter.expect_none(Counter::OverQuota)?;
    let last = SOURCE + QUESTIONS - 1;
    let seen = port_of_ours(&lab, family, last)?;
    ensure!(seen != last, "two have port {last}");
    Ok(())
}

/// A pod whose flow comes out elsewhere than before takes nothing from the pod that has got its tuple meanwhile.
#[rstest]
fn a_tuple_has_a_new_owner(#[values(V4, V6)] family: Family) -> Result<()> {
    needs_root!();
    let (lab, pods) = masquerading(family, &["first", "second"])?;
    let service = family.service_at(PORT);
    let mut clients = pods
        .iter()
        .map(|pod| udp::Client::open_at(pod.netns(), family, SOURCE))
        .collect::<Result<Vec<_>>>()?;
    // Nobody answers yet.
    clients[0].send(service, b"anybody?")?;
    thread::sleep(Duration::from_millis(100));
    lab.firewall.delete_entries(family, "udp")?;
    let _server = udp::Server::start(lab.world.netns(), family.remote_at(PORT))?;
    let second = clients[1].chat(service, 5)?.seen.port();
    ensure!(second == SOURCE, "seen from {second}");
    let moved = clients[0].chat(service, 5)?.seen.port();
    ensure!(moved != SOURCE, "both are seen from {moved}");
    let ours = port_of_ours(&lab, family, SOURCE)?;
    ensure!(ours != SOURCE, "two have port {SOURCE}");
    let meter = Meter::start(&lab.node)?;
    for client in &mut clients {
        client.chat(service, MANY)?;
    }
    meter.expect(Counter::BypassWire, MOST)
}

/// A segment that belongs to nothing has the node answer with a reset, which has the tuple of a connection by its port. That goes on, on the
/// bypass.
#[rstest]
fn a_stray_reset_ends_no_bypass(#[values(V4, V6)] family: Family) -> Result<()> {
    needs_root!();
    let scene = Scene::routed(family, Nftables, Policy::Local)?;
    set_liberal(&scene.lab, true)?;
    scene.lab.firewall.tolerate_invalid();
    scene.lab.firewall.load(
        "insert rule inet lab input tcp flags & (fin | syn) == fin | syn accept
         insert rule inet lab output tcp flags & rst == rst accept",
    )?;
    let world = scene.lab.world.netns();
    let service = node_at(family, BY_POD);
    let mut client = tcp::Client::connect(world, service)?;
    client.chat(MANY)?;
    let link = RawLink::open(world, World::LINK)?;
    let ends = scene.lab.ends_from_world(family.gateway(), family.node())?;
    scene.lab.firewall.load(
        "add counter inet lab seen_resets
               insert rule inet lab output tcp flags & rst == rst counter name seen_resets accept",
    )?;
    link.send(&ends.syn_fin(client.local()?.port(), service.port()))?;
    thread::sleep(Duration::from_millis(300));
    let resets = scene.lab.firewall.counted("resets")?;
    ensure!(resets == 1, "the node has sent {resets} resets");
    let meter = Meter::start(&scene.lab.node)?;
    client.chat(MANY)?;
    crosses(&meter, MOST)
}

/// Who opens connections by a port of the node, and never takes one up, fills no more of the table than the pod has room for.
#[rstest]
fn a_flood_of_openings_is_bounded(
    #[values(V4, V6)] family: Family,
    #[values("open", "closed")] port: &str,
) -> Result<()> {
    const FLOOD: u16 = 200;
    const LIMIT: u16 = 20;
    needs_root!();
    let lab = Lab::new()?;
    let conf = lab.conf().with("maxHalfOpenFlows", LIMIT);
    let backend = lab.pod_with("backend", &conf)?;
    let _server = tcp::Server::start(backend.netns(), family.port(PORT))?;
    let inside = if port == "open" { PORT } else { PORT + 1 };
    let service = Service {
        name: "flooded".to_owned(),
        transport: Transport::Tcp,
        cluster: family.service_at(BY_POD),
        node_port: Some(NODE_PORT),
        policy: Policy::Local,
        endpoints: vec![backend.at(family, inside)],
    };
    lab.firewall.proxy(Iptables, &[service])?;
    set_liberal(&lab, true)?;
    let link = RawLink::open(lab.world.netns(), World::LINK)?;
    let ends = lab.ends_from_world(family.gateway(), family.node())?;
    for source in SOURCE..SOURCE + FLOOD {
        link.send(&ends.syn(source, NODE_PORT))?;
    }
    thread::sleep(Duration::from_millis(500));
    let shown = lab.node.underpass(&["flows", "--json"])?;
    let flows: Vec<Value> = serde_json::from_str(&shown)?;
    let translated = flows
        .iter()
        .filter(|flow| {
            flow["state"]
                .as_array()
                .is_some_and(|state| state.contains(&"stack-nat".into()))
        })
        .count();
    // Each has an entry for the questions and one for the answers; those that time has paid for come on top.
    let most = usize::from(2 * LIMIT + LIMIT / 2);
    ensure!(
        (2..=most).contains(&translated),
        "{translated} entries of flows that were never answered"
    );
    Ok(())
}

/// A connection that connection tracking has forgotten stays on the bypass, until its tuple begins another one: that of the node itself gets
/// its own answers.
#[rstest]
fn the_node_itself_gets_the_tuple(#[values(V4, V6)] family: Family) -> Result<()> {
    needs_root!();
    let (lab, pods) = masquerading(family, &["silent"])?;
    let server = family.remote_at(PORT);
    let _server = tcp::Server::start(lab.world.netns(), server)?;
    make_forgetful(&lab)?;
    let mut old = tcp::Client::connect_from(pods[0].netns(), SOURCE, family.service_at(PORT))?;
    let seen = old.chat(MANY)?;
    ensure!(seen.port() == SOURCE, "{seen}");
    lab.firewall.outlast(family, &["tcp"])?;
    old.chat(MANY)?;
    lab.firewall.delete_entries(family, "tcp")?;
    lab.firewall.tolerate_invalid();
    let from = SocketAddr::new(family.node(), SOURCE);
    let mut new = tcp::Client::connect_between(lab.node.netns(), from, server)?;
    new.chat(MANY)?;
    new.exchange(100_000, 100_000)?;
    Ok(())
}

/// The same where the stack masquerades who comes by a port of the node: the next client may be given the port of one that it has forgotten.
#[rstest]
fn another_client_gets_the_tuple(#[values(V4, V6)] family: Family) -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    let pod = lab.pod_with("a", &lab.conf().with("ipMasq", false))?;
    let (ip, served) = (family.nft(), SocketAddr::new(family.node(), NODE_PORT));
    let at = pod.at(family, PORT);
    lab.firewall.load(&format!(
        "table inet somebody {{
            chain in {{
                type nat hook prerouting priority dstnat; policy accept;
                {ip} daddr {} tcp dport {NODE_PORT} dnat {ip} to {at}
            }}
            chain out {{
                type nat hook postrouting priority srcnat; policy accept;
                {ip} daddr {} oifname {} masquerade
            }}
        }}",
        served.ip(),
        at.ip(),
        pod.host_veth(),
    ))?;
    make_forgetful(&lab)?;
    let _server = tcp::Server::start(pod.netns(), family.port(PORT))?;
    let world = lab.world.netns();
    let from = |ip| SocketAddr::new(ip, SOURCE);
    let mut old = tcp::Client::connect_between(world, from(family.gateway()), served)?;
    let seen = old.chat(MANY)?;
    ensure!(seen.port() == SOURCE, "{seen}");
    lab.firewall.outlast(family, &["tcp"])?;
    old.chat(MANY)?;
    lab.firewall.tolerate_invalid();
    let mut new = tcp::Client::connect_between(world, from(family.remote()), served)?;
    ensure!(new.chat(MANY)? == seen, "it was given another tuple");
    new.exchange(100_000, 100_000)?;
    Ok(())
}

/// What somebody forges of a connection that connection tracking has forgotten.
#[derive(Clone, Copy, Debug)]
enum Forged {
    /// A SYN in the container's name, by another on the node, to the address that it talks to.
    InItsName,
    /// A SYN in the server's name, from the world straight to the container.
    AsItsServer,
    /// A SYN in the name of a client in the world, to another port of the node that leads to the same server.
    ToAnotherPort,
    /// A SYN in the name of a client in the world, by an uplink that filters no reverse paths, as the flow's own does.
    Elsewhere,
}

/// A connection that connection tracking has forgotten stays on the bypass, whatever others send in the names of its ends.
#[rstest]
fn what_is_forged_stalls_no_forgotten_connection(
    #[values(V4, V6)] family: Family,
    #[values(
        Forged::InItsName,
        Forged::AsItsServer,
        Forged::ToAnotherPort,
        Forged::Elsewhere
    )]
    forged: Forged,
) -> Result<()> {
    const MUCH: u64 = 1_000_000;
    needs_root!();
    let lab = Lab::new()?;
    lab.world.route_pods()?;
    let _second = Second::connect(&lab, Kind::Wire(Wire::Ethernet))?;
    let stranger = Stranger::move_in(&lab)?;
    for (device, filter) in [("all", "0"), (Node::UPLINK, "1"), (Second::LINK, "0")] {
        let key = format!("net/ipv4/conf/{device}/rp_filter");
        lab.node.netns().set_sysctl(&key, filter)?;
    }
    let pod = lab.pod_with("a", &lab.conf().with("ipMasq", false))?;
    let (ip, served) = (family.nft(), SocketAddr::new(family.node(), NODE_PORT));
    lab.firewall.load(&format!(
        "table inet somebody {{
            chain in {{
                type nat hook prerouting priority dstnat; policy accept;
                {ip} daddr {} tcp dport {PORT} dnat {ip} to {}
                {ip} daddr {} tcp dport {{ {NODE_PORT}, {ANOTHER_PORT} }} dnat {ip} to {}
            }}
        }}",
        family.service(),
        family.remote_at(PORT),
        served.ip(),
        pod.at(family, PORT),
    ))?;
    make_forgetful(&lab)?;
    let _servers = [
        tcp::Server::start(lab.world.netns(), family.remote_at(PORT))?,
        tcp::Server::start(pod.netns(), family.port(PORT))?,
    ];
    let mut client = match forged {
        Forged::InItsName | Forged::AsItsServer => {
            tcp::Client::connect_from(pod.netns(), SOURCE, family.service_at(PORT))?
        }
        Forged::ToAnotherPort | Forged::Elsewhere => {
            tcp::Client::connect_from(lab.world.netns(), SOURCE, served)?
        }
    };
    client.chat(MANY)?;
    lab.firewall.outlast(family, &["tcp"])?;
    client.chat(MANY)?;
    let arrived = match forged {
        Forged::InItsName => Capture::start(lab.world.netns(), World::LINK)?,
        _ => Capture::start(pod.netns(), Pod::IFNAME)?,
    };
    match forged {
        Forged::InItsName => {
            let ends = stranger.ends(pod.ip(family), family.service());
            stranger.link.send(&ends.syn(SOURCE, PORT))?;
        }
        Forged::AsItsServer => {
            let ends = lab.ends_from_world(family.remote(), pod.ip(family))?;
            RawLink::open(lab.world.netns(), World::LINK)?.send(&ends.syn(PORT, SOURCE))?;
        }
        Forged::ToAnotherPort => {
            let ends = lab.ends_from_world(family.gateway(), served.ip())?;
            RawLink::open(lab.world.netns(), World::LINK)?.send(&ends.syn(SOURCE, ANOTHER_PORT))?;
        }
        Forged::Elsewhere => {
            let ends = Ends {
                src_mac: lab.world.netns().mac(Second::LINK)?,
                dst_mac: lab.node.netns().mac(Second::LINK)?,
                src: family.gateway(),
                dst: served.ip(),
            };
            let link = RawLink::open(lab.world.netns(), Second::LINK)?;
            link.send(&ends.syn(SOURCE, NODE_PORT))?;
        }
    }
    ensure!(
        arrived.wait_for(PATIENCE, frame::is_syn).is_some(),
        "it did not arrive"
    );
    client.goes_on(MUCH, SILENCE / 2)
}
