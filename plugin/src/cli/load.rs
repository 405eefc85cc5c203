//! `underpass load`: what ADDs would wait for, done ahead of them.

use std::{io, path::Path};

use underpass_abi::map;

use super::Failure;
use crate::datapath::{lock::Lock, object};

pub(super) fn run(root: &Path, out: &mut impl io::Write) -> Result<(), Failure> {
    let pins = object::open_or_load(root)?;
    let lock = Lock::acquire(root)?;
    object::load_missing(&lock, &pins, map::PROGRAMS.iter().copied())?;
    writeln!(
        out,
        "all programs are loaded and pinned at {}",
        pins.folder().display()
    )?;
    Ok(())
}
