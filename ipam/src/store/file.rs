//! Small files: read and written in as few system calls as possible, and never in halves.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Write};
use std::net::IpAddr;
use std::os::unix::fs::{DirEntryExt, FileExt};
use std::path::Path;

use super::error::{Attempt, StoreError};

/// Longer than nearly every file here, in bytes.
const SHORT: usize = 512;

/// The content of a file that is expected to be shorter than [`SHORT`]: three system calls.
pub(super) fn read_short(path: &Path) -> io::Result<Vec<u8>> {
    let mut file = File::open(path)?;
    let mut content = vec![0; SHORT];
    let length = file.read(&mut content)?;
    content.truncate(length);
    if length == SHORT {
        file.read_to_end(&mut content)?;
    }
    Ok(content)
}

/// A file as text; nothing, if it cannot be read or is none.
pub(super) fn text(path: &Path) -> Option<String> {
    String::from_utf8(read_short(path).ok()?).ok()
}

/// Writes `text` over a file of the same length, in one system call, which no kill divides: to make
/// a file takes longer than all the rest of an ADD. False if that is not possible.
pub(super) fn write_over(path: &Path, text: &str) -> bool {
    let Ok(file) = OpenOptions::new().write(true).open(path) else {
        return false;
    };
    let same_length = file
        .metadata()
        .is_ok_and(|meta| meta.is_file() && usize::try_from(meta.len()) == Ok(text.len()));
    same_length
        && file
            .write_at(text.as_bytes(), 0)
            .is_ok_and(|written| written == text.len())
}

/// Writes `text` to a file that was just made, or leaves no file behind.
pub(super) fn write_out(file: io::Result<File>, path: &Path, text: &str) -> Result<(), StoreError> {
    file.and_then(|mut file| file.write_all(text.as_bytes()))
        .inspect_err(|_| {
            let _ = fs::remove_file(path);
        })
        .attempt("write", path)
}

/// Removes a file. That there is none is no failure.
pub(super) fn remove_if_there(path: &Path) -> io::Result<()> {
    match fs::remove_file(path) {
        Err(error)
            if !matches!(
                error.kind(),
                io::ErrorKind::NotFound | io::ErrorKind::NotADirectory
            ) =>
        {
            Err(error)
        }
        _ => Ok(()),
    }
}

/// Whether `dir` has so many entries.
pub(super) fn has_entries(dir: &Path, count: u128) -> io::Result<bool> {
    let mut found = 0;
    for entry in fs::read_dir(dir)? {
        entry?;
        found += 1;
        if found >= count {
            return Ok(true);
        }
    }
    Ok(found >= count)
}

/// The files in `dir` that are named by an address behind `prefix`, with their inode numbers. Reads
/// no file.
pub(super) fn addresses(dir: &Path, prefix: &str) -> io::Result<Vec<(IpAddr, u64)>> {
    let mut addresses = Vec::new();
    for entry in fs::read_dir(dir)? {
        let entry = entry?;
        let name = entry.file_name();
        let name = name.to_str().and_then(|name| name.strip_prefix(prefix));
        let Some((name, ip)) = name.and_then(|name| Some((name, name.parse::<IpAddr>().ok()?)))
        else {
            continue;
        };
        // Some file systems have to look at the file to tell what it is. One that can't be looked at may be a lease.
        let is_file = match entry.file_type() {
            Ok(kind) => kind.is_file(),
            Err(error) => error.kind() != io::ErrorKind::NotFound,
        };
        // Another spelling of an address is not the file that the address is looked up by.
        if ip.to_string() == name && is_file {
            addresses.push((ip, entry.ino()));
        }
    }
    Ok(addresses)
}
