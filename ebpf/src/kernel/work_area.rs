//! A CPU's work area, as one function sees it.

use core::ops::{Deref, DerefMut};

use crate::{kernel::net::Net, model::work::Work};

/// The work area of this CPU and family.
///
/// It is a view: who has one may refer to what is in the area, but to nothing of it across a call that
/// is lent the view, since the function that is called changes the area by a view of its own.
pub struct WorkArea<I: Net>(*mut Work<I>);

impl<I: Net> WorkArea<I> {
    /// The area; every CPU has one. It holds what the last packet left there.
    ///
    /// # Safety
    /// No reference into the area is used while the view lives, but those that come from the view.
    #[inline(always)]
    pub unsafe fn open() -> Option<Self> {
        I::work().map(Self)
    }
}

impl<I: Net> Deref for WorkArea<I> {
    type Target = Work<I>;

    #[inline(always)]
    fn deref(&self) -> &Work<I> {
        // SAFETY: an element of a map of this CPU, whose programs don't interrupt each other at tc: on kernels that let them (PREEMPT_RT
        // since 6.18) nothing is loaded. One that runs within a redirect of another's has the area from then on, see
        // `fragment::reorder::release`. Any bytes that the kernel or a program leaves there are valid.
        unsafe { &*self.0 }
    }
}

impl<I: Net> DerefMut for WorkArea<I> {
    #[inline(always)]
    fn deref_mut(&mut self) -> &mut Work<I> {
        // SAFETY: as above.
        unsafe { &mut *self.0 }
    }
}
