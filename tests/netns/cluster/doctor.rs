//! The doctor on the nodes of a cluster: where all is well it says so, also of what agents have made.

use std::{path::Path, process::Command};

use serde_json::Value;
use underpass_tests::prelude::*;

use super::{
    firewall::none_was_invalid,
    fixture::Cluster,
    member::{BIN, Member, NET},
};

/// Where the files of the host are for the doctor, instead of this machine's.
const HOST: &str = "/run/host";
/// What any node could do better.
const HINTS: [&str; 2] = ["kernel-feature", "tcp-strict"];

/// What the installed doctor says of a node with these options: its exit code, and its words.
fn ask(member: &Member, options: &[&str]) -> Result<(Option<i32>, String)> {
    let mut doctor = Command::new(Path::new(BIN).join("underpass"));
    doctor.env_clear().arg("doctor").args(options);
    doctor.args(["--net-dir", NET, "--host-root", HOST]);
    let output = member.node.netns().output(&mut doctor, &[])?;
    let said = String::from_utf8(output.stdout)?;
    ensure!(
        !said.is_empty(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    Ok((output.status.code(), said))
}

/// The ids of a list of the doctor's.
fn ids<'a>(report: &'a Value, list: &str) -> Vec<&'a str> {
    let found = report[list].as_array().into_iter().flatten();
    found.filter_map(|found| found["id"].as_str()).collect()
}

/// Fails unless these are all findings on a node, none of which is an error.
fn expect(member: &Member, findings: &[&str]) -> Result<()> {
    let (code, said) = ask(member, &["--json"])?;
    let report: Value = serde_json::from_str(&said)?;
    let hints = ids(&report, "hints");
    ensure!(
        code == Some(0)
            && ids(&report, "findings") == findings
            && ids(&report, "notChecked").is_empty()
            && hints.iter().all(|hint| HINTS.contains(hint)),
        "{}: {code:?}, {report:#}",
        member.name
    );
    Ok(())
}

/// Two nodes on a link, and one that they reach through VXLAN, each with a strict firewall: before the first pod, with pods, and after the last one.
#[test]
fn a_cluster_in_which_all_is_well_has_no_findings() -> Result<()> {
    needs_root!();
    let cluster = Cluster::new(&[0, 0, 1])?;
    let firewalls = cluster.fortify()?;
    cluster.settle()?;
    for member in &cluster.members {
        member.is_ready()?;
        // The programs go by the timers of before until the agent has looked.
        eventually("no findings", || expect(member, &[]))?;
    }
    let pods = cluster.pods()?;
    Cluster::all_reach_all(&pods)?;
    for member in &cluster.members {
        expect(member, &[]).context("with pods")?;
        let (_, said) = ask(member, &[])?;
        ensure!(said.starts_with("nothing to complain about\n"), "{said}");
    }
    // Of what agents have made it knows what is wrong with it.
    let foreign = "10.244.2.0/25 via 198.18.10.254";
    let netns = cluster.members[0].node.netns();
    netns.ip(&[format!("route add {foreign}")])?;
    expect(&cluster.members[0], &["foreign-route"])?;
    netns.ip(&[format!("route del {foreign}")])?;
    pods.into_iter().try_for_each(Pod::del)?;
    for member in &cluster.members {
        expect(member, &[]).context("after the pods")?;
    }
    none_was_invalid(&firewalls)
}
