//! The folder of networks, in which a runtime looks for its configs: usually `/etc/cni/net.d`.
//!
//! Runtimes read it by libcni (containernetworking/cni, libcni/conf.go): files that end in `.conf`, `.conflist` or
//! `.json`, in the order of their names' bytes. containerd and CRI-O take the first one that is a network.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::{fs, io};

use serde_json::{Map, Value};

use crate::config::NetConf;
use crate::error::Error;

/// The folder that runtimes use if they are not told another one.
pub const NET_DIR: &str = "/etc/cni/net.d";

/// What the names of configs end with.
const EXTENSIONS: [&str; 3] = ["conf", "conflist", "json"];

/// The keys of a list that each of its plugins gets.
const INHERITED: [&str; 2] = ["name", "cniVersion"];

/// A network, as one file has it.
#[derive(Clone, Debug, PartialEq)]
pub struct NetworkFile {
    /// Where it was read.
    pub path: PathBuf,
    /// The whole document. One of a single plugin, in a `.conf`, is what that plugin gets.
    pub document: Map<String, Value>,
}

impl NetworkFile {
    /// Decodes the text of such a file. Code 6 if it is no JSON object, or has no plugin; and as libcni has it, if a list has no name, or one of its
    /// plugins no type.
    pub fn parse(path: PathBuf, text: &[u8]) -> Result<Self, Error> {
        let file = Self::decode(path, text)?;
        match file.missing() {
            Some(missing) => Err(Error::decode(format!("{}: {missing}", file.path.display()))),
            None => Ok(file),
        }
    }

    fn decode(path: PathBuf, text: &[u8]) -> Result<Self, Error> {
        let document = match serde_json::from_slice(text) {
            Ok(Value::Object(document)) => document,
            Ok(_) => {
                return Err(Error::decode(format!(
                    "{}: it must be a JSON object",
                    path.display()
                )));
            }
            Err(error) => {
                return Err(Error::decode(format!(
                    "{}: it is no JSON: {error}",
                    path.display()
                )));
            }
        };
        Ok(Self { path, document })
    }

    /// What a runtime would miss.
    fn missing(&self) -> Option<&'static str> {
        let has_type = |plugin: &Map<String, Value>| {
            let kind = plugin.get("type").and_then(Value::as_str);
            kind.is_some_and(|kind| !kind.is_empty())
        };
        let list = self.document.get("plugins");
        let plugins = self.plugins();
        if plugins.is_empty() {
            return Some(
                "it has no plugin: either \"plugins\", a list of objects, or \"type\" is missing",
            );
        }
        if list.is_some_and(|list| list.as_array().map(Vec::len) != Some(plugins.len()))
            || !plugins.into_iter().all(has_type)
        {
            return Some("a plugin of it has no \"type\"");
        }
        let is_named = self.document.get("name").is_some_and(Value::is_string);
        (list.is_some() && !is_named).then_some("\"name\" is missing: a list of plugins needs one")
    }

    /// Reads such a file. Code 6, and its path, if it can't be read.
    pub fn open(path: PathBuf) -> Result<Self, Error> {
        let text = read_text(&path)?;
        Self::parse(path, &text)
    }

    /// Reads such a file for what it names, whether a runtime would take it or not. Code 6, and its path, if it can't be read or is no JSON object.
    pub fn open_any(path: PathBuf) -> Result<Self, Error> {
        let text = read_text(&path)?;
        Self::decode(path, &text)
    }

    /// The network's name; empty where it has none.
    #[must_use]
    pub fn name(&self) -> &str {
        self.document
            .get("name")
            .and_then(Value::as_str)
            .unwrap_or_default()
    }

    /// The plugins in the order in which an ADD runs them, each as the file has it.
    #[must_use]
    pub fn plugins(&self) -> Vec<&Map<String, Value>> {
        match self.document.get("plugins") {
            Some(Value::Array(list)) => list.iter().filter_map(Value::as_object).collect(),
            None if self.document.contains_key("type") => vec![&self.document],
            Some(_) | None => Vec::new(),
        }
    }

    /// The config that a runtime would send to each plugin whose `type` is one of `types`, without what a
    /// container adds to it.
    pub fn confs(&self, types: &[&str]) -> Result<Vec<NetConf>, Error> {
        let is_one_of = |plugin: &&Map<String, Value>| {
            let kind = plugin.get("type").and_then(Value::as_str);
            kind.is_some_and(|kind| types.contains(&kind))
        };
        self.plugins()
            .into_iter()
            .filter(is_one_of)
            .map(|plugin| {
                let mut plugin = plugin.clone();
                for key in INHERITED {
                    if let Some(value) = self.document.get(key) {
                        plugin.insert(key.to_owned(), value.clone());
                    }
                }
                NetConf::parse(Value::Object(plugin).to_string().as_bytes())
                    .map_err(|error| error.context(self.path.display().to_string()))
            })
            .collect()
    }
}

fn read_text(path: &Path) -> Result<Vec<u8>, Error> {
    fs::read(path)
        .map_err(|error| Error::decode(format!("cannot read {}: {error}", path.display())))
}

/// Reads the folder in a runtime's order: each file as a network, or why it is none. A folder that is missing is empty.
pub fn read(folder: &Path) -> io::Result<Vec<Result<NetworkFile, Error>>> {
    Ok(files(folder)?.into_iter().map(NetworkFile::open).collect())
}

/// Lists the files of the folder that a runtime reads, in its order. A folder that is missing is empty.
pub fn files(folder: &Path) -> io::Result<Vec<PathBuf>> {
    let entries = match fs::read_dir(folder) {
        Ok(entries) => entries,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(error),
    };
    let mut paths = entries
        .map(|entry| entry.map(|entry| entry.path()))
        .collect::<io::Result<Vec<_>>>()?;
    let is_config = |path: &PathBuf| {
        let extension = path.extension().and_then(OsStr::to_str);
        extension.is_some_and(|extension| EXTENSIONS.contains(&extension)) && path.is_file()
    };
    paths.retain(is_config);
    paths.sort();
    Ok(paths)
}

#[cfg(test)]
mod tests;
