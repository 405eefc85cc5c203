//! An API that says odd things of versions and of order: routes are exact whatever it says, as long as it says at last how things are.
//!
//! Left out is what no client can know: an older state of a Node that comes last, a list that has less in it than its version says, an
//! event that never comes. Against those there is only the next list.

use std::collections::{BTreeMap, BTreeSet, btree_map::Entry};

use rstest::rstest;
use underpass_tests::prelude::*;

use super::{
    api::{Api, Lie},
    fixture::Cluster,
    member::{Member, TUNNEL, outside},
};

/// The number of the first of the others.
const FIRST: u8 = 20;
/// So many others that a list of them has two pages.
const MANY: u8 = 150;
/// By which an agent looks at nothing by time.
const NEVER: [&str; 2] = ["--resync", "3600"];

/// A Node that no machine is behind: by which addresses it is reached, and which ranges it has.
#[derive(Clone, Copy)]
struct Other {
    link: u8,
    place: u8,
    range: u8,
}

impl Other {
    fn ranges(self) -> [String; 2] {
        let number = self.range;
        [
            format!("10.244.{number}.0/24"),
            format!("fd00:244:{number}::/64"),
        ]
    }

    fn addresses(self) -> [String; 2] {
        [V4, V6].map(|family| outside(family, self.link, self.place).to_string())
    }

    /// Each of its ranges with its route, as [`Member::routes`] says it.
    fn routes(self) -> impl Iterator<Item = (String, String)> {
        let ways = self.ranges().into_iter().zip(self.addresses());
        ways.map(move |(range, address)| {
            let first = range.split('/').next().unwrap_or("");
            let route = if self.link == 0 {
                format!("{range} via {address} dev {}", Node::UPLINK)
            } else {
                format!("{range} via {first} dev {TUNNEL}")
            };
            (range, route)
        })
    }
}

/// What the API should say of all others at last.
struct Others {
    api: Api,
    nodes: BTreeMap<String, Other>,
    changes: u8,
}

impl Others {
    /// Has the API know many.
    fn join(cluster: &Cluster) -> Self {
        let mut others = Self {
            api: cluster.api.clone(),
            nodes: BTreeMap::new(),
            changes: 0,
        };
        for number in FIRST..FIRST + MANY {
            let other = Other {
                link: number % 2,
                place: number,
                range: number,
            };
            others.put(&format!("other{number}"), other);
        }
        // It waits for a range that another one has.
        let twin = Other {
            link: 0,
            place: FIRST + MANY,
            range: FIRST + 2,
        };
        others.put("twin", twin);
        others
    }

    fn put(&mut self, name: &str, other: Other) {
        self.api.set(name, &other.addresses(), &other.ranges());
        self.nodes.insert(name.to_owned(), other);
    }

    fn delete(&mut self, name: &str) {
        self.api.delete(name);
        self.nodes.remove(name);
    }

    /// Some get other addresses, some get to the other side of the router, two exchange their ranges, one goes, one goes and comes back, and one
    /// is new.
    fn change(&mut self) -> Result<()> {
        let new = FIRST + MANY + 1 + 3 * self.changes;
        let first = FIRST + 6 * self.changes;
        self.changes += 1;
        let names: [String; 6] =
            std::array::from_fn(|at| format!("other{}", usize::from(first) + at));
        let [moves, crosses, leaves, returns, one, two] = &names;
        let node = |others: &Self, name: &String| {
            let node = others.nodes.get(name).copied();
            node.with_context(|| format!("no {name}"))
        };
        let at = node(self, moves)?;
        self.put(moves, Other { place: new, ..at });
        let at = node(self, crosses)?;
        let link = 1 - at.link;
        self.put(crosses, Other { link, ..at });
        self.delete(leaves);
        let at = node(self, returns)?;
        self.delete(returns);
        let place = new + 1;
        self.put(returns, Other { place, ..at });
        let (left, right) = (node(self, one)?, node(self, two)?);
        self.put(
            one,
            Other {
                range: right.range,
                ..left
            },
        );
        self.put(
            two,
            Other {
                range: left.range,
                ..right
            },
        );
        let place = new + 2;
        let at = Other {
            link: 0,
            place,
            range: place,
        };
        self.put(&format!("new{place}"), at);
        Ok(())
    }

    /// Fails unless a node has exactly the routes that follow. Of two with one range the first by name has it: all are of the same age.
    fn expect(&self, member: &Member) -> Result<()> {
        let mut routes = BTreeMap::new();
        for (range, route) in self.nodes.values().flat_map(|other| other.routes()) {
            if let Entry::Vacant(place) = routes.entry(range) {
                place.insert(route);
            }
        }
        let own = member.ranges().into_iter();
        let own = own.map(|range| format!("{range} unreachable"));
        let expected: BTreeSet<String> = routes.into_values().chain(own).collect();
        let there = member.routes()?;
        let missing: Vec<_> = expected.difference(&there).collect();
        let excess: Vec<_> = there.difference(&expected).collect();
        ensure!(
            missing.is_empty() && excess.is_empty(),
            "without {missing:?}, with {excess:?}"
        );
        Ok(())
    }

    fn settle(&self, member: &Member) -> Result<()> {
        eventually("exact routes", || self.expect(member))
            .with_context(|| format!("after {} changes", self.changes))
    }

    /// No state of before comes back.
    fn stays(&self, member: &Member) -> Result<()> {
        member.rests()?;
        self.expect(member)
    }
}

#[rstest]
fn routes_are_exact_whatever_it_says(
    #[values(
        Lie::Order,
        Lie::Repeats,
        Lie::Kinds,
        Lie::StandsStill,
        Lie::Bookmarks,
        Lie::FailsAndEnds,
        Lie::FailsAndGoesOn
    )]
    lie: Lie,
) -> Result<()> {
    needs_root!();
    let mut cluster = Cluster::idle(&[0])?;
    let mut others = Others::join(&cluster);
    cluster.api.lie(lie);
    // What no watch tells is found by the next list.
    let relist = if lie == Lie::StandsStill { "1" } else { "3600" };
    let options = [&NEVER[..], &["--relist", relist]].concat();
    cluster.members[0].start_agent_with(&options)?;
    let member = &cluster.members[0];
    others.settle(member)?;
    for _ in 0..3 {
        // What is watched.
        others.change()?;
        others.settle(member)?;
        // What happened while nobody watched, told at once.
        cluster.api.be_down(true);
        others.change()?;
        cluster.api.be_down(false);
        others.settle(member)?;
        // What is listed anew.
        let lists = cluster.api.lists();
        others.change()?;
        cluster.api.forget();
        eventually("a new list", || {
            ensure!(cluster.api.lists() > lists);
            Ok(())
        })?;
        others.settle(member)?;
    }
    others.stays(member)
}

/// A server forgets the version of a list that takes long: half a list is none, and the next one is whole.
#[test]
fn a_list_whose_next_page_is_too_late_is_begun_anew() -> Result<()> {
    needs_root!();
    let mut cluster = Cluster::idle(&[0])?;
    let mut others = Others::join(&cluster);
    let api = cluster.api.clone();
    let is_asked_twice = || {
        let before = api.count("late page");
        eventually("two lists are broken off", || {
            let now = api.count("late page");
            ensure!(now >= before + 2, "{now} after {before}");
            Ok(())
        })
    };
    // Who knows nothing yet makes nothing of it.
    api.be_hasty(true);
    cluster.members[0].start_agent_with(&NEVER)?;
    let member = &cluster.members[0];
    is_asked_twice()?;
    let routes = member.routes()?;
    ensure!(routes.is_empty(), "{routes:?}");
    api.be_hasty(false);
    others.settle(member)?;

    // Who knows something takes it for as long as that lasts.
    api.be_down(true);
    let before = member.routes()?;
    others.change()?;
    api.be_hasty(true);
    api.forget();
    api.be_down(false);
    is_asked_twice()?;
    let routes = member.routes()?;
    ensure!(routes == before, "{before:?} became {routes:?}");
    api.be_hasty(false);
    others.settle(member)?;
    others.stays(member)
}

/// Much happens that is nothing to Nodes, and the server forgets it: who was told by a bookmark goes on, who was not has to list all Nodes.
#[rstest]
fn a_watch_goes_on_from_a_bookmark(#[values(true, false)] is_told: bool) -> Result<()> {
    needs_root!();
    let mut cluster = Cluster::idle(&[0])?;
    let mut others = Others::join(&cluster);
    let api = cluster.api.clone();
    if is_told {
        api.lie(Lie::Bookmarks);
    }
    cluster.members[0].start_agent_with(&NEVER)?;
    let member = &cluster.members[0];
    others.settle(member)?;
    eventually("a watch", || {
        ensure!(api.count("watch") > 0, "nobody watches");
        Ok(())
    })?;
    let marks = api.count("bookmark");
    api.pass(1_000);
    if is_told {
        eventually("a bookmark", || {
            ensure!(api.count("bookmark") > marks);
            Ok(())
        })?;
    }
    let lists = api.lists();
    api.compact();
    others.change()?;
    others.settle(member)?;
    let now = api.lists();
    ensure!(
        (now == lists) == is_told,
        "{lists} lists became {now}: {}",
        member.log()?
    );
    others.stays(member)
}
