//! The memory of entries that go is given to others at once, while packets are in the middle of being sent by what they say. None of them
//! arrives at a wrong place, or with anything in it that is another's.

use std::{
    hint, io,
    net::{IpAddr, SocketAddr, UdpSocket},
    ops::Range,
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::{Duration, Instant},
};

use aya::maps::{HashMap, Map, MapData};
use etherparse::{Icmpv4Type, Icmpv6Type, SlicedPacket, TransportSlice};
use rstest::rstest;
use underpass_abi::{
    addr::{self, Addr4, Addr6},
    flow::{Flow, Key, protocol, state},
    map,
};
use underpass_tests::{
    capture::Capture, counter, frame, netns::Netns, patience, prelude::*, traffic::SILENCE,
    world::World,
};

use super::{FLOWS, HOST, INSIDE, PORT, small};
use crate::loading::on_one_cpu;

/// Ports of each lane, from here on: low enough to be kept.
const FIRST: u16 = 10_000;
const EACH: u16 = 2_000;
/// Questions of each flow: the first of them passes the stack.
const QUESTIONS: u32 = 4;
/// Flows of a lane at a time.
const ROW: usize = 16;
/// More flows than a pod has open here, but for those that were lost.
const QUOTA: u16 = 512;
/// How long a question waits for its answer.
const WAIT: Duration = Duration::from_millis(10);
/// Between two entries that are taken away: whose slot was given in this second is given to no other.
const PAUSE: Duration = Duration::from_millis(2);

/// An end of a lane.
struct Place<'a> {
    netns: &'a Netns,
    line: Capture,
}

impl<'a> Place<'a> {
    fn of(netns: &'a Netns, device: &str) -> Result<Self> {
        let line = Capture::start(netns, device)?;
        Ok(Self { netns, line })
    }
}

/// Whom a server takes for the client.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Seen {
    /// The client itself.
    Client,
    /// The same at some port.
    ItsAddress,
    /// The node.
    Node,
}

/// Who asks whom, by datagrams that say which lane they are of and which port they were sent from.
#[derive(Debug)]
struct Lane {
    number: u16,
    /// Where the client and the server are, in a list of places.
    client: usize,
    server: usize,
    /// The client's address.
    own: IpAddr,
    /// Whom it asks.
    asked: SocketAddr,
    /// Where a question arrives.
    served: SocketAddr,
    seen: Seen,
}

impl Lane {
    fn ports(&self) -> Range<u16> {
        let first = FIRST + self.number * EACH;
        first..first + EACH / u16::try_from(patience::factor()).unwrap_or(u16::MAX)
    }

    fn text(&self, port: u16) -> String {
        format!("lane {} port {port} {}", self.number, "~".repeat(40))
    }

    /// Asks from each port some times. What is answered is looked at later.
    fn ask(&self, places: &[Place<'_>]) -> Result<()> {
        let ports: Vec<u16> = self.ports().collect();
        let bind = |&port: &u16| -> io::Result<_> {
            let socket = UdpSocket::bind(SocketAddr::new(self.own, port))?;
            socket.set_read_timeout(Some(patience::here(WAIT)))?;
            Ok((port, socket))
        };
        places[self.client].netns.run(|| {
            for row in ports.chunks(ROW) {
                let sockets = row.iter().map(bind).collect::<io::Result<Vec<_>>>()?;
                for _ in 0..QUESTIONS {
                    for (port, socket) in &sockets {
                        socket.send_to(self.text(*port).as_bytes(), self.asked)?;
                    }
                    for (_, socket) in &sockets {
                        let _may_be_lost = socket.recv(&mut [0; 200]);
                    }
                }
            }
            Ok(())
        })
    }
}

/// A datagram as it arrived.
struct Datagram {
    from: SocketAddr,
    to: SocketAddr,
    text: String,
}

fn datagram(bytes: &[u8]) -> Option<Datagram> {
    let seen = frame::read(bytes)?;
    let (from, to) = seen.ports?;
    let packet = SlicedPacket::from_ethernet(bytes).ok()?;
    let Some(TransportSlice::Udp(udp)) = packet.transport else {
        return None;
    };
    Some(Datagram {
        from: SocketAddr::new(seen.src, from),
        to: SocketAddr::new(seen.dst, to),
        text: String::from_utf8_lossy(udp.payload()).into_owned(),
    })
}

/// Who is told that what he has sent did not arrive.
fn refused(bytes: &[u8]) -> Option<IpAddr> {
    let is_refusal = match SlicedPacket::from_ethernet(bytes).ok()?.transport? {
        TransportSlice::Icmpv4(icmp) => {
            matches!(icmp.icmp_type(), Icmpv4Type::DestinationUnreachable(_))
        }
        TransportSlice::Icmpv6(icmp) => {
            matches!(icmp.icmp_type(), Icmpv6Type::DestinationUnreachable(_))
        }
        _ => false,
    };
    is_refusal.then_some(frame::read(bytes)?.dst)
}

/// What the text of a datagram says of itself: lane and port.
fn told(text: &str) -> Option<(u16, u16)> {
    let mut words = text.strip_prefix("lane ")?.split(' ');
    let lane = words.next()?.parse().ok()?;
    let port = words.nth(1)?.parse().ok()?;
    Some((lane, port))
}

/// Fails if a datagram that arrived at a place belongs elsewhere, or says what none has said. Whether it is an answer that its client takes.
fn belongs(lanes: &[Lane], place: usize, datagram: &Datagram) -> Result<bool> {
    let Datagram { from, to, text } = datagram;
    // An answer says first whom the server saw.
    let (seen, said) = match text.split_once('\n') {
        Some((seen, said)) => (Some(seen.parse::<SocketAddr>()?), said),
        None => (None, text.as_str()),
    };
    let found = || {
        let (number, port) = told(said)?;
        let lane = lanes.iter().find(|lane| lane.number == number)?;
        (lane.ports().contains(&port) && lane.text(port) == said).then_some((lane, port))
    };
    let (lane, port) = found().context("nobody has said that")?;
    let client = SocketAddr::new(lane.own, port);
    let is_right = match (seen, lane.seen) {
        (None, Seen::Client) => *from == client,
        (None, Seen::ItsAddress) => from.ip() == client.ip(),
        (None, Seen::Node) => from.ip() == Family::of(lane.own).node(),
        (Some(_), _) if *from == lane.asked => *to == client,
        // Its flow had to go before the answer came, which begins one of its own: to whom the server saw, with the node's address.
        (Some(seen), Seen::ItsAddress) => from.ip() == lane.asked.ip() && *to == seen,
        (Some(_), _) => false,
    };
    let is_there = match seen {
        Some(_) => place == lane.client,
        None => place == lane.server && *to == lane.served,
    };
    ensure!(is_right && is_there, "it is of {lane:?} from {client}");
    Ok(seen.is_some() && *from == lane.asked)
}

/// Looks at all that arrived anywhere: how many answers were there.
fn check(lanes: &[Lane], places: &[Place<'_>]) -> Result<usize> {
    // The node answers none of them: each is for a container, or lost.
    let is_client_of_port = |ip: &IpAddr| {
        let mut of_ports = lanes.iter().filter(|lane| lane.seen == Seen::ItsAddress);
        of_ports.any(|lane| lane.own == *ip)
    };
    let mut answers = 0;
    for (number, place) in places.iter().enumerate() {
        let frames = place.line.frames();
        let told = frames.iter().filter_map(|bytes| refused(bytes));
        let refused = told.filter(is_client_of_port).count();
        ensure!(
            refused == 0,
            "{refused} questions to host ports were refused"
        );
        for datagram in frames.iter().filter_map(|bytes| datagram(bytes)) {
            let is_answer = belongs(lanes, number, &datagram).with_context(|| {
                let Datagram { from, to, text } = &datagram;
                let name = place.netns.name();
                format!("from {from} to {to} came to {name}: {text:?}")
            })?;
            answers += usize::from(is_answer);
        }
    }
    Ok(answers)
}

/// Takes entries of answered flows away as long as it is wanted, one of a translated flow's two as well as both: so many.
fn take_away<A: addr::Family>(node: &Node, name: &str, is_over: &AtomicBool) -> Result<u64> {
    let mut flows: HashMap<_, Key<A>, Flow<A>> =
        Map::HashMap(counter::open(node, name)?).try_into()?;
    let mut taken = 0;
    while !is_over.load(Ordering::Relaxed) {
        // Whose last key is gone has to begin again, and might never come to the end.
        let keys = flows.keys().take(2 * usize::from(FLOWS));
        let keys: Vec<Key<A>> = keys.filter_map(Result::ok).collect();
        for key in keys.iter().filter(|key| key.0.protocol == protocol::UDP) {
            if is_over.load(Ordering::Relaxed)
                || !flows.get(key, 0).is_ok_and(|flow| is_answered(&flow))
            {
                continue;
            }
            taken += u64::from(flows.remove(key).is_ok());
            thread::sleep(PAUSE);
        }
    }
    Ok(taken)
}

/// Lanes from two pods to the world, from the world to host ports of two pods, and from pod to pod: places are the pods and the world.
fn lanes(family: Family, pods: [&Pod; 2]) -> Vec<Lane> {
    const WORLD: usize = 2;
    let [a, b] = pods.map(|pod| pod.at(family, INSIDE));
    let remote = family.remote_at(PORT);
    let [host_a, host_b] = [HOST, HOST + 1].map(|port| SocketAddr::new(family.node(), port));
    let world = family.gateway();
    [
        (0, WORLD, a.ip(), remote, remote, Seen::Node),
        (1, WORLD, b.ip(), remote, remote, Seen::Node),
        (WORLD, 0, world, host_a, a, Seen::ItsAddress),
        (WORLD, 1, world, host_b, b, Seen::ItsAddress),
        (0, 1, a.ip(), b, b, Seen::Client),
    ]
    .into_iter()
    .zip(0..)
    .map(
        |((client, server, own, asked, served, seen), number)| Lane {
            number,
            client,
            server,
            own,
            asked,
            served,
            seen,
        },
    )
    .collect()
}

#[rstest]
fn datagrams_arrive_where_they_belong(
    #[values(V4, V6)] family: Family,
    #[values("make room", "are taken away")] what: &str,
) -> Result<()> {
    needs_root!();
    let lab = small()?;
    let pod = |name: &str, host| {
        let conf = lab.conf().with_host_port(host, INSIDE);
        lab.pod_with(name, &conf.with("maxHalfOpenFlows", QUOTA))
    };
    let pods = [pod("a", HOST)?, pod("b", HOST + 1)?];
    let (world, remote) = (lab.world.netns(), family.remote_at(PORT));
    let _servers = [
        udp::Server::start(world, remote)?,
        udp::Server::start(pods[0].netns(), pods[0].at(family, INSIDE))?,
        udp::Server::start(pods[1].netns(), pods[1].at(family, INSIDE))?,
    ];
    let lanes = lanes(family, pods.each_ref());
    let places = [
        Place::of(pods[0].netns(), Pod::IFNAME)?,
        Place::of(pods[1].netns(), Pod::IFNAME)?,
        Place::of(world, World::LINK)?,
    ];
    let meter = Meter::start(&lab.node)?;
    let is_over = AtomicBool::new(what == "make room");
    let taken = thread::scope(|scope| -> Result<u64> {
        let taking = scope.spawn(|| match family {
            V4 => take_away::<Addr4>(&lab.node, map::FLOWS4, &is_over),
            V6 => take_away::<Addr6>(&lab.node, map::FLOWS6, &is_over),
        });
        let asking: Vec<_> = lanes
            .iter()
            .map(|lane| scope.spawn(|| lane.ask(&places)))
            .collect();
        let asked: Vec<_> = asking
            .into_iter()
            .map(thread::ScopedJoinHandle::join)
            .collect();
        is_over.store(true, Ordering::Relaxed);
        for end in asked {
            end.expect("who asks does not panic")?;
        }
        taking.join().expect("who takes away does not panic")
    })?;
    thread::sleep(SILENCE / 2);
    let counted = meter.read()?;
    anstream::println!("{taken} entries were taken away, counted: {counted:?}");
    let questions: u32 = lanes
        .iter()
        .map(|lane| QUESTIONS * u32::from(lane.ports().end - lane.ports().start))
        .sum();
    let answers = check(&lanes, &places)?;
    ensure!(
        2 * answers > questions as usize,
        "{answers} answers to {questions} questions: {counted:?}"
    );
    ensure!(counted.bypassed() > u64::from(questions / 2), "{counted:?}");
    let made = counted.get(Counter::MadeRoom) + counted.get(Counter::Expired);
    let gone = if what == "make room" { made } else { taken };
    let few = u64::from(FLOWS) / u64::from(4 * patience::factor());
    ensure!(gone > few, "{gone} entries went: {counted:?}");
    Ok(())
}

/// An answer is translated, and its flow taken away before it is at the pod: that is no flow which the world has begun, and by which the pod's next
/// question would leave with its own address.
#[rstest]
fn an_answer_without_a_flow_begins_none(#[values(V4, V6)] family: Family) -> Result<()> {
    needs_root!();
    ask_meanwhile(family, "learned", 1)
}

/// The flow is taken away between two looks at it by which its packet goes: it is not brought back from what the packet before it was about. Without a
/// bypass that is the answer, whose way ends at the pod.
#[rstest]
fn what_goes_meanwhile_is_not_restored(#[values(V4, V6)] family: Family) -> Result<()> {
    needs_root!();
    ask_meanwhile(family, "off", 60_000)
}

/// Has a masqueraded pod ask a server that knows a way to it, both on one CPU, while what is known of its flow is taken away on another, less than `span`
/// nanoseconds after each answer: the server never sees the pod.
fn ask_meanwhile(family: Family, bypass: &str, span: u64) -> Result<()> {
    let lab = Lab::unloaded()?;
    lab.node.underpass(&["load", "--flows", "16384"])?;
    lab.world.route_pods()?;
    let pod = lab.pod_with("a", &lab.conf().with("bypass", bypass))?;
    let remote = family.remote_at(PORT);
    let socket = pod.netns().run(|| UdpSocket::bind(family.port(0)))?;
    socket.connect(remote)?;
    socket.set_read_timeout(Some(patience::here(WAIT)))?;
    let is_over = AtomicBool::new(false);
    thread::scope(|scope| {
        let taking = scope.spawn(|| match family {
            V4 => take_when_answered::<Addr4>(&lab.node, map::FLOWS4, span, &is_over),
            V6 => take_when_answered::<Addr6>(&lab.node, map::FLOWS6, span, &is_over),
        });
        // The server's thread is one that this thread starts.
        let asked = on_one_cpu(|| {
            let _server = udp::Server::start(lab.world.netns(), remote)?;
            ask_without_pause(&socket, family)
        });
        is_over.store(true, Ordering::Relaxed);
        let taken = taking.join().expect("who takes away does not panic")?;
        asked?;
        ensure!(taken > 20, "{taken} flows were taken away");
        Ok(())
    })
}

/// Takes what the pod knows of its one flow away each time that it is answered, a little later each time and less than `span` nanoseconds: so often.
fn take_when_answered<A: addr::Family>(
    node: &Node,
    name: &str,
    span: u64,
    is_over: &AtomicBool,
) -> Result<u64> {
    let mut flows: HashMap<_, Key<A>, Flow<A>> =
        Map::HashMap(counter::open(node, name)?).try_into()?;
    let (mut its_key, mut taken, mut nanoseconds) = (None, 0, 0);
    while !is_over.load(Ordering::Relaxed) {
        let Some(key) = its_key else {
            its_key = inner(&flows);
            continue;
        };
        if !flows.get(&key, 0).is_ok_and(|flow| is_answered(&flow)) {
            continue;
        }
        let there = Instant::now();
        while there.elapsed() < Duration::from_nanos(nanoseconds) {
            hint::spin_loop();
        }
        nanoseconds = (nanoseconds + 137) % span;
        taken += u64::from(flows.remove(&key).is_ok());
    }
    Ok(taken)
}

/// The key of a pod's flow, if there is one: that of the entry under the tuple which the pod has.
fn inner<A: addr::Family>(flows: &HashMap<MapData, Key<A>, Flow<A>>) -> Option<Key<A>> {
    let mut known = flows.iter().filter_map(Result::ok);
    let found = known.find(|(_, flow)| flow.state & state::OUTER == 0);
    found.map(|(key, _)| key)
}

/// What nobody has answered yet would be charged for twice.
fn is_answered<A>(flow: &Flow<A>) -> bool {
    flow.state & state::ANSWERED == state::ANSWERED
}

/// Asks for some seconds. Who answers says whom it sees, which must be the node.
fn ask_without_pause(socket: &UdpSocket, family: Family) -> Result<()> {
    let begun = Instant::now();
    let mut answers = 0;
    let mut answer = [0; 200];
    while begun.elapsed() < patience::here(Duration::from_secs(3)) {
        socket.send(b"?")?;
        let Ok(length) = socket.recv(&mut answer) else {
            continue;
        };
        let seen = str::from_utf8(&answer[..length])?.lines().next();
        let seen: SocketAddr = seen.context("whom the server saw")?.parse()?;
        ensure!(
            seen.ip() == family.node(),
            "the server saw {seen} after {answers} answers"
        );
        answers += 1;
    }
    ensure!(answers > 100, "{answers} answers came");
    anstream::println!("{answers} answers came");
    Ok(())
}
