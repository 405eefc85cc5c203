//! Numbers of a config, each with the range in which it means something.

use std::num::NonZeroU16;

use underpass_abi::quota;
use underpass_cni::Error;

use super::{MTU_MAX, MTU_MIN};

pub(super) fn mtu(value: i64) -> Result<Option<u32>, Error> {
    if value == 0 {
        return Ok(None);
    }
    u32::try_from(value)
        .ok()
        .filter(|mtu| (MTU_MIN..=MTU_MAX).contains(mtu))
        .map(Some)
        .ok_or_else(|| {
            Error::config(format!(
                "invalid mtu {value}: it must be 0 (as the uplinks) or {MTU_MIN} to {MTU_MAX}"
            ))
        })
}

pub(super) fn half_open_limit(value: i64) -> Result<u32, Error> {
    u32::try_from(value)
        .ok()
        .filter(|limit| (1..=quota::LIMIT_MAX).contains(limit))
        .ok_or_else(|| {
            Error::config(format!(
                "invalid maxHalfOpenFlows {value}: it must be 1 to {}",
                quota::LIMIT_MAX
            ))
        })
}

pub(super) fn tunnel_port(value: i64) -> Result<NonZeroU16, Error> {
    u16::try_from(value)
        .ok()
        .and_then(NonZeroU16::new)
        .ok_or_else(|| {
            Error::config(format!(
                "invalid tunnelPort {value}: it must be a UDP port, 1 to 65535"
            ))
        })
}
