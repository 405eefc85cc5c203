//! Traffic on every path while containers come, go and take each other's ports: some seconds of it here, as many minutes as wanted by
//! `cargo xtask test soak`.

mod book;
mod guests;
mod party;

use std::{
    env,
    net::{IpAddr, SocketAddr},
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, ensure};
use serde_json::json;
use underpass_abi::counter::{Counter, Kind};
use underpass_tests::{
    Family, Lab, Pod,
    counter::{Counters, Meter},
    leak::Traces,
    needs_root,
    netns::Netns,
    runtime::Conf,
    traffic::ping::Ping,
};

use book::{Book, Place};
use party::{Asker, Outcome, Server, transfer};

/// How long it takes, in seconds.
const SECONDS: &str = "UNDERPASS_SOAK_SECONDS";
/// Unless told otherwise.
const SHORT: Duration = Duration::from_secs(20);

/// Where servers listen, in containers and in the world.
const INSIDE: u16 = 80;
/// The node's port of the container that stays.
const STEADY: u16 = 8080;
/// The node's port that goes from one container to the next.
const MOVING: u16 = 9000;

/// Between two rounds of a path: the machine is shared with other tests.
const REST: Duration = Duration::from_millis(15);

/// What a program may drop here, and why.
const EXPLAINED: [(Counter, &str); 2] = [
    (
        Counter::DropNoFlow,
        "a container resets a connection whose flow ended with the container before it",
    ),
    (
        Counter::DropUntranslated,
        "a container calls the port of a late answer unreachable, whose flow is gone",
    ),
];

#[test]
fn traffic_while_containers_come_and_go() -> Result<()> {
    needs_root!();
    let time = match env::var(SECONDS) {
        Ok(text) => Duration::from_secs(
            text.parse()
                .with_context(|| format!("{SECONDS} is {text:?}: give a number of seconds"))?,
        ),
        Err(_) => SHORT,
    };
    let lab = Lab::new()?;
    // Of a connection whose container went, the other end goes on sending for a while. What steady servers are asked must pass.
    lab.firewall.tolerate_invalid();
    // All that is loaded once is loaded.
    lab.pod_with("first", &with_port(&lab, STEADY))?.del()?;
    let before = Traces::of(&lab.node)?;
    let meter = Meter::start(&lab.node)?;
    let book = soak(&lab, time, &meter)?;
    let (tallies, counted) = (book.tallies(), meter.read()?);
    anstream::println!("{tallies:#?}\n{counted:#?}");
    book.close()?;
    before.expect_same(&lab.node)?;
    for family in ["IPv4", "IPv6"] {
        ensure!(
            tallies.keys().any(|path| path.ends_with(family)),
            "no traffic by {family}"
        );
    }
    for (path, tally) in &tallies {
        ensure!(
            tally.answered > 0,
            "nothing was answered on {path}: {tally:?}"
        );
    }
    is_explained(&counted)?;
    ensure!(counted.bypassed() > 0, "{counted:?}");
    Ok(())
}

/// The default network in ranges so small that addresses are used again and again.
fn small(lab: &Lab) -> Conf {
    lab.conf().with_ipam(
        "ranges",
        json!([[{ "subnet": "10.88.0.0/28" }], [{ "subnet": "fd00:88::/124" }]]),
    )
}

fn with_port(lab: &Lab, port: u16) -> Conf {
    let mappings = ["tcp", "udp"]
        .map(|protocol| json!({ "hostPort": port, "containerPort": INSIDE, "protocol": protocol }));
    small(lab).with("runtimeConfig", json!({ "portMappings": mappings }))
}

/// Fails if a program dropped anything without a reason that belongs here.
fn is_explained(counted: &Counters) -> Result<()> {
    for &counter in Counter::ALL {
        let is_known = EXPLAINED.iter().any(|(known, _)| *known == counter);
        ensure!(
            counter.kind() != Kind::Drop || is_known || counted.get(counter) == 0,
            "{} has no explanation: {counted:?}",
            counter.name()
        );
    }
    Ok(())
}

/// A way for requests, and what must become of them.
struct Path<'a> {
    name: &'static str,
    from: &'a Netns,
    to: SocketAddr,
    place: Place,
    /// Whom the server must see.
    seen: IpAddr,
    /// The largest datagram, in bytes.
    largest: usize,
}

/// The ways between those that stay: nothing may ever be lost on them for good.
fn paths<'a>(lab: &'a Lab, server: &Pod, client: &'a Pod, family: Family) -> Vec<Path<'a>> {
    let (world, node) = (lab.world.netns(), lab.node.netns());
    let steady = |name, from, at: IpAddr, seen, largest| Path {
        name,
        from,
        to: SocketAddr::new(at, STEADY),
        place: Place::Port(STEADY),
        seen,
        largest,
    };
    let direct = |name, at: IpAddr| Path {
        name,
        from: client.netns(),
        to: SocketAddr::new(at, INSIDE),
        place: Place::At(at),
        seen: client.ip(family),
        largest: 4000,
    };
    let here = family.node();
    let by = |v4, v6| match family {
        Family::V4 => v4,
        Family::V6 => v6,
    };
    vec![
        direct(
            by("pod to pod, IPv4", "pod to pod, IPv6"),
            server.ip(family),
        ),
        Path {
            seen: here,
            ..direct(
                by("pod to world, IPv4", "pod to world, IPv6"),
                family.remote(),
            )
        },
        steady(
            by("world to host port, IPv4", "world to host port, IPv6"),
            world,
            here,
            family.gateway(),
            4000,
        ),
        steady(
            by("pod to host port, IPv4", "pod to host port, IPv6"),
            client.netns(),
            here,
            client.ip(family),
            4000,
        ),
        steady(
            by("node to host port, IPv4", "node to host port, IPv6"),
            node,
            here,
            family.pod_gateway(),
            1200,
        ),
        steady(
            by("node by loopback, IPv4", "node by loopback, IPv6"),
            node,
            family.loopback(),
            family.pod_gateway(),
            1200,
        ),
    ]
}

/// The ways to the port that moves.
fn moving<'a>(lab: &'a Lab, client: &'a Pod, family: Family) -> Vec<Path<'a>> {
    let by = |v4, v6| match family {
        Family::V4 => v4,
        Family::V6 => v6,
    };
    let path = |name, from, at: IpAddr, seen| Path {
        name,
        from,
        to: SocketAddr::new(at, MOVING),
        place: Place::Port(MOVING),
        seen,
        largest: 1200,
    };
    let here = family.node();
    vec![
        path(
            by("world to moving port, IPv4", "world to moving port, IPv6"),
            lab.world.netns(),
            here,
            family.gateway(),
        ),
        path(
            by("pod to moving port, IPv4", "pod to moving port, IPv6"),
            client.netns(),
            here,
            client.ip(family),
        ),
        path(
            by("node to moving port, IPv4", "node to moving port, IPv6"),
            lab.node.netns(),
            family.loopback(),
            family.pod_gateway(),
        ),
    ]
}

fn soak(lab: &Lab, time: Duration, meter: &Meter<'_>) -> Result<Arc<Book>> {
    let server = lab.pod_with("server", &with_port(lab, STEADY))?;
    let client = lab.pod_with("client", &small(lab))?;
    let book = &Arc::new(Book::open(time));
    let _inside = Server::start(server.netns(), "server", Family::V6.port(INSIDE), book)?;
    let _beyond = Family::BOTH
        .map(|family| Server::start(lab.world.netns(), "world", family.remote_at(INSIDE), book));
    let mut present = vec![(Place::Port(STEADY), "server")];
    for family in Family::BOTH {
        present.push((Place::At(server.ip(family)), "server"));
        present.push((Place::At(family.remote()), "world"));
    }
    for (place, name) in present {
        book.arrive(place, name, Duration::ZERO);
        book.settle(place, name);
    }
    let all: Vec<Path<'_>> = Family::BOTH
        .into_iter()
        .flat_map(|family| {
            let mut all = paths(lab, &server, &client, family);
            all.extend(moving(lab, &client, family));
            all
        })
        .collect();
    let ping = || {
        pings(lab, &server, &client, book)?;
        server.call_with_result("CHECK").run(&lab.node)?.silence()
    };
    thread::scope(|scope| {
        for path in &all {
            scope.spawn(|| book.part(walk(path, book)));
        }
        scope.spawn(|| book.part(guests::visitors(lab, &client, book)));
        scope.spawn(|| book.part(guests::successors(lab, book)));
        scope.spawn(|| book.part(guests::killed(lab, book)));
        scope.spawn(|| book.part(ping()));
        scope.spawn(|| book.part(tell(book, meter)));
    });
    server.del()?;
    client.del()?;
    Ok(Arc::clone(book))
}

/// One long flow of datagrams, and a connection now and then.
fn walk(path: &Path<'_>, book: &Book) -> Result<()> {
    let mut asker = Asker::open(path.from, Family::of(path.to.ip()))?;
    for round in 0_usize.. {
        if !book.is_open() {
            break;
        }
        let since = book.now();
        let outcome = if round % 8 == 0 {
            transfer(path.from, book, path.place, path.to)
        } else {
            let len = [60, 1200, path.largest][round % 3];
            asker.ask(book, path.place, path.to, len)
        };
        note(book, path, since, outcome);
        thread::sleep(REST);
    }
    Ok(())
}

/// Counts an exchange; one that failed although its server was there all the time is wrong.
fn note(book: &Book, path: &Path<'_>, since: Duration, outcome: Outcome) {
    match outcome {
        Outcome::Answered(seen, repeated) => {
            if seen != path.seen {
                book.accuse(format!("{}: the server saw {seen}", path.name));
            }
            book.count(path.name, |tally| {
                tally.answered += 1;
                tally.repeated += repeated;
            });
        }
        Outcome::Silence if book.is_steady(path.place, since) => book.accuse(format!(
            "{}: nobody answered at {} since {since:?}, now {:?}",
            path.name,
            path.to,
            book.now()
        )),
        Outcome::Silence => book.count(path.name, |tally| tally.interrupted += 1),
    }
}

fn pings(lab: &Lab, server: &Pod, client: &Pod, book: &Book) -> Result<()> {
    let mut series = Vec::new();
    for family in Family::BOTH {
        let to = [server.ip(family), family.remote(), family.node()];
        for to in to {
            series.push(Ping::new(client.netns(), to)?);
        }
        series.push(Ping::new(lab.node.netns(), server.ip(family))?);
    }
    while book.is_open() {
        for (ping, len) in series.iter_mut().zip([56, 1400, 4000].into_iter().cycle()) {
            ping.echo(len)?;
            book.count("pings, IPv4 and IPv6", |tally| tally.answered += 1);
        }
        thread::sleep(REST);
    }
    Ok(())
}

/// Tells who waits for it how it goes.
fn tell(book: &Book, meter: &Meter<'_>) -> Result<()> {
    let mut told = Instant::now();
    while book.is_open() {
        thread::sleep(Duration::from_millis(100));
        if told.elapsed() < Duration::from_mins(1) {
            continue;
        }
        told = Instant::now();
        let sums = book.tallies().into_values();
        let answered: u64 = sums.map(|tally| tally.answered).sum();
        let seconds = book.now().as_secs();
        let counted = meter.read()?;
        anstream::println!(
            "{seconds} s: {answered} exchanges, {} packets dropped",
            counted.dropped()
        );
    }
    Ok(())
}
