//! What an installation consists of: executables, links to them, and the conflist of a network.
//!
//! [`network`] decides what the network is, [`conflist`] what its file says; both without input or output. [`folder`]
//! writes files so that nobody ever sees half of one, for whoever has the [`turn`] to do so.

pub mod conflist;
pub(crate) mod folder;
pub mod network;
pub(crate) mod turn;

/// The folder in which runtimes look for plugins.
pub const BIN_DIR: &str = "/opt/cni/bin";
/// The folders in which runtimes look for plugins where their packages say so.
pub(crate) const BIN_DIRS: [&str; 3] = [BIN_DIR, "/usr/lib/cni", "/usr/libexec/cni"];
/// The name of the plugin's file, and of its entries in conflists.
pub const PLUGIN: &str = "underpass";
/// The name of the allocator's file.
pub const ALLOCATOR: &str = "underpass-ipam";
