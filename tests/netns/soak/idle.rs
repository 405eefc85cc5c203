//! Connections that are opened at the beginning, and on which nobody says a word for most of the time.

use std::{
    io::{self, BufReader, Write as _},
    net::{SocketAddr, TcpStream},
    thread,
    time::Duration,
};

use anyhow::{Context as _, Result, ensure};
use underpass_tests::{Family, netfilter::LONGEST, netns::Netns};

use super::{
    REST,
    book::{Book, Heading},
    party::{connect, new_session, read_line},
    paths::Path,
};

/// How long a connection is silent in a long run. In a short one it is a third of the run, but longer than connection tracking
/// remembers anything: nothing but the bypass knows it then.
const LONG: Duration = Duration::from_mins(1);
const SHORT: Duration = LONGEST.saturating_add(Duration::from_secs(2));

/// A connection that was opened.
pub(super) struct Idle<'a> {
    path: &'a Path<'a>,
    stream: BufReader<TcpStream>,
    session: u64,
    words: u64,
    /// Whom the server saw: the same from the first word to the last.
    first: Option<SocketAddr>,
}

/// One connection by each of these ways, but for those of the node's own processes. Those are carried by the stack for good, and
/// connection tracking ends each that is silent for longer than it remembers.
pub(super) fn open<'a>(paths: &'a [Path<'a>], node: &Netns, book: &Book) -> Result<Vec<Idle<'a>>> {
    paths
        .iter()
        .filter(|path| path.from.name() != node.name())
        .map(|path| {
            let own = SocketAddr::new(path.own, 0);
            let stream = connect(path.from, own, path.to).context(path.name)?;
            stream.set_nodelay(true)?;
            let mut idle = Idle {
                path,
                stream: BufReader::new(stream),
                session: new_session(),
                words: 0,
                first: None,
            };
            idle.say(book)?;
            ensure!(idle.first.is_some(), "{}: no first word", path.name);
            Ok(idle)
        })
        .collect()
}

/// Has each of them say a word now and then, one after the other, and one at the end.
pub(super) fn speak(mut all: Vec<Idle<'_>>, time: Duration, book: &Book) -> Result<()> {
    let silence = (time / 3).clamp(SHORT, LONG);
    let count = u32::try_from(all.len())?;
    let mut next: Vec<Duration> = (1..=count).map(|at| silence * at / count).collect();
    while book.is_open() {
        for (idle, next) in all.iter_mut().zip(&mut next) {
            if book.now() >= *next {
                *next = book.now() + silence;
                idle.say(book)?;
            }
        }
        thread::sleep(REST);
    }
    for idle in &mut all {
        idle.say(book)?;
    }
    Ok(())
}

impl Idle<'_> {
    /// One word, and its answer.
    fn say(&mut self, book: &Book) -> Result<()> {
        let Path { name, place, .. } = *self.path;
        self.words += 1;
        let heading = Heading::new(book, self.session, self.words, place);
        let answer = self
            .exchange(&heading)
            .with_context(|| format!("{name}: idle connection, word {}", self.words))?;
        let seen = answer
            .strip_suffix(&format!(" {heading}"))
            .and_then(|seen| seen.parse::<SocketAddr>().ok())
            .with_context(|| format!("{name}: the answer to {heading} is {answer:?}"))?;
        let first = *self.first.get_or_insert(seen);
        ensure!(
            seen == first && self.path.seen.allows(seen.ip()),
            "{name}: idle connection, the server saw {first}, then {seen}"
        );
        let tally = match Family::of(seen.ip()) {
            Family::V4 => "idle connections, IPv4",
            Family::V6 => "idle connections, IPv6",
        };
        book.count(tally, |tally| tally.answered += 1);
        Ok(())
    }

    fn exchange(&mut self, heading: &Heading) -> io::Result<String> {
        let word = format!("{heading}\n");
        self.stream.get_mut().write_all(word.as_bytes())?;
        read_line(&mut self.stream)
    }
}
