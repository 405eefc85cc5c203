//! A CNI plugin that carries containers' traffic under the host's network stack: its verbs, the decisions
//! behind them, and the operator's command line.
//!
//! What can be decided without input or output is public: the config ([`conf`]), names and numbers of an
//! attachment ([`identity`]), everything about one ([`plan`]), and which devices lead to the world
//! ([`uplink`]). What is done to the node is in the verbs' steps.

mod change;
pub mod cli;
pub mod conf;
pub mod error;
pub mod finding;
pub mod glob;
pub mod identity;
pub mod install;
mod left_behind;
pub mod log;
pub mod name;
mod no_masquerade;
pub mod plan;
mod reap;
mod rehearsal;
mod repair;
mod selftest;
mod step;
mod stopwatch;
pub mod uplink;
pub mod verb;
