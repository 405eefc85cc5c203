//! Bytes that both ends of a transfer can make and check on their own.

use std::io::{self, Read, Write};

const BLOCK: usize = 64 * 1024;

/// A stream of pseudo-random bytes, told apart by its seed.
#[derive(Debug)]
pub struct Content {
    state: u64,
    block: Vec<u8>,
}

impl Content {
    /// The stream of a seed.
    #[must_use]
    pub fn new(seed: u64) -> Self {
        let mut word = seed | 1;
        let block = std::iter::repeat_with(|| {
            word ^= word << 13;
            word ^= word >> 7;
            word ^= word << 17;
            word.to_le_bytes()
        })
        .take(BLOCK / 8)
        .flatten()
        .collect();
        Self { state: seed, block }
    }

    /// The next block: the same noise under a changed start, so that a lost, doubled or moved block is noticed.
    fn next_block(&mut self) -> &[u8] {
        self.state = self.state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        self.block[..8].copy_from_slice(&self.state.to_le_bytes());
        &self.block
    }

    /// Writes the first `len` bytes of the stream.
    pub fn send(&mut self, to: &mut impl Write, mut len: u64) -> io::Result<()> {
        while len > 0 {
            let block = self.next_block();
            let part = usize::try_from(len).unwrap_or(BLOCK).min(BLOCK);
            to.write_all(&block[..part])?;
            len -= part as u64;
        }
        Ok(())
    }

    /// Reads `len` bytes and compares them with the stream.
    pub fn check(&mut self, from: &mut impl Read, len: u64) -> io::Result<()> {
        let mut buffer = vec![0; BLOCK];
        let mut left = len;
        while left > 0 {
            let part = usize::try_from(left).unwrap_or(BLOCK).min(BLOCK);
            from.read_exact(&mut buffer[..part]).map_err(|error| {
                io::Error::new(
                    error.kind(),
                    format!("{error} after {} of {len} bytes", len - left),
                )
            })?;
            if buffer[..part] != self.next_block()[..part] {
                return Err(io::Error::new(
                    io::ErrorKind::InvalidData,
                    format!(
                        "bytes {} to {} of {len} are not what was sent",
                        len - left,
                        len - left + part as u64
                    ),
                ));
            }
            left -= part as u64;
        }
        Ok(())
    }
}
