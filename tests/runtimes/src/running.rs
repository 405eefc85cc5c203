//! A container that runs, whoever has started it.

use std::{fmt, net::IpAddr};

use anyhow::Result;
use underpass_tests::{Family, netns::Netns};

/// Runs a command in a container, which must succeed: its standard output.
type Exec<'a> = Box<dyn Fn(&[&str]) -> Result<String> + 'a>;

/// A container that runs.
pub struct Running<'a> {
    netns: Netns,
    addresses: Vec<IpAddr>,
    exec: Exec<'a>,
}

impl<'a> Running<'a> {
    pub(crate) fn new(netns: Netns, addresses: Vec<IpAddr>, exec: Exec<'a>) -> Self {
        Self {
            netns,
            addresses,
            exec,
        }
    }

    /// Its network namespace.
    #[must_use]
    pub const fn netns(&self) -> &Netns {
        &self.netns
    }

    /// Its addresses, as the runtime says.
    #[must_use]
    pub fn addresses(&self) -> &[IpAddr] {
        &self.addresses
    }

    /// Its address.
    ///
    /// # Panics
    /// If the runtime knows none of that family.
    #[must_use]
    pub fn ip(&self, family: Family) -> IpAddr {
        let mut addresses = self.addresses.iter().copied();
        addresses
            .find(|&ip| Family::of(ip) == family)
            .unwrap_or_else(|| panic!("{self:?} has no {family:?} address"))
    }

    /// Runs a command in it, which must succeed: its standard output.
    pub fn exec(&self, command: &[&str]) -> Result<String> {
        (self.exec)(command)
    }
}

impl fmt::Debug for Running<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Running")
            .field("netns", &self.netns)
            .field("addresses", &self.addresses)
            .finish_non_exhaustive()
    }
}
