//! Traffic on every path while containers come, go and take each other's ports, routes change, and a second uplink comes and goes: some
//! seconds of it here, as many minutes as wanted by `cargo xtask test soak`.

mod book;
mod guests;
mod idle;
mod party;
mod paths;
mod routes;

use std::{
    env,
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use rstest::rstest;
use serde_json::json;
use underpass_abi::counter::{Counter, Kind};
use underpass_tests::{counter::Counters, leak::Traces, patience, prelude::*, runtime::Conf};

use book::{Book, Place};
use party::Server;
use paths::{Path, Walk};
use routes::Ways;

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

/// Packets that were INVALID, between ends that stay.
const INVALID: &str = "invalid_of_those_that_stay";

#[rstest]
fn traffic_while_containers_come_and_go(#[values(false, true)] is_liberal: bool) -> Result<()> {
    needs_root!();
    let time = match env::var(SECONDS) {
        Ok(text) => Duration::from_secs(
            text.parse()
                .with_context(|| format!("{SECONDS} is {text:?}: give a number of seconds"))?,
        ),
        Err(_) => patience::here(SHORT),
    };
    let lab = Lab::new()?;
    lab.firewall.set_liberal(is_liberal)?;
    // Of a connection whose container went, the other end goes on sending for a while. What is between ends that stay must pass.
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
    let invalid = lab.firewall.counted(INVALID)?;
    ensure!(invalid == 0, "{invalid} packets between ends that stay");
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

fn soak(lab: &Lab, time: Duration, meter: &Meter<'_>) -> Result<Arc<Book>> {
    let server = lab.pod_with("server", &with_port(lab, STEADY))?;
    let client = lab.pod_with("client", &small(lab))?;
    let routed = lab.pod_with("routed", &small(lab).with("ipMasq", false))?;
    for family in Family::BOTH {
        let ends = [&server, &client, &routed].map(|pod| pod.ip(family).to_string());
        let ends = format!("{}, {}", ends.join(", "), family.remote());
        let ip = if family == V4 { "ip" } else { "ip6" };
        let rule = format!("ct state invalid {ip} saddr {{ {ends} }} {ip} daddr {{ {ends} }}");
        lab.firewall.count_forwarded(INVALID, &rule)?;
    }
    let book = &Arc::new(Book::open(time));
    let _inside = Server::start(server.netns(), "server", V6.port(INSIDE), book)?;
    let _open = Server::start(routed.netns(), "routed", V6.port(INSIDE), book)?;
    let _beyond = Family::BOTH
        .map(|family| Server::start(lab.world.netns(), "world", family.remote_at(INSIDE), book));
    let mut present = vec![(Place::Port(STEADY), "server")];
    for family in Family::BOTH {
        present.push((Place::At(server.ip(family)), "server"));
        present.push((Place::At(routed.ip(family)), "routed"));
        present.push((Place::At(family.remote()), "world"));
    }
    for (place, name) in present {
        book.arrive(place, name, Duration::ZERO);
        book.settle(place, name);
    }
    let ways = Ways::prepare(lab)?;
    let steady: Vec<Path<'_>> = Family::BOTH
        .into_iter()
        .flat_map(|family| paths::steady(lab, &server, &client, &routed, family))
        .collect();
    let moving: Vec<Path<'_>> = Family::BOTH
        .into_iter()
        .flat_map(|family| paths::moving(lab, &client, family))
        .collect();
    // What lasts as long as all of this begins while the first uplink is the only one.
    let mut walks = Vec::new();
    for path in steady.iter().chain(&moving) {
        walks.push(Walk::begin(path, book)?);
    }
    let idle = idle::open(&steady, lab.node.netns(), book)?;
    let pings = paths::Pings::begin(lab, &server, &client)?;
    thread::scope(|scope| {
        for walk in walks {
            scope.spawn(|| walk.go_on(book));
        }
        scope.spawn(|| book.part(idle::speak(idle, time, book)));
        scope.spawn(|| book.part(ways.change(&server, book)));
        scope.spawn(|| book.part(guests::visitors(lab, &client, book)));
        scope.spawn(|| book.part(guests::successors(lab, book)));
        scope.spawn(|| book.part(guests::killed(lab, book)));
        scope.spawn(|| book.part(pings.go_on(book)));
        scope.spawn(|| book.part(tell(book, meter)));
    });
    for pod in [&server, &client, &routed] {
        pod.call_with_result("CHECK").run(&lab.node)?.silence()?;
    }
    for pod in [server, client, routed] {
        pod.del()?;
    }
    Ok(Arc::clone(book))
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
