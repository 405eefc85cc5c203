//! Many calls at the same time, the first ADD after boot among them.

use std::{
    collections::BTreeSet,
    env,
    net::IpAddr,
    sync::{
        Barrier, Mutex,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use rstest::rstest;
use serde_json::Value;
use underpass_abi::map;
use underpass_tests::{
    counter::{Registry, pins},
    leak::Traces,
    netns::Netns,
    patience,
    prelude::*,
    runtime::{Call, Conf},
};

/// How many containers come at once, on a machine that is not slow.
const CROWD: usize = 200;

/// How long they come and go after that, in seconds.
const SECONDS: &str = "UNDERPASS_CROWD_SECONDS";
/// Unless told otherwise.
const SHORT: Duration = Duration::from_secs(5);
/// How many do so at a time.
const WORKERS: usize = 8;

/// The first host port of the crowd; each has its own.
const PORT: u16 = 20_000;

/// Nothing is loaded, and all come at once; all go at once; then some come and go for a while. No call fails, nobody has an address that
/// another one has, and nothing is left but what is loaded once.
#[test]
fn two_hundred_at_once_on_a_cold_node() -> Result<()> {
    needs_root!();
    let lab = Lab::unloaded()?;
    // What the first ADD switches on stays, and gives the uplink routes to addresses of routers.
    for key in ["net/ipv4/ip_forward", "net/ipv6/conf/all/forwarding"] {
        lab.node.netns().set_sysctl(key, "1")?;
    }
    let before = Traces::of(&lab.node)?;
    let crowd = CROWD / usize::try_from(patience::factor())?;
    let members = (0..crowd)
        .map(|number| Member::new(&lab, number))
        .collect::<Result<Vec<_>>>()?;

    let results = at_once(&members, |member| {
        member.call("ADD").run(&lab.node)?.result()
    })?;
    let mut addresses = BTreeSet::new();
    for (member, result) in members.iter().zip(&results) {
        for address in addresses_of(result)? {
            ensure!(
                addresses.insert(address),
                "{} has {address} as well",
                member.name()
            );
        }
    }
    ensure!(addresses.len() == 2 * crowd, "{}", addresses.len());
    let registry = Registry::read(&lab.node)?;
    ensure!(registry.owners.len() == crowd && registry.ports.len() == 4 * crowd);
    at_once(&members, |member| {
        let number = member.number;
        let conf = member
            .conf
            .clone()
            .with("prevResult", results[number].clone());
        member.call("CHECK").conf(&conf).run(&lab.node)?.silence()
    })?;
    for member in members.iter().step_by(20) {
        for family in Family::BOTH {
            ping::ping(&member.netns, family.remote())?;
        }
    }
    at_once(&members, |member| {
        member.call("DEL").run(&lab.node)?.silence()
    })?;
    is_as_loaded(&lab, &before)?;

    come_and_go(&lab, &members[..WORKERS])?;
    is_as_loaded(&lab, &before)
}

/// No list of the node's addresses is made undisturbed where they change all the time. An ADD that needs one goes on: the address that it
/// is about is in every list.
#[rstest]
fn an_add_on_a_node_that_never_rests(#[values(V4, V6)] family: Family) -> Result<()> {
    /// More than the kernel lists with one answer.
    const ADDRESSES: u16 = 3000;
    const ADDS: usize = 10;
    needs_root!();
    let lab = Lab::new()?;
    let address = |number: u16| -> IpAddr {
        let [high, low] = number.to_be_bytes();
        match family {
            V4 => [203, 0, high, low].into(),
            V6 => [0x2001, 0xdb8, 0x99, 0, 0, 0, 0, number].into(),
        }
    };
    let bits = family.host_bits();
    let lines: Vec<String> = (1..=ADDRESSES)
        .map(|number| format!("address add {}/{bits} dev lo", address(number)))
        .collect();
    lab.node.netns().ip(&lines)?;
    let conf = lab.conf().with("masqueradeAddress", address(1).to_string());
    let is_over = AtomicBool::new(false);
    thread::scope(|scope| {
        let restless = scope.spawn(|| {
            lab.node.netns().rtnl(|rtnl| {
                while !is_over.load(Ordering::Relaxed) {
                    rtnl.add_address("lo", address(0), bits)?;
                    rtnl.delete_address("lo", address(0), bits)?;
                }
                Ok(())
            })
        });
        let adds = (0..ADDS).try_for_each(|number| {
            let pod = lab.pod_with(&format!("pod{number}"), &conf)?;
            pod.del()
        });
        is_over.store(true, Ordering::Relaxed);
        restless.join().expect("no panic")?;
        adds
    })
}

/// Each comes and goes by itself for a while.
fn come_and_go(lab: &Lab, members: &[Member]) -> Result<()> {
    let time = match env::var(SECONDS) {
        Ok(text) => Duration::from_secs(
            text.parse()
                .with_context(|| format!("{SECONDS} is {text:?}: give a number of seconds"))?,
        ),
        Err(_) => SHORT,
    };
    let present = Mutex::new(BTreeSet::new());
    let end = Instant::now() + time;
    let rounds = at_once(members, |member| {
        let mut rounds = 0;
        while Instant::now() < end {
            let result = member.call("ADD").run(&lab.node)?.result()?;
            let addresses = addresses_of(&result)?;
            for address in &addresses {
                let is_new = present.lock().expect("no panic").insert(*address);
                ensure!(is_new, "{} has {address} as well", member.name());
            }
            let conf = member.conf.clone().with("prevResult", result);
            member.call("CHECK").conf(&conf).run(&lab.node)?.silence()?;
            // From the DEL on they are anybody's.
            present
                .lock()
                .expect("no panic")
                .retain(|address| !addresses.contains(address));
            member.call("DEL").run(&lab.node)?.silence()?;
            rounds += 1;
        }
        Ok(rounds)
    })?;
    ensure!(!rounds.contains(&0), "{rounds:?}");
    anstream::println!("{} containers came and went", rounds.iter().sum::<usize>());
    Ok(())
}

/// One of the crowd.
struct Member {
    number: usize,
    netns: Netns,
    conf: Conf,
}

impl Member {
    fn new(lab: &Lab, number: usize) -> Result<Self> {
        let port = PORT + u16::try_from(number)?;
        Ok(Self {
            number,
            netns: lab.node.netns().sibling(&format!("member{number}"))?,
            conf: lab.conf().with_host_port(port, 80),
        })
    }

    fn name(&self) -> &str {
        self.netns.name()
    }

    fn call(&self, verb: &str) -> Call {
        let path = self.netns.path().display().to_string();
        Call::new(verb)
            .attachment(self.name(), &path, Pod::IFNAME)
            .conf(&self.conf)
    }
}

/// Has each do it on a thread of its own, all from the same moment on: what each returned, in their order.
fn at_once<T: Send>(
    members: &[Member],
    work: impl Fn(&Member) -> Result<T> + Sync,
) -> Result<Vec<T>> {
    let start = Barrier::new(members.len());
    thread::scope(|scope| {
        let threads: Vec<_> = members
            .iter()
            .map(|member| {
                let (start, work) = (&start, &work);
                scope.spawn(move || {
                    start.wait();
                    work(member).with_context(|| member.name().to_owned())
                })
            })
            .collect();
        threads
            .into_iter()
            .map(|thread| thread.join().expect("no panic"))
            .collect()
    })
}

fn addresses_of(result: &Value) -> Result<Vec<IpAddr>> {
    let ips = result["ips"].as_array().context("a result has addresses")?;
    ips.iter()
        .map(|ip| {
            let text = ip["address"].as_str().unwrap_or_default();
            let address = text.split('/').next().unwrap_or_default();
            address
                .parse()
                .with_context(|| format!("{text:?} is an address"))
        })
        .collect()
}

/// Nothing of a container is there, and all that a node with host ports needs is loaded, once.
fn is_as_loaded(lab: &Lab, before: &Traces) -> Result<()> {
    let now = Traces::of(&lab.node)?;
    ensure!(now.registry == Registry::default(), "{now:#?}");
    let folder = pins(&lab.node);
    let programs = map::USUAL_PROGRAMS.iter().chain([&map::FROM_HOST]);
    let programs = programs.map(|name| folder.join("programs").join(name));
    let maps = map::MAPS
        .iter()
        .map(|map| folder.join("maps").join(map.to_string()));
    let expected = Traces {
        pins: maps.chain(programs).chain([folder.join("home")]).collect(),
        registry: Registry::default(),
        ..before.clone()
    };
    expected.expect_same(&lab.node)
}
