//! The CRI, by which a kubelet has its pods made.

mod grpc;
pub mod message;

use std::{net::IpAddr, path::PathBuf};

use anyhow::{Context as _, Result, ensure};
use prost::Message;
use serde_json::Value;

use message::{
    ContainerConfig, ContainerId, ContainerMetadata, CreateContainerRequest, ExecSyncRequest,
    ExecSyncResponse, ImageSpec, ImageStatusRequest, ImageStatusResponse, LinuxPodSandboxConfig,
    Nothing, PodSandboxId, PodSandboxMetadata, PodSandboxStatusRequest, PodSandboxStatusResponse,
    RunPodSandboxRequest, StatusResponse,
};
pub use message::{PodSandboxConfig, PortMapping, Protocol, RuntimeCondition};

/// How long a command in a container may take, in seconds.
const COMMAND_SECONDS: i64 = 15;

/// A runtime's socket.
#[derive(Clone, Debug)]
pub struct Cri {
    socket: PathBuf,
}

/// How a pod is.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct PodStatus {
    /// Its addresses, in the order of the network's result.
    pub addresses: Vec<IpAddr>,
    /// Its first process, as the runtime numbers it.
    pub pid: u32,
}

impl Cri {
    /// Calls go to this socket.
    #[must_use]
    pub const fn at(socket: PathBuf) -> Self {
        Self { socket }
    }

    fn runtime<A: Message + Default>(&self, method: &str, request: &impl Message) -> Result<A> {
        let method = format!("/runtime.v1.RuntimeService/{method}");
        grpc::call(&self.socket, &method, request).with_context(|| method)
    }

    /// What the runtime says about itself and its network.
    pub fn conditions(&self) -> Result<Vec<RuntimeCondition>> {
        let answer: StatusResponse = self.runtime("Status", &Nothing {})?;
        Ok(answer.status.context("a status without status")?.conditions)
    }

    /// Whether the runtime has a network for pods, and if not, why.
    pub fn network(&self) -> Result<RuntimeCondition> {
        let conditions = self.conditions()?;
        let mut of_network = conditions
            .into_iter()
            .filter(|it| it.r#type == "NetworkReady");
        of_network.next().context("nothing is said of the network")
    }

    /// Whether an image is there.
    pub fn has_image(&self, name: &str) -> Result<bool> {
        let method = "/runtime.v1.ImageService/ImageStatus";
        let request = ImageStatusRequest {
            image: Some(image(name)),
        };
        let answer: ImageStatusResponse =
            grpc::call(&self.socket, method, &request).context(method)?;
        Ok(answer.image.is_some())
    }

    /// Starts a pod: its number.
    pub fn run_pod(&self, config: &PodSandboxConfig) -> Result<String> {
        let config = Some(config.clone());
        let answer: PodSandboxId =
            self.runtime("RunPodSandbox", &RunPodSandboxRequest { config })?;
        Ok(answer.pod_sandbox_id)
    }

    /// Kills what is in a pod, and takes its network away.
    pub fn stop_pod(&self, pod: &str) -> Result<()> {
        self.runtime("StopPodSandbox", &pod_id(pod))
            .map(|Nothing {}| ())
    }

    /// Removes a pod and its containers.
    pub fn remove_pod(&self, pod: &str) -> Result<()> {
        self.runtime("RemovePodSandbox", &pod_id(pod))
            .map(|Nothing {}| ())
    }

    /// How a pod is.
    pub fn pod(&self, pod: &str) -> Result<PodStatus> {
        let request = PodSandboxStatusRequest {
            pod_sandbox_id: pod.to_owned(),
            verbose: true,
        };
        let answer: PodSandboxStatusResponse = self.runtime("PodSandboxStatus", &request)?;
        let status = answer.status.context("a pod without status")?;
        ensure!(status.state == 0, "pod {pod} is not ready");
        let network = status.network.context("a pod without network")?;
        let others = network.additional_ips.iter().map(|other| &other.ip);
        let addresses: Result<_, _> = [&network.ip]
            .into_iter()
            .chain(others)
            .map(|ip| ip.parse())
            .collect();
        let info: Value = serde_json::from_str(answer.info.get("info").context("no details")?)?;
        let pid = info["pid"].as_u64().context("a pod without process")?;
        Ok(PodStatus {
            addresses: addresses.context("read the addresses of a pod")?,
            pid: u32::try_from(pid)?,
        })
    }

    /// Makes and starts a container in a pod that was started with this config: its number.
    pub fn run_container(
        &self,
        pod: &str,
        sandbox: &PodSandboxConfig,
        image_name: &str,
        command: &[&str],
    ) -> Result<String> {
        let name = "only".to_owned();
        let config = ContainerConfig {
            metadata: Some(ContainerMetadata { name }),
            image: Some(image(image_name)),
            command: owned(command),
        };
        let request = CreateContainerRequest {
            pod_sandbox_id: pod.to_owned(),
            config: Some(config),
            sandbox_config: Some(sandbox.clone()),
        };
        let made: ContainerId = self.runtime("CreateContainer", &request)?;
        let Nothing {} = self.runtime("StartContainer", &made)?;
        Ok(made.container_id)
    }

    /// Runs a command in a container, which must succeed: its standard output.
    pub fn exec(&self, container: &str, command: &[&str]) -> Result<String> {
        let request = ExecSyncRequest {
            container_id: container.to_owned(),
            cmd: owned(command),
            timeout: COMMAND_SECONDS,
        };
        let said: ExecSyncResponse = self.runtime("ExecSync", &request)?;
        ensure!(
            said.exit_code == 0,
            "{command:?} failed ({}): {}",
            said.exit_code,
            String::from_utf8_lossy(&said.stderr)
        );
        String::from_utf8(said.stdout).context("a command printed no text")
    }
}

/// A pod to be, whose control groups are made in that of a cage.
#[must_use]
pub fn pod_config(name: &str, cgroup: String, port_mappings: Vec<PortMapping>) -> PodSandboxConfig {
    PodSandboxConfig {
        metadata: Some(PodSandboxMetadata {
            name: name.to_owned(),
            uid: format!("uid-{name}"),
            namespace: "tests".to_owned(),
        }),
        port_mappings,
        linux: Some(LinuxPodSandboxConfig {
            cgroup_parent: cgroup,
        }),
    }
}

fn pod_id(pod: &str) -> PodSandboxId {
    PodSandboxId {
        pod_sandbox_id: pod.to_owned(),
    }
}

fn image(name: &str) -> ImageSpec {
    ImageSpec {
        image: name.to_owned(),
    }
}

fn owned(command: &[&str]) -> Vec<String> {
    command.iter().map(|&word| word.to_owned()).collect()
}
