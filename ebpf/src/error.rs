//! ICMP errors: a message about a packet, with the packet's first bytes inside. Where the packet was translated, what is quoted must
//! be translated back, or its sender can't tell what the message is about (RFC 5508, section 4).

use underpass_abi::flow::{Tuple, protocol};

use crate::{
    checksum::{Delta, Summed},
    ip::{Head, Ip, Piece},
    l4::{Depth, checksum_of},
    packet::{Covers, Load, Packet, Short, Zero},
    translate::{set_crc, set_ports},
};

/// Reads the packet that the ICMP error `head` quotes.
#[inline(always)]
pub fn quoted<I: Ip, P: Load>(packet: &P, head: &Head<I>) -> Result<Head<I>, Short> {
    I::parse(packet, head.l4 + 8, Depth::Quoted)
}

/// Rewrites an ICMP error: the quoted packet gets the tuple `quote`, the message itself the addresses `src` and `dst`.
///
/// The transport checksum of the quoted packet follows where it was quoted at all; it is often cut off (RFC 792 asks for 8 bytes).
/// As in [`translate`](crate::translate::translate) the outer network header is changed in `head.header` alone.
///
/// # Errors
/// [`Short`] if the packet ends before a byte that must change. The packet may be half changed then: drop it.
#[inline(always)]
pub fn translate_error<I: Ip, P: Packet>(
    packet: &mut P,
    head: &mut Head<I>,
    inner: &mut Head<I>,
    quote: &Tuple<I::Addr>,
    src: I::Addr,
    dst: I::Addr,
) -> Result<(), Short> {
    let old = inner.tuple;
    let addresses = old.src.delta(quote.src).and(old.dst.delta(quote.dst));
    let mut changed = Delta::NONE;

    let ports = set_ports::<I, P>(packet, inner.l4, &old, quote)?.unwrap_or(Delta::NONE);
    changed = changed.and(ports);

    if let Some(checksum) = checksum_of(old.protocol) {
        let at = inner.l4 + checksum.offset;
        if let Ok(before) = packet.load::<u16>(at)
            && !(checksum.zero == Zero::IsAbsent && before == 0)
        {
            let covered = if checksum.pseudo_header {
                addresses.and(ports)
            } else {
                ports
            };
            let after = match (checksum.zero, covered.apply(before)) {
                (Zero::IsAbsent, 0) => 0xffff,
                (_, after) => after,
            };
            packet.store(at, &after)?;
            changed = changed.and(Delta::of16(before, after));
        }
    } else if old.protocol == protocol::SCTP
        && inner.piece == Piece::Whole
        && let Ok([before, after]) = set_crc(packet, inner, quote)
    {
        changed = changed.and(Delta::of32(before, after));
    }

    // IPv4: the header's own checksum makes good for its addresses. IPv6 has none, so the message's checksum must.
    I::set_addresses(&mut inner.header, quote.src, quote.dst);
    packet.store(inner.l3, &inner.header)?;
    if I::PSEUDO == Covers::Pseudo6 {
        changed = changed.and(addresses);
    }
    packet.replace_l4_checksum(head.l4 + 2, changed, Covers::Payload, Zero::IsSum)?;

    if I::PSEUDO == Covers::Pseudo6 {
        let outer = head.tuple.src.delta(src).and(head.tuple.dst.delta(dst));
        packet.replace_l4_checksum(head.l4 + 2, outer, Covers::Pseudo6, Zero::IsSum)?;
    }
    I::set_addresses(&mut head.header, src, dst);
    (head.tuple.src, head.tuple.dst, inner.tuple) = (src, dst, *quote);
    Ok(())
}
