//! Clearing and copying without calls: the compiler's `memset`, `memcpy` and `memmove` are loops
//! over bytes, which the verifier walks through at each call, and the processor at each packet.

use core::{mem::MaybeUninit, ptr};

use underpass_abi::Plain;

/// Sets a value to zero.
#[inline(always)]
pub fn clear<T: Plain>(value: &mut T) {
    fill(ptr::from_mut(value), None);
}

/// Overwrites a value with another.
#[inline(always)]
pub fn copy<T: Plain>(to: &mut T, from: &T) {
    fill(ptr::from_mut(to), Some(from));
}

/// A MAC in words, as it is compared and copied.
#[inline(always)]
#[expect(
    clippy::cast_ptr_alignment,
    reason = "MACs of shared layouts lie at even offsets, see underpass_abi::flow"
)]
pub fn mac_words(mac: &[u8; 6]) -> [u16; 3] {
    let mac = ptr::from_ref(mac).cast::<u16>();
    // SAFETY: inside the MAC, and aligned: see the reason above.
    [0, 1, 2].map(|at| unsafe { mac.add(at).read() })
}

/// A value of zeros, for the arguments of helpers.
///
/// # Safety
/// All bytes zero are a valid `T`.
#[inline(always)]
pub unsafe fn zeroed<T>() -> T {
    let mut value = MaybeUninit::<T>::uninit();
    fill(value.as_mut_ptr(), None);
    // SAFETY: every byte was written, and the caller knows that zeros are valid.
    unsafe { value.assume_init() }
}

/// Word by word, as wide as the type's alignment says.
#[inline(always)]
fn fill<T>(to: *mut T, from: Option<&T>) {
    match align_of::<T>() {
        8 => words::<T, u64>(to, from),
        4 => words::<T, u32>(to, from),
        2 => words::<T, u16>(to, from),
        _ => words::<T, u8>(to, from),
    }
}

#[inline(always)]
fn words<T, W: Default>(to: *mut T, from: Option<&T>) {
    let (to, from) = (
        to.cast::<W>(),
        from.map(|from| ptr::from_ref(from).cast::<W>()),
    );
    for at in 0..size_of::<T>() / size_of::<W>() {
        // SAFETY: inside the values, whose size is a multiple of their alignment, which is that of
        // a word.
        let word = from.map_or_else(W::default, |from| unsafe { from.add(at).read() });
        // SAFETY: as above. Volatile, or the compiler makes a call of the loop again.
        unsafe { to.add(at).write_volatile(word) };
    }
}
