//! What arrives at an interface, frame by frame.

use std::{
    io,
    net::IpAddr,
    os::fd::{AsRawFd as _, OwnedFd},
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result};
use nix::sys::{
    socket::{setsockopt, sockopt},
    time::{TimeVal, TimeValLike as _},
};

use crate::{
    frame::{self, Tag},
    netns::Netns,
    patience,
    traffic::raw::RawLink,
};

const LARGEST: usize = 1 << 17;

/// Collects the frames that arrive at an interface, until dropped.
#[derive(Debug)]
pub struct Capture {
    frames: Arc<Mutex<Vec<Vec<u8>>>>,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Capture {
    /// Starts to collect. Frames that the interface itself sends are left out.
    pub fn start(netns: &Netns, interface: &str) -> Result<Self> {
        let fd = RawLink::open(netns, interface)?.into_fd();
        setsockopt(&fd, sockopt::ReceiveTimeout, &TimeVal::milliseconds(20))?;
        setsockopt(&fd, sockopt::RcvBuf, &(8 << 20))?;
        ask_for_tags(&fd).context("ask for VLAN tags")?;
        let frames = Arc::new(Mutex::new(Vec::new()));
        let stop = Arc::new(AtomicBool::new(false));
        let (collected, stopped) = (Arc::clone(&frames), Arc::clone(&stop));
        let thread = thread::spawn(move || {
            let mut buffer = vec![0; LARGEST];
            while !stopped.load(Ordering::Relaxed) {
                if let Ok(Some(frame)) = receive(&fd, &mut buffer) {
                    collected
                        .lock()
                        .unwrap_or_else(PoisonError::into_inner)
                        .push(frame);
                }
            }
        });
        Ok(Self {
            frames,
            stop,
            thread: Some(thread),
        })
    }

    /// All frames so far.
    #[must_use]
    pub fn frames(&self) -> Vec<Vec<u8>> {
        self.frames
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clone()
    }

    /// Source addresses of all IP packets so far, also of the packets that ICMP errors quote.
    #[must_use]
    pub fn addresses(&self) -> Vec<IpAddr> {
        self.frames()
            .iter()
            .flat_map(|frame| frame::sources(frame))
            .collect()
    }

    /// Waits for a frame that fits, on slow machines for longer than `usual`; `None` if none comes in time.
    pub fn wait_for(&self, usual: Duration, fits: impl Fn(&[u8]) -> bool) -> Option<Vec<u8>> {
        let end = Instant::now() + patience::here(usual);
        loop {
            let found = self.frames().into_iter().find(|frame| fits(frame));
            if found.is_some() || Instant::now() > end {
                return found;
            }
            thread::sleep(Duration::from_millis(5));
        }
    }
}

impl Drop for Capture {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        let _ = self.thread.take().map(JoinHandle::join);
    }
}

/// The next frame that arrived, with its VLAN tag, which the kernel takes off; `None` for one that was sent.
fn receive(fd: &OwnedFd, buffer: &mut [u8]) -> io::Result<Option<Vec<u8>>> {
    // SAFETY: all bytes zero is a valid sockaddr_ll.
    let mut from: libc::sockaddr_ll = unsafe { std::mem::zeroed() };
    let mut control = [0_u64; 8];
    let mut part = libc::iovec {
        iov_base: buffer.as_mut_ptr().cast(),
        iov_len: buffer.len(),
    };
    // SAFETY: all bytes zero is a valid msghdr.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    message.msg_name = (&raw mut from).cast();
    message.msg_namelen =
        libc::socklen_t::try_from(size_of_val(&from)).map_err(io::Error::other)?;
    message.msg_iov = &raw mut part;
    message.msg_iovlen = 1;
    message.msg_control = control.as_mut_ptr().cast();
    message.msg_controllen = size_of_val(&control);
    // SAFETY: everything that the message points to is ours, writable, and as long as said.
    let got = unsafe { libc::recvmsg(fd.as_raw_fd(), &raw mut message, 0) };
    let Ok(len) = usize::try_from(got) else {
        return Err(io::Error::last_os_error());
    };
    if from.sll_pkttype == libc::PACKET_OUTGOING {
        return Ok(None);
    }
    let frame = &buffer[..len];
    Ok(Some(match taken_off(&message) {
        Some(tag) => tag.put_on(frame),
        None => frame.to_vec(),
    }))
}

/// The tag that a message tells of.
fn taken_off(message: &libc::msghdr) -> Option<Tag> {
    // SAFETY: the message is one that the kernel filled, and its control data are still there.
    let header = unsafe { libc::CMSG_FIRSTHDR(message).as_ref() }?;
    if header.cmsg_level != libc::SOL_PACKET || header.cmsg_type != libc::PACKET_AUXDATA {
        return None;
    }
    // SAFETY: such a header is followed by these data, wherever they are.
    let told: libc::tpacket_auxdata = unsafe {
        libc::CMSG_DATA(header)
            .cast::<libc::tpacket_auxdata>()
            .read_unaligned()
    };
    (told.tp_status & libc::TP_STATUS_VLAN_VALID != 0)
        .then(|| Tag::new(told.tp_vlan_tpid, told.tp_vlan_tci))
}

/// Has the kernel tell the tags that it takes off.
fn ask_for_tags(fd: &OwnedFd) -> io::Result<()> {
    let on: libc::c_int = 1;
    let len = libc::socklen_t::try_from(size_of_val(&on)).map_err(io::Error::other)?;
    // SAFETY: the option is an integer of the length given, which the kernel only reads.
    let set = unsafe {
        libc::setsockopt(
            fd.as_raw_fd(),
            libc::SOL_PACKET,
            libc::PACKET_AUXDATA,
            (&raw const on).cast(),
            len,
        )
    };
    if set == 0 {
        Ok(())
    } else {
        Err(io::Error::last_os_error())
    }
}
