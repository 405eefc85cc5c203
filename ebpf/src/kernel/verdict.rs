//! What a program says of a packet, and the one place where that becomes a return code.

use core::num::NonZeroU32;

use aya_ebpf::bindings::TC_ACT_SHOT;
use underpass_abi::counter::Counter;

use crate::kernel::{
    global::{Number, Outcome},
    maps::count_at,
};

/// What becomes of a packet.
///
/// It is a number that is never zero, and no enum: where one variant of an enum has less to say than
/// another, the compiler copies a register that nobody wrote, and the verifier refuses that.
#[derive(Clone, Copy)]
pub struct Verdict(NonZeroU32);

/// A stage's result: go on with a value, or the packet's verdict.
pub type Step<T> = Result<T, Verdict>;

/// Bit of each verdict's number, by which it is told from a value to go on with.
const VERDICT: NonZeroU32 = NonZeroU32::new(1 << 31).expect("a bit");
/// Bit of the number of a drop, whose lowest byte is its counter. Otherwise that byte is the return
/// code.
const DROP: u32 = 1 << 8;

impl Verdict {
    /// `TC_ACT_UNSPEC`: the packet is not ours, or done with. The stack carries it, after everybody
    /// else's programs.
    pub const STACK: Self = Self(NonZeroU32::new(VERDICT.get() | 0xff).expect("a bit"));

    /// The packet is dropped, for a reason that is counted.
    #[inline(always)]
    pub fn dropped(reason: Counter) -> Self {
        Self(VERDICT | DROP | reason as u32)
    }

    /// A redirect helper took the packet and said this, or the program kept it.
    #[inline(always)]
    pub fn sent(code: u32) -> Self {
        Self(VERDICT | (code & 0xff))
    }

    /// The return code of a program.
    #[inline(always)]
    fn code(self) -> i32 {
        let [low, ..] = self.0.get().to_le_bytes();
        if self.0.get() & DROP == 0 {
            return low.cast_signed().into();
        }
        count_at(low.into());
        TC_ACT_SHOT
    }
}

/// The return code of a program.
#[inline(always)]
pub fn code(step: Step<Verdict>) -> i32 {
    step.unwrap_or_else(|verdict| verdict).code()
}

impl Number for Verdict {
    type Raw = u32;

    #[inline(always)]
    fn encode(self) -> u32 {
        self.0.get()
    }

    #[inline(always)]
    fn decode(raw: u32) -> Self {
        Self(VERDICT | raw)
    }
}

/// A verdict's number says that it is one. So a `Step<Verdict>` comes back from a global function as `Err`, whichever it was: that is for who hands it on,
/// and who has something to do afterwards wants a `Step<()>`.
impl<T: Number<Raw = u32>> Number for Step<T> {
    type Raw = u32;

    #[inline(always)]
    fn encode(self) -> u32 {
        match self {
            Ok(value) => value.encode(),
            Err(verdict) => verdict.encode(),
        }
    }

    #[inline(always)]
    fn decode(raw: u32) -> Self {
        if raw & VERDICT.get() == 0 {
            Ok(T::decode(raw))
        } else {
            Err(Verdict::decode(raw))
        }
    }
}

impl Outcome for Verdict {
    const FALLBACK: Self = Self::STACK;
}

impl<T: Number<Raw = u32>> Outcome for Step<T> {
    const FALLBACK: Self = Err(Verdict::STACK);
}
