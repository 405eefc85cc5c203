//! Bytes that both ends of a transfer can make and check on their own.

use std::io::{self, Read, Write};

const BLOCK: usize = 64 * 1024;

/// A stream of pseudo-random bytes, told apart by its seed.
#[derive(Debug)]
pub struct Content {
    state: u64,
    /// The generator of the noise.
    word: u64,
    /// As much of the noise as was asked for: most streams are of a few bytes, and a whole block takes an unoptimized build 10 ms.
    block: Vec<u8>,
}

impl Content {
    /// The stream of a seed.
    #[must_use]
    pub const fn new(seed: u64) -> Self {
        Self {
            state: seed,
            word: seed | 1,
            block: Vec::new(),
        }
    }

    /// The first `len` bytes of the next block: the same noise under a changed start, so that a lost, doubled or moved block is noticed.
    fn next_block(&mut self, len: usize) -> &[u8] {
        while self.block.len() < len.max(8) {
            self.word ^= self.word << 13;
            self.word ^= self.word >> 7;
            self.word ^= self.word << 17;
            self.block.extend_from_slice(&self.word.to_le_bytes());
        }
        self.state = self.state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        self.block[..8].copy_from_slice(&self.state.to_le_bytes());
        &self.block[..len]
    }

    /// Writes the first `len` bytes of the stream.
    pub fn send(&mut self, to: &mut impl Write, mut len: u64) -> io::Result<()> {
        while len > 0 {
            let part = part_of(len);
            to.write_all(self.next_block(part))?;
            len -= part as u64;
        }
        Ok(())
    }

    /// Reads `len` bytes and compares them with the stream.
    pub fn check(&mut self, from: &mut impl Read, len: u64) -> io::Result<()> {
        let mut buffer = vec![0; part_of(len)];
        let mut left = len;
        while left > 0 {
            let part = part_of(left);
            from.read_exact(&mut buffer[..part]).map_err(|error| {
                io::Error::new(
                    error.kind(),
                    format!("{error} after {} of {len} bytes", len - left),
                )
            })?;
            if buffer[..part] != *self.next_block(part) {
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

/// How much of `left` bytes the next block takes.
fn part_of(left: u64) -> usize {
    usize::try_from(left).unwrap_or(BLOCK).min(BLOCK)
}
