//! The networks of ours in the folder that runtimes read: which of them a command is about. What can't be read
//! is kept for the end, so that one broken file stops nothing.

use std::path::{Path, PathBuf};

use underpass_cni::{Error as CniError, NetConf, net_dir};

use super::{NAME, folders::NetDir, selftest};
use crate::{conf::Conf, error::Error, install::BIN_DIRS, rehearsal::rehearse};

/// A network, and what the plugin makes of its config.
pub(super) struct Network {
    /// The config that the plugin gets.
    pub(super) conf: NetConf,
    /// The same, decoded.
    pub(super) decoded: Conf,
    /// True if no ADD would take it all the same: what is wrong is kept with what can't be read.
    pub(super) is_refused: bool,
    /// Its file.
    path: String,
}

/// The networks of one folder.
pub(super) struct Networks {
    /// Those whose pins are where the command looks.
    pub(super) ours: Vec<Network>,
    broken: Vec<Error>,
}

impl Networks {
    /// Reads those whose plugins have the type `underpass`, and whose pins are at `root`.
    pub(super) fn read(net_dir: &NetDir, root: &Path) -> Result<Self, Error> {
        net_dir.require()?;
        let folder = net_dir.path();
        let unreadable = |error| {
            CniError::io(
                format!("cannot read the folder {}", folder.display()),
                &error,
            )
            .with_details("name the folder of networks with --net-dir")
        };
        let mut networks = Self {
            ours: Vec::new(),
            broken: Vec::new(),
        };
        for file in net_dir::read(folder).map_err(unreadable)? {
            let decoded = file.and_then(|file| {
                let path = file.path.display().to_string();
                let confs = file.confs(&[NAME])?.into_iter();
                let decode = |conf: NetConf| match Conf::of_network(&conf) {
                    Ok(decoded) => Ok(Network {
                        conf,
                        decoded,
                        is_refused: false,
                        path: path.clone(),
                    }),
                    Err(error) => Err(error.context(&path)),
                };
                confs.map(decode).collect::<Result<Vec<_>, _>>()
            });
            match decoded {
                Ok(found) => networks.ours.extend(found),
                Err(error) => networks.broken.push(error.into()),
            }
        }
        if networks.ours.is_empty() && networks.broken.is_empty() && folder.exists() {
            tracing::warn!(
                "no network in {} has a plugin of type {NAME:?}: name the folder of networks with --net-dir if it is another",
                folder.display()
            );
        }
        networks.ours.retain(|network| {
            let at = &network.decoded.bpf_root;
            if at != root {
                tracing::warn!(
                    "network {:?} is left alone, because its bpfRoot is {}: `underpass --bpf-root {}` is for it",
                    network.conf.name,
                    at.display(),
                    at.display()
                );
            }
            at == root
        });
        let folders = folders_of_plugins();
        for network in &mut networks.ours {
            if let Err(error) = rehearse(&network.conf, &network.decoded, &folders) {
                let error = CniError::from(error).context(&network.path);
                networks.broken.push(error.into());
                network.is_refused = true;
            }
        }
        Ok(networks)
    }

    /// Lists what could not be read, and what no ADD would take.
    pub(super) fn broken(&self) -> &[Error] {
        &self.broken
    }

    /// Ends a command that did all that it could: with what is broken, if there is anything.
    pub(super) fn finish(self) -> Result<(), Error> {
        Error::collect(self.broken)
    }
}

/// Decodes the config of a network of ours, and fails if no ADD would take it.
pub(super) fn usable(conf: &NetConf) -> Result<(), Error> {
    rehearse(conf, &Conf::of_network(conf)?, &folders_of_plugins())
}

/// Lists where IPAM plugins of others may be: beside this executable, and where runtimes look. No runtime tells a command.
fn folders_of_plugins() -> Vec<PathBuf> {
    let own = selftest::executable().ok();
    let own = own.as_deref().and_then(Path::parent).map(Path::to_owned);
    own.into_iter().chain(BIN_DIRS.map(PathBuf::from)).collect()
}
