//! The ways of requests, and what must become of each.

use std::{
    net::{IpAddr, SocketAddr},
    thread,
    time::Duration,
};

use underpass_tests::{netns::Netns, prelude::*, second::Second, traffic::ping::Ping};

use super::{
    INSIDE, MOVING, REST, STEADY,
    book::{Book, Place},
    party::{Asker, Outcome, transfer},
};

/// Whom a server must see.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Seen {
    /// This address.
    At(IpAddr),
    /// The node, at the uplink by which the flow began, for as long as it lasts.
    Node,
}

impl Seen {
    pub(super) fn allows(self, seen: IpAddr) -> bool {
        match self {
            Self::At(ip) => seen == ip,
            Self::Node => {
                let family = Family::of(seen);
                [family.node(), Second::node(family)].contains(&seen)
            }
        }
    }
}

/// A way for requests, and what must become of them.
pub(super) struct Path<'a> {
    pub name: &'static str,
    pub from: &'a Netns,
    /// The address it asks from; any, to let the kernel choose.
    pub own: IpAddr,
    pub to: SocketAddr,
    pub place: Place,
    pub seen: Seen,
    /// The largest datagram, in bytes.
    pub largest: usize,
}

/// The ways between those that stay: nothing may ever be lost on them for good.
pub(super) fn steady<'a>(
    lab: &'a Lab,
    server: &Pod,
    client: &'a Pod,
    routed: &'a Pod,
    family: Family,
) -> Vec<Path<'a>> {
    let (world, node) = (lab.world.netns(), lab.node.netns());
    let (here, remote) = (family.node(), family.remote());
    let path = |[v4, v6]: [_; 2], from, to, place, seen, largest| Path {
        name: by(family, v4, v6),
        from,
        own: family.any(),
        to,
        place,
        seen,
        largest,
    };
    let direct = |names, from: &'a Pod, at| {
        let (to, seen) = (SocketAddr::new(at, INSIDE), from.ip(family));
        path(names, from.netns(), to, Place::At(at), Seen::At(seen), 4000)
    };
    let port = |names, from, at, seen, largest| {
        let to = SocketAddr::new(at, STEADY);
        path(
            names,
            from,
            to,
            Place::Port(STEADY),
            Seen::At(seen),
            largest,
        )
    };
    // Answers to the gateway never leave the first link; those to a server behind it follow the routes.
    let far = |path| Path {
        own: remote,
        seen: Seen::At(remote),
        ..path
    };
    vec![
        direct(
            ["pod to pod, IPv4", "pod to pod, IPv6"],
            client,
            server.ip(family),
        ),
        Path {
            seen: Seen::Node,
            ..direct(["pod to world, IPv4", "pod to world, IPv6"], client, remote)
        },
        direct(
            ["routed pod to world, IPv4", "routed pod to world, IPv6"],
            routed,
            remote,
        ),
        far(path(
            ["world to routed pod, IPv4", "world to routed pod, IPv6"],
            world,
            routed.at(family, INSIDE),
            Place::At(routed.ip(family)),
            Seen::At(remote),
            4000,
        )),
        port(
            ["gateway to host port, IPv4", "gateway to host port, IPv6"],
            world,
            here,
            family.gateway(),
            4000,
        ),
        far(port(
            ["world to host port, IPv4", "world to host port, IPv6"],
            world,
            here,
            remote,
            4000,
        )),
        port(
            ["pod to host port, IPv4", "pod to host port, IPv6"],
            client.netns(),
            here,
            client.ip(family),
            4000,
        ),
        port(
            ["node to host port, IPv4", "node to host port, IPv6"],
            node,
            here,
            family.pod_gateway(),
            1200,
        ),
        port(
            ["node by loopback, IPv4", "node by loopback, IPv6"],
            node,
            family.loopback(),
            family.pod_gateway(),
            1200,
        ),
    ]
}

/// The ways to the port that moves.
pub(super) fn moving<'a>(lab: &'a Lab, client: &'a Pod, family: Family) -> Vec<Path<'a>> {
    let path = |[v4, v6]: [_; 2], from, at: IpAddr, seen| Path {
        name: by(family, v4, v6),
        from,
        own: family.any(),
        to: SocketAddr::new(at, MOVING),
        place: Place::Port(MOVING),
        seen: Seen::At(seen),
        largest: 1200,
    };
    let here = family.node();
    vec![
        path(
            ["world to moving port, IPv4", "world to moving port, IPv6"],
            lab.world.netns(),
            here,
            family.gateway(),
        ),
        path(
            ["pod to moving port, IPv4", "pod to moving port, IPv6"],
            client.netns(),
            here,
            client.ip(family),
        ),
        path(
            ["node to moving port, IPv4", "node to moving port, IPv6"],
            lab.node.netns(),
            family.loopback(),
            family.pod_gateway(),
        ),
    ]
}

const fn by(family: Family, v4: &'static str, v6: &'static str) -> &'static str {
    match family {
        V4 => v4,
        V6 => v6,
    }
}

impl Path<'_> {
    /// A socket for datagrams by this way.
    pub(super) fn asker(&self) -> Result<Asker> {
        Asker::open(self.from, self.own)
    }

    /// Asks once with about `len` bytes: whom the server saw, if it answered.
    pub(super) fn ask(&self, book: &Book, asker: &mut Asker, len: usize) -> Option<SocketAddr> {
        let since = book.now();
        let outcome = asker.ask(book, self.place, self.to, len);
        self.note(book, since, outcome)
    }

    /// One connection.
    pub(super) fn transfer(&self, book: &Book) {
        // Others depend on no uplink.
        let is_masqueraded = self.seen == Seen::Node;
        let _ongoing = is_masqueraded.then(|| book.begin());
        let own = SocketAddr::new(self.own, 0);
        let since = book.now();
        let outcome = transfer(self.from, own, book, self.place, self.to);
        self.note(book, since, outcome);
    }

    /// Counts an exchange; one that failed although its server was there all the time is wrong.
    fn note(&self, book: &Book, since: Duration, outcome: Outcome) -> Option<SocketAddr> {
        match outcome {
            Outcome::Answered(seen, repeated) => {
                if !self.seen.allows(seen.ip()) {
                    book.accuse(format!("{}: the server saw {seen}", self.name));
                }
                book.count(self.name, |tally| {
                    tally.answered += 1;
                    tally.repeated += repeated;
                    tally.longest = tally.longest.max(book.now().saturating_sub(since));
                });
                return Some(seen);
            }
            Outcome::Silence if book.is_steady(self.place, since) => book.accuse(format!(
                "{}: nobody answered at {} since {since:?}, now {:?}",
                self.name,
                self.to,
                book.now()
            )),
            Outcome::Silence => book.count(self.name, |tally| tally.interrupted += 1),
        }
        None
    }
}

/// One long flow of datagrams, and a connection now and then.
pub(super) struct Walk<'a> {
    path: &'a Path<'a>,
    asker: Asker,
    /// Whom the server saw first, of a flow that is masqueraded.
    first: Option<SocketAddr>,
}

impl<'a> Walk<'a> {
    /// The first datagram of a flow that is masqueraded: it keeps the address that it begins with.
    pub(super) fn begin(path: &'a Path<'a>, book: &Book) -> Result<Self> {
        let mut asker = path.asker()?;
        let mut first = None;
        if path.seen == Seen::Node {
            first = path.ask(book, &mut asker, 60);
            ensure!(first.is_some(), "{}: nobody is there", path.name);
        }
        Ok(Self { path, asker, first })
    }

    pub(super) fn go_on(mut self, book: &Book) {
        let path = self.path;
        for round in 0_usize.. {
            if !book.is_open() {
                break;
            }
            if round % 8 == 0 {
                path.transfer(book);
            } else {
                let len = [60, 1200, path.largest][round % 3];
                let seen = path.ask(book, &mut self.asker, len);
                if let (Some(first), Some(seen)) = (self.first, seen)
                    && first != seen
                {
                    let name = path.name;
                    book.accuse(format!("{name}: the server saw {first}, then {seen}"));
                }
            }
            thread::sleep(REST);
        }
    }
}

/// Series of echo requests between those that stay.
pub(super) struct Pings(Vec<Ping>);

impl Pings {
    /// The first request of each.
    pub(super) fn begin(lab: &Lab, server: &Pod, client: &Pod) -> Result<Self> {
        let mut all = Vec::new();
        for family in Family::BOTH {
            let to = [server.ip(family), family.remote(), family.node()];
            for to in to {
                all.push(Ping::new(client.netns(), to)?);
            }
            all.push(Ping::new(lab.node.netns(), server.ip(family))?);
        }
        for ping in &mut all {
            ping.echo(56)?;
        }
        Ok(Self(all))
    }

    pub(super) fn go_on(mut self, book: &Book) -> Result<()> {
        while book.is_open() {
            let lengths = [56, 1400, 4000].into_iter().cycle();
            for (ping, len) in self.0.iter_mut().zip(lengths) {
                let repeated = echo(ping, len)?;
                book.count("pings, IPv4 and IPv6", |tally| {
                    tally.answered += 1;
                    tally.repeated += repeated;
                });
            }
            thread::sleep(REST);
        }
        Ok(())
    }
}

/// An echo request, and another one if that is lost with an uplink that goes: how many of them were lost.
pub(super) fn echo(ping: &mut Ping, len: usize) -> Result<u64> {
    if ping.echo(len).is_ok() {
        return Ok(0);
    }
    ping.echo(len)?;
    Ok(1)
}
