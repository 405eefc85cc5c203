//! The tables of flows, as user space looks at them: only the programs write there.

use aya::{
    Pod,
    maps::{HashMap, Map, MapError},
};
use underpass_abi::{
    addr::{Addr4, Addr6, Family},
    flow::{Flow, Key, state},
    map,
};

use super::{Maps, open};
use crate::{Error, raw_map::visit};

/// An entry of a flow map: its key and its value.
pub type FlowEntry<A> = (Key<A>, Flow<A>);

/// How many entries a table of flows has.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct FlowCount {
    /// Those whose packets go past the stack.
    pub bypass: u64,
    /// The others.
    pub stack: u64,
}

impl Maps {
    /// Lists the IPv4 flows.
    pub fn flows4(&self) -> Result<Vec<FlowEntry<Addr4>>, Error> {
        self.flows(map::FLOWS4)
    }

    /// Lists the IPv6 flows.
    pub fn flows6(&self) -> Result<Vec<FlowEntry<Addr6>>, Error> {
        self.flows(map::FLOWS6)
    }

    fn flows<A: Family>(&self, name: &'static str) -> Result<Vec<FlowEntry<A>>, Error>
    where
        Key<A>: Pod,
        Flow<A>: Pod,
    {
        let map: HashMap<_, Key<A>, Flow<A>> = open(&self.pins, name, Map::HashMap)?;
        let mut all = Vec::new();
        for entry in &map {
            match entry {
                Ok(entry) => all.push(entry),
                // Removed between two requests.
                Err(MapError::KeyNotFound) => {}
                Err(error) => return Err(Error::map(name)(error)),
            }
        }
        Ok(all)
    }

    /// Counts the IPv4 flows.
    pub fn count_flows4(&self) -> Result<FlowCount, Error> {
        self.count_flows::<Addr4>(map::FLOWS4)
    }

    /// Counts the IPv6 flows.
    pub fn count_flows6(&self) -> Result<FlowCount, Error> {
        self.count_flows::<Addr6>(map::FLOWS6)
    }

    fn count_flows<A: Family>(&self, name: &'static str) -> Result<FlowCount, Error>
    where
        Key<A>: Pod,
        Flow<A>: Pod,
    {
        let map: HashMap<_, Key<A>, Flow<A>> = open(&self.pins, name, Map::HashMap)?;
        let mut count = FlowCount::default();
        visit(&map, |_: &Key<A>, flow: &Flow<A>| {
            if flow.state & state::BYPASS == 0 {
                count.stack += 1;
            } else {
                count.bypass += 1;
            }
        })
        .map_err(|source| Error::List { name, source })?;
        Ok(count)
    }
}
