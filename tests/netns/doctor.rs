//! `underpass doctor` on a node with one fault each: it names the fault and what mends it; and says nothing of a node without.

mod kernel;
mod networks;
mod packets;
mod pins;
mod routes;

use std::{
    fs,
    os::unix::process::CommandExt as _,
    path::{Path, PathBuf},
    process::Command,
};

use rstest::rstest;
use serde_json::{Value, json};
use underpass_tests::{another_build, netns::Netns, node::plugin, prelude::*, wire::Wire};

/// Where the network of a test is, in the node's own `/run`.
const NET_DIR: &str = "/run/net.d";
/// Where the files of the host are for the doctor, instead of this machine's.
const HOST: &str = "/run/host";

/// What the doctor said, and whether it found an error.
#[derive(Debug)]
struct Said {
    failed: bool,
    report: Value,
}

impl Said {
    fn ids(&self, list: &str) -> Vec<&str> {
        let found = self.report[list].as_array().into_iter().flatten();
        found.filter_map(|found| found["id"].as_str()).collect()
    }

    /// Fails unless these are all findings, each with what mends it, and the exit code is right.
    fn expect(&self, ids: &[&str]) -> Result<()> {
        let mut found = self.ids("findings");
        found.dedup();
        ensure!(found == ids, "{ids:?}: {:#}", self.report);
        let findings = self.report["findings"].as_array().into_iter().flatten();
        let mut errors = 0;
        for finding in findings {
            let is_said = |key: &str| finding[key].as_str().is_some_and(|text| !text.is_empty());
            ensure!(is_said("what") && is_said("fix"), "{finding:#}");
            errors += usize::from(finding["severity"] == "error");
        }
        ensure!(self.failed == (errors > 0), "{self:#?}");
        ensure!(self.ids("notChecked").is_empty(), "{:#}", self.report);
        Ok(())
    }

    /// A text of the first finding.
    fn first(&self, key: &str) -> &str {
        self.report["findings"][0][key].as_str().unwrap_or_default()
    }

    /// Fails unless the first finding says all that.
    fn expect_words(&self, words: &[&str]) -> Result<()> {
        let said = format!("{} {}", self.first("what"), self.first("fix"));
        for word in words {
            ensure!(said.contains(word), "{word}: {:#}", self.report);
        }
        Ok(())
    }
}

/// Runs the doctor of an executable.
fn ask_by(lab: &Lab, program: &Path) -> Result<Said> {
    ask_as(lab.node.netns(), lab.node.bpf_root(), Command::new(program))
}

/// Runs the doctor that a command starts, about these pins.
fn ask_as(netns: &Netns, bpf_root: &Path, mut doctor: Command) -> Result<Said> {
    doctor.env_clear().args(["doctor", "--json"]);
    doctor.args(["--net-dir", NET_DIR, "--host-root", HOST]);
    doctor.arg("--bpf-root").arg(bpf_root);
    let output = netns.output(&mut doctor, &[])?;
    let report = serde_json::from_slice(&output.stdout).with_context(|| {
        format!(
            "the doctor said {}",
            String::from_utf8_lossy(&output.stderr)
        )
    })?;
    Ok(Said {
        failed: !output.status.success(),
        report,
    })
}

fn ask(lab: &Lab) -> Result<Said> {
    ask_by(lab, plugin())
}

/// Puts a file into the node's `/run`.
fn put(lab: &Lab, path: impl AsRef<Path>, text: &str) -> Result<()> {
    let path = path.as_ref();
    lab.node.netns().run(|| {
        fs::create_dir_all(path.parent().context("it is in a folder")?)?;
        fs::write(path, text).with_context(|| format!("write {}", path.display()))
    })
}

fn network(name: &str) -> PathBuf {
    Path::new(NET_DIR).join(name)
}

/// The file of the default network, as an operator has it.
fn conflist(lab: &Lab) -> String {
    let plugin = lab.conf().json().clone();
    json!({ "cniVersion": "1.0.0", "name": "lab", "plugins": [plugin] }).to_string()
}

/// A node whose folder of networks has the one that its containers are in, and whose programs were loaded beside the firewall.
fn lab() -> Result<Lab> {
    let lab = with_network(Lab::new()?)?;
    lab.node.underpass(&["load"])?;
    Ok(lab)
}

/// The same without a firewall, for those who bring their own.
fn open_lab() -> Result<Lab> {
    let lab = with_network(Lab::open()?)?;
    lab.node.underpass(&["load"])?;
    Ok(lab)
}

fn with_network(lab: Lab) -> Result<Lab> {
    put(&lab, network("10-underpass.conflist"), &conflist(&lab))?;
    Ok(lab)
}

#[test]
fn a_clean_node_has_no_findings() -> Result<()> {
    needs_root!();
    let lab = lab()?;
    // Before the first container, with some, and after the last.
    ask(&lab)?.expect(&[])?;
    let pods = [lab.pod("a")?, lab.pod("b")?];
    let said = ask(&lab)?;
    said.expect(&[])?;
    // A strict firewall's connection tracking could be better, which is no finding.
    ensure!(said.ids("hints").contains(&"tcp-strict"), "{said:#?}");
    let text = lab
        .node
        .underpass(&["doctor", "--net-dir", NET_DIR, "--host-root", HOST])?;
    ensure!(text.starts_with("nothing to complain about\n"), "{text}");
    ensure!(text.contains("Could be better"), "{text}");
    pods.into_iter().try_for_each(Pod::del)?;
    ask(&lab)?.expect(&[])
}

/// With devices of every kind that the programs sit on: `lo` has one once a host port is mapped.
#[rstest]
fn so_has_one_with_another_uplink(
    #[values(Wire::Ethernet, Wire::Vlan, Wire::WireGuard, Wire::Vrf)] wire: Wire,
) -> Result<()> {
    needs_root!();
    if wire.is_missing()? {
        return Ok(());
    }
    let lab = with_network(Lab::over(wire, 1400)?)?;
    let pod = lab.pod_with("a", &lab.conf().with_host_port(8080, 80))?;
    ask(&lab)?.expect(&[])?;
    pod.del()
}

#[test]
fn a_node_before_its_first_add_has_no_findings() -> Result<()> {
    needs_root!();
    let lab = with_network(Lab::unloaded()?)?;
    ask(&lab)?.expect(&[])
}

#[rstest]
#[case::uplink(true, "underpass apply (the next ADD or GC")]
#[case::container(false, "recreate the container")]
fn a_program_that_was_taken_off_is_found(#[case] uplink: bool, #[case] fix: &str) -> Result<()> {
    needs_root!();
    let lab = lab()?;
    let pod = lab.pod_with("a", &lab.conf().with("device", "veth"))?;
    let device = if uplink {
        Node::UPLINK
    } else {
        pod.host_veth()
    };
    lab.node.netns().take_filters_off(device, "egress")?;
    let said = ask(&lab)?;
    said.expect(&["program-missing"])?;
    said.expect_words(&[device, fix])
}

#[test]
fn containers_that_no_map_knows_are_found() -> Result<()> {
    needs_root!();
    let lab = lab()?;
    let pod = lab.pod("a")?;
    lab.node
        .netns()
        .run(|| fs::remove_dir_all(lab.node.bpf_root()))?;
    let said = ask(&lab)?;
    said.expect(&["left-behind"])?;
    said.expect_words(&[pod.host_veth()])?;
    let _new = lab.pod("b")?;
    ask(&lab)?.expect(&["left-behind"])?;
    drop(pod);
    ask(&lab)?.expect(&[])
}

#[test]
fn a_root_that_is_no_bpffs_is_found() -> Result<()> {
    needs_root!();
    let lab = lab()?;
    let mut doctor = Command::new(plugin());
    doctor
        .env_clear()
        .args(["doctor", "--net-dir", NET_DIR, "--host-root", HOST]);
    doctor.args(["--bpf-root", "/run/no-bpffs"]);
    let output = lab.node.netns().output(&mut doctor, &[])?;
    let text = String::from_utf8_lossy(&output.stdout);
    ensure!(output.status.code() == Some(1), "{text}");
    ensure!(
        text.contains("error: no-bpffs: ")
            && text.contains("fix: mkdir -p /run/no-bpffs && mount -t bpf bpf /run/no-bpffs"),
        "{text}"
    );
    let said = String::from_utf8_lossy(&output.stderr);
    ensure!(said.contains("1 finding is an error"), "{said}");
    Ok(())
}

/// To who may not look, a broken node would look as a clean one does.
#[test]
fn who_may_not_look_is_told_so() -> Result<()> {
    needs_root!();
    let lab = lab()?;
    let mut doctor = Command::new(plugin());
    doctor.env_clear().arg("doctor").uid(65_534).gid(65_534);
    let output = lab.node.netns().output(&mut doctor, &[])?;
    let said = String::from_utf8_lossy(&output.stderr);
    ensure!(
        output.status.code() == Some(1)
            && output.stdout.is_empty()
            && said.contains("run it as root"),
        "{output:?}"
    );
    Ok(())
}

#[test]
fn pins_of_others_are_found() -> Result<()> {
    needs_root!();
    let lab = with_network(Lab::unloaded()?)?;
    let _pod = lab.pod("a")?;
    ask(&lab)?.expect(&[])?;
    let build = another_build::make(&lab.node)?;
    let said = ask_by(&lab, &build)?;
    said.expect(&["other-build"])?;
    said.expect_words(&["underpass upgrade"])?;
    lab.node.underpass_of(&build, &["upgrade"])?;
    ask_by(&lab, &build)?.expect(&[])?;
    lab.node.underpass(&["upgrade"])?;
    let older = lab.node.bpf_root().join("v1");
    lab.node.netns().run(|| {
        fs::create_dir_all(older.join("maps"))?;
        fs::create_dir_all(older.join("programs"))
    })?;
    let said = ask(&lab)?;
    said.expect(&["other-layout"])?;
    said.expect_words(&["layout 1", "underpass unload"])
}

/// What somebody changes of connection tracking counts with the next load, and until then it is said.
#[test]
fn rules_that_are_outdated_are_found() -> Result<()> {
    needs_root!();
    let lab = lab()?;
    let _pod = lab.pod("a")?;
    lab.firewall.set_liberal(true)?;
    ask(&lab)?.expect(&["stack-outdated"])?;
    lab.node.underpass(&["load"])?;
    let said = ask(&lab)?;
    said.expect(&[])?;
    ensure!(!said.ids("hints").contains(&"tcp-strict"), "{said:#?}");
    Ok(())
}

#[rstest]
fn policies_of_ipsec_are_found(#[values(V4, V6)] family: Family) -> Result<()> {
    needs_root!();
    let lab = lab()?;
    let node = lab.node.netns();
    let remote = family.remote();
    let policy = format!("xfrm policy add dir out dst {remote} action block");
    if node.ip(&[policy]).is_err() {
        anstream::eprintln!("not on this kernel: policies of IPsec");
        return Ok(());
    }
    let pod = lab.pod("a")?;
    ask(&lab)?.expect(&["ipsec-policies"])?;
    node.ip(&["xfrm policy flush".to_owned()])?;
    ask(&lab)?.expect(&["stack-outdated"])?;
    lab.node.underpass(&["load"])?;
    ask(&lab)?.expect(&[])?;
    pod.del()
}
