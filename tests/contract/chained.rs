//! Debian's plugins after ours: each finds what it needs, ours tolerates what they change, and packets flow.

use rstest::rstest;
use serde_json::{Value, json};
use underpass_tests::{leak::Traces, netns::Netns, prelude::*};

use crate::{
    chain::{Chain, IFNAME},
    schema,
};

/// A lab with a pod that only our plugin made, and a namespace for one of the chain.
fn lab() -> Result<(Lab, Pod, Netns)> {
    let lab = Lab::new()?;
    let neighbour = lab.pod("neighbour")?;
    let netns = lab.node.netns().sibling("chained")?;
    Ok((lab, neighbour, netns))
}

/// The address that a result gives the container.
fn address(result: &Value, family: Family) -> Result<std::net::IpAddr> {
    let ips = result["ips"].as_array().into_iter().flatten();
    ips.filter_map(|ip| ip["address"].as_str()?.split('/').next()?.parse().ok())
        .find(|&ip| Family::of(ip) == family)
        .with_context(|| format!("no {family:?} address in {result}"))
}

/// Both ways, to another pod, to the world and from the node; twice, as the second round may take the bypass.
fn reaches_everything(
    lab: &Lab,
    neighbour: &Pod,
    netns: &Netns,
    result: &Value,
    family: Family,
) -> Result<()> {
    let own = address(result, family)?;
    for round in 0..2 {
        for (from, to) in [
            (lab.node.netns(), own),
            (neighbour.netns(), own),
            (netns, neighbour.ip(family)),
            (netns, family.remote()),
        ] {
            ping::ping(from, to)
                .with_context(|| format!("{} to {to}, round {round}", from.name()))?;
        }
    }
    Ok(())
}

/// ADD, schema, CHECK, traffic, CHECK, DEL, and nothing left.
fn round_trip(
    chain: &Chain<'_>,
    version: &str,
    lab: &Lab,
    neighbour: &Pod,
    netns: &Netns,
) -> Result<Value> {
    let before = Traces::of(&lab.node)?;
    let result = chain.add(netns)?;
    schema::validate(version, &result)?;
    chain.check(netns, &result).context("CHECK at once")?;
    for family in Family::BOTH {
        if address(&result, family).is_ok() {
            reaches_everything(lab, neighbour, netns, &result, family)?;
        }
    }
    chain.check(netns, &result).context("CHECK after traffic")?;
    chain.del(netns, &result)?;
    chain.del(netns, &result).context("a second DEL")?;
    before.expect_same(&lab.node)?;
    Ok(result)
}

#[rstest]
fn tuning(#[values("0.4.0", "1.0.0")] version: &str) -> Result<()> {
    needs_root!();
    let (lab, neighbour, netns) = lab()?;
    let tuning = json!({
        "type": "tuning",
        "mac": "0a:00:00:00:00:42",
        "mtu": 1400,
        "promisc": true,
        "sysctl": { "net.ipv4.conf.eth0.arp_filter": "1" },
        "dataDir": "/run/cni/tuning",
    });
    // A pod whose MAC is checked keeps the one that it was given.
    let conf = lab.conf().with("macspoofchk", false);
    let chain = Chain::new(&lab.node, &conf, [tuning]).version(version);
    let result = round_trip(&chain, version, &lab, &neighbour, &netns)?;
    ensure!(
        result["interfaces"][1]["mac"] == "0a:00:00:00:00:42",
        "{result}"
    );
    Ok(())
}

#[test]
fn bandwidth_towards_the_container() -> Result<()> {
    needs_root!();
    let (lab, neighbour, netns) = lab()?;
    let bandwidth = json!({ "type": "bandwidth", "capabilities": { "bandwidth": true } });
    let chain = Chain::new(&lab.node, &lab.conf(), [bandwidth]).runtime(
        "bandwidth",
        json!({ "ingressRate": 100_000_000, "ingressBurst": 10_000_000 }),
    );
    round_trip(&chain, "1.0.0", &lab, &neighbour, &netns)?;
    Ok(())
}

/// The token bucket filter has the same parameters, whoever makes it.
#[test]
fn bandwidth_as_the_reference_makes_it() -> Result<()> {
    needs_root!();
    let (lab, _, netns) = lab()?;
    let keys = json!({ "ingressRate": 20_000_000, "ingressBurst": 1_000_000 });
    let filter = |device: &str| -> Result<Value> {
        let mut command = std::process::Command::new("tc");
        command.args(["-j", "qdisc", "show", "dev", device, "root"]);
        let text = lab.node.netns().expect(&mut command, &[])?;
        let all: Value = serde_json::from_str(&text).context(text)?;
        ensure!(all[0]["kind"] == "tbf", "{all}");
        Ok(all[0]["options"].clone())
    };
    let chain = |first: &underpass_tests::runtime::Conf, others: Vec<Value>| -> Result<Value> {
        let chain = Chain::new(&lab.node, first, others);
        let result = chain.add(&netns)?;
        let filter = filter(result["interfaces"][0]["name"].as_str().unwrap_or_default())?;
        chain.del(&netns, &result)?;
        Ok(filter)
    };
    let mut conf = lab.conf();
    let mut reference = json!({ "type": "bandwidth" });
    for (key, value) in keys.as_object().into_iter().flatten() {
        conf = conf.with(key, value.clone());
        reference[key] = value.clone();
    }
    let (ours, theirs) = (chain(&conf, vec![])?, chain(&lab.conf(), vec![reference])?);
    ensure!(ours == theirs, "{ours} instead of {theirs}");
    Ok(())
}

/// A limit of what a container sends wants a qdisc `ingress` on the host's end, which is the place that `clsact` has: a known clash of the
/// reference with every plugin that attaches programs this way. It has to be an error that leaves nothing behind.
#[test]
fn bandwidth_out_of_the_container_is_refused_by_the_kernel() -> Result<()> {
    needs_root!();
    let (lab, _, netns) = lab()?;
    let bandwidth =
        json!({ "type": "bandwidth", "egressRate": 100_000_000, "egressBurst": 10_000_000 });
    let chain = Chain::new(&lab.node, &lab.conf(), [bandwidth]);
    let before = Traces::of(&lab.node)?;
    let error = format!(
        "{:#}",
        chain
            .add(&netns)
            .expect_err("the two qdiscs exclude each other")
    );
    ensure!(
        error.contains("create ingress qdisc: file exists"),
        "{error}"
    );
    chain.del(&netns, &json!({ "cniVersion": "1.0.0" }))?;
    before.expect_same(&lab.node)
}

#[test]
fn firewall_on_a_host_that_drops_what_it_forwards() -> Result<()> {
    needs_root!();
    let (lab, _, netns) = lab()?;
    let rules = "add table ip filter; add chain ip filter FORWARD { type filter hook forward priority 0; policy drop; };
        add table ip6 filter; add chain ip6 filter FORWARD { type filter hook forward priority 0; policy drop; };";
    lab.node.netns().nft(rules)?;
    let firewall = json!({ "type": "firewall", "backend": "iptables" });
    let chain = Chain::new(&lab.node, &lab.conf(), [firewall]);
    let before = Traces::of(&lab.node)?;
    let result = chain.add(&netns)?;
    schema::validate("1.0.0", &result)?;
    chain.check(&netns, &result)?;
    for family in Family::BOTH {
        ping::ping(&netns, family.remote()).with_context(|| format!("pod to world, {family:?}"))?;
        ping::ping(&netns, family.remote()).with_context(|| format!("again, {family:?}"))?;
    }
    chain.check(&netns, &result)?;
    chain.del(&netns, &result)?;
    before.expect_same(&lab.node)
}

/// What `sbr` leaves in the main table is nothing, as after the reference: only what comes from the address itself has a route.
#[test]
fn sbr() -> Result<()> {
    needs_root!();
    let (lab, neighbour, netns) = lab()?;
    lab.world.route_pods()?;
    let before = Traces::of(&lab.node)?;
    let chain = Chain::new(&lab.node, &lab.conf(), [json!({ "type": "sbr" })]);
    let result = chain.add(&netns)?;
    schema::validate("1.0.0", &result)?;
    chain.check(&netns, &result)?;
    for family in Family::BOTH {
        let main = netns.ip_json(&[version(family), "route", "show", "table", "main"])?;
        ensure!(!main.to_string().contains("default"), "{main}");
        for who in [lab.node.netns(), neighbour.netns(), lab.world.netns()] {
            for _ in 0..2 {
                ping::ping(who, address(&result, family)?)
                    .with_context(|| format!("{} to pod, {family:?}", who.name()))?;
            }
        }
    }
    chain.check(&netns, &result)?;
    chain.del(&netns, &result)?;
    before.expect_same(&lab.node)
}

/// Later plugins of version 1.1.0 pass on what routes have beside a next hop, of which Debian's know nothing: so CHECK gets our own result.
#[rstest]
#[case::moved_to_another_table(json!({ "type": "sbr" }))]
// The kernel lowers the mtu of IPv6 routes along.
#[case::smaller(json!({ "type": "tuning", "mtu": 1350, "dataDir": "/run/cni/tuning" }))]
#[case::larger(json!({ "type": "tuning", "mtu": 4000, "dataDir": "/run/cni/tuning" }))]
fn routes_after_a_plugin_that_changes_them(#[case] later: Value) -> Result<()> {
    needs_root!();
    let (lab, _, netns) = lab()?;
    let routes = Family::BOTH.map(|family| {
        let everywhere = family.everywhere();
        [
            json!({ "dst": everywhere, "priority": 7, "mtu": 1400, "advmss": 1300 }),
            json!({ "dst": everywhere, "priority": 8, "mtu": 1500 }),
            json!({ "dst": everywhere }),
            json!({ "dst": everywhere, "table": 200 }),
        ]
    });
    let conf = lab.conf().with_ipam("routes", routes.concat());
    let chain = Chain::new(&lab.node, &conf, [later]);
    let (first, later) = (&chain.plugins()[0], &chain.plugins()[1]);
    let result = chain.call("ADD", first, &netns, None)?.result()?;
    let last = chain.call("ADD", later, &netns, Some(&result))?.result()?;
    for remembered in [&result, &last] {
        chain
            .call("CHECK", first, &netns, Some(remembered))?
            .silence()?;
    }
    chain.del(&netns, &last)
}

fn version(family: Family) -> &'static str {
    match family {
        V4 => "-4",
        V6 => "-6",
    }
}

#[rstest]
fn portmap(#[values(V4, V6)] family: Family) -> Result<()> {
    needs_root!();
    let (lab, neighbour, netns) = lab()?;
    let portmap = json!({ "type": "portmap", "capabilities": { "portMappings": true } });
    let chain = Chain::new(&lab.node, &lab.conf(), [portmap]).runtime(
        "portMappings",
        json!([{ "hostPort": 8080, "containerPort": 80, "protocol": "tcp" }]),
    );
    let before = Traces::of(&lab.node)?;
    let result = chain.add(&netns)?;
    chain.check(&netns, &result)?;
    let _server = tcp::Server::start(&netns, family.port(80))?;
    let at = std::net::SocketAddr::new(family.node(), 8080);
    for who in [lab.world.netns(), neighbour.netns(), lab.node.netns()] {
        for _ in 0..2 {
            tcp::Client::connect(who, at)
                .and_then(|mut client| client.exchange(200_000, 200_000))
                .with_context(|| format!("{} by the port of the host", who.name()))?;
        }
    }
    ping::ping(&netns, family.remote())?;
    chain.check(&netns, &result)?;
    chain.del(&netns, &result)?;
    tcp::refuses(lab.world.netns(), at)?;
    before.expect_same(&lab.node)
}

#[test]
fn all_of_them() -> Result<()> {
    needs_root!();
    let (lab, neighbour, netns) = lab()?;
    let others = [
        json!({ "type": "tuning", "mtu": 1400, "sysctl": { "net.ipv4.conf.eth0.arp_filter": "1" }, "dataDir": "/run/cni/tuning" }),
        json!({ "type": "bandwidth", "ingressRate": 100_000_000, "ingressBurst": 10_000_000 }),
        json!({ "type": "firewall", "backend": "iptables" }),
        json!({ "type": "portmap", "capabilities": { "portMappings": true } }),
    ];
    let chain = Chain::new(&lab.node, &lab.conf(), others)
        .version("0.4.0")
        .runtime(
            "portMappings",
            json!([{ "hostPort": 8080, "containerPort": 80, "protocol": "udp" }]),
        );
    let result = round_trip(&chain, "0.4.0", &lab, &neighbour, &netns)?;
    ensure!(result["interfaces"][1]["name"] == IFNAME, "{result}");
    for family in Family::BOTH {
        ensure!(
            address(&result, family)? != neighbour.ip(family),
            "{result}"
        );
    }
    Ok(())
}
