//! The locks of a node: root's alone, and who waits for one says so.

use std::{
    fs::{self, DirBuilder, File, Permissions},
    io,
    os::unix::fs::{DirBuilderExt as _, PermissionsExt as _},
    path::PathBuf,
    thread,
    time::Duration,
};

use rstest::rstest;
use underpass_tests::{patience, prelude::*, runtime::Call};

const FOLDER: &str = "/run/underpass";

/// The folder and its files, with their modes.
fn modes(lab: &Lab) -> Result<Vec<(PathBuf, u32)>> {
    let look = || -> io::Result<Vec<(PathBuf, u32)>> {
        let mode = |path: PathBuf| {
            let mode = fs::metadata(&path)?.permissions().mode();
            Ok((path, mode & 0o777))
        };
        let entries = fs::read_dir(FOLDER)?.map(|entry| mode(entry?.path()));
        entries.chain([mode(FOLDER.into())]).collect()
    };
    lab.node.netns().run(look).context("look at the locks")
}

/// The path of a lock of the node. The node has one of each kind.
fn lock(lab: &Lab, purpose: &str) -> Result<PathBuf> {
    let mut paths = modes(lab)?.into_iter().map(|(path, _)| path);
    let found = paths.find(|path| path.extension().is_some_and(|end| end == purpose));
    found.with_context(|| format!("there is no lock {purpose}"))
}

/// Who can open such a file can lock it, and so stop every call.
#[rstest]
fn nobody_else_can_open_them(
    #[values("not there", "of an earlier build")] was: &str,
) -> Result<()> {
    needs_root!();
    let lab = Lab::unloaded()?;
    if was != "not there" {
        lab.pod("first")?.del()?;
        let open = || -> io::Result<()> {
            for entry in fs::read_dir(FOLDER)? {
                fs::set_permissions(entry?.path(), Permissions::from_mode(0o644))?;
            }
            fs::set_permissions(FOLDER, Permissions::from_mode(0o755))
        };
        lab.node.netns().run(open)?;
    }
    let pod = lab.pod("a")?;
    let open: Vec<_> = modes(&lab)?
        .into_iter()
        .filter(|(_, mode)| mode & 0o077 != 0)
        .collect();
    ensure!(open.is_empty(), "{open:?}");
    pod.del()
}

/// A kubelet makes what a pod mounts from the host for everybody.
#[test]
fn a_folder_that_others_made_is_closed() -> Result<()> {
    needs_root!();
    let lab = Lab::unloaded()?;
    let make = || DirBuilder::new().mode(0o755).create(FOLDER);
    lab.node.netns().run(make)?;
    lab.pod("a")?.del()?;
    let [.., (_, mode)] = modes(&lab)?[..] else {
        anyhow::bail!("nothing is there");
    };
    ensure!(mode == 0o700, "{mode:o}");
    Ok(())
}

#[rstest]
fn who_waits_says_for_which(
    #[values("lock", "use", "gate")] purpose: &str,
    #[values("ADD", "DEL")] verb: &str,
) -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    let pod = lab.pod("a")?;
    let path = lock(&lab, purpose)?;
    let file = lab.node.netns().run(|| File::open(&path))?;
    let netns = lab.node.netns().sibling("b")?;
    let call = match verb {
        "ADD" => {
            let path = netns.path().display().to_string();
            let call = Call::new("ADD").attachment("b", &path, Pod::IFNAME);
            call.conf(&lab.conf())
        }
        _ => pod.call_with_result("DEL"),
    };
    file.lock()?;
    let reply = thread::scope(|scope| {
        let waiting = scope.spawn(|| call.run(&lab.node));
        thread::sleep(patience::here(Duration::from_millis(2500)));
        drop(file);
        waiting.join().expect("no panic")
    })?;
    reply.succeeded()?;
    let said = format!("waiting for the lock {}, which", path.display());
    ensure!(reply.stderr.contains(&said), "{}", reply.stderr);
    Ok(())
}
