//! Requests to devices of the calling thread's network namespace, without a process for each.

use std::{io, os::fd::AsRawFd as _};

use nix::sys::socket::{AddressFamily, SockFlag, SockType, socket};

/// Makes a request about a device: `fill` writes the arguments.
pub(crate) fn on_device(
    name: &str,
    request: libc::Ioctl,
    fill: impl FnOnce(&mut libc::ifreq),
) -> io::Result<()> {
    let socket = socket(
        AddressFamily::Inet,
        SockType::Datagram,
        SockFlag::SOCK_CLOEXEC,
        None,
    )?;
    // SAFETY: all bytes zero is a valid ifreq.
    let mut arguments: libc::ifreq = unsafe { std::mem::zeroed() };
    for (to, from) in arguments.ifr_name.iter_mut().zip(name.bytes()) {
        *to = libc::c_char::from_ne_bytes([from]);
    }
    fill(&mut arguments);
    // SAFETY: the request reads an ifreq, and what that points to outlives the call.
    let result = unsafe { libc::ioctl(socket.as_raw_fd(), request, &raw mut arguments) };
    if result == 0 {
        Ok(())
    } else {
        Err(io::Error::last_os_error())
    }
}

/// Sets a device up.
pub(crate) fn set_up(name: &str) -> io::Result<()> {
    on_device(name, libc::SIOCSIFFLAGS, |arguments| {
        let flags = libc::IFF_UP | libc::IFF_RUNNING;
        arguments.ifr_ifru.ifru_flags =
            libc::c_short::try_from(flags).unwrap_or(libc::c_short::MAX);
    })
}
