//! Programs of a few instructions, made by hand so that no compiler adds anything to them, and what tests do to
//! programs that are pinned.

use std::{
    os::fd::{AsFd as _, OwnedFd},
    path::Path,
};

use anyhow::{Context as _, Result, ensure};
use underpass_dataplane::{bpf, netkit};

/// The register that points behind the stack frame.
pub const FRAME: u8 = 10;

/// One instruction, as the kernel has it.
#[derive(Clone, Copy, Debug)]
pub struct Instruction {
    code: u8,
    /// Destination in the lower half, source in the upper.
    registers: u8,
    offset: i16,
    immediate: i32,
}

impl Instruction {
    /// Ends the program; its value is in register 0.
    pub const EXIT: Self = Self::new(0x95, 0, 0, 0);

    const fn new(code: u8, registers: u8, offset: i16, immediate: i32) -> Self {
        Self {
            code,
            registers,
            offset,
            immediate,
        }
    }

    /// `r<register> = value`.
    #[must_use]
    pub const fn set(register: u8, value: i32) -> Self {
        Self::new(0xb7, register, 0, value)
    }

    /// `r<to> = r<from>`.
    #[must_use]
    pub const fn copy(to: u8, from: u8) -> Self {
        Self::new(0xbf, to | from << 4, 0, 0)
    }

    /// `r<register> += value`.
    #[must_use]
    pub const fn add(register: u8, value: i32) -> Self {
        Self::new(0x07, register, 0, value)
    }

    /// Stores eight bytes at `offset` from the end of the stack frame.
    #[must_use]
    pub const fn store(offset: i16, value: i32) -> Self {
        Self::new(0x7a, FRAME, offset, value)
    }

    /// Stores the lower four bytes of `from` at `offset` from where `to` points.
    #[must_use]
    pub const fn store_word(to: u8, offset: i16, from: u8) -> Self {
        Self::new(0x63, to | from << 4, offset, 0)
    }

    /// Calls a helper by its number; arguments are in registers 1 to 5, the result in 0.
    #[must_use]
    pub const fn call(helper: i32) -> Self {
        Self::new(0x85, 0, 0, helper)
    }

    fn word(self) -> u64 {
        let Self {
            code,
            registers,
            offset,
            immediate,
        } = self;
        let mut bytes = [code, registers, 0, 0, 0, 0, 0, 0];
        bytes[2..4].copy_from_slice(&offset.to_ne_bytes());
        bytes[4..].copy_from_slice(&immediate.to_ne_bytes());
        u64::from_ne_bytes(bytes)
    }
}

/// Loads a program for tc.
pub fn load(program: &[Instruction]) -> Result<OwnedFd> {
    let words: Vec<u64> = program.iter().map(|one| one.word()).collect();
    bpf::load_classifier(&words).context("load it")
}

/// Loads a program for tc and pins it.
pub fn pin(program: &[Instruction], path: &Path) -> Result<()> {
    bpf::pin(load(program)?, path).context("pin it")
}

/// Takes a pinned program off the peer of a netkit device of the calling thread's namespace.
pub fn detach_from_netkit(device: u32, path: &Path) -> Result<()> {
    let program = bpf::open_pin(path).context("open it")?;
    let found = netkit::detach(device, "the netkit", program.as_fd())?;
    ensure!(found, "the program is not there");
    Ok(())
}
