//! What a driver can be told by `ioctl(SIOCETHTOOL)`.

use std::{io, os::fd::AsRawFd as _};

use nix::sys::socket::{AddressFamily, SockFlag, SockType, socket};

const SIOCETHTOOL: libc::Ioctl = 0x8946_u32 as libc::Ioctl;
/// `ETHTOOL_SGRO`.
const SET_GRO: u32 = 0x2c;

/// `struct ethtool_value`.
#[repr(C)]
struct Value {
    command: u32,
    data: u32,
}

/// Has a device of the calling thread's network namespace join received packets to larger ones (GRO).
/// A veth polls for frames from then on (5.13), which is what makes it take those that XDP sends.
pub fn switch_gro_on(name: &str) -> io::Result<()> {
    let socket = socket(
        AddressFamily::Inet,
        SockType::Datagram,
        SockFlag::SOCK_CLOEXEC,
        None,
    )?;
    let mut value = Value {
        command: SET_GRO,
        data: 1,
    };
    // SAFETY: all bytes zero is a valid ifreq.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    let room = request.ifr_name.len() - 1;
    for (to, from) in request.ifr_name.iter_mut().zip(name.bytes()).take(room) {
        *to = libc::c_char::from_ne_bytes([from]);
    }
    request.ifr_ifru.ifru_data = (&raw mut value).cast();
    // SAFETY: the request points to a value of the kind that its command reads; both outlive the call.
    let result = unsafe { libc::ioctl(socket.as_raw_fd(), SIOCETHTOOL, &raw mut request) };
    if result == 0 {
        Ok(())
    } else {
        Err(io::Error::last_os_error())
    }
}
