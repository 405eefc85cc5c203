//! Just enough of ELF to say whether an executable stands alone.

use std::fmt;
use std::fs;
use std::path::Path;

use anyhow::{Context as _, bail};

const PROGRAM_HEADERS: Table = Table {
    offset: 0x20,
    entry_size: 0x36,
    count: 0x38,
    kind: 0x00,
};
const SECTION_HEADERS: Table = Table {
    offset: 0x28,
    entry_size: 0x3a,
    count: 0x3c,
    kind: 0x04,
};

/// The dynamic linker's path: an executable without one loads no library.
const PT_INTERP: u32 = 3;
/// The symbols that `strip` removes.
const SHT_SYMTAB: u32 = 2;

/// What keeps an executable out of the tarball.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Fault {
    Dynamic,
    Unstripped,
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Dynamic => "needs libraries of the host: is .cargo/config.toml overridden?",
            Self::Unstripped => "carries symbols: is `strip` of the release profile overridden?",
        })
    }
}

/// The first fault of an executable, if it has any.
pub(crate) fn fault(path: &Path) -> anyhow::Result<Option<Fault>> {
    let file = fs::read(path).with_context(|| format!("cannot read {}", path.display()))?;
    examine(&file)
        .with_context(|| format!("{} is no 64-bit little-endian ELF file", path.display()))
}

fn examine(file: &[u8]) -> anyhow::Result<Option<Fault>> {
    // Magic, ELFCLASS64, ELFDATA2LSB.
    if !file.starts_with(b"\x7fELF\x02\x01") {
        bail!("the magic number is missing");
    }
    if PROGRAM_HEADERS.has(file, PT_INTERP)? {
        return Ok(Some(Fault::Dynamic));
    }
    Ok(SECTION_HEADERS
        .has(file, SHT_SYMTAB)?
        .then_some(Fault::Unstripped))
}

/// Where the file header describes a table, and where each of its entries says what it is.
struct Table {
    offset: usize,
    entry_size: usize,
    count: usize,
    kind: usize,
}

impl Table {
    fn has(&self, file: &[u8], kind: u32) -> anyhow::Result<bool> {
        let start = usize::try_from(u64::from_le_bytes(bytes(file, self.offset)?))?;
        let size = usize::from(u16::from_le_bytes(bytes(file, self.entry_size)?));
        let count = usize::from(u16::from_le_bytes(bytes(file, self.count)?));
        for index in 0..count {
            let entry = start.saturating_add(index * size).saturating_add(self.kind);
            if u32::from_le_bytes(bytes(file, entry)?) == kind {
                return Ok(true);
            }
        }
        Ok(false)
    }
}

fn bytes<const N: usize>(file: &[u8], offset: usize) -> anyhow::Result<[u8; N]> {
    file.get(offset..)
        .and_then(|rest| rest.first_chunk())
        .copied()
        .context("the file ends too early")
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A header with one program header of the given type and one section header of the other.
    fn elf(program: u32, section: u32) -> Vec<u8> {
        let mut file = vec![0; 0x40 + 0x38 + 0x40];
        file[..6].copy_from_slice(b"\x7fELF\x02\x01");
        file[0x20] = 0x40;
        file[0x36] = 0x38;
        file[0x38] = 1;
        file[0x28] = 0x78;
        file[0x3a] = 0x40;
        file[0x3c] = 1;
        file[0x40..0x44].copy_from_slice(&program.to_le_bytes());
        file[0x7c..0x80].copy_from_slice(&section.to_le_bytes());
        file
    }

    #[test]
    fn a_static_stripped_file_has_no_fault() {
        assert_eq!(examine(&elf(1, 1)).expect("a whole header"), None);
    }

    #[test]
    fn each_fault_is_found() {
        assert_eq!(
            examine(&elf(PT_INTERP, 1)).expect("a whole header"),
            Some(Fault::Dynamic)
        );
        assert_eq!(
            examine(&elf(1, SHT_SYMTAB)).expect("a whole header"),
            Some(Fault::Unstripped)
        );
    }

    #[test]
    fn this_test_is_a_dynamic_executable() {
        let own = std::env::current_exe().expect("a test has a path");
        assert_eq!(
            fault(&own).expect("a test is an ELF file"),
            Some(Fault::Dynamic)
        );
    }

    #[test]
    fn a_file_cut_short_is_an_error() {
        let whole = elf(1, 1);
        for length in 0..0x7c {
            assert!(
                examine(&whole[..length]).is_err(),
                "{length} bytes were taken for a whole file"
            );
        }
    }
}
