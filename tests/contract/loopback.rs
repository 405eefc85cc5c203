//! Ours under the name `loopback`, beside the reference plugin: runtimes run it for every container.

use std::path::{Path, PathBuf};

use rstest::rstest;
use serde_json::{Value, json};
use underpass_tests::{netns::Netns, prelude::*, runtime::Call};

use crate::{
    plugins::{Answer, Installed, Name, Program, reference, run},
    schema,
};

/// A node, a container of it that nothing was done to yet, and both plugins.
struct Scene {
    node: Node,
    container: Netns,
    ours: Installed,
    theirs: PathBuf,
}

impl Scene {
    fn set() -> Result<Self> {
        let node = Node::unloaded()?;
        let container = node.netns().sibling("a")?;
        container.ip(&["link set lo down".to_owned()])?;
        Ok(Self {
            node,
            container,
            ours: Name::new("loopback", Program::Underpass).install()?,
            theirs: reference("loopback")?,
        })
    }

    fn at(&self, verb: &str, program: &Path, conf: &Value, netns: &str) -> Result<Answer> {
        let call = Call::new(verb)
            .attachment("a", netns, "eth0")
            .stdin(conf.to_string().as_bytes());
        run(&self.node, program, &call)
    }

    fn call(&self, verb: &str, program: &Path, conf: &Value) -> Result<Answer> {
        let path = self.container.path().display().to_string();
        self.at(verb, program, conf, &path)
    }

    fn ours(&self, verb: &str, conf: &Value) -> Result<Answer> {
        self.call(verb, &self.ours.path, conf)
    }

    fn is_up(&self) -> Result<bool> {
        let links = self.container.ip_json(&["link", "show", "lo"])?;
        let flags = links[0]["flags"].as_array().context("flags")?;
        Ok(flags.contains(&json!("UP")))
    }
}

fn conf(version: &str) -> Value {
    json!({ "cniVersion": version, "name": "cni-loopback", "type": "loopback" })
}

/// What Debian's reference says, in the words of that version. It answers in the words of 1.0.0 whatever it is asked.
fn in_version(version: &str, theirs: &Value) -> Value {
    let mut ips = theirs["ips"].clone();
    if version < "0.3.0" {
        return json!({ "ip4": { "ip": ips[0]["address"] }, "ip6": { "ip": ips[1]["address"] } });
    }
    for (ip, number) in ips.as_array_mut().into_iter().flatten().zip(["4", "6"]) {
        if version < "1.0.0" {
            ip["version"] = json!(number);
        }
    }
    json!({ "interfaces": theirs["interfaces"], "ips": ips })
}

#[rstest]
fn every_version(
    #[values("0.1.0", "0.2.0", "0.3.0", "0.3.1", "0.4.0", "1.0.0", "1.1.0")] version: &str,
) -> Result<()> {
    needs_root!();
    let scene = Scene::set()?;
    // The newest that Debian's speaks.
    let spoken = if version == "1.1.0" { "1.0.0" } else { version };
    let theirs = scene.call("ADD", &scene.theirs, &conf(spoken))?.result()?;
    scene.call("DEL", &scene.theirs, &conf(spoken))?.silence()?;
    ensure!(!scene.is_up()?, "the reference sets it down");

    let conf = conf(version);
    let result = scene.ours("ADD", &conf)?.result()?;
    schema::validate(version, &result)?;
    ensure!(scene.is_up()?);
    for (key, value) in in_version(version, &theirs)
        .as_object()
        .into_iter()
        .flatten()
    {
        ensure!(
            result[key] == *value,
            "{result} instead of {value} of {theirs}"
        );
    }
    for ip in ["127.0.0.1", "::1"] {
        ping::ping(&scene.container, ip.parse()?)?;
        ensure!(result.to_string().contains(&format!("\"{ip}/")), "{result}");
    }
    let again = scene.ours("ADD", &conf)?.result()?;
    ensure!(again == result, "the second ADD answers {again}");

    let check = scene.ours("CHECK", &conf)?;
    if version < "0.4.0" {
        ensure!(check.error()?.code == 1);
    } else {
        check.silence()?;
    }
    scene.ours("DEL", &conf)?.silence()?;
    ensure!(!scene.is_up()?);
    if version >= "0.4.0" {
        let error = scene.ours("CHECK", &conf)?.error()?;
        ensure!(
            error.msg == "loopback interface lo is down" && error.code == 100,
            "{error}"
        );
        ensure!(error.details.contains("put it back"), "{error}");
    }
    scene.ours("DEL", &conf)?.silence()
}

/// In a chain it hands on what it was given, as the reference does.
#[rstest]
#[case("0.2.0", json!({ "ip4": { "ip": "10.0.0.2/24" } }))]
#[case("0.4.0", json!({
    "interfaces": [{ "name": "eth0", "sandbox": "/run/netns/a" }],
    "ips": [{ "version": "4", "interface": 0, "address": "10.0.0.2/24" }],
}))]
#[case("1.0.0", json!({
    "interfaces": [{ "name": "eth0", "sandbox": "/run/netns/a" }],
    "ips": [{ "interface": 0, "address": "fd00::2/64" }],
}))]
fn a_result_is_passed_on(#[case] version: &str, #[case] facts: Value) -> Result<()> {
    needs_root!();
    let scene = Scene::set()?;
    let mut conf = conf(version);
    conf["prevResult"] = facts.clone();
    conf["prevResult"]["cniVersion"] = json!(version);
    let theirs = scene.call("ADD", &scene.theirs, &conf)?.result()?;
    scene.call("DEL", &scene.theirs, &conf)?.silence()?;
    let result = scene.ours("ADD", &conf)?.result()?;
    for key in facts.as_object().into_iter().flatten().map(|(key, _)| key) {
        ensure!(result[key] == theirs[key], "{result} instead of {theirs}");
    }
    ensure!(scene.is_up()?);
    scene.ours("DEL", &conf)?.silence()
}

#[test]
fn a_container_without_ipv6() -> Result<()> {
    needs_root!();
    let scene = Scene::set()?;
    scene
        .container
        .set_sysctl("net/ipv6/conf/lo/disable_ipv6", "1")?;
    let conf = conf("1.0.0");
    let theirs = scene.call("ADD", &scene.theirs, &conf)?.result()?;
    scene.call("DEL", &scene.theirs, &conf)?.silence()?;
    let result = scene.ours("ADD", &conf)?.result()?;
    ensure!(result["ips"] == theirs["ips"], "{result} and {theirs}");
    ensure!(
        result["ips"].as_array().map(Vec::len) == Some(1),
        "{result}"
    );
    Ok(())
}

#[test]
fn an_address_that_is_no_loopback_address_is_an_error() -> Result<()> {
    needs_root!();
    let scene = Scene::set()?;
    scene
        .container
        .ip(&["address add 10.9.9.9/32 dev lo".to_owned()])?;
    for program in [&scene.theirs, &scene.ours.path] {
        let error = scene.call("ADD", program, &conf("1.0.0"))?.error()?;
        ensure!(
            error.msg.contains("non-loopback address \"10.9.9.9\""),
            "{error}"
        );
    }
    Ok(())
}

/// DEL succeeds where there is nothing left to do; the others say what is missing.
#[test]
fn a_container_that_is_gone() -> Result<()> {
    needs_root!();
    let scene = Scene::set()?;
    let conf = conf("1.0.0");
    let file = tempfile::NamedTempFile::new()?;
    let left = file.path().display().to_string();
    for path in ["", "/run/netns/gone", &left] {
        scene.at("DEL", &scene.ours.path, &conf, path)?.silence()?;
    }
    for verb in ["ADD", "CHECK"] {
        let error = scene
            .at(verb, &scene.ours.path, &conf, "/run/netns/gone")?
            .error()?;
        ensure!(
            error.code == 8 && error.msg.contains("/run/netns/gone"),
            "{error}"
        );
    }
    Ok(())
}

#[test]
fn the_verbs_about_the_network_find_nothing_to_do() -> Result<()> {
    needs_root!();
    let scene = Scene::set()?;
    let mut conf = conf("1.1.0");
    scene.ours("STATUS", &conf)?.silence()?;
    conf["cni.dev/valid-attachments"] = json!([]);
    scene.ours("GC", &conf)?.silence()?;
    ensure!(!scene.is_up()?);
    Ok(())
}

/// The process at the path is gone, and the number is that of a process of the node now.
#[test]
fn the_node_s_own_loopback_stays_up() -> Result<()> {
    needs_root!();
    let scene = Scene::set()?;
    let node = scene.node.netns();
    node.ip(&["link set lo up".to_owned()])?;
    let own = "/proc/self/ns/net";
    scene
        .at("DEL", &scene.ours.path, &conf("1.0.0"), own)?
        .silence()?;
    let links = node.ip_json(&["link", "show", "lo"])?;
    let flags = links[0]["flags"].as_array().context("flags")?;
    ensure!(flags.contains(&json!("UP")), "{links}");
    Ok(())
}
