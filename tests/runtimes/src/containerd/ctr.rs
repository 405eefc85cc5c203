//! A container made by `ctr run --cni`. This client calls the plugin itself, and stays until the container has ended.

use std::{
    fs::File,
    net::IpAddr,
    process::{Child, Stdio},
};

use anyhow::{Context as _, Result, bail, ensure};
use underpass_tests::netns::Netns;

use super::{Containerd, NAMESPACE, SNAPSHOTTER, SOCKET};
use crate::{Running, image, wait_until};

/// How a shell reports SIGKILL, and so does `ctr`.
const KILLED: i32 = 128 + 9;

/// A container, and the client that has started it.
#[derive(Debug)]
pub struct Task {
    client: Child,
    name: String,
}

impl Task {
    /// Starts a container.
    pub fn start(containerd: &Containerd, name: &str, command: &[&str]) -> Result<Self> {
        let cage = containerd.cage();
        let log = File::create(cage.path(&log_of(name))).context("make the log of ctr")?;
        let cgroup = format!("{}/{name}", cage.cgroup());
        let mut client = cage.command("ctr");
        client
            .args(["--address", SOCKET, "--namespace", NAMESPACE])
            .args(["run", "--cni", "--rm", "--snapshotter", SNAPSHOTTER])
            .args(["--cgroup", &cgroup, image::NAME, name])
            .args(command)
            .stdin(Stdio::null())
            .stdout(log.try_clone()?)
            .stderr(log);
        let task = Self {
            client: client.spawn().context("start ctr")?,
            name: name.to_owned(),
        };
        wait_until("ctr has started a container", || task.pid(containerd))
            .with_context(|| task.log(containerd))?;
        Ok(task)
    }

    /// Looks inside. `ctr` tells no addresses, so those are read from the container's interface.
    pub fn running<'a>(&'a self, containerd: &'a Containerd) -> Result<Running<'a>> {
        let pid = self.pid(containerd)?;
        let netns = containerd.cage().netns_of(pid, &self.name)?;
        let addresses = addresses(&netns)?;
        let exec = |command: &[&str]| {
            let arguments = ["task", "exec", "--exec-id", "by-test", &self.name];
            containerd.ctr(&[&arguments, command].concat())
        };
        Ok(Running::new(netns, addresses, Box::new(exec)))
    }

    /// The first process of the container, as the cage numbers it.
    fn pid(&self, containerd: &Containerd) -> Result<u32> {
        let listed = containerd.ctr(&["task", "ls"])?;
        let columns = listed
            .lines()
            .map(|line| line.split_ascii_whitespace().collect::<Vec<_>>());
        for task in columns {
            if let [name, pid, "RUNNING"] = task[..]
                && name == self.name
            {
                return pid.parse().context("read the number of a process");
            }
        }
        bail!("ctr shows no container {} that runs", self.name)
    }

    /// Kills the container, and waits until the client has cleaned up.
    pub fn remove(mut self, containerd: &Containerd) -> Result<()> {
        containerd.ctr(&["task", "kill", "--signal", "SIGKILL", &self.name])?;
        let status = self.client.wait().context("wait for ctr")?;
        ensure!(
            status.code() == Some(KILLED),
            "ctr ended with {status}: {}",
            self.log(containerd)
        );
        Ok(())
    }

    fn log(&self, containerd: &Containerd) -> String {
        let log = containerd.cage().read(&log_of(&self.name));
        log.unwrap_or_default()
    }
}

fn log_of(name: &str) -> String {
    format!("/run/ctr-{name}.log")
}

/// The addresses by which others reach a namespace.
pub fn addresses(netns: &Netns) -> Result<Vec<IpAddr>> {
    let links = netns.ip_json(&["address", "show", "scope", "global"])?;
    let links = links.as_array().into_iter().flatten();
    let entries = links.filter_map(|link| link["addr_info"].as_array());
    // What the scope leaves out is listed as nothing.
    let texts = entries
        .flatten()
        .filter_map(|entry| entry["local"].as_str());
    let found: Result<Vec<IpAddr>, _> = texts.map(str::parse).collect();
    found.context("read the addresses of a container")
}
