//! How many half-open flows a pod may have: flows that it began and that nobody answered yet.
//!
//! A bucket that leaks: each such flow fills it by its pod's [`cost`], an answer takes that out again, and a full bucket runs empty in
//! [`WINDOW`] ticks, about as long as an unanswered flow is remembered. So it needs no list of flows, and does not have to be told of
//! those that expired or were evicted. The bucket is one number, the time at which it will have run empty: the value of `HALF_OPEN`,
//! whose key is the host veth's ifindex (`u32`), with [`WORLD`] for what the world opens to the pod, and with [`TRANSLATED`] for what the
//! stack translates.

/// Bit of the key of the bucket for what the world opens to a pod: it never takes from what the pod may begin itself.
pub const WORLD: u32 = 1 << 31;
/// Bit of the key of the bucket for flows that the stack translates: they never take from what others may begin. Ifindexes are below it.
pub const TRANSLATED: u32 = 1 << 30;
/// Ticks in which a full bucket runs empty.
pub const WINDOW: u32 = 128;
/// Times are ticks with this many binary places.
pub const SHIFT: u32 = 20;
/// What fits into a bucket.
pub const CAPACITY: u64 = (WINDOW as u64) << SHIFT;
/// The largest limit that can be told from none.
pub const LIMIT_MAX: u32 = 1_000_000;

/// What one half-open flow takes of the bucket, for a pod that may have `limit` of them; at least 1 is allowed.
#[must_use]
pub const fn cost(limit: u32) -> u32 {
    let limit = if limit == 0 { 1 } else { limit };
    (WINDOW << SHIFT) / limit
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bucket_holds_as_many_flows_as_the_limit_says() {
        for limit in [1, 2, 7, 1000, 4096, 65_536] {
            let fitting = CAPACITY / u64::from(cost(limit));
            assert_eq!(fitting, u64::from(limit), "{limit}");
        }
        let fitting = CAPACITY / u64::from(cost(LIMIT_MAX));
        assert!(fitting >= u64::from(LIMIT_MAX), "{fitting}");
    }
}
