//! The bpffs of a node is wiped under its pods: an agent that goes on takes nothing from them, and says what it waits for.

use std::{fs, net::SocketAddr};

use rstest::rstest;
use underpass_tests::prelude::*;

use super::{fixture::Cluster, member::Member};

/// Where the world serves.
const REMOTE: u16 = 443;

/// A node with an agent, a pod of which nothing is known any more, and what to reach in the world.
struct Scene {
    cluster: Cluster,
    pod: Pod,
    remote: SocketAddr,
    _server: tcp::Server,
}

impl Scene {
    fn set(family: Family) -> Result<Self> {
        let cluster = Cluster::new(&[0])?;
        let member = &cluster.members[0];
        let pod = member.pod("before")?;
        let remote = family.remote_at(REMOTE);
        let server = tcp::Server::start(&cluster.fabric, remote)?;
        let scene = Self {
            pod,
            remote,
            _server: server,
            cluster,
        };
        scene.masquerades(family)?;
        let member = scene.member();
        // What it had begun before would load.
        member.rests()?;
        member
            .node
            .netns()
            .run(|| fs::remove_dir_all(member.node.bpf_root()))
            .context("wipe the bpffs")?;
        Ok(scene)
    }

    fn member(&self) -> &Member {
        &self.cluster.members[0]
    }

    /// The pod of before is the node to the world.
    fn masquerades(&self, family: Family) -> Result<()> {
        let seen = tcp::visit(self.pod.netns(), self.remote)?;
        ensure!(seen == self.member().address(family), "seen {seen}");
        Ok(())
    }

    /// Deletes the pod of before, and waits until `/readyz` has nothing to add.
    fn recovers(self) -> Result<()> {
        self.pod.del()?;
        let member = &self.cluster.members[0];
        eventually("all is well", || {
            let said = member.get("/readyz")?;
            ensure!(said.ends_with("\r\n\r\nok\n"), "{said}");
            Ok(())
        })?;
        member.pod("after")?.del()
    }

    /// Waits until `/readyz` is 200, and has these words.
    fn says(&self, words: &[&str]) -> Result<()> {
        eventually(&format!("200 with {words:?}"), || {
            let said = self.member().get("/readyz")?;
            ensure!(
                said.starts_with("HTTP/1.1 200 ") && words.iter().all(|word| said.contains(word)),
                "{said}"
            );
            Ok(())
        })
    }
}

#[rstest]
fn the_agent_waits_for_the_pods_of_before(#[values(V4, V6)] family: Family) -> Result<()> {
    needs_root!();
    let scene = Scene::set(family)?;
    let veth = scene.pod.host_veth().to_owned();
    scene.says(&["ok, but", "can't be looked after", &veth])?;
    scene.member().compares()?;
    scene.masquerades(family)?;
    scene.recovers()
}

/// An ADD loads, whatever the agent waits for.
#[rstest]
fn pods_of_before_are_named_while_they_are_there(#[values(V4, V6)] family: Family) -> Result<()> {
    needs_root!();
    let scene = Scene::set(family)?;
    let new = scene.member().pod("new")?;
    scene.says(&["ok, but", "no masquerade", scene.pod.host_veth()])?;
    let seen = tcp::visit(new.netns(), scene.remote)?;
    ensure!(seen == scene.member().address(family), "seen {seen}");
    scene.recovers()?;
    new.del()
}
