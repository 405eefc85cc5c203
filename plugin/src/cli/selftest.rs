//! `underpass selftest`: whether the network of a conflist works on this node, as a runtime would find it.

use std::{
    env, io,
    path::{Path, PathBuf},
};

use clap::Args;
use underpass_cni::{
    Error as CniError,
    net_dir::{NET_DIR, NetworkFile},
};

use super::Failure;
use crate::{install::BIN_DIR, selftest};

#[derive(Args)]
pub(super) struct Options {
    /// The folder of networks: the first one that begins with underpass is tested
    #[arg(long, value_name = "FOLDER", default_value = NET_DIR)]
    net_dir: PathBuf,
    /// Test the network of this file instead
    #[arg(long, value_name = "FILE")]
    conflist: Option<PathBuf>,
    /// The folder in which an IPAM plugin of others is looked for
    #[arg(long, value_name = "FOLDER", default_value = BIN_DIR)]
    bin_dir: PathBuf,
}

pub(super) fn run(options: Options, out: &mut impl io::Write) -> Result<(), Failure> {
    let file = match options.conflist {
        Some(path) => selftest::read(path)?,
        None => selftest::choose(&options.net_dir)?,
    };
    let executable = executable()?;
    test(&file, &executable, &options.bin_dir, out)
}

/// Tests a network, and says so.
pub(super) fn test(
    file: &NetworkFile,
    executable: &Path,
    bin_dir: &Path,
    out: &mut impl io::Write,
) -> Result<(), Failure> {
    writeln!(
        out,
        "self-test of the network {} of {} by {}",
        file.name(),
        file.path.display(),
        executable.display()
    )?;
    Ok(selftest::run(file, executable, bin_dir, out)?)
}

/// Finds the file that runs.
pub(super) fn executable() -> Result<PathBuf, CniError> {
    env::current_exe().map_err(|error| {
        CniError::io("cannot find the running executable", &error).with_details("mount /proc")
    })
}
