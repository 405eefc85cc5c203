//! A small fake of the Kubernetes API: a list of Nodes, a watch of them and patches, and the faults that real ones have.

use std::{
    collections::{BTreeMap, VecDeque},
    io::BufReader,
    net::{Shutdown, SocketAddr, TcpListener, TcpStream},
    sync::{
        Arc, Condvar, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    thread,
};

use anyhow::{Context as _, Result};
use serde_json::{Value, json};
use underpass_tests::netns::Netns;

mod http;
mod list;
mod patch;
mod watch;

use http::{Request, answer, parameter};

/// Where each node finds it, on its own loopback device.
pub(super) const AT: &str = "127.0.0.1:6443";

/// What agents have for a token, unless they were given another.
pub(super) const TOKEN: &str = "first";

/// What it says of versions and of order that is odd, and what a client has to bear.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Lie {
    /// Each list has its Nodes in an order of its own, and a watch tells what happened to one Node after what happened to another, not as it came.
    Order,
    /// Each watch begins with all that has ever happened, and says everything twice.
    Repeats,
    /// What is new is called changed, and what has changed is called new.
    Kinds,
    /// Whatever happens to Nodes, the version stays the same: no watch tells of it, and lists have it.
    StandsStill,
    /// After what a watch tells comes a bookmark.
    Bookmarks,
    /// After what a watch tells first comes an error of the server's, and its end.
    FailsAndEnds,
    /// After what a watch tells first comes an error of the server's, and more.
    FailsAndGoesOn,
}

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

/// What becomes of lists. Watches go on.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
enum Lists {
    #[default]
    Served,
    /// They are answered with 429.
    Refused,
    /// The pages after the first one are answered with 410.
    BrokenOff,
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
    lists: Lists,
    /// What is odd of what it says, if anything is.
    lie: Option<Lie>,
    /// So many lists were begun.
    begun: u64,
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
        state.happens("DELETED", &mut node);
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

    /// Refuses lists and lets watches go on, as a server does that has too much to do; or lists again.
    pub(super) fn be_busy(&self, is_busy: bool) {
        self.lock().lists = if is_busy {
            Lists::Refused
        } else {
            Lists::Served
        };
    }

    /// Says something odd of versions or order from now on.
    pub(super) fn lie(&self, lie: Lie) {
        self.lock().lie = Some(lie);
    }

    /// Answers 410 to whoever asks for the next page of a list, as when that took so long that its version is compacted; or goes on with lists.
    pub(super) fn be_hasty(&self, is_hasty: bool) {
        self.lock().lists = if is_hasty {
            Lists::BrokenOff
        } else {
            Lists::Served
        };
    }

    /// Comes to a later version by so much that happens to others than Nodes.
    pub(super) fn pass(&self, many: u64) {
        self.lock().version += many;
        self.shared.changed.notify_all();
    }

    /// Answers 410 to whoever goes on from an earlier version than that of now, and cuts all connections.
    pub(super) fn compact(&self) {
        let mut state = self.lock();
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
            let node = path.strip_prefix("/api/v1/nodes/");
            let said = match (method.as_str(), path.as_str(), node) {
                ("GET", "/api/v1/nodes", _) if is_watch => "watch".to_owned(),
                ("GET", "/api/v1/nodes", _) => "list".to_owned(),
                ("PATCH", _, Some(node)) if node.ends_with("/status") => "patch status".to_owned(),
                ("PATCH", _, Some(_)) => "patch".to_owned(),
                _ => format!("{method} {path}"),
            };
            self.lock().requests.push(said.clone());
            let is_busy = self.lock().lists == Lists::Refused;
            match (said.as_str(), node) {
                ("watch", _) => {
                    if self.watch(stream, query, stop)?.is_break() {
                        return Ok(());
                    }
                }
                ("list", _) if is_busy => {
                    let code = "429 Too Many Requests";
                    answer(stream, code, &status(429, "TooManyRequests"))?;
                }
                ("list", _) => match self.list(query) {
                    Some(list) => answer(stream, "200 OK", &list)?,
                    None => answer(stream, "410 Gone", &status(410, "Expired"))?,
                },
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
}

impl State {
    /// Makes a Node, or changes it. Returns it with its version.
    fn put(&mut self, name: &str, mut node: Value) -> Value {
        let kind = if self.nodes.contains_key(name) {
            "MODIFIED"
        } else {
            "ADDED"
        };
        self.happens(kind, &mut node);
        self.nodes.insert(name.to_owned(), node.clone());
        node
    }

    /// Gives what happens to a Node a version, and the Node that one.
    fn happens(&mut self, kind: &'static str, node: &mut Value) {
        let is_told = self.lie != Some(Lie::StandsStill);
        self.version += u64::from(is_told);
        node["metadata"]["resourceVersion"] = self.version.to_string().into();
        if is_told {
            self.log.push((self.version, kind, node.clone()));
        }
    }
}

/// What a request is answered with that nothing comes of.
fn status(code: u16, reason: &str) -> Value {
    json!({"apiVersion": "v1", "kind": "Status", "status": "Failure", "code": code, "reason": reason, "message": reason})
}
