//! A node with a container that must notice nothing, and another one whose calls meet faults.

use std::{collections::BTreeSet, fs, path::PathBuf, sync::Arc};

use serde_json::{Value, json};
use underpass_tests::{
    fault::{Strike, Traced},
    leak::Traces,
    netns::Netns,
    prelude::*,
    runtime::{Call, Conf},
};

use super::witness::Witness;

/// The victim's own port of the node, and one that the witness had before.
const PORT: u16 = 8080;
const CONTESTED: u16 = 9000;
const INSIDE: u16 = 80;

/// The container that the calls are about.
const VICTIM: &str = "victim";

pub(super) struct Stage {
    before: Traces,
    files: BTreeSet<PathBuf>,
    witness: Witness,
    netns: Netns,
    conf: Conf,
    lab: Arc<Lab>,
}

impl Stage {
    /// Everything that stays is loaded and attached, and somebody talks through the witness.
    pub(super) fn set() -> Result<Self> {
        let lab = Arc::new(Lab::new()?);
        let witness = Witness::start(&lab, lab.conf(), CONTESTED)?;
        let netns = lab.node.netns().sibling(VICTIM)?;
        let conf = victim(&lab);
        // What the first container of a network makes stays.
        Pod::add_to(&lab.node, netns.clone(), &conf)?.del()?;
        Ok(Self {
            before: Traces::of(&lab.node)?,
            files: files(&lab.node)?,
            witness,
            netns,
            conf,
            lab,
        })
    }

    /// A call about the victim.
    pub(super) fn call(&self, verb: &str) -> Call {
        if verb == "GC" {
            let valid = json!([{ "containerID": self.witness.pod.name(), "ifname": Pod::IFNAME }]);
            return Call::new("GC")
                .conf(&self.conf.clone().with("cni.dev/valid-attachments", valid));
        }
        let path = self.netns.path().display().to_string();
        Call::new(verb)
            .attachment(VICTIM, &path, Pod::IFNAME)
            .conf(&self.conf)
    }

    /// Makes a call without a result, and without faults.
    pub(super) fn make(&self, verb: &str) -> Result<()> {
        self.call(verb).run(&self.lab.node)?.silence()
    }

    /// Attaches the victim without faults, and has a CHECK approve: the result.
    pub(super) fn attach(&self) -> Result<Value> {
        let result = self.call("ADD").run(&self.lab.node)?.result()?;
        self.check(&result)?;
        Ok(result)
    }

    /// Fails unless CHECK finds the victim as an ADD has made it.
    pub(super) fn check(&self, result: &Value) -> Result<()> {
        let conf = self.conf.clone().with("prevResult", result.clone());
        let call = self.call("CHECK").conf(&conf);
        call.run(&self.lab.node)?.silence()
    }

    /// The calls that only look.
    pub(super) fn looks(&self, result: &Value) -> [Call; 2] {
        let conf = self.conf.clone().with("prevResult", result.clone());
        [
            self.call("CHECK").conf(&conf),
            Call::new("STATUS").conf(&self.conf),
        ]
    }

    /// Makes a call with a fault.
    pub(super) fn strike(&self, verb: &str, strike: Strike) -> Result<Traced> {
        self.call(verb).strike(&self.lab.node, strike)
    }

    /// Makes a call, and notes what it changes.
    pub(super) fn trace(&self, call: &Call) -> Result<Traced> {
        call.trace(&self.lab.node)
    }

    /// Fails if anything of the victim is there, or anything of the witness is not.
    pub(super) fn expect_nothing_left(&self) -> Result<()> {
        self.before.expect_same(&self.lab.node)
    }

    /// As [`Self::expect_nothing_left`], notes in the index of leases included: a failed ADD leaves them to the DEL that follows.
    pub(super) fn expect_nothing_at_all(&self) -> Result<()> {
        self.expect_nothing_left()?;
        let files = files(&self.lab.node)?;
        let left: Vec<_> = files.difference(&self.files).collect();
        ensure!(left.is_empty(), "files are left: {left:?}");
        Ok(())
    }

    /// Fails if the witness has noticed anything.
    pub(super) fn expect_served(&mut self) -> Result<()> {
        self.witness.expect_served()
    }

    /// Ends the traffic. The port that the witness lost from time to time is its own again.
    pub(super) fn end(self) -> Result<()> {
        self.witness.expect_at(CONTESTED)?;
        self.before.expect_same(&self.lab.node)?;
        self.witness.end()?.del()
    }
}

/// The victim is alone in its network, which goes with it.
fn victim(lab: &Lab) -> Conf {
    let ranges = ["10.99.0.0/24", "fd00:99::/64"].map(|subnet| json!([{ "subnet": subnet }]));
    lab.conf()
        .with("name", "alone")
        .with_ipam("ranges", ranges.to_vec())
        .with_host_ports(&[(PORT, INSIDE), (CONTESTED, INSIDE)])
}

/// All files of leases.
fn files(node: &Node) -> Result<BTreeSet<PathBuf>> {
    let mut found = BTreeSet::new();
    node.netns().run(|| {
        let mut folders = vec![node.data_dir().to_owned()];
        while let Some(folder) = folders.pop() {
            for entry in fs::read_dir(&folder)? {
                let path = entry?.path();
                if path.is_dir() {
                    folders.push(path.clone());
                }
                found.insert(path);
            }
        }
        Ok(found)
    })
}
