//! `underpass trace`: records of aya-log from the pinned programs. Nothing is logged while nobody
//! listens.

use std::{
    io::{self, Write as _},
    os::fd::AsFd as _,
    path::Path,
    sync::{Mutex, PoisonError},
};

use anstyle::{AnsiColor, Style};
use aya_log::EbpfLogger;
use log::{Level, LevelFilter, Log, Metadata, Record};
use nix::{
    errno::Errno,
    poll::{PollFd, PollFlags, PollTimeout, poll},
    sys::{
        signal::{SigSet, Signal},
        signalfd::{SfdFlags, SignalFd},
    },
};
use underpass_abi::map;
use underpass_dataplane::{Error as DataplaneError, Maps, Pins, lock::Lock};

use super::Failure;

pub(super) fn run(
    root: &Path,
    level: LevelFilter,
    out: &mut impl io::Write,
) -> Result<(), Failure> {
    let pins = Pins::at(root);
    // Not kept open: an upgrade would have to wait for the end of the trace.
    if Maps::open_existing(&pins)?.is_none() {
        return Err(DataplaneError::NotLoaded(root.to_owned()).into());
    }
    let _only = Lock::try_acquire_trace(root)?.ok_or(Failure::TraceBusy)?;
    // All programs that log share one map. This one is loaded on every node, and logs what it learns.
    let id = pins.program(map::TO_WIRE)?.id();
    // From here on signals are read like any other event, so that the level is reset however the
    // trace ends.
    let mut interrupts = SigSet::empty();
    for signal in [Signal::SIGINT, Signal::SIGTERM, Signal::SIGHUP] {
        interrupts.add(signal);
    }
    interrupts.thread_block().map_err(not_waiting)?;
    let signals = SignalFd::with_flags(&interrupts, SfdFlags::SFD_CLOEXEC).map_err(not_waiting)?;

    let records = Records::default();
    let mut logger = EbpfLogger::init_from_id_with_logger(id, &records)?;
    let level = LevelGuard::set(&pins, level)?;
    loop {
        let mut events = [
            PollFd::new(logger.as_fd(), PollFlags::POLLIN),
            PollFd::new(signals.as_fd(), PollFlags::POLLIN),
        ];
        match poll(&mut events, PollTimeout::NONE) {
            Ok(_) | Err(Errno::EINTR) => {}
            Err(errno) => return Err(not_waiting(errno)),
        }
        let [_, interrupted] = events.map(|event| event.any().unwrap_or(false));
        logger.flush();
        out.write_all(&records.take())?;
        out.flush()?;
        if interrupted {
            return level.reset();
        }
    }
}

fn not_waiting(errno: Errno) -> Failure {
    Failure::Wait(errno.into())
}

/// Reads `--level`.
pub(super) fn level(text: &str) -> Result<LevelFilter, String> {
    text.parse().map_err(|_| {
        let levels: Vec<_> = LevelFilter::iter()
            .map(|level| level.as_str().to_lowercase())
            .collect();
        format!("it must be one of {}", levels.join(", "))
    })
}

/// The level that programs log at, 0 again when this ends.
struct LevelGuard<'a> {
    pins: &'a Pins,
}

impl<'a> LevelGuard<'a> {
    fn set(pins: &'a Pins, level: LevelFilter) -> Result<Self, Failure> {
        let guard = Self { pins };
        // `LevelFilter` counts from 0 (off) to 5 (trace), as the programs do.
        guard.write(level as u32)?;
        Ok(guard)
    }

    fn reset(self) -> Result<(), Failure> {
        self.write(0)
    }

    fn write(&self, level: u32) -> Result<(), Failure> {
        let maps = Maps::open(self.pins)?;
        let _lock = Lock::acquire(self.pins.root())?;
        Ok(maps.set_trace(level)?)
    }
}

impl Drop for LevelGuard<'_> {
    fn drop(&mut self) {
        // After `reset` this writes the same again; after an error it is the best that can be done.
        let _ = self.write(0);
    }
}

/// Holds records between two reads of the ring.
#[derive(Default)]
struct Records {
    text: Mutex<Vec<u8>>,
}

impl Records {
    fn take(&self) -> Vec<u8> {
        std::mem::take(&mut *self.text.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

impl Log for Records {
    fn enabled(&self, _: &Metadata<'_>) -> bool {
        true
    }

    fn log(&self, record: &Record<'_>) {
        let style = style(record.level());
        let mut text = self.text.lock().unwrap_or_else(PoisonError::into_inner);
        // A vector takes everything.
        let _ = writeln!(
            text,
            "{style}{:<5}{style:#} {} {}",
            record.level(),
            record.target(),
            record.args()
        );
    }

    fn flush(&self) {}
}

const fn style(level: Level) -> Style {
    match level {
        Level::Error => AnsiColor::Red.on_default(),
        Level::Warn => AnsiColor::Yellow.on_default(),
        Level::Info => AnsiColor::Green.on_default(),
        Level::Debug | Level::Trace => Style::new().dimmed(),
    }
}
