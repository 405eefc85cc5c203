//! Whole frames, as no honest protocol stack sends them.

use std::{
    io,
    os::fd::{AsRawFd as _, OwnedFd},
};

use anyhow::{Context as _, Result, ensure};
use nix::{
    errno::Errno,
    net::if_::if_nametoindex,
    sys::socket::{AddressFamily, MsgFlags, SockFlag, SockType, send, socket},
};

use crate::netns::Netns;

/// A packet socket bound to one interface of a namespace.
#[derive(Debug)]
pub struct RawLink {
    fd: OwnedFd,
}

impl RawLink {
    /// Opens an interface for sending and receiving frames of every protocol.
    pub fn open(netns: &Netns, interface: &str) -> Result<Self> {
        let fd = netns
            .run(|| {
                let fd = socket(
                    AddressFamily::Packet,
                    SockType::Raw,
                    SockFlag::SOCK_CLOEXEC,
                    None,
                )?;
                bind(&fd, if_nametoindex(interface)?)?;
                io::Result::Ok(fd)
            })
            .with_context(|| format!("open a packet socket on {interface} of {}", netns.name()))?;
        Ok(Self { fd })
    }

    /// Sends a frame as it is. That a program has dropped it is no error: a netkit, unlike a veth, tells its sender.
    pub fn send(&self, frame: &[u8]) -> Result<()> {
        let sent = match send(self.fd.as_raw_fd(), frame, MsgFlags::empty()) {
            Err(Errno::ENOBUFS) => return Ok(()),
            sent => sent.context("send a raw frame")?,
        };
        ensure!(
            sent == frame.len(),
            "{sent} of {} bytes of a frame were sent",
            frame.len()
        );
        Ok(())
    }

    pub(crate) fn into_fd(self) -> OwnedFd {
        self.fd
    }
}

fn bind(fd: &OwnedFd, interface: u32) -> io::Result<()> {
    let address = libc::sockaddr_ll {
        sll_family: libc::sa_family_t::try_from(libc::AF_PACKET).map_err(io::Error::other)?,
        sll_protocol: u16::try_from(libc::ETH_P_ALL)
            .map_err(io::Error::other)?
            .to_be(),
        sll_ifindex: interface.cast_signed(),
        sll_hatype: 0,
        sll_pkttype: 0,
        sll_halen: 0,
        sll_addr: [0; 8],
    };
    let len = libc::socklen_t::try_from(size_of_val(&address)).map_err(io::Error::other)?;
    // SAFETY: the address is a whole sockaddr_ll, its length is given, and the kernel only reads it.
    let bound = unsafe { libc::bind(fd.as_raw_fd(), (&raw const address).cast(), len) };
    if bound == 0 {
        Ok(())
    } else {
        Err(io::Error::last_os_error())
    }
}
