use std::cell::Cell;

use tempfile::TempDir;

use super::*;
use crate::range::{Bounds, number};

/// As many as a node may have containers of another plugin.
const LED: u128 = 65_000;

struct Fixture {
    folder: TempDir,
    pool: Pool,
}

impl Fixture {
    fn new(subnet: &str) -> Self {
        let bounds = Bounds {
            subnet: Some(subnet.parse().expect("a subnet")),
            ..Bounds::default()
        };
        Self {
            folder: TempDir::new().expect("a temporary folder"),
            pool: Pool::new(&[bounds]).expect("a pool"),
        }
    }

    /// How far an address is behind the first one that is given.
    fn place(&self, ip: IpAddr) -> u128 {
        let first = self.pool.candidates(None).next().expect("an address");
        number(ip) - number(first.ip)
    }

    fn at(&self, place: u128) -> String {
        let range = self.pool.candidates(None).next().expect("a range").range;
        range.numbered(range.first_number() + 1 + place).to_string()
    }

    /// What an ADD is given, or the code of its error.
    fn add(
        &self,
        container: &str,
        patience: Duration,
        unusable: impl Fn(IpAddr) -> Option<Unusable>,
    ) -> Result<String, u32> {
        self.try_add(container, patience, unusable)
            .map_err(|error| error.code.number())
    }

    fn try_add(
        &self,
        container: &str,
        patience: Duration,
        unusable: impl Fn(IpAddr) -> Option<Unusable>,
    ) -> Result<String, CniError> {
        let owner = Owner::new(container, "eth0");
        let wish = Wish {
            requested: Vec::new(),
            holder: Holder {
                owner: &owner,
                home: None,
            },
            unusable: &unusable,
            patience,
        };
        let store = Store::new(self.folder.path(), "net");
        let mut locked = store.lock().expect("the lock");
        let pools = std::slice::from_ref(&self.pool);
        match allocate(&mut locked, pools, wish, &mut Vec::new()) {
            Ok(ips) => Ok(ips[0].address.addr().to_string()),
            Err(error) => Err(CniError::from(error)),
        }
    }
}

fn each_family(test: impl Fn(Fixture)) {
    for subnet in ["10.0.0.0/15", "fd00::/64"] {
        test(Fixture::new(subnet));
    }
}

/// The folder of leases was lost, and a route is there for each of the containers that live.
#[test]
fn whatever_leads_elsewhere_alone_is_passed_over() {
    each_family(|fixture| {
        let unusable = |ip| (fixture.place(ip) < LED).then_some(Unusable::Alone);
        let given = fixture.add("c1", PATIENCE * 30, unusable);
        assert_eq!(given, Ok(fixture.at(LED)));
        let next = fixture.add("c2", PATIENCE, unusable);
        assert_eq!(next, Ok(fixture.at(LED + 1)), "nobody begins anew");
    });
}

#[test]
fn where_it_takes_too_long_the_next_call_goes_on() {
    each_family(|fixture| {
        let unusable = |ip| (fixture.place(ip) < 3).then_some(Unusable::Alone);
        for _ in 0..3 {
            assert_eq!(fixture.add("c1", Duration::ZERO, unusable), Err(11));
        }
        let given = fixture.add("c1", Duration::ZERO, unusable);
        assert_eq!(given, Ok(fixture.at(3)));
    });
}

#[test]
fn of_a_range_that_the_node_has_a_part_is_tried() {
    each_family(|fixture| {
        let asked = Cell::new(0);
        let most = 2 * MANY as u128;
        let unusable = |ip| {
            asked.set(asked.get() + 1);
            (fixture.place(ip) < most).then_some(Unusable::WithRange)
        };
        for call in 1..=2 {
            assert_eq!(fixture.add("c1", PATIENCE, unusable), Err(7));
            assert_eq!(asked.get(), call * MANY);
        }
        let given = fixture.add("c1", PATIENCE, unusable);
        assert_eq!(given, Ok(fixture.at(most)));
    });
}

#[test]
fn a_range_without_a_free_address_names_one_of_no_use() {
    let fixture = Fixture::new("10.0.0.0/29");
    let outcome = fixture.try_add("c1", PATIENCE, |_| Some(Unusable::Alone));
    let error = outcome.expect_err("all are led");
    assert_eq!(error.code.number(), 11);
    assert!(
        error.msg.contains("10.0.0.6 is the node's own or leads"),
        "{error}"
    );
}
