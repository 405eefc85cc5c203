//! Addresses from other IPAM plugins: Debian's, and one that writes down how it is called.

mod dhcp;
mod failures;
mod ourselves;

use std::{fs, os::unix::fs::PermissionsExt as _, os::unix::fs::symlink, path::PathBuf};

use serde_json::{Value, json};
use tempfile::TempDir;
use underpass_tests::{
    leak::Traces,
    netns::Netns,
    prelude::*,
    runtime::{Call, Conf},
};

use crate::{
    plugins::{REFERENCE, reference},
    programmed::fixed,
};

/// An IPAM plugin that answers as it is told, and notes each call.
pub(crate) struct Witness {
    folder: TempDir,
}

impl Witness {
    /// The name that configs ask for.
    pub(crate) const NAME: &str = "witness";

    /// One on a node where a container has been, with what was there before the test.
    fn beside() -> Result<(Lab, Traces, Self)> {
        let lab = Lab::new()?;
        lab.pod("warm")?.del()?;
        let before = Traces::of(&lab.node)?;
        Ok((lab, before, Self::new()?))
    }

    pub(crate) fn new() -> Result<Self> {
        let witness = Self {
            folder: TempDir::new().context("make a folder")?,
        };
        let folder = witness.folder.path().display();
        let script = format!(
            r#"#!/bin/sh
cd {folder} || exit 9
echo "$CNI_COMMAND $CNI_CONTAINERID $CNI_IFNAME" >> calls
cat > "input.$CNI_COMMAND"
if [ -e "fail.$CNI_COMMAND" ]; then cat "fail.$CNI_COMMAND"; exit 1; fi
if [ "$CNI_COMMAND" = ADD ]; then cat result; fi
"#
        );
        let program = witness.folder.path().join(Self::NAME);
        fs::write(&program, script)?;
        fs::set_permissions(&program, fs::Permissions::from_mode(0o755))?;
        let result = json!({
            "cniVersion": "1.1.0",
            "ips": [
                { "address": "10.88.0.77/24", "gateway": "10.88.0.1" },
                { "address": "fd00:88::77/64", "gateway": "fd00:88::1" },
            ],
            "routes": Family::BOTH.map(|family| json!({ "dst": family.everywhere() })),
        });
        fs::write(witness.folder.path().join("result"), result.to_string())?;
        Ok(witness)
    }

    /// It is found by another name as well.
    pub(crate) fn answers_to(&self, name: &str) -> Result<()> {
        Ok(symlink(Self::NAME, self.folder.path().join(name))?)
    }

    /// From now on it fails a verb.
    pub(crate) fn fails(&self, verb: &str, code: u64, msg: &str) -> Result<()> {
        let error = json!({ "cniVersion": "1.1.0", "code": code, "msg": msg });
        Ok(fs::write(
            self.folder.path().join(format!("fail.{verb}")),
            error.to_string(),
        )?)
    }

    pub(crate) fn conf(lab: &Lab) -> Conf {
        lab.conf().with(
            "ipam",
            json!({ "type": Self::NAME, "its": ["own", "keys"] }),
        )
    }

    /// A call that finds it.
    pub(crate) fn call(&self, verb: &str, netns: &Netns, conf: &Conf) -> Call {
        Call::new(verb)
            .attachment(
                netns.name(),
                &netns.path().display().to_string(),
                Pod::IFNAME,
            )
            .env("CNI_PATH", &self.folder.path().display().to_string())
            .conf(conf)
    }

    /// The calls so far, and forgets them.
    pub(crate) fn calls(&self) -> Result<Vec<String>> {
        let path = self.folder.path().join("calls");
        let text = fs::read_to_string(&path).unwrap_or_default();
        if path.exists() {
            fs::remove_file(&path)?;
        }
        Ok(text.lines().map(|line| line.trim().to_owned()).collect())
    }

    /// What it was last given for a verb.
    pub(crate) fn input(&self, verb: &str) -> Result<Value> {
        let text = fs::read_to_string(self.folder.path().join(format!("input.{verb}")))?;
        Ok(serde_json::from_str(&text)?)
    }
}

#[test]
fn every_verb_is_handed_on_with_the_whole_config() -> Result<()> {
    needs_root!();
    let (lab, before, witness) = Witness::beside()?;
    let netns = lab.node.netns().sibling("a")?;
    let conf = Witness::conf(&lab);
    let result = witness
        .call("ADD", &netns, &conf)
        .run(&lab.node)?
        .result()?;
    ensure!(result["ips"][0]["address"] == "10.88.0.77/24", "{result}");
    ensure!(
        witness.input("ADD")? == *conf.json(),
        "{}",
        witness.input("ADD")?
    );
    for family in Family::BOTH {
        ping::ping(&netns, family.remote())?;
    }
    let conf = conf.with("prevResult", result).with(
        "cni.dev/valid-attachments",
        json!([{ "containerID": "a", "ifname": Pod::IFNAME }]),
    );
    for verb in ["CHECK", "STATUS", "GC", "DEL"] {
        witness
            .call(verb, &netns, &conf)
            .run(&lab.node)?
            .silence()?;
        ensure!(
            witness.input(verb)? == *conf.json(),
            "{verb}: {}",
            witness.input(verb)?
        );
    }
    ensure!(
        witness.calls()?
            == [
                "ADD a eth0",
                "CHECK a eth0",
                "STATUS a eth0",
                "GC a eth0",
                "DEL a eth0"
            ],
        "every verb once"
    );
    before.expect_same(&lab.node)
}

#[test]
fn a_failed_add_is_followed_by_a_del() -> Result<()> {
    needs_root!();
    let (lab, before, witness) = Witness::beside()?;
    let netns = lab.node.netns().sibling("a")?;
    let add = witness.call("ADD", &netns, &Witness::conf(&lab));
    witness.fails("ADD", 11, "come back later")?;
    let error = add.run(&lab.node)?.error()?;
    ensure!(
        error.code == 11 && error.msg.contains("come back later"),
        "{error}"
    );
    ensure!(witness.calls()? == ["ADD a eth0", "DEL a eth0"]);
    before.expect_same(&lab.node)?;
    // The same where the interface fails after the addresses were had: the kernel has no IPv6 below 1280.
    let witness = Witness::new()?;
    let conf = Witness::conf(&lab).with("mtu", 1000);
    witness.call("ADD", &netns, &conf).run(&lab.node)?.error()?;
    ensure!(witness.calls()? == ["ADD a eth0", "DEL a eth0"]);
    before.expect_same(&lab.node)
}

#[test]
fn a_failed_del_of_the_addresses_is_reported_and_the_interface_is_gone() -> Result<()> {
    needs_root!();
    let (lab, before, witness) = Witness::beside()?;
    let netns = lab.node.netns().sibling("a")?;
    let conf = Witness::conf(&lab);
    witness
        .call("ADD", &netns, &conf)
        .run(&lab.node)?
        .result()?;
    witness.fails("DEL", 5, "the database is away")?;
    let error = witness.call("DEL", &netns, &conf).run(&lab.node)?.error()?;
    ensure!(
        error.to_string().contains("the database is away"),
        "{error}"
    );
    before.expect_same(&lab.node)
}

/// Why it can't tell is no fault of the container. What is one comes first.
#[test]
fn a_failed_check_of_the_addresses_is_passed_on() -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    let witness = Witness::new()?;
    let netns = lab.node.netns().sibling("a")?;
    let conf = Witness::conf(&lab);
    let result = witness
        .call("ADD", &netns, &conf)
        .run(&lab.node)?
        .result()?;
    witness.fails("CHECK", 11, "the database is away")?;
    let remembered = conf.clone().with("prevResult", result);
    let check = witness.call("CHECK", &netns, &remembered);
    let error = check.run(&lab.node)?.error()?;
    ensure!(
        error.code == 11 && error.msg == "the database is away" && error.details.is_empty(),
        "{error}"
    );
    netns.ip(&["link set eth0 down".to_owned()])?;
    let check = witness.call("CHECK", &netns, &remembered);
    let error = check.run(&lab.node)?.error()?;
    for word in ["eth0 is down", "the database is away"] {
        ensure!(error.code == 100 && error.msg.contains(word), "{error}");
    }
    witness.call("DEL", &netns, &conf).run(&lab.node)?.silence()
}

#[test]
fn a_missing_plugin_is_named() -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    let witness = Witness::new()?;
    let netns = lab.node.netns().sibling("a")?;
    let conf = lab.conf().with("ipam", json!({ "type": "nobody" }));
    let error = witness.call("ADD", &netns, &conf).run(&lab.node)?.error()?;
    ensure!(
        error
            .msg
            .contains("failed to find plugin \"nobody\" in path"),
        "{error}"
    );
    Ok(())
}

#[test]
fn no_address_is_an_error() -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    let witness = Witness::new()?;
    fs::write(
        witness.folder.path().join("result"),
        r#"{"cniVersion":"1.1.0"}"#,
    )?;
    let netns = lab.node.netns().sibling("a")?;
    let error = witness
        .call("ADD", &netns, &Witness::conf(&lab))
        .run(&lab.node)?
        .error()?;
    ensure!(
        error
            .msg
            .contains("IPAM plugin returned missing IP config: \"witness\""),
        "{error}"
    );
    ensure!(
        witness.calls()? == ["ADD a eth0", "DEL a eth0"],
        "what it may have taken is given back"
    );
    Ok(())
}

#[test]
fn debians_static() -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    let addresses = json!([
        { "address": "10.88.0.20/24", "gateway": "10.88.0.1" },
        { "address": "fd00:88::20/64", "gateway": "fd00:88::1" },
    ]);
    for version in ["0.1.0", "0.3.1", "0.4.0", "1.0.0"] {
        let conf = fixed(&lab, &addresses).with("cniVersion", version);
        let pod = lab.pod_with("a", &conf)?;
        crate::schema::validate(version, pod.result())?;
        for family in Family::BOTH {
            ping::ping(pod.netns(), family.remote())?;
        }
        if version >= "0.4.0" {
            pod.call_with_result("CHECK").run(&lab.node)?.silence()?;
        }
        pod.netns().unlink()?;
        pod.del()?;
    }
    // Addresses of the runtime replace those of the config.
    let runtime = json!({ "ips": ["10.88.0.30/24", "fd00:88::30/64"] });
    let pod = lab.pod_with("a", &fixed(&lab, &addresses).with("runtimeConfig", runtime))?;
    let addresses: Vec<_> = pod.addresses().iter().map(ToString::to_string).collect();
    ensure!(
        addresses == ["10.88.0.30", "fd00:88::30"],
        "{}",
        pod.result()
    );
    for family in Family::BOTH {
        ping::ping(pod.netns(), family.remote())?;
    }
    Ok(())
}

/// Our own allocator answers to `host-local`, so Debian's is asked for by another name.
#[test]
fn debians_host_local_and_ours_in_turns() -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    let folder = TempDir::new()?;
    symlink(reference("host-local")?, folder.path().join("theirs"))?;
    let path = format!("{}:{REFERENCE}", folder.path().display());
    let ours = lab.conf().with("cniVersion", "1.0.0");
    let theirs = ours.clone().with_ipam("type", "theirs");
    let mut attached = Vec::new();
    for (at, conf) in [&ours, &theirs, &ours, &theirs].into_iter().enumerate() {
        let netns = lab.node.netns().sibling(&format!("pod{at}"))?;
        let call = |verb: &str, conf: &Conf| {
            Call::new(verb)
                .attachment(
                    netns.name(),
                    &netns.path().display().to_string(),
                    Pod::IFNAME,
                )
                .env("CNI_PATH", &path)
                .conf(conf)
        };
        let result = call("ADD", conf).run(&lab.node)?.result()?;
        let expected = format!("10.88.0.{}/24", at + 2);
        ensure!(result["ips"][0]["address"] == expected, "{result}");
        for family in Family::BOTH {
            ping::ping(&netns, family.remote())?;
        }
        attached.push((netns, result));
    }
    // Each finds and frees what the other gave.
    for (at, (netns, result)) in attached.iter().enumerate() {
        let conf = if at % 4 < 2 { &theirs } else { &ours };
        let conf = conf.clone().with("prevResult", result.clone());
        for verb in ["CHECK", "DEL"] {
            Call::new(verb)
                .attachment(
                    netns.name(),
                    &netns.path().display().to_string(),
                    Pod::IFNAME,
                )
                .env("CNI_PATH", &path)
                .conf(&conf)
                .run(&lab.node)?
                .silence()
                .with_context(|| format!("{verb} of {}", netns.name()))?;
        }
    }
    let left = Traces::of(&lab.node)?.leases;
    ensure!(
        left == std::collections::BTreeSet::<PathBuf>::new(),
        "{left:?}"
    );
    Ok(())
}
