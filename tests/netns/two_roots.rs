//! Two networks of one node with a `bpfRoot` each: an uplink has room for the programs of one.

use std::fs;

use rstest::rstest;
use serde_json::{Value, json};
use underpass_tests::{
    leak::Traces,
    prelude::*,
    runtime::{Call, CniError, Conf},
};

const PORT: u16 = 443;
const SECOND: &str = "/sys/fs/bpf/of/another/second";

/// A network like the lab's, with other addresses and pins of its own.
fn second(lab: &Lab) -> Conf {
    let ranges = json!([[{ "subnet": "10.77.0.0/24" }], [{ "subnet": "fd00:77::/64" }]]);
    let conf = lab.conf().with("name", "second").with("bpfRoot", SECOND);
    conf.with_ipam("ranges", ranges)
}

fn refused(lab: &Lab, conf: &Conf) -> Result<CniError> {
    let netns = lab.node.netns().sibling("refused")?;
    let path = netns.path().display().to_string();
    let add = Call::new("ADD").attachment("refused", &path, Pod::IFNAME);
    let error = add.conf(conf).run(&lab.node)?.error()?;
    netns.unlink()?;
    Ok(error)
}

fn is_claimed(error: &CniError, code: u64) -> Result<()> {
    let said = "eth0 has the programs of another bpfRoot";
    ensure!(error.code == code && error.msg.contains(said), "{error}");
    Ok(())
}

fn expect_masquerade(lab: &Lab, pod: &Pod, family: Family) -> Result<()> {
    let remote = family.remote_at(PORT);
    let _server = tcp::Server::start(lab.world.netns(), remote)?;
    let seen = tcp::visit(pod.netns(), remote)?;
    ensure!(seen == family.node(), "seen {seen}");
    Ok(())
}

fn left_behind(lab: &Lab, root: &str) -> Result<Vec<Value>> {
    let said = lab
        .node
        .underpass(&["--bpf-root", root, "status", "--json"])?;
    let status: Value = serde_json::from_str(&said)?;
    Ok(status["leftBehind"].as_array().cloned().unwrap_or_default())
}

/// Who comes second takes nothing from the first, whose containers would leave with their own addresses.
#[rstest]
fn the_second_takes_no_uplink_from_the_first(#[values(V4, V6)] family: Family) -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    let status = || Call::new("STATUS").conf(&second(&lab)).run(&lab.node);
    status()?.silence()?;
    let first = lab.pod("a")?;
    is_claimed(&status()?.error()?, 50)?;
    lab.node.underpass(&["--bpf-root", SECOND, "load"])?;
    is_claimed(&status()?.error()?, 50)?;
    let before = Traces::of(&lab.node)?;
    let error = refused(&lab, &second(&lab))?;
    let root = lab.node.bpf_root().display().to_string();
    is_claimed(&error, 5)?;
    for word in [&root, "1 container is attached", "unload"] {
        ensure!(error.msg.contains(word), "{word}: {error}");
    }
    before.expect_same(&lab.node)?;
    expect_masquerade(&lab, &first, family)?;
    first.call_with_result("CHECK").run(&lab.node)?.silence()?;
    // They are the other's, and no orphans.
    ensure!(left_behind(&lab, SECOND)? == [Value::Null; 0]);
    // When it has none the second is served, and then the first is not.
    first.del()?;
    status()?.silence()?;
    let pod = lab.pod_with("b", &second(&lab))?;
    expect_masquerade(&lab, &pod, family)?;
    status()?.silence()?;
    let error = refused(&lab, &lab.conf())?;
    ensure!(error.code == 5 && error.msg.contains(SECOND), "{error}");
    ensure!(left_behind(&lab, &root)? == [Value::Null; 0]);
    pod.del()
}

/// Programs that nobody can find any more make room, whoever they are attached to: otherwise no container ever came again.
#[rstest]
fn what_is_left_of_a_wiped_one_makes_room(#[values(V4, V6)] family: Family) -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    let _first = lab.pod("a")?;
    lab.node
        .netns()
        .run(|| fs::remove_dir_all(lab.node.bpf_root()))?;
    let pod = lab.pod_with("b", &second(&lab))?;
    expect_masquerade(&lab, &pod, family)?;
    ensure!(left_behind(&lab, SECOND)?.len() == 1);
    pod.del()
}

/// Of attachments whose devices are gone nobody is harmed.
#[test]
fn the_dead_hold_no_uplink() -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    let lost = lab.pod("lost")?;
    lost.netns().delete_link(Pod::IFNAME)?;
    lost.abandon();
    let pod = lab.pod_with("b", &second(&lab))?;
    expect_masquerade(&lab, &pod, V4)?;
    pod.del()
}
