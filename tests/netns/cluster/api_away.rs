//! Where the API server is.

use std::{fs, process::Command};

use underpass_tests::prelude::*;

use super::fixture::Cluster;

/// A kubeconfig that names an address where nobody listens.
const AWAY: &str = "apiVersion: v1\nkind: Config\nclusters:\n- name: c\n  cluster:\n    server: http://127.0.0.1:1\n\
                    contexts:\n- name: c\n  context:\n    cluster: c\n    user: u\ncurrent-context: c\nusers:\n- name: u\n  user: {}\n";
/// How long an agent may run that should end at once, in seconds.
const LIMIT: &str = "20";

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
