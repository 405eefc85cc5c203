//! `underpass`: the CNI plugin where a runtime calls it, and the operator's command line where a person does.

use std::{env, io, process::ExitCode};

use underpass_cni::{About, Version, serve};

mod cli;
mod conf;
mod datapath;
mod error;
mod glob;
mod identity;
mod log;
mod netlink;
mod netns;
mod plan;
mod step;
mod stopwatch;
mod uplink;
mod verb;

fn main() -> ExitCode {
    log::init();
    let called = env::var_os("CNI_COMMAND").is_some_and(|verb| !verb.is_empty());
    let nobody = env::args_os().len() == 1 && !io::IsTerminal::is_terminal(&io::stdin());
    if called || nobody {
        let about = About {
            name: "underpass",
            version: env!("CARGO_PKG_VERSION"),
            supported: &Version::ALL,
        };
        return serve(&about, &verb::Underpass);
    }
    cli::run()
}
