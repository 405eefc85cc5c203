//! The first ADD after boot, which loads and pins, makes the folders of leases, and puts programs on the uplink.
//!
//! Most of its time is the verifier's, so not every change is struck: some of those that make maps, before the verifier has its say, and
//! fewer of those behind it, most of which are an ordinary ADD's.

use std::{collections::BTreeSet, fs, path::PathBuf};

use rstest::rstest;
use serde_json::Value;
use underpass_abi::map;
use underpass_tests::{
    counter::{Registry, pins},
    fault::{Change, Fault, Strike, Traced},
    leak::Traces,
    netns::Netns,
    prelude::*,
    runtime::{Call, Conf},
};

use super::{is_refusal, one_of, stride};

/// The container that the calls are about.
const VICTIM: &str = "victim";

#[rstest]
fn of_the_first_add(#[values(Fault::Refused, Fault::KilledAfter)] fault: Fault) -> Result<()> {
    needs_root!();
    let stage = Stage::set()?;
    let changes = stage.call("ADD").trace(&stage.lab.node)?.changes;
    stage.make("DEL")?;
    for index in chosen(&changes, fault)? {
        let strike = Strike { index, fault };
        let about = || format!("{strike:?}: {}", changes[index]);
        stage.cool()?;
        stage.trial(strike).with_context(about)?;
    }
    Ok(())
}

/// The numbers of the changes to strike: others for each fault.
fn chosen(changes: &[Change], fault: Fault) -> Result<BTreeSet<usize>> {
    const MAKING: usize = 5;
    const VERIFYING: usize = 4;
    const AFTER: usize = 18;
    let complete = changes
        .iter()
        .position(|change| change.what.starts_with("rename(") && change.what.contains("bpf"))
        .context("the first ADD completes a folder of pins")?;
    // A program is loaded and pinned for each that every node needs.
    let verified = complete.saturating_sub(2 * map::USUAL_PROGRAMS.len());
    let offset = usize::from(fault == Fault::Refused);
    let some = |from: usize, to: usize, step: usize| {
        let step = step * stride();
        (from..to).skip(offset * step / 2).step_by(step)
    };
    let mut chosen: BTreeSet<usize> = some(0, verified, MAKING).collect();
    chosen.extend(some(verified, complete, VERIFYING));
    chosen.insert(complete);
    chosen.extend(some(complete + 1, changes.len(), AFTER));
    Ok(chosen)
}

struct Stage {
    lab: Lab,
    netns: Netns,
    conf: Conf,
    devices: BTreeSet<String>,
}

impl Stage {
    fn set() -> Result<Self> {
        let lab = Lab::unloaded()?;
        Ok(Self {
            netns: lab.node.netns().sibling(VICTIM)?,
            conf: lab.conf().with_host_port(8080, 80),
            devices: Traces::of(&lab.node)?.devices,
            lab,
        })
    }

    fn call(&self, verb: &str) -> Call {
        if verb == "GC" {
            let nobody = Vec::<Value>::new();
            let conf = self.conf.clone().with("cni.dev/valid-attachments", nobody);
            return Call::new("GC").conf(&conf);
        }
        let path = self.netns.path().display().to_string();
        Call::new(verb)
            .attachment(VICTIM, &path, Pod::IFNAME)
            .conf(&self.conf)
    }

    fn make(&self, verb: &str) -> Result<()> {
        self.call(verb).run(&self.lab.node)?.silence()
    }

    /// Makes the node what it was when it had been booted.
    fn cool(&self) -> Result<()> {
        let node = &self.lab.node;
        node.underpass(&["unload"])?;
        node.netns().run(|| -> Result<()> {
            fs::remove_dir_all(node.data_dir())?;
            Ok(fs::create_dir_all(node.data_dir())?)
        })?;
        for key in ["net/ipv4/ip_forward", "net/ipv6/conf/all/forwarding"] {
            node.netns().set_sysctl(key, "0")?;
        }
        Ok(())
    }

    fn trial(&self, strike: Strike) -> Result<()> {
        let node = &self.lab.node;
        let struck: Traced = self.call("ADD").strike(node, strike)?;
        if strike.fault == Fault::Refused {
            if is_refusal(&struck)? {
                self.expect_nothing_left()?;
            } else {
                self.check(&struck.reply.result()?)?;
            }
        }
        self.make(one_of(&["DEL", "GC"], strike))?;
        self.expect_nothing_left()?;
        // Where nothing is loaded, the next trial is another first ADD, and meets what this one has left.
        if !self.pinned()?.is_empty() {
            let result = self.call("ADD").run(node)?.result()?;
            self.check(&result)?;
            for family in Family::BOTH {
                ping::ping(&self.netns, family.remote())?;
            }
            self.make("DEL")?;
            self.expect_nothing_left()?;
        }
        Ok(())
    }

    fn check(&self, result: &Value) -> Result<()> {
        let conf = self.conf.clone().with("prevResult", result.clone());
        let call = self.call("CHECK").conf(&conf);
        call.run(&self.lab.node)?.silence()
    }

    /// Fails if anything of a container is there, or pins that are not all that a node needs.
    fn expect_nothing_left(&self) -> Result<()> {
        let Traces {
            devices,
            registry,
            leases,
            ..
        } = Traces::of(&self.lab.node)?;
        ensure!(devices == self.devices, "{devices:?}");
        ensure!(registry == Registry::default(), "{registry:?}");
        ensure!(leases.is_empty(), "{leases:?}");
        let pinned = self.pinned()?;
        let folder = pins(&self.lab.node);
        let all = map::MAPS
            .iter()
            .map(|map| folder.join("maps").join(map.to_string()))
            .chain(
                map::USUAL_PROGRAMS
                    .iter()
                    .map(|name| folder.join("programs").join(name)),
            )
            .chain([folder.join("home")]);
        if !pinned.is_empty() {
            for pin in all {
                ensure!(
                    pinned.contains(&pin),
                    "{} is missing: {pinned:?}",
                    pin.display()
                );
            }
        }
        let strange: Vec<_> = pinned
            .iter()
            .filter(|pin| !pin.starts_with(&folder))
            .collect();
        ensure!(strange.is_empty(), "pins of nobody: {strange:?}");
        Ok(())
    }

    /// Everything below `bpfRoot` but its folder of this layout.
    fn pinned(&self) -> Result<BTreeSet<PathBuf>> {
        let node = &self.lab.node;
        node.netns().run(|| {
            let mut found = BTreeSet::new();
            let mut folders = vec![node.bpf_root().to_owned()];
            while let Some(folder) = folders.pop() {
                // The root itself need not be there.
                for entry in fs::read_dir(&folder).into_iter().flatten() {
                    let path = entry?.path();
                    if path.is_dir() {
                        folders.push(path.clone());
                    }
                    found.insert(path);
                }
            }
            found.remove(&pins(node));
            found.remove(&pins(node).join("maps"));
            found.remove(&pins(node).join("programs"));
            Ok(found)
        })
    }
}
