//! Translation of addresses and ports: masquerade and host ports.

pub mod hairpin;
pub mod host_port;
pub mod mapping;
pub mod masquerade;
pub mod port_allocation;
pub mod translate;
