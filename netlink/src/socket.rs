//! The socket: requests go out, and of the kernel's answers no more is decoded than somebody wants.
//!
//! It blocks. The kernel works on a request within the system call that sends it, so there is nothing
//! else to do meanwhile.

use std::{
    cell::{Cell, RefCell},
    io, iter,
    ops::Range,
};

use netlink_packet_core::{
    Emitable as _, NLA_HEADER_SIZE, NLM_F_DUMP_INTR, NLM_F_REQUEST, NLMSG_ALIGNTO, NLMSG_DONE,
    NLMSG_ERROR, NetlinkBuffer, NetlinkDeserializable as _, NetlinkHeader, NlasIterator,
};
use netlink_packet_route::RouteNetlinkMessage;
use netlink_sys::SocketAddr;

/// Room for one datagram, in bytes. The kernel fills those of a list up to half of it.
const ROOM: usize = 64 * 1024;
/// Messages begin at multiples of so many bytes.
const ALIGNMENT: usize = NLMSG_ALIGNTO as usize;

/// A socket that is connected to the kernel: nobody else's messages arrive.
#[derive(Debug)]
pub(super) struct Socket {
    inner: netlink_sys::Socket,
    /// Number of the last request.
    sequence: Cell<u32>,
    /// What arrived last.
    datagram: RefCell<Vec<u8>>,
}

impl Socket {
    /// Opens one for a netlink protocol, in the network namespace of the calling thread. The kernel
    /// filters lists as the request says, or refuses it.
    pub(super) fn open(protocol: isize) -> io::Result<Self> {
        let mut inner = netlink_sys::Socket::new(protocol)?;
        inner.bind_auto()?;
        inner.connect(&SocketAddr::new(0, 0))?;
        inner.set_netlink_get_strict_chk(true)?;
        Ok(Self {
            inner,
            sequence: Cell::new(0),
            datagram: RefCell::new(Vec::with_capacity(ROOM)),
        })
    }

    /// Sends a request that is a list or asks for an acknowledgement, and waits for the whole answer.
    /// Of the objects in it those are kept that `wanted`, which is given what follows the message's header, asks for.
    pub(super) fn exchange(
        &self,
        message: &RouteNetlinkMessage,
        flags: u16,
        wanted: impl FnMut(&[u8]) -> bool,
    ) -> io::Result<Answer> {
        let asked = self.send(iter::once(message), flags)?;
        self.answer(Reader::new(asked.start, Last::Word, wanted))?
    }

    /// Sends questions about one object each, that ask for no acknowledgement, in one go, and waits for
    /// all answers. The socket must have room for them.
    pub(super) fn exchange_each(
        &self,
        messages: impl IntoIterator<Item = RouteNetlinkMessage>,
        flags: u16,
    ) -> io::Result<Vec<io::Result<RouteNetlinkMessage>>> {
        let messages: Vec<_> = messages.into_iter().collect();
        // The kernel answers in order, each question by a datagram of its own.
        self.send(messages.iter(), flags)?
            .map(|sequence| {
                let answer = self.answer(Reader::new(sequence, Last::Object, |_| true))?;
                Ok(answer.and_then(|answer| {
                    let object = answer.objects.first().and_then(Object::decode);
                    object.ok_or_else(|| io::Error::other("the kernel gave no answer"))
                }))
            })
            .collect()
    }

    /// Asks for one object by a message that `netlink-packet-route` does not know: its type, and what
    /// follows its header. Returns what follows the header of the answer.
    pub(super) fn ask(&self, kind: u16, body: &[u8]) -> io::Result<Vec<u8>> {
        let sequence = self.sequence.get() + 1;
        self.sequence.set(sequence);
        let header = header(kind, NLM_F_REQUEST, sequence, body.len());
        let mut request = vec![0; header.buffer_len()];
        header.emit(&mut request);
        request.extend_from_slice(body);
        self.inner.send(&request, 0)?;
        let mut payload = Vec::new();
        let note = |bytes: &[u8]| {
            payload.extend_from_slice(bytes);
            false
        };
        self.answer(Reader::new(sequence, Last::Object, note))??;
        Ok(payload)
    }

    /// Sends requests in one datagram. Returns their numbers.
    fn send<'a>(
        &self,
        messages: impl Iterator<Item = &'a RouteNetlinkMessage>,
        flags: u16,
    ) -> io::Result<Range<u32>> {
        let first = self.sequence.get() + 1;
        let mut next = first;
        let mut bytes = Vec::new();
        for message in messages {
            let length = message.buffer_len();
            let header = header(message.message_type(), flags, next, length);
            let start = bytes.len();
            let body = start + header.buffer_len();
            bytes.resize((body + length).next_multiple_of(ALIGNMENT), 0);
            header.emit(&mut bytes[start..body]);
            message.emit(&mut bytes[body..body + length]);
            next += 1;
        }
        self.sequence.set(next - 1);
        if !bytes.is_empty() {
            self.inner.send(&bytes, 0)?;
        }
        Ok(first..next)
    }

    /// Reads until a request is answered. The outer error is the socket's, the inner the kernel's.
    fn answer<W>(&self, mut reader: Reader<W>) -> io::Result<io::Result<Answer>>
    where
        W: FnMut(&[u8]) -> bool,
    {
        let mut datagram = self.datagram.borrow_mut();
        loop {
            datagram.clear();
            let length = match self.inner.recv(&mut *datagram, libc::MSG_TRUNC) {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                length => length?,
            };
            if length > datagram.len() {
                return Err(io::Error::other(format!(
                    "the kernel's answer is {length} bytes long, which is more than expected"
                )));
            }
            match reader.read(&datagram)? {
                Progress::More => {}
                Progress::Complete => return Ok(Ok(reader.answer)),
                Progress::Refused(error) => return Ok(Err(error)),
            }
        }
    }
}

/// What precedes a request of so many bytes.
fn header(kind: u16, flags: u16, sequence: u32, length: usize) -> NetlinkHeader {
    let mut header = NetlinkHeader::default();
    let length = header.buffer_len() + length;
    header.length = u32::try_from(length).unwrap_or(u32::MAX);
    header.message_type = kind;
    header.flags = flags;
    header.sequence_number = sequence;
    header
}

/// What the kernel answered to a request.
#[derive(Default, Debug)]
pub(super) struct Answer {
    pub(super) objects: Vec<Object>,
    /// True if something changed while the kernel made the list, which may be incomplete.
    pub(super) interrupted: bool,
}

/// An object as the kernel told of it. Two are equal if it told the same of both.
#[derive(PartialEq, Eq, Debug)]
pub(super) struct Object {
    kind: u16,
    /// What follows the message's header.
    payload: Vec<u8>,
}

impl Object {
    /// Nothing if it is of a kind or in a form that nobody here knows.
    pub(super) fn decode(&self) -> Option<RouteNetlinkMessage> {
        let header = header(self.kind, 0, 0, self.payload.len());
        RouteNetlinkMessage::deserialize(&header, &self.payload)
            .inspect_err(|error| {
                tracing::warn!("left out of what the kernel answered: {error}");
            })
            .ok()
    }
}

/// How far the kernel has come with its answer.
#[derive(Debug)]
enum Progress {
    More,
    Complete,
    Refused(io::Error),
}

/// What an answer ends with, unless it is an error.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Last {
    /// The end of a list, or an acknowledgement.
    Word,
    Object,
}

/// Reads datagrams for the answer to one request.
struct Reader<W> {
    sequence: u32,
    last: Last,
    wanted: W,
    answer: Answer,
}

impl<W: FnMut(&[u8]) -> bool> Reader<W> {
    fn new(sequence: u32, last: Last, wanted: W) -> Self {
        Self {
            sequence,
            last,
            wanted,
            answer: Answer::default(),
        }
    }

    fn read(&mut self, mut rest: &[u8]) -> io::Result<Progress> {
        while !rest.is_empty() {
            let message = NetlinkBuffer::new_checked(rest)
                .map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))?;
            let length = message.length() as usize;
            rest = rest
                .get(length.next_multiple_of(ALIGNMENT)..)
                .unwrap_or_default();
            // Others are left over from a request that was given up.
            if message.sequence_number() != self.sequence {
                continue;
            }
            self.answer.interrupted |= message.flags() & NLM_F_DUMP_INTR != 0;
            if matches!(message.message_type(), NLMSG_ERROR | NLMSG_DONE) {
                return Ok(ended(message.payload()));
            }
            if (self.wanted)(message.payload()) {
                self.answer.objects.push(Object {
                    kind: message.message_type(),
                    payload: message.payload().to_vec(),
                });
            }
            if self.last == Last::Object {
                return Ok(Progress::Complete);
            }
        }
        Ok(Progress::More)
    }
}

/// The last message about a request begins with zero or a negative error number.
fn ended(payload: &[u8]) -> Progress {
    match word(payload, 0).map(u32::cast_signed) {
        Some(code) if code < 0 => Progress::Refused(io::Error::from_raw_os_error(-code)),
        _ => Progress::Complete,
    }
}

/// Reads a word, in host order, of what follows a message's header.
pub(super) fn word(payload: &[u8], at: usize) -> Option<u32> {
    let bytes = payload.get(at..)?.first_chunk()?;
    Some(u32::from_ne_bytes(*bytes))
}

/// Finds the value of an attribute among those that begin `at` so many bytes behind a message's header.
pub(super) fn attribute(payload: &[u8], at: usize, kind: u16) -> Option<&[u8]> {
    let attribute = NlasIterator::new(payload.get(at..)?)
        .map_while(Result::ok)
        .find(|attribute| attribute.kind() == kind)?;
    let length = usize::from(attribute.length());
    attribute.into_inner().get(NLA_HEADER_SIZE..length)
}

#[cfg(test)]
mod tests;
