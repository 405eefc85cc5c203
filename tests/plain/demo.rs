//! The demo where it can't run.

use std::process::Command;

use anyhow::{Result, ensure};

#[test]
fn it_says_what_is_missing() -> Result<()> {
    let output = Command::new(env!("CARGO_BIN_EXE_demo"))
        .env("UNDERPASS_BIN", "/nowhere/underpass")
        .output()?;
    let said = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.code() == Some(1), "{}: {said}", output.status);
    ensure!(said.contains("can't run here"), "{said}");
    let ways_out = [
        "cargo xtask build",
        "sudo",
        "--privileged",
        "xtask setup",
        "no eBPF",
    ];
    ensure!(ways_out.iter().any(|way| said.contains(way)), "{said}");
    ensure!(!said.contains('\u{1b}'), "no colours in a pipe: {said}");
    Ok(())
}
