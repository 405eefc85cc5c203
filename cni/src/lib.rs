//! The contract between a container runtime and a CNI plugin, versions 0.1.0 to 1.1.0.
//!
//! A plugin implements [`Plugin`] and calls [`serve()`]; this crate reads the environment and
//! stdin, checks them in the order and with the words of the reference implementation, calls the
//! one method that was asked for, and writes exactly one JSON document (or none) on stdout.
//!
//! There is no interface work here: no netlink, no eBPF, no `unsafe`.
#![forbid(unsafe_code)]

pub mod address;
pub mod args;
pub mod config;
pub mod delegate;
pub mod env;
pub mod error;
pub mod go_json;
pub mod net_dir;
pub mod result;
pub mod serve;
pub mod version;

pub use config::{AttachmentId, NetConf};
pub use delegate::Delegation;
pub use env::{Attachment, Verb};
pub use error::{Code, Error};
pub use result::{CniResult, Dns, Interface, IpConfig, Route};
pub use serve::{About, NetworkRequest, Plugin, Request, refuse, serve};
pub use version::Version;
