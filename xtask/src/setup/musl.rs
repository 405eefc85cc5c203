//! The C library that the plugins are linked with where Rust's own can be compiled for it.

use underpass_toolchain::Core;

use super::packages;
use crate::build::Musl;
use crate::report;

const PACKAGE: &str = "musl-dev";

/// Installs it where the compiler with this `core` can use it. Without it the plugins are linked with glibc, and start more slowly.
pub(super) fn ensure(core: Core) {
    if core != Core::FromSource || Musl::find().is_some() {
        return;
    }
    if packages::can_install() {
        report::step(
            "installing",
            &format!("{PACKAGE}: a C library that starts plugins faster than glibc"),
        );
        if let Err(error) = packages::install(&[PACKAGE]) {
            report::warn(&format!("{error:#}"));
        }
    }
    if Musl::find().is_none() {
        report::warn(&format!(
            "the plugins are linked with glibc, and start more slowly than with musl: `{}`",
            packages::by_hand(&[PACKAGE])
        ));
    }
}
