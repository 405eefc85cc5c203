//! What a container says of a packet that reached it by a host port, or beside one, is understood by who sent it.

use std::net::SocketAddr;

use rstest::rstest;
use underpass_tests::prelude::*;

use super::{INSIDE, SOURCE, both, mapped, node_at};

/// The younger of two flows that would look the same to the container has another port there.
#[rstest]
fn a_refusal_of_the_younger_flow_is_heard(
    #[values(V4, V6)] family: Family,
    #[values("direct", "mapped")] younger: &str,
) -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    let served = lab.pod_with("server", &mapped(&lab, &both()))?;
    let client = lab.pod("client")?;
    let (direct, by_node) = (served.at(family, INSIDE), node_at(family, super::HOST));
    let (first, second) = match younger {
        "direct" => (by_node, direct),
        _ => (direct, by_node),
    };
    let open = || udp::Client::open_at(client.netns(), family, SOURCE);
    {
        let _server = udp::Server::start(served.netns(), direct)?;
        let seen = open()?.chat(first, 3)?.seen;
        ensure!(seen == SocketAddr::new(client.ip(family), SOURCE), "{seen}");
        let seen = open()?.chat(second, 3)?.seen;
        ensure!(seen.port() != SOURCE, "{seen}");
    }
    for at in [first, second] {
        open()?.is_refused(at)?;
    }
    Ok(())
}
