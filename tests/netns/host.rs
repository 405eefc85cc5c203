//! Processes of the node itself and pods.

use std::net::SocketAddr;

use rstest::rstest;
use serde_json::{Value, json};
use underpass_tests::prelude::*;

const PORT: u16 = 8080;

#[rstest]
fn the_host_reaches_a_pod(#[values(V4, V6)] family: Family) -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    let pod = lab.pod("a")?;
    let server = pod.at(family, PORT);
    let _tcp = tcp::Server::start(pod.netns(), family.port(PORT))?;
    let _udp = udp::Server::start(pod.netns(), family.port(PORT))?;
    let host = lab.node.netns();
    tcp::Client::connect(host, server)?.exchange(5_000_000, 5_000_000)?;
    udp::Client::open(host, family)?.chat(server, 10)?;
    ping::ping(host, pod.ip(family))
}

#[rstest]
fn a_pod_reaches_the_host(#[values(V4, V6)] family: Family) -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    let pod = lab.pod("a")?;
    let server = SocketAddr::new(family.node(), PORT);
    let _tcp = tcp::Server::start(lab.node.netns(), server)?;
    let _udp = udp::Server::start(lab.node.netns(), server)?;
    let mut client = tcp::Client::connect(pod.netns(), server)?;
    let seen = client.exchange(5_000_000, 5_000_000)?.seen;
    ensure!(seen.ip() == pod.ip(family), "the host saw {seen}");
    let seen = udp::Client::open(pod.netns(), family)?
        .chat(server, 10)?
        .seen;
    ensure!(seen.ip() == pod.ip(family), "the host saw {seen}");
    ping::ping(pod.netns(), family.node())
}

#[rstest]
fn a_pod_reaches_itself(#[values(V4, V6)] family: Family) -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    let pod = lab.pod("a")?;
    let _tcp = tcp::Server::start(pod.netns(), family.port(PORT))?;
    let seen = tcp::visit(pod.netns(), pod.at(family, PORT))?;
    ensure!(seen == pod.ip(family), "it saw {seen}");
    ping::ping(pod.netns(), pod.ip(family))
}

/// The kernel takes the default routes away that a host heard of by router advertisements when it begins to forward, and hears no
/// more, unless it is told to. What a network's uplinks are has nothing to do with that.
#[rstest]
#[case::by_default(json!(null))]
#[case::others(json!(["wg0"]))]
#[case::none(json!([]))]
fn the_node_goes_on_to_hear_routers(#[case] uplinks: Value) -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    let node = lab.node.netns();
    let accept = format!("net/ipv6/conf/{}/accept_ra", Node::UPLINK);
    let forwarding = "net/ipv6/conf/all/forwarding";
    ensure!(node.sysctl(forwarding)? == "0", "it forwards already");
    node.set_sysctl(&accept, "1")?;
    node.ip(&[format!(
        "route replace ::/0 via {} dev {} proto ra",
        V6.gateway(),
        Node::UPLINK
    )])?;
    let conf = match uplinks {
        Value::Null => lab.conf(),
        uplinks => lab.conf().with("uplinks", uplinks),
    };
    // A link whose router has not been heard yet, and a way to somebody's container, who is no router.
    node.ip(&[
        "link add later type macvlan".replace("type", &format!("link {} type", Node::UPLINK)),
        "link add theirs type veth peer name inside".to_owned(),
        "link set later up".to_owned(),
        "link set theirs up".to_owned(),
        "address add 2001:db8:77::1/64 dev theirs nodad".to_owned(),
        "link add heard type veth peer name router".to_owned(),
        "link set heard up".to_owned(),
        "address add 2001:db8:78::1/64 dev heard nodad valid_lft 600 preferred_lft 600".to_owned(),
    ])?;
    let of = |name: &str| format!("net/ipv6/conf/{name}/accept_ra");
    for name in ["later", "theirs", "heard"] {
        node.set_sysctl(&of(name), "1")?;
    }
    let pod = lab.pod_with("a", &conf)?;
    ensure!(node.sysctl(forwarding)? == "1", "it does not forward");
    ensure!(node.sysctl(&accept)? == "2", "{}", node.sysctl(&accept)?);
    for (name, expected) in [("later", "2"), ("theirs", "1"), ("heard", "2")] {
        let value = node.sysctl(&of(name))?;
        ensure!(value == expected, "{name}: {value}");
    }
    pod.del()
}
