//! Lists of the Nodes, page by page.

use std::{
    cmp::Reverse,
    hash::{DefaultHasher, Hash as _, Hasher as _},
};

use serde_json::{Value, json};

use super::{Api, Lie, Lists, http::parameter};

/// Where a page begins.
struct Start<'a> {
    /// The version of the first page.
    version: &'a str,
    /// The order of the first page.
    order: u64,
    /// The last Node of the page before.
    last: &'a str,
}

impl<'a> Start<'a> {
    fn read(query: &'a str) -> Option<Self> {
        let mut parts = parameter(query, "continue")?.splitn(3, '.');
        Some(Self {
            version: parts.next()?,
            order: parts.next()?.parse().ok()?,
            last: parts.next()?,
        })
    }
}

/// Where a Node is in a list: the last one first, or where chance has it. Nobody has promised an order.
fn place(order: u64, name: &str) -> (u64, Reverse<&str>) {
    if order == 0 {
        return (0, Reverse(name));
    }
    let mut chance = DefaultHasher::new();
    (order, name).hash(&mut chance);
    (chance.finish(), Reverse(name))
}

impl Api {
    /// Lists the Nodes. As many as are asked for, from where the page before ended, with the version of the first page; nothing, where that
    /// is too long ago.
    pub(super) fn list(&self, query: &str) -> Option<Value> {
        let mut state = self.lock();
        let limit = parameter(query, "limit").and_then(|limit| limit.parse().ok());
        let start = Start::read(query);
        if start.is_some() && state.lists == Lists::BrokenOff {
            state.requests.push("late page".to_owned());
            return None;
        }
        state.begun += u64::from(start.is_none());
        let order = match &start {
            Some(start) => start.order,
            None if state.lie == Some(Lie::Order) => state.begun,
            None => 0,
        };
        let version = start
            .as_ref()
            .map_or(state.version.to_string(), |start| start.version.to_owned());
        let mut rest: Vec<(&String, &Value)> = state.nodes.iter().collect();
        rest.sort_by_key(|(name, _)| place(order, name));
        if let Some(start) = &start {
            rest.retain(|(name, _)| place(order, name) > place(order, start.last));
        }
        let page = limit.unwrap_or(usize::MAX).min(rest.len());
        let more = match rest[..page].last() {
            Some((last, _)) if page < rest.len() => format!("{version}.{order}.{last}"),
            _ => String::new(),
        };
        let nodes: Vec<&Value> = rest[..page].iter().map(|(_, node)| *node).collect();
        Some(json!({
            "apiVersion": "v1", "kind": "NodeList",
            "metadata": {"resourceVersion": version, "continue": more},
            "items": if state.is_empty { Vec::new() } else { nodes },
        }))
    }
}
