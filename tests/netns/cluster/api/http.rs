//! HTTP/1.1 as far as clients of the Kubernetes API speak it, over a socket that can be cut at any byte.

use std::{
    io::{BufRead, Read as _, Write as _},
    net::TcpStream,
};

use anyhow::Result;
use serde_json::Value;

/// What an answer in chunks ends with.
pub(super) const LAST_CHUNK: &[u8] = b"0\r\n\r\n";

/// What somebody asks for.
pub(super) struct Request {
    pub(super) method: String,
    pub(super) path: String,
    pub(super) query: String,
    pub(super) content_type: String,
    pub(super) authorization: String,
    pub(super) body: Vec<u8>,
}

impl Request {
    /// Reads the next one of a connection, if there is one.
    pub(super) fn read(reader: &mut impl BufRead) -> Result<Option<Self>> {
        let mut first = String::new();
        if reader.read_line(&mut first)? == 0 {
            return Ok(None);
        }
        let mut words = first.split_whitespace();
        let (method, target) = (words.next().unwrap_or(""), words.next().unwrap_or(""));
        let (path, query) = target.split_once('?').unwrap_or((target, ""));
        let mut request = Self {
            method: method.to_owned(),
            path: path.to_owned(),
            query: query.to_owned(),
            content_type: String::new(),
            authorization: String::new(),
            body: Vec::new(),
        };
        let mut length = 0;
        loop {
            let mut line = String::new();
            reader.read_line(&mut line)?;
            let Some((name, value)) = line.trim_end().split_once(": ") else {
                break;
            };
            match name.to_ascii_lowercase().as_str() {
                "content-length" => length = value.parse()?,
                "authorization" => value.clone_into(&mut request.authorization),
                "content-type" => value.clone_into(&mut request.content_type),
                _ => {}
            }
        }
        reader.take(length).read_to_end(&mut request.body)?;
        Ok(Some(request))
    }
}

/// A parameter of a query, as it is written there.
pub(super) fn parameter<'a>(query: &'a str, name: &str) -> Option<&'a str> {
    let mut pairs = query.split('&').filter_map(|pair| pair.split_once('='));
    pairs.find_map(|(key, value)| (key == name).then_some(value))
}

/// Answers with a whole document.
pub(super) fn answer(mut stream: &TcpStream, status: &str, body: &Value) -> Result<()> {
    let body = body.to_string();
    let head = format!(
        "HTTP/1.1 {status}\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n",
        body.len()
    );
    Ok(stream.write_all(&[head.as_bytes(), body.as_bytes()].concat())?)
}

/// Adds a line to an answer in chunks.
pub(super) fn chunk(mut stream: &TcpStream, event: &Value) -> Result<()> {
    let line = format!("{event}\n");
    Ok(stream.write_all(format!("{:x}\r\n{line}\r\n", line.len()).as_bytes())?)
}
