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
    /// The folder in which the runtime looks for networks; by default /etc/cni/net.d
    #[arg(long = "net-dir", value_name = "FOLDER")]
    named: Option<PathBuf>,
}

impl NetDir {
    pub(super) fn path(&self) -> &Path {
        self.named.as_deref().unwrap_or(Path::new(NET_DIR))
    }

    /// Refuses a folder that was named and is not there: whoever mistypes it must not hear that nothing is to be done. The
    /// usual one, named or not, may be missing before the first network.
    pub(super) fn require(&self) -> Result<(), Error> {
        let path = self.path().display();
        match fs::exists(self.path()) {
            Ok(false) if self.path() != Path::new(NET_DIR) => Err(Error::config(format!(
                "there is no folder {path}: name the folder of networks with --net-dir"
            ))),
            Ok(false) => {
                tracing::warn!(
                    "there is no folder {path}: name the folder of networks with --net-dir if it is another"
                );
                Ok(())
            }
            Ok(true) | Err(_) => Ok(()),
        }
    }
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
    /// Gives the folder of plugins and that of networks. Refuses one folder for both: whoever says so has mistyped one.
    pub(super) fn apart(&self) -> Result<(&Path, &Path), Error> {
        let paths = [self.bin_dir.as_path(), self.networks.path()];
        let [bin, net] =
            paths.map(|path| fs::canonicalize(path).unwrap_or_else(|_| path.to_owned()));
        if bin == net {
            return Err(Error::config(format!(
                "--bin-dir and --net-dir are both {}: name two folders",
                bin.display()
            )));
        }
        Ok(paths.into())
    }
}
