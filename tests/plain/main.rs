//! Tests that need no privilege: what the plugin answers before it touches the system.

mod contract;
mod demo;
mod deploy;
mod docs;
