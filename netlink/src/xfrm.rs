//! Whether a network namespace has policies of IPsec (xfrm).

use netlink_sys::protocols::NETLINK_XFRM;

use super::{
    Error,
    socket::{Socket, attribute, word},
};

/// `XFRM_MSG_GETSPDINFO` of `linux/xfrm.h`: how many policies there are, for each direction, so that none
/// has to be listed.
const GET_COUNTS: u16 = 0x25;
/// `XFRMA_SPD_INFO`, an `xfrmu_spdinfo`.
const COUNTS: u16 = 1;
/// What precedes the attributes in question and answer: flags, none of which has a meaning.
const HEADER: usize = 4;
/// Offsets of the numbers of policies for what comes in, goes out and is forwarded. Those of single
/// sockets follow; no socket is asked about a container's packets.
const DIRECTIONS: [usize; 3] = [0, 4, 8];

/// Tells whether there are policies in the network namespace of the calling thread. The kernel loads what it
/// takes to answer.
pub fn has_policies() -> Result<bool, Error> {
    let answer = Socket::open(NETLINK_XFRM).and_then(|socket| socket.ask(GET_COUNTS, &[0; HEADER]));
    match answer {
        Ok(payload) => Ok(counts_any(&payload)),
        // A kernel without xfrm.
        Err(error) if error.raw_os_error() == Some(libc::EPROTONOSUPPORT) => Ok(false),
        Err(source) => Err(Error::new("count the policies of IPsec".to_owned(), source)),
    }
}

fn counts_any(payload: &[u8]) -> bool {
    let counts = attribute(payload, HEADER, COUNTS).unwrap_or_default();
    DIRECTIONS
        .iter()
        .any(|direction| word(counts, *direction).is_some_and(|count| count > 0))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn answer(counts: [u32; 6]) -> Vec<u8> {
        let mut payload = vec![0; HEADER];
        payload.extend_from_slice(&28_u16.to_ne_bytes());
        payload.extend_from_slice(&COUNTS.to_ne_bytes());
        payload.extend(counts.iter().flat_map(|count| count.to_ne_bytes()));
        payload
    }

    #[test]
    fn policies_of_any_direction_count_and_those_of_sockets_do_not() {
        assert!(!counts_any(&answer([0; 6])));
        for direction in 0..3 {
            let mut counts = [0; 6];
            counts[direction] = 1;
            assert!(counts_any(&answer(counts)), "{direction}");
        }
        assert!(!counts_any(&answer([0, 0, 0, 2, 2, 2])));
        assert!(!counts_any(&[]));
    }
}
