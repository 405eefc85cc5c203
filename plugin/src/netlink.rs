//! Route netlink: one socket per network namespace; one change at a time, questions about many
//! objects of a kind in one go.
//!
//! A netlink socket belongs to the namespace of the thread that opened it and stays there, so a
//! socket opened on a thread inside a container's namespace configures the container from any
//! thread.

use std::io;

use futures_util::{Stream, StreamExt as _};
use netlink_packet_core::{
    NLM_F_ACK, NLM_F_CREATE, NLM_F_DUMP, NLM_F_EXCL, NLM_F_REPLACE, NLM_F_REQUEST, NetlinkMessage,
    NetlinkPayload,
};
use netlink_packet_route::RouteNetlinkMessage;
use rtnetlink::Handle;
use tokio::runtime::{Builder, Runtime};

pub(crate) mod addr;
pub(crate) mod filter;
pub(crate) mod link;
pub(crate) mod neigh;
pub(crate) mod qdisc;
pub(crate) mod route;

/// Header flag of a dump during which the table changed; libc has no name for it.
const NLM_F_DUMP_INTR: u16 = 0x10;
/// How often an interrupted dump is taken again before its last, possibly incomplete, answer is an
/// error.
const DUMP_ATTEMPTS: u32 = 10;
/// How many answers may wait to be read: each is accounted with a kilobyte or so, and a socket takes
/// some 200 kilobytes.
const AT_ONCE: usize = 64;

/// A request that the kernel refused, or that never reached it.
#[derive(Debug, thiserror::Error)]
#[error("cannot {action}: {source}")]
pub(crate) struct Error {
    /// What was asked for, as it follows "cannot".
    action: String,
    /// The kernel's answer.
    source: io::Error,
}

impl Error {
    fn new(action: String, source: io::Error) -> Self {
        Self { action, source }
    }

    /// The kernel's error number, if it was the kernel that answered.
    pub(crate) fn errno(&self) -> Option<i32> {
        self.source.raw_os_error()
    }

    /// Whether the thing asked for does not exist.
    pub(crate) fn is_absent(&self) -> bool {
        matches!(
            self.errno(),
            Some(libc::ENODEV | libc::ENOENT | libc::ESRCH | libc::EADDRNOTAVAIL | libc::ENXIO)
        )
    }

    /// Whether the thing asked for exists already.
    pub(crate) fn is_present(&self) -> bool {
        self.errno() == Some(libc::EEXIST)
    }
}

/// What a request does when its object exists, or does not.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Mode {
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
pub(crate) struct Netlink {
    runtime: Runtime,
    handle: Handle,
}

impl Netlink {
    /// Opens a socket in the network namespace of the calling thread.
    pub(crate) fn open() -> Result<Self, Error> {
        let open = || -> io::Result<Self> {
            let runtime = Builder::new_current_thread().enable_io().build()?;
            let (connection, handle, _) = {
                let _guard = runtime.enter();
                rtnetlink::new_connection_with_strict_check()?
            };
            runtime.spawn(connection);
            Ok(Self { runtime, handle })
        };
        open().map_err(|source| Error::new("open a netlink socket".to_owned(), source))
    }

    /// Sends a request that changes something, and waits for the kernel's word on it.
    fn change(
        &self,
        message: RouteNetlinkMessage,
        mode: Mode,
        action: impl FnOnce() -> String,
    ) -> Result<(), Error> {
        let flags = NLM_F_REQUEST | NLM_F_ACK | mode.flags();
        match self.exchange(message, flags) {
            Ok(_) => Ok(()),
            Err(source) => Err(Error::new(action(), source)),
        }
    }

    /// Asks for one object.
    fn get(
        &self,
        message: RouteNetlinkMessage,
        action: impl FnOnce() -> String,
    ) -> Result<Option<RouteNetlinkMessage>, Error> {
        match self.exchange(message, NLM_F_REQUEST | NLM_F_ACK) {
            Ok(answer) => Ok(answer.messages.into_iter().next()),
            Err(source) => Err(Error::new(action(), source)),
        }
    }

    /// Asks for many objects. The kernel is given the next questions while it answers, so that a
    /// call does not go to sleep and wake up for each.
    fn get_each(
        &self,
        messages: impl IntoIterator<Item = RouteNetlinkMessage>,
    ) -> Vec<io::Result<RouteNetlinkMessage>> {
        let mut messages = messages.into_iter();
        let mut answers = Vec::new();
        loop {
            let before = answers.len();
            self.runtime.block_on(async {
                // All are on their way before the first answer is waited for.
                let asked: Vec<_> = messages
                    .by_ref()
                    .take(AT_ONCE)
                    .map(|message| self.request(message, NLM_F_REQUEST))
                    .collect();
                for request in asked {
                    answers.push(only(request).await);
                }
            });
            if answers.len() == before {
                return answers;
            }
        }
    }

    /// Asks for all objects of a kind, again if they changed meanwhile.
    fn dump(
        &self,
        message: &RouteNetlinkMessage,
        action: impl Fn() -> String,
    ) -> Result<Vec<RouteNetlinkMessage>, Error> {
        for _ in 0..DUMP_ATTEMPTS {
            let answer = self
                .exchange(message.clone(), NLM_F_REQUEST | NLM_F_DUMP)
                .map_err(|source| Error::new(action(), source))?;
            if !answer.interrupted {
                return Ok(answer.messages);
            }
        }
        Err(Error::new(
            action(),
            io::Error::new(
                io::ErrorKind::Interrupted,
                "the table changed during every attempt to read it",
            ),
        ))
    }

    fn exchange(&self, message: RouteNetlinkMessage, flags: u16) -> io::Result<Answer> {
        self.runtime.block_on(async {
            let mut stream = self.request(message, flags)?;
            let mut answer = Answer::default();
            while let Some(message) = stream.next().await {
                answer.interrupted |= message.header.flags & NLM_F_DUMP_INTR != 0;
                match message.payload {
                    NetlinkPayload::Error(error) if error.code.is_some() => {
                        return Err(error.to_io());
                    }
                    NetlinkPayload::InnerMessage(inner) => answer.messages.push(inner),
                    _ => {}
                }
            }
            Ok(answer)
        })
    }

    /// Hands a request to the socket, which sends it when somebody waits for an answer.
    fn request(
        &self,
        message: RouteNetlinkMessage,
        flags: u16,
    ) -> io::Result<impl Answers + use<>> {
        let mut request = NetlinkMessage::from(message);
        request.header.flags = flags;
        self.handle
            .clone()
            .request(request)
            .map_err(|_| io::Error::other("the netlink socket is closed"))
    }
}

/// The one answer to a request that is neither a dump nor asks for an acknowledgement.
async fn only(request: io::Result<impl Answers>) -> io::Result<RouteNetlinkMessage> {
    match request?.next().await.map(|message| message.payload) {
        Some(NetlinkPayload::InnerMessage(inner)) => Ok(inner),
        Some(NetlinkPayload::Error(error)) if error.code.is_some() => Err(error.to_io()),
        _ => Err(io::Error::other("the kernel gave no answer")),
    }
}

/// The kernel's messages about one request.
trait Answers: Stream<Item = NetlinkMessage<RouteNetlinkMessage>> + Unpin {}

impl<S: Stream<Item = NetlinkMessage<RouteNetlinkMessage>> + Unpin> Answers for S {}

#[derive(Default)]
struct Answer {
    messages: Vec<RouteNetlinkMessage>,
    interrupted: bool,
}
