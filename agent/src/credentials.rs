//! The way to the API server: where it is, and by which rights. Both are in files that somebody writes anew, before they end or because they
//! were stolen: tokens, certificates, those of the server's authority.
//!
//! What the files said when the agent started counts until a request fails by it, whatever the reason: refused as nobody's (401), or by a
//! connection that did not come to be. The next request reads the files again. Who watches goes on where it was.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use anyhow::Context as _;
use http::{Request, Response, StatusCode};
use kube::client::Body;
use kube::config::KubeConfigOptions;
use kube::{Client, Config};
use tower::service_fn;

/// How long the API server may be silent in the middle of an answer. A watch that has nothing to say ends before
/// that, after a minute.
const SILENCE: Duration = Duration::from_secs(90);

/// Makes a client that keeps up with the files.
pub(crate) async fn client() -> anyhow::Result<Client> {
    let config = find().await.context(
        "cannot find the API server: neither KUBECONFIG nor a service account says where it is",
    )?;
    let namespace = config.default_namespace.clone();
    let first = connect(config)?;
    let current = Arc::new(Current(Mutex::new(Some(first))));
    let service = service_fn(move |request| send(Arc::clone(&current), request));
    Ok(Client::new(service, namespace))
}

/// The client of the files as they were last read; nothing, once a request has failed by it.
#[derive(Default)]
struct Current(Mutex<Option<Client>>);

impl Current {
    fn get(&self) -> Option<Client> {
        let client = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        client.clone()
    }

    fn set(&self, client: Option<Client>) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = client;
    }
}

async fn send(
    current: Arc<Current>,
    request: Request<Body>,
) -> Result<Response<Body>, tower::BoxError> {
    let client = if let Some(client) = current.get() {
        client
    } else {
        let client = connect(find().await?)?;
        current.set(Some(client.clone()));
        client
    };
    let answer = client.send(request).await;
    let is_refused = match &answer {
        Ok(answer) => answer.status() == StatusCode::UNAUTHORIZED,
        Err(_) => true,
    };
    if is_refused {
        current.set(None);
    }
    Ok(answer?)
}

/// Makes a client. No connection yet.
fn connect(mut config: Config) -> anyhow::Result<Client> {
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
