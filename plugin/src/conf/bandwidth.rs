//! Bandwidth limits: the network's own keys, or else `runtimeConfig.bandwidth`. Rates are in bits
//! per second and bursts in bits, as in the reference plugin; ingress is what the container
//! receives.

use serde::Deserialize;
use serde_json::Value;
use underpass_cni::{Error, NetConf};

/// A direction's limit, neither number zero.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Limit {
    /// In bits per second.
    pub rate: u64,
    /// What may be sent at once after a pause, in bits.
    pub burst: u64,
}

/// The limits of both directions.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Bandwidth {
    /// Of what the container receives.
    pub ingress: Option<Limit>,
    /// Of what it sends.
    pub egress: Option<Limit>,
}

/// The keys, at either place.
#[derive(Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub(super) struct Keys {
    ingress_rate: Option<u64>,
    ingress_burst: Option<u64>,
    egress_rate: Option<u64>,
    egress_burst: Option<u64>,
    // Of two releases of the reference plugin, which took them back.
    unshaped_subnets: Vec<Value>,
    shaped_subnets: Vec<Value>,
}

/// Reads what the network's own keys say. If any of them is there, the runtime's don't count.
pub fn of_network(conf: &NetConf) -> Result<Option<Bandwidth>, Error> {
    let keys: Keys = conf.plugin()?;
    let limits = keys.limits("")?;
    let rates = [keys.ingress_rate, keys.ingress_burst];
    let more = [keys.egress_rate, keys.egress_burst];
    let is_given = rates.iter().chain(&more).any(Option::is_some);
    Ok(is_given.then_some(limits))
}

/// Reads the limits of one attachment: the network's own keys, or else the runtime's.
pub fn of_attachment(conf: &NetConf) -> Result<Bandwidth, Error> {
    #[derive(Default, Deserialize)]
    #[serde(default)]
    struct RuntimeKeys {
        bandwidth: Keys,
    }
    if let Some(limits) = of_network(conf)? {
        return Ok(limits);
    }
    let runtime: RuntimeKeys = conf.runtime()?;
    runtime.bandwidth.limits("runtimeConfig.bandwidth.")
}

impl Bandwidth {
    /// Finds the first limit, and the key of its rate, for messages.
    #[must_use]
    pub fn first(self) -> Option<(&'static str, Limit)> {
        let limits = [("ingressRate", self.ingress), ("egressRate", self.egress)];
        limits
            .into_iter()
            .find_map(|(key, limit)| Some((key, limit?)))
    }

    /// Tells whether nothing is limited.
    #[must_use]
    pub fn is_none(self) -> bool {
        self.ingress.is_none() && self.egress.is_none()
    }
}

impl Keys {
    /// The limits; `place` is what stands before a key in messages.
    pub(super) fn limits(&self, place: &str) -> Result<Bandwidth, Error> {
        let lists = [
            ("unshapedSubnets", &self.unshaped_subnets),
            ("shapedSubnets", &self.shaped_subnets),
        ];
        if let Some((key, list)) = lists.into_iter().find(|(_, list)| !list.is_empty()) {
            let value = Value::Array(list.clone());
            return Err(Error::unsupported(&format!("{place}{key}"), value));
        }
        Ok(Bandwidth {
            ingress: limit(place, "ingress", self.ingress_rate, self.ingress_burst)?,
            egress: limit(place, "egress", self.egress_rate, self.egress_burst)?,
        })
    }
}

fn limit(
    place: &str,
    direction: &str,
    rate: Option<u64>,
    burst: Option<u64>,
) -> Result<Option<Limit>, Error> {
    let invalid = |reason: &str| {
        let value = |number: Option<u64>| number.map_or("not set".to_owned(), |n| n.to_string());
        Err(Error::config(format!(
            "invalid {place}{direction}Rate {} with {direction}Burst {}: {reason}",
            value(rate),
            value(burst)
        )))
    };
    match (rate.unwrap_or_default(), burst.unwrap_or_default()) {
        (0, 0) => Ok(None),
        (_, 0) => invalid("if rate is set, burst must also be set"),
        (0, _) => invalid("if burst is set, rate must also be set"),
        (_, burst) if burst / 8 >= u64::from(u32::MAX) => {
            invalid("burst cannot be more than 4GB (the key is in bits)")
        }
        (rate, burst) => Ok(Some(Limit { rate, burst })),
    }
}

#[cfg(test)]
mod tests;
