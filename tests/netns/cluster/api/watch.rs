//! Watches of the Nodes: what happened after a version, and what happens.

use std::{
    io::Write as _,
    net::TcpStream,
    ops::ControlFlow,
    sync::{
        PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use anyhow::Result;
use serde_json::{Value, json};

use super::{
    Api, Lie, State,
    http::{LAST_CHUNK, chunk, parameter},
    status,
};

/// How long a watch sleeps before it looks whether it is to end.
const TURN: Duration = Duration::from_millis(200);

/// How long a watch lasts of whoever names no time.
const LONG: Duration = Duration::from_hours(1);

/// How an answer in chunks begins.
const HEAD: &[u8] =
    b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n";

/// Who watches, and how far.
struct Watcher {
    /// All up to this version was told.
    said: u64,
    /// The version of the last bookmark; nothing for who asks for none.
    marked: Option<u64>,
    /// An error was told.
    is_failed: bool,
}

impl Api {
    /// Says what happens, for as long as is asked for. More is answered on the connection if that is how it ended.
    pub(super) fn watch(
        &self,
        mut stream: &TcpStream,
        query: &str,
        stop: &AtomicBool,
    ) -> Result<ControlFlow<()>> {
        let number = |name| parameter(query, name).and_then(|text| text.parse().ok());
        let since = number("resourceVersion").unwrap_or(0);
        let end = Instant::now() + number("timeoutSeconds").map_or(LONG, Duration::from_secs);
        stream.write_all(HEAD)?;
        let mut state = self.lock();
        let freezes = state.freezes;
        let is_marked = matches!(parameter(query, "allowWatchBookmarks"), Some("true" | "1"));
        let mut watcher = Watcher {
            said: if state.lie == Some(Lie::Repeats) {
                0
            } else {
                since
            },
            marked: is_marked.then_some(since),
            is_failed: false,
        };
        while !stop.load(Ordering::Relaxed) && !state.is_down {
            if state.freezes != freezes {
                let woken = self.shared.changed.wait_timeout(state, TURN);
                state = woken.unwrap_or_else(PoisonError::into_inner).0;
                continue;
            }
            if Instant::now() >= end {
                stream.write_all(LAST_CHUNK)?;
                return Ok(ControlFlow::Continue(()));
            }
            if since < state.forgotten {
                drop(state);
                let gone = json!({"type": "ERROR", "object": status(410, "Expired")});
                chunk(stream, &gone)?;
                stream.write_all(LAST_CHUNK)?;
                return Ok(ControlFlow::Break(()));
            }
            let news = state.news(&mut watcher);
            if news.is_empty() {
                let woken = self.shared.changed.wait_timeout(state, TURN);
                state = woken.unwrap_or_else(PoisonError::into_inner).0;
                continue;
            }
            let is_over = state.lie == Some(Lie::FailsAndEnds);
            drop(state);
            news.iter().try_for_each(|event| chunk(stream, event))?;
            if is_over {
                stream.write_all(LAST_CHUNK)?;
                return Ok(ControlFlow::Break(()));
            }
            state = self.lock();
        }
        Ok(ControlFlow::Break(()))
    }
}

impl State {
    /// What somebody who watches was not told yet.
    fn news(&mut self, watcher: &mut Watcher) -> Vec<Value> {
        let mut news: Vec<_> = self
            .log
            .iter()
            .filter(|(version, ..)| *version > watcher.said)
            .collect();
        if self.lie == Some(Lie::Order) {
            news.sort_by_key(|(_, _, node)| node["metadata"]["name"].as_str());
        }
        let times = if self.lie == Some(Lie::Repeats) { 2 } else { 1 };
        let mut told = Vec::new();
        for (_, kind, node) in news {
            let kind = match (self.lie, *kind) {
                (Some(Lie::Kinds), "ADDED") => "MODIFIED",
                (Some(Lie::Kinds), "MODIFIED") => "ADDED",
                (_, kind) => kind,
            };
            let event = json!({"type": kind, "object": node});
            told.extend(std::iter::repeat_n(event, times));
        }
        if !told.is_empty() {
            watcher.said = watcher.said.max(self.version);
            let fails = matches!(self.lie, Some(Lie::FailsAndEnds | Lie::FailsAndGoesOn));
            if fails && !watcher.is_failed {
                watcher.is_failed = true;
                told.push(json!({"type": "ERROR", "object": status(500, "InternalError")}));
            }
        }
        if self.lie == Some(Lie::Bookmarks)
            && let Some(marked) = &mut watcher.marked
            && *marked < self.version
        {
            *marked = self.version;
            self.requests.push("bookmark".to_owned());
            told.push(bookmark(self.version));
        }
        told
    }
}

/// A Node without a name and with nothing of one but its version, as a real API server says it.
fn bookmark(version: u64) -> Value {
    json!({"type": "BOOKMARK", "object": {
        "apiVersion": "v1", "kind": "Node",
        "metadata": {"resourceVersion": version.to_string(), "creationTimestamp": null},
        "spec": {},
        "status": {"daemonEndpoints": {"kubeletEndpoint": {"Port": 0}}, "nodeInfo": {"machineID": "", "kubeletVersion": ""}},
    }})
}
