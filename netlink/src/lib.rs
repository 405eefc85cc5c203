//! What a network namespace is asked and told: route netlink, the settings below `/proc/sys`, and the
//! namespace itself as a handle.
//!
//! There is one socket per network namespace; it makes one change at a time, and asks about many objects of
//! a kind in one go. A netlink socket belongs to the namespace of the thread that opened it and stays there, so a
//! socket opened on a thread inside a container's namespace configures the container from any
//! thread.

use std::io;

use netlink_packet_core::{
    NLM_F_ACK, NLM_F_CREATE, NLM_F_DUMP, NLM_F_EXCL, NLM_F_REPLACE, NLM_F_REQUEST,
};
use netlink_packet_route::RouteNetlinkMessage;
use netlink_sys::protocols::NETLINK_ROUTE;

use self::socket::{Object, Socket};

pub mod addr;
pub mod ethtool;
pub mod filter;
pub mod link;
pub mod mac;
pub mod neigh;
pub mod netconf;
pub mod netns;
pub mod qdisc;
pub mod route;
mod socket;
pub mod sysctl;
pub mod xdp;
pub mod xfrm;

pub use mac::Mac;
pub use netns::Netns;

/// How often a dump is taken that is interrupted each time.
const DUMP_ATTEMPTS: u32 = 4;
/// How many answers may wait to be read: each is accounted with a kilobyte or so, and a socket takes
/// some 200 kilobytes.
const AT_ONCE: usize = 64;

/// A request that the kernel refused, or that never reached it.
#[derive(Debug, thiserror::Error)]
#[error("cannot {action}: {source}{}{}", separator(self.remedy()), self.remedy())]
pub struct Error {
    /// What was asked for, as it follows "cannot".
    action: String,
    /// The kernel's answer.
    source: io::Error,
    /// What to do about that answer to this request, where more can be said than of any request.
    advice: Option<&'static str>,
}

const fn separator(remedy: &str) -> &'static str {
    if remedy.is_empty() { "" } else { ": " }
}

impl Error {
    fn new(action: String, source: io::Error) -> Self {
        Self {
            action,
            source,
            advice: None,
        }
    }

    /// Says what to do if the kernel answered with one of these numbers.
    fn advise(mut self, answers: &[i32], advice: &'static str) -> Self {
        if self.errno().is_some_and(|errno| answers.contains(&errno)) {
            self.advice = Some(advice);
        }
        self
    }

    /// Says what to do, or nothing where the request itself says it all.
    fn remedy(&self) -> &'static str {
        self.advice
            .unwrap_or_else(|| self.errno().map_or("", remedy))
    }

    /// The kernel's error number, if it was the kernel that answered.
    #[must_use]
    pub fn errno(&self) -> Option<i32> {
        self.source.raw_os_error()
    }

    /// Tells whether the thing asked for does not exist.
    #[must_use]
    pub fn is_absent(&self) -> bool {
        matches!(
            self.errno(),
            Some(libc::ENODEV | libc::ENOENT | libc::ESRCH | libc::EADDRNOTAVAIL | libc::ENXIO)
        )
    }

    /// Tells whether the place is taken.
    #[must_use]
    pub fn is_busy(&self) -> bool {
        self.errno() == Some(libc::EBUSY)
    }

    /// Tells whether the thing asked for exists already.
    #[must_use]
    pub fn is_present(&self) -> bool {
        self.errno() == Some(libc::EEXIST)
    }
}

/// Says what to do about the kernel's answer to any request.
fn remedy(errno: i32) -> &'static str {
    match errno {
        libc::EPERM | libc::EACCES => {
            "run it as root of the node, with the capability CAP_NET_ADMIN"
        }
        libc::ENODEV | libc::ENXIO => {
            "the device is gone, somebody deleted it meanwhile; repeat the call"
        }
        libc::EMFILE => "raise the limit of open files (RLIMIT_NOFILE) of the runtime",
        libc::ENFILE => "raise the limit of open files of the node (fs.file-max)",
        libc::ENOMEM | libc::ENOBUFS => {
            "the kernel has no memory for it; raise the memory limit of the runtime's cgroup, or free some"
        }
        _ => "",
    }
}

/// The rule for a request whose object exists, or does not.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Mode {
    /// Create it; an existing one is an error.
    Create,
    /// Create it beside whatever exists (routes with several next hops).
    Append,
    /// Create it, or replace the existing one.
    Replace,
    /// Change or delete an existing one; its absence is an error.
    Existing,
}

impl Mode {
    const fn flags(self) -> u16 {
        match self {
            Self::Create => NLM_F_CREATE | NLM_F_EXCL,
            Self::Append => NLM_F_CREATE,
            Self::Replace => NLM_F_CREATE | NLM_F_REPLACE,
            Self::Existing => 0,
        }
    }
}

/// A route netlink socket of one network namespace.
#[derive(Debug)]
pub struct Netlink {
    socket: Socket,
}

impl Netlink {
    /// Opens a socket in the network namespace of the calling thread.
    pub fn open() -> Result<Self, Error> {
        match Socket::open(NETLINK_ROUTE) {
            Ok(socket) => Ok(Self { socket }),
            Err(source) => Err(Error::new("open a netlink socket".to_owned(), source)),
        }
    }

    /// Sends a request that changes something, and waits for the kernel's word on it.
    fn change(
        &self,
        message: &RouteNetlinkMessage,
        mode: Mode,
        action: impl FnOnce() -> String,
    ) -> Result<(), Error> {
        let flags = NLM_F_REQUEST | NLM_F_ACK | mode.flags();
        match self.socket.exchange(message, flags, |_| false) {
            Ok(_) => Ok(()),
            Err(source) => Err(Error::new(action(), source)),
        }
    }

    /// Asks for one object.
    fn get(
        &self,
        message: &RouteNetlinkMessage,
        action: impl FnOnce() -> String,
    ) -> Result<Option<RouteNetlinkMessage>, Error> {
        let flags = NLM_F_REQUEST | NLM_F_ACK;
        match self.socket.exchange(message, flags, |_| true) {
            Ok(answer) => Ok(answer.objects.first().and_then(Object::decode)),
            Err(source) => Err(Error::new(action(), source)),
        }
    }

    /// Asks for many objects, many at once.
    fn get_each(
        &self,
        messages: impl IntoIterator<Item = RouteNetlinkMessage>,
    ) -> io::Result<Vec<io::Result<RouteNetlinkMessage>>> {
        let mut messages = messages.into_iter();
        let mut answers = Vec::new();
        loop {
            let some = messages.by_ref().take(AT_ONCE);
            let some = self.socket.exchange_each(some, NLM_F_REQUEST)?;
            if some.is_empty() {
                return Ok(answers);
            }
            answers.extend(some);
        }
    }

    /// Asks for all objects of a kind, again if they changed meanwhile. What `wanted` refuses, by what
    /// follows the message's header, is not decoded.
    ///
    /// Where hundreds of containers come at once, no list is made undisturbed. What any attempt saw is the answer then, the latest
    /// first: it lacks something that was there all the time only if each attempt missed it, and what went away meanwhile may be
    /// in it, as in any answer of a moment ago. What changed meanwhile is in it as it was and as it is.
    fn dump(
        &self,
        message: &RouteNetlinkMessage,
        mut wanted: impl FnMut(&[u8]) -> bool,
        action: impl Fn() -> String,
    ) -> Result<Vec<RouteNetlinkMessage>, Error> {
        let mut seen = Vec::new();
        for _ in 0..DUMP_ATTEMPTS {
            let flags = NLM_F_REQUEST | NLM_F_DUMP;
            let mut answer = self
                .socket
                .exchange(message, flags, &mut wanted)
                .map_err(|source| Error::new(action(), source))?;
            if !answer.interrupted {
                seen = answer.objects;
                break;
            }
            seen.retain(|older| !answer.objects.contains(older));
            answer.objects.append(&mut seen);
            seen = answer.objects;
        }
        Ok(seen.iter().filter_map(Object::decode).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(errno: i32) -> Error {
        Error::new("do it".to_owned(), io::Error::from_raw_os_error(errno))
    }

    #[test]
    fn a_refusal_says_what_to_do_where_that_is_known() {
        let text = refused(libc::EPERM).to_string();
        assert!(
            text.starts_with("cannot do it: Operation not permitted"),
            "{text}"
        );
        assert!(
            text.ends_with(": run it as root of the node, with the capability CAP_NET_ADMIN"),
            "{text}"
        );
        assert!(refused(libc::EMFILE).to_string().contains("RLIMIT_NOFILE"));
        let text = refused(libc::EINVAL).to_string();
        assert!(text.ends_with("(os error 22)"), "{text}");
    }

    #[test]
    fn what_is_known_of_a_request_counts_first_and_for_its_answers_alone() {
        let advised = |errno| {
            refused(errno)
                .advise(&[libc::EINVAL, libc::EPERM], "look twice")
                .to_string()
        };
        assert!(advised(libc::EINVAL).ends_with(": look twice"));
        assert!(advised(libc::EPERM).ends_with(": look twice"));
        assert!(!advised(libc::EMFILE).contains("twice"));
    }
}
