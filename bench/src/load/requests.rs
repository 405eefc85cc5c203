//! One byte there and one byte back, on one connection.

use std::{
    io::{Read as _, Write as _},
    thread,
};

use anyhow::{Context as _, Result};

use super::{Ends, Timing, closed, number};
use crate::{
    cpu::{self, End},
    join,
};

/// Answers that came back.
pub(super) fn measure(ends: &Ends<'_>, timing: Timing) -> Result<f64> {
    let (mut client, mut server) = ends.connection()?;
    let window = timing.begin();
    let answers = thread::scope(|scope| {
        let answering = scope.spawn(move || {
            cpu::pin(End::Server)?;
            let mut byte = [0];
            loop {
                match server.read(&mut byte) {
                    Ok(0) => return anyhow::Ok(()),
                    Ok(_) => server.write_all(&byte).context("send an answer")?,
                    Err(error) if closed(&error) => return Ok(()),
                    Err(error) => return Err(error).context("wait for a request"),
                }
            }
        });
        let asking = scope.spawn(move || {
            cpu::pin(End::Client)?;
            let mut byte = [0];
            let mut answers = 0;
            loop {
                client.write_all(&byte).context("send a request")?;
                client.read_exact(&mut byte).context("wait for an answer")?;
                match window.count(1) {
                    Some(counted) => answers += counted,
                    None => return anyhow::Ok(answers),
                }
            }
        });
        let answers = join(asking);
        join(answering)?;
        answers
    })?;
    Ok(number(answers))
}
