use proptest::prelude::*;

use super::*;

fn pool(subnets: &[&str]) -> Pool {
    let bounds: Vec<_> = subnets
        .iter()
        .map(|subnet| Bounds {
            subnet: subnet.parse().ok(),
            ..Bounds::default()
        })
        .collect();
    Pool::new(&bounds).expect("a valid pool")
}

fn ip(text: &str) -> IpAddr {
    text.parse().expect("an address")
}

#[test]
fn the_reference_table() {
    let two: &[&str] = &["10.0.0.0/30", "10.0.1.0/30"];
    let three: &[&str] = &["10.0.0.0/30", "10.0.1.0/30", "10.0.2.0/30"];
    let cases: [(&[&str], &[&str], &str, &str); 12] = [
        (&["10.0.0.0/29"], &[], "", "10.0.0.2"),
        (&["2001:db8:1::/64"], &[], "", "2001:db8:1::2"),
        (&["10.0.0.0/30"], &[], "", "10.0.0.2"),
        (&["10.0.0.0/29"], &["10.0.0.2"], "", "10.0.0.3"),
        (&["10.0.0.0/29"], &[], "10.0.0.5", "10.0.0.6"),
        (
            &["10.0.0.0/29"],
            &["10.0.0.4", "10.0.0.5"],
            "10.0.0.3",
            "10.0.0.6",
        ),
        (&["10.0.0.0/29"], &["10.0.0.6"], "10.0.0.5", "10.0.0.2"),
        (&["10.0.0.0/29"], &["10.0.0.2"], "10.0.0.128", "10.0.0.3"),
        (
            &["10.0.0.0/29"],
            &["10.0.0.2", "10.0.0.4", "10.0.0.5", "10.0.0.6"],
            "10.0.0.3",
            "10.0.0.3",
        ),
        (two, &[], "", "10.0.0.2"),
        (two, &[], "10.0.0.2", "10.0.1.2"),
        (three, &[], "10.0.2.2", "10.0.0.2"),
    ];
    for (subnets, busy, last, next) in cases {
        let busy: Vec<_> = busy.iter().map(|text| ip(text)).collect();
        let pool = pool(subnets);
        let found = pool
            .candidates(last.parse().ok())
            .find(|candidate| !busy.contains(&candidate.ip));
        assert_eq!(
            found.map(|candidate| candidate.ip),
            Some(ip(next)),
            "{pool} after {last:?}"
        );
    }
    assert_eq!(pool(two).candidates(None).count(), 2);
    assert_eq!(pool(two).to_string(), "10.0.0.1-10.0.0.2,10.0.1.1-10.0.1.2");
}

#[test]
fn sets_that_make_no_pool() {
    let refused = |bounds: &[Bounds]| Pool::new(bounds).expect_err("refused").to_string();
    let subnet = |text: &str| Bounds {
        subnet: text.parse().ok(),
        ..Bounds::default()
    };
    assert_eq!(refused(&[]), "empty range set");
    assert_eq!(
        refused(&[subnet("10.0.0.0/24"), subnet("2001:db8::/64")]),
        "mixed address families"
    );
    assert_eq!(
        refused(&[
            subnet("10.0.0.0/24"),
            subnet("10.0.1.0/24"),
            subnet("10.0.0.128/25")
        ]),
        "subnets 10.0.0.1-10.0.0.254 and 10.0.0.129-10.0.0.254 overlap"
    );
    let part = |start: &str, end: &str| Bounds {
        start: start.parse().ok(),
        end: end.parse().ok(),
        ..subnet("10.0.0.0/24")
    };
    assert!(Pool::new(&[part("10.0.0.2", "10.0.0.9"), part("10.0.0.10", "10.0.0.20")]).is_ok());
    assert!(Pool::new(&[part("10.0.0.2", "10.0.0.9"), part("10.0.0.9", "10.0.0.20")]).is_err());
}

/// The order as a cursor that moves one address at a time: the plainest way to say it.
fn walk(ranges: &[(u32, u32, u32)], last: Option<u32>) -> Vec<u32> {
    let inside = |ip: u32| {
        ranges
            .iter()
            .position(|(start, end, _)| (*start..=*end).contains(&ip))
    };
    let (mut range, mut cursor) =
        match last.and_then(|last| inside(last).map(|range| (range, last))) {
            Some((range, last)) => (range, Some(last)),
            None => (0, None),
        };
    let mut order = Vec::new();
    let mut first = None;
    loop {
        let next = match cursor {
            None => ranges[range].0,
            Some(at) if at == ranges[range].1 => {
                range = (range + 1) % ranges.len();
                ranges[range].0
            }
            Some(at) => at + 1,
        };
        if first == Some(next) {
            return order;
        }
        first = first.or(Some(next));
        cursor = Some(next);
        if next != ranges[range].2 {
            order.push(next);
        }
    }
}

prop_compose! {
    /// Up to four ranges, each in a /27 of its own, with any bounds and any gateway inside or outside of them.
    fn ranges()(parts in prop::collection::vec((0..32_u32, 0..32_u32, 0..32_u32), 1..5)) -> Vec<(u32, u32, u32)> {
        let part = |(index, (a, b, gateway)): (usize, &(u32, u32, u32))| {
            let base = 0x0a00_0000 + 32 * u32::try_from(index).expect("at most four");
            (base + a.min(b), base + a.max(b), base + gateway)
        };
        parts.iter().enumerate().map(part).collect()
    }
}

proptest! {
    #[test]
    fn candidates_come_in_the_order_of_a_walk(ranges in ranges(), last in prop::option::of(0..160_u32)) {
        let v4 = |ip: u32| IpAddr::V4(ip.into());
        let bounds: Vec<_> = ranges
            .iter()
            .map(|(start, end, gateway)| Bounds {
                subnet: IpNet::new(v4(start & !31), 27).ok(),
                start: Some(v4(*start)),
                end: Some(v4(*end)),
                gateway: Some(v4(*gateway)),
            })
            .collect();
        let pool = Pool::new(&bounds).expect("each range has its own subnet");
        let last = last.map(|offset| 0x0a00_0000 + offset);
        let expected: Vec<_> = walk(&ranges, last).into_iter().map(v4).collect();
        let found: Vec<_> = pool.candidates(last.map(v4)).map(|candidate| candidate.ip).collect();
        prop_assert_eq!(found.len() as u128, pool.capacity());
        prop_assert_eq!(found, expected);
    }
}
