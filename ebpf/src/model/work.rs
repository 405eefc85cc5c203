//! What stages hand to each other about one packet.

use aya_ebpf::bindings::bpf_redir_neigh;
use underpass_abi::flow::{End, Flow, Half, Key, Tuple};
use underpass_ebpf::ip::{Head, Ip};

use crate::model::{request::Request, route::Route};

/// Where a tuple's entry is in the flow tables, and which end of it the tuple's source is.
pub struct Place<I: Ip> {
    /// Key of the entry.
    pub key: Key<I::Addr>,
    /// The source's end.
    pub end: End,
}

impl<I: Ip> Place<I> {
    /// Sets the place to that of a tuple.
    #[inline(always)]
    pub fn set(&mut self, tuple: &Tuple<I::Addr>) {
        (self.key, self.end) = tuple.key();
    }
}

/// Room for what is too large for the stack, one per CPU and family. The slow path alone uses it.
///
/// Global functions change it too, see [`WorkArea`](crate::kernel::work_area::WorkArea).
pub struct Work<I: Ip> {
    /// The packet.
    pub head: Head<I>,
    /// The packet that it quotes.
    pub inner: Head<I>,
    /// Whether it must be known again where it comes out of the stack.
    pub is_signed: bool,
    /// Whether it must have the same hash there as what goes straight into the stack.
    pub is_summed: bool,
    /// Where its flow's entry is.
    pub place: Place<I>,
    /// What is known of its flow's direction.
    pub half: Half<I::Addr>,
    /// What is known of its flow's state.
    pub state: u32,
    /// Tick at which its entry was made.
    pub since: u32,
    /// What its direction is stamped with when it has been taken note of, see [`stamp_of_stack`](crate::kernel::maps::stamp_of_stack).
    pub stamp: u64,
    /// Whether one that has said the same of its flow was taken note of in this tick.
    pub is_noted: bool,
    /// The translation that is wanted for it.
    pub request: Request<I>,
    /// The tuple that it leaves with, if it is translated.
    pub partner: Tuple<I::Addr>,
    /// Where the entry of that is.
    pub partner_place: Place<I>,
    /// A flow that is being made for the table: too large for the stack.
    pub draft: Flow<I::Addr>,
    /// The way that the routing table has for it.
    pub route: Route<I::Addr>,
    /// The next hop of that.
    pub next_hop: bpf_redir_neigh,
    /// How many packets this CPU has given a number.
    pub numbered: u32,
}
