//! What a program says of a packet, and the one place where that becomes a return code.

use aya_ebpf::bindings::TC_ACT_SHOT;
use underpass_abi::counter::Counter;
use underpass_ebpf::packet::Short;

use crate::kernel::maps::count;

/// `TC_ACT_UNSPEC`: not ours, or done with; other programs and the stack go on.
pub const PASS: i32 = -1;

/// What a stage returns that leaves the packet to the next one; no return code of tc.
pub const NEXT: i32 = -2;

/// What a stage returns for an ICMP error, which is another stage's; no return code of tc.
pub const ERROR: i32 = -4;

/// What a stage returns for a packet of a flow that needs both its ends translated, see
/// [`twice`](crate::nat::hairpin); no return code of tc.
pub const CROWDED: i32 = -7;

/// What becomes of a packet.
#[derive(Clone, Copy)]
pub enum Verdict {
    /// The stack carries it, after everybody else's programs.
    Stack,
    /// It is dropped, for a reason that is counted.
    Drop(Counter),
    /// A redirect helper took it and said this.
    Sent(i32),
}

/// A stage's result: go on with a value, or the packet's verdict.
pub type Step<T> = Result<T, Verdict>;

impl Verdict {
    /// The return code of a tc program.
    #[inline(always)]
    fn code(self) -> i32 {
        match self {
            Self::Stack => PASS,
            Self::Drop(counter) => {
                count(counter);
                TC_ACT_SHOT
            }
            Self::Sent(code) => code,
        }
    }
}

/// The return code of a stage, or of a program.
#[inline(always)]
pub fn code(step: Step<Verdict>) -> i32 {
    step.unwrap_or_else(|verdict| verdict).code()
}

/// A packet that ends early where it was only looked at is the stack's to judge.
impl From<Short> for Verdict {
    #[inline(always)]
    fn from(_: Short) -> Self {
        Self::Stack
    }
}
