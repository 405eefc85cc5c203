//! What is known of a conversation is no reason to let anything else pass in its name.

use super::*;

#[rstest]
fn a_foreign_mac(
    #[values(V4, V6)] family: Family,
    #[values("learned", "off")] bypass: &str,
) -> Result<()> {
    const FORGED: &[u8] = b"forged";
    needs_root!();
    let lab = Lab::new()?;
    let conf = lab.conf().with("bypass", bypass);
    let scene = Scene::with(lab, &conf)?;
    let netns = [scene.lab.world.netns(), scene.neighbour.netns()];
    for (dst, netns) in scene.targets(family).into_iter().zip(netns) {
        let to = SocketAddr::new(dst, 2000);
        let _server = serve(netns, to)?;
        let mut client = udp::Client::open_at(scene.pod.netns(), family, 1000)?;
        client.chat(to, 5)?;
        let capture = Capture::start(netns, Pod::IFNAME)?;
        let meter = Meter::start(&scene.lab.node)?;
        let ends = scene.pod.ends(dst)?.from_mac(FOREIGN_MAC);
        scene.link.send(&ends.udp(1000, 2000, FORGED))?;
        meter.expect(Counter::DropSourceMac, 1)?;
        std::thread::sleep(SILENCE / 4);
        let mut frames = capture.frames().into_iter();
        ensure!(
            !frames.any(|frame| frame.ends_with(FORGED)),
            "it came to {to}"
        );
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
    let remote = family.remote_at(2000);
    let _server = serve(scene.lab.world.netns(), remote)?;
    let mut client = udp::Client::open_at(neighbour.netns(), family, 1000)?;
    client.chat(remote, 5)?;
    let ends = scene.pod.ends(remote.ip())?;
    let forged = ends.from_ip(neighbour.ip(family));
    scene.expect_dropped(
        &[forged.udp(1000, 2000, b"forged")],
        Counter::DropSourceAddress,
        &ends.from_ip(family.node()),
    )?;
    client.chat(remote, 1)?;
    Ok(())
}
