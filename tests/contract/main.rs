//! The contract as a container runtime sees it: every verb in every version, by every name, alone and in a chain, through the compiled
//! executables.

mod chain;
mod chained;
mod chained_bandwidth;
mod config;
mod delegated;
mod entries;
mod forwarding;
mod gc;
mod hopeless;
mod host_port;
mod loopback;
mod names;
mod plugins;
mod probes;
mod programmed;
mod refusals;
mod schema;
mod status;
mod unheard;
mod versions;
