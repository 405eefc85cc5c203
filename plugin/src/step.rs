//! The steps of an ADD, one file each. A step has `apply`, which leaves its undoing on a stack;
//! `verify` for CHECK; and `revert` for DEL and GC, which need nothing but what the kernel still
//! has.

use crate::error::Error;

pub(crate) mod address;
pub(crate) mod bandwidth;
pub(crate) mod endpoint;
pub(crate) mod foreign;
pub(crate) mod lease;
pub(crate) mod link;
pub(crate) mod port;
pub(crate) mod program;
pub(crate) mod route;
pub(crate) mod sysctl;
pub(crate) mod xdp;

type Revert<'a> = Box<dyn FnOnce() -> Result<(), Error> + 'a>;

/// What to do if the ADD fails: dropped without [`Self::keep`], it reverts every step, the last one
/// first. Where panics abort, a panic is like a kill: the DEL that the runtime sends after a failed
/// ADD finds the rest.
#[derive(Default)]
pub(crate) struct Undo<'a> {
    reverts: Vec<(&'static str, Revert<'a>)>,
}

impl<'a> Undo<'a> {
    /// Adds the undoing of a step that was just applied.
    pub(crate) fn push(
        &mut self,
        step: &'static str,
        revert: impl FnOnce() -> Result<(), Error> + 'a,
    ) {
        self.reverts.push((step, Box::new(revert)));
    }

    /// The ADD succeeded.
    pub(crate) fn keep(mut self) {
        self.reverts.clear();
    }
}

impl Drop for Undo<'_> {
    fn drop(&mut self) {
        while let Some((step, revert)) = self.reverts.pop() {
            // The ADD's own error is what the runtime is told; this one is for the log.
            if let Err(error) = revert() {
                tracing::warn!("cannot undo the step {step:?} of a failed ADD: {error}");
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;

    use super::*;

    #[test]
    fn a_failed_add_reverts_the_last_step_first_and_all_of_them() {
        let order = RefCell::new(Vec::new());
        let mut undo = Undo::default();
        undo.push("one", || {
            order.borrow_mut().push(1);
            Ok(())
        });
        undo.push("two", || {
            order.borrow_mut().push(2);
            Err(Error::NoAddress)
        });
        undo.push("three", || {
            order.borrow_mut().push(3);
            Ok(())
        });
        drop(undo);
        assert_eq!(*order.borrow(), [3, 2, 1]);
    }

    #[test]
    fn a_successful_add_reverts_nothing() {
        let count = RefCell::new(0);
        let mut undo = Undo::default();
        undo.push("one", || {
            *count.borrow_mut() += 1;
            Ok(())
        });
        undo.keep();
        assert_eq!(*count.borrow(), 0);
    }
}
