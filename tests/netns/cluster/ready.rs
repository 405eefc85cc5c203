//! What an agent says of the network: whether it is there, the Node's, and looked after.

use std::{fs, net::UdpSocket};

use rstest::rstest;
use underpass_tests::prelude::*;

use super::{
    fixture::Cluster,
    member::{Member, TUNNEL, outside},
};

/// While there is this file `install` fails.
const FAIL: &str = "/run/fail";
/// What it says then.
const WHY: &str = "there is no room for it";
/// Ranges that nobody else has.
const OTHER: [&str; 2] = ["10.244.77.0/24", "fd00:244:77::/64"];

/// A node whose agent runs, and whose `install` fails from the beginning or can be made to.
fn fallible(fails: bool) -> Result<Cluster> {
    let mut cluster = Cluster::cold(&[0])?;
    cluster.members[0].interpose(&format!(
        "[ \"$1\" != install ] || [ ! -e {FAIL} ] || {{ echo \"{WHY}\" >&2; exit 1; }}"
    ))?;
    if fails {
        fail(&cluster.members[0], true)?;
    }
    cluster.start_agents()?;
    Ok(cluster)
}

fn fail(member: &Member, fails: bool) -> Result<()> {
    member.node.netns().run(|| {
        if fails {
            fs::write(FAIL, "")
        } else {
            fs::remove_file(FAIL)
        }
    })?;
    Ok(())
}

/// Waits until `/readyz` has this status and these words.
fn says(member: &Member, status: u16, words: &[&str]) -> Result<()> {
    eventually(&format!("{status} with {words:?}"), || {
        let said = member.get("/readyz")?;
        let is_so = said.starts_with(&format!("HTTP/1.1 {status} "));
        ensure!(
            is_so && words.iter().all(|words| said.contains(words)),
            "{said}"
        );
        Ok(())
    })
}

/// Waits until commands that fail are counted: one is tried at each comparison.
fn counts_more_failures(member: &Member) -> Result<()> {
    let before = member.metric("command_failures_total")?;
    eventually("more failures", || {
        let now = member.metric("command_failures_total")?;
        ensure!(now > before, "{now} after {before}");
        Ok(())
    })
}

/// And nothing else.
fn is_well(member: &Member) -> Result<()> {
    says(member, 200, &["\r\n\r\nok\n"])
}

#[test]
fn it_says_why_there_is_no_network_yet() -> Result<()> {
    needs_root!();
    let cluster = fallible(true)?;
    let member = &cluster.members[0];
    says(member, 503, &["not complete yet", WHY])?;
    fail(member, false)?;
    is_well(member)
}

/// Pods come and go as before. What the network does not learn of costs them their own addresses towards a new node.
#[test]
fn a_network_that_can_not_be_looked_after_is_still_one() -> Result<()> {
    needs_root!();
    let cluster = fallible(false)?;
    let member = &cluster.members[0];
    is_well(member)?;
    fail(member, true)?;
    let addresses = [outside(V4, 0, 97).to_string()];
    cluster
        .api
        .set("later", &addresses, &["10.244.97.0/24".to_owned()]);
    says(
        member,
        200,
        &["ok, but the network can't be looked after", WHY],
    )?;
    counts_more_failures(member)?;
    member.pod("meanwhile")?;
    fail(member, false)?;
    is_well(member)
}

/// New pods have addresses that another node may have by now.
#[test]
fn a_network_of_the_ranges_of_before_is_none() -> Result<()> {
    needs_root!();
    let cluster = fallible(false)?;
    let member = &cluster.members[0];
    is_well(member)?;
    fail(member, true)?;
    let other = OTHER.map(str::to_owned);
    cluster.api.set(&member.name, &member.addresses(), &other);
    says(member, 503, &["not the one of the Node's ranges", WHY])?;
    counts_more_failures(member)?;
    fail(member, false)?;
    is_well(member)?;
    let conflist = member.conflist()?.context("a conflist")?.to_string();
    ensure!(conflist.contains(OTHER[0]), "{conflist}");
    Ok(())
}

/// The Node is given ranges that it can't have: those of its link, or an older Node's.
#[rstest]
#[case::of_a_link("198.18.10.0/25")]
#[case::of_an_older_node("10.244.1.0/24")]
fn a_network_whose_ranges_are_refused_is_none(#[case] bad: &str) -> Result<()> {
    needs_root!();
    let cluster = Cluster::new(&[0, 0])?;
    cluster.settle()?;
    let [older, member] = &cluster.members[..] else {
        anyhow::bail!("two members");
    };
    is_well(older)?;
    is_well(member)?;
    let ranges = [bad.to_owned(), member.range(V6)];
    cluster.api.set(&member.name, &member.addresses(), &ranges);
    says(member, 503, &["not the one of the Node's ranges", bad])?;
    eventually("it counts that", || {
        let remarks = member.metric("remarks")?;
        ensure!(remarks == 1, "{remarks}");
        Ok(())
    })?;
    // Whose range it is has the route to it, and its network.
    if bad == older.range(V4) {
        let route = older.route(V4, member);
        eventually("the route to the older one", || {
            let routes = member.routes()?;
            ensure!(routes.contains(&route), "{routes:?}");
            Ok(())
        })?;
    }
    is_well(older)?;
    cluster.register(member);
    is_well(member)?;
    cluster.settle()?;
    ensure!(member.metric("remarks")? == 0);
    Ok(())
}

/// A Node that was deleted and registered again has its ranges before a cloud's controller gives it an address: nothing is made of it yet, and
/// new pods have addresses that another node may be given.
#[test]
fn a_network_whose_node_has_other_ranges_already_is_none() -> Result<()> {
    needs_root!();
    let cluster = Cluster::new(&[0])?;
    let member = &cluster.members[0];
    is_well(member)?;
    cluster.api.delete(&member.name);
    member.compares()?;
    is_well(member)?;
    cluster
        .api
        .set(&member.name, &[], &OTHER.map(str::to_owned));
    let before = member.range(V4);
    says(
        member,
        503,
        &[
            "not the one of the Node's ranges",
            OTHER[0],
            &before,
            "no InternalIP",
        ],
    )?;
    cluster
        .api
        .set(&member.name, &member.addresses(), &OTHER.map(str::to_owned));
    is_well(member)?;
    let conflist = member.conflist()?.context("a conflist")?.to_string();
    ensure!(conflist.contains(OTHER[0]), "{conflist}");
    Ok(())
}

/// Pods come and go, and reach those of other nodes no more.
#[rstest]
#[case::others_have_the_port("link add x type vxlan id 1 dstport 4789", 2)]
#[case::the_link_is_too_narrow_for_ipv6("link set eth0 mtu 1310", 1)]
fn a_node_whose_tunnel_can_not_be_made_says_so(
    #[case] line: &str,
    #[case] missing: usize,
) -> Result<()> {
    needs_root!();
    let cluster = Cluster::new(&[0, 1])?;
    cluster.settle()?;
    let member = &cluster.members[0];
    is_well(member)?;
    let remove = format!("link del {TUNNEL}");
    // It would be as fast as the second line.
    member.running()?.hold(true)?;
    member.node.netns().ip(&[remove, line.to_owned()])?;
    member.running()?.hold(false)?;
    let said = format!("ok, but {missing} of the other nodes' routes");
    says(member, 200, &[&said])?;
    let undo = if line.starts_with("link add") {
        "link del x"
    } else {
        "link set eth0 mtu 1500"
    };
    member.node.netns().ip(&[undo.to_owned()])?;
    is_well(member)?;
    cluster.settle()
}

/// Where all nodes are on one link nobody needs the device: what keeps it from being made is said, and no more.
#[test]
fn a_tunnel_that_nobody_needs_keeps_no_network_away() -> Result<()> {
    needs_root!();
    let mut cluster = Cluster::cold(&[0, 0])?;
    let node = cluster.members[0].node.netns();
    let _theirs = node.run(|| UdpSocket::bind(("0.0.0.0", 4_789)))?;
    cluster.start_agents()?;
    let member = &cluster.members[0];
    is_well(member)?;
    let log = member.log()?;
    ensure!(
        log.contains(TUNNEL) && log.contains("Open vSwitch"),
        "{log}"
    );
    let pods = cluster.pods()?;
    Cluster::all_reach_all(&pods)
}
