//! Which machine an executable is for.

/// Where a file says it.
const MACHINE: usize = 0x12;

/// Gives the machine of an executable, by the name that images have for it.
pub(crate) fn architecture(file: &[u8]) -> Option<&'static str> {
    // Magic, ELFCLASS64, ELFDATA2LSB.
    if !file.starts_with(b"\x7fELF\x02\x01") {
        return None;
    }
    match u16::from_le_bytes(*file.get(MACHINE..)?.first_chunk()?) {
        62 => Some("amd64"),
        183 => Some("arm64"),
        _ => None,
    }
}
