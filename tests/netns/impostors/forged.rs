//! What somebody forges in the name of a client that has a connection, and which connection tracking lets pass: it changes nothing about that
//! connection, and nobody else pays for it.

use std::{
    net::{IpAddr, SocketAddr},
    thread,
};

use rstest::rstest;
use underpass_abi::{counter::Counter, flow::protocol};
use underpass_tests::{
    capture::Capture,
    flow_table,
    frame::{self, Ends},
    netns::Netns,
    prelude::*,
    second::{Kind, Second},
    traffic::{PATIENCE, SILENCE, raw::RawLink},
    wire::Wire,
    world::World,
};

use super::{PORT, SOURCE};

/// Bytes of an exchange.
const MUCH: u64 = 5_000_000;

/// Another container of the node, none of ours, whose forged packets nothing filters.
pub(crate) struct Stranger {
    pub(crate) link: RawLink,
    src_mac: [u8; 6],
    dst_mac: [u8; 6],
    _netns: Netns,
}

impl Stranger {
    pub(crate) fn move_in(lab: &Lab) -> Result<Self> {
        let node = lab.node.netns();
        let netns = node.sibling("others")?;
        node.cable("veth0", &netns, "eth0", 1500)?;
        for device in ["all", "veth0"] {
            node.set_sysctl(&format!("net/ipv4/conf/{device}/rp_filter"), "0")?;
        }
        Ok(Self {
            link: RawLink::open(&netns, "eth0")?,
            src_mac: netns.mac("eth0")?,
            dst_mac: node.mac("veth0")?,
            _netns: netns,
        })
    }

    /// What it forges is from the one to the other.
    pub(crate) const fn ends(&self, src: IpAddr, dst: IpAddr) -> Ends {
        Ends {
            src_mac: self.src_mac,
            dst_mac: self.dst_mac,
            src,
            dst,
        }
    }
}

/// A connection whose packets somebody else on the node imitates.
#[derive(Clone, Copy, Debug)]
enum Imitated {
    /// From the world to a port of the node.
    HostPort,
    /// From a pod to another.
    Direct,
}

/// Others on the node who may forge have a say in a pod's connection as little: what is on the bypass beside a strict connection tracking
/// stays there, as that would not know it again.
#[rstest]
fn an_opening_forged_by_others_stalls_no_connection(
    #[values(V4, V6)] family: Family,
    #[values(Imitated::HostPort, Imitated::Direct)] imitated: Imitated,
) -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    let stranger = Stranger::move_in(&lab)?;
    let pod = lab.pod_with("a", &lab.conf().with_host_port(PORT, PORT))?;
    let other = lab.pod("b")?;
    let (to, from, src) = match imitated {
        Imitated::HostPort => {
            let served = SocketAddr::new(family.node(), PORT);
            (served, lab.world.netns(), family.gateway())
        }
        Imitated::Direct => (pod.at(family, PORT), other.netns(), other.ip(family)),
    };
    let _server = tcp::Server::start(pod.netns(), family.port(PORT))?;
    let mut client = tcp::Client::connect_from(from, SOURCE, to)?;
    client.exchange(MUCH, MUCH)?;
    let forged = stranger.ends(src, pod.ip(family));
    let arrived = Capture::start(pod.netns(), Pod::IFNAME)?;
    let opening = forged.syn(SOURCE, PORT);
    stranger.link.send(&opening)?;
    // Ports and sequence number.
    let transport = 14 + family.header_len()..14 + family.header_len() + 8;
    let is_forged = |bytes: &[u8]| bytes.get(transport.clone()) == opening.get(transport.clone());
    ensure!(
        arrived.wait_for(PATIENCE, is_forged).is_some(),
        "it did not arrive"
    );
    client.goes_on(MUCH, SILENCE / 2)
}

/// It came from the world straight to a masqueraded pod: the answers keep their source, whoever sends what in the client's name.
#[rstest]
fn a_forged_datagram_has_no_answer_masqueraded(#[values(V4, V6)] family: Family) -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    lab.world.route_pods()?;
    let stranger = Stranger::move_in(&lab)?;
    let pod = lab.pod("a")?;
    let at = pod.at(family, PORT);
    let _server = udp::Server::start(pod.netns(), at)?;
    let mut client = udp::Client::open_at(lab.world.netns(), family, SOURCE)?;
    client.chat(at, 10)?;
    let arrived = Capture::start(pod.netns(), Pod::IFNAME)?;
    let left = Capture::start(lab.world.netns(), World::LINK)?;
    let forged = stranger.ends(family.gateway(), pod.ip(family));
    stranger.link.send(&forged.udp(SOURCE, PORT, b"forged"))?;
    let has_come = arrived.wait_for(PATIENCE, |bytes| bytes.ends_with(b"forged"));
    ensure!(has_come.is_some(), "it did not arrive");
    thread::sleep(SILENCE / 4);
    client.chat(at, 5)?;
    let seen = left.frames();
    let sources: Vec<IpAddr> = seen
        .iter()
        .filter_map(|bytes| frame::read(bytes))
        .filter(|packet| packet.protocol == protocol::UDP && packet.dst == family.gateway())
        .map(|packet| packet.src)
        .collect();
    ensure!(
        !sources.is_empty() && sources.iter().all(|src| *src == pod.ip(family)),
        "{sources:?}"
    );
    Ok(())
}

/// What others send in a pod's name is not at its expense.
#[rstest]
fn others_do_not_use_up_a_pods_quota(#[values(V4, V6)] family: Family) -> Result<()> {
    const LIMIT: u16 = 8;
    needs_root!();
    let lab = Lab::new()?;
    let stranger = Stranger::move_in(&lab)?;
    let pod = lab.pod_with("a", &lab.conf().with("maxHalfOpenFlows", LIMIT))?;
    let remote = family.remote_at(PORT);
    let _server = tcp::Server::start(lab.world.netns(), remote)?;
    // Nobody has this address.
    let silent = match family {
        V4 => "203.0.113.77".parse()?,
        V6 => "2001:db8:77::77".parse()?,
    };
    let forged = stranger.ends(pod.ip(family), silent);
    let meter = Meter::start(&lab.node)?;
    for port in 0..4 * LIMIT {
        stranger.link.send(&forged.syn(SOURCE + port, PORT))?;
    }
    // They are masqueraded as any, and not without end.
    meter.expect(Counter::Masqueraded, u64::from(LIMIT))?;
    tcp::visit(pod.netns(), remote)?;
    Ok(())
}

/// What somebody sends in the name of a client that has a connection: its receiver refuses it.
#[derive(Clone, Copy)]
enum Forged {
    /// A SYN with an option, or with an extension header.
    OddOpening,
    /// An RST in nobody's window, and a SYN right behind it.
    ResetAndOpening,
    /// A SYN by an uplink that filters no reverse paths, as the flow's own does.
    OpeningElsewhere,
}

/// Puts four bytes of IPv4 options into a frame, or an IPv6 header of eight bytes of destination options, that say nothing.
fn with_options(family: Family, frame: &[u8]) -> Vec<u8> {
    let (mut head, rest) = (
        frame[..14 + family.header_len()].to_vec(),
        &frame[14 + family.header_len()..],
    );
    let ip = &mut head[14..];
    let options: &[u8] = match family {
        V4 => {
            ip[0] += 1;
            ip[3] += 4;
            ip[10..12].fill(0);
            let words = ip.chunks(2).chain([&[1, 1][..]; 2]);
            let sum: u32 = words
                .map(|word| u32::from(u16::from_be_bytes([word[0], word[1]])))
                .sum();
            let sum = !u16::try_from((sum & 0xffff) + (sum >> 16)).unwrap_or(0);
            ip[10..12].copy_from_slice(&sum.to_be_bytes());
            &[1; 4]
        }
        V6 => {
            ip[5] += 8;
            ip[6] = 60;
            &[protocol::TCP, 0, 1, 4, 0, 0, 0, 0]
        }
    };
    [&head, options, rest].concat()
}

/// Whoever can send in a client's name from the world, on its link for instance, needs no sequence number for these.
#[rstest]
fn what_the_world_forges_stalls_no_connection(
    #[values(V4, V6)] family: Family,
    #[values(Imitated::HostPort, Imitated::Direct)] imitated: Imitated,
    #[values(Forged::OddOpening, Forged::ResetAndOpening, Forged::OpeningElsewhere)] forged: Forged,
) -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    lab.world.route_pods()?;
    let _second = Second::connect(&lab, Kind::Wire(Wire::Ethernet))?;
    for (device, filter) in [("all", "0"), (Node::UPLINK, "1"), (Second::LINK, "0")] {
        let key = format!("net/ipv4/conf/{device}/rp_filter");
        lab.node.netns().set_sysctl(&key, filter)?;
    }
    let pod = lab.pod_with("a", &lab.conf().with_host_port(PORT, PORT))?;
    let to = match imitated {
        Imitated::HostPort => SocketAddr::new(family.node(), PORT),
        Imitated::Direct => pod.at(family, PORT),
    };
    let _server = tcp::Server::start(pod.netns(), family.port(PORT))?;
    let mut client = tcp::Client::connect_from(lab.world.netns(), SOURCE, to)?;
    client.exchange(MUCH, MUCH)?;
    let ends = lab.ends_from_world(family.gateway(), to.ip())?;
    let opening = ends.syn(SOURCE, PORT);
    let arrived = Capture::start(pod.netns(), Pod::IFNAME)?;
    let link = RawLink::open(lab.world.netns(), World::LINK)?;
    match forged {
        Forged::OddOpening => link.send(&with_options(family, &opening))?,
        Forged::ResetAndOpening => {
            link.send(&ends.rst(SOURCE, PORT))?;
            link.send(&opening)?;
        }
        Forged::OpeningElsewhere => {
            let elsewhere = Ends {
                src_mac: lab.world.netns().mac(Second::LINK)?,
                dst_mac: lab.node.netns().mac(Second::LINK)?,
                ..ends
            };
            RawLink::open(lab.world.netns(), Second::LINK)?.send(&elsewhere.syn(SOURCE, PORT))?;
        }
    }
    ensure!(
        arrived.wait_for(PATIENCE, frame::is_syn).is_some(),
        "it did not arrive"
    );
    client.goes_on(MUCH, SILENCE / 2)
}

/// Past a strict connection tracking a FIN needs no sequence number. It costs a connection nothing, if its end goes on.
#[rstest]
fn a_forged_fin_makes_no_life_short(#[values(V4, V6)] family: Family) -> Result<()> {
    /// Ticks: more than what one end has closed lives.
    const LONG: u32 = 600;
    needs_root!();
    let lab = Lab::new()?;
    let pod = lab.pod("a")?;
    let remote = family.remote_at(PORT);
    let _server = tcp::Server::start(lab.world.netns(), remote)?;
    let mut client = tcp::Client::connect_from(pod.netns(), SOURCE, remote)?;
    client.chat(20)?;
    let lives = || flow_table::lives(&lab.node, family, protocol::TCP);
    let forged = lab.ends_from_world(remote.ip(), family.node())?;
    let fin = forged.segment((PORT, SOURCE), "FA", (1, 1), &[]);
    RawLink::open(lab.world.netns(), World::LINK)?.send(&fin)?;
    eventually("it is believed at first", || {
        let left = lives()?;
        ensure!(left.iter().any(|ticks| *ticks < LONG), "{left:?}");
        Ok(())
    })?;
    eventually("it lives as long as before", || {
        client.chat(3)?;
        let left = lives()?;
        ensure!(left.iter().all(|ticks| *ticks > LONG), "{left:?}");
        Ok(())
    })
}
