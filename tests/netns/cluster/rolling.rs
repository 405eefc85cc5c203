//! Agents end, start again, and bring another build, node by node, while pods of all nodes talk.

use std::{
    fs, io,
    mem::offset_of,
    net::{IpAddr, SocketAddr},
    path::Path as File,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

use aya::maps::{HashMap, Map, MapData};
use nix::{
    mount::{MsFlags, mount},
    sys::signal::Signal,
};
use rstest::rstest;
use underpass_abi::{endpoint::Device, map};
use underpass_dataplane::raw_map::RawMap;
use underpass_tests::{
    another_build, counter::map_pin, netns::Netns, prelude::*, runtime::Conf, traffic::serve,
};

use super::{
    firewall::none_was_invalid,
    fixture::Cluster,
    member::{BIN, Member, NET},
};
use crate::upgrade::{
    expect_exchanged, programs,
    traffic::{Pair, Path, while_talking},
    widen,
};

/// Where numbered datagrams go, and connections: in a pod, and at a node that leads to one.
const NUMBERED: u16 = 8_090;
const CONNECTED: u16 = 80;
/// The ports of a guest, and of its node.
const INSIDE: u16 = 81;
const HOST: u16 = 8_081;

/// Has every agent end and start again, with the build that is meant for its node.
fn roll(cluster: &mut Cluster, is_other: bool) -> Result<()> {
    for member in &mut cluster.members {
        member.is_ready()?;
        let before = programs(&member.node)?;
        let was_other = member.build.is_some();
        member.stop_agent(Signal::SIGTERM);
        member.build = if is_other {
            Some(another_build::make(&member.node)?)
        } else {
            None
        };
        member.start_agent()?;
        member.is_ready()?;
        if was_other == is_other {
            continue;
        }
        eventually("the agent's build has taken over", || {
            expect_exchanged(&member.node, &before, &[])
        })?;
    }
    cluster.settle()
}

/// Which build every agent starts again with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Build {
    /// That which it had.
    Same,
    /// One that brings other programs.
    Other,
    /// That of before, after another one.
    Former,
}

/// What a pod asks another one, at that one's address or at one of a node that leads to it.
fn pair<'a>(
    name: &'static str,
    (client, server): (&'a Pod, &'a Pod),
    family: Family,
    node: Option<IpAddr>,
) -> Pair<'a> {
    let path = |port| Path {
        name,
        client: client.netns(),
        server: server.netns(),
        listens: server.at(family, port),
        asked: SocketAddr::new(node.unwrap_or_else(|| server.ip(family)), port),
    };
    (path(NUMBERED), path(CONNECTED))
}

/// Serves the connections of these paths.
fn listen(paths: &[Pair<'_>]) -> Result<Vec<tcp::Server>> {
    let connected = paths.iter().map(|(_, connected)| connected);
    connected
        .map(|path| tcp::Server::start(path.server, path.listens))
        .collect()
}

#[rstest]
fn pods_do_not_notice(
    #[values(Build::Same, Build::Other, Build::Former)] build: Build,
) -> Result<()> {
    needs_root!();
    let mut cluster = Cluster::new(&[0, 0, 1])?;
    cluster.settle()?;
    if build == Build::Former {
        roll(&mut cluster, true)?;
    }
    let pods = cluster.pods()?;
    let mut paths = Vec::new();
    for family in Family::BOTH {
        paths.push(pair("direct", (&pods[0], &pods[1]), family, None));
        paths.push(pair("by VXLAN", (&pods[2], &pods[0]), family, None));
    }
    let _servers = listen(&paths)?;
    while_talking(&paths, &[], || roll(&mut cluster, build == Build::Other))?;
    cluster.all_bypass()
}

/// A place for guests: a node, the network there with a host port, and the node's addresses.
struct Place {
    node: Arc<Node>,
    conf: Conf,
    addresses: [IpAddr; 2],
}

/// Pods that come and go.
struct Guests<'a> {
    places: Vec<Place>,
    /// Who asks them.
    world: Netns,
    /// Whom they ask.
    pods: &'a [Pod],
}

impl<'a> Guests<'a> {
    fn of(cluster: &Cluster, pods: &'a [Pod]) -> Result<Self> {
        let place = |member: &Member| -> Result<Place> {
            Ok(Place {
                node: Arc::clone(&member.node),
                conf: member.conf()?.with_host_port(HOST, INSIDE),
                addresses: Family::BOTH.map(|family| member.address(family)),
            })
        };
        let places = cluster.members.iter().map(place);
        Ok(Self {
            places: places.collect::<Result<_>>()?,
            world: cluster.fabric.clone(),
            pods,
        })
    }

    /// A pod by whichever plugin is installed, now on this node and then on that one: it serves by a port of its node, reaches the world and pods of
    /// all nodes, is checked, and goes.
    fn come_and_go(&self, stop: &AtomicBool) -> Result<()> {
        for (number, place) in self.places.iter().cycle().enumerate() {
            if stop.load(Ordering::Relaxed) {
                break;
            }
            let installed = File::new(BIN).join("underpass");
            let name = format!("guest{number}");
            let guest = Pod::add_by(&place.node, &name, &place.conf, &installed)?;
            for (family, address) in Family::BOTH.into_iter().zip(place.addresses) {
                let _servers = serve(guest.netns(), guest.at(family, INSIDE))?;
                let at = SocketAddr::new(address, HOST);
                let mut client = tcp::Client::connect(&self.world, at).context(name.clone())?;
                client.chat(3)?;
                // A FIN might be sent again when nobody has the port any more.
                client.reset()?;
                ping::ping(guest.netns(), family.remote())?;
                for pod in self.pods {
                    ping::ping(guest.netns(), pod.ip(family))
                        .with_context(|| format!("{name} to {}", pod.name()))?;
                }
            }
            guest
                .call_with_result("CHECK")
                .run(&place.node)?
                .silence()?;
            guest.del()?;
        }
        Ok(())
    }
}

/// Beside strict firewalls, while pods come and go on both nodes: neither they nor those that talk through VXLAN, or by a host port of the other
/// node, lose anything.
#[rstest]
fn nor_do_pods_that_come_and_go(#[values(Build::Other, Build::Former)] build: Build) -> Result<()> {
    needs_root!();
    let mut cluster = Cluster::new(&[0, 1])?;
    cluster.settle()?;
    let firewalls = cluster.fortify()?;
    if build == Build::Former {
        roll(&mut cluster, true)?;
    }
    let pods = cluster.pods()?;
    let node = &cluster.members[0];
    let conf = node
        .conf()?
        .with_host_ports(&[NUMBERED, CONNECTED].map(|port| (port, port)));
    let served = Pod::add(&node.node, "served", &conf)?;
    let mut paths = Vec::new();
    for family in Family::BOTH {
        let at = Some(node.address(family));
        paths.push(pair("by VXLAN", (&pods[1], &pods[0]), family, None));
        paths.push(pair("by a host port", (&pods[1], &served), family, at));
    }
    let _servers = listen(&paths)?;
    let guests = Guests::of(&cluster, &pods)?;
    while_talking(&paths, &[&|stop| guests.come_and_go(stop)], || {
        roll(&mut cluster, build == Build::Other)
    })?;
    cluster.all_bypass()?;
    none_was_invalid(&firewalls)
}

/// The programs of before have maps with less in them, so that the agent's build can install nothing before its own have taken over.
#[test]
fn an_agent_whose_build_knows_more_of_a_container_takes_over() -> Result<()> {
    needs_root!();
    takes_over_from(shorten)
}

/// The way back: those of before have maps with more in them.
#[test]
fn so_does_one_whose_build_knows_less() -> Result<()> {
    needs_root!();
    takes_over_from(widen)
}

/// Has an agent find maps that are not its build's. Where it can't put its plugin, the one that is there goes on with what it knows.
fn takes_over_from(change: fn(&Node) -> Result<()>) -> Result<()> {
    let mut cluster = Cluster::new(&[0])?;
    let member = &mut cluster.members[0];
    let pod = member.pod("of-before")?;
    member.stop_agent(Signal::SIGTERM);
    change(&member.node)?;
    let before = programs(&member.node)?;
    let full = "/run/full";
    let netns = member.node.netns();
    netns.run(|| {
        let none: Option<&str> = None;
        fs::create_dir(full)?;
        mount(
            none,
            full,
            Some("tmpfs"),
            MsFlags::empty(),
            Some("size=64k"),
        )
        .map_err(io::Error::from)
    })?;
    let said = member.node.underpass_error(&[
        "install",
        "--upgrade",
        "--bin-dir",
        full,
        "--net-dir",
        NET,
        "--range",
        &member.range(V4),
    ])?;
    ensure!(said.contains("No space left on device"), "{said}");
    ensure!(programs(&member.node)? == before, "it has upgraded");
    let left = member.names(full)?;
    ensure!(left.is_empty(), "{left:?}");
    member.start_agent()?;
    member.is_ready()?;
    expect_exchanged(&member.node, &before, &[&pod])?;
    for family in Family::BOTH {
        ping::ping(pod.netns(), member.gateway(family))?;
    }
    member.pod("later")?.del()
}

/// The map of devices that an earlier build has pinned: its values end before the last field, in which these nodes have nothing to say.
fn shorten(node: &Node) -> Result<()> {
    type Short = [u8; offset_of!(Device, own_mac)];
    let pin = map_pin(node, map::DEVICES);
    let short = pin.with_file_name(format!("{}-1-{}", map::DEVICES, size_of::<Short>()));
    node.netns().run(|| -> Result<()> {
        let known: HashMap<_, u32, [u8; size_of::<Device>()]> =
            Map::HashMap(MapData::from_pin(&pin)?).try_into()?;
        RawMap::create_hash(c"DEVICES", size_of::<u32>(), size_of::<Short>(), 1 << 10)?
            .pin(&short)?;
        let mut copy: HashMap<_, u32, Short> =
            Map::HashMap(MapData::from_pin(&short)?).try_into()?;
        for entry in &known {
            let (index, device) = entry?;
            let (kept, cut) = device.split_at(size_of::<Short>());
            ensure!(cut.iter().all(|byte| *byte == 0), "{cut:?} is cut off");
            copy.insert(index, Short::try_from(kept)?, 0)?;
        }
        Ok(fs::remove_file(&pin)?)
    })
}
