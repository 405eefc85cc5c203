//! Replacing a packet's tuple.

use underpass_abi::flow::{Tuple, protocol};

use crate::{
    checksum::{Delta, Summed},
    ip::{Head, Ip, Piece},
    l4::checksum_of,
    packet::{Covers, Packet, Short},
};

/// Gives a packet a new tuple: addresses, ports (or the echo identifier), and every checksum that covers them.
///
/// `head` is the packet as it stands, its header already changed by nothing; a later fragment gets the addresses only. The network
/// header is changed in `head.header` alone: the caller stores it, together with whatever else it changes there.
///
/// # Errors
/// [`Short`] if the packet ends before a byte that must change. The packet may be half changed then: drop it.
#[inline(always)]
pub fn translate<I: Ip, P: Packet>(
    packet: &mut P,
    head: &mut Head<I>,
    new: &Tuple<I::Addr>,
) -> Result<(), Short> {
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
        && let Some(checksum) = checksum
    {
        packet.replace_l4_checksum(
            head.l4 + checksum.offset,
            ports,
            Covers::Payload,
            checksum.zero,
        )?;
    }
    I::set_addresses(&mut head.header, new.src, new.dst);
    head.tuple = *new;
    Ok(())
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
