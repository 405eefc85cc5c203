//! `underpass`: the CNI plugin where a runtime calls it, and the operator's command line where a
//! person does.

use std::{env, io, path::Path, process::ExitCode};

use underpass::{cli, log, verb};
use underpass_cni::{About, Version, serve};
use underpass_ipam::HostLocal;

/// Names of plugins that have no command line, whatever their arguments.
const OTHER_NAMES: [&str; 3] = ["ptp", "host-local", "portmap"];

fn main() -> ExitCode {
    log::init();
    let name = name();
    let called = env::var_os("CNI_COMMAND").is_some_and(|verb| !verb.is_empty());
    let nobody = env::args_os().len() == 1 && !io::IsTerminal::is_terminal(&io::stdin());
    let is_plugin_only = OTHER_NAMES.contains(&name.as_str());
    if !called && !nobody && !is_plugin_only {
        return cli::run();
    }
    let about = About {
        name: &name,
        version: env!("CARGO_PKG_VERSION"),
        supported: &Version::ALL,
    };
    if name == "host-local" {
        return serve(&about, &HostLocal);
    }
    if name == "portmap" {
        return serve(&about, &verb::Portmap);
    }
    serve(&about, &verb::Underpass)
}

/// The name that this program was installed under: existing configs ask for `ptp`, `host-local` and
/// `portmap`, and find what they expect.
fn name() -> String {
    env::args_os()
        .next()
        .as_deref()
        .and_then(|path| Path::new(path).file_name())
        .map_or_else(
            || "underpass".to_owned(),
            |name| name.to_string_lossy().into_owned(),
        )
}
