//! The ranges that one address is taken from, and the order in which they are tried.

use std::fmt;
use std::net::IpAddr;
use std::ops::RangeInclusive;

use ipnet::IpNet;
use thiserror::Error;

use crate::range::{Bounds, Range, RangeError};

/// Ranges of one family that do not overlap; each attachment gets one address of them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pool {
    ranges: Vec<Range>,
}

/// Why ranges are not a pool. The words are those of the reference plugin.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub enum PoolError {
    /// No ranges.
    #[error("empty range set")]
    Empty,
    /// IPv4 beside IPv6.
    #[error("mixed address families")]
    MixedFamilies,
    /// An address would be there twice.
    #[error("subnets {} and {} overlap", .0[0], .0[1])]
    Overlap(Box<[Range; 2]>),
    /// One of the ranges is wrong.
    #[error(transparent)]
    Range(#[from] RangeError),
}

impl PoolError {
    /// Says what to do: the known words do not.
    #[must_use]
    pub fn remedy(&self) -> String {
        match self {
            Self::Empty => "put a range with a \"subnet\" into it, or take it out".to_owned(),
            Self::MixedFamilies => {
                "give each family a list of its own, and the container has an address of each"
                    .to_owned()
            }
            Self::Overlap(_) => {
                "choose \"rangeStart\" and \"rangeEnd\" so that no address is in both".to_owned()
            }
            Self::Range(error) => error.remedy(),
        }
    }
}

/// An address to try, and the range that it is in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Candidate<'a> {
    /// The address.
    pub ip: IpAddr,
    /// Its range.
    pub range: &'a Range,
}

impl Pool {
    /// Checks each range and then all together.
    pub fn new(bounds: &[Bounds]) -> Result<Self, PoolError> {
        let mut ranges: Vec<Range> = Vec::with_capacity(bounds.len());
        for bounds in bounds {
            let range = Range::new(*bounds)?;
            if ranges
                .first()
                .is_some_and(|first| first.is_ipv4() != range.is_ipv4())
            {
                return Err(PoolError::MixedFamilies);
            }
            ranges.push(range);
        }
        for (index, range) in ranges.iter().enumerate() {
            if let Some(other) = ranges[index + 1..]
                .iter()
                .find(|other| range.overlaps(other))
            {
                return Err(PoolError::Overlap(Box::new([range.clone(), other.clone()])));
            }
        }
        if ranges.is_empty() {
            Err(PoolError::Empty)
        } else {
            Ok(Self { ranges })
        }
    }

    /// The family.
    #[must_use]
    pub fn is_ipv4(&self) -> bool {
        self.ranges.iter().any(Range::is_ipv4)
    }

    /// The range that `ip` lies in.
    #[must_use]
    pub fn range_of(&self, ip: IpAddr) -> Option<&Range> {
        self.ranges.iter().find(|range| range.contains(ip))
    }

    /// Whether some address lies in both.
    #[must_use]
    pub fn overlaps(&self, other: &Self) -> bool {
        self.ranges
            .iter()
            .any(|range| other.ranges.iter().any(|other| range.overlaps(other)))
    }

    /// The subnets of its ranges.
    pub fn subnets(&self) -> impl Iterator<Item = IpNet> {
        self.ranges.iter().map(Range::subnet)
    }

    /// How many addresses can be leased; saturates.
    #[must_use]
    pub fn capacity(&self) -> u128 {
        self.ranges
            .iter()
            .fold(0, |sum, range| sum.saturating_add(range.capacity()))
    }

    /// Every address once, in the order in which they are tried: from the one after `last` round to
    /// `last` itself, or from the start if `last` is unknown or not of this pool. A range's own
    /// gateway is left out.
    ///
    /// So an address that was just freed is the last to be leased again: neighbours and connections
    /// have time to forget it.
    pub fn candidates(&self, last: Option<IpAddr>) -> impl Iterator<Item = Candidate<'_>> {
        let resume = last.and_then(|last| {
            let index = self.ranges.iter().position(|range| range.contains(last))?;
            Some((index, crate::range::number(last)))
        });
        let whole = |range: &Range| range.first_number()..=range.last_number();
        let mut runs: Vec<(&Range, RangeInclusive<u128>)> =
            Vec::with_capacity(self.ranges.len() + 1);
        match resume {
            None => runs.extend(self.ranges.iter().map(|range| (range, whole(range)))),
            Some((index, last)) => {
                let (before, rest) = self.ranges.split_at(index);
                if let Some((current, after)) = rest.split_first() {
                    if last < current.last_number() {
                        runs.push((current, last + 1..=current.last_number()));
                    }
                    runs.extend(
                        after
                            .iter()
                            .chain(before)
                            .map(|range| (range, whole(range))),
                    );
                    runs.push((current, current.first_number()..=last));
                }
            }
        }
        runs.into_iter()
            .flat_map(|(range, run)| {
                run.map(move |number| Candidate {
                    ip: range.numbered(number),
                    range,
                })
            })
            .filter(|candidate| candidate.ip != candidate.range.gateway())
    }
}

impl fmt::Display for Pool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, range) in self.ranges.iter().enumerate() {
            let comma = if index == 0 { "" } else { "," };
            write!(f, "{comma}{range}")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
