//! `underpass upgrade`: this executable's programs in place of those that another one has loaded.

use std::{io, path::Path};

use underpass_dataplane::{
    Maps, Pins,
    policy::{self, Rules},
    upgrade::{self, Outcome, Report},
};

use super::Failure;

pub(super) fn run(root: &Path, out: &mut impl io::Write) -> Result<(), Failure> {
    match upgrade::run(root)? {
        Outcome::NotLoaded => writeln!(
            out,
            "nothing is loaded at {}: the first ADD or `underpass load` loads this build",
            root.display()
        )?,
        Outcome::Same => writeln!(out, "this build is loaded at {}", root.display())?,
        Outcome::Done(report) => {
            done(&report, root, out)?;
            // This build may go by more of the node's network stack than the one before.
            if let Some(maps) = Maps::open_existing(&Pins::at(root))? {
                policy::refresh(&maps, || Ok(Rules::wanted()))?;
            }
        }
    }
    Ok(())
}

fn done(report: &Report, root: &Path, out: &mut impl io::Write) -> io::Result<()> {
    let Report {
        from,
        programs,
        places,
        copied,
        dropped,
    } = report;
    writeln!(
        out,
        "this build has taken over from build {from:08x} at {}: {programs} programs, exchanged at {places} places",
        root.display()
    )?;
    if !copied.is_empty() {
        writeln!(out, "entries copied: {}", copied.join(", "))?;
    }
    if !dropped.is_empty() {
        writeln!(out, "begun anew: {}", dropped.join(", "))?;
    }
    Ok(())
}
