//! Files as `tar` has them, with nothing in it that depends on the machine or the moment.

use std::{collections::BTreeSet, io};

use tar::{Builder, EntryType, Header};

/// Packs files (path, content, mode) in the order of their paths. Each folder comes before what is in it, because not everybody
/// makes one that is missing.
pub(crate) fn pack(mut files: Vec<(String, Vec<u8>, u32)>, time: u64) -> io::Result<Vec<u8>> {
    files.sort();
    let mut tarball = Builder::new(Vec::new());
    let mut folders = BTreeSet::new();
    for (path, content, mode) in &files {
        for (end, _) in path.match_indices('/') {
            let folder = &path[..=end];
            if folders.insert(folder) {
                let mut header = header(EntryType::Directory, 0, 0o755, time);
                tarball.append_data(&mut header, folder, io::empty())?;
            }
        }
        let mut header = header(EntryType::Regular, content.len() as u64, *mode, time);
        tarball.append_data(&mut header, path, content.as_slice())?;
    }
    tarball.into_inner()
}

/// All belongs to root, whose name and number are the same everywhere.
fn header(kind: EntryType, size: u64, mode: u32, time: u64) -> Header {
    let mut header = Header::new_ustar();
    header.set_entry_type(kind);
    header.set_size(size);
    header.set_mode(mode);
    header.set_mtime(time);
    header.set_uid(0);
    header.set_gid(0);
    header
}
