//! The checksum of SCTP, in programs.

use underpass_ebpf::crc32c;

use crate::kernel::global::global;

global!(
    /// See [`crc32c::change`].
    pub fn crc32c_change(word: u32, length: u32) -> u32 {
        crc32c::change(word, length)
    }
);
