//! The networks of ours in the folder that runtimes read: which of them a command is about. What can't be read
//! is kept for the end, so that one broken file stops nothing.

use std::path::Path;

use underpass_cni::{Error as CniError, NetConf, net_dir};

use super::{NAME, folders::NetDir, selftest};
use crate::{conf::Conf, error::Error, install::BIN_DIRS, rehearsal::rehearse};

/// A network, and what the plugin makes of its config.
pub(super) struct Network {
    /// The config that the plugin gets.
    pub(super) conf: NetConf,
    /// The same, decoded.
    pub(super) decoded: Conf,
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
                    Ok(decoded) => Ok(Network { conf, decoded }),
                    Err(error) => Err(error.context(&path)),
                };
                confs.map(decode).collect::<Result<Vec<_>, _>>()
            });
            match decoded {
                Ok(found) => networks.ours.extend(found),
                Err(error) => networks.broken.push(error.into()),
            }
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
        if networks.ours.is_empty() && networks.broken.is_empty() && folder.exists() {
            tracing::warn!(
                "no network in {} has a plugin of type {NAME:?}: name the folder of networks with --net-dir if it is another",
                folder.display()
            );
        }
            }
            at == root
        });
        Ok(networks)
    }

    /// Lists what could not be read.
    pub(super) fn broken(&self) -> &[Error] {
        &self.broken
    }

    /// Ends a command that did all that it could: with what could not be read, if there is anything.
    pub(super) fn finish(self) -> Result<(), Error> {
        Error::collect(self.broken)
    }
}
