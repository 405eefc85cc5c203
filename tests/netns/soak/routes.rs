//! Routes that change under the traffic, and a second uplink that comes and goes.
//!
//! A masqueraded flow keeps the address that it began with, by whatever uplink it leaves, and the world answers to where that address is.
//! So one that began at the second uplink ends with it. Before that goes as announced, everything is routed by the first one until such
//! exchanges are over. It goes suddenly only while the node's routes name the first one's address as their source: then nothing depends
//! on it.
//!
//! Connection tracking is strict, so TCP that took the bypass must not come back to the stack (docs/limitations.md, "The firewall and the
//! bypass"). Hence there is always another route, by the first uplink, where one goes with its device; no reverse path is filtered; and
//! nothing is routed by a new device before an ADD or a GC could see it.

use std::{net::IpAddr, thread, time::Duration};

use serde_json::json;
use underpass_tests::{
    netns::Netns,
    prelude::*,
    runtime::Call,
    second::{Kind, Second},
    traffic::ping::Ping,
    wire::Wire,
    world::World,
};

use super::{book::Book, paths::echo, small};

/// How long a route stays: flows ask for theirs about once a second.
const STAY: Duration = Duration::from_millis(700);
/// Routes that count where no other is.
const LAST: &str = "metric 4096";

/// By what packets leave one side.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Way {
    First,
    Second,
    /// By both, as their flow decides.
    Shared,
}

/// The node's and the world's, one after the other.
const WAYS: [(Way, Way); 9] = [
    (Way::Second, Way::First),
    (Way::Shared, Way::Second),
    (Way::First, Way::Shared),
    (Way::Shared, Way::Shared),
    (Way::Second, Way::Second),
    (Way::Shared, Way::First),
    (Way::First, Way::Second),
    (Way::Second, Way::Shared),
    (Way::First, Way::First),
];
/// How many of them in a row.
const ROW: usize = 3;

/// How the second uplink goes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Going {
    /// Down and up again, after nothing is routed by it.
    Down,
    /// Down and up again, with routes by it.
    Fails,
    /// Deleted and made again, after nothing is routed by it.
    Leaves,
    /// Deleted and made again, with routes by it.
    Vanishes,
}

const GOINGS: [Going; 4] = [Going::Fails, Going::Leaves, Going::Down, Going::Vanishes];

/// Routes of one side: where they lead, and by which next hops.
struct Side<'a> {
    netns: &'a Netns,
    to: fn(Family) -> &'static str,
    first: fn(Family) -> String,
    second: fn(Family) -> String,
}

impl Side<'_> {
    /// Routes both families that way; with `source`, by that address of the family.
    fn route(&self, way: Way, source: Option<fn(Family) -> IpAddr>) -> Result<()> {
        self.netns.ip(&Family::BOTH.map(|family| {
            let (first, second) = ((self.first)(family), (self.second)(family));
            let hops = match way {
                Way::First => first,
                Way::Second => second,
                Way::Shared => format!("nexthop {first} nexthop {second}"),
            };
            let source = source.map_or_else(String::new, |of| format!("src {} ", of(family)));
            format!("route replace {} {source}{hops}", (self.to)(family))
        }))
    }

    /// Adds or deletes the routes by the first uplink that count where there is no other.
    fn last(&self, verb: &str) -> Result<()> {
        self.netns.ip(&Family::BOTH.map(|family| {
            let (to, first) = ((self.to)(family), (self.first)(family));
            format!("route {verb} {to} {first} {LAST}")
        }))
    }
}

/// Both uplinks, and the routes by them.
pub(super) struct Ways<'a> {
    lab: &'a Lab,
    node: Side<'a>,
    world: Side<'a>,
}

impl<'a> Ways<'a> {
    /// The world gets routes to containers, and both sides others to fall back on.
    pub(super) fn prepare(lab: &'a Lab) -> Result<Self> {
        let ways = Self {
            lab,
            node: Side {
                netns: lab.node.netns(),
                to: Family::everywhere,
                first: Second::other_way,
                second: Second::way,
            },
            world: Side {
                netns: lab.world.netns(),
                to: Family::pods,
                first: |family| format!("via {} dev {}", family.node(), World::LINK),
                second: |family| format!("via {} dev {}", Second::node(family), Second::LINK),
            },
        };
        lab.world.route_pods()?;
        for side in [&ways.node, &ways.world] {
            side.netns.set_sysctl("net/ipv4/conf/all/rp_filter", "0")?;
            side.last("add")?;
        }
        Ok(ways)
    }

    /// Changes routes until the end, then leaves the first uplink alone. `staying` is a container that is there all the time.
    pub(super) fn change(self, staying: &Pod, book: &Book) -> Result<()> {
        let mut announced = 0;
        let mut connect = || -> Result<Second> {
            let second = self.connect()?;
            announced += 1;
            self.announce(announced)?;
            staying
                .call_with_result("CHECK")
                .run(&self.lab.node)?
                .silence()?;
            Ok(second)
        };
        let mut second = connect()?;
        let mut ways = WAYS.into_iter().cycle();
        for going in GOINGS.into_iter().cycle() {
            for (node, world) in ways.by_ref().take(ROW) {
                if !book.is_open() {
                    break;
                }
                self.node.route(node, None)?;
                self.world.route(world, None)?;
                book.count("changes of routes", |tally| tally.answered += 1);
                thread::sleep(STAY);
            }
            self.home(book)?;
            if !book.is_open() {
                break;
            }
            // A shared route goes on with the hop that is left, the other kind makes room for the last one.
            match going {
                Going::Fails => self.depend(Way::Shared)?,
                Going::Vanishes => self.depend(Way::Second)?,
                Going::Down | Going::Leaves => {}
            }
            if matches!(going, Going::Fails | Going::Down) {
                self.set("down")?;
                thread::sleep(STAY);
                self.home(book)?;
                self.set("up")?;
                self.resolve()?;
            } else {
                self.delete()?;
                drop(second);
                thread::sleep(STAY);
                self.home(book)?;
                second = connect()?;
            }
            book.count(going.name(), |tally| tally.answered += 1);
        }
        self.delete()?;
        self.node.last("delete")?;
        self.world.last("delete")
    }

    /// Routes everything by the first uplink, until nothing is left that could have begun at the second one.
    fn home(&self, book: &Book) -> Result<()> {
        self.node.route(Way::First, None)?;
        self.world.route(Way::First, None)?;
        book.outlast();
        Ok(())
    }

    /// Routes by the second uplink what has the first one's address.
    fn depend(&self, way: Way) -> Result<()> {
        self.node.route(way, Some(Family::node))?;
        // A kernel that is not asked for the address of each flow (before 6.7) has them from the last call.
        self.collect()?;
        self.world.route(Way::Second, None)?;
        thread::sleep(STAY);
        Ok(())
    }

    fn connect(&self) -> Result<Second> {
        let second = Second::connect(self.lab, Kind::Wire(Wire::Ethernet))?;
        for side in [&self.node, &self.world] {
            // As a device that is set down keeps those of IPv4.
            let key = format!("net/ipv6/conf/{}/keep_addr_on_down", Second::LINK);
            side.netns.set_sysctl(&key, "1")?;
        }
        self.resolve()?;
        Ok(second)
    }

    /// Waits until packets pass by the second uplink.
    fn resolve(&self) -> Result<()> {
        for family in Family::BOTH {
            let to = Second::gateway(family);
            echo(&mut Ping::new(self.node.netns, to)?, 56)?;
        }
        Ok(())
    }

    fn set(&self, state: &str) -> Result<()> {
        for side in [&self.node, &self.world] {
            side.netns
                .ip(&[format!("link set {} {state}", Second::LINK)])?;
        }
        Ok(())
    }

    fn delete(&self) -> Result<()> {
        self.node.netns.delete_link(Second::LINK)
    }

    /// A call that finds a new uplink: an ADD or a GC.
    fn announce(&self, number: usize) -> Result<()> {
        if number.is_multiple_of(2) {
            return self.collect();
        }
        let pod = self
            .lab
            .pod_with(&format!("herald{number}"), &small(self.lab))?;
        let netns = pod.netns().clone();
        pod.del()?;
        netns.unlink()
    }

    /// A GC in a network that has no attachments.
    fn collect(&self) -> Result<()> {
        let conf = small(self.lab)
            .with("name", "empty")
            .with("cni.dev/valid-attachments", json!([]));
        Call::new("GC").conf(&conf).run(&self.lab.node)?.silence()
    }
}

impl Going {
    const fn name(self) -> &'static str {
        match self {
            Self::Down => "second uplink set down",
            Self::Fails => "second uplink set down under traffic",
            Self::Leaves => "second uplink deleted",
            Self::Vanishes => "second uplink deleted under traffic",
        }
    }
}
