//! One connection after the other, one byte there and one byte back on each.
//!
//! The server closes first, so that it keeps the ended connection's state and the client's ports are free again at once.

use std::{
    io::{Read as _, Write as _},
    net::{SocketAddr, TcpListener, TcpStream},
    thread,
};

use anyhow::{Context as _, Result, ensure};

use super::{Ends, SILENCE, Timing, Window, number};
use crate::{
    cpu::{self, End},
    join,
};

const REQUEST: u8 = 1;
/// The request of the last connection.
const LAST: u8 = 2;

/// Connections made, used and ended, by so many clients at once.
pub(super) fn measure(ends: &Ends<'_>, timing: Timing, many: usize) -> Result<f64> {
    let listener = &ends.listen()?;
    let target = ends.target();
    let window = timing.begin();
    let connections = thread::scope(|scope| {
        let servers: Vec<_> = (0..many).map(|_| scope.spawn(|| serve(listener))).collect();
        let clients: Vec<_> = (0..many)
            .map(|_| {
                scope.spawn(move || {
                    // Unlike the other loads, sockets are made all the time: the thread has to be inside.
                    ends.client.run(|| {
                        cpu::pin(End::Client)?;
                        let connections = connect(target, window)?;
                        // Each ends one of the servers, whichever gets it.
                        exchange(target, LAST).context("end the series of connections")?;
                        anyhow::Ok(connections)
                    })
                })
            })
            .collect();
        // The client's reason is the better one: without it the server only says that nobody came.
        let connections: Result<u64> = clients.into_iter().map(join).sum();
        let connections = connections?;
        servers.into_iter().try_for_each(join)?;
        anyhow::Ok(connections)
    })?;
    Ok(number(connections))
}

fn connect(target: SocketAddr, window: Window) -> Result<u64> {
    let mut connections = 0;
    loop {
        exchange(target, REQUEST)?;
        match window.count(1) {
            Some(counted) => connections += counted,
            None => return Ok(connections),
        }
    }
}

fn exchange(target: SocketAddr, request: u8) -> Result<()> {
    // A blocking connect: one with a time limit would cost three system calls more.
    let mut stream = TcpStream::connect(target).with_context(|| format!("connect to {target}"))?;
    stream.write_all(&[request]).context("send a request")?;
    let mut answer = [0; 2];
    stream
        .read_exact(&mut answer[..1])
        .context("wait for an answer")?;
    let more = stream
        .read(&mut answer)
        .context("wait for the server to close")?;
    ensure!(more == 0, "the server sent more than an answer");
    Ok(())
}

fn serve(listener: &TcpListener) -> Result<()> {
    cpu::pin(End::Server)?;
    loop {
        let (mut stream, _) = listener
            .accept()
            .with_context(|| format!("wait {SILENCE:?} for a connection"))?;
        let mut request = [0];
        stream
            .read_exact(&mut request)
            .context("wait for a request")?;
        stream.write_all(&request).context("send an answer")?;
        if request == [LAST] {
            return Ok(());
        }
    }
}
