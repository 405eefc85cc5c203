//! Host ports whose questions others on the node lead on to another server, by netfilter: the answer has the address that the client asked
//! only after both have translated it back.

use underpass_tests::netfilter::Transport;

use super::*;

/// Where the questions are led on to.
const BEYOND: u16 = 8081;

#[rstest]
fn an_answer_is_translated_back_by_both(
    #[values(V4, V6)] family: Family,
    #[values("learned", "off")] bypass: &str,
    #[values("itself", "neighbour", "world")] to: &str,
) -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    let conf = lab.conf().with("bypass", bypass);
    let ports = mapped(&lab, &both()).with("bypass", bypass);
    let server = lab.pod_with("server", &ports)?;
    let (client, neighbour) = (lab.pod_with("client", &conf)?, lab.pod_with("b", &conf)?);
    let (netns, at) = match to {
        "itself" => (server.netns(), server.at(family, BEYOND)),
        "neighbour" => (neighbour.netns(), neighbour.at(family, BEYOND)),
        _ => (lab.world.netns(), family.remote_at(BEYOND)),
    };
    for transport in [Transport::Tcp, Transport::Udp] {
        lab.firewall
            .service(transport, server.at(family, INSIDE), at)?;
    }
    let _servers = traffic::serve(netns, at)?;
    let expected = if to == "world" {
        family.node()
    } else {
        client.ip(family)
    };
    reaches(client.netns(), node_at(family, HOST), expected)
}
