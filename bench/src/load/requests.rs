//! One byte there and one byte back, on one connection or on many.

use std::{
    io::{Read as _, Write as _},
    net::TcpStream,
    thread,
};

use anyhow::{Context as _, Result};

use super::{Ends, Timing, Window, closed, number};
use crate::{
    cpu::{self, End},
    join,
};

/// Answers that came back, on so many connections at once.
pub(super) fn measure(ends: &Ends<'_>, timing: Timing, many: usize) -> Result<f64> {
    let connections = ends.connections(many)?;
    let window = timing.begin();
    let answers = thread::scope(|scope| {
        let pairs: Vec<_> = connections
            .into_iter()
            .map(|(client, server)| {
                let answering = scope.spawn(move || answer(server));
                (scope.spawn(move || ask(client, window)), answering)
            })
            .collect();
        let mut all = 0;
        for (asking, answering) in pairs {
            let answers = join(asking);
            join(answering)?;
            all += answers?;
        }
        anyhow::Ok(all)
    })?;
    Ok(number(answers))
}

fn ask(mut client: TcpStream, window: Window) -> Result<u64> {
    cpu::pin(End::Client)?;
    let mut byte = [0];
    let mut answers = 0;
    loop {
        client.write_all(&byte).context("send a request")?;
        client.read_exact(&mut byte).context("wait for an answer")?;
        match window.count(1) {
            Some(counted) => answers += counted,
            None => return Ok(answers),
        }
    }
}

fn answer(mut server: TcpStream) -> Result<()> {
    cpu::pin(End::Server)?;
    let mut byte = [0];
    loop {
        match server.read(&mut byte) {
            Ok(0) => return Ok(()),
            Ok(_) => server.write_all(&byte).context("send an answer")?,
            Err(error) if closed(&error) => return Ok(()),
            Err(error) => return Err(error).context("wait for a request"),
        }
    }
}
