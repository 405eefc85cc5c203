//! Bytes, as many as go through; the receiver counts.

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

/// Bytes of one write and of one read at most.
const CHUNK: usize = 128 * 1024;

/// Bits that arrived.
pub(super) fn measure(ends: &Ends<'_>, timing: Timing) -> Result<f64> {
    let (mut client, mut server) = ends.connection()?;
    let window = timing.begin();
    let bytes = thread::scope(|scope| {
        let sender = scope.spawn(move || {
            cpu::pin(End::Client)?;
            let chunk = vec![0; CHUNK];
            while !window.is_over() {
                match client.write(&chunk) {
                    Ok(_) => {}
                    Err(error) if closed(&error) => break,
                    Err(error) => return Err(error).context("send on a stream"),
                }
            }
            anyhow::Ok(())
        });
        let receiver = scope.spawn(move || {
            cpu::pin(End::Server)?;
            let mut chunk = vec![0; CHUNK];
            let mut bytes = 0;
            loop {
                let read = server.read(&mut chunk).context("receive from a stream")?;
                match window.count(read as u64) {
                    Some(counted) if read > 0 => bytes += counted,
                    _ => return anyhow::Ok(bytes),
                }
            }
        });
        let bytes = join(receiver);
        join(sender)?;
        bytes
    })?;
    Ok(number(bytes * 8))
}
