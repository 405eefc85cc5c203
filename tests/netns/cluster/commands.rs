//! The commands that an agent runs, when they can't do all.

use std::{fs, process::Command, thread, time::Duration};

use underpass_tests::prelude::*;

use super::{
    fixture::Cluster,
    member::{Member, NET, outside},
};

/// How often the interposed command has run.
pub(super) fn runs(member: &Member, verb: &str) -> Result<usize> {
    let path = format!("/run/{verb}-runs");
    let text = member.read(&path)?.unwrap_or_default();
    Ok(String::from_utf8(text)?.lines().count())
}

/// An upgrade waits for calls that are there, and lets none begin meanwhile. One that fails is tried again, but not all the time.
#[test]
fn an_upgrade_that_fails_is_tried_later_and_later() -> Result<()> {
    needs_root!();
    let mut cluster = Cluster::idle(&[0])?;
    cluster.members[0].interpose(
        "[ \"$1\" != upgrade ] || { echo >> /run/upgrade-runs; [ $(wc -l < /run/upgrade-runs) = 3 ] || { echo \"it hangs\" >&2; exit 1; }; }\n\
         [ \"$1\" != install ] || echo >> /run/install-runs",
    )?;
    cluster.members[0].start_agent_with(&["--resync", "1"])?;
    let member = &cluster.members[0];
    member.is_ready()?;
    eventually("the third try", || {
        ensure!(runs(member, "upgrade")? == 3);
        Ok(())
    })?;
    // After one second and after two more: as many installs are between.
    let installs = runs(member, "install")?;
    ensure!(installs >= 4, "{installs} installs for three upgrades");
    let log = member.log()?;
    ensure!(log.matches("it hangs").count() == 1, "{log}");
    // The third one has done it.
    eventually("more installs", || {
        ensure!(runs(member, "install")? >= installs + 6);
        Ok(())
    })?;
    ensure!(
        runs(member, "upgrade")? == 3,
        "an upgrade that is done is done again"
    );
    Ok(())
}

/// The command may have an upgrade in it, for which all other calls wait. Nodes that change are no reason to try again, unless the network is
/// another one then.
#[test]
fn a_network_that_can_not_be_installed_is_tried_later_and_later() -> Result<()> {
    needs_root!();
    let mut cluster = Cluster::idle(&[0])?;
    cluster.members[0].interpose(
        "[ \"$1\" != install ] || { echo >> /run/install-runs; echo \"it hangs\" >&2; exit 1; }",
    )?;
    let asked = [
        "--cluster-cidr",
        "10.244.0.0/16",
        "--cluster-cidr",
        "fd00:244::/32",
    ];
    cluster.members[0].start_agent_with(&[&["--resync", "2"], &asked[..]].concat())?;
    let member = &cluster.members[0];
    eventually("the first try", || {
        ensure!(runs(member, "install")? > 0);
        Ok(())
    })?;
    for number in 50..80 {
        let ranges = [format!("10.244.{number}.0/24")];
        let addresses = [outside(V4, 0, number).to_string()];
        cluster
            .api
            .set(&format!("other{number}"), &addresses, &ranges);
        thread::sleep(Duration::from_millis(200));
    }
    let tries = runs(member, "install")?;
    ensure!(tries <= 4, "{tries} tries while other Nodes came");
    // It is not given up.
    eventually("another try", || {
        ensure!(runs(member, "install")? > tries);
        Ok(())
    })
}

/// Somebody's conflist that can't be read is their trouble. What is wrong is said once, and what was done beside it is said.
#[test]
fn a_foreign_conflist_that_can_not_be_read_is_said_once() -> Result<()> {
    needs_root!();
    let mut cluster = Cluster::idle(&[0])?;
    cluster.start_agents()?;
    let member = &cluster.members[0];
    member.is_ready()?;
    let path = format!("{NET}/20-odd.conflist");
    member
        .node
        .netns()
        .run(|| fs::write(&path, "{\"type\": \"underpass\""))?;
    let failed = member.metric("command_failures_total")?;
    eventually("apply fails", || {
        let now = member.metric("command_failures_total")?;
        ensure!(now >= failed + 4, "{now} after {failed}");
        Ok(())
    })?;
    let log = member.log()?;
    // By `apply` alone: `gc` waits longer.
    ensure!(log.matches("20-odd.conflist").count() == 1, "{log}");
    let mut command = Command::new("tc");
    command.args(["qdisc", "del", "dev", Node::UPLINK, "clsact"]);
    member.node.netns().expect(&mut command, &[])?;
    eventually("it says what it has changed", || {
        let log = member.log()?;
        let attached = format!("apply: {}: attached", Node::UPLINK);
        ensure!(log.contains(&attached), "{log}");
        Ok(())
    })
}
