//! The fixtures carry traffic without any plugin: what fails here is not the plugin's fault.

use rstest::rstest;
use std::{net::SocketAddr, time::Duration};
use underpass_tests::{
    capture::Capture,
    frame,
    netfilter::Transport,
    netns::Netns,
    prelude::*,
    rtnl::Route,
    traffic::{PATIENCE, content::Content},
};

#[rstest]
fn node_and_world_talk(#[values(V4, V6)] family: Family) -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    let (node, world) = (lab.node.netns(), lab.world.netns());
    let server = family.remote_at(7000);
    let _tcp = tcp::Server::start(world, server)?;
    let _udp = udp::Server::start(world, server)?;
    let mut client = tcp::Client::connect_from(node, 33_333, server)?;
    let here = SocketAddr::new(family.node(), 33_333);
    ensure!(client.exchange(3_000_000, 3_000_000)?.seen == here);
    let mut client = udp::Client::open_at(node, family, 33_333)?;
    ensure!(client.ask(server, 4000)?.seen == here);
    client.connect(server)?;
    ensure!(client.ask(server, 10)?.seen == here);
    ping::ping(node, family.remote())
}

#[rstest]
fn silence_is_told_from_answers(#[values(V4, V6)] family: Family) -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    let (node, world) = (lab.node.netns(), lab.world.netns());
    let nobody = family.remote_at(7001);
    tcp::refuses(node, nobody)?;
    udp::Client::open(node, family)?.hears_nothing(nobody)?;
    ping::Ping::new(world, family.unused_pod())
        .and_then(|mut ping| ping.hears_nothing())
        .or_else(|error| {
            // The world has no route to pods: a ping socket can't even be connected.
            ensure!(format!("{error:#}").contains("unreachable"), "{error:#}");
            Ok(())
        })
}

#[rstest]
fn a_capture_sees_what_arrives(#[values(V4, V6)] family: Family) -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    let capture = Capture::start(lab.world.netns(), "eth0")?;
    let client = udp::Client::open_at(lab.node.netns(), family, 33_333)?;
    client.send(family.remote_at(9), &[1; 3000])?;
    ensure!(
        capture.wait_for(PATIENCE, frame::is_fragment).is_some(),
        "a datagram larger than the MTU arrives in fragments"
    );
    ensure!(
        capture.addresses().contains(&family.node()),
        "{:?}",
        capture.addresses()
    );
    ensure!(!capture.addresses().contains(&family.gateway()));
    Ok(())
}

#[rstest]
fn the_firewall_counts_translates_and_drops(#[values(V4, V6)] family: Family) -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    let inside = routed(&lab, "inside")?;
    let server = family.remote_at(7000);
    let service = family.service_at(80);
    let _server = tcp::Server::start(lab.world.netns(), server)?;
    let _udp = udp::Server::start(lab.world.netns(), server)?;
    let firewall = &lab.firewall;
    firewall.count_forwarded("flow", "tcp dport 7000")?;
    firewall.service(Transport::Tcp, service, server)?;
    firewall.service(Transport::Udp, service, server)?;
    let seen = tcp::Client::connect(&inside, service)?.chat(5)?;
    ensure!(seen.ip() == family.unused_pod(), "{seen}");
    ensure!(firewall.counted("flow")? > 5);
    ensure!(firewall.expect_opening("flow").is_err());
    let mut client = udp::Client::open(&inside, family)?;
    client.chat(service, 3)?;
    firewall.outlast(family, &["udp"])?;
    client.chat(service, 3)?;
    client.chat(server, 3)?;
    firewall.drop_forwarded("tcp dport 7000")?;
    tcp::refuses(&inside, server)
}

#[test]
fn changed_content_is_noticed() {
    let mut sent = Vec::new();
    Content::new(1)
        .send(&mut sent, 200_000)
        .expect("a vector takes everything");
    let check = |bytes: &[u8]| Content::new(1).check(&mut &*bytes, 200_000);
    assert!(check(&sent).is_ok());
    assert!(check(&sent[1..]).is_err(), "shorter and shifted");
    let mut doubled = sent.clone();
    doubled.copy_within(..65_536, 65_536);
    assert!(check(&doubled).is_err(), "a doubled block");
    let mut flipped = sent.clone();
    flipped[150_000] ^= 1;
    assert!(check(&flipped).is_err(), "a flipped bit");
}

#[test]
fn nothing_of_a_node_shows_outside() -> Result<()> {
    needs_root!();
    let before = std::fs::read_to_string("/proc/self/mountinfo")?;
    let lab = Lab::new()?;
    let during = std::fs::read_to_string("/proc/self/mountinfo")?;
    ensure!(
        before == during || !during.contains("/run/netns/world"),
        "mounts of a node are private"
    );
    lab.node.netns().run(|| {
        ensure!(lab.node.data_dir().is_dir());
        Ok(())
    })
}

/// A namespace behind the node, routed by hand, with the address that no pod gets; the world knows the way back.
fn routed(lab: &Lab, name: &str) -> Result<Netns> {
    let inside = lab.node.netns().sibling(name)?;
    lab.world.route_pods()?;
    lab.node.netns().cable(name, &inside, "eth0", 1500)?;
    for (family, gateway) in [(V4, "169.254.1.1"), (V6, "fe80::1")] {
        let (address, bits) = (family.unused_pod(), family.host_bits());
        lab.node.netns().rtnl(|node| {
            node.add_address(name, gateway.parse()?, bits)?;
            node.add_route(Route::to(&format!("{address}/{bits}")).by(name))
        })?;
        inside.rtnl(|inside| {
            inside.add_address("eth0", address, bits)?;
            inside.add_route(Route::to(&format!("{gateway}/{bits}")).by("eth0"))?;
            inside.add_route(Route::default(family).via(gateway.parse()?).by("eth0"))
        })?;
    }
    lab.node.netns().set_sysctl("net/ipv4/ip_forward", "1")?;
    lab.node
        .netns()
        .set_sysctl("net/ipv6/conf/all/forwarding", "1")?;
    // A link-local address becomes usable a moment after its link.
    std::thread::sleep(Duration::from_millis(50));
    Ok(inside)
}
