//! gRPC, as far as a call with one request and one answer needs it: a message with five bytes before it, by HTTP/2.

use std::{path::Path, time::Duration};

use anyhow::{Context as _, Result, bail, ensure};
use bytes::{Bytes, BytesMut};
use h2::{RecvStream, client};
use http::{HeaderMap, Method, Request, StatusCode};
use prost::Message;
use tokio::{net::UnixStream, runtime::Builder, time::timeout};
use underpass_tests::patience;

/// How long a call may take.
const TIMEOUT: Duration = Duration::from_secs(30);

/// Bytes before a message: whether it is compressed, and its length.
const PREFIX: usize = 5;

/// Makes a call, by a connection of its own.
pub(super) fn call<A: Message + Default>(
    socket: &Path,
    method: &str,
    request: &impl Message,
) -> Result<A> {
    let (body, limit) = (frame(request)?, patience::here(TIMEOUT));
    let runtime = Builder::new_current_thread()
        .enable_io()
        .enable_time()
        .build()
        .context("start a runtime")?;
    // The timer is made where the runtime is known.
    let answer = runtime.block_on(async { timeout(limit, exchange(socket, method, body)).await });
    let answer = answer.with_context(|| format!("no answer within {limit:?}"))??;
    A::decode(message(&answer)?).context("read the answer")
}

fn frame(request: &impl Message) -> Result<Bytes> {
    let mut bytes = vec![0];
    bytes.extend(u32::try_from(request.encoded_len())?.to_be_bytes());
    bytes.extend(request.encode_to_vec());
    Ok(bytes.into())
}

/// The one message of an answer.
fn message(answer: &[u8]) -> Result<&[u8]> {
    let (prefix, message) = answer
        .split_at_checked(PREFIX)
        .context("an answer without message")?;
    ensure!(
        prefix[0] == 0,
        "a compressed answer, which nobody asked for"
    );
    let len = prefix[1..]
        .iter()
        .fold(0, |n, &byte| n << 8 | usize::from(byte));
    ensure!(len == message.len(), "an answer of not just one message");
    Ok(message)
}

async fn exchange(socket: &Path, method: &str, body: Bytes) -> Result<Bytes> {
    let stream = UnixStream::connect(socket)
        .await
        .with_context(|| format!("connect to {}", socket.display()))?;
    let (sender, connection) = client::handshake(stream).await.context("begin HTTP/2")?;
    let connection = tokio::spawn(connection);
    let request = Request::builder()
        .method(Method::POST)
        .uri(format!("http://localhost{method}"))
        .header("content-type", "application/grpc")
        .header("te", "trailers")
        .body(())
        .context("make a request")?;
    let mut sender = sender.ready().await.context("wait for the connection")?;
    let (answer, mut stream) = sender.send_request(request, false).context("ask")?;
    stream.send_data(body, true).context("send the message")?;
    let (head, body) = answer.await.context("wait for the answer")?.into_parts();
    ensure!(
        head.status == StatusCode::OK,
        "the answer is {}",
        head.status
    );
    let bytes = receive(body, &head.headers).await;
    connection.abort();
    bytes
}

/// All bytes of an answer that ends well.
async fn receive(mut body: RecvStream, head: &HeaderMap) -> Result<Bytes> {
    let mut bytes = BytesMut::new();
    while let Some(chunk) = body.data().await {
        let chunk = chunk.context("receive the answer")?;
        body.flow_control().release_capacity(chunk.len())?;
        bytes.extend_from_slice(&chunk);
    }
    // An answer without message has in its head what others have at their end.
    match body.trailers().await.context("receive the end")? {
        Some(trailers) => succeeded(&trailers)?,
        None => succeeded(head)?,
    }
    Ok(bytes.freeze())
}

fn succeeded(fields: &HeaderMap) -> Result<()> {
    let text = |name| {
        fields
            .get(name)
            .map(|value| String::from_utf8_lossy(value.as_bytes()))
    };
    let status = text("grpc-status").context("an answer that does not say how it ended")?;
    if status != "0" {
        bail!(
            "code {status}: {}",
            text("grpc-message").unwrap_or_default()
        );
    }
    Ok(())
}
