//! Another build takes over while containers are attached: their traffic does not notice, whatever it can't take over stays as it is, and
//! an upgrade that is killed is ended by the next call.

mod strike;
pub(crate) mod traffic;

use std::{
    collections::BTreeMap,
    fs,
    net::SocketAddr,
    path::{Path as File, PathBuf},
    sync::atomic::{AtomicBool, Ordering},
};

use aya::{
    maps::{HashMap, Map, MapData},
    programs::ProgramInfo,
};
use rstest::rstest;
use serde_json::Value;
use underpass_abi::{addr::Addr, endpoint::Endpoint, map};
use underpass_dataplane::raw_map::RawMap;
use underpass_tests::{
    another_build,
    counter::{map_pin, pins},
    node::plugin,
    patience,
    prelude::*,
    runtime::Call,
    traffic::serve,
};

use traffic::{Path, while_talking};

/// The node's port that leads to the container, and the container's.
const PORT: u16 = 8080;
const INSIDE: u16 = 80;
/// Where numbered datagrams go.
const NUMBERED: u16 = 8090;
const REMOTE: u16 = 443;

/// The kernel's numbers of the programs that are pinned.
pub(crate) fn programs(node: &Node) -> Result<BTreeMap<String, u32>> {
    let folder = pins(node).join("programs");
    node.netns().run(|| {
        let entries = fs::read_dir(&folder).context("list the pinned programs")?;
        entries
            .map(|entry| {
                let path = entry?.path();
                let name = path.file_name().unwrap_or_default().display().to_string();
                Ok((name, ProgramInfo::from_pin(&path)?.id()))
            })
            .collect()
    })
}

/// Fails unless all programs are others than before, and sit on the devices of these containers.
pub(crate) fn expect_exchanged(
    node: &Node,
    before: &BTreeMap<String, u32>,
    pods: &[&Pod],
) -> Result<()> {
    let now = programs(node)?;
    ensure!(now.keys().eq(before.keys()), "{before:?}, and then {now:?}");
    let same: Vec<_> = now
        .iter()
        .filter(|(name, id)| before.get(*name) == Some(id))
        .collect();
    ensure!(same.is_empty(), "not exchanged: {same:?}");
    pods.iter()
        .try_for_each(|pod| pod.call_with_result("CHECK").run(node)?.silence())
}

fn upgrade(node: &Node, build: &File) -> Result<String> {
    node.underpass_of(build, &["upgrade"])
}

/// Every path of both families is full all the time; containers come and go.
#[rstest]
fn nobody_notices(#[values("off", "generic")] xdp: &str) -> Result<()> {
    const ROUNDS: u32 = 3;
    needs_root!();
    let rounds = (ROUNDS / patience::factor()).max(1);
    let lab = Lab::unloaded()?;
    let builds = [another_build::make(&lab.node)?, plugin().to_owned()];
    let mapped = lab
        .conf()
        .with("xdp", xdp)
        .with_host_ports(&[(PORT, INSIDE), (NUMBERED, NUMBERED)]);
    let server = lab.pod_with("server", &mapped)?;
    let client = lab.pod("client")?;
    let mut servers = Vec::new();
    let mut paths = Vec::new();
    for family in Family::BOTH {
        servers.push(tcp::Server::start(
            server.netns(),
            server.at(family, INSIDE),
        )?);
        servers.push(tcp::Server::start(
            lab.world.netns(),
            family.remote_at(REMOTE),
        )?);
        let node = family.node();
        for (name, from, to, host, at) in [
            (
                "to a container",
                client.netns(),
                server.netns(),
                server.ip(family),
                INSIDE,
            ),
            (
                "masqueraded",
                client.netns(),
                lab.world.netns(),
                family.remote(),
                REMOTE,
            ),
            (
                "by a host port",
                lab.world.netns(),
                server.netns(),
                node,
                PORT,
            ),
        ] {
            let by_port = at == PORT;
            let numbered = if by_port { NUMBERED } else { NUMBERED + 1 };
            paths.push((
                Path {
                    name,
                    client: from,
                    server: to,
                    listens: if at == REMOTE {
                        SocketAddr::new(host, numbered)
                    } else {
                        server.at(family, numbered)
                    },
                    asked: SocketAddr::new(host, numbered),
                },
                Path {
                    name,
                    client: from,
                    server: to,
                    listens: SocketAddr::new(host, at),
                    asked: SocketAddr::new(host, at),
                },
            ));
        }
    }

    while_talking(&paths, &[&|stop| come_and_go(&lab, stop)], || {
        (0..rounds).try_for_each(|_| {
            builds.iter().try_for_each(|build| {
                let before = programs(&lab.node)?;
                let said = upgrade(&lab.node, build)?;
                ensure!(said.contains("has taken over from build"), "{said}");
                expect_exchanged(&lab.node, &before, &[&server, &client])
            })
        })
    })?;
    // Whoever has been there before all that goes as usual.
    server.del()?;
    client.del()
}

/// A container with a host port, which serves, is checked and goes, again and again.
fn come_and_go(lab: &Lab, stop: &AtomicBool) -> Result<()> {
    let conf = lab.conf().with_host_port(PORT + 1, INSIDE);
    for number in 0.. {
        if stop.load(Ordering::Relaxed) {
            break;
        }
        let pod = lab.pod_with(&format!("guest{number}"), &conf)?;
        for family in Family::BOTH {
            let _server = serve(pod.netns(), pod.at(family, INSIDE))?;
            let at = SocketAddr::new(family.node(), PORT + 1);
            tcp::visit(lab.world.netns(), at).context("a container that came meanwhile")?;
            ping::ping(pod.netns(), family.remote())?;
        }
        pod.call_with_result("CHECK").run(&lab.node)?.silence()?;
        pod.del()?;
    }
    Ok(())
}

#[test]
fn there_may_be_nothing_to_do() -> Result<()> {
    needs_root!();
    let lab = Lab::unloaded()?;
    let said = lab.node.underpass(&["upgrade"])?;
    ensure!(said.contains("nothing is loaded at"), "{said}");
    let _pod = lab.pod("a")?;
    let before = programs(&lab.node)?;
    let said = lab.node.underpass(&["upgrade"])?;
    ensure!(said.contains("this build is loaded at"), "{said}");
    ensure!(programs(&lab.node)? == before);
    Ok(())
}

/// The other build may ask for what this one never asked of the node.
#[test]
fn what_the_nodes_stack_is_now_counts() -> Result<()> {
    needs_root!();
    let lab = Lab::unloaded()?;
    let _pod = lab.pod("a")?;
    let build = another_build::make(&lab.node)?;
    let is_in_force = || -> Result<bool> {
        let status: Value = serde_json::from_str(&lab.node.underpass(&["status", "--json"])?)?;
        status["networkStack"]["inForce"]
            .as_bool()
            .with_context(|| format!("{status:#}"))
    };
    lab.firewall.set_liberal(true)?;
    ensure!(!is_in_force()?, "before any call");
    upgrade(&lab.node, &build)?;
    ensure!(is_in_force()?, "after the upgrade");
    Ok(())
}

/// A call that hangs keeps no others from theirs because somebody looks whether there is an upgrade.
#[rstest]
#[case::nothing_to_do(None)]
#[case::refused(Some("FLOWS6-2-1000"))]
fn calls_wait_for_no_upgrade_that_is_none(#[case] other: Option<&str>) -> Result<()> {
    needs_root!();
    let lab = Lab::unloaded()?;
    let _pod = lab.pod("a")?;
    let netns = lab.node.netns().sibling("slow")?;
    let path = netns.path().display().to_string();
    let call = |verb| {
        let call = Call::new(verb).attachment("slow", &path, Pod::IFNAME);
        call.conf(&lab.conf())
    };
    let traced = call("ADD").run_around(&lab.node, "RTM_NEWTFILTER", || {
        let renamed = other.map(|other| rename(&lab.node, map::FLOWS6, other));
        let renamed = renamed.transpose()?;
        if let Some(renamed) = renamed {
            let said = lab.node.underpass_error(&["upgrade"])?;
            ensure!(said.contains("its map is FLOWS6-2-1000"), "{said}");
            let pin = map_pin(&lab.node, map::FLOWS6);
            lab.node.netns().run(|| fs::rename(&renamed, &pin))?;
        } else {
            let said = lab.node.underpass(&["upgrade"])?;
            ensure!(said.contains("this build is loaded at"), "{said}");
        }
        Ok(())
    })?;
    traced.reply.result()?;
    call("DEL").run(&lab.node)?.silence()
}

/// An ADD of another build that needs a program which is not loaded says what to do; and so it is.
#[test]
fn an_add_that_is_refused_says_upgrade() -> Result<()> {
    needs_root!();
    let lab = Lab::unloaded()?;
    let plain = lab.pod("plain")?;
    let build = another_build::make(&lab.node)?;
    let netns = lab.node.netns().sibling("mapped")?;
    let path = netns.path().display().to_string();
    let call = |verb| {
        Call::new(verb)
            .attachment("mapped", &path, Pod::IFNAME)
            .conf(&lab.conf().with_host_port(PORT, INSIDE))
            .by(&build)
    };
    let error = call("ADD").run(&lab.node)?.error()?;
    ensure!(
        error.to_string().contains("run `underpass upgrade"),
        "{error}"
    );
    upgrade(&lab.node, &build)?;
    call("ADD").run(&lab.node)?.result()?;
    for family in Family::BOTH {
        let _server = serve(&netns, family.port(INSIDE))?;
        let at = SocketAddr::new(family.node(), PORT);
        let mut client = tcp::Client::connect(lab.world.netns(), at)?;
        client.chat(3)?;
        // A FIN might be sent again when nobody has the port any more.
        client.reset()?;
    }
    call("DEL").run(&lab.node)?.silence()?;
    plain.call_with_result("CHECK").run(&lab.node)?.silence()
}

/// Gives a pinned map another name: that of a layout which this build does not know.
fn rename(node: &Node, name: &str, other: &str) -> Result<PathBuf> {
    let pin = map_pin(node, name);
    let renamed = pin.with_file_name(other);
    node.netns().run(|| fs::rename(&pin, &renamed))?;
    Ok(renamed)
}

/// What the programs alone write is theirs: calls go on. The rest nobody uses by mistake.
#[rstest]
#[case::entries_of_programs(map::FLOWS6, "FLOWS6-2-1000", "its map is FLOWS6-2-1000")]
#[case::another_meaning(map::OWNERS, "OWNERS-9-96", "its map is OWNERS-9-96")]
fn what_it_does_not_know_is_refused(
    #[case] name: &str,
    #[case] other: &str,
    #[case] reason: &str,
) -> Result<()> {
    needs_root!();
    let lab = Lab::unloaded()?;
    let pod = lab.pod("a")?;
    let before = programs(&lab.node)?;
    let renamed = rename(&lab.node, name, other)?;
    let said = lab.node.underpass_error(&["upgrade"])?;
    ensure!(
        said.contains(reason)
            && said.contains("nothing was changed")
            && said.contains("drain the node"),
        "{said}"
    );
    ensure!(programs(&lab.node)? == before);
    let netns = lab.node.netns().sibling("b")?;
    let path = netns.path().display().to_string();
    if name == map::FLOWS6 {
        let said = lab.node.underpass_error(&["flows"])?;
        ensure!(said.contains("run `underpass upgrade"), "{said}");
        let call = |verb| {
            let call = Call::new(verb).attachment("b", &path, Pod::IFNAME);
            call.conf(&lab.conf()).run(&lab.node)
        };
        call("STATUS")?.silence()?;
        call("ADD")?.result()?;
        ping::ping(&netns, V4.remote())?;
        ping::ping(&netns, V6.remote())?;
        call("DEL")?.silence()?;
    }
    for (verb, code) in [("ADD", 5), ("DEL", 5), ("STATUS", 50)] {
        if name == map::FLOWS6 {
            break;
        }
        let call = Call::new(verb).attachment("b", &path, Pod::IFNAME);
        let error = call.conf(&lab.conf()).run(&lab.node)?.error()?;
        ensure!(
            error.code == code && error.to_string().contains("run `underpass upgrade"),
            "{error}"
        );
    }
    for family in Family::BOTH {
        ping::ping(pod.netns(), family.remote())?;
    }
    let left = lab
        .node
        .netns()
        .run(|| fs::read_dir(lab.node.bpf_root()).map(Iterator::count))?;
    ensure!(left == 1, "{left} folders are left");
    let pin = map_pin(&lab.node, name);
    lab.node.netns().run(|| fs::rename(&renamed, &pin))?;
    pod.call_with_result("CHECK").run(&lab.node)?.silence()
}

/// The map that another build has pinned: the same entries, with eight bytes more that this build knows nothing of.
pub(crate) fn widen(node: &Node) -> Result<()> {
    type Wide = [u8; size_of::<Endpoint>() + 8];
    let pin = map_pin(node, map::ENDPOINTS);
    let wide = pin.with_file_name(format!("{}-1-{}", map::ENDPOINTS, size_of::<Wide>()));
    node.netns().run(|| -> Result<()> {
        let known: HashMap<_, Addr, [u8; size_of::<Endpoint>()]> =
            Map::HashMap(MapData::from_pin(&pin)?).try_into()?;
        RawMap::create_hash(c"ENDPOINTS", size_of::<Addr>(), size_of::<Wide>(), 1 << 10)?
            .pin(&wide)?;
        let mut copy: HashMap<_, Addr, Wide> =
            Map::HashMap(MapData::from_pin(&wide)?).try_into()?;
        for entry in &known {
            let (addr, endpoint) = entry?;
            let mut value = [0xee; size_of::<Wide>()];
            value[..endpoint.len()].copy_from_slice(&endpoint);
            copy.insert(addr, value, 0)?;
        }
        Ok(fs::remove_file(&pin)?)
    })
}

/// Values that only user space writes may grow and shrink from build to build.
#[test]
fn entries_are_copied() -> Result<()> {
    needs_root!();
    let lab = Lab::unloaded()?;
    let pods = [lab.pod("a")?, lab.pod("b")?];
    widen(&lab.node)?;
    let error = pods[0].call_with_result("CHECK").run(&lab.node)?.error()?;
    ensure!(
        error.to_string().contains("run `underpass upgrade"),
        "{error}"
    );
    let before = programs(&lab.node)?;
    let said = lab.node.underpass(&["upgrade"])?;
    ensure!(said.contains("entries copied: ENDPOINTS"), "{said}");
    expect_exchanged(&lab.node, &before, &[&pods[0], &pods[1]])?;
    for family in Family::BOTH {
        let at = pods[1].at(family, INSIDE);
        let _server = tcp::Server::start(pods[1].netns(), at)?;
        let meter = Meter::start(&lab.node)?;
        tcp::Client::connect(pods[0].netns(), at)?.chat(10)?;
        meter.expect(Counter::BypassPeer, 5)?;
        ping::ping(pods[0].netns(), family.remote())?;
    }
    pods.into_iter().try_for_each(Pod::del)?;
    lab.pod("c")?.del()
}
