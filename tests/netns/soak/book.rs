//! Who serves what, and when: what the ends of each exchange are judged by.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    fmt,
    net::IpAddr,
    str::FromStr,
    sync::{Mutex, MutexGuard, PoisonError},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, bail, ensure};

/// What a request was sent to, as its sender knows it.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(super) enum Place {
    /// An address of a container, or of the world.
    At(IpAddr),
    /// A port of the node, at whatever address of it.
    Port(u16),
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::At(ip) => write!(f, "{ip}"),
            Self::Port(port) => write!(f, "port{port}"),
        }
    }
}

impl FromStr for Place {
    type Err = anyhow::Error;

    fn from_str(text: &str) -> anyhow::Result<Self> {
        if let Some(port) = text.strip_prefix("port") {
            return Ok(Self::Port(port.parse()?));
        }
        match text.parse() {
            Ok(ip) => Ok(Self::At(ip)),
            Err(_) => bail!("{text:?} is no place"),
        }
    }
}

/// One server's time at a place, from the call that may bring it there until the end of the one that takes it away.
#[derive(Clone, Debug)]
struct Tenure {
    name: String,
    coming: Duration,
    /// It must answer from here on.
    here: Option<Duration>,
    /// It need not answer from here on.
    leaving: Option<Duration>,
    gone: Option<Duration>,
}

impl Tenure {
    fn overlaps(&self, since: Duration, until: Duration) -> bool {
        self.coming <= until && self.gone.is_none_or(|gone| gone >= since)
    }

    fn spans(&self, since: Duration, until: Duration) -> bool {
        self.here.is_some_and(|here| here <= since)
            && self.leaving.is_none_or(|leaving| leaving > until)
    }
}

/// What happened on one path.
#[derive(Clone, Copy, Default, Debug)]
pub(super) struct Tally {
    /// Exchanges that went well.
    pub answered: u64,
    /// Datagrams that had to be sent again.
    pub repeated: u64,
    /// What the slowest of those that went well took.
    pub longest: Duration,
    /// Exchanges that ended because their server came or went.
    pub interrupted: u64,
}

/// The record of one run.
#[derive(Debug)]
pub(super) struct Book {
    start: Instant,
    end: Instant,
    tenures: Mutex<HashMap<Place, Vec<Tenure>>>,
    tallies: Mutex<BTreeMap<&'static str, Tally>>,
    wrong: Mutex<Vec<String>>,
    ongoing: Mutex<BTreeSet<Duration>>,
}

/// An exchange that began, until dropped.
#[derive(Debug)]
pub(super) struct Ongoing<'a> {
    book: &'a Book,
    since: Duration,
}

impl Drop for Ongoing<'_> {
    fn drop(&mut self) {
        lock(&self.book.ongoing).remove(&self.since);
    }
}

impl Book {
    /// A record that ends after some time.
    pub(super) fn open(time: Duration) -> Self {
        let start = Instant::now();
        Self {
            start,
            end: start + time,
            tenures: Mutex::default(),
            tallies: Mutex::default(),
            wrong: Mutex::default(),
            ongoing: Mutex::default(),
        }
    }

    /// Whether there is time left, and nothing went wrong.
    pub(super) fn is_open(&self) -> bool {
        Instant::now() < self.end && lock(&self.wrong).is_empty()
    }

    /// The time by this record.
    pub(super) fn now(&self) -> Duration {
        self.start.elapsed()
    }

    /// A server may be at a place since `coming`.
    pub(super) fn arrive(&self, place: Place, name: &str, coming: Duration) {
        let tenure = Tenure {
            name: name.to_owned(),
            coming,
            here: None,
            leaving: None,
            gone: None,
        };
        lock(&self.tenures).entry(place).or_default().push(tenure);
    }

    /// It must answer from now on.
    pub(super) fn settle(&self, place: Place, name: &str) {
        self.with_latest(place, name, |tenure, now| tenure.here = Some(now));
    }

    /// A call begins that may take a server away from a place.
    pub(super) fn leave(&self, place: Place, name: &str) {
        self.with_latest(place, name, |tenure, now| tenure.leaving = Some(now));
    }

    /// That call is over: it must not serve any more.
    pub(super) fn forget(&self, place: Place, name: &str) {
        self.with_latest(place, name, |tenure, now| tenure.gone = Some(now));
    }

    fn with_latest(&self, place: Place, name: &str, change: impl FnOnce(&mut Tenure, Duration)) {
        let mut tenures = lock(&self.tenures);
        let now = self.now();
        let held = tenures.get_mut(&place).into_iter().flatten();
        if let Some(tenure) = held.rev().find(|tenure| tenure.name == name) {
            change(tenure, now);
        }
    }

    /// Notes it as wrong unless `name` was at the place at some moment since `since`.
    pub(super) fn judge(&self, place: Place, name: &str, since: Duration) {
        let now = self.now();
        let is_right = lock(&self.tenures)
            .get(&place)
            .into_iter()
            .flatten()
            .any(|tenure| tenure.name == name && tenure.overlaps(since, now));
        if !is_right {
            self.accuse(format!(
                "{name} got what was sent to {place} at {since:?}, now {now:?}"
            ));
        }
    }

    /// Whether one and the same server had to answer at a place all the time since `since`.
    pub(super) fn is_steady(&self, place: Place, since: Duration) -> bool {
        let now = self.now();
        let tenures = lock(&self.tenures);
        let held = tenures.get(&place).into_iter().flatten();
        let mut present = held.filter(|tenure| tenure.overlaps(since, now));
        present
            .next()
            .is_some_and(|only| only.spans(since, now) && present.next().is_none())
    }

    /// An exchange begins, of which others may have to wait for the end.
    pub(super) fn begin(&self) -> Ongoing<'_> {
        let mut ongoing = lock(&self.ongoing);
        let mut since = self.now();
        // A clock may tell two of them the same time.
        while !ongoing.insert(since) {
            since += Duration::from_nanos(1);
        }
        Ongoing { book: self, since }
    }

    /// Waits for the end of all exchanges that began before.
    pub(super) fn outlast(&self) {
        let now = self.now();
        while lock(&self.ongoing)
            .first()
            .is_some_and(|&since| since <= now)
        {
            thread::sleep(Duration::from_millis(5));
        }
    }

    /// Something went wrong.
    pub(super) fn accuse(&self, what: String) {
        lock(&self.wrong).push(what);
    }

    /// One part of the run ended; if by an error, all of it ends.
    pub(super) fn part(&self, ended: anyhow::Result<()>) {
        if let Err(error) = ended {
            self.accuse(format!("{error:#}"));
        }
    }

    /// Counts what happened on a path.
    pub(super) fn count(&self, path: &'static str, change: impl FnOnce(&mut Tally)) {
        change(lock(&self.tallies).entry(path).or_default());
    }

    /// What happened so far.
    pub(super) fn tallies(&self) -> BTreeMap<&'static str, Tally> {
        lock(&self.tallies).clone()
    }

    /// Fails if anything went wrong.
    pub(super) fn close(&self) -> anyhow::Result<()> {
        let wrong = lock(&self.wrong);
        ensure!(wrong.is_empty(), "{}", wrong.join("\n"));
        Ok(())
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The first line of a request: who asks, what for, and since when.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Heading {
    /// One for each socket of a client.
    pub session: u64,
    /// Of the request in its session.
    pub number: u64,
    /// What was asked for.
    pub place: Place,
    /// When, in nanoseconds of the record.
    pub since: u64,
}

impl Heading {
    /// Of a request that is sent now.
    pub(super) fn new(book: &Book, session: u64, number: u64, place: Place) -> Self {
        Self {
            session,
            number,
            place,
            since: u64::try_from(book.now().as_nanos()).unwrap_or(u64::MAX),
        }
    }
}

impl fmt::Display for Heading {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            session,
            number,
            place,
            since,
        } = self;
        write!(f, "{session} {number} {place} {since}")
    }
}

impl FromStr for Heading {
    type Err = anyhow::Error;

    fn from_str(text: &str) -> anyhow::Result<Self> {
        let mut words = text.split(' ');
        let mut next = || words.next().with_context(|| format!("in {text:?}"));
        Ok(Self {
            session: next()?.parse()?,
            number: next()?.parse()?,
            place: next()?.parse()?,
            since: next()?.parse()?,
        })
    }
}
