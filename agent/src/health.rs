//! What the agent says of itself: whether it lives, whether it has done its work once, and numbers.

use std::convert::Infallible;
use std::fmt::Write as _;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use anyhow::Context as _;
use http_body_util::Full;
use hyper::body::{Bytes, Incoming};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{Method, Request, Response, StatusCode, header};
use hyper_util::rt::{TokioIo, TokioTimer};
use ipnet::IpNet;
use tokio::net::TcpListener;
use tokio::sync::watch;

use crate::verbs::Verbs;

mod trouble;

pub(crate) use self::trouble::Trouble;

/// The format that Prometheus asks for by that name.
const OPEN_METRICS: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// What `OpenMetrics` ends with.
const END: &str = "# EOF\n";

/// How long it counts that the Nodes could not be read: by then it is tried again, and a watch that goes on says nothing.
const DEAF: Duration = Duration::from_mins(2);

/// What became of the work.
#[derive(Debug, Default)]
pub(crate) struct Health {
    /// The ranges of the network that was installed when routes were complete; nothing before that, and while no pod gets to it.
    pub(crate) installed: watch::Sender<Option<Vec<IpNet>>>,
    /// The ranges that the API says are this node's; none, where it says none or has no Node of ours.
    assigned: Mutex<Vec<IpNet>>,
    /// What is wrong with the network.
    trouble: Mutex<Option<Trouble>>,
    /// Why the Nodes could not be read, and when that was.
    deaf: Mutex<Option<(Instant, String)>>,
    /// What the last comparison could not do.
    wanting: Mutex<Vec<String>>,
    /// Lists and watches of the Nodes that failed.
    pub(crate) watch_failures: AtomicU64,
    /// Nodes that are known.
    pub(crate) nodes: AtomicU64,
    /// Comparisons of what is with what should be.
    pub(crate) syncs: AtomicU64,
    /// Those of them that could not do all.
    pub(crate) failures: AtomicU64,
    /// How many ranges of other nodes have no route after the last one.
    pub(crate) missing: AtomicU64,
    /// What the last one could not do of this node's own.
    pub(crate) broken: AtomicU64,
    /// What the last one could not believe of what Nodes say, or found no way for.
    pub(crate) remarks: AtomicU64,
    /// What they changed.
    pub(crate) changes: AtomicU64,
    /// How long the last one took, in microseconds.
    pub(crate) last_us: AtomicU64,
    /// How long the longest one took, in microseconds.
    pub(crate) longest_us: AtomicU64,
    /// What was written to this node's own Node.
    pub(crate) writes: AtomicU64,
    /// What could not be.
    pub(crate) write_failures: AtomicU64,
}

impl Health {
    /// Remembers which ranges the API says are this node's.
    pub(crate) fn assigned(&self, ranges: &[IpNet]) {
        ranges.clone_into(&mut hold(&self.assigned));
    }

    /// Remembers why the Nodes can't be read.
    pub(crate) fn set_deaf(&self, why: String) {
        *hold(&self.deaf) = Some((Instant::now(), why));
    }

    /// Remembers what a comparison could not do.
    pub(crate) fn wants(&self, wanting: Vec<String>) {
        *hold(&self.wanting) = wanting;
    }

    /// Remembers what is wrong with the network, if anything is.
    pub(crate) fn set_trouble(&self, trouble: Option<Trouble>) {
        *hold(&self.trouble) = trouble;
    }

    /// Says whether there is the network that there should be; or what it waits for.
    fn ready(&self) -> (StatusCode, String) {
        let trouble = hold(&self.trouble).clone();
        let unready = match &trouble {
            Some(Trouble::Ended(why)) => Some(format!("nothing is looked after any more: {why}\n")),
            Some(Trouble::Hidden(why)) => Some(format!(
                "the network is installed, and no pod gets to it: {why}\n"
            )),
            _ => None,
        };
        if let Some(text) = unready {
            return (StatusCode::SERVICE_UNAVAILABLE, text);
        }
        let Some(installed) = self.installed.borrow().clone() else {
            return (
                StatusCode::SERVICE_UNAVAILABLE,
                self.incomplete(trouble.as_ref()),
            );
        };
        let outdated = |why: &str| {
            let text = format!("the network is not the one of the Node's ranges: {why}\n");
            (StatusCode::SERVICE_UNAVAILABLE, text)
        };
        let assigned = hold(&self.assigned).clone();
        let mut text = match &trouble {
            Some(Trouble::Outdated(why)) => return outdated(why),
            // Also before anybody has tried to install them, or where nobody can: the Node may lack something else.
            _ if !assigned.is_empty() && assigned != installed => {
                let (now, before) = (listed(&assigned), listed(&installed));
                let wanting = hold(&self.wanting).join("; ");
                let why = if wanting.is_empty() { "" } else { ": " };
                return outdated(&format!(
                    "it has {now} now, and {before} is installed{why}{wanting}"
                ));
            }
            Some(Trouble::Unkept(why)) => {
                format!("ok, but the network can't be looked after: {why}")
            }
            Some(Trouble::LeftBehind(why)) => {
                format!("ok, but pods of before have no masquerade and no host ports: {why}")
            }
            // What ends the agent, or hides the network, was said above.
            Some(Trouble::Ended(_) | Trouble::Hidden(_)) | None => "ok".to_owned(),
        };
        let mut and = if trouble.is_some() { "; and" } else { ", but" };
        for (count, what) in [
            (&self.missing, "of the other nodes' routes"),
            (
                &self.broken,
                "of the node's own routes, or its VXLAN device,",
            ),
        ] {
            let count = count.load(Ordering::Relaxed);
            if count > 0 {
                let _ = write!(
                    text,
                    "{and} {count} {what} could not be made: the log says why"
                );
                and = "; and";
            }
        }
        text.push('\n');
        (StatusCode::OK, text)
    }

    /// Says what the network waits for.
    fn incomplete(&self, trouble: Option<&Trouble>) -> String {
        let wanting = hold(&self.wanting);
        let deaf = hold(&self.deaf).clone();
        let deaf = deaf.filter(|(since, _)| since.elapsed() < DEAF);
        let deaf = deaf.map(|(_, why)| why);
        let why = trouble.map(Trouble::why);
        let why = why.filter(|why| !wanting.contains(why));
        let mut text = "routes or the network are not complete yet\n".to_owned();
        for line in wanting.iter().chain(why).chain(&deaf) {
            text.push_str(line);
            text.push('\n');
        }
        text
    }

    fn text(&self, verbs: &Verbs) -> String {
        let mut text = String::new();
        let mut metric = |name: &str, kind: &str, help: &str, value: &dyn std::fmt::Display| {
            let suffix = if kind == "counter" { "_total" } else { "" };
            // Writing to memory does not fail.
            let _ = writeln!(
                text,
                "# TYPE underpass_agent_{name} {kind}\n# HELP underpass_agent_{name} {help}\nunderpass_agent_{name}{suffix} {value}"
            );
        };
        let load = |value: &AtomicU64| value.load(Ordering::Relaxed);
        metric(
            "nodes",
            "gauge",
            "Nodes that the API has told of.",
            &load(&self.nodes),
        );
        metric(
            "syncs",
            "counter",
            "Comparisons of the kernel with what it should have.",
            &load(&self.syncs),
        );
        metric(
            "sync_failures",
            "counter",
            "Comparisons that could not put all right.",
            &load(&self.failures),
        );
        metric(
            "missing_routes",
            "gauge",
            "Routes and entries for other nodes that the last comparison could not make.",
            &load(&self.missing),
        );
        metric(
            "remarks",
            "gauge",
            "What the last comparison found wrong with Nodes, so that there is no route to a range of theirs, or no network: the log has it.",
            &load(&self.remarks),
        );
        metric(
            "watch_failures",
            "counter",
            "Lists and watches of the Nodes that failed.",
            &load(&self.watch_failures),
        );
        metric(
            "command_failures",
            "counter",
            "Commands of underpass that failed: install, upgrade, apply, gc, metrics.",
            &verbs.failures(),
        );
        metric(
            "changes",
            "counter",
            "Routes, devices and entries that were changed.",
            &load(&self.changes),
        );
        let seconds = |value: &AtomicU64| {
            let us = load(value);
            format!("{}.{:06}", us / 1_000_000, us % 1_000_000)
        };
        metric(
            "last_sync_seconds",
            "gauge",
            "How long the last comparison took.",
            &seconds(&self.last_us),
        );
        metric(
            "longest_sync_seconds",
            "gauge",
            "How long the longest comparison took: most often the first one, which makes all routes.",
            &seconds(&self.longest_us),
        );
        metric(
            "node_writes",
            "counter",
            "Conditions and taints of our own Node that were written.",
            &load(&self.writes),
        );
        metric(
            "node_write_failures",
            "counter",
            "Writes to our own Node that were refused or got no answer.",
            &load(&self.write_failures),
        );
        text
    }
}

/// Locks what nobody holds for long.
pub(crate) fn hold<T>(shared: &Mutex<T>) -> MutexGuard<'_, T> {
    shared.lock().unwrap_or_else(PoisonError::into_inner)
}

fn listed(ranges: &[IpNet]) -> String {
    let ranges: Vec<_> = ranges.iter().map(ToString::to_string).collect();
    ranges.join(" and ")
}

/// Serves until the process ends.
pub(crate) async fn serve(
    listen: SocketAddr,
    health: Arc<Health>,
    verbs: Verbs,
) -> anyhow::Result<()> {
    let listener = TcpListener::bind(listen)
        .await
        .with_context(|| format!("cannot listen on {listen}: name another address by --listen"))?;
    tokio::spawn(async move {
        loop {
            let Ok((stream, _)) = listener.accept().await else {
                // No descriptors, for instance: that passes.
                tokio::time::sleep(Duration::from_millis(100)).await;
                continue;
            };
            let (health, verbs) = (Arc::clone(&health), verbs.clone());
            tokio::spawn(async move {
                let service = service_fn(|request| answer(request, &health, &verbs));
                // A peer that goes away in the middle is its own business. One that says nothing does not stay.
                let _ = http1::Builder::new()
                    .timer(TokioTimer::new())
                    .header_read_timeout(Duration::from_secs(5))
                    .keep_alive(false)
                    .serve_connection(TokioIo::new(stream), service)
                    .await;
            });
        }
    });
    Ok(())
}

async fn answer(
    request: Request<Incoming>,
    health: &Health,
    verbs: &Verbs,
) -> Result<Response<Full<Bytes>>, Infallible> {
    let mut format = "text/plain; charset=utf-8";
    let (status, text) = match (request.method(), request.uri().path()) {
        (&Method::GET, "/healthz") => (StatusCode::OK, "ok\n".to_owned()),
        (&Method::GET, "/readyz") => health.ready(),
        (&Method::GET, "/metrics") => {
            format = OPEN_METRICS;
            let programs = verbs.metrics().await.unwrap_or_else(|failed| {
                tracing::warn!("{}", failed.why);
                String::new()
            });
            let programs = programs.strip_suffix(END).unwrap_or(&programs);
            (
                StatusCode::OK,
                format!("{programs}{}{END}", health.text(verbs)),
            )
        }
        (&Method::GET, _) => (
            StatusCode::NOT_FOUND,
            "there are /healthz, /readyz and /metrics\n".to_owned(),
        ),
        _ => (StatusCode::METHOD_NOT_ALLOWED, "only GET\n".to_owned()),
    };
    let mut response = Response::new(Full::new(Bytes::from(text)));
    *response.status_mut() = status;
    response.headers_mut().insert(
        header::CONTENT_TYPE,
        header::HeaderValue::from_static(format),
    );
    Ok(response)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn said(health: &Health) -> (u16, String) {
        let (status, text) = health.ready();
        (status.as_u16(), text)
    }

    #[test]
    fn before_the_first_network_it_says_what_is_missing_once() {
        let health = Health::default();
        let begin = "routes or the network are not complete yet\n";
        assert_eq!(said(&health), (503, begin.to_owned()));
        health.wants(vec!["no way".to_owned(), "too narrow".to_owned()]);
        health.set_trouble(Some(Trouble::Outdated("no room".to_owned())));
        assert_eq!(
            said(&health),
            (503, format!("{begin}no way\ntoo narrow\nno room\n"))
        );
        // Who compares the routes says the same of ranges.
        health.set_trouble(Some(Trouble::Outdated("too narrow".to_owned())));
        assert_eq!(said(&health), (503, format!("{begin}no way\ntoo narrow\n")));
        health.set_deaf("nobody answers".to_owned());
        let (_, text) = said(&health);
        assert_eq!(text, format!("{begin}no way\ntoo narrow\nnobody answers\n"));
    }

    #[test]
    fn what_is_wrong_with_the_network_is_said_as_long_as_it_is_so() {
        let health = Health::default();
        health.installed.send_replace(Some(Vec::new()));
        assert_eq!(said(&health), (200, "ok\n".to_owned()));
        health.set_trouble(Some(Trouble::Unkept("no room".to_owned())));
        let unkept = "ok, but the network can't be looked after: no room";
        assert_eq!(said(&health), (200, format!("{unkept}\n")));
        let missing = "2 of the other nodes' routes could not be made: the log says why";
        health.missing.store(2, Ordering::Relaxed);
        assert_eq!(said(&health), (200, format!("{unkept}; and {missing}\n")));
        health.set_trouble(Some(Trouble::Outdated("no room".to_owned())));
        let (status, text) = said(&health);
        assert_eq!(status, 503);
        assert!(text.ends_with(": no room\n"), "{text}");
        health.set_trouble(None);
        assert_eq!(said(&health), (200, format!("ok, but {missing}\n")));
    }

    #[test]
    fn a_network_that_no_pod_gets_to_is_none() {
        let health = Health::default();
        let hidden = || Some(Trouble::Hidden("hidden by that".to_owned()));
        let text = "the network is installed, and no pod gets to it: hidden by that\n";
        health.set_trouble(hidden());
        assert_eq!(said(&health), (503, text.to_owned()));
        health.set_trouble(None);
        health.installed.send_replace(Some(Vec::new()));
        assert_eq!(said(&health), (200, "ok\n".to_owned()));
        health.set_trouble(hidden());
        assert_eq!(said(&health), (503, text.to_owned()));
    }

    #[test]
    fn pods_that_were_left_behind_are_said() {
        let health = Health::default();
        health.installed.send_replace(Some(Vec::new()));
        health.set_trouble(Some(Trouble::LeftBehind("veth1".to_owned())));
        let text = "ok, but pods of before have no masquerade and no host ports: veth1\n";
        assert_eq!(said(&health), (200, text.to_owned()));
    }

    #[test]
    fn a_network_of_other_ranges_than_the_nodes_is_none() {
        let range = |text: &str| text.parse::<IpNet>().expect("a range");
        let health = Health::default();
        let before = vec![range("10.1.0.0/24"), range("fd00:1::/64")];
        health.installed.send_replace(Some(before.clone()));
        // A Node that is gone, or has none yet, is that of before.
        for assigned in [&[][..], &before] {
            health.assigned(assigned);
            assert_eq!(said(&health), (200, "ok\n".to_owned()));
        }
        health.assigned(&[range("10.2.0.0/24")]);
        let begin = "the network is not the one of the Node's ranges: it has 10.2.0.0/24 now, and 10.1.0.0/24 and fd00:1::/64 is installed";
        assert_eq!(said(&health), (503, format!("{begin}\n")));
        health.wants(vec!["no InternalIP".to_owned()]);
        assert_eq!(said(&health), (503, format!("{begin}: no InternalIP\n")));
        health.set_trouble(Some(Trouble::Unkept("no room".to_owned())));
        assert_eq!(said(&health), (503, format!("{begin}: no InternalIP\n")));
    }
}
