//! Others on the node who translate to its address: Docker, podman, libvirt, by netfilter. A port that their connections have is not given
//! to a pod's, and the other way round.

use std::{
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    thread,
};

use rstest::rstest;
use rtnetlink::LinkBridge;
use underpass_tests::{
    netns::Netns,
    prelude::*,
    rtnl::Route,
    traffic::{SILENCE, serve},
};

const PORT: u16 = 443;
/// Source ports that both use, from here on.
const FIRST: u16 = 40_000;
/// How many flows each of both has.
const FLOWS: u16 = 50;

/// A container of somebody else's and its bridge's address.
fn addresses(family: Family) -> [IpAddr; 2] {
    [2, 1].map(|last| match family {
        V4 => Ipv4Addr::new(172, 17, 0, last).into(),
        V6 => Ipv6Addr::new(0xfd17, 0, 0, 0, 0, 0, 0, last.into()).into(),
    })
}

/// A container behind a bridge of the node, masqueraded by the rules that Docker makes.
fn container(lab: &Lab) -> Result<Netns> {
    let (node, container) = (lab.node.netns(), lab.node.netns().sibling("others")?);
    node.rtnl(|node| node.add(LinkBridge::new("docker0").up().build()))?;
    node.cable("veth0", &container, "eth0", 1500)?;
    let bridge = node.ifindex("docker0")?;
    node.rtnl(|node| node.set("veth0", |veth| veth.controller(bridge)))?;
    for (family, bits) in [(V4, 24), (V6, 64)] {
        let [own, bridge] = addresses(family);
        node.rtnl(|node| node.add_address("docker0", bridge, bits))?;
        container.rtnl(|container| {
            container.add_address("eth0", own, bits)?;
            container.add_route(Route::default(family).via(bridge))
        })?;
        lab.firewall.load(&format!(
            "add rule inet lab postrouting {} saddr {own} oifname != docker0 masquerade",
            family.nft()
        ))?;
    }
    Ok(container)
}

/// A flow by TCP or UDP.
enum Talk {
    Tcp(tcp::Client),
    Udp(udp::Client),
}

impl Talk {
    fn begin(netns: &Netns, by: &str, family: Family, port: u16) -> Result<Self> {
        Ok(if by == "TCP" {
            Self::Tcp(tcp::Client::connect_from(
                netns,
                port,
                family.remote_at(PORT),
            )?)
        } else {
            Self::Udp(udp::Client::open_at(netns, family, port)?)
        })
    }

    /// Says something, and hears as whom it was seen. Content that is another's, or an answer to another, fails.
    fn go_on(&mut self, family: Family) -> Result<SocketAddr> {
        match self {
            Self::Tcp(client) => client.chat(2),
            Self::Udp(client) => Ok(client.chat(family.remote_at(PORT), 2)?.seen),
        }
    }
}

#[rstest]
fn ports_are_shared_with_netfilter(
    #[values(V4, V6)] family: Family,
    #[values("TCP", "UDP")] by: &str,
    #[values("netfilter", "underpass")] first: &str,
) -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    // Connection tracking keeps the bindings of others, and only their own packets keep it from forgetting them.
    for timer in [
        "tcp_timeout_established",
        "udp_timeout",
        "udp_timeout_stream",
    ] {
        let key = format!("net/netfilter/nf_conntrack_{timer}");
        lab.node.netns().set_sysctl(&key, "120")?;
    }
    let pod = lab.pod("a")?;
    let others = container(&lab)?;
    let _servers = serve(lab.world.netns(), family.remote_at(PORT))?;
    let order = if first == "netfilter" {
        [&others, pod.netns()]
    } else {
        [pod.netns(), &others]
    };
    let mut talks = Vec::new();
    for netns in order {
        for port in FIRST..FIRST + FLOWS {
            let begun = || -> Result<_> {
                let mut talk = Talk::begin(netns, by, family, port)?;
                let seen = talk.go_on(family)?;
                Ok((talk, seen))
            };
            let (talk, seen) =
                begun().with_context(|| format!("{} from port {port}", netns.name()))?;
            ensure!(seen.ip() == family.node(), "seen {seen}");
            talks.push((netns.name(), port, talk, seen));
        }
    }
    for round in 0..3 {
        for (name, port, talk, seen) in &mut talks {
            let now = talk
                .go_on(family)
                .with_context(|| format!("{name} from port {port}, round {round}"))?;
            ensure!(now == *seen, "{name} was {seen} and is {now}");
        }
    }
    Ok(())
}

/// A pod's connection that ends, and the next one from its port, take nothing from others who had to step aside.
#[rstest]
fn who_connects_again_takes_nothing_from_netfilter(#[values(V4, V6)] family: Family) -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    let pod = lab.pod("a")?;
    let others = container(&lab)?;
    let remote = family.remote_at(PORT);
    let _servers = serve(lab.world.netns(), remote)?;
    let mut inside = tcp::Client::connect_from(pod.netns(), FIRST, remote)?;
    inside.chat(3)?;
    let mut other = tcp::Client::connect_from(&others, FIRST, remote)?;
    let seen = other.chat(3)?;
    ensure!(seen.port() != FIRST, "{seen}");
    for round in 0..3 {
        inside.reset()?;
        thread::sleep(SILENCE / 4);
        inside = tcp::Client::connect_from(pod.netns(), FIRST, remote)?;
        inside.chat(3)?;
        let now = other.chat(3).with_context(|| format!("round {round}"))?;
        ensure!(now == seen, "it was {seen} and is {now}");
    }
    Ok(())
}
