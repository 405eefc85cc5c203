//! A node without a firewall, and so without connection tracking: all works there as well.

use anyhow::{Result, ensure};
use rstest::rstest;
use underpass_abi::counter::Counter;
use underpass_tests::{
    Family::{self, V4, V6},
    Lab,
    counter::Meter,
    needs_root,
    traffic::{ping, tcp, udp},
};

use crate::scene::Scene;

const PORT: u16 = 80;

#[rstest]
fn everything_is_carried(
    #[values(V4, V6)] family: Family,
    #[values("learned", "off")] bypass: &str,
) -> Result<()> {
    needs_root!();
    let lab = Lab::open()?;
    let conf = lab.conf().with("bypass", bypass);
    let neighbour = lab.pod_with("neighbour", &conf)?;
    let scene = Scene::set(family, lab, conf)?;
    let meter = Meter::start(&scene.lab.node)?;
    let inside = (
        neighbour.netns(),
        scene.pod.at(family, PORT),
        neighbour.ip(family),
    );
    for (client, server, expected) in scene.ways(family).into_iter().chain([inside]) {
        let mut connection = tcp::Client::connect(client, server)?;
        connection.chat(5)?;
        let seen = connection.exchange(500_000, 500_000)?.seen.ip();
        ensure!(seen == expected, "{server} saw {seen} by TCP");
        let mut socket = udp::Client::open(client, family)?;
        for len in [1, 1000, 4000, 100, 30_000] {
            let seen = socket.ask(server, len)?.seen.ip();
            ensure!(seen == expected, "{server} saw {seen} by UDP");
        }
    }
    for address in [scene.pod.ip(family), family.remote()] {
        ping::ping(neighbour.netns(), address)?;
        ping::Ping::new(neighbour.netns(), address)?.echo(4000)?;
    }
    if bypass == "off" {
        return meter.expect_no_bypass();
    }
    meter.expect(Counter::BypassWire, 10)?;
    meter.expect(Counter::BypassPeer, 20)
}
