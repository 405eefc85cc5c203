//! What the stack translates takes the bypass as well: kube-proxy's rules decide, and what they decided is remembered.

use std::{
    net::SocketAddr,
    thread,
    time::{Duration, Instant},
};

use rstest::rstest;
use underpass_tests::{
    capture::Capture,
    netfilter::{
        Transport,
        kube_proxy::{
            Mode::{self, Iptables, Nftables},
            Policy, Service,
        },
    },
    patience,
    prelude::*,
    traffic::serve,
};

use crate::kube_proxy::{BY_POD, PORT, Scene};

mod hostile;
mod ipvs;
mod rules;
mod world;

/// Connection tracking takes TCP of which it did not see all, or not any more. Where containers are attached already, the node's sysctls
/// are looked at again.
fn set_liberal(lab: &Lab, liberal: bool) -> Result<()> {
    lab.firewall.set_liberal(liberal)?;
    lab.node.underpass(&["load"]).map(drop)
}

/// Connection tracking is liberal, and forgets idle connections within three seconds.
fn make_forgetful(lab: &Lab) -> Result<()> {
    for timer in ["established", "unacknowledged", "max_retrans"] {
        let key = format!("net/netfilter/nf_conntrack_tcp_timeout_{timer}");
        lab.node.netns().set_sysctl(&key, "3")?;
    }
    set_liberal(lab, true)
}

/// Nearly all of so many packets must pass the node by the bypass.
const MANY: usize = 40;
const MOST: u64 = 60;

#[rstest]
fn datagrams_to_a_service(
    #[values(V4, V6)] family: Family,
    #[values(Iptables, Nftables)] mode: Mode,
) -> Result<()> {
    needs_root!();
    let scene = Scene::set(family, mode)?;
    let service = family.service_at(BY_POD);
    let mut client = udp::Client::open(scene.client.netns(), family)?;
    let meter = Meter::start(&scene.lab.node)?;
    let seen = client.chat(service, MANY)?.seen.ip();
    ensure!(seen == scene.client.ip(family), "{seen}");
    meter.expect(Counter::BypassPeer, MOST)
}

#[rstest]
fn connections_to_a_service(
    #[values(V4, V6)] family: Family,
    #[values(Iptables, Nftables)] mode: Mode,
) -> Result<()> {
    needs_root!();
    let scene = Scene::set(family, mode)?;
    set_liberal(&scene.lab, true)?;
    let service = family.service_at(BY_POD);
    for _ in 0..3 {
        let meter = Meter::start(&scene.lab.node)?;
        let mut client = tcp::Client::connect(scene.client.netns(), service)?;
        let seen = client.chat(MANY)?.ip();
        ensure!(seen == scene.client.ip(family), "{seen}");
        client.exchange(3_000_000, 3_000_000)?;
        meter.expect(Counter::BypassPeer, MOST)?;
    }
    Ok(())
}

/// What was learned of the connection before is still there.
#[rstest]
fn a_port_asks_a_service_again(
    #[values(V4, V6)] family: Family,
    #[values(Iptables, Nftables)] mode: Mode,
) -> Result<()> {
    const SOURCE: u16 = 45_678;
    needs_root!();
    let scene = Scene::set(family, mode)?;
    set_liberal(&scene.lab, true)?;
    let service = family.service_at(BY_POD);
    for round in 0..3 {
        let meter = Meter::start(&scene.lab.node)?;
        let mut client = tcp::Client::connect_from(scene.client.netns(), SOURCE, service)?;
        client.chat(MANY)?;
        meter
            .expect(Counter::BypassPeer, MOST)
            .with_context(|| format!("connection {round}"))?;
        client.reset()?;
    }
    Ok(())
}

/// Connection tracking has the translation: what it would not know again has to stay with it.
#[rstest]
fn strict_tracking_keeps_connections(#[values(V4, V6)] family: Family) -> Result<()> {
    needs_root!();
    let scene = Scene::set(family, Iptables)?;
    let service = family.service_at(BY_POD);
    let meter = Meter::start(&scene.lab.node)?;
    let mut client = tcp::Client::connect(scene.client.netns(), service)?;
    client.chat(MANY)?;
    client.exchange(1_000_000, 1_000_000)?;
    meter.expect_no_bypass()
}

/// A network may ask for it: its ADD sets what connections by a Service need, and CHECK says when somebody has set it back.
#[rstest]
fn a_network_makes_connection_tracking_liberal(#[values(V4, V6)] family: Family) -> Result<()> {
    const KEY: &str = "net/netfilter/nf_conntrack_tcp_be_liberal";
    needs_root!();
    let scene = Scene::set(family, Iptables)?;
    let node = scene.lab.node.netns();
    ensure!(node.sysctl(KEY)? == "0", "no network has asked for it");
    let conf = scene.lab.conf().with("conntrackLiberal", true);
    let client = scene.lab.pod_with("asking", &conf)?;
    ensure!(node.sysctl(KEY)? == "1", "the ADD has set it");
    let meter = Meter::start(&scene.lab.node)?;
    tcp::Client::connect(client.netns(), family.service_at(BY_POD))?.chat(MANY)?;
    meter.expect(Counter::BypassPeer, MOST)?;
    let check = |pod: &Pod| pod.call_with_result("CHECK").run(&scene.lab.node);
    check(&client)?.silence()?;
    scene.lab.firewall.set_liberal(false)?;
    // It is no fault of the container's.
    let reply = check(&client)?;
    reply.succeeded()?;
    ensure!(
        reply.stderr.contains("nf_conntrack_tcp_be_liberal is 0"),
        "{}",
        reply.stderr
    );
    // Nobody else has asked.
    check(&scene.client)?.silence()
}

/// Both ends are one pod, and both addresses are translated.
#[rstest]
fn a_pod_asks_itself(
    #[values(V4, V6)] family: Family,
    #[values(Iptables, Nftables)] mode: Mode,
) -> Result<()> {
    needs_root!();
    let scene = Scene::set(family, mode)?;
    set_liberal(&scene.lab, true)?;
    let service = family.service_at(BY_POD);
    let meter = Meter::start(&scene.lab.node)?;
    let mut client = udp::Client::open(scene.backend.netns(), family)?;
    let seen = client.chat(service, MANY)?.seen.ip();
    ensure!(seen != scene.backend.ip(family), "{seen}");
    meter.expect(Counter::BypassPeer, MOST)?;
    let mut client = tcp::Client::connect(scene.backend.netns(), service)?;
    client.chat(MANY)?;
    client.exchange(500_000, 500_000)?;
    meter.expect(Counter::BypassPeer, 2 * MOST)
}

/// Connection tracking forgets an idle connection, and its translation; the bypass does not.
#[rstest]
fn a_connection_outlives_its_entry(
    #[values(V4, V6)] family: Family,
    #[values(Iptables, Nftables)] mode: Mode,
) -> Result<()> {
    needs_root!();
    let scene = Scene::set(family, mode)?;
    make_forgetful(&scene.lab)?;
    let mut client = tcp::Client::connect(scene.client.netns(), family.service_at(BY_POD))?;
    client.chat(MANY)?;
    scene.lab.firewall.outlast(family, &["tcp"])?;
    let meter = Meter::start(&scene.lab.node)?;
    client.chat(MANY)?;
    client.exchange(500_000, 500_000)?;
    meter.expect(Counter::BypassPeer, MOST)
}

/// Somebody makes connection tracking strict in the middle: what it has not seen ends on the bypass, what is new stays in the stack.
#[rstest]
fn connection_tracking_becomes_strict(#[values(V4, V6)] family: Family) -> Result<()> {
    needs_root!();
    let scene = Scene::set(family, Iptables)?;
    set_liberal(&scene.lab, true)?;
    let service = family.service_at(BY_POD);
    let mut old = tcp::Client::connect(scene.client.netns(), service)?;
    old.chat(MANY)?;
    old.exchange(3_000_000, 3_000_000)?;
    set_liberal(&scene.lab, false)?;
    let meter = Meter::start(&scene.lab.node)?;
    old.chat(MANY)?;
    old.exchange(3_000_000, 3_000_000)?;
    meter.expect(Counter::BypassPeer, MOST)?;
    let meter = Meter::start(&scene.lab.node)?;
    tcp::Client::connect(scene.client.netns(), service)?.chat(MANY)?;
    meter.expect_no_bypass()
}

/// Datagrams in pieces go by the stack, and the others stay where they are.
#[rstest]
fn pieces_between_whole_ones(#[values(V4, V6)] family: Family) -> Result<()> {
    needs_root!();
    let scene = Scene::set(family, Nftables)?;
    let service = family.service_at(BY_POD);
    let mut client = udp::Client::open(scene.client.netns(), family)?;
    client.chat(service, MANY)?;
    let meter = Meter::start(&scene.lab.node)?;
    for _ in 0..5 {
        client.ask(service, 4_000)?;
        client.chat(service, 20)?;
    }
    meter.expect_none(Counter::Forgotten)?;
    meter.expect(Counter::BypassPeer, 150)
}

fn service(family: Family, transport: Transport, endpoints: Vec<SocketAddr>) -> Service {
    Service {
        name: "moving".to_owned(),
        transport,
        cluster: family.service_at(BY_POD),
        node_port: None,
        policy: Policy::Cluster,
        endpoints,
    }
}

/// Asks, and is answered each time, until whatever was learned of an endpoint that has gone is over.
fn ask_until_moved(asking: &mut udp::Client, cluster: SocketAddr) -> Result<()> {
    const LIMIT: Duration = Duration::from_secs(11);
    let start = Instant::now();
    while start.elapsed() < patience::here(LIMIT) {
        asking.ask(cluster, 100)?;
        thread::sleep(Duration::from_millis(100));
    }
    Ok(())
}

/// An endpoint goes: kube-proxy writes its rules, and deletes what connection tracking has of it. Whoever talks to it by UDP reaches the
/// other one within ten seconds, by the bypass; an idle client at once or later.
#[rstest]
fn an_endpoint_goes(
    #[values(V4, V6)] family: Family,
    #[values(Iptables, Nftables)] mode: Mode,
) -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    let (client, old, new) = (lab.pod("client")?, lab.pod("old")?, lab.pod("new")?);
    let _servers = [&old, &new]
        .into_iter()
        .map(|pod| udp::Server::start(pod.netns(), pod.at(family, PORT)))
        .collect::<Result<Vec<_>>>()?;
    let proxy = |pod: &Pod| {
        let endpoints = vec![pod.at(family, PORT)];
        lab.firewall
            .proxy(mode, &[service(family, Transport::Udp, endpoints)])
    };
    proxy(&old)?;
    let cluster = family.service_at(BY_POD);
    let mut asking = udp::Client::open(client.netns(), family)?;
    let meter = Meter::start(&lab.node)?;
    asking.chat(cluster, MANY)?;
    meter.expect(Counter::BypassPeer, MOST)?;

    proxy(&new)?;
    lab.firewall.delete_entries(family, "udp")?;
    let line = Capture::start(old.netns(), Pod::IFNAME)?;
    ask_until_moved(&mut asking, cluster)?;
    let before = line.frames().len();
    let meter = Meter::start(&lab.node)?;
    asking.chat(cluster, MANY)?;
    meter.expect(Counter::BypassPeer, MOST)?;
    let after = line.frames().len();
    ensure!(
        after == before,
        "{} frames reached the old one",
        after - before
    );
    Ok(())
}

/// A socket that asks the Service and its backend in turn: either is answered by whom it asked, whatever was learned.
#[rstest]
fn a_source_port_is_shared(
    #[values(V4, V6)] family: Family,
    #[values(Iptables, Nftables)] mode: Mode,
) -> Result<()> {
    needs_root!();
    let scene = Scene::set(family, mode)?;
    set_liberal(&scene.lab, true)?;
    let (cluster, direct) = (family.service_at(BY_POD), scene.backend.at(family, PORT));
    let mut client = udp::Client::open(scene.client.netns(), family)?;
    for times in [1, 2, 3, 10, 1] {
        client.chat(cluster, times)?;
        client.chat(direct, times)?;
    }
    Ok(())
}

/// Connection tracking forgets everything: datagrams go on, by a translation that is made anew.
#[rstest]
fn connection_tracking_is_flushed(
    #[values(V4, V6)] family: Family,
    #[values(Iptables, Nftables)] mode: Mode,
) -> Result<()> {
    needs_root!();
    let scene = Scene::set(family, mode)?;
    let cluster = family.service_at(BY_POD);
    let mut client = udp::Client::open(scene.client.netns(), family)?;
    for _ in 0..3 {
        let meter = Meter::start(&scene.lab.node)?;
        talk_on(&mut client, cluster)?;
        meter.expect(Counter::BypassPeer, MOST)?;
        scene.lab.firewall.delete_entries(family, "udp")?;
    }
    Ok(())
}

/// Asks many times, perhaps after connection tracking has forgotten the flow. If it is the turn of an answer then to go through the
/// stack, the stack takes it for the first packet of another flow, and the firewall drops it: as it does without any bypass if the answer is
/// on its way when that happens. The next question mends it.
fn talk_on(client: &mut udp::Client, to: SocketAddr) -> Result<()> {
    let mut lost = 0;
    for _ in 0..MANY {
        lost += usize::from(client.ask_once(to, 100)?.is_none());
    }
    ensure!(lost <= 1, "{lost} answers were lost");
    Ok(())
}

/// The pod that answers is another one by now, with the address of the first.
#[rstest]
fn a_backend_is_replaced(#[values(V4, V6)] family: Family) -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    let client = lab.pod("client")?;
    let cluster = family.service_at(BY_POD);
    let mut asking = udp::Client::open(client.netns(), family)?;
    for name in ["first", "second", "third"] {
        let backend = lab.pod(name)?;
        let _server = serve(backend.netns(), backend.at(family, PORT))?;
        let endpoints = vec![backend.at(family, PORT)];
        lab.firewall
            .proxy(Iptables, &[service(family, Transport::Udp, endpoints)])?;
        lab.firewall.delete_entries(family, "udp")?;
        let meter = Meter::start(&lab.node)?;
        asking.chat(cluster, MANY)?;
        meter.expect(Counter::BypassPeer, MOST)?;
        backend.del()?;
    }
    Ok(())
}

/// Has so many talk at the same time, each with a number of its own.
fn at_once(talks: u32, talk: impl Fn(u32) -> Result<()> + Sync) -> Result<()> {
    let talk = &talk;
    thread::scope(|scope| {
        let talks: Vec<_> = (0..talks)
            .map(|number| scope.spawn(move || talk(number)))
            .collect();
        talks
            .into_iter()
            .try_for_each(|talk| talk.join().expect("it does not panic"))
    })
}

/// Eight talk at once, each from many ports, on all CPUs: whoever asks is answered by whom it asked.
#[rstest]
fn many_at_once(#[values(V4, V6)] family: Family) -> Result<()> {
    needs_root!();
    let scene = Scene::set(family, Nftables)?;
    set_liberal(&scene.lab, true)?;
    let (service, direct) = (family.service_at(BY_POD), scene.backend.at(family, PORT));
    let client = scene.client.netns();
    at_once(8, |number| {
        for round in 0..20 {
            let to = if (number + round) % 3 == 0 {
                direct
            } else {
                service
            };
            udp::Client::open(client, family)?.chat(to, 10)?;
            let mut tcp = tcp::Client::connect(client, to)?;
            tcp.chat(5)?;
            tcp.exchange(100_000, 100_000)?;
        }
        Ok(())
    })
}
