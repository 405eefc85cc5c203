//! A node, its pods and the world around it, as network namespaces that vanish with the process.
//!
//! ```text
//!   pod a   pod b            world
//!   eth0    eth0     eth0 --- eth0   lo: 198.51.100.7, 2001:db8:7::7
//!     |       |       |
//!   veth.. veth..   eth0
//!   +------ node -----+
//! ```
//!
//! Everything a test makes lives in namespaces that only this process holds: network namespaces, and for each node a mount namespace
//! with its own `/run` and its own bpffs. A killed test leaves nothing behind, and tests may run in parallel, in one process or in many.

pub mod address;
pub mod announcement;
pub mod another_build;
pub mod capture;
pub mod counter;
pub mod daemon;
pub mod fault;
pub mod flow_table;
pub mod frame;
mod ioctl;
pub mod kernel;
pub mod lab;
pub mod leak;
mod loaded;
pub mod memory;
pub mod netfilter;
pub mod netns;
pub mod node;
pub mod patience;
pub mod pod;
pub mod prelude;
pub mod privilege;
pub mod program;
pub mod rtnl;
pub mod runtime;
pub mod second;
pub mod test_run;
pub mod trace;
pub mod traffic;
pub mod tun;
pub mod wire;
pub mod world;

pub use address::Family;
pub use lab::Lab;
pub use node::Node;
pub use pod::Pod;

/// Returns from a test that this machine can't run, after it said why. Under `CI=true` that is a failure.
#[macro_export]
macro_rules! needs_root {
    () => {
        if $crate::privilege::skipped() {
            return Ok(());
        }
    };
}
