//! An archive of small files, as `tar` reads it: ustar, POSIX.1-1988.

/// Everything in an archive fills blocks of this length.
const BLOCK: usize = 512;
/// Longest path in a header without a prefix.
const PATH_MAX: usize = 100;

/// An archive that files are added to.
#[derive(Debug)]
pub(super) struct Archive {
    bytes: Vec<u8>,
    folder: &'static str,
    /// When the files were written, in seconds since 1970.
    time: u64,
}

impl Archive {
    /// An archive in which everything is in that folder.
    pub(super) fn new(folder: &'static str, time: u64) -> Self {
        Self {
            bytes: Vec::new(),
            folder,
            time,
        }
    }

    /// Adds a file. A path that is too long loses its end.
    pub(super) fn add(&mut self, path: &str, content: &[u8]) {
        let mut path = format!("{}/{path}", self.folder).into_bytes();
        path.truncate(PATH_MAX);
        let mut header = [0; BLOCK];
        put(&mut header, 0, &path);
        put(&mut header, 100, b"0000600");
        put(&mut header, 108, b"0000000");
        put(&mut header, 116, b"0000000");
        put(
            &mut header,
            124,
            format!("{:011o}", content.len()).as_bytes(),
        );
        put(&mut header, 136, format!("{:011o}", self.time).as_bytes());
        // The checksum is made with spaces in its place.
        put(&mut header, 148, b"        ");
        put(&mut header, 156, b"0");
        put(&mut header, 257, b"ustar\x0000");
        let sum: u32 = header.iter().map(|&byte| u32::from(byte)).sum();
        put(&mut header, 148, format!("{sum:06o}\0 ").as_bytes());
        self.bytes.extend_from_slice(&header);
        self.bytes.extend_from_slice(content);
        let end = self.bytes.len().next_multiple_of(BLOCK);
        self.bytes.resize(end, 0);
    }

    /// Ends it by two empty blocks.
    pub(super) fn end(mut self) -> Vec<u8> {
        self.bytes.extend_from_slice(&[0; 2 * BLOCK]);
        self.bytes
    }
}

/// Writes a field of the header, which ends with a zero unless it is full.
fn put(header: &mut [u8; BLOCK], at: usize, text: &[u8]) {
    for (byte, value) in header.iter_mut().skip(at).zip(text) {
        *byte = *value;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn everything_fills_blocks() {
        let mut archive = Archive::new("r", 1_700_000_000);
        archive.add("empty", b"");
        archive.add("full", &[b'x'; BLOCK]);
        archive.add("more", &[b'y'; BLOCK + 1]);
        let bytes = archive.end();
        assert_eq!(bytes.len(), BLOCK * (3 + 1 + 2 + 2));
        assert_eq!(&bytes[..8], b"r/empty\0");
        assert_eq!(&bytes[BLOCK..BLOCK + 7], b"r/full\0");
        assert_eq!(&bytes[BLOCK + 124..BLOCK + 136], b"00000001000\0");
        assert_eq!(&bytes[257..265], b"ustar\x0000");
    }

    #[test]
    fn the_checksum_counts_itself_as_spaces() {
        let mut archive = Archive::new("r", 0);
        archive.add("a", b"");
        let header = &archive.end()[..BLOCK];
        let told = std::str::from_utf8(&header[148..154]).expect("octal digits");
        let sum: u32 = header[..148]
            .iter()
            .chain(&[b' '; 8])
            .chain(&header[156..])
            .map(|&byte| u32::from(byte))
            .sum();
        assert_eq!(u32::from_str_radix(told, 8), Ok(sum));
    }
}
