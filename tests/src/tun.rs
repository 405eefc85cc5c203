//! A tunnel that this process is: two devices without Ethernet headers, and a thread that carries packets from one to the other. Every
//! kernel has it, other than WireGuard.

use std::{
    fs::{File, OpenOptions},
    io::{self, Read as _, Write as _},
    os::fd::{AsFd as _, AsRawFd as _},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread::{self, JoinHandle},
};

use anyhow::{Context as _, Result};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use crate::netns::Netns;

/// `TUNSETIFF`.
const TUNSETIFF: libc::Ioctl = 0x4004_54ca;
/// `IFF_TUN | IFF_NO_PI`.
const FLAGS: libc::c_short = 0x1001;
const LARGEST: usize = 65_536;
/// How soon the thread notices that it shall stop, in milliseconds.
const HEARTBEAT: u16 = 20;

/// A tunnel, until dropped.
#[derive(Debug)]
pub struct Tunnel {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Tunnel {
    /// Makes a device of this name and MTU, in bytes, in each of two namespaces. They are down.
    pub fn dig(ends: [&Netns; 2], name: &str, mtu: u32) -> Result<Self> {
        let mut files = Vec::new();
        for end in ends {
            let file = end
                .run(|| open(name))
                .with_context(|| format!("make the device {name} in {}", end.name()))?;
            end.set_mtu(name, mtu)?;
            files.push(file);
        }
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = Arc::clone(&stop);
        let thread = thread::spawn(move || carry(&files, &stopped));
        Ok(Self {
            stop,
            thread: Some(thread),
        })
    }
}

impl Drop for Tunnel {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        let _ = self.thread.take().map(JoinHandle::join);
    }
}

fn open(name: &str) -> io::Result<File> {
    let file = OpenOptions::new()
        .read(true)
        .write(true)
        .open("/dev/net/tun")?;
    // SAFETY: all bytes zero is a valid ifreq.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    for (to, from) in request.ifr_name.iter_mut().zip(name.bytes()) {
        *to = libc::c_char::from_ne_bytes([from]);
    }
    request.ifr_ifru.ifru_flags = FLAGS;
    // SAFETY: the request reads an ifreq, which is what it gets.
    if unsafe { libc::ioctl(file.as_raw_fd(), TUNSETIFF, &raw mut request) } != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(file)
}

fn carry(files: &[File], stopped: &AtomicBool) {
    let mut packet = vec![0; LARGEST];
    while !stopped.load(Ordering::Relaxed) {
        let mut ready =
            [&files[0], &files[1]].map(|file| PollFd::new(file.as_fd(), PollFlags::POLLIN));
        if poll(&mut ready, PollTimeout::from(HEARTBEAT)).is_err() {
            continue;
        }
        for (at, file) in files.iter().enumerate() {
            let has_come = ready[at]
                .revents()
                .is_some_and(|events| events.contains(PollFlags::POLLIN));
            if !has_come {
                continue;
            }
            let mut file = file;
            if let Ok(len) = file.read(&mut packet) {
                // The other end may be down: then it is lost, as in any tunnel.
                let _ = (&files[1 - at]).write(&packet[..len]);
            }
        }
    }
}
