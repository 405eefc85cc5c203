//! The folders that runtimes read, as the commands are told them.

use std::{
    fs,
    path::{Path, PathBuf},
};

use clap::Args;
use underpass_cni::{Error, net_dir::NET_DIR};

use crate::install::BIN_DIR;

/// Where the networks are.
#[derive(Args)]
pub(super) struct NetDir {
    /// The folder in which the runtime looks for networks
    #[arg(long, value_name = "FOLDER", default_value = NET_DIR)]
    pub(super) net_dir: PathBuf,
}

/// Where plugins and networks are.
#[derive(Args)]
pub(super) struct Folders {
    /// The folder in which the runtime looks for plugins
    #[arg(long, value_name = "FOLDER", default_value = BIN_DIR)]
    bin_dir: PathBuf,
    #[command(flatten)]
    networks: NetDir,
}

impl Folders {
    /// Gives the folder of plugins and that of networks. Refuses one folder for both: whoever holds both would wait for himself.
    pub(super) fn apart(&self) -> Result<(&Path, &Path), Error> {
        let paths = [&self.bin_dir, &self.networks.net_dir];
        let [bin, net] = paths.map(|path| fs::canonicalize(path).unwrap_or_else(|_| path.clone()));
        if bin == net {
            return Err(Error::config(format!(
                "--bin-dir and --net-dir are both {}: name two folders",
                bin.display()
            )));
        }
        Ok(paths.map(PathBuf::as_path).into())
    }
}
