//! GC: frees what nobody knows any more, of its own network, past errors; and nothing where nobody said what is valid.

use rstest::rstest;
use serde_json::{Value, json};
use underpass_tests::{
    leak::Traces,
    prelude::*,
    runtime::{Call, Conf},
};

use crate::delegated::Witness;

const KEY: &str = "cni.dev/valid-attachments";
const OLD_KEY: &str = "cni.dev/attachments";

/// A second network of the same node.
fn elsewhere(lab: &Lab) -> Conf {
    let ranges = json!([[{ "subnet": "10.99.0.0/24" }], [{ "subnet": "fd00:99::/64" }]]);
    lab.conf()
        .with("name", "elsewhere")
        .with_ipam("ranges", ranges)
}

fn valid(pods: &[&Pod]) -> Value {
    pods.iter()
        .map(|pod| json!({ "containerID": pod.name(), "ifname": Pod::IFNAME }))
        .collect()
}

fn gc(lab: &Lab, keys: &[(&str, Value)]) -> Result<underpass_tests::runtime::Reply> {
    let conf = keys.iter().fold(lab.conf(), |conf, (key, value)| {
        conf.with(key, value.clone())
    });
    Call::new("GC").conf(&conf).run(&lab.node)
}

/// Sees that a pod is whole, and reaches the world.
fn lives_on(lab: &Lab, pod: &Pod) -> Result<()> {
    pod.call_with_result("CHECK").run(&lab.node)?.silence()?;
    for family in Family::BOTH {
        ping::ping(pod.netns(), family.remote())?;
    }
    Ok(())
}

#[rstest]
#[case(&[])]
#[case(&[("CNI.DEV/VALID-ATTACHMENTS", json!([]))])]
#[case(&[(KEY, json!("all"))])]
#[case(&[(KEY, json!([{ "containerID": 7 }]))])]
fn nothing_is_touched_where_nobody_said_what_is_valid(
    #[case] keys: &[(&str, Value)],
) -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    let pod = lab.pod("a")?;
    let before = Traces::of(&lab.node)?;
    let error = gc(&lab, keys)?.error()?;
    ensure!(
        [6, 7].contains(&error.code) && error.msg.contains("cni.dev/valid-attachments"),
        "{error}"
    );
    before.expect_same(&lab.node)?;
    pod.call_with_result("CHECK").run(&lab.node)?.silence()
}

#[rstest]
#[case(KEY, json!([]))]
#[case(OLD_KEY, json!([]))]
fn an_empty_list_clears_the_network_and_no_other(
    #[case] key: &str,
    #[case] value: Value,
) -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    let other = lab.pod_with("other", &elsewhere(&lab))?;
    let before = Traces::of(&lab.node)?;
    for name in ["a", "b"] {
        lab.pod(name)?.abandon();
    }
    gc(&lab, &[(key, value)])?.silence()?;
    before.expect_same(&lab.node)?;
    lives_on(&lab, &other)
}

/// CRI-O says so of a network whose containers Multus has attached, and a runtime in Go that has none.
#[test]
fn where_it_is_not_said_what_is_valid_only_the_dead_go() -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    let living = lab.pod("living")?;
    let before = Traces::of(&lab.node)?;
    let dead = lab.pod("dead")?;
    lab.node
        .netns()
        .ip(&[format!("link del {}", dead.host_veth())])?;
    dead.abandon();
    gc(&lab, &[(KEY, Value::Null)])?.silence()?;
    before.expect_same(&lab.node)?;
    lives_on(&lab, &living)
}

#[test]
fn the_key_of_the_specification_counts_before_the_old_one() -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    let kept = lab.pod("kept")?;
    let before = Traces::of(&lab.node)?;
    let lost = lab.pod("lost")?;
    // Runtimes send both with one value; where they differ, the newer one is meant.
    gc(&lab, &[(OLD_KEY, valid(&[&lost])), (KEY, valid(&[&kept]))])?.silence()?;
    lost.abandon();
    before.expect_same(&lab.node)?;
    kept.call_with_result("CHECK").run(&lab.node)?.silence()
}

#[test]
fn every_kind_of_leftover_is_found() -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    let kept = lab.pod("kept")?;
    let before = Traces::of(&lab.node)?;
    // A container whose namespace is gone, with its device.
    let gone = lab.pod("gone")?;
    gone.netns().delete_link("eth0")?;
    gone.abandon();
    // A container whose namespace has lost its name.
    let unlinked = lab.pod("unlinked")?;
    unlinked.netns().unlink()?;
    // A container of which the lease is left, and nothing else.
    let freed = lab.pod("freed")?;
    let lease = lab
        .node
        .data_dir()
        .join("lab")
        .join(freed.ip(V4).to_string());
    freed.del()?;
    lab.node
        .netns()
        .run(|| std::fs::write(&lease, "freed\r\neth0"))?;
    // Another interface of the container that is kept.
    lab.node
        .netns()
        .run(|| std::fs::write(lab.node.data_dir().join("lab/10.88.0.99"), "kept\r\neth1"))?;
    gc(&lab, &[(KEY, valid(&[&kept]))])?.silence()?;
    unlinked.abandon();
    before.expect_same(&lab.node)?;
    gc(&lab, &[(KEY, valid(&[&kept]))])?.silence()?;
    before.expect_same(&lab.node)
}

#[test]
fn it_goes_on_past_errors_and_reports_them() -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    lab.pod("warm")?.del()?;
    let before = Traces::of(&lab.node)?;
    let witness = Witness::new()?;
    let netns = lab.node.netns().sibling("a")?;
    let conf = Witness::conf(&lab);
    witness
        .call("ADD", &netns, &conf)
        .run(&lab.node)?
        .result()?;
    witness.calls()?;
    witness.fails("GC", 5, "the database is away")?;
    let conf = conf.with(KEY, json!([]));
    let error = witness.call("GC", &netns, &conf).run(&lab.node)?.error()?;
    ensure!(
        error.to_string().contains("the database is away"),
        "{error}"
    );
    ensure!(witness.calls()? == ["GC a eth0"]);
    ensure!(
        witness.input("GC")?[KEY] == json!([]),
        "the list is handed on"
    );
    // The device and its entries are gone all the same.
    before.expect_same(&lab.node)
}

#[test]
fn a_broken_range_keeps_nobody_from_cleaning_up() -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    lab.pod("warm")?.del()?;
    let before = Traces::of(&lab.node)?;
    let lost = lab.pod("lost")?;
    lost.abandon();
    gc(&lab, &[(KEY, json!([])), ("mtu", json!(0))])?.silence()?;
    before.expect_same(&lab.node)?;
    let lost = lab.pod("lost2")?;
    let conf = lab
        .conf()
        .with_ipam("ranges", json!([[{ "subnet": "10.88.0.7/31" }]]))
        .with(KEY, json!([]));
    Call::new("GC").conf(&conf).run(&lab.node)?.silence()?;
    lost.abandon();
    before.expect_same(&lab.node)
}
