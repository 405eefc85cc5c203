//! A small fake of the Kubernetes API: a list of Nodes and a watch of them, and the faults that real ones have.

use std::{
    collections::BTreeMap,
    io::{BufRead as _, BufReader, Write as _},
    net::{Shutdown, SocketAddr, TcpListener, TcpStream},
    sync::{
        Arc, Condvar, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::Duration,
};

use anyhow::{Context as _, Result};
use serde_json::{Value, json};
use underpass_tests::netns::Netns;

/// Where each node finds it, on its own loopback device.
pub(super) const AT: &str = "127.0.0.1:6443";

/// How long a watch sleeps before it looks whether it is to end.
const TURN: Duration = Duration::from_millis(200);

/// A cluster's Nodes, served to everybody who was given a [`Door`].
#[derive(Clone, Default)]
pub(super) struct Api {
    shared: Arc<Shared>,
}

#[derive(Default)]
struct Shared {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    version: u64,
    nodes: BTreeMap<String, Value>,
    /// What happened, with the version that it led to.
    log: Vec<(u64, &'static str, Value)>,
    /// Watches of before are ended, and versions of before are unknown: 410.
    forgotten: u64,
    /// Connections are closed without an answer.
    is_down: bool,
    /// Lists have nobody in them, in any version.
    is_empty: bool,
    connections: Vec<TcpStream>,
    /// Requests that were answered, as `method path`.
    requests: Vec<String>,
}

/// A socket in one node's namespace, served until it is dropped.
pub(super) struct Door {
    stop: Arc<AtomicBool>,
    at: SocketAddr,
    netns: Netns,
}

impl Drop for Door {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        // The listener wakes up by a caller.
        let _ = self.netns.run(|| TcpStream::connect(self.at));
    }
}

impl Api {
    /// Serves a node.
    pub(super) fn open(&self, netns: &Netns) -> Result<Door> {
        let at: SocketAddr = AT.parse()?;
        let listener = netns
            .run(|| TcpListener::bind(at))
            .context("listen as an API server")?;
        let door = Door {
            stop: Arc::default(),
            at,
            netns: netns.clone(),
        };
        let (api, stop) = (self.clone(), Arc::clone(&door.stop));
        thread::spawn(move || {
            for stream in listener.incoming().map_while(Result::ok) {
                if stop.load(Ordering::Relaxed) {
                    return;
                }
                let (api, stop) = (api.clone(), Arc::clone(&stop));
                // A client that goes away in the middle is what is tested.
                thread::spawn(move || {
                    api.serve(&stream, &stop).unwrap_or_default();
                    // Somebody may hold a copy: what nobody reads must not look open.
                    stream.shutdown(Shutdown::Both)
                });
            }
        });
        Ok(door)
    }

    /// Makes a Node, or changes it.
    pub(super) fn set(&self, name: &str, addresses: &[String], ranges: &[String]) {
        let addresses: Vec<Value> = addresses
            .iter()
            .map(|address| json!({"type": "InternalIP", "address": address}))
            .collect();
        let node = json!({
            "apiVersion": "v1", "kind": "Node",
            "metadata": {"name": name, "uid": name},
            "spec": {"podCIDR": ranges.first(), "podCIDRs": ranges},
            "status": {"addresses": addresses, "images": [{"names": ["registry.example/pause"], "sizeBytes": 1}]},
        });
        self.put(name, node);
    }

    /// Makes a Node, or changes it: all of it.
    pub(super) fn put(&self, name: &str, mut node: Value) {
        let mut state = self.lock();
        state.version += 1;
        node["metadata"]["resourceVersion"] = state.version.to_string().into();
        let kind = match state.nodes.insert(name.to_owned(), node.clone()) {
            Some(_) => "MODIFIED",
            None => "ADDED",
        };
        let version = state.version;
        state.log.push((version, kind, node));
        self.shared.changed.notify_all();
    }

    /// Deletes a Node.
    pub(super) fn delete(&self, name: &str) {
        let mut state = self.lock();
        let Some(mut node) = state.nodes.remove(name) else {
            return;
        };
        state.version += 1;
        let version = state.version;
        node["metadata"]["resourceVersion"] = version.to_string().into();
        state.log.push((version, "DELETED", node));
        self.shared.changed.notify_all();
    }

    /// Cuts all connections in the middle of what they say.
    pub(super) fn cut(&self) {
        for connection in self.lock().connections.drain(..) {
            let _ = connection.shutdown(Shutdown::Both);
        }
        self.shared.changed.notify_all();
    }

    /// Answers 410 to whoever asks for what is later than anything up to now, as after a compaction.
    pub(super) fn forget(&self) {
        let mut state = self.lock();
        state.version += 1;
        state.forgotten = state.version;
        state.log.clear();
        drop(state);
        self.cut();
    }

    /// Answers nobody, or everybody again.
    pub(super) fn be_down(&self, is_down: bool) {
        self.lock().is_down = is_down;
        self.cut();
    }

    /// Says to everybody who asks that there are no Nodes.
    pub(super) fn be_empty(&self, is_empty: bool) {
        self.lock().is_empty = is_empty;
        self.forget();
    }

    /// The requests that were made, each once.
    pub(super) fn requests(&self) -> Vec<String> {
        let mut requests = self.lock().requests.clone();
        requests.sort();
        requests.dedup();
        requests
    }

    /// How often Nodes were listed.
    pub(super) fn lists(&self) -> usize {
        let state = self.lock();
        let lists = state.requests.iter().filter(|request| *request == "list");
        lists.count()
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        let lock = self.shared.state.lock();
        lock.unwrap_or_else(PoisonError::into_inner)
    }

    fn serve(&self, stream: &TcpStream, stop: &AtomicBool) -> Result<()> {
        let mut lines = BufReader::new(stream).lines();
        loop {
            let Some(first) = lines.next().transpose()? else {
                return Ok(());
            };
            while lines
                .next()
                .transpose()?
                .is_some_and(|line| !line.is_empty())
            {}
            let mut words = first.split(' ');
            let (method, target) = (words.next().unwrap_or(""), words.next().unwrap_or(""));
            let (path, query) = target.split_once('?').unwrap_or((target, ""));
            {
                let mut state = self.lock();
                if state.is_down {
                    return Ok(stream.shutdown(Shutdown::Both)?);
                }
                state.connections.push(stream.try_clone()?);
            }
            let is_watch = matches!(parameter(query, "watch"), Some("true" | "1"));
            let since =
                parameter(query, "resourceVersion").and_then(|version| version.parse().ok());
            let kind = match (method, path, is_watch) {
                ("GET", "/api/v1/nodes", true) => "watch",
                ("GET", "/api/v1/nodes", false) => "list",
                _ => "other",
            };
            let said = if kind == "other" {
                format!("{method} {path}")
            } else {
                kind.to_owned()
            };
            self.lock().requests.push(said);
            match kind {
                "watch" => return self.watch(stream, since.unwrap_or(0), stop),
                "list" => answer(stream, "200 OK", &self.list(query))?,
                _ => answer(stream, "403 Forbidden", &status(403, "Forbidden"))?,
            }
        }
    }

    /// Lists the Nodes, the last ones first: an order that nobody promised. As many as are asked for, from where the page before
    /// ended, with the version of the first page.
    fn list(&self, query: &str) -> Value {
        let state = self.lock();
        let limit = parameter(query, "limit").and_then(|limit| limit.parse().ok());
        let from = parameter(query, "continue").and_then(|from| from.split_once('.'));
        let version = from.map_or(state.version.to_string(), |(version, _)| version.to_owned());
        let rest = state.nodes.iter().rev();
        let mut rest = rest.filter(|(name, _)| from.is_none_or(|(_, last)| name.as_str() < last));
        let page: Vec<_> = rest.by_ref().take(limit.unwrap_or(usize::MAX)).collect();
        let more = match (rest.next(), page.last()) {
            (Some(_), Some((last, _))) => format!("{version}.{last}"),
            _ => String::new(),
        };
        let nodes: Vec<&Value> = page.into_iter().map(|(_, node)| node).collect();
        json!({
            "apiVersion": "v1", "kind": "NodeList",
            "metadata": {"resourceVersion": version, "continue": more},
            "items": if state.is_empty { Vec::new() } else { nodes },
        })
    }

    fn watch(&self, mut stream: &TcpStream, since: u64, stop: &AtomicBool) -> Result<()> {
        stream.write_all(
            b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n",
        )?;
        let mut said = since;
        let mut state = self.lock();
        while !stop.load(Ordering::Relaxed) && !state.is_down {
            if since < state.forgotten {
                drop(state);
                let gone = json!({"type": "ERROR", "object": status(410, "Expired")});
                chunk(stream, &gone)?;
                return Ok(stream.write_all(b"0\r\n\r\n")?);
            }
            let news: Vec<_> = state
                .log
                .iter()
                .filter(|(version, ..)| *version > said)
                .cloned()
                .collect();
            drop(state);
            for (version, kind, node) in news {
                chunk(stream, &json!({"type": kind, "object": node}))?;
                said = version;
            }
            state = self.lock();
            if state.version == said || state.log.last().is_none_or(|(last, ..)| *last <= said) {
                let woken = self.shared.changed.wait_timeout(state, TURN);
                state = woken.unwrap_or_else(PoisonError::into_inner).0;
            }
        }
        Ok(())
    }
}

/// A parameter of a query, as it is written there.
fn parameter<'a>(query: &'a str, name: &str) -> Option<&'a str> {
    let mut pairs = query.split('&').filter_map(|pair| pair.split_once('='));
    pairs.find_map(|(key, value)| (key == name).then_some(value))
}

fn status(code: u16, reason: &str) -> Value {
    json!({"apiVersion": "v1", "kind": "Status", "status": "Failure", "code": code, "reason": reason, "message": reason})
}

fn answer(mut stream: &TcpStream, status: &str, body: &Value) -> Result<()> {
    let body = body.to_string();
    let head = format!(
        "HTTP/1.1 {status}\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n",
        body.len()
    );
    Ok(stream.write_all(&[head.as_bytes(), body.as_bytes()].concat())?)
}

fn chunk(mut stream: &TcpStream, event: &Value) -> Result<()> {
    let line = format!("{event}\n");
    Ok(stream.write_all(format!("{:x}\r\n{line}\r\n", line.len()).as_bytes())?)
}
