//! A network card that comes while the agent runs: pods are masqueraded and served by it, though none has come since.

use std::net::{IpAddr, SocketAddr};

use underpass_tests::{prelude::*, traffic::serve};

use super::{
    firewall::none_was_invalid,
    fixture::Cluster,
    member::{Member, cidr, nodad, outside},
    outside::reaches,
};

/// Its name on the node, and that of its other end.
const CARD: &str = "eth1";
const SWITCH: &str = "switch";
/// The number of its link.
const LINK: u8 = 2;
/// Where the world serves.
const REMOTE: u16 = 443;
/// The port of the node that leads to the pod.
const HOST: u16 = 8_080;
const INSIDE: u16 = 80;

/// Plugs the card in, and gives it addresses. By now the node leaves by it.
fn plug(cluster: &Cluster, member: &Member) -> Result<()> {
    let (node, world) = (member.node.netns(), &cluster.fabric);
    world.cable(SWITCH, node, CARD, 1_500)?;
    let (mut inside, mut beyond) = (Vec::new(), Vec::new());
    for family in Family::BOTH {
        let (own, gateway) = (cidr(family, LINK, 1), cidr(family, LINK, 254));
        let (nodad, everywhere) = (nodad(family), family.everywhere());
        beyond.push(format!("address add {gateway} dev {SWITCH} {nodad}"));
        inside.push(format!("address add {own} dev {CARD} {nodad}"));
        let gateway = outside(family, LINK, 254);
        inside.push(format!(
            "route replace {everywhere} via {gateway} dev {CARD}"
        ));
    }
    world.ip(&beyond)?;
    node.ip(&inside)
}

/// That it compares nothing by itself shows that it has heard of the card.
#[test]
fn an_uplink_that_comes_serves() -> Result<()> {
    needs_root!();
    let mut cluster = Cluster::idle(&[0])?;
    let firewalls = cluster.fortify()?;
    cluster.members[0].start_agent_with(&["--resync", "3600"])?;
    let member = &cluster.members[0];
    let conf = member.conf()?.with_host_port(HOST, INSIDE);
    let pod = Pod::add(&member.node, "before", &conf)?;
    let before = Family::BOTH.map(|family| member.address(family));
    expect_served(&cluster, &pod, before, |family| member.gateway(family))?;

    plug(&cluster, member)?;
    eventually("the agent has the programs attached", || {
        let log = member.log()?;
        let line = format!("apply: {CARD}: attached");
        ensure!(log.contains(&line), "{log}");
        Ok(())
    })?;
    let now = Family::BOTH.map(|family| outside(family, LINK, 1));
    expect_served(&cluster, &pod, now, |family| outside(family, LINK, 254))?;
    // Those of before serve on.
    host_port(&cluster, &pod, before, |family| member.gateway(family))?;
    pod.call_with_result("CHECK").run(&member.node)?.silence()?;
    none_was_invalid(&firewalls)
}

/// The world sees the pod with these addresses of the node, and reaches it at them.
fn expect_served(
    cluster: &Cluster,
    pod: &Pod,
    own: [IpAddr; 2],
    world: impl Fn(Family) -> IpAddr,
) -> Result<()> {
    for (family, own) in Family::BOTH.into_iter().zip(own) {
        let remote = family.remote_at(REMOTE);
        let _servers = serve(&cluster.fabric, remote)?;
        reaches(pod.netns(), remote, own)?;
    }
    host_port(cluster, pod, own, world)
}

/// The world reaches the pod at these addresses, and is seen with its own.
fn host_port(
    cluster: &Cluster,
    pod: &Pod,
    own: [IpAddr; 2],
    world: impl Fn(Family) -> IpAddr,
) -> Result<()> {
    for (family, own) in Family::BOTH.into_iter().zip(own) {
        let _servers = serve(pod.netns(), pod.at(family, INSIDE))?;
        reaches(&cluster.fabric, SocketAddr::new(own, HOST), world(family))?;
    }
    Ok(())
}
