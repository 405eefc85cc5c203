//! Faults of the kernel. It is this machine's, so the doctor is shown another one: by what it reads in `/proc`, and by what the kernel says to
//! processes that can't bear a new one.

use std::process::Command;

use underpass_tests::{node::plugin, prelude::*};

use super::{ask, ask_as, lab, put};

/// Where the switch of the compiler for BPF is. The kernel has it in its first network namespace alone.
const CORE: &str = "/proc/sys/net/core";
/// What nodes of these tests see there instead.
const SHOWN: &str = "/run/core";

#[test]
fn a_kernel_that_interprets_programs_is_found() -> Result<()> {
    needs_root!();
    let lab = lab()?;
    let switch = |value: &str| put(&lab, format!("{SHOWN}/bpf_jit_enable"), value);
    switch("0\n")?;
    let mut mount = Command::new("mount");
    mount.args(["--bind", SHOWN, CORE]);
    lab.node.netns().expect(&mut mount, &[])?;
    let said = ask(&lab)?;
    said.expect(&["jit-off"])?;
    said.expect_words(&["sysctl -w net.core.bpf_jit_enable=1"])?;
    ensure!(said.first("severity") == "warning", "{said:#?}");
    // On, and on with traces for who debugs the compiler.
    for on in ["1\n", "2\n"] {
        switch(on)?;
        ask(&lab)?.expect(&[])?;
    }
    Ok(())
}

/// What an older kernel lacks is a hint, and that it is too old an error. (The personality `UNAME26` has the kernel call itself 2.6.)
#[test]
fn a_kernel_that_is_too_old_is_found() -> Result<()> {
    const LACKING: &str = "long bpf_redirect";
    needs_root!();
    let lab = lab()?;
    let mut doctor = Command::new("setarch");
    doctor.arg("--uname-2.6").arg(plugin());
    let said = ask_as(lab.node.netns(), lab.node.bpf_root(), doctor)?;
    said.expect(&["kernel-too-old"])?;
    said.expect_words(&["Linux 2.6.", "every ADD fails", "boot Linux 5.10 or newer"])?;
    let hints = said.report["hints"].as_array().into_iter().flatten();
    let mut lacking = hints.filter(|hint| hint["id"] == "kernel-feature");
    let is_named = lacking.any(|hint| hint["what"].as_str().unwrap_or_default().contains(LACKING));
    ensure!(is_named, "{said:#?}");
    ask(&lab)?.expect(&[])
}
