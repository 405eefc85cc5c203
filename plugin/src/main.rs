//! `underpass`: the CNI plugin where a runtime calls it, and the operator's command line where a
//! person does.

use std::{env, io, path::Path, process::ExitCode};

use dlmalloc::GlobalDlmalloc;
use underpass::{cli, log, name::Name, verb};
use underpass_cni::{About, Version, refuse, serve};
use underpass_ipam::HostLocal;

/// musl's own allocator gives each piece of memory back to the kernel at once and asks for it again: eighty times in an ADD, a fifth of its time.
#[global_allocator]
static ALLOCATOR: GlobalDlmalloc = GlobalDlmalloc;

fn main() -> ExitCode {
    log::init();
    let file_name = file_name();
    let name = match Name::of(&file_name) {
        Ok(name) => name,
        Err(error) => return refuse(&error),
    };
    let called = env::var_os("CNI_COMMAND").is_some_and(|verb| !verb.is_empty());
    let nobody = env::args_os().len() == 1 && !io::IsTerminal::is_terminal(&io::stdin());
    if !called && !nobody && name.has_command_line() {
        return cli::run();
    }
    let about = About {
        name: &file_name,
        version: env!("CARGO_PKG_VERSION"),
        supported: &Version::ALL,
    };
    match name {
        Name::Underpass | Name::Ptp => serve(&about, &verb::Underpass),
        Name::HostLocal => serve(&about, &HostLocal),
        Name::Portmap => serve(&about, &verb::Portmap),
        Name::Bandwidth => serve(&about, &verb::Bandwidth),
        Name::Loopback => serve(&about, &verb::Loopback),
    }
}

/// The name that this program was installed under.
fn file_name() -> String {
    env::args_os()
        .next()
        .as_deref()
        .and_then(|path| Path::new(path).file_name())
        .map_or_else(
            || "underpass".to_owned(),
            |name| name.to_string_lossy().into_owned(),
        )
}
