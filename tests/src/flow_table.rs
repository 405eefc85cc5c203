//! The flow table of a node, entry by entry: what a test may see and change of it behind the programs' back.

use anyhow::Result;
use aya::maps::{HashMap, Map};
use underpass_abi::{
    addr::{self, Addr4, Addr6},
    flow::{Flow, Key, state},
    map,
};

use crate::{Family, Node, counter};

/// What an entry says of its flow.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Entry {
    /// IP protocol number.
    pub protocol: u8,
    /// See [`state`].
    pub state: u32,
    /// Tick after which it is as good as gone.
    pub expires: u32,
    /// Tick at which it was made.
    pub since: u32,
}

impl Entry {
    /// Whether it is the one of a translated flow's two that is under the tuple of the other end.
    #[must_use]
    pub const fn is_outer(self) -> bool {
        self.state & state::OUTER != 0
    }
}

/// What becomes of an entry.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Then {
    /// It stays.
    Stays,
    /// It is removed.
    Goes,
    /// It expires at this tick, and no packet of it was looked at in the present one.
    ExpiresAt(u32),
    /// It was made at this tick.
    MadeAt(u32),
}

/// Visits each entry of a family.
pub fn walk(node: &Node, family: Family, visit: impl FnMut(Entry) -> Then) -> Result<()> {
    match family {
        Family::V4 => walk_in::<Addr4>(node, map::FLOWS4, visit),
        Family::V6 => walk_in::<Addr6>(node, map::FLOWS6, visit),
    }
}

/// How many ticks the entries of flows of an IP protocol live, from when they were made.
pub fn lives(node: &Node, family: Family, protocol: u8) -> Result<Vec<u32>> {
    let mut lives = Vec::new();
    walk(node, family, |entry| {
        if entry.protocol == protocol {
            lives.push(entry.expires.wrapping_sub(entry.since));
        }
        Then::Stays
    })?;
    Ok(lives)
}

fn walk_in<A: addr::Family>(
    node: &Node,
    name: &str,
    mut visit: impl FnMut(Entry) -> Then,
) -> Result<()> {
    let mut flows: HashMap<_, Key<A>, Flow<A>> =
        Map::HashMap(counter::open(node, name)?).try_into()?;
    // Who changes a map while it is listed may meet an entry twice.
    for (key, mut flow) in flows.iter().collect::<Result<Vec<_>, _>>()? {
        let entry = Entry {
            protocol: key.0.protocol,
            state: flow.state,
            expires: flow.expires,
            since: flow.since,
        };
        match visit(entry) {
            Then::Stays => {}
            Then::Goes => flows.remove(&key)?,
            Then::ExpiresAt(tick) => {
                flow.expires = tick;
                for half in &mut flow.halves {
                    half.stamp = 0;
                }
                flows.insert(key, flow, 0)?;
            }
            Then::MadeAt(tick) => {
                flow.since = tick;
                flows.insert(key, flow, 0)?;
            }
        }
    }
    Ok(())
}
