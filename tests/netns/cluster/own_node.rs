//! What a node's own Node lacks or gets wrong: what works stays as it is.

use underpass_tests::prelude::*;

use super::fixture::Cluster;

/// A Node that was deleted and registered again has other ranges, and another node gets those of before: a pod that is left has its
/// gateway in them.
#[test]
fn a_pod_that_is_left_keeps_its_range_from_nobody() -> Result<()> {
    needs_root!();
    let cluster = Cluster::new(&[0, 0])?;
    cluster.settle()?;
    let (member, other) = (&cluster.members[0], &cluster.members[1]);
    let _pod = member.pod("left")?;
    let moved = ["10.244.77.0/24", "fd00:244:77::/64"].map(str::to_owned);
    cluster.api.set(&member.name, &member.addresses(), &moved);
    cluster
        .api
        .set(&other.name, &other.addresses(), &member.ranges());
    eventually("routes to the ranges of before", || {
        let routes = member.routes()?;
        for family in Family::BOTH {
            let (range, via) = (member.range(family), other.address(family));
            let route = format!("{range} via {via} dev {}", Node::UPLINK);
            ensure!(routes.contains(&route), "{routes:?}, {}", member.log()?);
        }
        Ok(())
    })
}
