//! Replacing a packet's tuple.

use underpass_abi::flow::{Tuple, protocol};

use crate::{
    checksum::{Delta, Summed},
    ip::{Head, Ip, Piece},
    l4::checksum_of,
    packet::{Covers, Packet, Short},
};

/// Where SCTP keeps its checksum, in bytes from the start of its header.
const CRC_OFFSET: u32 = 8;

/// Why a packet can't be given a new tuple.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Untranslatable {
    /// It ends before a byte that must change.
    Short,
    /// It is the first piece of an SCTP packet whose ports must change: what that does to the checksum depends on the length of the
    /// whole packet, which the first piece does not tell.
    Piece,
}

impl From<Short> for Untranslatable {
    #[inline(always)]
    fn from(_: Short) -> Self {
        Self::Short
    }
}

/// Gives a packet a new tuple: addresses, ports (or the echo identifier), and every checksum that covers them.
///
/// `head` is the packet as it stands, its header already changed by nothing; a later fragment gets the addresses only. The network
/// header is changed in `head.header` alone: the caller stores it, together with whatever else it changes there.
///
/// # Errors
/// See [`Untranslatable`]. The packet may be half changed then: drop it.
#[inline(always)]
pub fn translate<I: Ip, P: Packet>(
    packet: &mut P,
    head: &mut Head<I>,
    new: &Tuple<I::Addr>,
) -> Result<(), Untranslatable> {
    let old = head.tuple;
    let addresses = old.src.delta(new.src).and(old.dst.delta(new.dst));
    let checksum = if head.piece == Piece::Later {
        None
    } else {
        checksum_of(old.protocol)
    };
    match checksum {
        Some(checksum) if checksum.pseudo_header => {
            packet.replace_l4_checksum(
                head.l4 + checksum.offset,
                addresses,
                I::PSEUDO,
                checksum.zero,
            )?;
        }
        // The header's own checksum makes good for IPv4 addresses, nothing does for these.
        _ if I::PSEUDO == Covers::Pseudo6 => packet.account(addresses),
        _ => {}
    }
    if head.piece != Piece::Later
        && let Some(ports) = set_ports::<I, P>(packet, head.l4, &old, new)?
    {
        if let Some(checksum) = checksum {
            packet.replace_l4_checksum(
                head.l4 + checksum.offset,
                ports,
                Covers::Payload,
                checksum.zero,
            )?;
        } else if old.protocol == protocol::SCTP {
            if head.piece != Piece::Whole {
                return Err(Untranslatable::Piece);
            }
            set_crc(packet, head, new)?;
        }
    }
    I::set_addresses(&mut head.header, new.src, new.dst);
    head.tuple = *new;
    Ok(())
}

/// Corrects the checksum of a whole SCTP packet, whose ports go from those in `head` to those in `new`; the checksum before and after.
///
/// Zero stays zero. That is what a packet carries whose checksum is left to a device, and the device (or the kernel in its place) sums
/// the field up with the rest: it must not be touched. No program can see otherwise that a checksum is still to be filled in. A sum that
/// is zero by chance, once in four billion packets, looks the same: such a packet arrives with a wrong one.
#[inline(always)]
pub(crate) fn set_crc<I: Ip, P: Packet>(
    packet: &mut P,
    head: &Head<I>,
    new: &Tuple<I::Addr>,
) -> Result<[u32; 2], Short> {
    let old = head.tuple;
    let at = head.l4 + CRC_OFFSET;
    let [before]: [u32; 1] = packet.load(at)?;
    if before == 0 {
        return Ok([0, 0]);
    }
    let word = ports_word(&old) ^ ports_word(new);
    let length = (I::length(&head.header) + head.l3).wrapping_sub(head.l4) & 0xffff;
    let after = before ^ packet.crc32c_change(u32::from_le(word), length).to_le();
    packet.store(at, &[after])?;
    Ok([before, after])
}

/// Both ports, as they stand in the packet.
#[inline(always)]
fn ports_word<A>(tuple: &Tuple<A>) -> u32 {
    let ([a, b], [c, d]) = (tuple.sport.to_ne_bytes(), tuple.dport.to_ne_bytes());
    u32::from_ne_bytes([a, b, c, d])
}

/// Ports or echo identifier at `l4`, and what that changed; `None` if they are the same.
#[inline(always)]
pub(crate) fn set_ports<I: Ip, P: Packet>(
    packet: &mut P,
    l4: u32,
    old: &Tuple<I::Addr>,
    new: &Tuple<I::Addr>,
) -> Result<Option<Delta>, Short> {
    if old.sport == new.sport && old.dport == new.dport {
        return Ok(None);
    }
    let delta = Delta::of16(old.sport, new.sport).and(Delta::of16(old.dport, new.dport));
    if old.protocol == protocol::ICMP || old.protocol == protocol::ICMPV6 {
        // One of the two is zero before and after: the request has its identifier as source, the reply as destination.
        packet.store(l4 + 4, &(new.sport | new.dport))?;
        return Ok(Some(delta));
    }
    packet.store(l4, &[new.sport, new.dport])?;
    Ok(Some(delta))
}
