//! Types and constants that the eBPF programs and user space share: the layout of every pinned map.
//!
//! Whatever crosses the boundary is `repr(C)`, has no implicit padding, no `bool` and no `enum`,
//! and says its byte order. A change of any layout here raises the number of its maps ([`map::MAPS`]), hence
//! they are pinned under another name: an old program never meets a new value.
#![no_std]

pub mod addr;
pub mod counter;
pub mod endpoint;
pub mod flow;
pub mod map;
pub mod node;
pub mod port;
pub mod quota;

/// Version of the pins' folder, `<bpfRoot>/v<ABI>/`: what is pinned there, and under which names. Until 7 it was raised by every
/// change of a map; since then maps have numbers of their own.
pub const ABI: u32 = 8;

/// Marks a type as free of padding and valid for every bit pattern, so that it may be filled from a
/// packet or a map.
///
/// # Safety
/// The type is `repr(C)`, has no padding bytes, and any content of its bytes is a valid value.
pub unsafe trait Plain: Copy + 'static {}

macro_rules! plain {
    (for either family: $($t:ident),* $(,)?) => {$(
        // SAFETY: repr(C), no padding with either of the two address types (asserted by the size
        // checks next to each type), integers only.
        unsafe impl<A: $crate::addr::Family> $crate::Plain for $t<A> {}
        #[cfg(feature = "user")]
        // SAFETY: as above.
        unsafe impl<A: $crate::addr::Family> aya::Pod for $t<A> {}
    )*};
    ($($t:ty),* $(,)?) => {$(
        // SAFETY: repr(C), no padding (asserted by the size checks next to each type), integers only.
        unsafe impl $crate::Plain for $t {}
        #[cfg(feature = "user")]
        // SAFETY: as above.
        unsafe impl aya::Pod for $t {}
    )*};
}
pub(crate) use plain;

// SAFETY: integers have neither padding nor invalid values.
unsafe impl Plain for u8 {}
// SAFETY: as above.
unsafe impl Plain for u16 {}
// SAFETY: as above.
unsafe impl Plain for u32 {}
// SAFETY: as above.
unsafe impl Plain for u64 {}
// SAFETY: an array has no padding between elements that have none.
unsafe impl<T: Plain, const N: usize> Plain for [T; N] {}
