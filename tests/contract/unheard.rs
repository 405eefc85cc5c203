//! The result of an ADD that nobody hears: the pipe of the runtime is closed, or the disk of its file is full. Then the ADD is
//! taken back.

use std::{
    fs::File,
    io::{Write as _, pipe},
    process::{Command, Output, Stdio},
};

use rstest::rstest;
use serde_json::json;
use underpass_tests::{
    leak::Traces,
    netns::Netns,
    prelude::*,
    runtime::{Call, Conf},
};

use crate::plugins::{Name, Program};

/// What stands for the runtime's end.
#[derive(Clone, Copy, Debug)]
enum Ear {
    ClosedPipe,
    FullDisk,
}

impl Ear {
    fn open(self) -> Result<Stdio> {
        Ok(match self {
            Self::ClosedPipe => {
                let (reader, writer) = pipe().context("make a pipe")?;
                drop(reader);
                writer.into()
            }
            Self::FullDisk => File::options().write(true).open("/dev/full")?.into(),
        })
    }
}

/// Makes a call that answers to nobody.
fn tell(lab: &Lab, call: &Call, plugin: Option<Name>, ear: Ear) -> Result<Output> {
    let installed = plugin.map(Name::install).transpose()?;
    let plain = call.command();
    let mut command = match &installed {
        Some(installed) => Command::new(&installed.path),
        None => Command::new(plain.get_program()),
    };
    let vars = plain.get_envs();
    command
        .env_clear()
        .envs(vars.filter_map(|(name, value)| Some((name, value?))))
        .stdin(Stdio::piped())
        .stdout(ear.open()?)
        .stderr(Stdio::piped());
    let output = lab.node.netns().run(|| -> std::io::Result<Output> {
        let mut child = command.spawn()?;
        if let Some(mut stdin) = child.stdin.take() {
            stdin.write_all(call.input())?;
        }
        child.wait_with_output()
    })?;
    let said = String::from_utf8_lossy(&output.stderr);
    ensure!(!output.status.success(), "it succeeded: {said}");
    let words = "what the ADD made is taken back";
    ensure!(said.contains(words), "{said}");
    Ok(output)
}

fn call(netns: &Netns, conf: &Conf) -> Call {
    let path = netns.path().display().to_string();
    let call = Call::new("ADD").attachment(netns.name(), &path, Pod::IFNAME);
    call.conf(conf)
}

#[rstest]
fn an_interface_goes(
    #[values(Ear::ClosedPipe, Ear::FullDisk)] ear: Ear,
    #[values("underpass", "ptp")] name: &'static str,
) -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    let conf = lab.conf().with_host_port(8080, 80);
    lab.pod_with("warm", &conf)?.del()?;
    let before = Traces::of(&lab.node)?;
    let netns = lab.node.netns().sibling("a")?;
    let plugin = Name::new(name, Program::Underpass);
    tell(&lab, &call(&netns, &conf), Some(plugin), ear)?;
    before.expect_same(&lab.node)
}

/// In a chain the interface is another plugin's.
#[rstest]
fn host_ports_go_and_the_interface_stays(
    #[values(Ear::ClosedPipe, Ear::FullDisk)] ear: Ear,
    #[values("underpass", "portmap")] name: &'static str,
) -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    // What is loaded for host ports stays.
    let first = lab.conf().with_host_port(8080, 80);
    lab.pod_with("first", &first)?.del()?;
    let pod = lab.pod("a")?;
    let conf = lab.conf().with("ipMasq", false).with("ipam", json!({}));
    let conf = conf.with("prevResult", pod.result().clone());
    let conf = conf.with_host_port(8080, 80);
    let before = Traces::of(&lab.node)?;
    let plugin = Name::new(name, Program::Underpass);
    tell(&lab, &call(pod.netns(), &conf), Some(plugin), ear)?;
    before.expect_same(&lab.node)?;
    for family in Family::BOTH {
        ping::ping(pod.netns(), family.remote())?;
    }
    pod.call_with_result("CHECK").run(&lab.node)?.silence()?;
    pod.del()
}

/// An allocator alone frees what this ADD took, and nothing else that the container has.
#[rstest]
fn addresses_go_back(
    #[values(Ear::ClosedPipe, Ear::FullDisk)] ear: Ear,
    #[values(Program::Underpass, Program::Ipam)] program: Program,
) -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    let pod = lab.pod("a")?;
    let before = Traces::of(&lab.node)?;
    let ranges = json!([[{ "subnet": "10.89.0.0/24" }], [{ "subnet": "fd00:89::/64" }]]);
    let conf = lab.conf().with_ipam("ranges", ranges);
    let plugin = Name::new("host-local", program);
    tell(&lab, &call(pod.netns(), &conf), Some(plugin), ear)?;
    before.expect_same(&lab.node)?;
    pod.call_with_result("CHECK").run(&lab.node)?.silence()?;
    pod.del()
}
