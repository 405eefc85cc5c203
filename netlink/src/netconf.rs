//! Settings of IPv4 as netlink tells them. The same is below `/proc/sys`, where it takes the longer to
//! find the more containers there are.

use super::{
    Error, Netlink,
    socket::{attribute, word},
};

/// `RTM_GETNETCONF` of `linux/rtnetlink.h`.
const GET: u16 = 82;
/// Attributes of `linux/netconf.h`.
const IFINDEX: u16 = 1;
const RP_FILTER: u16 = 3;
/// In place of a device: what counts for all of them.
const ALL: i32 = -1;
/// Length of a `netconfmsg`, padded.
const HEADER: usize = 4;

impl Netlink {
    /// Reads `net.ipv4.conf.all.rp_filter`. What counts on a device is the larger one of this and its own.
    pub fn rp_filter(&self) -> Result<i32, Error> {
        let [family, ..] = libc::AF_INET.to_le_bytes();
        let mut body = vec![family, 0, 0, 0];
        body.extend_from_slice(&8_u16.to_ne_bytes());
        body.extend_from_slice(&IFINDEX.to_ne_bytes());
        body.extend_from_slice(&ALL.to_ne_bytes());
        match self.socket.ask(GET, &body) {
            Ok(payload) => Ok(read(&payload)),
            Err(source) => Err(Error::new(
                "ask for net.ipv4.conf.all.rp_filter".to_owned(),
                source,
            )),
        }
    }
}

/// Zero, which changes nothing, if the kernel does not say.
fn read(payload: &[u8]) -> i32 {
    attribute(payload, HEADER, RP_FILTER)
        .and_then(|value| word(value, 0))
        .map_or(0, u32::cast_signed)
}

#[cfg(test)]
mod tests {
    use super::*;

    use std::fs;

    #[test]
    fn netlink_and_proc_say_the_same() {
        let netlink = Netlink::open().expect("a socket");
        let text = fs::read_to_string("/proc/sys/net/ipv4/conf/all/rp_filter");
        let Ok(text) = text else {
            return;
        };
        let told = netlink.rp_filter().expect("an answer");
        assert_eq!(told.to_string(), text.trim());
    }

    #[test]
    fn what_is_not_said_is_zero() {
        assert_eq!(read(&[]), 0);
        assert_eq!(read(&[2, 0, 0, 0]), 0);
    }
}
