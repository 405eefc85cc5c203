//! What DEL, GC and a failed ADD take away, and an ADD of what a lost DEL has left.

use underpass_abi::endpoint::{Attachment as Record, Owner, role};
use underpass_dataplane::{Maps, lock::Lock};
use underpass_netlink::Netlink;

use super::{REVERT_CHAINED, REVERT_INTERFACE, chained, endpoint};
use crate::error::Error;

/// An attachment that has to go: whatever the kernel and the maps still have of it.
pub(crate) struct Detachment<'a> {
    /// A socket in the node's namespace.
    pub(crate) node: &'a Netlink,
    pub(crate) owner: Owner,
    /// None where nothing is loaded, or the maps don't know the attachment.
    pub(crate) known: Option<Known<'a>>,
}

/// What the maps know of an attachment.
pub(crate) struct Known<'a> {
    pub(crate) maps: &'a mut Maps,
    /// All that it put into maps.
    pub(crate) record: Record,
}

impl Detachment<'_> {
    /// Tells whether the maps know the attachment by another record by now: another call has removed this one, and the container has been
    /// attached anew, with the names of before.
    pub(super) fn is_superseded(&self) -> Result<bool, Error> {
        let Some(Known { maps, record }) = &self.known else {
            return Ok(false);
        };
        let now = maps.attachment(self.owner)?;
        Ok(now.is_some_and(|now| now.ifindex != record.ifindex))
    }

    /// Takes the lock, if the maps know the attachment, and know it still by the record that was read.
    pub(super) fn lock(&mut self) -> Result<Option<(Lock, &mut Maps, &Record)>, Error> {
        let Some(Known { maps, record }) = &mut self.known else {
            return Ok(None);
        };
        let lock = lock_known(maps, self.owner, record)?;
        Ok(lock.map(|lock| (lock, &mut **maps, &*record)))
    }
}

/// Removes map entries and devices of an attachment, by the list that its role asks for. Goes on past errors.
pub(crate) fn detach(node: &Netlink, maps: Option<&mut Maps>, owner: Owner) -> Result<(), Error> {
    let mut known = None;
    if let Some(maps) = maps {
        let record = maps.attachment(owner)?;
        known = record.map(|record| Known { maps, record });
    }
    let steps = match &known {
        Some(known) if known.record.role == role::CHAINED => REVERT_CHAINED,
        _ => REVERT_INTERFACE,
    };
    let mut detachment = Detachment { node, owner, known };
    let mut errors = Vec::new();
    for step in steps {
        if let Err(error) = step.revert(&mut detachment) {
            errors.push(error);
            if step.comes_before_the_rest() {
                break;
            }
        }
    }
    Error::collect(errors)
}

/// Takes its host ports from a container that another plugin attached. It may have none.
pub(crate) fn detach_chained(node: &Netlink, maps: &mut Maps, owner: Owner) -> Result<(), Error> {
    match maps.attachment(owner)? {
        Some(_) => detach(node, Some(maps), owner),
        None => Ok(()),
    }
}

/// Makes the maps forget an attachment whose device is gone. Whether its network has [another](end_without) is not asked.
pub(crate) fn forget(
    node: &Netlink,
    maps: &mut Maps,
    owner: Owner,
    record: &Record,
) -> Result<(), Error> {
    let Some(lock) = lock_known(maps, owner, record)? else {
        return Ok(());
    };
    match record.role {
        role::CHAINED => chained::remove(&lock, node, maps, owner, record),
        _ => endpoint::forget(&lock, node, maps, owner, record),
    }
}

/// Takes away what a network has beside its attachments, if it has none but those that leave.
pub(crate) fn end_without(
    maps: &Maps,
    network: u32,
    leaves: impl Fn(&Owner, &Record) -> bool,
) -> Result<(), Error> {
    let lock = Lock::acquire(maps.pins().root())?;
    endpoint::end_without(&lock, maps, network, leaves)
}

/// Takes the lock, if the maps still know the attachment by this record: meanwhile another call may have
/// removed it, and the container may have been attached anew, with the names of before.
pub(super) fn lock_known(
    maps: &Maps,
    owner: Owner,
    record: &Record,
) -> Result<Option<Lock>, Error> {
    let lock = Lock::acquire(maps.pins().root())?;
    let is_known = maps.attachment(owner)?.as_ref() == Some(record);
    Ok(is_known.then_some(lock))
}
