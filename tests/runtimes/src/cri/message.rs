//! Messages of the CRI, `runtime.v1`: of each the fields that these tests write or read. Readers of protobuf pass over those that they
//! do not know, and a field that is absent has its default.

use std::collections::HashMap;

use prost::Message;

/// What tells two pods of one name apart.
#[derive(Clone, PartialEq, Message)]
pub struct PodSandboxMetadata {
    /// The pod's name.
    #[prost(string, tag = "1")]
    pub name: String,
    /// Unique for all time.
    #[prost(string, tag = "2")]
    pub uid: String,
    /// Of Kubernetes, not of the kernel.
    #[prost(string, tag = "3")]
    pub namespace: String,
}

/// A protocol of a host port.
#[derive(Clone, Copy, PartialEq, Eq, Debug, prost::Enumeration)]
#[repr(i32)]
pub enum Protocol {
    /// TCP.
    Tcp = 0,
    /// UDP.
    Udp = 1,
}

/// A host port.
#[derive(Clone, PartialEq, Message)]
pub struct PortMapping {
    /// TCP or UDP.
    #[prost(enumeration = "Protocol", tag = "1")]
    pub protocol: i32,
    /// The port inside.
    #[prost(int32, tag = "2")]
    pub container_port: i32,
    /// The port of the node.
    #[prost(int32, tag = "3")]
    pub host_port: i32,
}

/// What Linux needs besides.
#[derive(Clone, PartialEq, Message)]
pub struct LinuxPodSandboxConfig {
    /// The control group that those of the pod are made in.
    #[prost(string, tag = "1")]
    pub cgroup_parent: String,
}

/// A pod to be.
#[derive(Clone, PartialEq, Message)]
pub struct PodSandboxConfig {
    /// Its name.
    #[prost(message, optional, tag = "1")]
    pub metadata: Option<PodSandboxMetadata>,
    /// Its host ports.
    #[prost(message, repeated, tag = "5")]
    pub port_mappings: Vec<PortMapping>,
    /// Its control group.
    #[prost(message, optional, tag = "8")]
    pub linux: Option<LinuxPodSandboxConfig>,
}

/// Starts a pod.
#[derive(Clone, PartialEq, Message)]
pub struct RunPodSandboxRequest {
    /// The pod to be.
    #[prost(message, optional, tag = "1")]
    pub config: Option<PodSandboxConfig>,
}

/// Names a pod; also what starting one answers.
#[derive(Clone, PartialEq, Message)]
pub struct PodSandboxId {
    /// Chosen by the runtime.
    #[prost(string, tag = "1")]
    pub pod_sandbox_id: String,
}

/// Asks about a pod.
#[derive(Clone, PartialEq, Message)]
pub struct PodSandboxStatusRequest {
    /// Which.
    #[prost(string, tag = "1")]
    pub pod_sandbox_id: String,
    /// Whether the runtime's own words are wanted.
    #[prost(bool, tag = "2")]
    pub verbose: bool,
}

/// An answer about a pod.
#[derive(Clone, PartialEq, Message)]
pub struct PodSandboxStatusResponse {
    /// What every runtime says.
    #[prost(message, optional, tag = "1")]
    pub status: Option<PodSandboxStatus>,
    /// What this runtime says: JSON by name.
    #[prost(map = "string, string", tag = "2")]
    pub info: HashMap<String, String>,
}

/// How a pod is.
#[derive(Clone, PartialEq, Message)]
pub struct PodSandboxStatus {
    /// Zero if it is ready.
    #[prost(int32, tag = "3")]
    pub state: i32,
    /// Its addresses.
    #[prost(message, optional, tag = "5")]
    pub network: Option<PodSandboxNetworkStatus>,
}

/// The addresses of a pod.
#[derive(Clone, PartialEq, Message)]
pub struct PodSandboxNetworkStatus {
    /// The first.
    #[prost(string, tag = "1")]
    pub ip: String,
    /// All others.
    #[prost(message, repeated, tag = "2")]
    pub additional_ips: Vec<PodIp>,
}

/// An address of a pod.
#[derive(Clone, PartialEq, Message)]
pub struct PodIp {
    /// As text.
    #[prost(string, tag = "1")]
    pub ip: String,
}

/// The name of an image.
#[derive(Clone, PartialEq, Message)]
pub struct ImageSpec {
    /// With its registry and tag.
    #[prost(string, tag = "1")]
    pub image: String,
}

/// Asks whether an image is there.
#[derive(Clone, PartialEq, Message)]
pub struct ImageStatusRequest {
    /// Which.
    #[prost(message, optional, tag = "1")]
    pub image: Option<ImageSpec>,
}

/// An answer about an image.
#[derive(Clone, PartialEq, Message)]
pub struct ImageStatusResponse {
    /// Nothing if it is not there.
    #[prost(message, optional, tag = "1")]
    pub image: Option<ImageSpec>,
}

/// The name of a container.
#[derive(Clone, PartialEq, Message)]
pub struct ContainerMetadata {
    /// Unique in its pod.
    #[prost(string, tag = "1")]
    pub name: String,
}

/// A container to be.
#[derive(Clone, PartialEq, Message)]
pub struct ContainerConfig {
    /// Its name.
    #[prost(message, optional, tag = "1")]
    pub metadata: Option<ContainerMetadata>,
    /// Its files.
    #[prost(message, optional, tag = "2")]
    pub image: Option<ImageSpec>,
    /// What it runs.
    #[prost(string, repeated, tag = "3")]
    pub command: Vec<String>,
}

/// Makes a container.
#[derive(Clone, PartialEq, Message)]
pub struct CreateContainerRequest {
    /// Of which pod.
    #[prost(string, tag = "1")]
    pub pod_sandbox_id: String,
    /// The container to be.
    #[prost(message, optional, tag = "2")]
    pub config: Option<ContainerConfig>,
    /// What the pod was started with.
    #[prost(message, optional, tag = "3")]
    pub sandbox_config: Option<PodSandboxConfig>,
}

/// Names a container; also what making one answers.
#[derive(Clone, PartialEq, Message)]
pub struct ContainerId {
    /// Chosen by the runtime.
    #[prost(string, tag = "1")]
    pub container_id: String,
}

/// Runs a command in a container, and waits for it.
#[derive(Clone, PartialEq, Message)]
pub struct ExecSyncRequest {
    /// Which container.
    #[prost(string, tag = "1")]
    pub container_id: String,
    /// The command.
    #[prost(string, repeated, tag = "2")]
    pub cmd: Vec<String>,
    /// How long it may take, in seconds.
    #[prost(int64, tag = "3")]
    pub timeout: i64,
}

/// What a command said.
#[derive(Clone, PartialEq, Message)]
pub struct ExecSyncResponse {
    /// Its standard output.
    #[prost(bytes = "vec", tag = "1")]
    pub stdout: Vec<u8>,
    /// Its standard error.
    #[prost(bytes = "vec", tag = "2")]
    pub stderr: Vec<u8>,
    /// How it exited.
    #[prost(int32, tag = "3")]
    pub exit_code: i32,
}

/// No fields that these tests know: a request for what there is one of, or an answer that says nothing but that it was done.
#[derive(Clone, PartialEq, Message)]
pub struct Nothing {}

/// An answer about the runtime.
#[derive(Clone, PartialEq, Message)]
pub struct StatusResponse {
    /// What every runtime says.
    #[prost(message, optional, tag = "1")]
    pub status: Option<RuntimeStatus>,
}

/// How a runtime is.
#[derive(Clone, PartialEq, Message)]
pub struct RuntimeStatus {
    /// Each of them.
    #[prost(message, repeated, tag = "1")]
    pub conditions: Vec<RuntimeCondition>,
}

/// Something that a runtime is or is not.
#[derive(Clone, PartialEq, Message)]
pub struct RuntimeCondition {
    /// Its name.
    #[prost(string, tag = "1")]
    pub r#type: String,
    /// Whether it is.
    #[prost(bool, tag = "2")]
    pub status: bool,
    /// Why not, in a word.
    #[prost(string, tag = "3")]
    pub reason: String,
    /// Why not, in a sentence.
    #[prost(string, tag = "4")]
    pub message: String,
}
