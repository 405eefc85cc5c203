//! The two smallest programs there are.

use std::path::Path;

use anyhow::{Context as _, Result};
use underpass_tests::program::{Instruction, pin};

/// `bpf_redirect`.
const REDIRECT: i32 = 23;

/// Pins a program that sends everything out of one device.
pub(crate) fn pin_redirect(ifindex: u32, path: &Path) -> Result<()> {
    let program = [
        Instruction::set(1, ifindex.cast_signed()),
        Instruction::set(2, 0),
        Instruction::call(REDIRECT),
        Instruction::EXIT,
    ];
    pin(&program, path).with_context(|| format!("pin a redirecting program at {}", path.display()))
}

/// Pins a program that does nothing: what the measuring of programs costs by itself.
pub(crate) fn pin_nothing(path: &Path) -> Result<()> {
    pin(&[Instruction::set(0, 0), Instruction::EXIT], path)
        .with_context(|| format!("pin an empty program at {}", path.display()))
}
