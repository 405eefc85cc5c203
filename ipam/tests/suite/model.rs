//! Any sequence of calls, by us and by others, against the plainest model: a map from address to owner.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;

use proptest::prelude::*;

use crate::file_systems::without_hard_links;
use crate::network::{Network, Of, Via};

#[derive(Clone, Debug)]
enum Step {
    Add(u8),
    Del(u8),
    /// Another program leases an address.
    ForeignAdd(u8, u8),
    /// Another program, or an operator, removes a file.
    ForeignDel(u8),
    /// Another program dies between creating and writing.
    ForeignCrash(u8),
}

fn step() -> impl Strategy<Value = Step> {
    let container = 0..6_u8;
    let host = 2..7_u8;
    prop_oneof![
        4 => container.clone().prop_map(Step::Add),
        3 => container.clone().prop_map(Step::Del),
        1 => (container, host.clone()).prop_map(|(container, host)| Step::ForeignAdd(container, host)),
        1 => host.clone().prop_map(Step::ForeignDel),
        1 => host.prop_map(Step::ForeignCrash),
    ]
}

fn name(container: u8) -> String {
    format!("c{container}")
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn calls_do_what_the_model_does(steps in prop::collection::vec(step(), 1..60)) {
        play(steps)?;
    }

    #[test]
    fn calls_without_hard_links_do_what_the_model_does(steps in prop::collection::vec(step(), 1..60)) {
        without_hard_links(libc::EPERM, || play(steps))?;
    }
}

fn play(steps: Vec<Step>) -> Result<(), TestCaseError> {
    // 10.0.0.2 to 10.0.0.6 can be leased.
    let network = Network::with_subnets(&["10.0.0.0/29"]);
    let mut model: BTreeMap<String, String> = BTreeMap::new();
    let mut last = 6_u8;
    for step in steps {
        match step {
            Step::Add(container) => {
                let owner = name(container);
                let outcome = network.add(Via::Library, Of(&owner, "eth0"));
                let held = model.values().any(|other| *other == owner);
                let round = (1..=5).map(|offset| (last - 2 + offset) % 5 + 2);
                let free = round
                    .map(|host| (host, format!("10.0.0.{host}")))
                    .find(|(_, ip)| !model.contains_key(ip));
                match (held, free) {
                    (true, _) => prop_assert!(
                        outcome
                            .expect_err("a duplicate")
                            .1
                            .contains("duplicate allocation")
                    ),
                    (false, None) => prop_assert!(
                        outcome
                            .expect_err("full")
                            .1
                            .contains("no IP addresses available")
                    ),
                    (false, Some((host, ip))) => {
                        prop_assert_eq!(outcome, Ok(vec![ip.clone()]));
                        model.insert(ip, owner);
                        last = host;
                    }
                }
            }
            Step::Del(container) => {
                let owner = name(container);
                network.del(Via::Library, Of(&owner, "eth0"));
                model.retain(|_, other| *other != owner);
            }
            Step::ForeignAdd(container, host) => {
                if let Entry::Vacant(free) = model.entry(format!("10.0.0.{host}")) {
                    network.write(free.key(), &format!("{}\r\neth0", name(container)));
                    free.insert(name(container));
                }
            }
            Step::ForeignDel(host) => {
                let ip = format!("10.0.0.{host}");
                // It may not be there.
                let _ = std::fs::remove_file(network.dir().join(&ip));
                model.remove(&ip);
            }
            Step::ForeignCrash(host) => {
                let ip = format!("10.0.0.{host}");
                if !model.contains_key(&ip) {
                    network.write(&ip, "");
                }
            }
        }
        let leases: BTreeMap<_, _> = network
            .leases()
            .into_iter()
            .filter(|(_, content)| !content.is_empty())
            .collect();
        let expected: BTreeMap<_, _> = model
            .iter()
            .map(|(ip, owner)| (ip.clone(), format!("{owner}\r\neth0")))
            .collect();
        prop_assert_eq!(leases, expected);
    }
    Ok(())
}
