//! Devices of others on a node: who comes and goes by them is no reason to install, and their MTU is not that of the way to other nodes.

use rstest::rstest;
use rtnetlink::LinkDummy;
use underpass_tests::{kernel::Facility, prelude::*};

use super::{commands::runs, fixture::Cluster, member::Member, ways::has_the_uplinks_mtu};

/// Both ends of a pair that is another runtime's.
const THEIRS: [&str; 2] = ["theirs", "inside"];
/// What has the node's address, where that is announced by BGP.
const DUMMY: &str = "announced";

/// Makes the pair, up. Both ends get link-local addresses.
fn plug(member: &Member) -> Result<()> {
    let [outer, inner] = THEIRS;
    member.node.netns().ip(&[
        format!("link add {outer} type veth peer name {inner}"),
        format!("link set {inner} up"),
        format!("link set {outer} up"),
    ])
}

/// Each container has link-local addresses of its own. A network that can't be installed is tried again later and later, and at once when what is
/// on this node's links has become another: that says nothing of it.
#[rstest]
fn containers_of_others_are_no_reason_to_install(#[values(true, false)] works: bool) -> Result<()> {
    needs_root!();
    let mut cluster = Cluster::idle(&[0])?;
    let member = &mut cluster.members[0];
    let end = if works { "true" } else { "exit 1" };
    member.interpose(&format!(
        "[ \"$1\" != install ] || {{ echo >> /run/install-runs; {end}; }}"
    ))?;
    // Nothing is tried again by the clock.
    member.start_agent_with(&["--resync", "3600"])?;
    let member = &cluster.members[0];
    if works {
        member.is_ready()?;
    }
    eventually("the first try", || {
        ensure!(runs(member, "install")? > 0);
        Ok(())
    })?;
    member.rests()?;
    let before = runs(member, "install")?;
    let netns = member.node.netns();
    let [outer, _] = THEIRS;
    for _ in 0..2 {
        let syncs = member.metric("syncs_total")?;
        plug(member)?;
        eventually("a link-local address", || {
            let found = netns.ip_json(&["address", "show", "dev", outer])?;
            let address = &found[0]["addr_info"][0];
            ensure!(address["scope"] == "link", "{found}");
            Ok(())
        })?;
        eventually("the agent hears of it", || {
            let now = member.metric("syncs_total")?;
            ensure!(now > syncs, "{now} after {syncs}");
            Ok(())
        })?;
        member.rests()?;
        netns.delete_link(outer)?;
        member.rests()?;
    }
    let now = runs(member, "install")?;
    ensure!(now == before, "{now} installs, {before} before");

    // A prefix that a range could have inside is one.
    plug(member)?;
    netns.ip(&[format!("address add 203.0.113.1/24 dev {outer}")])?;
    eventually("another try", || {
        ensure!(runs(member, "install")? > before);
        Ok(())
    })
}

/// A dummy leads to no node, whatever its MTU.
#[rstest]
#[case::over_ipv4(V4, 1500 - 50)]
#[case::over_ipv6(V6, 1500 - 70)]
fn an_address_on_a_dummy_has_the_uplinks_mtu(
    #[case] outer: Family,
    #[case] mtu: u32,
) -> Result<()> {
    needs_root!();
    if Facility::Dummy.is_missing()? {
        return Ok(());
    }
    let cluster = Cluster::idle(&[0, 1])?;
    let dummy = LinkDummy::new(DUMMY).mtu(1_400).up().build();
    cluster.members[0]
        .node
        .netns()
        .rtnl(|node| node.add(dummy))?;
    has_the_uplinks_mtu(cluster, outer, mtu, DUMMY)
}
