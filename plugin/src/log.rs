//! Logs: on stderr, warnings and worse unless `UNDERPASS_LOG` names another level.

use std::{env, io};

use tracing::Level;

/// The variable that names the lowest level to log: `error`, `warn`, `info`, `debug` or `trace`.
const VARIABLE: &str = "UNDERPASS_LOG";

/// Starts logging. An unknown level is the default.
pub fn init() {
    let level = env::var(VARIABLE)
        .ok()
        .and_then(|name| name.parse().ok())
        .unwrap_or(Level::WARN);
    tracing_subscriber::fmt()
        .with_max_level(level)
        .with_writer(io::stderr)
        .with_target(false)
        .with_ansi(io::IsTerminal::is_terminal(&io::stderr()))
        .init();
}
