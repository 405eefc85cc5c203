//! Who may do what: each part of the cluster has a token of its own, so that the API server's roles hold for it.

use anyhow::Result;
use serde_json::json;
use underpass_runtimes::Cage;

/// Where they are, in each cage.
pub(crate) const FOLDER: &str = "/run/kubernetes";

/// The certificate by which the API server is known, in each cage.
pub(crate) const CERTIFICATE: &str = "/run/kubernetes/ca.crt";

/// Somebody whom the API server knows.
#[derive(Clone, Debug)]
pub(crate) struct User {
    /// How the API server calls him.
    name: String,
    groups: &'static str,
    /// What his files are called.
    file: String,
}

impl User {
    fn new(file: &str, name: &str, groups: &'static str) -> Self {
        Self {
            name: name.to_owned(),
            groups,
            file: file.to_owned(),
        }
    }

    /// Who may do everything.
    pub(crate) fn admin() -> Self {
        Self::new("admin", "admin", "system:masters")
    }

    /// The kubelet of a node, which the API server lets touch what is of this node.
    pub(crate) fn kubelet(node: &str) -> Self {
        Self::new(node, &format!("system:node:{node}"), "system:nodes")
    }

    pub(crate) fn controller_manager() -> Self {
        Self::new("manager", "system:kube-controller-manager", "")
    }

    pub(crate) fn scheduler() -> Self {
        Self::new("scheduler", "system:kube-scheduler", "")
    }

    pub(crate) fn proxy() -> Self {
        Self::new("proxy", "system:kube-proxy", "")
    }

    /// The agent, as its service account is called.
    pub(crate) fn agent() -> Self {
        let name = format!("system:serviceaccount:{AGENT_NAMESPACE}:{AGENT_ACCOUNT}");
        Self::new("agent", &name, "system:serviceaccounts")
    }

    fn token(&self) -> String {
        format!("token-of-{}", self.file)
    }

    /// A line of the API server's list of tokens.
    pub(crate) fn line(&self) -> String {
        let (token, name, groups) = (self.token(), &self.name, self.groups);
        format!("{token},{name},{name},\"{groups}\"\n")
    }

    /// Writes what a client needs to be him, into a cage: the path there.
    pub(crate) fn write(&self, cage: &Cage, server: &str, certificate: &str) -> Result<String> {
        std::fs::create_dir_all(cage.path(FOLDER))?;
        cage.write(CERTIFICATE, certificate)?;
        let config = json!({
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{ "name": "tests", "cluster": { "server": server, "certificate-authority": CERTIFICATE } }],
            "users": [{ "name": self.name, "user": { "token": self.token() } }],
            "contexts": [{ "name": "tests", "context": { "cluster": "tests", "user": self.name } }],
            "current-context": "tests",
        });
        let path = format!("{FOLDER}/{}.kubeconfig", self.file);
        cage.write(&path, &config.to_string())?;
        Ok(path)
    }
}

/// Where the agent's service account is.
const AGENT_NAMESPACE: &str = "kube-system";
/// The agent's service account.
const AGENT_ACCOUNT: &str = "underpass-agent";
