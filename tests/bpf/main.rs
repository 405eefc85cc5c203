//! Single runs of the programs on crafted packets; they need root.

mod accounting;
mod features;
mod from_pod;
mod mangled;
mod ports;
mod sctp;
