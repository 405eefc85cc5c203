//! A small fake of the Kubernetes API: a list of Nodes, a watch of them and patches, and the faults that real ones have.

use std::{
    collections::{BTreeMap, VecDeque},
    io::{BufReader, Write as _},
    net::{Shutdown, SocketAddr, TcpListener, TcpStream},
    ops::ControlFlow,
    sync::{
        Arc, Condvar, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result};
use serde_json::{Value, json};
use underpass_tests::netns::Netns;

mod http;
mod patch;

use http::{LAST_CHUNK, Request, answer, chunk, parameter};

/// Where each node finds it, on its own loopback device.
pub(super) const AT: &str = "127.0.0.1:6443";

/// What agents have for a token, unless they were given another.
pub(super) const TOKEN: &str = "first";

/// How long a watch sleeps before it looks whether it is to end.
const TURN: Duration = Duration::from_millis(200);

/// How long a watch lasts of whoever names no time.
const LONG: Duration = Duration::from_hours(1);

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
    /// So often everybody who watched then was left without a word.
    freezes: u64,
    connections: Vec<TcpStream>,
    /// Requests that were answered, as `method path`.
    requests: Vec<String>,
    /// What the next patches are answered with; those after that are taken.
    refusals: VecDeque<u16>,
    /// All patches are answered with 403.
    is_forbidden: bool,
    /// The only token that is good, if not all are.
    token: Option<String>,
    /// The taint that somebody adds to a Node before the next patch of it is looked at.
    rival: Option<Value>,
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
    pub(super) fn put(&self, name: &str, node: Value) {
        self.lock().put(name, node);
        self.shared.changed.notify_all();
    }

    /// A Node, as it is.
    pub(super) fn node(&self, name: &str) -> Option<Value> {
        self.lock().nodes.get(name).cloned()
    }

    /// Answers the next patches with these codes instead of taking them.
    pub(super) fn refuse(&self, codes: &[u16]) {
        self.lock().refusals.extend(codes);
    }

    /// Lets nobody patch anything, or everybody again.
    pub(super) fn forbid(&self, is_forbidden: bool) {
        self.lock().is_forbidden = is_forbidden;
    }

    /// Adds a taint to a Node when the next patch of it comes, as somebody who was faster.
    pub(super) fn be_overtaken(&self, taint: Value) {
        self.lock().rival = Some(taint);
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

    /// Leaves everybody who watches without a word, and without an end: a server, or what is on the way to it, that has lost its memory.
    /// Who asks anew is answered.
    pub(super) fn freeze(&self) {
        self.lock().freezes += 1;
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

    /// Goes back to an early version, with the Nodes of now, as an API server whose etcd was restored from a backup. Who watches from a later version hears
    /// nothing, and no error.
    pub(super) fn go_back(&self) {
        let mut state = self.lock();
        state.version = 0;
        state.log.clear();
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

    /// Answers 401 to whoever has another token than this one.
    pub(super) fn require_token(&self, token: &str) {
        self.lock().token = Some(token.to_owned());
        self.cut();
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
        self.count("list")
    }

    /// How often this was asked for.
    pub(super) fn count(&self, request: &str) -> usize {
        let state = self.lock();
        let same = state.requests.iter().filter(|one| *one == request);
        same.count()
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        let lock = self.shared.state.lock();
        lock.unwrap_or_else(PoisonError::into_inner)
    }

    fn serve(&self, stream: &TcpStream, stop: &AtomicBool) -> Result<()> {
        let mut reader = BufReader::new(stream);
        while let Some(request) = Request::read(&mut reader)? {
            let Request {
                method,
                path,
                query,
                ..
            } = &request;
            {
                let mut state = self.lock();
                if state.is_down {
                    return Ok(stream.shutdown(Shutdown::Both)?);
                }
                state.connections.push(stream.try_clone()?);
            }
            let is_known = {
                let state = self.lock();
                let good = state.token.as_ref().map(|good| format!("Bearer {good}"));
                good.is_none_or(|good| good == request.authorization)
            };
            if !is_known {
                self.lock().requests.push("refused".to_owned());
                answer(stream, "401 Unauthorized", &status(401, "Unauthorized"))?;
                continue;
            }
            let is_watch = matches!(parameter(query, "watch"), Some("true" | "1"));
            let since =
                parameter(query, "resourceVersion").and_then(|version| version.parse().ok());
            let node = path.strip_prefix("/api/v1/nodes/");
            let said = match (method.as_str(), path.as_str(), node) {
                ("GET", "/api/v1/nodes", _) if is_watch => "watch".to_owned(),
                ("GET", "/api/v1/nodes", _) => "list".to_owned(),
                ("PATCH", _, Some(node)) if node.ends_with("/status") => "patch status".to_owned(),
                ("PATCH", _, Some(_)) => "patch".to_owned(),
                _ => format!("{method} {path}"),
            };
            self.lock().requests.push(said.clone());
            match (said.as_str(), node) {
                ("watch", _) => {
                    let seconds =
                        parameter(query, "timeoutSeconds").and_then(|text| text.parse().ok());
                    let limit = seconds.map_or(LONG, Duration::from_secs);
                    if self
                        .watch(stream, since.unwrap_or(0), limit, stop)?
                        .is_break()
                    {
                        return Ok(());
                    }
                }
                ("list", _) => answer(stream, "200 OK", &self.list(query))?,
                ("patch" | "patch status", Some(node)) => match self.patch(node, &request) {
                    Ok(node) => answer(stream, "200 OK", &node)?,
                    Err(code) => answer(stream, &format!("{code} No"), &status(code, "No"))?,
                },
                _ => answer(stream, "403 Forbidden", &status(403, "Forbidden"))?,
            }
        }
        Ok(())
    }

    /// Changes a Node as a request says. An error is what that is answered with.
    fn patch(&self, target: &str, request: &Request) -> Result<Value, u16> {
        let (name, is_status) = match target.strip_suffix("/status") {
            Some(name) => (name, true),
            None => (target, false),
        };
        let mut state = self.lock();
        if state.is_forbidden {
            return Err(403);
        }
        if let Some(code) = state.refusals.pop_front() {
            return Err(code);
        }
        let mut node = state.nodes.get(name).cloned().ok_or(404_u16)?;
        if !is_status && let Some(taint) = state.rival.take() {
            let taints = node["spec"]["taints"].as_array_mut();
            taints.ok_or(500_u16)?.push(taint);
            state.put(name, node.clone());
            self.shared.changed.notify_all();
        }
        let part = if is_status { "status" } else { "spec" };
        patch::apply(&mut node, part, &request.content_type, &request.body)?;
        let node = state.put(name, node);
        self.shared.changed.notify_all();
        Ok(node)
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

    /// Says what happens, for so long. More is answered on the connection if that is how it ended.
    fn watch(
        &self,
        mut stream: &TcpStream,
        since: u64,
        limit: Duration,
        stop: &AtomicBool,
    ) -> Result<ControlFlow<()>> {
        let end = Instant::now() + limit;
        stream.write_all(
            b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n",
        )?;
        let mut said = since;
        let mut state = self.lock();
        let freezes = state.freezes;
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
        Ok(ControlFlow::Break(()))
    }
}

impl State {
    /// Makes a Node, or changes it. Returns it with its version.
    fn put(&mut self, name: &str, mut node: Value) -> Value {
        self.version += 1;
        node["metadata"]["resourceVersion"] = self.version.to_string().into();
        let kind = match self.nodes.insert(name.to_owned(), node.clone()) {
            Some(_) => "MODIFIED",
            None => "ADDED",
        };
        self.log.push((self.version, kind, node.clone()));
        node
    }
}

/// What a request is answered with that nothing comes of.
fn status(code: u16, reason: &str) -> Value {
    json!({"apiVersion": "v1", "kind": "Status", "status": "Failure", "code": code, "reason": reason, "message": reason})
}
