//! What is undone if an ADD fails.

use crate::error::Error;

type Undoing<'a> = Box<dyn FnOnce() -> Result<(), Error> + 'a>;

/// What to do if the ADD fails: dropped without [`Self::keep`], it undoes every step, the last one
/// first. Where panics abort, a panic is like a kill: the DEL that the runtime sends after a failed
/// ADD finds the rest.
#[derive(Default)]
pub(crate) struct Undo<'a> {
    steps: Vec<(&'static str, Undoing<'a>)>,
}

impl<'a> Undo<'a> {
    /// Adds the undoing of a step that was just applied.
    pub(crate) fn push(
        &mut self,
        step: &'static str,
        undo: impl FnOnce() -> Result<(), Error> + 'a,
    ) {
        self.steps.push((step, Box::new(undo)));
    }

    /// Forgets everything, because the ADD succeeded.
    pub(crate) fn keep(mut self) {
        self.steps.clear();
    }
}

impl Drop for Undo<'_> {
    fn drop(&mut self) {
        while let Some((step, undo)) = self.steps.pop() {
            // The ADD's own error is what the runtime is told; this one is for the log.
            if let Err(error) = undo() {
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
    fn a_failed_add_undoes_the_last_step_first_and_all_of_them() {
        let order = RefCell::new(Vec::new());
        let mut undo = Undo::default();
        undo.push("one", || {
            order.borrow_mut().push(1);
            Ok(())
        });
        undo.push("two", || {
            order.borrow_mut().push(2);
            Err(Error::NoAddress("static".to_owned()))
        });
        undo.push("three", || {
            order.borrow_mut().push(3);
            Ok(())
        });
        drop(undo);
        assert_eq!(*order.borrow(), [3, 2, 1]);
    }

    #[test]
    fn a_successful_add_undoes_nothing() {
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
