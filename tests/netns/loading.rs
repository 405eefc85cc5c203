//! When programs are loaded, and that those that come later work with the ones that were there.

use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
};

use anyhow::bail;
use aya::{
    maps::{Array, Map, MapData, MapInfo},
    programs::ProgramInfo,
};
use nix::{
    mount::{MsFlags, mount},
    sched::{CpuSet, sched_getaffinity, sched_setaffinity},
    unistd::Pid,
};
use rstest::rstest;
use underpass_abi::{counter::Counter, map, node::Node as Constants};
use underpass_tests::{
    counter::{map_pin, pins},
    leak::Traces,
    prelude::*,
    runtime::Call,
};

const PORT: u16 = 443;

fn programs(node: &Node) -> PathBuf {
    pins(node).join("programs")
}

/// The bpffs belongs to the node's own mount namespace.
fn on<T>(node: &Node, look: impl FnOnce(&Path) -> Result<T> + Send) -> Result<T>
where
    T: Send,
{
    let folder = programs(node);
    node.netns().run(|| look(&folder))
}

fn pinned(node: &Node) -> Result<BTreeSet<String>> {
    on(node, |folder| {
        let entries = fs::read_dir(folder).context("list the pinned programs")?;
        entries
            .map(|entry| Ok(entry?.file_name().to_string_lossy().into_owned()))
            .collect()
    })
}

fn named(programs: &[&str]) -> BTreeSet<String> {
    programs.iter().map(|&name| name.to_owned()).collect()
}

#[test]
fn programs_are_loaded_when_a_device_needs_them() -> Result<()> {
    needs_root!();
    let lab = Lab::unloaded()?;
    let plain = lab.pod("plain")?;
    let mut expected = named(map::USUAL_PROGRAMS);
    ensure!(pinned(&lab.node)? == expected, "{:?}", pinned(&lab.node)?);
    let _mapped = lab.pod_with("mapped", &lab.conf().with_host_port(8080, 80))?;
    expected.insert(map::FROM_HOST.to_owned());
    ensure!(pinned(&lab.node)? == expected, "{:?}", pinned(&lab.node)?);
    plain.call_with_result("CHECK").run(&lab.node)?.silence()
}

#[test]
fn load_loads_all_of_them_ahead() -> Result<()> {
    needs_root!();
    let lab = Lab::unloaded()?;
    for _ in 0..2 {
        let said = lab.node.underpass(&["load"])?;
        let folder = pins(&lab.node);
        ensure!(said.contains(&folder.display().to_string()), "{said}");
        ensure!(pinned(&lab.node)? == named(map::PROGRAMS), "{said}");
    }
    let pod = lab.pod("a")?;
    pod.call_with_result("CHECK").run(&lab.node)?.silence()
}

/// A runtime may be pinned, and whoever loads first decides for all of a node's CPUs.
#[test]
fn tables_are_for_all_cpus_whoever_loads_may_use_only_one() -> Result<()> {
    needs_root!();
    let size = || -> Result<u32> {
        let lab = Lab::unloaded()?;
        lab.node.underpass(&["load"])?;
        held(&lab.node)
    };
    let all = size()?;
    let pinned = on_one_cpu(size)?;
    ensure!(
        pinned == all,
        "{pinned} entries, and {all} of who may use all CPUs"
    );
    Ok(())
}

/// Does something on the first CPU that this thread may use, what it starts included.
pub(crate) fn on_one_cpu<T>(work: impl FnOnce() -> Result<T>) -> Result<T> {
    let this = Pid::from_raw(0);
    let allowed = sched_getaffinity(this)?;
    let first = (0..CpuSet::count()).find(|&cpu| allowed.is_set(cpu).unwrap_or(false));
    let mut one = CpuSet::new();
    one.set(first.context("this thread may run nowhere")?)?;
    sched_setaffinity(this, &one)?;
    let done = work();
    sched_setaffinity(this, &allowed)?;
    done
}

/// The entries of the table of fragments that wait: the one that has room for what a CPU keeps, and no more.
fn held(node: &Node) -> Result<u32> {
    on(node, |folder| {
        let program = ProgramInfo::from_pin(folder.join(map::FROM_POD))?;
        let ids = program.map_ids()?;
        for id in ids.context("the kernel does not tell the maps of a program")? {
            let info = MapInfo::from_id(id)?;
            if info.name_as_str() == Some("HELD") {
                return Ok(info.max_entries());
            }
        }
        bail!("{} knows no map HELD", map::FROM_POD)
    })
}

/// Where the kernel was started without IPv6 its flows, which there are none of, take next to no memory.
#[rstest]
#[case::as_usual("0\n", false)]
#[case::without("1\n", true)]
fn a_kernel_without_ipv6_has_no_room_for_its_flows(
    #[case] disabled: &'static str,
    #[case] is_small: bool,
) -> Result<()> {
    needs_root!();
    let lab = Lab::unloaded()?;
    lab.node.netns().run(|| -> Result<()> {
        let file = lab.node.data_dir().join("disable");
        fs::create_dir_all(lab.node.data_dir())?;
        fs::write(&file, disabled)?;
        let none: Option<&str> = None;
        let place = "/sys/module/ipv6/parameters/disable";
        mount(Some(&file), place, none, MsFlags::MS_BIND, none)
            .context("say it in the kernel's place")
    })?;
    let pod = lab.pod("a")?;
    let size = |name| -> Result<u32> {
        let pin = map_pin(&lab.node, name);
        let map = lab.node.netns().run(|| MapData::from_pin(pin))?;
        Ok(map.info()?.max_entries())
    };
    for (of_ipv4, of_ipv6) in [(map::FLOWS4, map::FLOWS6), (map::SLOTS4, map::SLOTS6)] {
        let (four, six) = (size(of_ipv4)?, size(of_ipv6)?);
        ensure!(
            (six < four / 16) == is_small,
            "{of_ipv4} has {four}, {of_ipv6} {six}"
        );
        ensure!(
            is_small || four == six,
            "{of_ipv4} has {four}, {of_ipv6} {six}"
        );
    }
    // This kernel has IPv6 in any case.
    let families: &[Family] = if is_small { &[V4] } else { &[V4, V6] };
    for family in families {
        let remote = family.remote_at(PORT);
        let _server = tcp::Server::start(lab.world.netns(), remote)?;
        let mut client = tcp::Client::connect(pod.netns(), remote)?;
        client.chat(10)?;
    }
    Ok(())
}

/// The programs of the uplink vanish while the others stay: what is learned by one is believed by another only if both know the same
/// secret.
#[rstest]
fn what_is_loaded_later_knows_what_the_first_know(#[values(V4, V6)] family: Family) -> Result<()> {
    needs_root!();
    let lab = Lab::unloaded()?;
    let pod = lab.pod("a")?;
    on(&lab.node, |folder| {
        for name in [map::FROM_WIRE, map::TO_WIRE] {
            fs::remove_file(folder.join(name)).with_context(|| format!("remove {name}"))?;
        }
        Ok(())
    })?;
    let error = pod.call_with_result("CHECK").run(&lab.node)?.error()?;
    ensure!(error.to_string().contains(map::TO_WIRE), "{error}");
    let _another = lab.pod("b")?;
    pod.call_with_result("CHECK").run(&lab.node)?.silence()?;

    let remote = family.remote_at(PORT);
    let _server = tcp::Server::start(lab.world.netns(), remote)?;
    let meter = Meter::start(&lab.node)?;
    let mut client = tcp::Client::connect(pod.netns(), remote)?;
    client.chat(10)?;
    meter.expect(Counter::BypassWire, 5)
}

/// An executable that was exchanged under running containers goes on with what is loaded, and mixes nothing into it.
#[test]
fn another_build_uses_what_is_loaded_and_adds_nothing() -> Result<()> {
    needs_root!();
    let lab = Lab::unloaded()?;
    let pod = lab.pod("a")?;
    lab.node.netns().run(|| -> Result<()> {
        let pin = map_pin(&lab.node, map::CONSTANTS);
        let mut constants: Array<_, Constants> = Map::Array(MapData::from_pin(pin)?).try_into()?;
        let mine = constants.get(&0, 0)?;
        let other = Constants {
            build: !mine.build,
            ..mine
        };
        Ok(constants.set(0, other, 0)?)
    })?;
    let said = lab.node.underpass(&["status"])?;
    ensure!(said.contains("by another build"), "{said}");

    let plain = lab.pod("b")?;
    for pod in [&pod, &plain] {
        ping::ping(pod.netns(), V4.remote())?;
        ping::ping(pod.netns(), V6.remote())?;
        pod.call_with_result("CHECK").run(&lab.node)?.silence()?;
    }
    let before = pinned(&lab.node)?;
    let netns = lab.node.netns().sibling("mapped")?;
    let path = netns.path().display().to_string();
    let add = Call::new("ADD").attachment("mapped", &path, Pod::IFNAME);
    let conf = lab.conf().with_host_port(8080, 80);
    let error = add.conf(&conf).run(&lab.node)?.error()?;
    ensure!(error.code == 5, "{error}");
    for word in ["another build", map::FROM_HOST, "underpass upgrade"] {
        ensure!(error.msg.contains(word), "{error} lacks {word:?}");
    }
    ensure!(pinned(&lab.node)? == before);
    Ok(())
}

/// Programs are loaded at the same time, by a thread each. A limit of processes is reached.
#[test]
fn without_threads_nothing_is_loaded() -> Result<()> {
    needs_root!();
    let lab = Lab::unloaded()?;
    let before = Traces::of(&lab.node)?;
    let netns = lab.node.netns().sibling("a")?;
    let path = netns.path().display().to_string();
    let add = Call::new("ADD").attachment("a", &path, Pod::IFNAME);
    let add = add.conf(&lab.conf());
    let error = add.run_without_threads(&lab.node)?.error()?;
    ensure!(error.code == 5, "{error}");
    for part in ["Resource temporarily unavailable", "pids.max"] {
        ensure!(error.msg.contains(part), "{error}");
    }
    before.expect_same(&lab.node)?;
    lab.pod("b")?.del()
}
