//! What an archive stores under its digest, and how one document names another.

use std::fmt::Write as _;

use serde::Serialize;
use sha2::{Digest as _, Sha256};

/// Bytes, and what they are called by.
#[derive(Debug)]
pub(crate) struct Blob {
    bytes: Vec<u8>,
    sum: String,
}

impl Blob {
    pub(crate) fn new(bytes: Vec<u8>) -> Self {
        let mut sum = String::new();
        for byte in Sha256::digest(&bytes) {
            // Writing to memory does not fail.
            let _ = write!(sum, "{byte:02x}");
        }
        Self { bytes, sum }
    }

    pub(crate) fn digest(&self) -> String {
        format!("sha256:{}", self.sum)
    }

    /// Gives its place in the archive.
    pub(crate) fn path(&self) -> String {
        format!("blobs/sha256/{}", self.sum)
    }

    pub(crate) fn into_bytes(self) -> Vec<u8> {
        self.bytes
    }
}

/// The name of a blob in a document.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Descriptor {
    media_type: &'static str,
    digest: String,
    size: usize,
}

impl Descriptor {
    pub(crate) fn of(media_type: &'static str, blob: &Blob) -> Self {
        Self {
            media_type,
            digest: blob.digest(),
            size: blob.bytes.len(),
        }
    }
}
