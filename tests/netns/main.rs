//! Tests of the plugin and its packets on throwaway nodes; they need root.

mod bandwidth;
mod demo;
mod eager;
mod firewall;
mod fixtures;
mod fragments;
mod hops;
mod host;
mod host_port;
mod leftovers;
mod lifecycle;
mod loading;
mod masquerade;
mod netkit;
mod no_bypass;
mod odd_traffic;
mod pod_to_pod;
mod pod_to_world;
mod rare_headers;
mod routers;
mod sctp;
mod service;
mod soak;
mod spoofing;
mod uplinks;
mod world_to_pod;
