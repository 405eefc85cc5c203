//! Nobody looks after the nodes: what agents have made stays, and is enough.

use nix::sys::signal::Signal;
use rstest::rstest;
use underpass_tests::{prelude::*, runtime::Conf};

use super::{
    fixture::Cluster,
    made::{all, expect, lasts, should_be},
    member::Member,
};

/// Adds a pod on each node. The runtime has the network, and nobody who says that it is ready.
fn pods(cluster: &Cluster, networks: &[Conf], name: &str) -> Result<Vec<Pod>> {
    let members = cluster.members.iter().zip(networks);
    members
        .map(|(member, network)| {
            Pod::add(&member.node, &format!("{name}{}", member.number), network)
        })
        .collect()
}

/// Pods of all nodes reach each other past the stacks of nodes, directly and through VXLAN.
fn all_talk(cluster: &Cluster, pods: &[Pod]) -> Result<()> {
    let meters: Vec<Meter<'_>> = cluster
        .members
        .iter()
        .map(|member| Meter::start(&member.node))
        .collect::<Result<_>>()?;
    Cluster::all_reach_all(pods)?;
    for meter in meters {
        for counter in [Counter::BypassWire, Counter::BypassPeer] {
            meter.expect(counter, 1)?;
        }
    }
    Ok(())
}

/// For as long as it takes: nothing that a node needs for it ends by itself.
#[rstest]
fn pods_come_and_go_without_agents_and_without_the_api(
    #[values(V4, V6)] outside: Family,
) -> Result<()> {
    needs_root!();
    let mut cluster = Cluster::cold(&[0, 0, 1])?;
    cluster.put_outside(outside);
    cluster.start_agents()?;
    cluster.settle()?;
    let networks = cluster.members.iter().map(Member::conf);
    let networks = networks.collect::<Result<Vec<_>>>()?;
    let mut old = pods(&cluster, &networks, "old")?;
    for member in &cluster.members {
        let expected = should_be(&cluster, member)?;
        eventually("all is made", || expect(member, &expected))?;
    }
    cluster.api.be_down(true);
    for member in &mut cluster.members {
        member.stop_agent(Signal::SIGKILL);
    }
    let made = || cluster.members.iter().map(all).collect::<Result<Vec<_>>>();
    let before = made()?;

    all_talk(&cluster, &old)?;
    let left = old.remove(1);
    old.into_iter().try_for_each(Pod::del)?;
    let mut new = pods(&cluster, &networks, "new")?;
    new.push(left);
    all_talk(&cluster, &new)?;
    cluster.members.iter().try_for_each(lasts)?;
    let after = made()?;
    ensure!(after == before, "{before:#?} became {after:#?}");

    // Whoever comes back finds nothing to do.
    cluster.api.be_down(false);
    cluster.start_agents()?;
    for member in &cluster.members {
        member.is_ready()?;
        member.compares()?;
        ensure!(member.metric("changes_total")? == 0, "{}", member.log()?);
    }
    Cluster::all_reach_all(&new)
}
