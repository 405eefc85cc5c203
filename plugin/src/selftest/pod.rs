//! A throwaway pod: a network namespace that nothing but this process holds.

use std::{
    net::IpAddr,
    os::fd::AsRawFd as _,
    panic::resume_unwind,
    path::{Path, PathBuf},
    thread,
};

use nix::sched::{CloneFlags, unshare};
use serde_json::Value;
use underpass_cni::{Code, Error as CniError, address::parse_cidr};
use underpass_netlink::Netns;

use crate::error::Error;

/// The name of its interface.
pub(super) const IFNAME: &str = "eth0";

pub(super) struct Pod {
    /// Its id.
    pub(super) container: &'static str,
    pub(super) netns: Netns,
    /// What its ADD answered, if it had one.
    pub(super) result: Option<Value>,
    /// Its addresses.
    pub(super) addresses: Vec<IpAddr>,
}

impl Pod {
    /// Makes a namespace. The thread that makes it ends; the handle keeps it.
    pub(super) fn new(container: &'static str) -> Result<Self, Error> {
        let own = Path::new("/proc/thread-self/ns/net");
        let made = thread::spawn(move || {
            unshare(CloneFlags::CLONE_NEWNET).map_err(|error| {
                CniError::new(
                    Code::InvalidNetns,
                    format!("cannot make a network namespace: {error}"),
                )
                .with_details("run it as root of the node, with the capability CAP_SYS_ADMIN")
            })?;
            Netns::open(own)?.ok_or_else(|| Error::NoNetns(own.to_owned()))
        });
        let netns = made.join().unwrap_or_else(|panic| resume_unwind(panic))?;
        Ok(Self {
            container,
            netns,
            result: None,
            addresses: Vec::new(),
        })
    }

    /// Names the namespace for another process, by the number that this one has in the `/proc` that is mounted.
    pub(super) fn path(&self) -> Result<PathBuf, CniError> {
        let own = std::fs::read_link("/proc/self").map_err(|error| {
            CniError::io("cannot read /proc/self", &error).with_details("mount /proc")
        })?;
        let descriptor = self.netns.as_raw_fd().to_string();
        Ok(Path::new("/proc").join(own).join("fd").join(descriptor))
    }

    /// Notes what its ADD answered.
    pub(super) fn attached(&mut self, result: &[u8]) -> Result<(), CniError> {
        let result: Value = serde_json::from_slice(result).map_err(|error| {
            CniError::decode(format!(
                "ADD of {} printed a result that is not JSON: {error}",
                self.container
            ))
        })?;
        let ips = result.get("ips").and_then(Value::as_array);
        let texts = ips
            .into_iter()
            .flatten()
            .filter_map(|ip| ip.get("address").and_then(Value::as_str));
        let addresses = texts.filter_map(parse_cidr).map(|address| address.addr());
        self.addresses = addresses.collect();
        self.result = Some(result);
        Ok(())
    }
}
