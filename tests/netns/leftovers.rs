//! Nothing stays behind: not after DEL, not after a failure, not after the plugin was killed.

use std::{
    collections::BTreeSet,
    ops::Range,
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::Duration,
};

use rstest::rstest;
use serde_json::json;
use underpass_tests::{
    capture::Capture,
    counter::Registry,
    frame,
    leak::Traces,
    prelude::*,
    runtime::{Call, Conf},
    traffic::{SILENCE, raw::RawLink},
    world::World,
};

/// A node on which everything that is loaded once is loaded.
fn warm() -> Result<(Lab, Traces)> {
    warmed(Lab::new()?)
}

fn warmed(lab: Lab) -> Result<(Lab, Traces)> {
    lab.pod("first")?.del()?;
    let traces = Traces::of(&lab.node)?;
    ensure!(traces.leases.is_empty(), "{traces:#?}");
    ensure!(traces.registry == Registry::default(), "{traces:#?}");
    Ok((lab, traces))
}

#[test]
fn two_hundred_adds_and_dels() -> Result<()> {
    needs_root!();
    let (lab, before) = warm()?;
    let worker = |name: &str| -> Result<()> {
        let netns = lab.node.netns().sibling(name)?;
        for _ in 0..50 {
            Pod::add_to(&lab.node, netns.clone(), &lab.conf())?.del()?;
        }
        Ok(())
    };
    thread::scope(|scope| {
        ["a", "b", "c", "d"]
            .map(|name| scope.spawn(move || worker(name)))
            .into_iter()
            .try_for_each(|thread| thread.join().expect("a worker does not panic"))
    })?;
    before.expect_same(&lab.node)
}

#[rstest]
fn del_without_namespace(#[values("empty", "gone", "unlinked")] netns: &str) -> Result<()> {
    needs_root!();
    let (lab, before) = warm()?;
    let pod = lab.pod("a")?;
    let mut call = pod.call("DEL");
    match netns {
        "empty" => call = call.env("CNI_NETNS", ""),
        "unlinked" => pod.netns().unlink()?,
        // The namespace itself vanishes, and the kernel takes the veth away.
        _ => pod.netns().delete_link(Pod::IFNAME)?,
    }
    for _ in 0..2 {
        call.run(&lab.node)?.silence()?;
    }
    pod.abandon();
    before.expect_same(&lab.node)
}

#[test]
fn del_of_what_never_was() -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    let call = Call::new("DEL").attachment("nobody", "/run/netns/nowhere", "eth0");
    call.conf(&lab.conf()).run(&lab.node)?.silence()?;
    let (lab, before) = warm()?;
    let kept = lab.pod("kept")?;
    let during = Traces::of(&lab.node)?;
    // The same container in another network is another attachment.
    let other = lab.conf().with("name", "othernet");
    kept.call("DEL").conf(&other).run(&lab.node)?.silence()?;
    during.expect_same(&lab.node)?;
    kept.del()?;
    before.expect_same(&lab.node)
}

#[rstest]
fn a_failed_add(
    #[values("name taken", "no namespace", "pool empty", "mtu too small")] why: &str,
) -> Result<()> {
    needs_root!();
    let (lab, before) = warm()?;
    let netns = lab.node.netns().sibling("a")?;
    let mut conf = lab.conf();
    match why {
        "name taken" => netns.rtnl(|rtnl| rtnl.add_veth("eth0", 1500, "taken", None))?,
        "no namespace" => netns.unlink()?,
        "pool empty" => {
            // The second range has no address left after the gateway's: the first must be given back.
            conf = conf.with_ipam(
                "ranges",
                json!([
                    [{ "subnet": "10.88.0.0/24" }],
                    [{ "subnet": "10.89.0.0/24", "rangeStart": "10.89.0.1", "rangeEnd": "10.89.0.1" }]
                ]),
            );
        }
        // The kernel has no IPv6 on a link with an MTU below 1280.
        _ => conf = conf.with("mtu", 1000),
    }
    let call = Call::new("ADD")
        .attachment("a", &netns.path().display().to_string(), "eth0")
        .conf(&conf);
    let error = call.run(&lab.node)?.error()?;
    ensure!(!error.msg.is_empty(), "{error}");
    if why == "name taken" {
        netns.ip_json(&["link", "show", "dev", "eth0"])?;
    }
    before.expect_same(&lab.node)
}

#[test]
fn a_kill_in_the_middle_of_an_add() -> Result<()> {
    needs_root!();
    let (lab, before) = warm()?;
    let [netns, witness] = ["a", "witness"].map(|name| lab.node.netns().sibling(name));
    let (netns, witness) = (netns?, witness?);
    let mut killed = 0;
    for step in 0..30 {
        killed += usize::from(kill_add(&lab, &netns, Duration::from_micros(300 * step))?);
        Pod::add_to(&lab.node, witness.clone(), &lab.conf())?.del()?;
    }
    ensure!(killed > 0, "no ADD was slow enough to be killed");
    before.expect_same(&lab.node)
}

#[test]
fn a_kill_in_the_middle_of_the_first_load() -> Result<()> {
    needs_root!();
    let (_, clean) = warmed(Lab::unloaded()?)?;
    for delay in [3, 10, 20, 40, 80] {
        let lab = Lab::unloaded()?;
        let netns = lab.node.netns().sibling("a")?;
        kill_add(&lab, &netns, Duration::from_millis(delay))?;
        let pod = lab.pod("b")?;
        ping::ping(pod.netns(), V4.remote())?;
        pod.del()?;
        let now = Traces::of(&lab.node)?;
        ensure!(now.registry == clean.registry, "{delay} ms: {now:#?}");
        let left: BTreeSet<_> = now.pins.difference(&clean.pins).collect();
        ensure!(
            left.is_empty(),
            "{delay} ms: pins were left behind: {left:?}"
        );
        ensure!(
            now.pins == clean.pins,
            "{delay} ms: pins are missing: {now:#?}"
        );
        ensure!(now.leases.is_empty(), "{delay} ms: {now:#?}");
    }
    Ok(())
}

/// Kills an ADD after a while, then DELs: whether it was killed before its end.
fn kill_add(lab: &Lab, netns: &underpass_tests::netns::Netns, delay: Duration) -> Result<bool> {
    let path = netns.path().display().to_string();
    let conf: Conf = lab.conf();
    let add = Call::new("ADD").attachment("a", &path, "eth0").conf(&conf);
    let killed = lab
        .node
        .netns()
        .kill_after(&mut add.command(), add.input(), delay)?;
    Call::new("DEL")
        .attachment("a", &path, "eth0")
        .conf(&conf)
        .run(&lab.node)?
        .silence()?;
    Ok(killed)
}

/// What a container has sent waits for the uplink's next hop to be resolved, and the container goes before it is. It arrives if it may show who has sent it.
#[rstest]
fn what_waits_for_a_next_hop_does_not_show_who_has_gone(
    #[values(V4, V6)] family: Family,
    #[values(true, false)] masqueraded: bool,
    #[values("learned", "off")] bypass: &str,
) -> Result<()> {
    /// Of which the second is one of the node's as well.
    const PORTS: [u16; 2] = [443, 8443];
    const SENT: Range<u16> = 2000..2010;
    needs_root!();
    let lab = Lab::new()?;
    let _serving = lab.pod_with("b", &lab.conf().with_host_port(PORTS[1], 443))?;
    let conf = lab.conf().with("ipMasq", masqueraded);
    let pod = lab.pod_with("a", &conf.with("bypass", bypass))?;
    let own = pod.ip(family);
    let node = lab.node.netns();
    let next_hop = family.gateway();
    let folder = match family {
        V4 => "net/ipv4/neigh",
        V6 => "net/ipv6/neigh",
    };
    let mac = frame::mac_text(lab.world.netns().mac(World::LINK)?);
    let uplink = Node::UPLINK;
    let neighbour = |verb: &str| {
        let line = format!("neighbour {verb} {next_hop} dev {uplink} lladdr {mac}");
        node.ip(&[line])
    };
    let arrived = Capture::start(lab.world.netns(), World::LINK)?;
    let link = RawLink::open(pod.netns(), Pod::IFNAME)?;
    let ends = pod.ends(family.remote())?;
    // Nobody answers who asks for it.
    node.set_sysctl(&format!("{folder}/{uplink}/mcast_solicit"), "1000")?;
    lab.world.netns().nft(
        "table netdev deaf {
            chain heard {
                type filter hook ingress device eth0 priority 0;
                meta protocol arp drop
                icmpv6 type nd-neighbor-solicit drop
            }
        }",
    )?;
    neighbour("replace")?;
    neighbour("delete")?;
    for port in SENT {
        for to in PORTS {
            link.send(&ends.udp(port, to, b"not yet"))?;
        }
    }
    thread::sleep(Duration::from_millis(50));
    pod.del()?;
    neighbour("replace")?;
    thread::sleep(SILENCE / 2);
    let shown = arrived.addresses();
    let shown = shown.iter().filter(|&&source| source == own).count();
    let expected = if masqueraded {
        0
    } else {
        SENT.len() * PORTS.len()
    };
    ensure!(shown == expected, "{shown} packets came from {own}");
    Ok(())
}

/// While a container goes, what it sends goes out as it did before, or not at all.
#[rstest]
fn a_container_that_goes_does_not_show_its_address(
    #[values(V4, V6)] family: Family,
    #[values("learned", "off")] bypass: &str,
) -> Result<()> {
    const ROUNDS: usize = 10;
    const PORT: u16 = 443;
    needs_root!();
    let lab = Lab::new()?;
    let conf = lab.conf().with("bypass", bypass);
    let arrived = Capture::start(lab.world.netns(), World::LINK)?;
    for round in 0..ROUNDS {
        let pod = lab.pod_with(&format!("a{round}"), &conf)?;
        let own = pod.ip(family);
        let ends = pod.ends(family.remote())?;
        let link = RawLink::open(pod.netns(), Pod::IFNAME)?;
        let stop = AtomicBool::new(false);
        thread::scope(|scope| {
            scope.spawn(|| {
                let mut port = 0;
                // Until its device is gone, flows that are known and new ones.
                while !stop.load(Ordering::Relaxed)
                    && link
                        .send(&ends.udp(2000 + port % 50, PORT, b"still here"))
                        .is_ok()
                {
                    port += 1;
                }
            });
            thread::sleep(Duration::from_millis(30));
            let gone = pod.del();
            stop.store(true, Ordering::Relaxed);
            gone
        })?;
        let sources = arrived.addresses();
        ensure!(
            sources.contains(&family.node()),
            "nothing arrived in round {round}"
        );
        let shown = sources.iter().filter(|&&source| source == own).count();
        ensure!(
            shown == 0,
            "{shown} packets came from {own} in round {round}"
        );
    }
    Ok(())
}
