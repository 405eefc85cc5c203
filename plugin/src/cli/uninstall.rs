//! `underpass uninstall`: the way back of `underpass install`, which takes what is ours and nothing else.
//!
//! What would be refused is asked before anything is changed. Then the conflist goes first, so that the runtime sends no new
//! container, and the executables last, as DELs need them.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use clap::Args;
use underpass_cni::{
    Error as CniError, NetConf,
    net_dir::{NET_DIR, NetworkFile},
};
use underpass_dataplane::Pins;
use underpass_ipam::{data_dir, store::Store};

use super::{Failure, unload};
use crate::{
    install::{
        ALLOCATOR, BIN_DIR, PLUGIN,
        conflist::{self, Before},
        folder::{Change, Folder, apart},
    },
    selftest,
    step::lease::is_built_in,
};

/// The folder beside those of the networks that has the index of each.
const INDEX: &str = ".underpass";

#[derive(Args)]
pub(super) struct Options {
    /// The folder in which the runtime looks for plugins
    #[arg(long, value_name = "FOLDER", default_value = BIN_DIR)]
    bin_dir: PathBuf,
    /// The folder in which the runtime looks for networks
    #[arg(long, value_name = "FOLDER", default_value = NET_DIR)]
    net_dir: PathBuf,
    /// Even though containers are attached, others have entries in the conflist, or addresses are leased: all of that is lost
    #[arg(long)]
    force: bool,
}

pub(super) fn run(root: &Path, options: &Options, out: &mut impl io::Write) -> Result<(), Failure> {
    let Options {
        bin_dir,
        net_dir,
        force,
    } = options;
    apart(bin_dir, net_dir)?;
    let bin = Folder::hold_existing(bin_dir)?;
    let net = Folder::hold_existing(net_dir)?;
    let text = match &net {
        Some(net) => net.read(conflist::FILE)?,
        None => None,
    };
    let before = Before::read(text.as_deref());
    if let (Some(net), Some(text)) = (&net, &text)
        && let Ok(file) = NetworkFile::parse(net.path(conflist::FILE), text)
        && let Err(error) = selftest::sweep(&file, &super::selftest::executable()?, bin_dir)
    {
        tracing::warn!("what a self-test may have left can't be taken away: {error}");
    }
    if !force {
        refuse(root, net_dir, &before)?;
    }
    if let Some(net) = &net {
        removed(out, net.remove(conflist::FILE)?, &net.path(conflist::FILE))?;
        let others = before.others();
        if !others.is_empty() {
            writeln!(out, "with what others had added: {}", others.join(", "))?;
        }
    }
    if let Some(bin) = &bin {
        for name in bin.links_to(PLUGIN)? {
            removed(out, bin.remove(&name)?, &bin.path(&name))?;
        }
    }
    unload::run(root, *force, out)?;
    if let (Some(net), Some(text)) = (&net, text) {
        leases(net.path(conflist::FILE), &text, *force, out)?;
    }
    if let Some(bin) = &bin {
        for name in [ALLOCATOR, PLUGIN] {
            removed(out, bin.remove(name)?, &bin.path(name))?;
        }
    }
    Ok(())
}

/// Asks all that would stop half-way.
fn refuse(root: &Path, net_dir: &Path, before: &Before) -> Result<(), Failure> {
    let others = before.others();
    if !others.is_empty() {
        return Err(Failure::OthersEntries {
            path: net_dir.join(conflist::FILE),
            others: others.join(", "),
        });
    }
    let mut attached = 0;
    for layout in Pins::at(root).layouts()? {
        attached += layout.attachments()?;
    }
    match attached {
        0 => Ok(()),
        attached => Err(Failure::InUse(attached)),
    }
}

/// Removes the folders of the network's leases, unless an address is leased: somebody may still need it.
fn leases(
    path: PathBuf,
    text: &[u8],
    force: bool,
    out: &mut impl io::Write,
) -> Result<(), Failure> {
    let Some(conf) = our_entry(path, text) else {
        return Ok(());
    };
    let folder = data_dir(&conf)?;
    let store = Store::new(&folder, &conf.name);
    let Some(locked) = store.lock_existing().map_err(CniError::from)? else {
        return Ok(());
    };
    let leased = locked.leased().map_err(CniError::from)?.len();
    if leased > 0 && !force {
        writeln!(
            out,
            "left        {}: {leased} addresses are leased; remove it, or repeat with --force before the conflist is gone",
            store.dir().display()
        )?;
        return Ok(());
    }
    let index = folder.join(INDEX);
    for folder in [index.join(&conf.name), store.dir().to_owned()] {
        match fs::remove_dir_all(&folder) {
            Ok(()) => removed(out, Change::Made, &folder)?,
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => {
                let what = format!("cannot remove {}", folder.display());
                return Err(CniError::io(what, &error).into());
            }
        }
    }
    // Other networks may have theirs there.
    let _ = fs::remove_dir(index);
    Ok(())
}

/// Finds our entry, if it gives addresses by itself. What can't be understood has no leases that could be named.
fn our_entry(path: PathBuf, text: &[u8]) -> Option<NetConf> {
    let file = NetworkFile::parse(path, text).ok()?;
    let conf = file.confs(&[PLUGIN]).ok()?.into_iter().next()?;
    is_built_in(&conf).ok()?.then_some(conf)
}

fn removed(out: &mut impl io::Write, change: Change, path: &Path) -> io::Result<()> {
    match change {
        Change::Made => writeln!(out, "removed     {}", path.display()),
        Change::None => Ok(()),
    }
}
