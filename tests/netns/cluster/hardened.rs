//! Nodes that have no IPv6 on new devices unless somebody asks for it, as hardened images do.

use underpass_tests::{netns::Netns, prelude::*};

use super::{
    fixture::Cluster,
    member::{Member, TUNNEL},
};

/// Two nodes with a router between them. The links that are there have IPv6.
fn beyond_a_router() -> Result<Cluster> {
    let cluster = Cluster::cold(&[0, 1])?;
    for member in &cluster.members {
        let netns = member.node.netns();
        netns.set_sysctl("net/ipv6/conf/default/disable_ipv6", "1")?;
    }
    Ok(cluster)
}

/// The setting of the VXLAN device.
fn own() -> String {
    format!("net/ipv6/conf/{TUNNEL}/disable_ipv6")
}

/// Whether the VXLAN device has the address that others' routes lead to.
fn has_address(member: &Member, netns: &Netns) -> Result<bool> {
    let address = member.tunnel_address(V6)?.to_string();
    let device = netns.ip_json(&["address", "show", "dev", TUNNEL])?;
    let mut addresses = device[0]["addr_info"].as_array().into_iter().flatten();
    Ok(addresses.any(|known| known["local"] == address.as_str()))
}

#[test]
fn a_tunnel_has_ipv6_where_new_devices_have_none() -> Result<()> {
    needs_root!();
    let mut cluster = beyond_a_router()?;
    cluster.start_agents()?;
    cluster.settle()?;
    let pods = cluster.pods()?;
    Cluster::all_reach_all(&pods)?;

    // Its addresses and routes go with it.
    let member = &cluster.members[0];
    let netns = member.node.netns();
    netns.set_sysctl(&own(), "1")?;
    eventually("it has IPv6 again", || {
        let value = netns.sysctl(&own())?;
        ensure!(value == "0", "{value}");
        ensure!(has_address(member, netns)?, "no address");
        Ok(())
    })?;
    cluster.settle()?;
    Cluster::all_reach_all(&pods)
}

/// Who has no IPv6 for pods keeps the image's setting.
#[test]
fn a_tunnel_for_ipv4_has_no_ipv6_there() -> Result<()> {
    needs_root!();
    let mut cluster = beyond_a_router()?;
    for member in &cluster.members {
        let ranges = [member.range(V4)];
        cluster.api.set(&member.name, &member.addresses(), &ranges);
    }
    cluster.start_agents()?;
    for member in &cluster.members {
        member.is_ready()?;
        member.knows_neighbours(1)?;
        member.compares()?;
        let value = member.node.netns().sysctl(&own())?;
        ensure!(value == "1", "{value}");
    }
    Ok(())
}
