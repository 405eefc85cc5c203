//! The plugin seen from outside: through its protocol, and beside the reference plugin on one directory.

mod crash;
mod file_systems;
mod interop;
mod model;
mod network;
mod reboot;
mod sandbox;
mod unreadable;
mod verbs;
