//! The documents of an image, by the specification of its format (`image-spec` 1.0). Fields are written in the order that they have here, so
//! that the bytes do not depend on who writes them.

use std::collections::BTreeMap;

use serde::Serialize;

use crate::blob::{Blob, Descriptor};

const INDEX: &str = "application/vnd.oci.image.index.v1+json";
const MANIFEST: &str = "application/vnd.oci.image.manifest.v1+json";
pub(crate) const CONFIG: &str = "application/vnd.oci.image.config.v1+json";
pub(crate) const LAYER: &str = "application/vnd.oci.image.layer.v1.tar";

/// The version of the documents' form; there has been no other.
const SCHEMA: u32 = 2;

/// What an image runs on.
#[derive(Clone, Copy, Debug, Serialize)]
pub(crate) struct Platform {
    pub(crate) architecture: &'static str,
    pub(crate) os: &'static str,
}

/// The file that says what the archive is.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Layout {
    image_layout_version: &'static str,
}

impl Default for Layout {
    fn default() -> Self {
        Self {
            image_layout_version: "1.0.0",
        }
    }
}

/// What containers are started with, and how the layers make their root.
#[derive(Debug, Serialize)]
pub(crate) struct Config {
    #[serde(flatten)]
    platform: Platform,
    #[serde(rename = "config")]
    process: Process,
    rootfs: Root,
    history: [Step; 1],
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "PascalCase")]
struct Process {
    entrypoint: [String; 1],
    labels: BTreeMap<&'static str, String>,
}

#[derive(Debug, Serialize)]
struct Root {
    r#type: &'static str,
    diff_ids: [String; 1],
}

#[derive(Debug, Serialize)]
struct Step {
    created_by: &'static str,
}

impl Config {
    /// Describes an image with one layer, which is not compressed: its digest is that of its content.
    pub(crate) fn new(
        platform: Platform,
        version: &str,
        entrypoint: String,
        layer: String,
    ) -> Self {
        let labels = [
            ("org.opencontainers.image.title", "underpass-agent"),
            (
                "org.opencontainers.image.description",
                "A pod network of many nodes: the agent, and the CNI plugin that it installs",
            ),
            ("org.opencontainers.image.version", version),
            (
                "org.opencontainers.image.licenses",
                // The plugin has the eBPF programs in it.
                "Apache-2.0 AND (MIT OR GPL-2.0-only)",
            ),
        ];
        Self {
            platform,
            process: Process {
                entrypoint: [entrypoint],
                labels: labels
                    .map(|(label, value)| (label, value.to_owned()))
                    .into(),
            },
            rootfs: Root {
                r#type: "layers",
                diff_ids: [layer],
            },
            history: [Step {
                created_by: "cargo xtask image",
            }],
        }
    }
}

/// What belongs together.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Manifest {
    schema_version: u32,
    media_type: &'static str,
    config: Descriptor,
    layers: [Descriptor; 1],
}

impl Manifest {
    pub(crate) fn new(config: Descriptor, layer: Descriptor) -> Self {
        Self {
            schema_version: SCHEMA,
            media_type: MANIFEST,
            config,
            layers: [layer],
        }
    }
}

/// Where a reader begins.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Index {
    schema_version: u32,
    media_type: &'static str,
    manifests: [Entry; 1],
}

#[derive(Debug, Serialize)]
struct Entry {
    #[serde(flatten)]
    manifest: Descriptor,
    platform: Platform,
    annotations: BTreeMap<&'static str, String>,
}

impl Index {
    /// Names the only image of an archive: its tag for those who go by the specification, and its whole name for containerd, which
    /// goes by its own annotation.
    pub(crate) fn new(manifest: &Blob, platform: Platform, name: &str, tag: &str) -> Self {
        Self {
            schema_version: SCHEMA,
            media_type: INDEX,
            manifests: [Entry {
                manifest: Descriptor::of(MANIFEST, manifest),
                platform,
                annotations: BTreeMap::from([
                    ("io.containerd.image.name", format!("{name}:{tag}")),
                    ("org.opencontainers.image.ref.name", tag.to_owned()),
                ]),
            }],
        }
    }
}
