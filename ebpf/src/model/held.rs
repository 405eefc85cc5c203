//! A later fragment that waits for its first.

use underpass_abi::addr::Addr;

/// The longest frame that is kept, in bytes: one of the usual MTU, with whatever is around it.
pub const LENGTH: usize = 2048;

/// Key of `HELD`: one of the fragments of a datagram that wait at a hook.
#[repr(C)]
pub struct HeldKey {
    pub src: Addr,
    pub dst: Addr,
    pub identification: u32,
    pub protocol: u32,
    pub ifindex: u32,
    /// Counted from 0, in the order in which they came.
    pub turn: u32,
}

/// Value of `HELD`: a fragment as the hook saw it.
#[repr(C)]
pub struct Held {
    /// In bytes.
    pub len: u32,
    /// Tick at which it came.
    pub seen: u32,
    pub frame: [u8; LENGTH],
}
