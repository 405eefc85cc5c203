//! A container, as far as the network sees it: a network namespace with attachments.

use std::{
    net::{IpAddr, SocketAddr},
    path::{Path, PathBuf},
    sync::Arc,
};

use anyhow::{Context as _, Result};
use serde_json::Value;

use crate::{
    Family, Node,
    frame::{self, Ends},
    netfilter,
    netns::Netns,
    node::plugin,
    runtime::{Call, Conf},
};

/// A pod and an attachment of it; dropping it makes the DEL.
#[derive(Debug)]
pub struct Pod {
    node: Arc<Node>,
    netns: Arc<Netns>,
    ifname: String,
    conf: Conf,
    program: PathBuf,
    result: Value,
    attached: bool,
}

impl Pod {
    /// The name of its first interface.
    pub const IFNAME: &str = "eth0";

    /// Makes a network namespace on a node and ADDs it to a network.
    pub fn add(node: &Arc<Node>, name: &str, conf: &Conf) -> Result<Self> {
        Self::add_to(node, node.netns().sibling(name)?, conf)
    }

    /// ADDs a network namespace to a network.
    pub fn add_to(node: &Arc<Node>, netns: Netns, conf: &Conf) -> Result<Self> {
        Self::attach(node, Arc::new(netns), Self::IFNAME, conf, plugin())
    }

    /// Makes a network namespace on a node and has another plugin ADD it, which calls ours.
    pub fn add_by(node: &Arc<Node>, name: &str, conf: &Conf, program: &Path) -> Result<Self> {
        let netns = Arc::new(node.netns().sibling(name)?);
        Self::attach(node, netns, Self::IFNAME, conf, program)
    }

    /// ADDs the same pod to another network, by an interface of that name: another attachment.
    pub fn also(&self, ifname: &str, conf: &Conf) -> Result<Self> {
        Self::attach(&self.node, Arc::clone(&self.netns), ifname, conf, plugin())
    }

    fn attach(
        node: &Arc<Node>,
        netns: Arc<Netns>,
        ifname: &str,
        conf: &Conf,
        program: &Path,
    ) -> Result<Self> {
        let mut pod = Self {
            node: Arc::clone(node),
            netns,
            ifname: ifname.to_owned(),
            conf: conf.clone(),
            program: program.to_owned(),
            result: Value::Null,
            attached: true,
        };
        pod.result = pod
            .call("ADD")
            .run(node)?
            .result()
            .with_context(|| format!("ADD of pod {}", pod.name()))?;
        Ok(pod)
    }

    /// Its name, also its container id.
    #[must_use]
    pub fn name(&self) -> &str {
        self.netns.name()
    }

    /// Its network namespace.
    #[must_use]
    pub fn netns(&self) -> &Netns {
        &self.netns
    }

    /// The result of its ADD.
    #[must_use]
    pub fn result(&self) -> &Value {
        &self.result
    }

    /// A call for its attachment, with its network's configuration.
    #[must_use]
    pub fn call(&self, verb: &str) -> Call {
        Call::new(verb)
            .by(&self.program)
            .attachment(
                self.name(),
                &self.netns.path().display().to_string(),
                &self.ifname,
            )
            .conf(&self.conf)
    }

    /// As [`Self::call`], with the result of its ADD, as runtimes do for CHECK and DEL.
    #[must_use]
    pub fn call_with_result(&self, verb: &str) -> Call {
        let conf = self.conf.clone().with("prevResult", self.result.clone());
        self.call(verb).conf(&conf)
    }

    /// Its address.
    ///
    /// # Panics
    /// If its ADD gave it none of that family.
    #[must_use]
    pub fn ip(&self, family: Family) -> IpAddr {
        self.addresses()
            .into_iter()
            .find(|&ip| Family::of(ip) == family)
            .unwrap_or_else(|| panic!("pod {} has no {family:?} address", self.name()))
    }

    /// A port at its address.
    #[must_use]
    pub fn at(&self, family: Family, port: u16) -> SocketAddr {
        SocketAddr::new(self.ip(family), port)
    }

    /// All its addresses.
    #[must_use]
    pub fn addresses(&self) -> Vec<IpAddr> {
        let ips = self.result["ips"].as_array();
        ips.into_iter()
            .flatten()
            .filter_map(|ip| ip["address"].as_str()?.split('/').next()?.parse().ok())
            .collect()
    }

    /// The name of its device on the node.
    #[must_use]
    pub fn host_veth(&self) -> &str {
        self.interface(0)["name"].as_str().unwrap_or_default()
    }

    /// The MAC of its device on the node.
    pub fn host_mac(&self) -> Result<[u8; 6]> {
        mac(self.interface(0))
    }

    /// The MAC of its own interface.
    pub fn mac(&self) -> Result<[u8; 6]> {
        mac(self.interface(1))
    }

    fn interface(&self, index: usize) -> &Value {
        &self.result["interfaces"][index]
    }

    /// Both ends of a frame from this pod by its gateway to `dst`, with nothing forged.
    pub fn ends(&self, dst: IpAddr) -> Result<Ends> {
        Ok(Ends {
            src_mac: self.mac()?,
            dst_mac: self.host_mac()?,
            src: self.ip(Family::of(dst)),
            dst,
        })
    }

    /// DELs the attachment.
    pub fn del(mut self) -> Result<()> {
        self.attached = false;
        self.call_with_result("DEL").run(&self.node)?.silence()
    }

    /// Forgets the attachment without a DEL.
    pub fn abandon(mut self) {
        self.attached = false;
    }
}

impl Drop for Pod {
    fn drop(&mut self) {
        if !self.attached {
            return;
        }
        netfilter::end(&self.node);
        let deleted = self
            .call("DEL")
            .run(&self.node)
            .and_then(|reply| reply.silence());
        if let Err(error) = deleted {
            anstream::eprintln!("DEL of pod {}: {error:#}", self.name());
            // A panic here must not hide a failure that came before.
            let failed_before = std::thread::panicking() || self.result.is_null();
            assert!(failed_before, "the DEL of a pod failed");
        }
    }
}

fn mac(interface: &Value) -> Result<[u8; 6]> {
    let text = interface["mac"]
        .as_str()
        .with_context(|| format!("an interface without MAC: {interface}"))?;
    frame::mac(text)
}
