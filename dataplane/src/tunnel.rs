//! The tunnels that containers are kept out of: a part of the node's state.

use underpass_abi::node::Tunnels;

use crate::{Changed, Error, Maps, lock::Lock};

/// Reads which the programs know.
pub fn known(maps: &Maps) -> Result<Tunnels, Error> {
    Ok(maps.state()?.tunnels)
}

/// Has the programs know these. The caller raises the epoch, if anything changed, after everything else that it changes.
pub fn set(_lock: &Lock, maps: &Maps, tunnels: Tunnels) -> Result<Changed, Error> {
    if known(maps)? == tunnels {
        return Ok(Changed::No);
    }
    maps.update_state(|state| state.tunnels = tunnels)?;
    Ok(Changed::Yes)
}
