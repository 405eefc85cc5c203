//! The node's own firewall, as kube-proxy or an operator would set it up: counters, translations, drops.

use std::{net::SocketAddr, process::Command, sync::Arc};

use anyhow::{Context as _, Result, ensure};
use serde_json::Value;

use crate::{Family, Node};

const TABLE: &str = "inet lab";

/// A transport protocol that nftables translates.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Transport {
    /// TCP.
    Tcp,
    /// UDP.
    Udp,
}

impl Transport {
    /// Its name in nftables expressions.
    #[must_use]
    pub const fn nft(self) -> &'static str {
        match self {
            Self::Tcp => "tcp",
            Self::Udp => "udp",
        }
    }
}

/// Firewall rules of a node.
#[derive(Debug)]
pub struct Netfilter {
    node: Arc<Node>,
}

impl Netfilter {
    /// Chains that let everything pass, at the hooks that count.
    pub fn new(node: &Arc<Node>) -> Result<Self> {
        let netfilter = Self {
            node: Arc::clone(node),
        };
        netfilter.load(&format!(
            "table {TABLE} {{
                chain forward {{ type filter hook forward priority 0; policy accept; }}
                chain prerouting {{ type nat hook prerouting priority -100; policy accept; }}
                chain postrouting {{ type nat hook postrouting priority 100; policy accept; }}
            }}"
        ))?;
        Ok(netfilter)
    }

    /// Loads rules.
    pub fn load(&self, rules: &str) -> Result<()> {
        self.node
            .netns()
            .expect(Command::new("nft").args(["-f", "-"]), rules.as_bytes())?;
        Ok(())
    }

    /// Counts forwarded packets that match an expression, under a name. Several expressions may share a name.
    pub fn count_forwarded(&self, name: &str, expression: &str) -> Result<()> {
        self.load(&format!(
            "add counter {TABLE} seen_{name}
             add rule {TABLE} forward {expression} counter name seen_{name}"
        ))
    }

    /// Packets counted under a name.
    pub fn counted(&self, name: &str) -> Result<u64> {
        let text = self.node.netns().expect(
            Command::new("nft").args([
                "--json",
                "list",
                "counter",
                "inet",
                "lab",
                &format!("seen_{name}"),
            ]),
            &[],
        )?;
        let json: Value = serde_json::from_str(&text).context("read the JSON of nft")?;
        json["nftables"]
            .as_array()
            .into_iter()
            .flatten()
            .find_map(|object| object["counter"]["packets"].as_u64())
            .with_context(|| format!("nft lists no counter {name}"))
    }

    /// Fails if more packets than `most` were counted, or none.
    pub fn expect_few(&self, name: &str, most: u64) -> Result<()> {
        let counted = self.counted(name)?;
        ensure!(
            (1..=most).contains(&counted),
            "the firewall should have seen 1 to {most} packets of {name}, it saw {counted}"
        );
        Ok(())
    }

    /// Fails if fewer packets than `least` were counted.
    pub fn expect_many(&self, name: &str, least: u64) -> Result<()> {
        let counted = self.counted(name)?;
        ensure!(
            counted >= least,
            "the firewall should have seen at least {least} packets of {name}, it saw {counted}"
        );
        Ok(())
    }

    /// Drops forwarded packets that match an expression.
    pub fn drop_forwarded(&self, expression: &str) -> Result<()> {
        self.load(&format!("insert rule {TABLE} forward {expression} drop"))
    }

    /// A Service: what is sent to `service` goes to `backend`.
    pub fn service(
        &self,
        transport: Transport,
        service: SocketAddr,
        backend: SocketAddr,
    ) -> Result<()> {
        let family = Family::of(service.ip()).nft();
        let transport = transport.nft();
        self.load(&format!(
            "add rule {TABLE} prerouting {family} daddr {} {transport} dport {} dnat {family} to {backend}",
            service.ip(),
            service.port(),
        ))
    }

    /// Forgets all tracked connections.
    pub fn flush_connections(&self) -> Result<()> {
        self.node
            .netns()
            .expect(Command::new("conntrack").arg("-F"), &[])?;
        Ok(())
    }
}
