//! How long the fixtures wait for what must come, on machines that are slower than those the tests were written on.

use std::{
    env,
    sync::LazyLock,
    thread,
    time::{Duration, Instant},
};

use anyhow::Result;

/// How many times longer than elsewhere anything may take here; `cargo xtask test vm` sets it in its emulated machines.
const VARIABLE: &str = "UNDERPASS_TEST_PATIENCE";

/// How long to wait here for something that must come within `usual` elsewhere.
///
/// # Panics
/// If the environment names a factor that is none.
#[must_use]
pub fn here(usual: Duration) -> Duration {
    usual * factor()
}

/// How many times slower than elsewhere it may be here, 1 if it is as fast: tests that repeat something often do it so many times less.
///
/// # Panics
/// If the environment names a factor that is none.
#[must_use]
pub fn factor() -> u32 {
    static FACTOR: LazyLock<u32> = LazyLock::new(|| {
        env::var(VARIABLE).map_or(1, |value| {
            value
                .parse()
                .ok()
                .filter(|&factor| factor > 0)
                .unwrap_or_else(|| panic!("{VARIABLE}={value} is not a number above zero"))
        })
    });
    *FACTOR
}

/// Tries every now and then until it holds, or for too long: a client of the API that was refused a few times asks again only after half
/// a minute, and another build has the kernel verify its programs first. `what` is said with the last error.
pub fn eventually(what: &str, mut holds: impl FnMut() -> Result<()>) -> Result<()> {
    let end = Instant::now() + here(Duration::from_mins(2));
    loop {
        match holds() {
            Ok(()) => return Ok(()),
            Err(error) if Instant::now() > end => return Err(error.context(what.to_owned())),
            Err(_) => thread::sleep(Duration::from_millis(50)),
        }
    }
}
