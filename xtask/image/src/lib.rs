//! The agent's image: an archive in the layout of the Open Container Initiative, which container engines import and
//! registries take.
//!
//! It is made from scratch: the executables, which are static, their licences, and nothing that could run besides, not even
//! a shell. The same files give the same bytes, wherever and whenever it is made; so its only layer is not compressed, because
//! what a compressor makes of it changes with the compressor's version.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use crate::{
    blob::{Blob, Descriptor},
    document::{Config, Index, Layout, Manifest, Platform},
};

mod blob;
mod document;
mod elf;
mod tarball;

/// The name by which manifests ask for the image. It is one of no registry: they say that it is never pulled.
pub const NAME: &str = "localhost/underpass-agent";

/// The executables, in the root of the image. The first one is what a container runs; it looks for the others beside itself.
pub const EXECUTABLES: [&str; 3] = ["underpass-agent", "underpass", "underpass-ipam"];

/// What the licences ask to be passed on.
const LICENCES: [&str; 3] = ["LICENSE-APACHE", "LICENSE-GPL-2.0", "LICENSE-MIT"];

/// Why there is no image.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A file that belongs into it can't be read.
    #[error("cannot read {path}, which belongs into the image: {source}")]
    Unreadable {
        /// Where it should be.
        path: PathBuf,
        /// The kernel's answer.
        source: io::Error,
    },
    /// An executable is for a machine that engines have no name for.
    #[error("{0} is no executable for x86-64 or aarch64")]
    Machine(PathBuf),
    /// The executables are for different machines.
    #[error("{0} is for another machine than the agent: build all executables anew")]
    Mixed(PathBuf),
    /// A file does not fit into the format.
    #[error("cannot pack the image: {0}")]
    Format(#[from] io::Error),
    /// A document can't be written.
    #[error("cannot write the image's documents: {0}")]
    Document(#[from] serde_json::Error),
}

/// What an image is made of.
#[derive(Clone, Copy, Debug)]
pub struct Source<'a> {
    /// The folder with the executables.
    pub executables: &'a Path,
    /// The folder with the licences.
    pub licences: &'a Path,
    /// A folder of nothing but the licences of what others wrote.
    pub of_others: &'a Path,
    /// The version, which is also the image's tag.
    pub version: &'a str,
    /// When all files were changed last, in seconds since 1970.
    pub time: u64,
}

/// Packs the image.
pub fn archive(source: &Source<'_>) -> Result<Vec<u8>, Error> {
    let mut files = Vec::new();
    let mut architecture = None;
    for name in EXECUTABLES {
        let path = source.executables.join(name);
        let content = read(&path)?;
        let of = elf::architecture(&content).ok_or_else(|| Error::Machine(path.clone()))?;
        if *architecture.get_or_insert(of) != of {
            return Err(Error::Mixed(path));
        }
        files.push((name.to_owned(), content, 0o755));
    }
    for name in LICENCES {
        let content = read(&source.licences.join(name))?;
        files.push((format!("licences/{name}"), content, 0o644));
    }
    for path in list(source.of_others)? {
        let content = read(&path)?;
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        files.push((format!("licences/{name}"), content, 0o644));
    }
    let layer = Blob::new(tarball::pack(files, source.time)?);
    let platform = Platform {
        architecture: architecture.unwrap_or_default(),
        os: "linux",
    };
    let entrypoint = format!("/{}", EXECUTABLES[0]);
    let config = Config::new(platform, source.version, entrypoint, layer.digest());
    let config = Blob::new(serde_json::to_vec(&config)?);
    let manifest = Manifest::new(
        Descriptor::of(document::CONFIG, &config),
        Descriptor::of(document::LAYER, &layer),
    );
    let manifest = Blob::new(serde_json::to_vec(&manifest)?);
    let index = Index::new(&manifest, platform, NAME, source.version);
    let mut files = vec![
        ("index.json".to_owned(), serde_json::to_vec(&index)?, 0o644),
        (
            "oci-layout".to_owned(),
            serde_json::to_vec(&Layout::default())?,
            0o644,
        ),
    ];
    files.extend([layer, config, manifest].map(|blob| (blob.path(), blob.into_bytes(), 0o644)));
    Ok(tarball::pack(files, source.time)?)
}

/// The files of a folder, by name.
fn list(folder: &Path) -> Result<Vec<PathBuf>, Error> {
    let entries = fs::read_dir(folder).and_then(|entries| {
        entries
            .map(|entry| Ok(entry?.path()))
            .collect::<io::Result<Vec<_>>>()
    });
    let mut files = entries.map_err(|source| Error::Unreadable {
        path: folder.to_owned(),
        source,
    })?;
    files.sort();
    Ok(files)
}

fn read(path: &Path) -> Result<Vec<u8>, Error> {
    fs::read(path).map_err(|source| Error::Unreadable {
        path: path.to_owned(),
        source,
    })
}

#[cfg(test)]
mod tests;
