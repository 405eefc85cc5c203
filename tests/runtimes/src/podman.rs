//! podman in a cage. It has no daemon: each command does its part, and `conmon` waits for the end of a container and runs the last.

use std::net::IpAddr;

use anyhow::{Context as _, Result, ensure};
use serde_json::{Value, json};

use crate::{Cage, Running, image, plugins};

/// What it reads, in the cage. It looks for them there and nowhere else, also when `conmon` starts it.
const CONFIG: &str = "/etc/containers/containers.conf";
const STORAGE: &str = "/etc/containers/storage.conf";
const POLICY: &str = "/etc/containers/policy.json";

/// The version of the specification that its network has: 4.x refuses a newer one.
const CNI_VERSION: &str = "1.0.0";

/// Set up, with the image and the tests' default network.
#[derive(Debug)]
pub struct Podman {
    cage: Cage,
}

impl Podman {
    /// Sets it up in a cage.
    pub fn start(cage: Cage) -> Result<Self> {
        cage.write(CONFIG, &config())?;
        cage.write(STORAGE, storage())?;
        let policy = json!({ "default": [{ "type": "insecureAcceptAnything" }] });
        cage.write(POLICY, &policy.to_string())?;
        let list = plugins::conflist(cage.node(), CNI_VERSION, &plugins::with_ports());
        let name = format!("{}/10-lab.conflist", plugins::NETWORKS);
        cage.write(&name, &list)?;
        image::write(&cage)?;
        let podman = Self { cage };
        podman.podman(&["load", "--quiet", "--input", image::ARCHIVE])?;
        Ok(podman)
    }

    /// Why it can't use this plugin; `None` if it can. From 5.0 on it may be built without CNI.
    pub fn refusal(&self) -> Result<Option<String>> {
        let said = self.podman(&["info", "--format", "{{.Host.NetworkBackend}}"])?;
        let backend = said.trim();
        Ok((backend != "cni")
            .then(|| format!("this podman has no networks by CNI, only by {backend}: 4.x has")))
    }

    /// The cage it is in.
    #[must_use]
    pub const fn cage(&self) -> &Cage {
        &self.cage
    }

    /// Kills all its containers; fails if anything is left of them.
    pub fn destroy(self) -> Result<()> {
        self.cage.destroy()
    }

    /// Runs it, which must succeed: its standard output.
    pub fn podman(&self, arguments: &[&str]) -> Result<String> {
        self.cage.expect("podman", arguments)
    }

    /// Starts a container with these options.
    pub fn run(&self, name: &str, options: &[&str], command: &[&str]) -> Result<()> {
        let cgroup = self.cage.cgroup();
        let usual = ["run", "--detach", "--pull", "never", "--network", "lab"];
        let named = ["--name", name, "--cgroup-parent", &cgroup];
        let arguments = [&usual, &named[..], options, &[image::NAME], command].concat();
        self.podman(&arguments).map(drop)
    }

    /// Looks inside a container that runs.
    pub fn running<'a>(&'a self, name: &'a str) -> Result<Running<'a>> {
        let container = self.inspect(name)?;
        let pid = container["State"]["Pid"].as_u64().unwrap_or_default();
        ensure!(pid != 0, "{name} does not run");
        let netns = self.cage.netns_of(u32::try_from(pid)?, name)?;
        let network = &container["NetworkSettings"]["Networks"]["lab"];
        let mut addresses: Vec<IpAddr> = Vec::new();
        for key in ["IPAddress", "GlobalIPv6Address"] {
            let address = network[key].as_str().unwrap_or_default();
            addresses.push(
                address
                    .parse()
                    .with_context(|| format!("{key} in {network}"))?,
            );
        }
        let exec = move |command: &[&str]| self.podman(&[&["exec", name], command].concat());
        Ok(Running::new(netns, addresses, Box::new(exec)))
    }

    /// What it knows about a container.
    pub fn inspect(&self, name: &str) -> Result<Value> {
        let said = self.podman(&["container", "inspect", name])?;
        let mut list: Value = serde_json::from_str(&said).context("read what podman says")?;
        Ok(list[0].take())
    }

    /// Kills and removes a container.
    pub fn remove(&self, name: &str) -> Result<()> {
        self.podman(&["rm", "--force", "--time", "0", name])
            .map(drop)
    }
}

fn config() -> String {
    format!(
        r#"[containers]
log_driver = "k8s-file"
apparmor_profile = "unconfined"
default_ulimits = ["nofile=1024:1024", "nproc=1024:1024"]
[network]
network_backend = "cni"
cni_plugin_dirs = ["{}"]
network_config_dir = "{}"
[engine]
cgroup_manager = "cgroupfs"
runtime = "runc"
events_logger = "file"
"#,
        plugins::FOLDER,
        plugins::NETWORKS,
    )
}

/// A driver that needs nothing of the file system below.
const fn storage() -> &'static str {
    r#"[storage]
driver = "vfs"
runroot = "/run/containers/storage"
graphroot = "/var/lib/containers/storage"
"#
}
