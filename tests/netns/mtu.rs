//! How large the packets of a container may be: by its network, or by the uplinks.

use rstest::rstest;
use serde_json::json;
use underpass_tests::{
    capture::Capture, leak::Traces, prelude::*, rtnl::Route, runtime::Call, traffic::PATIENCE,
    tun::Tunnel, world::World,
};

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
    const MTU: usize = 1400;
    const ETHERNET: usize = 14;
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
    let lengths = line.frames().into_iter().map(|frame| frame.len());
    let longest = lengths.max().unwrap_or_default();
    let is_known = bypass == "off" || family == V4 && by_path_mtu == 1;
    ensure!(
        (longest <= ETHERNET + MTU) == is_known,
        "a frame of {longest} bytes"
    );
    Ok(())
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
