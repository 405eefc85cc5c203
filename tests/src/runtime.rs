//! A container runtime's side of the protocol: environment and JSON in, JSON out.

use std::{
    collections::BTreeMap,
    env, fmt,
    io::Write as _,
    path::{Path, PathBuf},
    process::{Command, ExitStatus, Output, Stdio},
};

use anyhow::{Context as _, Result, bail, ensure};
use serde_json::{Value, json};

use crate::{
    Family, Node,
    node::{cni_path, plugin},
    privilege::{Capability, without},
};

/// The variable that `cargo xtask test vm --device` sets.
const DEVICE: &str = "UNDERPASS_TEST_DEVICE";

/// The variable for who wants to know whether a test fails because of the bypass: `off` is the control.
const BYPASS: &str = "UNDERPASS_TEST_BYPASS";

/// A network configuration as a plugin gets it.
#[derive(Clone, Debug)]
pub struct Conf(Value);

impl Conf {
    /// The default network of a node: both families, masqueraded, built-in IPAM. Its devices and its bypass are what the
    /// environment asks for ([`DEVICE`], [`BYPASS`]), else what the plugin makes by default.
    #[must_use]
    pub fn new(node: &Node) -> Self {
        let conf = Self(json!({
            "cniVersion": "1.1.0",
            "name": "lab",
            "type": "underpass",
            "ipMasq": true,
            "bpfRoot": node.bpf_root(),
            "ipam": {
                "type": "host-local",
                "dataDir": node.data_dir(),
                "ranges": Family::BOTH.map(|family| json!([{ "subnet": family.pods() }])),
                "routes": Family::BOTH.map(|family| json!({ "dst": family.everywhere() })),
            },
        }));
        [(DEVICE, "device"), (BYPASS, "bypass")]
            .into_iter()
            .filter_map(|(variable, key)| Some((key, env::var(variable).ok()?)))
            .fold(conf, |conf, (key, value)| conf.with(key, value))
    }

    /// A network of somebody else, or one that is written as a whole.
    #[must_use]
    pub const fn of(json: Value) -> Self {
        Self(json)
    }

    /// The same network with a key set to another value.
    #[must_use]
    pub fn with(mut self, key: &str, value: impl Into<Value>) -> Self {
        self.0[key] = value.into();
        self
    }

    /// The same network with a port of the node, by TCP and UDP and at every address of it, that leads to one of the container.
    #[must_use]
    pub fn with_host_port(self, host: u16, inside: u16) -> Self {
        self.with_host_ports(&[(host, inside)])
    }

    /// The same network with several such ports, each with the one of the container that it leads to.
    #[must_use]
    pub fn with_host_ports(self, ports: &[(u16, u16)]) -> Self {
        let mapping = |host: u16, inside: u16, protocol: &str| json!({ "hostPort": host, "containerPort": inside, "protocol": protocol });
        let mappings: Vec<Value> = ports
            .iter()
            .flat_map(|&(host, inside)| {
                ["tcp", "udp"].map(|protocol| mapping(host, inside, protocol))
            })
            .collect();
        self.with("runtimeConfig", json!({ "portMappings": mappings }))
    }

    /// The same network with a key of `ipam` set to another value.
    #[must_use]
    pub fn with_ipam(mut self, key: &str, value: impl Into<Value>) -> Self {
        self.0["ipam"][key] = value.into();
        self
    }

    /// The network's name.
    #[must_use]
    pub fn name(&self) -> &str {
        self.0["name"].as_str().unwrap_or_default()
    }

    /// As JSON.
    #[must_use]
    pub fn json(&self) -> &Value {
        &self.0
    }
}

/// One call of the plugin.
#[derive(Clone, Debug)]
pub struct Call {
    program: PathBuf,
    env: BTreeMap<String, String>,
    stdin: Vec<u8>,
}

impl Call {
    /// A call of a verb, without attachment and input.
    #[must_use]
    pub fn new(verb: &str) -> Self {
        Self {
            program: plugin().to_owned(),
            env: BTreeMap::from([
                ("CNI_COMMAND".to_owned(), verb.to_owned()),
                ("CNI_PATH".to_owned(), cni_path()),
            ]),
            stdin: Vec::new(),
        }
    }

    /// Has another executable make it.
    #[must_use]
    pub fn by(mut self, program: &Path) -> Self {
        program.clone_into(&mut self.program);
        self
    }

    /// Names the attachment; `netns` is a path.
    #[must_use]
    pub fn attachment(self, container: &str, netns: &str, ifname: &str) -> Self {
        self.env("CNI_CONTAINERID", container)
            .env("CNI_NETNS", netns)
            .env("CNI_IFNAME", ifname)
    }

    /// Sets a variable.
    #[must_use]
    pub fn env(mut self, name: &str, value: &str) -> Self {
        self.env.insert(name.to_owned(), value.to_owned());
        self
    }

    /// Leaves a variable out.
    #[must_use]
    pub fn without(mut self, name: &str) -> Self {
        self.env.remove(name);
        self
    }

    /// Sends a configuration.
    #[must_use]
    pub fn conf(self, conf: &Conf) -> Self {
        let text = conf.json().to_string();
        self.stdin(text.as_bytes())
    }

    /// Sends any bytes.
    #[must_use]
    pub fn stdin(mut self, bytes: &[u8]) -> Self {
        self.stdin = bytes.to_vec();
        self
    }

    /// The command that this call is, ready to be started inside a node.
    #[must_use]
    pub fn command(&self) -> Command {
        let mut command = Command::new(&self.program);
        command
            .env_clear()
            .env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin")
            .envs(&self.env);
        command
    }

    /// What it sends on standard input.
    #[must_use]
    pub fn input(&self) -> &[u8] {
        &self.stdin
    }

    /// Makes the call on a node.
    pub fn run(&self, node: &Node) -> Result<Reply> {
        self.reply(node.netns().output(&mut self.command(), &self.stdin)?)
    }

    /// Makes the call on a node, without these capabilities.
    pub fn run_without(&self, node: &Node, capabilities: &[Capability]) -> Result<Reply> {
        let mut command = self.command();
        let command = without(&mut command, capabilities);
        self.reply(node.netns().output(command, &self.stdin)?)
    }

    /// Makes the call where this process is, for calls that do nothing to the system.
    pub fn run_here(&self) -> Result<Reply> {
        let mut child = self
            .command()
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .context("run the plugin")?;
        // A verb that does not read its input closes the pipe.
        let _ = child
            .stdin
            .take()
            .map(|mut pipe| pipe.write_all(&self.stdin));
        self.reply(child.wait_with_output().context("wait for the plugin")?)
    }

    pub(crate) fn reply(&self, output: Output) -> Result<Reply> {
        Ok(Reply {
            verb: self.env.get("CNI_COMMAND").cloned().unwrap_or_default(),
            status: output.status,
            stdout: String::from_utf8(output.stdout).context("the plugin printed no UTF-8")?,
            stderr: String::from_utf8_lossy(&output.stderr).into_owned(),
        })
    }
}

/// What the plugin answered.
#[derive(Clone, Debug)]
pub struct Reply {
    verb: String,
    /// How it exited.
    pub status: ExitStatus,
    /// Its standard output: at most one JSON document.
    pub stdout: String,
    /// Its log.
    pub stderr: String,
}

/// An error as the protocol has it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct CniError {
    /// The code.
    pub code: u64,
    /// The sentence.
    pub msg: String,
    /// More of it, or nothing.
    pub details: String,
}

impl fmt::Display for CniError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "code {}: {}", self.code, self.msg)?;
        if !self.details.is_empty() {
            write!(f, "; {}", self.details)?;
        }
        Ok(())
    }
}

impl Reply {
    /// The one document on standard output.
    pub fn json(&self) -> Result<Value> {
        serde_json::from_str(&self.stdout).with_context(|| {
            format!(
                "{} must answer with exactly one JSON document, but it printed {:?}; its log: {}",
                self.verb, self.stdout, self.stderr
            )
        })
    }

    /// The result of a verb that has one.
    pub fn result(&self) -> Result<Value> {
        self.succeeded()?;
        self.json()
    }

    /// Success of a verb that has no result.
    pub fn silence(&self) -> Result<()> {
        self.succeeded()?;
        ensure!(
            self.stdout.trim().is_empty(),
            "{} has no result, but it printed {:?}",
            self.verb,
            self.stdout
        );
        Ok(())
    }

    /// The error of a call that must fail.
    pub fn error(&self) -> Result<CniError> {
        ensure!(
            !self.status.success(),
            "{} succeeded where it must fail: {}",
            self.verb,
            self.stdout
        );
        self.parse_error()
    }

    /// Success, whatever it printed.
    pub fn succeeded(&self) -> Result<()> {
        if self.status.success() {
            return Ok(());
        }
        let error = self.parse_error()?;
        bail!("{} failed, {error}; its log: {}", self.verb, self.stderr)
    }

    fn parse_error(&self) -> Result<CniError> {
        let json = self.json()?;
        let text = |key: &str| json[key].as_str().unwrap_or_default().to_owned();
        Ok(CniError {
            code: json["code"]
                .as_u64()
                .with_context(|| format!("an error without a code: {json}"))?,
            msg: text("msg"),
            details: text("details"),
        })
    }
}
