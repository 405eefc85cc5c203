//! containerd in a cage: its daemon, its CRI, and its own client `ctr`.

mod ctr;
mod pod;

use std::{
    fs::OpenOptions,
    process::{Child, Command, Stdio},
};

use anyhow::{Context as _, Result, ensure};
use serde_json::Value;

use crate::{Cage, Cri, image, plugins, wait_until};

pub use ctr::{Task, addresses};
pub use pod::{Pod, port};

/// What it is started with, in the cage.
const CONFIG: &str = "/run/containerd.toml";
/// Where it listens, in the cage.
const SOCKET: &str = "/run/containerd/containerd.sock";
/// What it says, in the cage.
const LOG: &str = "/run/containerd.log";
/// How it names itself to the kernel.
const PROCESS: &str = "containerd";
/// What it calls the part of its images and containers that the CRI sees.
const NAMESPACE: &str = "k8s.io";
/// A snapshotter that needs nothing of the file system below.
pub const SNAPSHOTTER: &str = "native";

/// A daemon that runs.
#[derive(Debug)]
pub struct Containerd {
    daemon: Child,
    cage: Cage,
}

/// How a daemon is ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum End {
    /// Politely.
    Term,
    /// As a crash does.
    Kill,
}

impl Containerd {
    /// Starts it, without any network, and gives it the image.
    pub fn start(cage: Cage) -> Result<Self> {
        cage.write(CONFIG, &config())?;
        let daemon = spawn(&cage)?;
        let containerd = Self { daemon, cage };
        containerd.is_up()?;
        image::write(&containerd.cage)?;
        containerd.ctr(&[
            "images",
            "import",
            "--snapshotter",
            SNAPSHOTTER,
            image::ARCHIVE,
        ])?;
        // The CRI hears of it by an event.
        let cri = containerd.cri();
        wait_until("the CRI knows the image", || {
            ensure!(cri.has_image(image::NAME)?, "it does not");
            Ok(())
        })?;
        Ok(containerd)
    }

    /// Ends the daemon and nothing else, and starts another.
    pub fn restart(&mut self, how: End) -> Result<()> {
        self.stop(how)?;
        self.resume()
    }

    /// Ends the daemon and nothing else.
    pub fn stop(&mut self, how: End) -> Result<()> {
        let signal = match how {
            End::Term => "TERM",
            End::Kill => "KILL",
        };
        let daemons = self.cage.processes(PROCESS)?;
        ensure!(daemons.len() == 1, "one daemon, not {daemons:?}");
        for pid in daemons {
            self.cage
                .expect("sh", &["-c", &format!("kill -{signal} {pid}")])?;
        }
        // Its parent, which is on our side, ends with it.
        self.daemon.wait().context("wait for containerd")?;
        Ok(())
    }

    /// Starts the daemon after [`Self::stop`].
    pub fn resume(&mut self) -> Result<()> {
        self.daemon = spawn(&self.cage)?;
        self.is_up()
    }

    fn is_up(&self) -> Result<()> {
        let cri = self.cri();
        wait_until("containerd answers", || cri.conditions().map(drop))
            .with_context(|| format!("its log:\n{}", self.log()))
    }

    /// What it has said.
    #[must_use]
    pub fn log(&self) -> String {
        self.cage.read(LOG).unwrap_or_default()
    }

    /// The cage it is in.
    #[must_use]
    pub const fn cage(&self) -> &Cage {
        &self.cage
    }

    /// Kills it and all its containers; fails if anything is left of them.
    pub fn destroy(self) -> Result<()> {
        self.cage.destroy()
    }

    /// Its CRI.
    #[must_use]
    pub fn cri(&self) -> Cri {
        Cri::at(self.cage.path(SOCKET))
    }

    /// Gives it the tests' default network, with these keys of the plugin besides, and waits until it says that it is ready.
    pub fn join(&self, more: &Value) -> Result<()> {
        self.add_network(more)?;
        let cri = self.cri();
        wait_until("containerd has a network", || {
            let network = cri.network()?;
            ensure!(network.status, "{}", network.message);
            Ok(())
        })
        .with_context(|| format!("its log:\n{}", self.log()))
    }

    /// Writes the tests' default network to where it looks for one.
    pub fn add_network(&self, more: &Value) -> Result<()> {
        let list = plugins::conflist(self.cage.node(), cni_version()?, more);
        let name = format!("{}/10-lab.conflist", plugins::NETWORKS);
        self.cage.write(&name, &list)
    }

    /// Runs `ctr`, which must succeed: its standard output.
    pub fn ctr(&self, arguments: &[&str]) -> Result<String> {
        let general = ["--address", SOCKET, "--namespace", NAMESPACE];
        self.cage.expect("ctr", &[&general, arguments].concat())
    }
}

fn spawn(cage: &Cage) -> Result<Child> {
    let log = OpenOptions::new()
        .create(true)
        .append(true)
        .open(cage.path(LOG))
        .context("make the log of containerd")?;
    let mut command = cage.command("containerd");
    command
        .args(["--config", CONFIG])
        .stdin(Stdio::null())
        .stdout(log.try_clone()?)
        .stderr(log);
    command.spawn().context("start containerd")
}

/// It must not need what a container or a virtual machine may not have: a particular file system below, or the right to protect its
/// processes from the kernel's choice of whom to kill.
fn config() -> String {
    format!(
        r#"version = 2
[grpc]
address = "{SOCKET}"
[plugins."io.containerd.grpc.v1.cri"]
sandbox_image = "{image}"
restrict_oom_score_adj = true
disable_apparmor = true
[plugins."io.containerd.grpc.v1.cri".containerd]
snapshotter = "{SNAPSHOTTER}"
[plugins."io.containerd.grpc.v1.cri".cni]
bin_dir = "{bin}"
conf_dir = "{networks}"
"#,
        image = image::NAME,
        bin = plugins::FOLDER,
        networks = plugins::NETWORKS,
    )
}

/// The newest version of the specification that this containerd speaks: with 2.0 came the library that has 1.1.0.
pub fn cni_version() -> Result<&'static str> {
    Ok(if major(&version()?)? >= 2 {
        "1.1.0"
    } else {
        "1.0.0"
    })
}

/// What it says that it is, as `1.6.20`.
pub fn version() -> Result<String> {
    let output = Command::new(PROCESS)
        .arg("--version")
        .output()
        .context("run containerd --version")?;
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    let word = said.split_ascii_whitespace().nth(2);
    let version = word.with_context(|| format!("containerd calls itself {said:?}"))?;
    Ok(version.trim_start_matches('v').to_owned())
}

fn major(version: &str) -> Result<u32> {
    let digits = version.split('.').next().unwrap_or_default();
    digits
        .parse()
        .with_context(|| format!("containerd {version} is no version"))
}
