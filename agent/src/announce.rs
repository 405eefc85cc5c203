//! What the agent writes to its own Node, if it is told to: that the network is there.
//!
//! Schedulers wait for it in two ways: by the condition `NetworkUnavailable`, which clouds set for whoever makes the
//! routes, and by a taint that a kubelet registers its Node with. What the watch says is compared with what should be,
//! and only the difference is written: somebody may write it back, or make the Node again.

use std::future::pending;
use std::sync::atomic::Ordering;
use std::time::Duration;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use k8s_openapi::jiff::Timestamp;
use kube::api::{Patch, PatchParams};
use kube::{Api, Client};
use serde_json::{Value, json};
use tokio::sync::watch;
use tokio::time::{Instant, sleep_until, timeout};

use crate::causes::causes;
use crate::health::Health;
use crate::options::Options;
use crate::peer::{NETWORK_UNAVAILABLE, Node, Own};

/// What the API calls the writer.
const WRITER: &str = "underpass-agent";

/// How long to wait after the first failure; twice as long after each further one.
const FIRST_WAIT: Duration = Duration::from_millis(250);

/// How long the API server may take for an answer.
const PATIENCE: Duration = Duration::from_secs(30);

/// Writes what the options ask for, once the network of the Node's own ranges is installed.
pub(crate) async fn keep(
    options: &Options,
    client: Client,
    mut own: watch::Receiver<Option<Own>>,
    health: &Health,
) {
    let mut installed = health.installed.subscribe();
    let condition = options.node_condition.then_some(Write::Condition);
    let taint = options.startup_taint.clone().map(Write::Taint);
    let mut writers: Vec<Writer> = condition
        .into_iter()
        .chain(taint)
        .map(|write| Writer::new(write, options))
        .collect();
    let api = Api::<Node>::all(client);
    loop {
        let node = own.borrow_and_update().clone();
        let ranges = installed.borrow_and_update().clone();
        let mut again = None;
        // A Node that was made again has other ranges, and no network until that is installed with them.
        if let Some(node) = node.filter(|node| ranges.as_ref() == Some(&node.pod_cidrs)) {
            for writer in &mut writers {
                let next = writer.keep(&api, &node, health).await;
                again = again.into_iter().chain(next).min();
            }
        }
        tokio::select! {
            changed = own.changed() => if changed.is_err() { return },
            changed = installed.changed() => if changed.is_err() { return },
            () = at(again) => {}
        }
    }
}

async fn at(time: Option<Instant>) {
    match time {
        Some(time) => sleep_until(time).await,
        None => pending().await,
    }
}

/// A part of the Node.
#[derive(Debug)]
enum Write {
    /// The condition that says that there is a network.
    Condition,
    /// No taint with this key.
    Taint(String),
}

impl Write {
    /// What makes it right; nothing, where it is.
    fn patch(&self, node: &Own, now: &Time) -> Option<Patch<Value>> {
        match self {
            Self::Condition => condition(node, now),
            Self::Taint(key) => untainted(node, key),
        }
    }

    fn what(&self) -> String {
        match self {
            Self::Condition => format!("condition {NETWORK_UNAVAILABLE} is \"False\""),
            Self::Taint(key) => format!("no taint {key} any more"),
        }
    }

    /// The right that it needs, and where it is.
    fn right(&self) -> &'static str {
        match self {
            Self::Condition => {
                "patch of nodes/status, which deploy/components/node-condition gives"
            }
            Self::Taint(_) => "patch of nodes, which deploy/components/taint gives",
        }
    }
}

/// A strategic merge, as each version of Kubernetes has it: the list's others stay, whoever writes them meanwhile.
/// An apply would say the same, but a cloud's route controller has the same condition, and two owners have to force.
fn condition(node: &Own, now: &Time) -> Option<Patch<Value>> {
    if node.network_unavailable.as_deref() == Some("False") {
        return None;
    }
    // It is written only when it becomes another, so that is its transition.
    Some(Patch::Strategic(json!({"status": {"conditions": [{
        "type": NETWORK_UNAVAILABLE,
        "status": "False",
        "reason": "UnderpassIsUp",
        "message": "underpass-agent has made the routes, and installed the network of pods",
        "lastTransitionTime": now,
        "lastHeartbeatTime": now,
    }]}})))
}

/// A patch of operations. To a merge the list is one value, and what somebody adds to it meanwhile would be lost: the
/// test fails instead, whatever else of the Node has become another.
fn untainted(node: &Own, key: &str) -> Option<Patch<Value>> {
    let others = node.taints.iter().filter(|taint| taint["key"] != key);
    let others: Vec<&Value> = others.collect();
    if others.len() == node.taints.len() {
        return None;
    }
    let operations = json!([
        {"op": "test", "path": "/spec/taints", "value": node.taints},
        {"op": "replace", "path": "/spec/taints", "value": others},
    ]);
    serde_json::from_value(operations).ok().map(Patch::Json)
}

/// Writes one thing, and not too often.
#[derive(Debug)]
struct Writer {
    write: Write,
    name: String,
    /// At most one write in this time, unless the last one failed.
    period: Duration,
    /// Not before this time.
    next: Option<Instant>,
    /// How long the last failure has been waited for; nothing after a success.
    wait: Option<Duration>,
    /// The Node that a write was last tried of: one that was made again waits for nothing that became of the one before.
    node: String,
    /// Whether that was done, so that whatever is wrong now was undone by somebody.
    is_done: bool,
    /// What was complained of last.
    complaint: String,
}

impl Writer {
    fn new(write: Write, options: &Options) -> Self {
        Self {
            write,
            name: options.node().to_owned(),
            period: options.resync,
            next: None,
            wait: None,
            node: String::new(),
            is_done: false,
            complaint: String::new(),
        }
    }

    /// Puts it right where it is wrong. Returns when to look again, if not only when something changes.
    async fn keep(&mut self, api: &Api<Node>, node: &Own, health: &Health) -> Option<Instant> {
        let patch = self.write.patch(node, &Time(Timestamp::now()))?;
        if self.node != node.uid {
            self.node.clone_from(&node.uid);
            self.is_done = false;
            self.next = None;
            self.wait = None;
        }
        if let Some(next) = self.next
            && Instant::now() < next
        {
            return Some(next);
        }
        let wait = match self.send(api, &patch).await {
            Ok(()) => {
                health.writes.fetch_add(1, Ordering::Relaxed);
                tracing::info!("Node {}: {}", self.name, self.write.what());
                if self.is_done {
                    self.complain(format!(
                        "somebody has undone this, and it was written again: {}",
                        self.write.what()
                    ));
                }
                self.is_done = true;
                self.wait = None;
                self.period
            }
            Err(complaint) => {
                health.write_failures.fetch_add(1, Ordering::Relaxed);
                if let Some(complaint) = complaint {
                    self.complain(complaint);
                }
                let wait = self.wait.map_or(FIRST_WAIT, |wait| wait * 2);
                let wait = wait.min(self.period);
                self.wait = Some(wait);
                wait
            }
        };
        let next = Instant::now() + wait;
        self.next = Some(next);
        Some(next)
    }

    /// Says it, unless that was the last that was said.
    fn complain(&mut self, complaint: String) {
        if self.complaint != complaint {
            tracing::warn!("Node {}: {complaint}", self.name);
            self.complaint = complaint;
        }
    }

    /// Sends a patch. An error is what to say of it: nothing, where another writer was first.
    async fn send(&self, api: &Api<Node>, patch: &Patch<Value>) -> Result<(), Option<String>> {
        let params = PatchParams {
            field_manager: Some(WRITER.to_owned()),
            ..PatchParams::default()
        };
        let answer = timeout(PATIENCE, async {
            match self.write {
                Write::Condition => api.patch_status(&self.name, &params, patch).await,
                Write::Taint(_) => api.patch(&self.name, &params, patch).await,
            }
        });
        let what = self.write.what();
        match answer.await {
            Ok(Ok(_)) => Ok(()),
            // 409: the API server gave up against other writers. 422: the list is not what the watch said.
            Ok(Err(kube::Error::Api(status))) if matches!(status.code, 409 | 422) => Err(None),
            Ok(Err(kube::Error::Api(status))) if status.code == 403 => Err(Some(format!(
                "not written, as the API refuses it ({what}); the service account has no right to {}; routes and network are \
                 kept without it",
                self.write.right()
            ))),
            Ok(Err(error)) => Err(Some(format!("not written ({what}): {}", causes(&error)))),
            Err(_) => Err(Some(format!(
                "not written ({what}): the API does not answer"
            ))),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn now() -> Time {
        Time(Timestamp::UNIX_EPOCH)
    }

    fn body(patch: Option<Patch<Value>>) -> Value {
        match patch.expect("something to write") {
            Patch::Strategic(body) => body,
            Patch::Json(operations) => serde_json::to_value(operations).expect("JSON"),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn a_condition_is_written_unless_it_is_right() {
        for status in [None, Some("True"), Some("Unknown")] {
            let node = Own {
                network_unavailable: status.map(str::to_owned),
                ..Own::default()
            };
            let body = body(condition(&node, &now()));
            let [condition] = body["status"]["conditions"]
                .as_array()
                .expect("a list")
                .as_slice()
            else {
                panic!("{body}");
            };
            assert_eq!(condition["status"], "False");
            assert_eq!(condition["lastTransitionTime"], "1970-01-01T00:00:00Z");
        }
        let node = Own {
            network_unavailable: Some("False".to_owned()),
            ..Own::default()
        };
        assert!(condition(&node, &now()).is_none());
    }

    #[test]
    fn other_taints_stay_as_they_are() {
        let taint = |key: &str, effect: &str| json!({"key": key, "effect": effect, "timeAdded": "2026-01-01T00:00:00Z"});
        let node = Own {
            taints: vec![
                taint("a/b", "NoSchedule"),
                taint("a/c", "NoSchedule"),
                taint("a/b", "NoExecute"),
            ],
            ..Own::default()
        };
        let body = body(untainted(&node, "a/b"));
        assert_eq!(body[0]["op"], "test");
        assert_eq!(body[0]["value"], Value::from(node.taints.clone()));
        assert_eq!(body[1]["value"], json!([taint("a/c", "NoSchedule")]));
        assert!(untainted(&node, "b").is_none());
        assert!(untainted(&Own::default(), "a/b").is_none());
    }
}
