//! `cargo xtask demo`: a throwaway node, two containers, the outside world, and proof of what happened. Needs root.

mod act;
mod screen;

use std::process::ExitCode;

use underpass_tests::{node::find_plugin, privilege};

fn main() -> ExitCode {
    let obstacle = privilege::missing().or_else(|| find_plugin().err().map(str::to_owned));
    if let Some(reason) = obstacle {
        screen::failure("The demo can't run here", &reason);
        return ExitCode::FAILURE;
    }
    let start = std::time::Instant::now();
    match act::play() {
        Ok(()) => {
            screen::success(&format!(
                "All of it worked, in {:.1} seconds, and nothing of it is left on this machine.",
                start.elapsed().as_secs_f64()
            ));
            ExitCode::SUCCESS
        }
        Err(failure) => {
            screen::failure(
                &format!("Failed at step {}, {}", failure.number, failure.step),
                &format!("{:#}", failure.error),
            );
            ExitCode::FAILURE
        }
    }
}
