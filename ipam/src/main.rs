//! `underpass-ipam`: the allocator as a plugin that any interface plugin may delegate to.
//!
//! Installed (or linked) as `host-local` it answers to that name.

use std::env;
use std::path::PathBuf;
use std::process::ExitCode;

use dlmalloc::GlobalDlmalloc;
use underpass_cni::{About, Error, Version, refuse, serve};
use underpass_ipam::HostLocal;

/// See the plugin's: musl's own asks the kernel for each piece of memory.
#[global_allocator]
static ALLOCATOR: GlobalDlmalloc = GlobalDlmalloc;

/// The names that it answers to. A longer one that begins with the first is served, too, as `underpass-ipam-0.2`.
const SERVED: [&str; 2] = ["underpass-ipam", "host-local"];

fn main() -> ExitCode {
    let called = env::args_os().next().map(PathBuf::from).unwrap_or_default();
    let name = called
        .file_name()
        .map_or(SERVED[0].into(), |name| name.to_string_lossy());
    if let Err(error) = require_served(&name) {
        return refuse(&error);
    }
    let about = About {
        name: &name,
        version: env!("CARGO_PKG_VERSION"),
        supported: &Version::ALL,
    };
    serve(&about, &HostLocal)
}

/// Code 4 under another name: who asked for `static` must not get addresses of somebody else.
fn require_served(name: &str) -> Result<(), Error> {
    let [first, second] = SERVED;
    if name.starts_with(first) || name == second {
        return Ok(());
    }
    Err(Error::environment(format!(
        "{first} was called by the name {name:?}, which it does not serve: it serves {first}, {second}, and names that \
         begin with {first}; install the plugin {name:?} itself in this place, or link {first} under one of these names"
    )))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_the_allocator_under_its_own_names_only() {
        for name in ["underpass-ipam", "underpass-ipam-0.2", "host-local"] {
            assert_eq!(require_served(name), Ok(()), "{name}");
        }
        for other in ["static", "underpass", "underpass-0.2", "host-local2", ""] {
            let error = require_served(other).expect_err(other);
            assert_eq!(error.code.number(), 4);
            for word in [other].into_iter().chain(SERVED) {
                assert!(error.msg.contains(word), "{error}");
            }
        }
    }
}
