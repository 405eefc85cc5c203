//! Others on the node who translate to its address: Docker, podman, libvirt, kube-proxy, by netfilter. A port that their connections have is not given
//! to a pod's, and the other way round.

use std::{
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    thread,
};

use rstest::rstest;
use rtnetlink::LinkBridge;
use underpass_tests::{
    netfilter::{
        Transport,
        kube_proxy::{Mode, Policy, Service},
    },
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
    Udp(udp::Client, SocketAddr),
}

impl Talk {
    fn begin(netns: &Netns, by: &str, from: SocketAddr, to: SocketAddr) -> Result<Self> {
        Ok(if by == "TCP" {
            Self::Tcp(tcp::Client::connect_between(netns, from, to)?)
        } else {
            Self::Udp(udp::Client::open_bound(netns, from)?, to)
        })
    }

    /// Says something, and hears as whom it was seen. Content that is another's, or an answer to another, fails.
    fn go_on(&mut self) -> Result<SocketAddr> {
        match self {
            Self::Tcp(client) => client.chat(2),
            Self::Udp(client, to) => Ok(client.chat(*to, 2)?.seen),
        }
    }
}

/// Who talks to the server in the world: from where, at which address that leads there.
struct Side<'a> {
    netns: &'a Netns,
    from: IpAddr,
    to: SocketAddr,
}

/// Both talk from the same ports, one after the other, then in turns: each is seen as the node, and as the same all the time.
fn share(by: &str, first: u16, flows: u16, sides: [Side<'_>; 2]) -> Result<()> {
    let mut talks = Vec::new();
    for Side { netns, from, to } in sides {
        for port in first..first + flows {
            let begun = || -> Result<_> {
                let mut talk = Talk::begin(netns, by, SocketAddr::new(from, port), to)?;
                let seen = talk.go_on()?;
                Ok((talk, seen))
            };
            let (talk, seen) =
                begun().with_context(|| format!("{} from port {port}", netns.name()))?;
            let node = Family::of(to.ip()).node();
            ensure!(seen.ip() == node, "seen {seen}");
            talks.push((netns.name(), port, talk, seen));
        }
    }
    for round in 0..3 {
        for (name, port, talk, seen) in &mut talks {
            let now = talk
                .go_on()
                .with_context(|| format!("{name} from port {port}, round {round}"))?;
            ensure!(now == *seen, "{name} was {seen} and is {now}");
        }
    }
    Ok(())
}

/// Connection tracking keeps the bindings of others, and only their own packets keep it from forgetting them.
fn remember_long(lab: &Lab) -> Result<()> {
    for timer in [
        "tcp_timeout_established",
        "udp_timeout",
        "udp_timeout_stream",
    ] {
        let key = format!("net/netfilter/nf_conntrack_{timer}");
        lab.node.netns().set_sysctl(&key, "120")?;
    }
    Ok(())
}

#[rstest]
fn ports_are_shared_with_netfilter(
    #[values(V4, V6)] family: Family,
    #[values("TCP", "UDP")] by: &str,
    #[values("netfilter", "underpass")] first: &str,
) -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    remember_long(&lab)?;
    let pod = lab.pod("a")?;
    let others = container(&lab)?;
    let to = family.remote_at(PORT);
    let _servers = serve(lab.world.netns(), to)?;
    let [theirs, ours] = [&others, pod.netns()].map(|netns| Side {
        netns,
        from: family.any(),
        to,
    });
    let order = if first == "netfilter" {
        [theirs, ours]
    } else {
        [ours, theirs]
    };
    share(by, FIRST, FLOWS, order)
}

/// A port of the node by which kube-proxy sends to a server on another machine, masqueraded at random: as low ports as the client's, of
/// which there are so few that many are those of the pod's.
#[rstest]
fn ports_are_shared_with_kube_proxy(
    #[values(V4, V6)] family: Family,
    #[values("TCP", "UDP")] by: &str,
    #[values("netfilter", "underpass")] first: &str,
    #[values("world", "pod")] client: &str,
) -> Result<()> {
    /// The first of 424 ports from which netfilter chooses where the client's own is one.
    const LOW: u16 = 600;
    /// How many of them each takes.
    const FLOWS: u16 = 100;
    const NODE_PORT: u16 = 30_443;
    needs_root!();
    let lab = Lab::new()?;
    remember_long(&lab)?;
    let (pod, other) = (lab.pod("a")?, lab.pod("b")?);
    let to = family.remote_at(PORT);
    let _servers = serve(lab.world.netns(), to)?;
    let services = [Transport::Tcp, Transport::Udp].map(|transport| Service {
        name: "elsewhere".to_owned(),
        transport,
        cluster: family.service_at(PORT),
        node_port: Some(NODE_PORT),
        policy: Policy::Cluster,
        endpoints: vec![to],
    });
    lab.firewall.proxy(Mode::Iptables, &services)?;
    let (netns, from) = match client {
        "world" => (lab.world.netns(), family.gateway()),
        _ => (other.netns(), other.ip(family)),
    };
    let theirs = Side {
        netns,
        from,
        to: SocketAddr::new(family.node(), NODE_PORT),
    };
    let ours = Side {
        netns: pod.netns(),
        from: pod.ip(family),
        to,
    };
    let (order, moved) = if first == "netfilter" {
        ([theirs, ours], Counter::PortChanged)
    } else {
        ([ours, theirs], Counter::HostTupleMoved)
    };
    let meter = Meter::start(&lab.node)?;
    share(by, LOW, FLOWS, order)?;
    // That not one of a hundred meets one of the others' happens never.
    meter.expect(moved, 1)?;
    ensure!(meter.read()?.dropped() == 0, "{:?}", meter.read()?);
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
