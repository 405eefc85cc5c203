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

use anyhow::Result;
use nix::sys::{
    socket::{setsockopt, sockopt},
    time::{TimeVal, TimeValLike as _},
};

use crate::{frame, netns::Netns, patience, traffic::raw::RawLink};

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
        let frames = Arc::new(Mutex::new(Vec::new()));
        let stop = Arc::new(AtomicBool::new(false));
        let (collected, stopped) = (Arc::clone(&frames), Arc::clone(&stop));
        let thread = thread::spawn(move || {
            let mut buffer = vec![0; LARGEST];
            while !stopped.load(Ordering::Relaxed) {
                if let Ok(Some(len)) = receive(&fd, &mut buffer) {
                    collected
                        .lock()
                        .unwrap_or_else(PoisonError::into_inner)
                        .push(buffer[..len].to_vec());
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

/// The length of the next frame that arrived; `None` for one that was sent.
fn receive(fd: &OwnedFd, buffer: &mut [u8]) -> io::Result<Option<usize>> {
    // SAFETY: all bytes zero is a valid sockaddr_ll.
    let mut from: libc::sockaddr_ll = unsafe { std::mem::zeroed() };
    let mut from_len = libc::socklen_t::try_from(size_of_val(&from)).map_err(io::Error::other)?;
    // SAFETY: buffer and address are ours, writable, and as long as said.
    let got = unsafe {
        libc::recvfrom(
            fd.as_raw_fd(),
            buffer.as_mut_ptr().cast(),
            buffer.len(),
            0,
            (&raw mut from).cast(),
            &raw mut from_len,
        )
    };
    let Ok(len) = usize::try_from(got) else {
        return Err(io::Error::last_os_error());
    };
    Ok((from.sll_pkttype != libc::PACKET_OUTGOING).then_some(len))
}
