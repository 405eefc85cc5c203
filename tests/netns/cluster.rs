//! Many nodes, an agent on each: pods reach pods, routes are what the API says, whatever the API and others do.

use nix::sys::signal::Signal;
use serde_json::Value;
use underpass_tests::prelude::*;

use self::fixture::Cluster;

mod agent;
mod alone;
mod announce;
mod api;
mod api_away;
mod api_lies;
mod collected;
mod commands;
mod containers;
mod direct;
mod doctor;
mod firewall;
mod fixture;
mod forging;
mod hardened;
mod heals;
mod hidden;
mod image;
mod leaving;
mod life;
mod made;
mod member;
mod moved;
mod new_uplink;
mod others;
mod outer_port;
mod outlived;
mod outside;
mod own_node;
mod ready;
mod refused;
mod rolling;
mod scale;
mod services;
mod tunnel;
mod ways;

#[test]
fn pods_reach_pods_of_neighbours() -> Result<()> {
    needs_root!();
    let cluster = Cluster::new(&[0, 0, 0])?;
    cluster.settle()?;
    let pods = cluster.pods()?;
    Cluster::all_reach_all(&pods)?;
    cluster.all_bypass()?;
    ensure!(
        cluster.api.requests() == ["list", "watch"],
        "the agent asked for more than its role has: {:?}",
        cluster.api.requests()
    );
    Ok(())
}

#[test]
fn pods_reach_pods_beyond_a_router() -> Result<()> {
    needs_root!();
    // The node that joins last sends by VXLAN alone.
    for links in [&[0, 1, 0, 1][..], &[0, 1]] {
        let cluster = Cluster::new(links)?;
        cluster.settle()?;
        let pods = cluster.pods()?;
        Cluster::all_reach_all(&pods)?;
        cluster.all_bypass()?;
    }
    Ok(())
}

#[test]
fn an_address_that_no_pod_has_is_unreachable_at_once() -> Result<()> {
    needs_root!();
    let cluster = Cluster::new(&[0, 0, 1])?;
    cluster.settle()?;
    let pods = cluster.pods()?;
    for (family, nobody) in [
        (V4, "10.244.2.200"),
        (V6, "fd00:244:2::200"),
        (V4, "10.244.3.200"),
        (V6, "fd00:244:3::200"),
    ] {
        let error = tcp::Client::try_connect(
            pods[0].netns(),
            std::net::SocketAddr::new(nobody.parse()?, 80),
            std::time::Duration::from_secs(2),
        );
        let said = format!("{:?}", error.err().context("nobody answered")?);
        ensure!(
            said.contains("unreachable") || said.contains("No route to host"),
            "{family:?} {nobody}: {said}"
        );
    }
    Ok(())
}

/// Removes what the agent of the first of three nodes has made, the third of which is beyond a router, and sees that all of it comes back.
fn heals(cluster: &Cluster) -> Result<()> {
    let member = &cluster.members[0];
    let netns = member.node.netns();
    for family in Family::BOTH {
        member.flush(family)?;
        cluster
            .settle_one(member)
            .with_context(|| format!("{family:?} flushed"))?;
    }
    for line in [
        "link delete underpass-vxlan",
        "link set underpass-vxlan down",
        "neighbour del 10.244.3.0 dev underpass-vxlan",
        "neighbour del fd00:244:3:: dev underpass-vxlan",
        "address del 10.244.1.0/32 dev underpass-vxlan",
        "route replace unreachable 10.244.2.0/24 proto 117 metric 2000",
        "link set eth0 down",
    ] {
        netns
            .ip(&[line.to_owned()])
            .with_context(|| line.to_owned())?;
        if line.ends_with("eth0 down") {
            let mut lines = vec!["link set eth0 up".to_owned()];
            // IPv6 loses its addresses, and both their default routes: who made them makes them again.
            lines.extend(member.readdress());
            netns.ip(&lines)?;
        }
        cluster
            .settle_one(member)
            .with_context(|| line.to_owned())?;
        member
            .knows_neighbours(2)
            .with_context(|| line.to_owned())?;
    }
    Ok(())
}

/// So many events that the kernel has no room for those that matter: who is told that some were lost looks at everything.
#[test]
fn what_happened_unheard_is_found() -> Result<()> {
    /// Several times what a socket's buffer holds.
    const MANY: u16 = 4_000;
    needs_root!();
    let mut cluster = Cluster::idle(&[0, 0])?;
    let member = &mut cluster.members[0];
    // No comparison comes by itself.
    member.start_agent_with(&["--resync", "3600"])?;
    let member = &cluster.members[0];
    cluster.settle_one(member)?;
    member.is_ready()?;
    let all = (0..MANY).map(|number| format!("198.19.{}.{}/32", number / 256, number % 256));
    let flood: Vec<String> = all
        .flat_map(|net| {
            [
                format!("route add unreachable {net}"),
                format!("route del {net}"),
            ]
        })
        .collect();
    for family in Family::BOTH {
        // It hears of its own changes as well, and compares again.
        member.rests()?;
        member.running()?.hold(true)?;
        member.node.netns().ip(&flood)?;
        member.flush(family)?;
        let left = member.routes()?;
        ensure!(
            left.len() == cluster.members.len(),
            "of the other family alone: {left:?}"
        );
        member.running()?.hold(false)?;
        cluster
            .settle_one(member)
            .with_context(|| format!("{family:?} flushed unheard"))?;
    }
    Ok(())
}

#[test]
fn what_is_not_ours_stays() -> Result<()> {
    needs_root!();
    let mut cluster = Cluster::idle(&[0, 0])?;
    let foreign = [
        "route add 10.244.2.0/25 via 198.18.10.254",
        "route add 10.99.0.0/16 via 198.18.10.254 proto 118",
        "route add fd00:244:2::/96 via 2001:db8:a::fe",
    ];
    let netns = cluster.members[0].node.netns().clone();
    netns.ip(&foreign.map(str::to_owned))?;
    let routes = |family| -> Result<Vec<Value>> {
        let list = netns.ip_json(&[family, "route", "show"])?;
        Ok(list.as_array().context("a list")?.clone())
    };
    let before = [routes("-4")?, routes("-6")?];
    cluster.members[0].start_agent()?;
    cluster.settle_one(&cluster.members[0])?;
    let gone = cluster.members.remove(1);
    cluster.api.delete(&gone.name);
    cluster.settle_one(&cluster.members[0])?;
    let after = [routes("-4")?, routes("-6")?];
    for (before, after) in before.iter().zip(&after) {
        for route in before {
            ensure!(after.contains(route), "{route} is gone: {after:?}");
        }
    }
    // Nothing is withdrawn when it stops.
    let ours = cluster.members[0].routes()?;
    cluster.members[0].stop_agent(Signal::SIGTERM);
    let left = cluster.members[0].routes()?;
    ensure!(left == ours, "{ours:?} became {left:?}");
    Ok(())
}

#[test]
fn an_api_that_fails_withdraws_nothing() -> Result<()> {
    needs_root!();
    let mut cluster = Cluster::new(&[0, 1])?;
    cluster.settle()?;
    let before = cluster.members[0].routes()?;
    // Down, then up with a list of nobody: not believed, as our own Node is not in it.
    cluster.api.be_down(true);
    cluster.members[0].flush(V4)?;
    cluster
        .settle_one(&cluster.members[0])
        .context("restored without the API")?;
    let lists = cluster.api.lists();
    cluster.api.be_empty(true);
    cluster.api.be_down(false);
    eventually("the empty list is asked for", || {
        ensure!(cluster.api.lists() > lists, "{} lists", cluster.api.lists());
        Ok(())
    })?;
    std::thread::sleep(std::time::Duration::from_secs(1));
    let after = cluster.members[0].routes()?;
    ensure!(after == before, "{before:?} became {after:?}");
    cluster.api.be_empty(false);
    // Whatever it does to watches, what is new arrives.
    cluster.api.cut();
    cluster.api.forget();
    cluster.grow(0)?;
    cluster.api.cut();
    cluster.settle()
}

#[test]
fn health_and_numbers_are_served() -> Result<()> {
    needs_root!();
    let cluster = Cluster::new(&[0, 0])?;
    cluster.settle()?;
    let member = &cluster.members[0];
    member.is_ready()?;
    ensure!(member.get("/healthz")?.starts_with("HTTP/1.1 200"));
    ensure!(member.get("/nothing")?.starts_with("HTTP/1.1 404"));
    let text = member.get("/metrics")?;
    ensure!(text.contains("application/openmetrics-text"), "{text}");
    ensure!(text.contains("\nunderpass_agent_nodes 2\n"), "{text}");
    ensure!(text.contains("\nunderpass_loaded 1\n"), "{text}");
    ensure!(
        text.ends_with("# EOF\n") && text.matches("# EOF").count() == 1,
        "{text}"
    );
    Ok(())
}
