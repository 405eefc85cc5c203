//! How large the packets of a container may be: by its network, or by the uplinks.

use std::{thread, time::Duration};

use rstest::rstest;
use serde_json::json;
use underpass_tests::{
    capture::Capture,
    leak::Traces,
    patience,
    prelude::*,
    rtnl::Route,
    runtime::Call,
    traffic::{PATIENCE, offload},
    tun::Tunnel,
    world::World,
};

/// What a route takes, in bytes, where it is narrower than its device.
const MTU: usize = 1400;
/// Bytes of a frame's header.
const ETHERNET: usize = 14;

/// Below 1280 bytes a device has no IPv6, and IPv4 works from 68 on.
#[rstest]
fn a_small_mtu_is_enough_for_ipv4(
    #[values(68, 600, 1279)] mtu: u32,
    #[values("given", "inherited")] from: &str,
) -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    let mut conf = lab
        .conf()
        .with_ipam("ranges", json!([[{ "subnet": V4.pods() }]]))
        .with_ipam("routes", json!([{ "dst": V4.everywhere() }]));
    if from == "given" {
        conf = conf.with("mtu", mtu);
    } else {
        for netns in [lab.node.netns(), lab.world.netns()] {
            netns.set_mtu(Node::UPLINK, mtu)?;
        }
    }
    let pod = lab.pod_with("a", &conf)?;
    let links = pod.netns().ip_json(&["link", "show", "dev", Pod::IFNAME])?;
    ensure!(links[0]["mtu"] == mtu, "{links}");
    pod.call_with_result("CHECK").run(&lab.node)?.silence()?;
    let other = lab.pod_with("b", &conf)?;
    let _server = udp::Server::start(other.netns(), V4.port(80))?;
    udp::Client::open(pod.netns(), V4)?.chat(other.at(V4, 80), 5)?;
    udp::Client::open(pod.netns(), V4)?.ask(other.at(V4, 80), 2000)?;
    pod.del()
}

#[test]
fn an_uplink_too_narrow_for_ipv6_is_named() -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    lab.pod("first")?.del()?;
    lab.node.netns().set_mtu(Node::UPLINK, 1200)?;
    let before = Traces::of(&lab.node)?;
    let netns = lab.node.netns().sibling("narrow")?;
    let error = Call::new("ADD")
        .attachment("narrow", &netns.path().display().to_string(), Pod::IFNAME)
        .conf(&lab.conf())
        .run(&lab.node)?
        .error()?;
    ensure!(error.code == 7, "{error}");
    for word in ["1200", Node::UPLINK, "1280"] {
        ensure!(error.msg.contains(word), "{error}");
    }
    before.expect_same(&lab.node)
}

/// A VPN that is no default route does not make the packets of every container small.
#[test]
fn a_vpn_lowers_no_mtu() -> Result<()> {
    const VPN: &str = "tailscale0";
    needs_root!();
    let lab = Lab::new()?;
    let _tunnel = Tunnel::dig([lab.node.netns(), lab.world.netns()], VPN, 1280)?;
    lab.node.netns().rtnl(|node| {
        node.set_up(VPN)?;
        node.add_address(VPN, "100.64.0.7".parse()?, 32)?;
        node.add_address(VPN, "fd7a:115c::7".parse()?, 128)?;
        node.add_route(Route::to("100.64.0.0/10").by(VPN))
    })?;
    let pod = lab.pod("a")?;
    let links = pod.netns().ip_json(&["link", "show", "dev", Pod::IFNAME])?;
    ensure!(links[0]["mtu"] == 1500, "{links}");
    Ok(())
}

/// The stack goes by it when it forwards, the bypass only for IPv4 and where the node forwards by path MTUs.
#[rstest]
fn a_route_says_an_mtu_and_does_not_lock_it(
    #[values(V4, V6)] family: Family,
    #[values("learned", "off")] bypass: &str,
    #[values(0, 1)] by_path_mtu: u8,
) -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    let node = lab.node.netns();
    node.set_sysctl("net/ipv4/ip_forward_use_pmtu", &by_path_mtu.to_string())?;
    let (all, via) = (family.everywhere(), family.gateway());
    node.ip(&[format!("route replace {all} via {via} mtu {MTU}")])?;
    let pod = lab.pod_with("a", &lab.conf().with("bypass", bypass))?;
    let remote = family.remote_at(80);
    let _server = udp::Server::start(lab.world.netns(), remote)?;
    let mut client = udp::Client::open(pod.netns(), family)?;
    client.chat(remote, 5)?;
    let line = Capture::start(lab.world.netns(), World::LINK)?;
    // What is too long comes in pieces or not at all.
    client.ask_once(remote, MTU)?;
    client.chat(remote, 2)?;
    // The last of them.
    let is_last = |bytes: &[u8]| bytes.len() < 200;
    line.wait_for(PATIENCE, is_last)
        .context("nothing arrived")?;
    let longest = longest(&line)?;
    let is_known = bypass == "off" || family == V4 && by_path_mtu == 1;
    ensure!(
        (longest <= ETHERNET + MTU) == is_known,
        "a frame of {longest} bytes"
    );
    Ok(())
}

/// While the node asks for its next hop anew, what its route says holds all the same.
#[rstest]
fn an_unknown_next_hop_makes_no_route_wider(
    #[values(V4, V6)] family: Family,
    #[values("learned", "off")] bypass: &str,
) -> Result<()> {
    const SOME: u64 = 30_000;
    needs_root!();
    let lab = Lab::new()?;
    let node = lab.node.netns();
    // A connection goes back to the stack, which says what is too long, and not because it has to hear of it.
    for (key, value) in [
        ("be_liberal", "1"),
        ("timeout_established", "100"),
        ("timeout_unacknowledged", "100"),
        ("timeout_max_retrans", "100"),
    ] {
        let key = format!("net/netfilter/nf_conntrack_tcp_{key}");
        node.set_sysctl(&key, value)?;
    }
    let pod = lab.pod_with("a", &lab.conf().with("bypass", bypass))?;
    // Else segments are seen before they are cut.
    offload::take_off(pod.netns(), Pod::IFNAME)?;
    let remote = family.remote_at(80);
    let _server = tcp::Server::start(lab.world.netns(), remote)?;
    let mut client = tcp::Client::connect(pod.netns(), remote)?;
    client.exchange(SOME, SOME)?;
    let (all, via) = (family.everywhere(), family.gateway());
    node.ip(&[format!("route replace {all} via {via} mtu lock {MTU}")])?;
    // A flow sees it within a tick.
    thread::sleep(patience::here(Duration::from_millis(1300)));
    let line = Capture::start(lab.world.netns(), World::LINK)?;
    node.ip(&[format!("neighbour flush dev {}", Node::UPLINK)])?;
    client.exchange_at_once(SOME, 1)?;
    line.wait_for(PATIENCE, |bytes| bytes.len() > MTU / 2)
        .context("nothing arrived")?;
    let longest = longest(&line)?;
    ensure!(longest <= ETHERNET + MTU, "a frame of {longest} bytes");
    Ok(())
}

/// What a pod was told of a path it knows for ten minutes, as long as its kernel takes the gateway for a router.
#[rstest]
fn a_pod_remembers_the_mtu_of_a_path(#[values(V4, V6)] family: Family) -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    let (all, via) = (family.everywhere(), family.gateway());
    let node = lab.node.netns();
    node.ip(&[format!("route replace {all} via {via} mtu lock {MTU}")])?;
    let pod = lab.pod("a")?;
    // It tidies up as often as it can.
    pod.netns().set_sysctl("net/ipv6/route/gc_interval", "1")?;
    let remote = family.remote_at(80);
    let _server = udp::Server::start(lab.world.netns(), remote)?;
    udp::Client::open(pod.netns(), family)?.ask_once(remote, MTU)?;
    let knows = || {
        let address = remote.ip().to_string();
        let route = pod.netns().ip_json(&["route", "get", &address])?;
        ensure!(route.to_string().contains(&MTU.to_string()), "{route}");
        Ok(())
    };
    eventually("the pod is told", knows)?;
    thread::sleep(Duration::from_secs(5));
    knows().context("a while later")
}

/// The length of the longest frame that came, in bytes.
fn longest(line: &Capture) -> Result<usize> {
    let lengths = line.frames().into_iter().map(|frame| frame.len());
    lengths.max().context("nothing came")
}

#[rstest]
fn pods_get_the_mtu_of_the_uplink(#[values(1400, 9000)] mtu: u32) -> Result<()> {
    needs_root!();
    let lab = Lab::with_mtu(mtu)?;
    let pod = lab.pod("a")?;
    for interface in [0, 1] {
        let told = &pod.result()["interfaces"][interface]["mtu"];
        ensure!(*told == mtu, "the result says {told}");
    }
    let link = pod.netns().ip_json(&["link", "show", "dev", "eth0"])?;
    ensure!(link[0]["mtu"] == mtu, "{link}");
    Ok(())
}
