//! `underpass-ipam`: the allocator as a plugin that any interface plugin may delegate to.
//!
//! Installed (or linked) as `host-local` it answers to that name.

use std::env;
use std::path::PathBuf;
use std::process::ExitCode;

use underpass_cni::{About, Version, serve};
use underpass_ipam::HostLocal;

fn main() -> ExitCode {
    let called = env::args_os().next().map(PathBuf::from).unwrap_or_default();
    let name = called
        .file_name()
        .and_then(|name| name.to_str())
        .unwrap_or("underpass-ipam");
    let about = About {
        name,
        version: env!("CARGO_PKG_VERSION"),
        supported: &Version::ALL,
    };
    serve(&about, &HostLocal)
}
