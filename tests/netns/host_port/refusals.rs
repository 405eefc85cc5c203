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

/// And so is what the client says of the answers to either, once it has closed its socket.
#[rstest]
fn a_refusal_of_an_answer_reaches_the_container(
    #[values(V4, V6)] family: Family,
    #[values("direct", "mapped")] younger: &str,
) -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    let served = lab.pod_with("server", &mapped(&lab, &both()))?;
    let client = lab.pod("client")?;
    let mut ways = [served.at(family, INSIDE), node_at(family, super::HOST)];
    if younger == "direct" {
        ways.reverse();
    }
    let mut seen = Vec::new();
    {
        let _server = udp::Server::start(served.netns(), served.at(family, INSIDE))?;
        for to in ways {
            let mut socket = udp::Client::open_at(client.netns(), family, SOURCE)?;
            seen.push(socket.chat(to, 3)?.seen);
        }
    }
    ensure!(seen[0].port() != seen[1].port(), "{seen:?}");
    let socket = udp::Client::open_at(served.netns(), family, INSIDE)?;
    for client in seen {
        socket.is_refused(client)?;
    }
    Ok(())
}
