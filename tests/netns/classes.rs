//! What rules of the node write into packets: they see all of them.

use rstest::rstest;
use underpass_tests::{capture::Capture, frame, prelude::*, world::World};

const PORT: u16 = 443;
/// Expedited forwarding (RFC 3246), as in a TOS.
const EXPEDITED: u8 = 0xb8;
const ETHERNET: usize = 14;

/// The TOS, or traffic class, of a frame.
fn class(frame: &[u8]) -> u8 {
    let ip = &frame[ETHERNET..];
    if ip[0] >> 4 == 4 {
        ip[1]
    } else {
        ip[0] << 4 | ip[1] >> 4
    }
}

/// The bypass would not give it to them, so who is given it does not take that.
#[rstest]
fn a_class_that_a_rule_gives_is_on_every_packet(
    #[values(V4, V6)] family: Family,
    #[values("world", "pod")] peer: &str,
) -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    let (pod, other) = (lab.pod("a")?, lab.pod("b")?);
    let ip = family.nft();
    lab.firewall.load(&format!(
        "table inet classes {{
             chain forward {{
                 type filter hook forward priority -150
                 udp dport {PORT} {ip} dscp set ef
             }}
         }}"
    ))?;
    let (at, there, link) = match peer {
        "world" => (family.remote_at(PORT), lab.world.netns(), World::LINK),
        _ => (other.at(family, PORT), other.netns(), Pod::IFNAME),
    };
    let _server = udp::Server::start(there, at)?;
    let capture = Capture::start(there, link)?;
    let mut client = udp::Client::open(pod.netns(), family)?;
    client.chat(at, 20)?;
    let is_question = |bytes: &[u8]| {
        frame::read(bytes).is_some_and(|seen| seen.ports.is_some_and(|(_, port)| port == PORT))
    };
    eventually("all of them were seen", || {
        let frames = capture.frames();
        let questions = frames.iter().filter(|bytes| is_question(bytes));
        let classes: Vec<u8> = questions.map(|bytes| class(bytes)).collect();
        ensure!(classes.len() >= 20, "{classes:02x?}");
        ensure!(
            classes.iter().all(|class| *class == EXPEDITED),
            "{classes:02x?}"
        );
        Ok(())
    })
}
