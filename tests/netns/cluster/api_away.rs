//! Where the API server is, and what an agent says when it is not there.

use std::{fs, process::Command};

use underpass_tests::prelude::*;

use super::{fixture::Cluster, member::LOG};

/// A kubeconfig that names an address where nobody listens.
const AWAY: &str = "apiVersion: v1\nkind: Config\nclusters:\n- name: c\n  cluster:\n    server: http://127.0.0.1:1\n\
                    contexts:\n- name: c\n  context:\n    cluster: c\n    user: u\ncurrent-context: c\nusers:\n- name: u\n  user: {}\n";
/// How long an agent may run that should end at once, in seconds.
const LIMIT: &str = "20";

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
        let said = log
            .lines()
            .find(|line| line.contains("cannot follow the Nodes"));
        let said = said.context("it says nothing")?;
        ensure!(said.contains("Connection refused"), "{said}");
        ensure!(
            said.matches("client error (Connect)").count() == 1,
            "{said}"
        );
        Ok(())
    })
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
