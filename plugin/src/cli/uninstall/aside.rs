//! The conflist that an uninstall has set aside: who goes on with it, and who puts it back.

use std::io;

use crate::{
    cli::Failure,
    install::{
        conflist::{self, Found},
        folder::{Change, Folder},
    },
};

/// Reads the conflist: the one that a runtime sees, or else the one that an uninstall had set aside before it was killed.
pub(super) fn find(net: &Folder, out: &mut impl io::Write) -> Result<Found, Failure> {
    forget_older(net, out)?;
    let name = if net.has(conflist::ASIDE)? {
        writeln!(
            out,
            "going on with the network of {}, where an uninstall was killed",
            net.path(conflist::ASIDE).display()
        )?;
        conflist::ASIDE
    } else {
        conflist::FILE
    };
    let text = net.read(name)?;
    Ok(Found::read(net.path(conflist::FILE), text.as_deref()))
}

/// Puts the conflist back that an uninstall has set aside, unless there is another one by now.
pub(in crate::cli) fn put_back(net: &Folder, out: &mut impl io::Write) -> Result<Change, Failure> {
    forget_older(net, out)?;
    if !net.has(conflist::ASIDE)? {
        return Ok(Change::None);
    }
    net.rename_new(conflist::ASIDE, conflist::FILE)?;
    writeln!(
        out,
        "put back    {}, which an uninstall had set aside",
        net.path(conflist::FILE).display()
    )?;
    Ok(Change::Made)
}

/// Removes what an uninstall has set aside, if there is a conflist again: somebody has written what he wants.
fn forget_older(net: &Folder, out: &mut impl io::Write) -> Result<(), Failure> {
    if net.has(conflist::FILE)? && net.has(conflist::ASIDE)? {
        net.remove(conflist::ASIDE)?;
        writeln!(
            out,
            "removed     {}, which an uninstall had set aside: {} is there again",
            net.path(conflist::ASIDE).display(),
            conflist::FILE
        )?;
    }
    Ok(())
}
