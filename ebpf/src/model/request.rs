//! A flow that is to be translated, as it is asked for.

use underpass_abi::flow::{End, Tuple, rewrite, state};
use underpass_ebpf::ip::Ip;

use crate::model::direction::TWICE;

/// A flow to be masqueraded, and who it belongs to.
pub struct Request<I: Ip> {
    /// The tuple as the owner sends it.
    pub inner: Tuple<I::Addr>,
    /// The tuple as the world shall see it; its port is filled in.
    pub outer: Tuple<I::Addr>,
    /// Host veth of the pod; 0 if the flow is the host's own.
    pub owner: u32,
    /// Host veth of the other end; 0 if that is the world, or the host.
    pub client: u32,
    /// The uplink; 0 while it is not known.
    pub uplink: u32,
    /// Who sent the first packet.
    pub opener: Opener,
    /// Action for the owner's packets: `WIRE` or `STACK`.
    pub out: u8,
    /// Action for replies: `PEER` or `STACK`.
    pub back: u8,
    /// Who paid for it.
    pub payer: Payer,
}

/// Whose quota of half-open flows a translated flow was taken from.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Payer {
    /// Nobody's: it is the host's, or its place was paid for and an answer gives nothing back.
    Nobody,
    /// The owner's.
    Owner,
    /// The client's; if that is the world, it is of what the world may open to the owner.
    Client,
    /// There was nothing left of what the world may open: it is the first to go.
    Surplus,
}

/// Who sends the first packet of a translated flow.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Opener {
    /// The owner of the inner tuple.
    Owner,
    /// The other end, to a host port.
    Other,
    /// The owner, which is itself the client of a host port: both its ends are translated.
    Client,
    /// The owner, straight to a container, with a tuple that is taken by a flow to a host port.
    Aside,
}

/// The state of a new flow's entry, of which the owner has `end`.
#[inline(always)]
pub fn opened<I: Ip>(request: &Request<I>, end: End) -> u32 {
    match request.opener {
        Opener::Owner | Opener::Aside => end.heard(),
        Opener::Other => state::PORT,
        Opener::Client => end.heard() | state::PORT,
    }
}

#[inline(always)]
pub fn surplus<I: Ip>(request: &Request<I>) -> u32 {
    if request.payer == Payer::Surplus {
        state::SURPLUS
    } else {
        0
    }
}

/// What is replaced in both directions.
#[inline(always)]
pub fn both<I: Ip>(request: &Request<I>) -> u8 {
    match request.opener {
        Opener::Client | Opener::Aside => TWICE,
        Opener::Owner | Opener::Other => 0,
    }
}

/// Packets between two pods of this node are translated at the pods: no uplink does it for them.
#[inline(always)]
pub fn early<I: Ip>(request: &Request<I>) -> u8 {
    let is_of_pods = request.client != 0 && (request.owner != 0 || request.opener == Opener::Other);
    if is_of_pods { rewrite::EARLY } else { 0 }
}

#[inline(always)]
pub const fn opener(rewrites: u8, flow_state: u32) -> Opener {
    let is_twice = rewrites & TWICE == TWICE;
    match (flow_state & state::PORT != 0, is_twice) {
        (_, true) if rewrites & rewrite::ASIDE != 0 => Opener::Aside,
        (false, true) => Opener::Aside,
        (false, false) => Opener::Owner,
        (true, true) => Opener::Client,
        (true, false) => Opener::Other,
    }
}
