//! Where the API server is, and what an agent says when it is not there.

use std::{fs, process::Command, thread::sleep, time::Duration};

use underpass_tests::prelude::*;

use super::{
    fixture::Cluster,
    member::{CREDENTIALS, LOG, outside},
};

/// A kubeconfig that names an address where nobody listens.
const AWAY: &str = "apiVersion: v1\nkind: Config\nclusters:\n- name: c\n  cluster:\n    server: http://127.0.0.1:1\n\
                    contexts:\n- name: c\n  context:\n    cluster: c\n    user: u\ncurrent-context: c\nusers:\n- name: u\n  user: {}\n";
/// What the log has each time that the API does not answer.
const SAID: &str = "cannot follow the Nodes";
/// How long an agent may run that should end at once, in seconds.
const LIMIT: &str = "20";

/// Has the API know another node on the link. Returns its ranges and addresses.
fn join_another(cluster: &Cluster) -> ([String; 2], [String; 2]) {
    let addresses = Family::BOTH.map(|family| outside(family, 0, 97).to_string());
    let ranges = ["10.244.97.0/24", "fd00:244:97::/64"].map(str::to_owned);
    cluster.api.set("later", &addresses, &ranges);
    (ranges, addresses)
}

#[test]
fn the_log_says_why_the_api_is_not_reached() -> Result<()> {
    needs_root!();
    let mut cluster = Cluster::idle(&[0])?;
    let member = &mut cluster.members[0];
    let config = "/run/away";
    member.node.netns().run(|| fs::write(config, AWAY))?;
    let log = member.node.netns().run(|| fs::File::create(LOG))?;
    let mut command = member.command(&[])?;
    command.env("KUBECONFIG", config).stderr(log);
    member.agent = Some(super::agent::Agent::start(command, member.node.netns())?);
    let member = &cluster.members[0];
    eventually("it says who refuses", || {
        let log = member.log()?;
        let said = log.lines().find(|line| line.contains(SAID));
        let said = said.context("it says nothing")?;
        ensure!(said.contains("Connection refused"), "{said}");
        ensure!(
            said.matches("client error (Connect)").count() == 1,
            "{said}"
        );
        Ok(())
    })?;
    // Whoever looks at the agent and not at its log sees it, too.
    let said = member.get("/readyz")?;
    ensure!(
        said.starts_with("HTTP/1.1 503") && said.contains("Connection refused"),
        "{said}"
    );
    // It asks later and later: after less than a second, and twice as long each time.
    sleep(Duration::from_secs(20));
    let log = member.log()?;
    let asked = log.matches(SAID).count();
    ensure!((3..=6).contains(&asked), "{asked} times: {log}");
    let counted = member.metric("watch_failures_total")?;
    ensure!(counted >= asked as u64, "{counted}, not {asked}");
    Ok(())
}

/// A connection that somebody on the way has forgotten: nothing comes by it any more, not even its end.
#[test]
fn an_api_that_falls_silent_is_asked_anew() -> Result<()> {
    needs_root!();
    let mut cluster = Cluster::idle(&[0])?;
    cluster.start_agents()?;
    let member = &cluster.members[0];
    member.is_ready()?;
    let lists = cluster.api.lists();
    cluster.api.freeze();
    let (ranges, addresses) = join_another(&cluster);
    // A watch is over after a minute, and missed five seconds later.
    sleep(Duration::from_secs(20));
    member.learns(&ranges, &addresses)?;
    // It went on from where it was.
    let now = cluster.api.lists();
    ensure!(now == lists, "{lists} lists became {now}");
    Ok(())
}

/// An etcd that was restored from a backup is at a version that was long ago: a watch from a later one hears nothing.
#[test]
fn an_api_that_has_gone_back_is_listed_anew() -> Result<()> {
    needs_root!();
    let mut cluster = Cluster::idle(&[0])?;
    let own = cluster.members[0].name.clone();
    for _ in 0..20 {
        let node = cluster.api.node(&own).context("its own Node")?;
        cluster.api.put(&own, node);
    }
    cluster.members[0].start_agent_with(&["--relist", "4"])?;
    let member = &cluster.members[0];
    member.is_ready()?;
    let (gone, addresses) = join_another(&cluster);
    member.learns(&gone, &addresses)?;
    cluster.api.go_back();
    cluster.api.delete("later");
    let addresses = Family::BOTH.map(|family| outside(family, 0, 98).to_string());
    let ranges = ["10.244.98.0/24", "fd00:244:98::/64"].map(str::to_owned);
    cluster.api.set("restored", &addresses, &ranges);
    member.learns(&ranges, &addresses)?;
    eventually("no routes to who is gone", || {
        let routes = member.routes()?;
        let leads_there = |route: &String| gone.iter().any(|range| route.starts_with(range));
        ensure!(!routes.iter().any(leads_there), "{gone:?}: {routes:?}");
        Ok(())
    })
}

/// A server that has too much to do refuses lists, which are dear, and goes on with watches.
#[test]
fn an_api_that_refuses_lists_is_heard_all_the_same() -> Result<()> {
    needs_root!();
    let mut cluster = Cluster::idle(&[0])?;
    cluster.members[0].start_agent_with(&["--relist", "1"])?;
    let member = &cluster.members[0];
    member.is_ready()?;
    cluster.api.be_busy(true);
    let failures = member.metric("watch_failures_total")?;
    eventually("lists are refused", || {
        ensure!(member.metric("watch_failures_total")? >= failures + 2);
        Ok(())
    })?;
    member.is_ready()?;
    let (ranges, addresses) = join_another(&cluster);
    member.learns(&ranges, &addresses)?;
    cluster.api.be_busy(false);
    let lists = cluster.api.lists();
    eventually("they are listed again", || {
        ensure!(cluster.api.lists() >= lists + 2);
        Ok(())
    })
}

/// A server whose lists take so long that it has forgotten their version by the next page: the watch of before goes on.
#[test]
fn a_list_that_breaks_off_costs_no_watch() -> Result<()> {
    needs_root!();
    let mut cluster = Cluster::idle(&[0])?;
    // More than a page.
    for number in 0..150 {
        cluster.api.set(&format!("other{number}"), &[], &[]);
    }
    cluster.members[0].start_agent_with(&["--relist", "1"])?;
    let member = &cluster.members[0];
    member.is_ready()?;
    cluster.api.be_hasty(true);
    let before = cluster.api.count("late page");
    eventually("lists are broken off", || {
        ensure!(cluster.api.count("late page") >= before + 2);
        Ok(())
    })?;
    let (ranges, addresses) = join_another(&cluster);
    member.learns(&ranges, &addresses)?;
    cluster.api.be_hasty(false);
    let lists = cluster.api.lists();
    eventually("they are listed again", || {
        ensure!(cluster.api.lists() >= lists + 4);
        Ok(())
    })
}

/// Tokens and certificates end, and somebody writes new ones into the same files.
#[test]
fn new_credentials_are_read_when_the_old_ones_are_refused() -> Result<()> {
    needs_root!();
    let mut cluster = Cluster::idle(&[0])?;
    cluster.start_agents()?;
    let member = &cluster.members[0];
    member.is_ready()?;
    let lists = cluster.api.lists();
    cluster.api.require_token("second");
    eventually("the agent is refused", || {
        ensure!(cluster.api.count("refused") >= 2);
        Ok(())
    })?;
    // What is known stays.
    member.is_ready()?;
    member.write_credentials("second")?;
    let (ranges, addresses) = join_another(&cluster);
    member.learns(&ranges, &addresses)?;
    // It went on from where it was.
    let now = cluster.api.lists();
    ensure!(now == lists, "{lists} lists became {now}");
    Ok(())
}

/// Somebody hands the agent its credentials and takes them away again: they are good as long as they are.
#[test]
fn credentials_that_were_taken_away_go_on() -> Result<()> {
    needs_root!();
    let mut cluster = Cluster::idle(&[0])?;
    cluster.start_agents()?;
    let member = &cluster.members[0];
    member.is_ready()?;
    member.node.netns().run(|| fs::remove_file(CREDENTIALS))?;
    cluster.api.be_down(true);
    let failures = member.metric("watch_failures_total")?;
    eventually("the API is missed", || {
        ensure!(member.metric("watch_failures_total")? >= failures + 2);
        Ok(())
    })?;
    cluster.api.be_down(false);
    let (ranges, addresses) = join_another(&cluster);
    member.learns(&ranges, &addresses)
}

/// A file in somebody's home has that person's rights: whoever wants them says so.
#[test]
fn nobodys_home_is_searched_for_the_api() -> Result<()> {
    needs_root!();
    let cluster = Cluster::idle(&[0])?;
    let member = &cluster.members[0];
    let home = "/run/home";
    member.node.netns().run(|| {
        fs::create_dir_all(format!("{home}/.kube"))?;
        fs::write(format!("{home}/.kube/config"), AWAY)
    })?;
    // One that finds the file goes on, until it is ended.
    let command = member.command(&[])?;
    let mut limited = Command::new("timeout");
    limited.arg(LIMIT).arg(command.get_program());
    limited.args(command.get_args()).env_clear();
    limited.env("HOME", home).env("PATH", "/usr/bin:/bin");
    let output = member.node.netns().output(&mut limited, &[])?;
    let said = String::from_utf8_lossy(&output.stderr);
    ensure!(
        output.status.code() == Some(1)
            && said.contains("neither KUBECONFIG nor a service account"),
        "{said}"
    );
    Ok(())
}
