//! The folder of networks of a throwaway node, for commands that read it as runtimes do.

use std::{
    fs,
    path::Path,
    process::{Command, Output},
};

use nix::mount::{MsFlags, mount};
use rstest::rstest;
use serde_json::json;
use underpass_tests::{node::plugin, prelude::*, runtime::Conf};

/// Where it is: in the node's own `/run`.
pub(crate) const NET_DIR: &str = "/run/cni/net.d";

/// Puts a file into the folder, with any text.
pub(crate) fn write(node: &Node, file: &str, text: &str) -> Result<()> {
    node.netns()
        .run(|| {
            fs::create_dir_all(NET_DIR)?;
            fs::write(Path::new(NET_DIR).join(file), text)
        })
        .with_context(|| format!("write {file}"))
}

/// Puts a network of one plugin into the folder, as a list of plugins.
pub(crate) fn put(node: &Node, file: &str, conf: &Conf) -> Result<()> {
    let mut plugin = conf.json().clone();
    let name = plugin["name"].take();
    let list = json!({ "cniVersion": "1.1.0", "name": name, "plugins": [plugin] });
    write(node, file, &list.to_string())
}

/// Who mistypes the folder hears of it. The usual one may be missing before the first network.
#[rstest]
fn one_that_is_not_there(
    #[values(&["gc", "--orphans"][..], &["apply"], &["metrics"])] command: &[&str],
    #[values(true, false)] is_loaded: bool,
) -> Result<()> {
    needs_root!();
    let lab = if is_loaded {
        Lab::new()?
    } else {
        Lab::unloaded()?
    };
    if is_loaded {
        lab.node.underpass(&["load"])?;
    }
    let run = |more: &[&str]| {
        let mut underpass = Command::new(plugin());
        underpass.env_clear().args(command).args(more);
        lab.node.netns().output(&mut underpass, &[])
    };
    let said = |output: &Output| String::from_utf8_lossy(&output.stderr).into_owned();
    let mistyped = run(&["--net-dir", "/run/cni/nte.d"])?;
    ensure!(
        mistyped.status.code() == Some(1)
            && mistyped.stdout.is_empty()
            && said(&mistyped).contains("/run/cni/nte.d"),
        "{mistyped:?}"
    );
    // A folder without a network of ours.
    write(
        &lab.node,
        "10-other.conflist",
        r#"{"name": "other", "plugins": [{"type": "bridge"}]}"#,
    )?;
    let other = run(&["--net-dir", NET_DIR])?;
    ensure!(
        other.status.success() && said(&other).contains("no network in /run/cni/net.d"),
        "{other:?}"
    );
    // The usual folder.
    lab.node.netns().run(|| {
        mount(
            Some("etc"),
            "/etc",
            Some("tmpfs"),
            MsFlags::empty(),
            None::<&str>,
        )
    })?;
    // Also by its name, as the agent calls it.
    for named in [&[][..], &["--net-dir", "/etc/cni/net.d"]] {
        let usual = run(named)?;
        ensure!(
            usual.status.success() && said(&usual).contains("/etc/cni/net.d"),
            "{usual:?}"
        );
    }
    Ok(())
}
