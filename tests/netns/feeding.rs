//! Connection tracking hears of a flow for as long as it lives: its entry stays, what comes back to the stack is known there, and a rule
//! that is added later is obeyed.

use std::{
    io::{Read as _, Write as _},
    net::{SocketAddr, TcpListener, TcpStream, UdpSocket},
    thread,
    time::{Duration, Instant},
};

use rstest::rstest;
use underpass_tests::{
    frame::sctp::{self, chunk},
    netfilter::LONGEST,
    netns::Netns,
    patience,
    prelude::*,
    traffic::PATIENCE,
    world::World,
};

use crate::{
    scene::Scene,
    sctp::{End, play},
};

mod associations;
mod intervals;

const PORT: u16 = 443;
const SOURCE: u16 = 45_678;
const INSIDE: u16 = 80;

/// Between two questions.
const PAUSE: Duration = Duration::from_millis(40);
/// How often the entries are looked at meanwhile.
const LOOK: Duration = Duration::from_millis(400);

/// Several times what any entry lives without packets.
fn long() -> Duration {
    patience::here(2 * LONGEST + LONGEST / 2)
}

/// What a server answers; the rest it only takes.
const QUESTION: &[u8] = b"a question";
/// Of an answer, in bytes: more than one piece.
const ANSWER: usize = 4000;

/// The last datagram.
const FAREWELL: &[u8] = b"good bye";

/// Answers questions until somebody says good bye, or nothing for long.
fn answer(netns: &Netns, at: SocketAddr) -> Result<thread::JoinHandle<()>> {
    let socket = netns.run(|| UdpSocket::bind(at))?;
    socket.set_read_timeout(Some(patience::here(4 * PATIENCE)))?;
    Ok(thread::spawn(move || {
        let mut request = [0; 64];
        while let Ok((len, from)) = socket.recv_from(&mut request) {
            match &request[..len] {
                QUESTION => drop(socket.send_to(&[0x5a; ANSWER], from)),
                FAREWELL => return,
                _ => {}
            }
        }
    }))
}

/// Answers in pieces go by the stack, whatever becomes of the questions: connection tracking must know what they belong to.
#[rstest]
fn answers_in_pieces_arrive_all_the_time(
    #[values(V4, V6)] family: Family,
    #[values("masqueraded", "routed", "pod")] how: &str,
    #[values("talks", "is silent")] meanwhile: &str,
) -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    lab.world.route_pods()?;
    let conf = lab.conf().with("ipMasq", how == "masqueraded");
    let (pod, other) = (lab.pod_with("a", &conf)?, lab.pod_with("b", &conf)?);
    let (netns, at) = match how {
        "pod" => (other.netns(), other.at(family, PORT)),
        _ => (lab.world.netns(), family.remote_at(PORT)),
    };
    let server = answer(netns, at)?;
    let client = pod.netns().run(|| UdpSocket::bind(family.port(SOURCE)))?;
    client.connect(at)?;
    client.set_read_timeout(Some(patience::here(Duration::from_secs(1))))?;
    let mut answers = Vec::new();
    for _ in 0..3 {
        // The first questions of a kind, and one after a time in which nothing was answered.
        for _ in 0..4 {
            client.send(QUESTION)?;
            answers.push(
                client
                    .recv(&mut [0; 2 * ANSWER])
                    .is_ok_and(|len| len == ANSWER),
            );
        }
        let start = Instant::now();
        while start.elapsed() < patience::here(LONGEST) {
            if meanwhile == "talks" {
                client.send(b"nothing to answer")?;
            }
            thread::sleep(PAUSE);
        }
    }
    client.send(FAREWELL)?;
    server.join().expect("the server does not panic");
    ensure!(
        answers.iter().all(|&came| came),
        "which questions were answered: {answers:?}"
    );
    Ok(())
}

/// A flow that goes on, and how it is found among the entries of connection tracking.
struct Talk<'a> {
    name: &'static str,
    /// Words of its entry.
    entry: Vec<String>,
    /// A question and its answer.
    exchange: Box<dyn FnMut() -> Result<()> + 'a>,
}

/// Fails unless every entry is there all the time, and few packets of each flow are in the stack.
fn live_long(lab: &Lab, family: Family, talks: &mut [Talk<'_>]) -> Result<()> {
    let start = Instant::now();
    let (mut looked, mut exchanges) = (start, 0);
    while start.elapsed() < long() {
        for talk in &mut *talks {
            (talk.exchange)()
                .with_context(|| format!("{} after {:?}", talk.name, start.elapsed()))?;
        }
        exchanges += 1;
        if looked.elapsed() > LOOK {
            looked = Instant::now();
            for Talk { name, entry, .. } in &*talks {
                let words: Vec<&str> = entry.iter().map(String::as_str).collect();
                let found = lab.firewall.entries(family, &words)?;
                ensure!(
                    found.len() == 1,
                    "{name} after {:?}: of {words:?} are {found:#?}",
                    start.elapsed()
                );
            }
        }
        thread::sleep(PAUSE);
    }
    ensure!(exchanges > 50, "only {exchanges} exchanges");
    for talk in talks {
        lab.firewall
            .expect_fed(talk.name, start)
            .with_context(|| format!("of {} packets", 2 * exchanges))?;
    }
    Ok(())
}

/// Counts what the stack sees of a flow.
fn count(lab: &Lab, name: &str, expression: &str) -> Result<()> {
    lab.firewall.count_forwarded(name, expression)
}

#[rstest]
fn datagrams_keep_their_entry(#[values(V4, V6)] family: Family) -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    let other = lab.pod("other")?;
    let conf = lab.conf();
    let scene = Scene::set(family, lab, conf)?;
    let [out, into] = scene.ways(family);
    let between = (
        other.netns(),
        scene.pod.at(family, INSIDE),
        other.ip(family),
    );
    let mut talks = Vec::new();
    for (number, (name, (netns, at, seen), src)) in [
        ("to_world", out, scene.pod.ip(family)),
        ("from_world", into, family.gateway()),
        ("between", between, other.ip(family)),
    ]
    .into_iter()
    .enumerate()
    {
        let port = SOURCE + u16::try_from(number)?;
        count(&scene.lab, name, &format!("udp sport {port}"))?;
        count(&scene.lab, name, &format!("udp dport {port}"))?;
        let mut client = udp::Client::open_at(netns, family, port)?;
        talks.push(Talk {
            name,
            entry: vec![
                "udp".to_owned(),
                format!("src={src}"),
                format!("sport={port}"),
            ],
            exchange: Box::new(move || {
                let who = client.ask(at, 100)?.seen.ip();
                ensure!(who == seen, "{at} saw {who}");
                Ok(())
            }),
        });
    }
    live_long(&scene.lab, family, &mut talks)
}

#[rstest]
fn pings_keep_their_entry(#[values(V4, V6)] family: Family) -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    lab.world.route_pods()?;
    let (a, b) = (lab.pod("a")?, lab.pod("b")?);
    let mut talks = Vec::new();
    for (name, netns, from, to, other) in [
        (
            "to_world",
            a.netns(),
            a.ip(family),
            family.remote(),
            family.remote(),
        ),
        (
            "between",
            a.netns(),
            a.ip(family),
            b.ip(family),
            b.ip(family),
        ),
        (
            "from_world",
            lab.world.netns(),
            family.gateway(),
            a.ip(family),
            family.gateway(),
        ),
    ] {
        for end in ["saddr", "daddr"] {
            let ip = family.nft();
            count(
                &lab,
                name,
                &format!("meta l4proto {{ icmp, icmpv6 }} {ip} {end} {other}"),
            )?;
        }
        let mut ping = ping::Ping::new(netns, to)?;
        let protocol = match family {
            V4 => "icmp",
            V6 => "icmpv6",
        };
        talks.push(Talk {
            name,
            entry: vec![
                protocol.to_owned(),
                format!("src={from}"),
                format!("dst={to}"),
            ],
            exchange: Box::new(move || ping.echo(56).map(drop)),
        });
    }
    live_long(&lab, family, &mut talks)
}

/// How many packets with a chunk of this type came to an end.
fn heard(end: &End, kind: u8) -> usize {
    let frames = end.seen.frames();
    let packets = frames.iter().filter_map(|bytes| sctp::read(bytes));
    packets.filter(|packet| packet.chunk == kind).count()
}

#[rstest]
fn an_association_keeps_its_entry(#[values(V4, V6)] family: Family) -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    let pod = lab.pod("a")?;
    count(&lab, "sctp", "meta l4proto sctp")?;
    let client = End::of(pod.netns(), Pod::IFNAME)?;
    let server = End::of(lab.world.netns(), World::LINK)?;
    let ends = pod.ends(family.remote())?;
    let back = lab.ends_from_world(family.remote(), family.node())?;
    let seen = play(&client, (ends, SOURCE, PORT), &server, back)?;
    let (data, sack) = (
        ends.sctp(SOURCE, PORT, chunk::DATA, &[7; 100]),
        back.sctp(PORT, seen.port(), chunk::SACK, &[7; 12]),
    );
    let before = [heard(&server, chunk::DATA), heard(&client, chunk::SACK)];
    // The opening was fed to connection tracking as a whole.
    let opening = lab.firewall.counted("sctp")?;
    let start = Instant::now();
    let mut exchanges = 0;
    while start.elapsed() < long() {
        client.link.send(&data)?;
        thread::sleep(PAUSE);
        server.link.send(&sack)?;
        thread::sleep(PAUSE);
        exchanges += 1;
        if exchanges % 6 == 0 {
            let source = format!("src={}", pod.ip(family));
            let found = lab.firewall.entries(family, &["sctp", &source])?;
            ensure!(found.len() == 1, "after {:?}: {found:#?}", start.elapsed());
        }
    }
    thread::sleep(LOOK);
    for (end, kind, before) in [
        (&server, chunk::DATA, before[0]),
        (&client, chunk::SACK, before[1]),
    ] {
        let arrived = heard(end, kind) - before;
        ensure!(
            arrived == exchanges,
            "{arrived} of {exchanges} chunks {kind}"
        );
    }
    let fed = lab.firewall.counted("sctp")? - opening;
    let most = 2 * u64::try_from(start.elapsed().as_millis() / 600 + 1)?;
    ensure!(
        (2..=most).contains(&fed),
        "the firewall saw {fed} of {} packets",
        2 * exchanges
    );
    Ok(())
}

#[rstest]
fn a_rule_that_comes_later_ends_a_flow(
    #[values(V4, V6)] family: Family,
    #[values("world", "pod", "host port")] peer: &str,
) -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    let other = lab.pod("other")?;
    let conf = lab.conf();
    let scene = Scene::set(family, lab, conf)?;
    let [out, into] = scene.ways(family);
    let between = (
        other.netns(),
        scene.pod.at(family, INSIDE),
        other.ip(family),
    );
    let ((netns, at, _), dport) = match peer {
        "world" => (out, PORT),
        "pod" => (between, INSIDE),
        _ => (into, INSIDE),
    };
    let mut client = udp::Client::open(netns, family)?;
    client.chat(at, 20)?;
    let expression = format!("udp dport {dport}");
    scene.lab.firewall.drop_forwarded(&expression)?;
    expect_end(|| client.hears_nothing(at).is_ok())
}

#[rstest]
fn a_rule_that_comes_later_ends_a_ping(#[values(V4, V6)] family: Family) -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    let pod = lab.pod("a")?;
    let mut ping = ping::Ping::new(pod.netns(), family.remote())?;
    ping.series(20)?;
    // Answers count as well.
    for kind in ["icmp type echo-reply", "icmpv6 type echo-reply"] {
        lab.firewall.drop_forwarded(kind)?;
    }
    expect_end(|| ping.hears_nothing().is_ok())
}

/// Fails unless it is silent soon, and silent from then on.
pub(crate) fn expect_end(mut is_silent: impl FnMut() -> bool) -> Result<()> {
    let start = Instant::now();
    while !is_silent() {
        ensure!(
            start.elapsed() < patience::here(LONGEST),
            "it goes on after {:?}",
            start.elapsed()
        );
        thread::sleep(PAUSE);
    }
    for _ in 0..6 {
        ensure!(is_silent(), "it goes on after a silence");
    }
    Ok(())
}

/// Connection tracking is liberal, so that a connection may go back to the stack, and who is cut off by a rule stays so: also when his other end,
/// which hears nothing and says nothing for long, speaks again.
#[rstest]
fn a_connection_that_a_rule_has_ended_does_not_come_back(
    #[values(V4, V6)] family: Family,
) -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    let netns = lab.node.netns();
    netns.set_sysctl("net/netfilter/nf_conntrack_tcp_be_liberal", "1")?;
    let (a, b) = (lab.pod("a")?, lab.pod("b")?);
    let listener = b.netns().run(|| TcpListener::bind(family.port(PORT)))?;
    let mut client = a.netns().run(|| TcpStream::connect(b.at(family, PORT)))?;
    let (mut server, _) = listener.accept()?;
    let mut letter = [0];
    for _ in 0..20 {
        client.write_all(b"?")?;
        server.read_exact(&mut letter)?;
        server.write_all(b"!")?;
        client.read_exact(&mut letter)?;
    }
    // Where the machine is slow the client sends again less often than connection tracking forgets: then it does not know what the server says.
    lab.firewall.tolerate_invalid();
    lab.firewall.drop_forwarded(&format!("tcp dport {PORT}"))?;
    server.set_nonblocking(true)?;
    expect_end(|| {
        let sent = client.write_all(b"?");
        thread::sleep(LOOK);
        sent.is_ok() && server.read(&mut letter).is_err()
    })?;
    thread::sleep(long());
    server.write_all(b"are you there?")?;
    // The client sends again what was not acknowledged, later and later.
    let end = Instant::now() + 2 * long();
    while Instant::now() < end {
        thread::sleep(LOOK);
        let heard = server.read(&mut letter);
        ensure!(heard.is_err(), "what was withheld arrives: {heard:?}");
    }
    Ok(())
}

#[rstest]
fn a_flow_outlives_what_connection_tracking_knows(#[values(V4, V6)] family: Family) -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    let (a, b) = (lab.pod("a")?, lab.pod("b")?);
    let _server = tcp::Server::start(b.netns(), family.port(PORT))?;
    let mut client = tcp::Client::connect(a.netns(), b.at(family, PORT))?;
    client.exchange(500_000, 500_000)?;
    lab.firewall.outlast(family, &["tcp"])?;
    client.exchange(500_000, 500_000)?;
    Ok(())
}
