//! The two smallest programs there are.

use std::path::Path;

use anyhow::{Context as _, Result};
use underpass_tests::program::{Instruction, pin};

/// Where a program sends everything, by the number of the helper.
#[derive(Clone, Copy)]
pub(crate) enum Redirect {
    /// Out of a device: `bpf_redirect`.
    Out = 23,
    /// In at the other end of a pair: `bpf_redirect_peer` (Linux 5.10).
    Peer = 155,
}

/// Pins a program that sends everything by one device.
pub(crate) fn pin_redirect(how: Redirect, ifindex: u32, path: &Path) -> Result<()> {
    let program = [
        Instruction::set(1, ifindex.cast_signed()),
        Instruction::set(2, 0),
        Instruction::call(how as i32),
        Instruction::EXIT,
    ];
    pin(&program, path).with_context(|| format!("pin a redirecting program at {}", path.display()))
}

/// Pins a program that does nothing: what the measuring of programs costs by itself.
pub(crate) fn pin_nothing(path: &Path) -> Result<()> {
    pin(&[Instruction::set(0, 0), Instruction::EXIT], path)
        .with_context(|| format!("pin an empty program at {}", path.display()))
}
