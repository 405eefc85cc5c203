//! Ways from the world to a host port.

use anyhow::Result;
use underpass_tests::{Family, Lab, Node, traffic::offload, world::World};

use super::{Address, Carrier, Path, Purpose, Route, Site};
use crate::{
    load::PORT,
    plugin::{self, Mapping, Plugin},
};

/// Mappings on a crowded node.
pub(super) const MAPPINGS: u16 = 10_000;

/// Mappings of one container that makes the node crowded.
const EACH: u16 = 500;

/// The first host port of those containers.
const FIRST: u16 = 20_000;

/// A node with a world, and a container whose host port the world knows. Both protocols have one, so that a single way carries all loads.
pub(super) fn site(carrier: Carrier) -> Result<(Path, Site)> {
    let plugin = match carrier {
        Carrier::Plugin(plugin) => plugin,
        Carrier::Limit
        | Carrier::HandedOver
        | Carrier::Crowded
        | Carrier::Wire
        | Carrier::Translated(_) => Plugin::Learned,
        Carrier::WireXdp => Plugin::Xdp,
    };
    let lab = Lab::open()?;
    let node = &lab.node;
    if matches!(carrier, Carrier::Wire | Carrier::WireXdp) {
        offload::take_off(lab.world.netns(), World::LINK)?;
        offload::switch_gro_on(node.netns(), Node::UPLINK)?;
    }
    let network = plugin.network(node, &Family::BOTH);
    if carrier == Carrier::Crowded {
        for first in (FIRST..FIRST + MAPPINGS).step_by(usize::from(EACH)) {
            let mappings: Vec<Mapping> = (first..first + EACH)
                .map(|host| Mapping {
                    protocol: "tcp",
                    host,
                    container: PORT,
                })
                .collect();
            let container = node.netns().sibling(&format!("crowd{first}"))?;
            network.with_ports(&mappings).add(node, &container)?;
        }
    }
    let server = node.netns().sibling("server")?;
    let own = ["tcp", "udp"].map(|protocol| Mapping {
        protocol,
        host: PORT,
        container: PORT,
    });
    let result = network.with_ports(&own).add(node, &server)?.stdout;
    let address = |family: Family| {
        anyhow::Ok(Address {
            target: family.node(),
            own: plugin::address(&result, family)?,
        })
    };
    let path = Path {
        route: Route::WorldToPort,
        carrier,
        client: lab.world.netns().clone(),
        server,
        _node: node.netns().clone(),
        v4: address(Family::V4)?,
        v6: address(Family::V6)?,
    };
    let site = Site {
        carrier,
        purpose: Purpose::HostPorts,
        lab,
    };
    Ok((path, site))
}
