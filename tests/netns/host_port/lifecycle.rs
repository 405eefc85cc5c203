//! What the plugin makes of port mappings: bad ones, leftovers, and what people see of them.

use std::time::Duration;

use serde_json::{Value, json};
use underpass_tests::{leak::Traces, prelude::*, runtime::Call};

use super::{both, mapped};

/// A node on which everything that is loaded once is loaded.
fn warm() -> Result<(Lab, Traces)> {
    let lab = Lab::new()?;
    lab.pod_with("first", &mapped(&lab, &both()))?.del()?;
    let traces = Traces::of(&lab.node)?;
    ensure!(traces.registry.ports.is_empty() && traces.registry.shadowed_ports == 0);
    Ok((lab, traces))
}

#[test]
fn bad_mappings_are_refused_and_change_nothing() -> Result<()> {
    needs_root!();
    let (lab, before) = warm()?;
    let netns = lab.node.netns().sibling("a")?;
    let path = netns.path().display().to_string();
    let good = json!({ "hostPort": 8080, "containerPort": 80 });
    let table: [(Value, u64, &[&str]); 10] = [
        (
            json!({ "hostPort": 0, "containerPort": 80 }),
            7,
            &["[1]", "hostPort 0"],
        ),
        (json!({ "containerPort": 80 }), 7, &["[1]", "hostPort 0"]),
        (
            json!({ "hostPort": 65536, "containerPort": 80 }),
            7,
            &["[1]", "65536"],
        ),
        (
            json!({ "hostPort": -1, "containerPort": 80 }),
            7,
            &["[1]", "-1"],
        ),
        (json!({ "hostPort": 81 }), 7, &["[1]", "containerPort 0"]),
        (
            json!({ "hostPort": 81, "containerPort": 70_000 }),
            7,
            &["[1]", "70000"],
        ),
        (
            json!({ "hostPort": 81, "containerPort": 80, "protocol": "icmp" }),
            7,
            &["[1]", "icmp"],
        ),
        (
            json!({ "hostPort": 81, "containerPort": 80, "hostIP": "here" }),
            7,
            &["[1]", "here"],
        ),
        (
            json!({ "hostPort": 8080, "containerPort": 81, "protocol": "TCP" }),
            7,
            &["[0]", "[1]", "8080"],
        ),
        (
            json!({ "hostPort": "81", "containerPort": 80 }),
            6,
            &["hostPort"],
        ),
    ];
    for (bad, code, words) in table {
        let conf = mapped(&lab, &[good.clone(), bad.clone()]);
        let call = |verb| Call::new(verb).attachment("a", &path, "eth0").conf(&conf);
        let error = call("ADD").run(&lab.node)?.error()?;
        ensure!(error.code == code, "{bad}: {error}");
        for word in words {
            ensure!(error.to_string().contains(word), "{bad}: {error}");
        }
        // Whatever it says, DEL cleans up.
        call("DEL").run(&lab.node)?.silence()?;
        before.expect_same(&lab.node)?;
    }
    Ok(())
}

#[test]
fn mappings_leave_nothing_behind() -> Result<()> {
    needs_root!();
    let (lab, before) = warm()?;
    let conf = mapped(&lab, &both());
    let pods = ["a", "b", "c"].map(|name| lab.pod_with(name, &conf));
    let [a, b, c] = pods;
    let (a, b, c) = (a?, b?, c?);
    let during = Traces::of(&lab.node)?;
    // Two protocols and two families; two containers wait.
    ensure!(during.registry.ports.len() == 4, "{during:#?}");
    ensure!(during.registry.shadowed_ports == 8, "{during:#?}");
    b.del()?;
    c.del()?;
    // Runtimes need not repeat the mappings.
    a.call("DEL").conf(&lab.conf()).run(&lab.node)?.silence()?;
    a.abandon();
    before.expect_same(&lab.node)
}

#[test]
fn a_kill_in_the_middle_of_an_add_with_ports() -> Result<()> {
    needs_root!();
    let (lab, before) = warm()?;
    let many: Vec<Value> = (0..100)
        .map(|at| json!({ "hostPort": 20_000 + at, "containerPort": 80 }))
        .collect();
    let conf = mapped(&lab, &many);
    let older = lab.pod_with("older", &conf)?;
    let during = Traces::of(&lab.node)?;
    let netns = lab.node.netns().sibling("a")?;
    let path = netns.path().display().to_string();
    let mut killed = 0;
    for step in 0..25 {
        let call = |verb| Call::new(verb).attachment("a", &path, "eth0").conf(&conf);
        let add = call("ADD");
        let delay = Duration::from_micros(400 * step);
        let command = &mut add.command();
        killed += usize::from(lab.node.netns().kill_after(command, add.input(), delay)?);
        call("DEL").run(&lab.node)?.silence()?;
        older.call_with_result("CHECK").run(&lab.node)?.silence()?;
        during.expect_same(&lab.node)?;
    }
    ensure!(killed > 0, "no ADD was slow enough to be killed");
    older.del()?;
    before.expect_same(&lab.node)
}

#[test]
fn the_command_line_shows_the_ports() -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    let conf = mapped(&lab, &both());
    let (older, newer) = (lab.pod_with("older", &conf)?, lab.pod_with("newer", &conf)?);
    let text = lab.node.underpass(&["status"])?;
    for (pod, waits) in [(&older, true), (&newer, false)] {
        for (at, family) in [("0.0.0.0:8080", V4), ("[::]:8080", V6)] {
            let to = pod.at(family, 80).to_string();
            let is_shown = text.lines().any(|line| {
                line.contains(&format!("{at}/udp"))
                    && line.contains(&to)
                    && line.contains(pod.name())
                    && line.contains("waits") == waits
            });
            ensure!(is_shown, "{at} to {to}:\n{text}");
        }
    }
    let json: Value = serde_json::from_str(&lab.node.underpass(&["status", "--json"])?)?;
    let ports = json["hostPorts"].as_array().map_or(0, Vec::len);
    ensure!(ports == 8, "{json:#}");
    let first = &json["hostPorts"][0];
    ensure!(
        first["address"] == "0.0.0.0" && first["state"] == "serving",
        "{first}"
    );
    ensure!(
        first["containerAddress"] == newer.ip(V4).to_string(),
        "{first}"
    );
    Ok(())
}

#[test]
fn sctp_ports_are_mapped() -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    let mapping = json!({ "hostPort": 9000, "containerPort": 9001, "protocol": "SCTP" });
    let pod = lab.pod_with("a", &mapped(&lab, &[mapping]))?;
    let traces = Traces::of(&lab.node)?;
    ensure!(traces.registry.ports.len() == 2, "{traces:#?}");
    pod.call_with_result("CHECK").run(&lab.node)?.silence()?;
    ensure!(pod.result()["interfaces"][1]["name"] == Pod::IFNAME);
    Ok(())
}
