//! The same where IPVS translates, which keeps connections of its own beside those of connection tracking.

use std::net::{IpAddr, SocketAddr};

use rstest::rstest;
use underpass_tests::{
    kernel::Facility,
    netfilter::{
        Transport,
        kube_proxy::{Policy, Service, ipvs},
    },
    netns::Netns,
    prelude::*,
    traffic::serve,
};

use super::{MANY, MOST, set_liberal};
use crate::kube_proxy::{BY_POD, BY_WORLD, PORT, node_at};

/// Talks to a Service by UDP and by TCP: whoever answers must see this address.
fn reaches(
    node: &Node,
    client: &Netns,
    service: SocketAddr,
    expected: IpAddr,
    counters: &[Counter],
) -> Result<()> {
    let most = MOST / u64::try_from(counters.len())?;
    for _ in 0..2 {
        let meter = Meter::start(node)?;
        let mut datagrams = udp::Client::open(client, Family::of(service.ip()))?;
        let seen = datagrams.chat(service, MANY)?.seen.ip();
        ensure!(seen == expected, "UDP to {service} came from {seen}");
        for &counter in counters {
            meter.expect(counter, most)?;
        }
        let meter = Meter::start(node)?;
        let mut connection = tcp::Client::connect(client, service)?;
        let seen = connection.chat(MANY)?.ip();
        ensure!(seen == expected, "TCP to {service} came from {seen}");
        connection.exchange(1_000_000, 1_000_000)?;
        for &counter in counters {
            meter.expect(counter, most)?;
        }
    }
    Ok(())
}

#[rstest]
fn all_reach_who_serves(#[values(V4, V6)] family: Family) -> Result<()> {
    const BOTH: [Counter; 2] = [Counter::BypassPeer, Counter::BypassWire];
    needs_root!();
    if Facility::Ipvs.is_missing()? {
        return Ok(());
    }
    let lab = Lab::new()?;
    lab.world.route_pods()?;
    let conf = lab.conf().with("ipMasq", false);
    let (client, backend) = (
        lab.pod_with("client", &conf)?,
        lab.pod_with("backend", &conf)?,
    );
    let _inside = serve(backend.netns(), backend.at(family, PORT))?;
    let _outside = serve(lab.world.netns(), family.remote_at(PORT))?;
    let services: Vec<Service> = [
        (BY_POD, backend.at(family, PORT)),
        (BY_WORLD, family.remote_at(PORT)),
    ]
    .into_iter()
    .flat_map(|(port, endpoint)| {
        [Transport::Tcp, Transport::Udp].map(|transport| Service {
            name: "some".to_owned(),
            transport,
            cluster: family.service_at(port),
            node_port: Some(node_at(family, port).port()),
            policy: Policy::Cluster,
            endpoints: vec![endpoint],
        })
    })
    .collect();
    ipvs::serve(&lab, family, &services)?;
    set_liberal(&lab, true)?;
    let (node, pod) = (&lab.node, client.netns());
    let cluster = |port| family.service_at(port);
    let own = client.ip(family);
    reaches(node, pod, cluster(BY_POD), own, &BOTH[..1])?;
    reaches(node, pod, cluster(BY_WORLD), own, &BOTH)?;
    let by_node = node_at(family, BY_POD);
    reaches(node, pod, by_node, family.pod_gateway(), &BOTH[..1])?;
    let world = lab.world.netns();
    reaches(node, world, by_node, family.pod_gateway(), &BOTH)
}
