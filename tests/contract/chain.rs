//! A list of plugins, called as runtimes do: ADD and CHECK in order, DEL in reverse, each with the result of the one before.

use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result};
use serde_json::{Value, json};
use underpass_tests::{
    Node,
    netns::Netns,
    node::plugin,
    runtime::{Call, Conf},
};

use crate::plugins::{self, reference};

/// The interface that chains attach.
pub(crate) const IFNAME: &str = "eth0";

/// Plugins whose CHECK fails on what their own ADD made: Debian's `portmap` looks for the rules of each family in the tables of both.
const CANNOT_CHECK: [&str; 1] = ["portmap"];

/// A network of several plugins.
#[derive(Clone, Debug)]
pub(crate) struct Chain<'a> {
    node: &'a Node,
    version: String,
    name: String,
    plugins: Vec<Value>,
    runtime: Value,
    ours: Vec<PathBuf>,
}

impl<'a> Chain<'a> {
    /// Ours with the config of a test, then others, in a version that Debian's plugins speak.
    pub(crate) fn new(
        node: &'a Node,
        first: &Conf,
        others: impl IntoIterator<Item = Value>,
    ) -> Self {
        Self {
            node,
            version: "1.0.0".to_owned(),
            name: first.name().to_owned(),
            plugins: [first.json().clone()].into_iter().chain(others).collect(),
            runtime: json!({}),
            ours: Vec::new(),
        }
    }

    /// In another version.
    pub(crate) fn version(mut self, version: &str) -> Self {
        version.clone_into(&mut self.version);
        self
    }

    /// With our executable in place of the reference plugin that has its file name. It may be called for several.
    pub(crate) fn ours(mut self, path: &Path) -> Self {
        self.ours.push(path.to_owned());
        self
    }

    /// With something for the plugins that declare this capability.
    pub(crate) fn runtime(mut self, capability: &str, value: Value) -> Self {
        self.runtime[capability] = value;
        self
    }

    /// The list.
    pub(crate) fn plugins(&self) -> &[Value] {
        &self.plugins
    }

    /// The result of the last plugin.
    pub(crate) fn add(&self, netns: &Netns) -> Result<Value> {
        let mut result = None;
        for plugin in &self.plugins {
            let answer = self.call("ADD", plugin, netns, result.as_ref())?;
            result = Some(answer.result()?);
        }
        result.context("a chain of no plugins")
    }

    /// Whether every plugin finds what it made, given the result of the last.
    pub(crate) fn check(&self, netns: &Netns, result: &Value) -> Result<()> {
        self.plugins
            .iter()
            .filter(|plugin| {
                self.ours.iter().any(|path| is_named(path, plugin))
                    || CANNOT_CHECK.iter().all(|name| plugin["type"] != *name)
            })
            .try_for_each(|plugin| self.call("CHECK", plugin, netns, Some(result))?.silence())
    }

    /// Detaches.
    pub(crate) fn del(&self, netns: &Netns, result: &Value) -> Result<()> {
        self.plugins.iter().rev().try_for_each(|plugin| {
            let answer = self.call("DEL", plugin, netns, Some(result))?;
            answer.result().map(drop).or_else(|_| answer.silence())
        })
    }

    /// One call of one plugin of the list.
    pub(crate) fn call(
        &self,
        verb: &str,
        plugin: &Value,
        netns: &Netns,
        previous: Option<&Value>,
    ) -> Result<plugins::Answer> {
        let mut conf = plugin.clone();
        conf["cniVersion"] = json!(self.version);
        conf["name"] = json!(self.name);
        if let Some(previous) = previous {
            conf["prevResult"] = previous.clone();
        }
        let declared = plugin["capabilities"].as_object();
        for (capability, _) in declared.into_iter().flatten() {
            if let Some(value) = self.runtime.get(capability) {
                conf["runtimeConfig"][capability] = value.clone();
            }
        }
        let call = Call::new(verb)
            .attachment(netns.name(), &netns.path().display().to_string(), IFNAME)
            .stdin(conf.to_string().as_bytes());
        plugins::run(self.node, &self.executable(plugin)?, &call)
            .with_context(|| format!("{verb} of {}", plugin["type"]))
    }

    fn executable(&self, conf: &Value) -> Result<PathBuf> {
        if let Some(path) = self.ours.iter().find(|path| is_named(path, conf)) {
            return Ok(path.clone());
        }
        match conf["type"].as_str().context("a plugin without type")? {
            "underpass" => Ok(plugin().to_owned()),
            other => reference(other),
        }
    }
}

/// Whether an executable has the name that a config asks for.
fn is_named(path: &Path, conf: &Value) -> bool {
    let name = path.file_name().and_then(|name| name.to_str());
    name.is_some() && conf["type"].as_str() == name
}
