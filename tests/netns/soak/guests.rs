//! Containers that come and go.

use std::{net::SocketAddr, sync::Arc, thread, time::Duration};

use underpass_tests::{
    prelude::*,
    runtime::{Call, Conf},
    traffic::ping::Ping,
};

use super::{
    INSIDE, MOVING, STEADY,
    book::{Book, Place},
    party::Server,
    paths::{Path, Seen, echo},
    small, with_port,
};

/// A container with a server, known to the book.
struct Guest<'a> {
    server: Server,
    pod: Pod,
    name: String,
    book: &'a Arc<Book>,
}

impl<'a> Guest<'a> {
    /// Its ADD; `port` is what it then serves of the node.
    fn add(
        lab: &Lab,
        name: &str,
        conf: &Conf,
        port: Option<Place>,
        book: &'a Arc<Book>,
    ) -> Result<Self> {
        let coming = book.now();
        let pod = lab.pod_with(name, conf)?;
        let name = name.to_owned();
        let at = pod.addresses().into_iter().map(Place::At);
        let places: Vec<Place> = at.chain(port).collect();
        for &place in &places {
            book.arrive(place, &name, coming);
        }
        let server = Server::start(pod.netns(), &name, V6.port(INSIDE), book)?;
        for &place in &places {
            book.settle(place, &name);
        }
        Ok(Self {
            server,
            pod,
            name,
            book,
        })
    }

    /// Its DEL; the server stays until that is over.
    fn del(self) -> Result<()> {
        let places: Vec<Place> = self.pod.addresses().into_iter().map(Place::At).collect();
        for &place in &places {
            self.book.leave(place, &self.name);
        }
        let netns = self.pod.netns().clone();
        self.pod.del()?;
        for &place in &places {
            self.book.forget(place, &self.name);
        }
        drop(self.server);
        netns.unlink()
    }

    /// What it asks itself, of those that stay: of the world, and of a port of the node.
    fn asks(&self, family: Family) -> Result<()> {
        let netns = self.pod.netns();
        let path = |name, to: SocketAddr, place, seen| Path {
            name,
            from: netns,
            own: family.any(),
            to,
            place,
            seen,
            largest: 4000,
        };
        let world = family.remote();
        let all = [
            path(
                "visitor to world, IPv4 and IPv6",
                SocketAddr::new(world, INSIDE),
                Place::At(world),
                Seen::Node,
            ),
            path(
                "visitor to host port, IPv4 and IPv6",
                SocketAddr::new(family.node(), STEADY),
                Place::Port(STEADY),
                Seen::At(self.pod.ip(family)),
            ),
        ];
        let _ongoing = self.book.begin();
        for path in &all {
            let mut asker = path.asker()?;
            for len in [60, 1200, path.largest] {
                path.ask(self.book, &mut asker, len);
            }
            path.transfer(self.book);
        }
        let mut ping = Ping::new(netns, world)?;
        for _ in 0..3 {
            echo(&mut ping, 56)?;
        }
        Ok(())
    }
}

/// Containers that stay for a moment, talk and are talked to; every second one leaves in the middle of it.
pub(super) fn visitors(lab: &Lab, client: &Pod, book: &Arc<Book>) -> Result<()> {
    for round in 0_usize.. {
        if !book.is_open() {
            break;
        }
        let guest = Guest::add(lab, &format!("visitor{round}"), &small(lab), None, book)?;
        let family = Family::BOTH[round % 2];
        guest.asks(family)?;
        let path = Path {
            name: "pod to visitor, IPv4 and IPv6",
            from: client.netns(),
            own: family.any(),
            to: guest.pod.at(family, INSIDE),
            place: Place::At(guest.pod.ip(family)),
            seen: Seen::At(client.ip(family)),
            largest: 4000,
        };
        let talk = || -> Result<()> {
            let mut asker = path.asker()?;
            // Who left answers nothing of it, and each of these waits for that.
            for len in [60, 1200, 4000, 60] {
                if book.is_open() {
                    path.ask(book, &mut asker, len);
                }
            }
            if book.is_open() {
                path.transfer(book);
            }
            Ok(())
        };
        if round % 4 < 2 {
            talk()?;
            guest.del()?;
            continue;
        }
        thread::scope(|scope| {
            let talking = scope.spawn(talk);
            thread::sleep(Duration::from_millis(3));
            let deleted = guest.del();
            talking.join().expect("a talk does not panic")?;
            deleted
        })?;
    }
    Ok(())
}

/// Containers that take one port of the node from each other: the newest serves; where it goes first, the one before serves again.
pub(super) fn successors(lab: &Lab, book: &Arc<Book>) -> Result<()> {
    let conf = with_port(lab, MOVING);
    let place = Place::Port(MOVING);
    let add =
        |round: usize| Guest::add(lab, &format!("successor{round}"), &conf, Some(place), book);
    let mut serving = add(0)?;
    for round in 1_usize.. {
        if !book.is_open() {
            break;
        }
        thread::sleep(Duration::from_millis(200));
        book.leave(place, &serving.name);
        let newer = add(round)?;
        book.forget(place, &serving.name);
        hairpin(&newer, Family::BOTH[round % 2])?;
        if round % 3 != 0 {
            serving.del()?;
            serving = newer;
            continue;
        }
        thread::sleep(Duration::from_millis(200));
        book.leave(place, &newer.name);
        book.arrive(place, &serving.name, book.now());
        let name = newer.name.clone();
        newer.del()?;
        book.forget(place, &name);
        book.settle(place, &serving.name);
    }
    book.leave(place, &serving.name);
    serving.del()
}

/// The container that serves asks for its own port.
fn hairpin(guest: &Guest<'_>, family: Family) -> Result<()> {
    let path = Path {
        name: "hairpin, IPv4 and IPv6",
        from: guest.pod.netns(),
        own: family.any(),
        to: SocketAddr::new(family.node(), MOVING),
        place: Place::Port(MOVING),
        seen: Seen::At(family.pod_gateway()),
        largest: 1200,
    };
    path.ask(guest.book, &mut path.asker()?, 1000);
    path.transfer(guest.book);
    Ok(())
}

/// ADDs that are killed after a while, each with the DEL that a runtime makes then.
pub(super) fn killed(lab: &Lab, book: &Book) -> Result<()> {
    let netns = lab.node.netns().sibling("killed")?;
    let path = netns.path().display().to_string();
    let conf = with_port(lab, MOVING + 1);
    let call = |verb| {
        Call::new(verb)
            .attachment("killed", &path, Pod::IFNAME)
            .conf(&conf)
    };
    for step in 0_u64.. {
        if !book.is_open() {
            break;
        }
        let add = call("ADD");
        let delay = Duration::from_micros(500 * (step % 40));
        let killed = lab
            .node
            .netns()
            .kill_after(&mut add.command(), add.input(), delay)?;
        call("DEL")
            .run(&lab.node)?
            .silence()
            .context("DEL after a killed ADD")?;
        book.count("killed ADDs", |tally| {
            if killed {
                tally.answered += 1;
            } else {
                tally.interrupted += 1;
            }
        });
        thread::sleep(Duration::from_millis(300));
    }
    Ok(())
}
