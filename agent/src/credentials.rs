//! The way to the API server: where it is, and by which rights. Both are in files that somebody writes anew, before they end or because they
//! were stolen: tokens, certificates, those of the server's authority.
//!
//! What the files said when the agent started counts until a request fails by it, whatever the reason: refused as nobody's (401), or by a
//! connection that did not come to be. The next request reads the files again. Where they can't be read, as where somebody has taken them away
//! when the agent had started, it goes on by those of before. Who watches goes on where it was.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use anyhow::Context as _;
use http::{Request, Response, StatusCode};
use kube::client::Body;
use kube::config::KubeConfigOptions;
use kube::{Client, Config};
use tower::service_fn;

use crate::health::hold;

/// How long the API server may be silent in the middle of an answer. A watch that has nothing to say ends before
/// that, after a minute.
const SILENCE: Duration = Duration::from_secs(90);

/// Makes a client that keeps up with the files.
pub(crate) async fn client() -> anyhow::Result<Client> {
    let config = find().await.context(
        "cannot find the API server: neither KUBECONFIG nor a service account says where it is",
    )?;
    let namespace = config.default_namespace.clone();
    let current = Arc::new(Mutex::new(Current {
        client: connect(config).await?,
        has_failed: false,
    }));
    let service = service_fn(move |request| send(Arc::clone(&current), request));
    Ok(Client::new(service, namespace))
}

/// The client of the files as they were last read.
#[derive(Clone)]
struct Current {
    client: Client,
    /// Whether a request has failed by it, so that the files may have something new.
    has_failed: bool,
}

async fn send(
    current: Arc<Mutex<Current>>,
    request: Request<Body>,
) -> Result<Response<Body>, tower::BoxError> {
    let mut now = hold(&current).clone();
    if now.has_failed {
        match renew().await {
            Ok(client) => {
                now.client = client;
                now.has_failed = false;
                *hold(&current) = now.clone();
            }
            Err(error) => {
                tracing::warn!("what was read of the API server before counts: {error:#}");
            }
        }
    }
    let answer = now.client.send(request).await;
    let is_refused = match &answer {
        Ok(answer) => answer.status() == StatusCode::UNAUTHORIZED,
        Err(_) => true,
    };
    hold(&current).has_failed = is_refused;
    Ok(answer?)
}

async fn renew() -> anyhow::Result<Client> {
    connect(find().await?).await
}

/// Makes a client. No connection yet. What a kubeconfig has run for its credentials may take its time, while the rest of the agent goes on.
async fn connect(config: Config) -> anyhow::Result<Client> {
    let made = tokio::task::spawn_blocking(move || make(config));
    made.await.context("the client's task has ended")?
}

fn make(mut config: Config) -> anyhow::Result<Client> {
    // Longer than a watch is silent: what is silent for longer is dead.
    config.read_timeout = Some(SILENCE);
    // Whoever asks waits longer after each refusal. A server that asks for an hour's patience would be asked after an hour.
    config.default_retry = false;
    Client::try_from(config).context("cannot talk to the API server")
}

/// Finds the API server. A file in somebody's home, whose rights are that person's, is not looked for.
async fn find() -> anyhow::Result<Config> {
    if std::env::var_os("KUBECONFIG").is_some_and(|files| !files.is_empty()) {
        return Ok(Config::from_kubeconfig(&KubeConfigOptions::default()).await?);
    }
    Ok(Config::incluster()?)
}
