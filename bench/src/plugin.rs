//! Plugins under measurement: ours and the reference ones, called the same way and timed as whole processes.

use std::{
    fs,
    io::Write as _,
    net::IpAddr,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    sync::OnceLock,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, ensure};
use serde::Serialize;
use serde_json::{Value, json};
use underpass_tests::{Family, Node, netns::Netns, node};

/// Where Debian installs the reference plugins.
const REFERENCE: &str = "/usr/lib/cni";

/// The container's interface.
const IFNAME: &str = "eth0";

/// The executable of another build.
static BEFORE: OnceLock<PathBuf> = OnceLock::new();

/// From now on there is another build to compare with. Its executable must have the plugin's name.
pub(crate) fn compare_with(executable: &Path) -> Result<()> {
    let executable = fs::canonicalize(executable)
        .with_context(|| format!("find the other build {}", executable.display()))?;
    // Nobody has set it before: this is called once.
    let _ = BEFORE.set(executable);
    Ok(())
}

/// The other build, if there is one.
pub(crate) fn before() -> Option<&'static Path> {
    BEFORE.get().map(PathBuf::as_path)
}

/// A plugin with the keys that matter for speed.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Plugin {
    /// `bridge`, without masquerade.
    Bridge,
    /// `bridge` with `ipMasq`, which is iptables.
    BridgeMasquerade,
    /// `ptp`, without masquerade.
    Ptp,
    /// `ptp` with `ipMasq`.
    PtpMasquerade,
    /// The same, and an nftables flowtable for established flows.
    PtpFlowtable,
    /// Ours with `ipMasq`, flows learned.
    Learned,
    /// Ours without masquerade, flows learned.
    Routed,
    /// [`Self::Routed`], but the stack forwards everything.
    RoutedOff,
    /// Ours with `ipMasq`, the stack forwards everything.
    Off,
    /// [`Self::Learned`] by the executable of another build, see [`compare_with`].
    LearnedBefore,
    /// [`Self::Off`] by that.
    OffBefore,
    /// Ours with `ipMasq`, flows learned, XDP on the uplink.
    Xdp,
}

impl Plugin {
    /// Its name in tables.
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Bridge => "bridge",
            Self::BridgeMasquerade => "bridge ipMasq",
            Self::Ptp => "ptp",
            Self::PtpMasquerade => "ptp ipMasq",
            Self::PtpFlowtable => "ptp flowtable",
            Self::Learned | Self::Routed => "learned",
            Self::Off | Self::RoutedOff => "off",
            Self::LearnedBefore => "learned before",
            Self::OffBefore => "off before",
            Self::Xdp => "xdp",
        }
    }

    /// Whether it is this project's.
    pub(crate) const fn is_ours(self) -> bool {
        matches!(
            self,
            Self::Learned
                | Self::Routed
                | Self::RoutedOff
                | Self::Off
                | Self::LearnedBefore
                | Self::OffBefore
                | Self::Xdp
        )
    }

    fn executable(self) -> PathBuf {
        match self {
            Self::Bridge | Self::BridgeMasquerade => Path::new(REFERENCE).join("bridge"),
            Self::Ptp | Self::PtpMasquerade | Self::PtpFlowtable => {
                Path::new(REFERENCE).join("ptp")
            }
            Self::Learned | Self::Routed | Self::RoutedOff | Self::Off | Self::Xdp => {
                node::plugin().to_owned()
            }
            Self::LearnedBefore | Self::OffBefore => {
                before().unwrap_or_else(node::plugin).to_owned()
            }
        }
    }

    /// A network of it on a node, with ranges large enough for a thousand containers.
    pub(crate) fn network(self, node: &Node, families: &[Family]) -> Network {
        let ipam = json!({
            "type": "host-local",
            "dataDir": node.data_dir(),
            "ranges": families.iter().map(|&family| json!([{ "subnet": range(family) }])).collect::<Vec<_>>(),
            "routes": families.iter().map(|family| json!({ "dst": family.everywhere() })).collect::<Vec<_>>(),
        });
        let mut conf = json!({ "cniVersion": "1.0.0", "name": "bench", "ipam": ipam });
        let keys = match self {
            Self::Bridge => json!({ "type": "bridge", "bridge": "cni0", "isGateway": true }),
            Self::BridgeMasquerade => {
                json!({ "type": "bridge", "bridge": "cni0", "isGateway": true, "ipMasq": true })
            }
            Self::Ptp => json!({ "type": "ptp" }),
            Self::PtpMasquerade | Self::PtpFlowtable => json!({ "type": "ptp", "ipMasq": true }),
            Self::Learned | Self::LearnedBefore => own("learned", node),
            Self::Routed | Self::RoutedOff => {
                let bypass = if self == Self::Routed {
                    "learned"
                } else {
                    "off"
                };
                let mut keys = own(bypass, node);
                keys["ipMasq"] = json!(false);
                keys
            }
            Self::Off | Self::OffBefore => own("off", node),
            Self::Xdp => {
                let mut keys = own("learned", node);
                keys["xdp"] = json!("native");
                keys
            }
        };
        for (key, value) in keys.as_object().into_iter().flatten() {
            conf[key] = value.clone();
        }
        Network {
            ports: if self.is_ours() {
                Ports::Own
            } else {
                Ports::Portmap
            },
            chain: vec![(self.executable(), conf)],
        }
    }
}

fn own(bypass: &str, node: &Node) -> Value {
    json!({ "type": "underpass", "cniVersion": "1.1.0", "ipMasq": true, "bypass": bypass, "bpfRoot": node.bpf_root() })
}

const fn range(family: Family) -> &'static str {
    match family {
        Family::V4 => "10.88.0.0/16",
        Family::V6 => "fd00:88::/64",
    }
}

/// A plugin with its network configuration, and those chained to it.
#[derive(Clone, Debug)]
pub(crate) struct Network {
    ports: Ports,
    chain: Vec<(PathBuf, Value)>,
}

/// Who does host ports.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Ports {
    /// The plugin itself.
    Own,
    /// The reference plugin `portmap`, chained.
    Portmap,
}

/// A host port.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Mapping {
    pub(crate) protocol: &'static str,
    pub(crate) host: u16,
    pub(crate) container: u16,
}

/// What a call gave, and how long the process lived: from the moment before it was started to the moment after it was reaped.
pub(crate) struct Done {
    pub(crate) elapsed: Duration,
    pub(crate) stdout: Value,
}

/// A call that is under way.
pub(crate) struct Running {
    child: Child,
    what: String,
}

impl Network {
    /// The same with a result to check or to delete.
    pub(crate) fn after(&self, result: &Value) -> Self {
        let mut after = self.clone();
        for (_, conf) in &mut after.chain {
            conf["prevResult"] = result.clone();
        }
        after
    }

    /// The same for a container with host ports.
    pub(crate) fn with_ports(&self, mappings: &[Mapping]) -> Self {
        let mut with = self.clone();
        let ports: Vec<Value> = mappings
            .iter()
            .map(|mapping| {
                json!({
                    "protocol": mapping.protocol,
                    "hostPort": mapping.host,
                    "containerPort": mapping.container,
                })
            })
            .collect();
        if with.ports == Ports::Portmap {
            let conf = json!({
                "cniVersion": "1.0.0",
                "name": "bench",
                "type": "portmap",
                "capabilities": { "portMappings": true },
            });
            with.chain
                .push((Path::new(REFERENCE).join("portmap"), conf));
        }
        if let Some((_, conf)) = with.chain.last_mut() {
            conf["runtimeConfig"] = json!({ "portMappings": ports });
        }
        with
    }

    /// ADDs a container on a node.
    pub(crate) fn add(&self, node: &Node, container: &Netns) -> Result<Done> {
        self.call(node, "ADD", Some(container))
    }

    /// DELs a container from a node.
    pub(crate) fn del(&self, node: &Node, container: &Netns) -> Result<Done> {
        self.call(node, "DEL", Some(container))
    }

    /// Makes a call in a node's namespaces: to one plugin of the chain after the other, to the last one first where it is a DEL.
    pub(crate) fn call(&self, node: &Node, verb: &str, container: Option<&Netns>) -> Result<Done> {
        let mut chain: Vec<(&Path, Value)> = self
            .chain
            .iter()
            .map(|(executable, conf)| (executable.as_path(), conf.clone()))
            .collect();
        if verb == "DEL" {
            chain.reverse();
        }
        node.netns().run(|| {
            let mut done = Done {
                elapsed: Duration::ZERO,
                stdout: Value::Null,
            };
            for (executable, mut conf) in chain {
                if verb == "ADD" && !done.stdout.is_null() {
                    conf["prevResult"] = done.stdout;
                }
                let begin = Instant::now();
                let output = start_one(executable, &conf, verb, container)?.finish()?;
                done.elapsed += begin.elapsed();
                done.stdout = parse(&output)?;
            }
            Ok(done)
        })
    }

    /// Starts a call of the first plugin in the namespaces of the calling thread.
    pub(crate) fn start(&self, verb: &str, container: Option<&Netns>) -> Result<Running> {
        let (executable, conf) = self.chain.first().context("a chain without a plugin")?;
        start_one(executable, conf, verb, container)
    }
}

fn start_one(
    executable: &Path,
    conf: &Value,
    verb: &str,
    container: Option<&Netns>,
) -> Result<Running> {
    let mut command = Command::new(executable);
    command
        .env_clear()
        .env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin")
        .env("CNI_COMMAND", verb)
        .env("CNI_PATH", REFERENCE)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::null());
    if let Some(container) = container {
        command
            .env("CNI_CONTAINERID", container.name())
            .env("CNI_NETNS", container.path())
            .env("CNI_IFNAME", IFNAME);
    }
    let what = format!("{verb} of {}", executable.display());
    let mut child = command.spawn().with_context(|| format!("start {what}"))?;
    if let Some(mut pipe) = child.stdin.take() {
        // A verb that does not read its input closes the pipe; its exit status says whether that was right.
        let _ = pipe.write_all(conf.to_string().as_bytes());
    }
    Ok(Running { child, what })
}

impl Running {
    /// Waits for success: its standard output.
    pub(crate) fn finish(self) -> Result<Vec<u8>> {
        let output = self
            .child
            .wait_with_output()
            .with_context(|| format!("wait for {}", self.what))?;
        ensure!(
            output.status.success(),
            "{} failed ({}): {}",
            self.what,
            output.status,
            String::from_utf8_lossy(&output.stdout).trim()
        );
        Ok(output.stdout)
    }
}

fn parse(stdout: &[u8]) -> Result<Value> {
    if stdout.trim_ascii().is_empty() {
        return Ok(Value::Null);
    }
    serde_json::from_slice(stdout).context("read the result of a plugin")
}

/// The address of a family in the result of an ADD.
pub(crate) fn address(result: &Value, family: Family) -> Result<IpAddr> {
    let ips = result["ips"].as_array();
    ips.into_iter()
        .flatten()
        .filter_map(|ip| ip["address"].as_str()?.split('/').next()?.parse().ok())
        .find(|&ip| Family::of(ip) == family)
        .with_context(|| format!("a result without an address of {family:?}: {result}"))
}
