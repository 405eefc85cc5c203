//! A strict firewall on each node: it drops what connection tracking does not know.

use std::thread;

use rstest::rstest;
use underpass_tests::{netfilter::Netfilter, prelude::*};

use super::{fixture::Cluster, tunnel::beyond_a_router};
use crate::feeding::expect_end;

const PORT: u16 = 80;
/// The length of a transfer, in bytes.
const LONG: u64 = 20_000_000;

/// Fails if connection tracking of any of the nodes has called a packet INVALID, whoever sent it.
pub(super) fn none_was_invalid(firewalls: &[Netfilter]) -> Result<()> {
    for (number, firewall) in (1..).zip(firewalls) {
        let expected = firewall.expect_no_invalid();
        expected.with_context(|| format!("on node{number}"))?;
    }
    Ok(())
}

/// Two nodes on a link and one beyond a router: all reach all, transfers do not stall, and whoever is shut out later is.
#[test]
fn strict_firewalls_stand_in_nobodys_way() -> Result<()> {
    needs_root!();
    let cluster = Cluster::new(&[0, 0, 1])?;
    cluster.settle()?;
    let firewalls = cluster.fortify()?;
    let pods = cluster.pods()?;
    Cluster::all_reach_all(&pods)?;
    for family in Family::BOTH {
        for there in &pods[1..] {
            let at = there.at(family, PORT);
            let _server = tcp::Server::start(there.netns(), at)?;
            tcp::Client::connect(pods[0].netns(), at)?.exchange(LONG, LONG)?;
        }
    }
    cluster.all_bypass()?;
    // On the node that sends, and on the one that receives.
    let mut ways = Vec::new();
    for family in Family::BOTH {
        for (port, to, at_node) in [(81, 1, 0), (82, 1, 1), (83, 2, 0), (84, 2, 2)] {
            let at = pods[to].at(family, port);
            let server = udp::Server::start(pods[to].netns(), at)?;
            let mut client = udp::Client::open(pods[0].netns(), family)?;
            let meter = Meter::start(&cluster.members[to].node)?;
            client.chat(at, 40)?;
            meter.expect(Counter::BypassPeer, 30)?;
            firewalls[at_node].drop_forwarded(&format!(
                "{} daddr {} udp dport {port}",
                family.nft(),
                at.ip()
            ))?;
            ways.push((server, client, at));
        }
    }
    thread::scope(|scope| {
        let ends: Vec<_> = ways
            .iter_mut()
            .map(|(_, client, at)| scope.spawn(|| expect_end(|| client.hears_nothing(*at).is_ok())))
            .collect();
        let mut ends = ends
            .into_iter()
            .map(|end| end.join().expect("it does not panic"));
        ends.try_for_each(|end| end)
    })?;
    none_was_invalid(&firewalls)
}

/// The rules of docs/kubernetes.md.
const NOT_TRACKED: &str = "table inet vxlan {
    chain prerouting { type filter hook prerouting priority raw; udp dport 4789 notrack; }
    chain output { type filter hook output priority raw; udp dport 4789 notrack; }
}";

/// Each flow through VXLAN is two flows of datagrams to connection tracking, neither of which is ever answered. Who needs the room has them not tracked.
#[rstest]
fn the_tunnel_needs_no_entries(#[values(V4, V6)] outside: Family) -> Result<()> {
    needs_root!();
    let (cluster, pods) = beyond_a_router(outside, &["learned"])?;
    let firewalls = cluster.fortify()?;
    let [here, there] = &pods[0];
    let tracked = || -> Result<usize> {
        let entries = firewalls
            .iter()
            .map(|firewall| Ok(firewall.entries(outside, &["udp", "dport=4789"])?.len()));
        entries.sum()
    };
    let talk = |port| -> Result<()> {
        for family in Family::BOTH {
            let at = there.at(family, port);
            let _server = tcp::Server::start(there.netns(), at)?;
            tcp::Client::connect(here.netns(), at)?.exchange(LONG, LONG)?;
        }
        Ok(())
    };
    talk(PORT)?;
    let before = tracked()?;
    ensure!(before > 0, "nothing is tracked");
    for (member, firewall) in cluster.members.iter().zip(&firewalls) {
        member.node.netns().nft(NOT_TRACKED)?;
        firewall.delete_entries(outside, "udp")?;
    }
    talk(PORT + 1)?;
    let after = tracked()?;
    ensure!(after == 0, "{before} entries became {after}");
    cluster.all_bypass()?;
    none_was_invalid(&firewalls)
}
