//! What is known of a conversation is no reason to let anything else pass in its name.

use super::*;

/// The ports of the conversation.
const PORTS: [u16; 2] = [1000, 2000];
const FORGED: &[u8] = b"forged";

/// Sends a datagram of the conversation with these ends, which must be counted and not arrive.
fn expect_dropped(scene: &Scene, ends: &Ends, counter: Counter) -> Result<()> {
    let netns = [scene.lab.world.netns(), scene.neighbour.netns()];
    let captures = netns.map(|netns| Capture::start(netns, Pod::IFNAME));
    let meter = Meter::start(&scene.lab.node)?;
    scene.link.send(&ends.udp(PORTS[0], PORTS[1], FORGED))?;
    meter.expect(counter, 1)?;
    std::thread::sleep(SILENCE / 4);
    for capture in captures {
        let mut frames = capture?.frames().into_iter();
        ensure!(
            !frames.any(|frame| frame.ends_with(FORGED)),
            "it came to {}",
            ends.dst
        );
    }
    Ok(())
}

#[rstest]
fn a_foreign_mac(
    #[values(V4, V6)] family: Family,
    #[values("learned", "off")] bypass: &str,
) -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    let conf = lab.conf().with("bypass", bypass);
    let scene = Scene::with(lab, &conf)?;
    let netns = [scene.lab.world.netns(), scene.neighbour.netns()];
    for (dst, netns) in scene.targets(family).into_iter().zip(netns) {
        let to = SocketAddr::new(dst, PORTS[1]);
        let _server = serve(netns, to)?;
        let mut client = udp::Client::open_at(scene.pod.netns(), family, PORTS[0])?;
        client.chat(to, 5)?;
        let forged = scene.pod.ends(dst)?.from_mac(FOREIGN_MAC);
        expect_dropped(&scene, &forged, Counter::DropSourceMac)?;
        client.chat(to, 1)?;
    }
    Ok(())
}

#[rstest]
fn a_neighbours_address(
    #[values(V4, V6)] family: Family,
    #[values("learned", "off")] bypass: &str,
) -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    let conf = lab.conf().with("bypass", bypass);
    let neighbour = lab.pod_with("c", &conf)?;
    let scene = Scene::with(lab, &conf)?;
    let remote = family.remote_at(PORTS[1]);
    let _server = serve(scene.lab.world.netns(), remote)?;
    let mut client = udp::Client::open_at(neighbour.netns(), family, PORTS[0])?;
    client.chat(remote, 5)?;
    let ends = scene.pod.ends(remote.ip())?;
    let forged = ends.from_ip(neighbour.ip(family));
    expect_dropped(&scene, &forged, Counter::DropSourceAddress)?;
    client.chat(remote, 1)?;
    Ok(())
}
