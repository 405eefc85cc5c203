//! The plugin seen from outside: through its protocol, and beside the reference plugin on one directory.

mod crash;
mod interop;
mod model;
mod network;
mod verbs;
