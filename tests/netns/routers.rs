//! What routers beyond the node say: path MTUs and used up hop limits, through masquerade and host ports.

use std::{
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    thread,
    time::Duration,
};

use rstest::rstest;
use serde_json::json;
use underpass_tests::{
    capture::Capture,
    frame,
    netns::Netns,
    prelude::*,
    traffic::{PATIENCE, raw::RawLink},
};

const PORT: u16 = 443;
const SOURCE: u16 = 45_678;
const HOST: u16 = 8080;
/// MTU of the link behind the world, which makes a router of it.
const NARROW: u32 = 1300;

/// Longer than anybody waits for an error about a packet.
const SILENT: Duration = Duration::from_secs(10);

/// Bytes of the segments that are sent to who is behind it.
const SEGMENT: u32 = 1400;

/// The address of the world on that link, and of what is behind it.
pub(crate) fn beyond(family: Family) -> [IpAddr; 2] {
    [1, 2].map(|last| match family {
        V4 => IpAddr::from(Ipv4Addr::new(198, 18, 0, last)),
        V6 => Ipv6Addr::new(0x2001, 0xdb8, 0x18, 0, 0, 0, 0, last.into()).into(),
    })
}

/// A namespace behind the world.
pub(crate) fn far(lab: &Lab) -> Result<Netns> {
    let (world, far) = (lab.world.netns(), lab.node.netns().sibling("far")?);
    world.cable("far", &far, "eth0", NARROW)?;
    for (family, bits) in [(V4, 24), (V6, 64)] {
        let [router, host] = beyond(family);
        world.rtnl(|world| world.add_address("far", router, bits))?;
        far.rtnl(|far| far.add_address("eth0", host, bits))?;
        // With the size of segments that its own link has room for, nobody would send anything that is too long.
        let everywhere = family.everywhere();
        far.ip(&[format!(
            "route add {everywhere} via {router} advmss {SEGMENT}"
        )])?;
    }
    world.set_sysctl("net/ipv4/ip_forward", "1")?;
    world.set_sysctl("net/ipv6/conf/all/forwarding", "1")?;
    Ok(far)
}

#[rstest]
fn a_narrow_link_on_the_way_is_found_out(
    #[values(V4, V6)] family: Family,
    #[values("learned", "off")] bypass: &str,
) -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    let far = far(&lab)?;
    let [_, host] = beyond(family);
    let conf = lab.conf().with("bypass", bypass);
    let pods = [lab.pod_with("a", &conf)?, lab.pod_with("b", &conf)?];
    let server = SocketAddr::new(host, PORT);
    let _server = tcp::Server::start(&far, server)?;
    for pod in &pods {
        // The second pod's port has to change, and the router's message quotes the changed one.
        let mut client = tcp::Client::connect_from(pod.netns(), SOURCE, server)?;
        let seen = client.exchange(500_000, 1000)?.seen;
        ensure!(seen.ip() == family.node(), "{seen}");
    }
    // Behind a host port the one who sends much is a pod that knows nothing of the path yet.
    let mapping = json!({ "hostPort": HOST, "containerPort": PORT });
    let conf = conf.with("runtimeConfig", json!({ "portMappings": [mapping] }));
    let pod = lab.pod_with("c", &conf)?;
    let _inside = tcp::Server::start(pod.netns(), family.port(PORT))?;
    let asked = SocketAddr::new(family.node(), HOST);
    let seen = tcp::Client::connect(&far, asked)?
        .exchange(1000, 500_000)?
        .seen;
    ensure!(seen.ip() == host, "{seen}");
    Ok(())
}

#[rstest]
fn routers_on_the_way_are_seen(#[values(V4, V6)] family: Family) -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    let _far = far(&lab)?;
    let [_, host] = beyond(family);
    for pod in [lab.pod("a")?, lab.pod("b")?] {
        let seen = Capture::start(pod.netns(), Pod::IFNAME)?;
        let link = RawLink::open(pod.netns(), Pod::IFNAME)?;
        let ends = pod.ends(host)?;
        for (hops, router) in [(1, None), (2, Some(family.gateway()))] {
            link.send(&ends.udp_with_hops(SOURCE, PORT, b"how far?", hops))?;
            // The message is for this packet: it quotes the address and port that the pod sent from.
            let is_it = |bytes: &[u8]| {
                let quotes = frame::sources(bytes).contains(&pod.ip(family));
                let from = frame::read(bytes).map(|packet| packet.src);
                let right = router.is_none_or(|router| from == Some(router));
                let port = bytes
                    .windows(4)
                    .any(|ports| ports == [SOURCE.to_be_bytes(), PORT.to_be_bytes()].concat());
                frame::is_time_exceeded(bytes) && quotes && right && port
            };
            seen.wait_for(PATIENCE, is_it)
                .with_context(|| format!("{}: no router at hop {hops}", pod.name()))?;
        }
    }
    Ok(())
}

/// Connection tracking has long forgotten a flow that takes the bypass, and calls an error about it invalid.
#[rstest]
fn a_firewall_against_what_it_does_not_know_stops_no_error_about_a_bypass(
    #[values(V4, V6)] family: Family,
    #[values(true, false)] masquerade: bool,
    #[values("just spoke", "is silent")] peer: &str,
) -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    let far = far(&lab)?;
    lab.world.route_pods()?;
    // A segment in the middle of a connection is taken for a new one, unless this is off.
    lab.firewall.know_openings_only()?;
    let [_, host] = beyond(family);
    let pod = lab.pod_with("a", &lab.conf().with("ipMasq", masquerade))?;
    let server = SocketAddr::new(host, PORT);
    let _server = tcp::Server::start(&far, server)?;
    let mut client = tcp::Client::connect(pod.netns(), server)?;
    client.chat(20)?;
    lab.firewall.outlast(family, &["tcp"])?;
    if peer == "is silent" {
        thread::sleep(SILENT);
        client.exchange_at_once(500_000, 1000)?;
    } else {
        client.exchange(500_000, 1000)?;
    }
    Ok(())
}
