//! The ways between nodes, and what pods that are there learn of them: a node that joins, a link without a route, a tunnel to everybody.

use std::{fs, net::IpAddr, time::Duration};

use nix::mount::{MsFlags, mount};
use rstest::rstest;
use serde_json::Value;
use underpass_tests::{
    prelude::*,
    traffic::{offload, serve},
    tun::Tunnel,
};

use super::{
    fixture::Cluster,
    member::{Member, NET, TUNNEL, cidr, nodad, outside},
};

/// How long a connection may take that is tried again.
const TRY: Duration = Duration::from_millis(500);

/// Nobody has said what the cluster's ranges are: a pod's config was made before this node was heard of.
#[rstest]
fn a_pod_of_before_keeps_its_address_to_a_node_that_joins(
    #[values(0, 1)] link: u8,
    #[values(V4, V6)] family: Family,
) -> Result<()> {
    needs_root!();
    let mut cluster = Cluster::new(&[0, 0])?;
    cluster.settle()?;
    let old = cluster.members[0].pod("old")?;
    cluster.grow(link)?;
    let new = cluster.members.last().context("a member")?.pod("new")?;
    let _server = serve(new.netns(), new.at(family, 80))?;
    let mut seen: Option<IpAddr> = None;
    eventually("a connection to the new node's pod", || {
        let mut client = tcp::Client::try_connect(old.netns(), new.at(family, 80), TRY)?;
        seen = Some(client.exchange(10, 10)?.seen.ip());
        Ok(())
    })?;
    ensure!(seen == Some(old.ip(family)), "the new pod saw {seen:?}");
    Ok(())
}

/// Takes the uplink's addresses their routes to the prefix, as network managers do.
fn lose_prefixes(member: &Member) -> Result<()> {
    let mut lines = vec![format!("address flush dev {} scope global", Node::UPLINK)];
    for family in Family::BOTH {
        let net = cidr(family, member.link, member.number);
        let gateway = outside(family, member.link, 254);
        let (nodad, everywhere) = (nodad(family), family.everywhere());
        let uplink = Node::UPLINK;
        lines.push(format!(
            "address add {net} dev {uplink} noprefixroute {nodad}"
        ));
        lines.push(format!("route add {gateway} dev {uplink}"));
        lines.push(format!("route replace {everywhere} via {gateway}"));
    }
    member.node.netns().ip(&lines)
}

/// Waits until a node reaches all pods of another one through VXLAN.
fn tunnels(member: &Member, to: &Member) -> Result<()> {
    eventually("routes through VXLAN", || {
        let routes = member.routes()?;
        for range in to.ranges() {
            let first = range.split('/').next().unwrap_or("");
            let route = format!("{range} via {first} dev {TUNNEL}");
            ensure!(routes.contains(&route), "{route}: {routes:?}");
        }
        Ok(())
    })
}

/// A route to the prefix is what makes it a link: addresses that a network manager gives have none by themselves.
#[test]
fn an_address_without_a_route_is_on_no_link() -> Result<()> {
    needs_root!();
    let mut cluster = Cluster::idle(&[0, 0])?;
    lose_prefixes(&cluster.members[0])?;
    cluster.start_agents()?;
    let member = &cluster.members[0];
    tunnels(member, &cluster.members[1])?;
    // The other one has the whole prefix, and a route back.
    cluster.settle_one(&cluster.members[1])?;
    let routes = Family::BOTH.map(|family| {
        let net: ipnet::IpNet = cidr(family, member.link, 0).parse().context("a prefix")?;
        Ok(format!("route add {} dev {}", net.trunc(), Node::UPLINK))
    });
    let routes = routes.into_iter().collect::<Result<Vec<_>>>()?;
    member.node.netns().ip(&routes)?;
    cluster.settle_one(member)
}

/// One node sends through VXLAN, the other one directly: neither answers by the device that it was asked by. Of the uplinks somebody has
/// said so.
#[test]
fn a_strict_filter_of_reverse_paths_takes_what_comes_through_vxlan() -> Result<()> {
    needs_root!();
    let mut cluster = Cluster::idle(&[0, 0])?;
    lose_prefixes(&cluster.members[0])?;
    for member in &cluster.members {
        let netns = member.node.netns();
        for (device, value) in [("all", "1"), ("default", "1"), (Node::UPLINK, "2")] {
            netns.set_sysctl(&format!("net/ipv4/conf/{device}/rp_filter"), value)?;
        }
    }
    cluster.start_agents()?;
    let [member, other] = &cluster.members[..] else {
        anyhow::bail!("two members");
    };
    tunnels(member, other)?;
    cluster.settle_one(other)?;
    let pods = cluster.pods()?;
    Cluster::all_reach_all(&pods)?;
    let strict = format!("net/ipv4/conf/{TUNNEL}/rp_filter");
    other.node.netns().set_sysctl(&strict, "1")?;
    eventually("it is loose again", || {
        let value = other.node.netns().sysctl(&strict)?;
        ensure!(value == "2", "{value}");
        Ok(())
    })
}

/// Not every container may write sysctls. The network does not wait for that, and the log has it once.
#[test]
fn a_filter_that_can_not_be_changed_is_said_once() -> Result<()> {
    needs_root!();
    let mut cluster = Cluster::idle(&[0])?;
    let netns = cluster.members[0].node.netns().clone();
    netns.run(|| {
        let none: Option<&str> = None;
        let flags = MsFlags::MS_BIND | MsFlags::MS_REC;
        mount(Some("/proc/sys"), "/proc/sys", none, flags, none)?;
        let flags = MsFlags::MS_BIND | MsFlags::MS_REMOUNT | MsFlags::MS_RDONLY;
        mount(none, "/proc/sys", none, flags, none)
    })?;
    cluster.start_agents()?;
    let member = &cluster.members[0];
    cluster.settle_one(member)?;
    member.compares()?;
    let log = member.log()?;
    ensure!(log.matches("cannot write 2 to").count() == 1, "{log}");
    ensure!(member.metric("sync_failures_total")? == 0, "{log}");
    Ok(())
}

/// A device without link-layer addresses, as WireGuard's, decides by itself who a packet is for, and knows nothing of pods.
#[test]
fn a_link_without_neighbours_is_no_way_for_pods_packets() -> Result<()> {
    const VPN: &str = "vpn";
    needs_root!();
    let mut cluster = Cluster::idle(&[0, 0])?;
    let ends = [0, 1].map(|at| cluster.members[at].node.netns().clone());
    let _tunnel = Tunnel::dig([&ends[0], &ends[1]], VPN, 1_420)?;
    for (member, netns) in cluster.members.iter().zip(&ends) {
        let addresses = [("203.0.113", ".", 24), ("2001:db8:77:", ":", 64)]
            .map(|(net, dot, length)| (format!("{net}{dot}{}", member.number), length));
        let mut lines = vec![format!("link set {VPN} up")];
        for (address, length) in &addresses {
            let nodad = if address.contains(':') { "nodad" } else { "" };
            lines.push(format!("address add {address}/{length} dev {VPN} {nodad}"));
        }
        netns.ip(&lines)?;
        let addresses = addresses.map(|(address, _)| address);
        cluster.api.set(&member.name, &addresses, &member.ranges());
    }
    cluster.start_agents()?;
    let [member, other] = &cluster.members[..] else {
        anyhow::bail!("two members");
    };
    tunnels(member, other)?;
    tunnels(other, member)?;
    for member in &cluster.members {
        let netns = member.node.netns();
        let link = netns.ip_json(&["link", "show", "dev", TUNNEL])?;
        ensure!(link[0]["mtu"] == 1_420 - 50, "{link}");
    }
    Cluster::all_reach_all(&cluster.pods()?)
}

/// A node whose address is on its loopback device, as where it is announced by BGP: the ends of its pods lead to no node.
#[rstest]
#[case::over_ipv4(V4, 1500 - 50)]
#[case::over_ipv6(V6, 1500 - 70)]
fn an_address_on_no_link_has_the_uplinks_mtu(
    #[case] outer: Family,
    #[case] mtu: u32,
) -> Result<()> {
    needs_root!();
    has_the_uplinks_mtu(Cluster::idle(&[0, 1])?, outer, mtu, "lo")
}

/// Sees that pods reach the first of two nodes, whose address is on a device that leads to no node, and that its VXLAN device has this MTU.
pub(super) fn has_the_uplinks_mtu(
    mut cluster: Cluster,
    outer: Family,
    mtu: u32,
    device: &str,
) -> Result<()> {
    cluster.put_outside(outer);
    let member = &cluster.members[0];
    let (mut own, mut inside, mut ways) = (Vec::new(), Vec::new(), Vec::new());
    for family in Family::BOTH {
        let address = if family == V4 {
            "203.0.113.1"
        } else {
            "2001:db8:77::1"
        };
        let net = format!("{address}/{}", family.host_bits());
        inside.push(format!("address add {net} dev {device}"));
        ways.push(format!("route add {net} via {}", member.address(family)));
        own.push(address.to_owned());
    }
    own.sort_by_key(|address| address.contains(':') != (outer == V6));
    member.node.netns().ip(&inside)?;
    cluster.fabric.ip(&ways)?;
    cluster.api.set(&member.name, &own, &member.ranges());
    for member in &mut cluster.members {
        member.start_agent_with(&["--resync", "2", "--routing", "vxlan"])?;
    }
    let [member, other] = &cluster.members[..] else {
        anyhow::bail!("two members");
    };
    let mut pods = vec![other.pod("other")?];
    for number in 0..3 {
        pods.push(member.pod(&format!("pod{number}"))?);
        member.compares()?;
        let link = member
            .node
            .netns()
            .ip_json(&["link", "show", "dev", TUNNEL])?;
        ensure!(link[0]["mtu"] == mtu, "{link}");
    }
    tunnels(member, other)?;
    tunnels(other, member)?;
    Cluster::all_reach_all(&pods)
}

/// The agent leaves others' routes alone; the doctor knows the agent's by their number, and says which of others go before them.
#[test]
fn a_route_before_the_agents_is_a_finding_of_the_doctor() -> Result<()> {
    needs_root!();
    let cluster = Cluster::new(&[0, 0, 1])?;
    cluster.settle()?;
    let member = &cluster.members[0];
    let _pods = cluster.pods()?;
    let netns = member.node.netns();
    let doctor = || {
        member
            .node
            .underpass(&["doctor", "--net-dir", NET, "--host-root", "/run/host"])
    };
    let clean = doctor()?;
    ensure!(!clean.contains("foreign-route"), "{clean}");
    // To a neighbour, and to one behind VXLAN.
    for other in &cluster.members[1..] {
        for family in Family::BOTH {
            let range = other.range(family);
            let by = format!("via {} dev {}", member.gateway(family), Node::UPLINK);
            netns.ip(&[format!("route add {range} {by} proto bird")])?;
            let said = doctor()?;
            for words in [
                "foreign-route",
                "12 (bird)",
                &format!("{range} {by} metric"),
                &format!("before {} metric 2000", other.route(family, member)),
            ] {
                ensure!(said.contains(words), "{words}: {said}");
            }
            netns.ip(&[format!("route del {range} {by} proto bird")])?;
        }
    }
    let clean = doctor()?;
    ensure!(!clean.contains("foreign-route"), "{clean}");
    Ok(())
}

/// While the network waits for something, nodes go on to join.
#[rstest]
fn a_command_that_hangs_keeps_no_later_node_from_routes(
    #[values("install", "upgrade")] verb: &str,
) -> Result<()> {
    const HOLD: &str = "/run/hold";
    needs_root!();
    let mut cluster = Cluster::idle(&[0])?;
    let netns = cluster.members[0].node.netns().clone();
    cluster.members[0].interpose(&format!(
        "[ \"$1\" != {verb} ] || while [ -e {HOLD} ]; do sleep 0.1; done"
    ))?;
    // There is one upgrade, after the first network.
    if verb == "upgrade" {
        netns.run(|| fs::write(HOLD, ""))?;
    }
    cluster.start_agents()?;
    let member = &cluster.members[0];
    if verb == "upgrade" {
        eventually("a conflist", || {
            member.conflist()?.context("there is none")?;
            Ok(())
        })?;
    } else {
        member.is_ready()?;
        netns.run(|| fs::write(HOLD, ""))?;
    }
    for number in [97, 98] {
        let addresses = [V4, V6].map(|family| outside(family, 0, number).to_string());
        let ranges = [
            format!("10.244.{number}.0/24"),
            format!("fd00:244:{number}::/64"),
        ];
        cluster
            .api
            .set(&format!("later{number}"), &addresses, &ranges);
        member.learns(&ranges, &addresses)?;
    }
    netns.run(|| fs::remove_file(HOLD))?;
    eventually("the network knows both", || {
        let conflist = member.conflist()?.context("a conflist")?;
        let kept = conflist["plugins"][0]["nonMasqueradeCIDRs"].to_string();
        ensure!(
            kept.contains("10.244.97.0") && kept.contains("10.244.98.0"),
            "{kept}"
        );
        Ok(())
    })?;
    member.is_ready()
}

/// With the uplink's MTU a client in the world would be told that it may send to the pod what does not fit when it goes there by another node.
#[test]
fn as_soon_as_one_node_is_behind_vxlan_pods_have_its_mtu() -> Result<()> {
    needs_root!();
    let mut cluster = Cluster::new(&[0, 0])?;
    let mtu = |cluster: &Cluster, name: &str| -> Result<Value> {
        let pod = cluster.members[0].pod(name)?;
        let link = pod.netns().ip_json(&["link", "show", "dev", Pod::IFNAME])?;
        Ok(link[0]["mtu"].clone())
    };
    cluster.settle()?;
    cluster.members[0].is_ready()?;
    let before = mtu(&cluster, "before")?;
    ensure!(before == 1500, "{before}");
    cluster.grow(1)?;
    eventually("the conflist has an MTU", || {
        let conflist = cluster.members[0].conflist()?.context("a conflist")?;
        ensure!(conflist["plugins"][0]["mtu"] == 1450, "{conflist}");
        Ok(())
    })?;
    let after = mtu(&cluster, "after")?;
    ensure!(after == 1450, "{after}");
    Ok(())
}

#[rstest]
#[case::over_ipv4(V4, 1500 - 50)]
#[case::over_ipv6(V6, 1500 - 70)]
fn where_all_is_tunnelled_pods_have_the_tunnels_mtu(
    #[case] outer: Family,
    #[case] mtu: u64,
) -> Result<()> {
    needs_root!();
    let mut cluster = Cluster::idle(&[0, 0])?;
    for member in &mut cluster.members {
        let mut addresses = member.addresses();
        addresses.sort_by_key(|address| address.contains(':') != (outer == V6));
        cluster.api.set(&member.name, &addresses, &member.ranges());
        member.start_agent_with(&["--resync", "2", "--routing", "vxlan"])?;
    }
    let pods = cluster.pods()?;
    for pod in &pods {
        let link = pod.netns().ip_json(&["link", "show", "dev", Pod::IFNAME])?;
        ensure!(link[0]["mtu"] == mtu, "{link}");
    }
    tunnels(&cluster.members[0], &cluster.members[1])?;
    tunnels(&cluster.members[1], &cluster.members[0])?;
    Cluster::all_reach_all(&pods)?;

    // Whoever says an MTU has it.
    let member = &mut cluster.members[0];
    member.stop_agent(nix::sys::signal::Signal::SIGTERM);
    let asked = ["--mtu", "1300", "--config", r#"{"bypass": "off"}"#];
    member.start_agent_with(&[&["--resync", "2", "--routing", "vxlan"], &asked[..]].concat())?;
    eventually("the MTU that was asked for", || {
        let conflist = cluster.members[0].conflist()?.context("a conflist")?;
        let ours = &conflist["plugins"][0];
        ensure!(ours["mtu"] == 1300 && ours["bypass"] == "off", "{ours}");
        Ok(())
    })
}

/// A cloud's node is known by an address that is translated on the way to it, so that the kernel has it nowhere.
#[rstest]
fn a_node_whose_address_is_translated_is_reached(#[values(V4, V6)] family: Family) -> Result<()> {
    const PUBLIC: [&str; 2] = ["203.0.113.3", "2001:db8:ffff::3"];
    needs_root!();
    let mut cluster = Cluster::idle(&[0, 0, 1])?;
    cluster.put_outside(family);
    let [_, _, member] = &cluster.members[..] else {
        anyhow::bail!("three members");
    };
    for (kind, family, public) in [("ip", V4, PUBLIC[0]), ("ip6", V6, PUBLIC[1])] {
        let own = member.address(family);
        cluster.fabric.nft(&format!(
            "table {kind} translation {{
                chain to {{ type nat hook prerouting priority -100; {kind} daddr {public} dnat to {own}; }}
                chain from {{ type nat hook postrouting priority 100; {kind} saddr {own} snat to {public}; }}
            }}"
        ))?;
    }
    let mut public = PUBLIC.map(str::to_owned);
    public.sort_by_key(|address| address.contains(':') != (family == V6));
    cluster.api.set(&member.name, &public, &member.ranges());
    for member in &cluster.members {
        // What is translated on another machine is whole: within one, the kernel's NAT takes the outer checksum for the unfinished inner one.
        offload::take_off(member.node.netns(), Node::UPLINK)?;
    }
    cluster.start_agents()?;
    cluster.settle()?;
    let pods = cluster.pods()?;
    Cluster::all_reach_all(&pods)?;
    let member = &cluster.members[2];
    member.compares()?;
    let log = member.log()?;
    let made = log.matches("device underpass-vxlan, outside").count();
    ensure!(made == 1, "made {made} times: {log}");

    // The address becomes its own, and the device is bound to it.
    let own = PUBLIC[usize::from(family == V6)];
    let line = format!("address add {own} dev lo");
    member.node.netns().ip(&[line])?;
    member.sends_from(Some(own))
}
