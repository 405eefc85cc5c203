//! The same by rules of others than kube-proxy, or of kinds that it makes for some Services alone.

use rstest::rstest;
use underpass_tests::{
    prelude::*,
    traffic::{sctp, serve},
};

use super::{MANY, MOST};
use crate::kube_proxy::{PORT, SOURCE};

/// Rules of somebody else: whatever goes to this address goes to the pod, and some of it with another source as well.
fn rules(family: Family, backend: &Pod, source: &str) -> String {
    let (ip, to) = match family {
        V4 => ("ip", backend.ip(family).to_string()),
        V6 => ("ip6", format!("[{}]", backend.ip(family))),
    };
    let service = family.service();
    format!(
        "table inet somebody {{
            chain in {{
                type nat hook prerouting priority dstnat; policy accept;
                {ip} daddr {service} dnat {ip} to {to}
            }}
            chain out {{
                type nat hook postrouting priority srcnat; policy accept;
                ct status dnat {source}
            }}
        }}"
    )
}

/// Each connection of a client gets another port at random, and another address; so does the identifier of a ping.
#[rstest]
fn anybody_translates(
    #[values(V4, V6)] family: Family,
    #[values("accept", "masquerade fully-random")] source: &str,
) -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    lab.firewall.set_liberal(true)?;
    let (client, backend) = (lab.pod("client")?, lab.pod("backend")?);
    let _server = serve(backend.netns(), backend.at(family, PORT))?;
    lab.firewall.load(&rules(family, &backend, source))?;
    let service = family.service_at(PORT);
    let meter = Meter::start(&lab.node)?;
    let mut most = 0;
    for _ in 0..3 {
        udp::Client::open(client.netns(), family)?.chat(service, MANY)?;
        tcp::Client::connect(client.netns(), service)?.chat(MANY)?;
        let mut ping = ping::Ping::new(client.netns(), service.ip())?;
        for _ in 0..MANY {
            ping.echo(56)?;
        }
        most += 3 * MOST;
        meter.expect(Counter::BypassPeer, most)?;
    }
    Ok(())
}

#[rstest]
fn associations_to_a_service(#[values(V4, V6)] family: Family) -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    if sctp::is_missing(lab.node.netns()) {
        return Ok(());
    }
    let (client, backend) = (lab.pod("client")?, lab.pod("backend")?);
    let _server = sctp::Server::start(backend.netns(), backend.at(family, PORT))?;
    lab.firewall.load(&rules(family, &backend, "accept"))?;
    for port in [SOURCE, SOURCE + 1] {
        let meter = Meter::start(&lab.node)?;
        let from = client.at(family, port);
        let seen = sctp::call(client.netns(), from, family.service_at(PORT))?;
        ensure!(seen == from, "{seen}");
        // What is sent is far more than what opens and ends the association.
        meter.expect(Counter::BypassPeer, 20)?;
    }
    Ok(())
}

/// A Service keeps its clients at the endpoint that they had first (`sessionAffinity: ClientIP`): who was there is noted with the first packet
/// of each flow, which the stack sees.
#[rstest]
fn clients_stay_with_their_endpoint(#[values(V4, V6)] family: Family) -> Result<()> {
    const FLOWS: u64 = 12;
    needs_root!();
    let lab = Lab::new()?;
    lab.firewall.set_liberal(true)?;
    let (client, backend) = (lab.pod("client")?, lab.pod("backend")?);
    let ports = [PORT, PORT + 1];
    let mut servers = Vec::new();
    let mut chains = Vec::new();
    let ip = family.nft();
    let kind = match family {
        V4 => "ipv4_addr",
        V6 => "ipv6_addr",
    };
    for port in ports {
        let at = backend.at(family, port);
        servers.push(serve(backend.netns(), at)?);
        let begins = format!("ct state new th dport {port}");
        lab.firewall
            .count_forwarded(&format!("to_{port}"), &begins)?;
        chains.push(format!(
            "set clients-{port} {{ type {kind}; flags dynamic, timeout; timeout 3h; }}
             chain endpoint-{port} {{
                update @clients-{port} {{ {ip} saddr }}
                meta l4proto {{ tcp, udp }} dnat {ip} to {at}
             }}\n"
        ));
    }
    let chains = chains.concat();
    let [one, other] = ports;
    lab.firewall.load(&format!(
        "table {ip} affinity {{
            {chains}
            chain service {{
                {ip} saddr @clients-{one} goto endpoint-{one}
                {ip} saddr @clients-{other} goto endpoint-{other}
                numgen random mod 2 vmap {{ 0 : goto endpoint-{one}, 1 : goto endpoint-{other} }}
            }}
            chain in {{
                type nat hook prerouting priority dstnat; policy accept;
                {ip} daddr {} jump service
            }}
        }}",
        family.service()
    ))?;
    let meter = Meter::start(&lab.node)?;
    for _ in 0..FLOWS / 2 {
        udp::Client::open(client.netns(), family)?.chat(family.service_at(PORT), MANY)?;
        tcp::Client::connect(client.netns(), family.service_at(PORT))?.chat(MANY)?;
    }
    meter.expect(Counter::BypassPeer, FLOWS * MOST)?;
    let mut flows = ports
        .map(|port| lab.firewall.counted(&format!("to_{port}")))
        .into_iter()
        .collect::<Result<Vec<_>>>()?;
    flows.sort_unstable();
    ensure!(flows == [0, FLOWS], "flows to both endpoints: {flows:?}");
    Ok(())
}
