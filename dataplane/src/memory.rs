//! Whether there is room for what is about to be loaded, in the control group of this process.
//!
//! Maps and programs count against the group of who makes them from Linux 5.11 on, and what the verifier works with from 6.17 on ("bpf: include
//! verifier memory allocations in memcg statistics"). Where a group is full the kernel ends its largest process, which may be the daemon
//! that has called us. So that is not tried.

use std::{
    fs,
    path::{Path, PathBuf},
};

use crate::{Error, kernel};

/// What programs and maps take beside the tables of flows, in bytes, with a third to spare.
const LOADED: u64 = 16 << 20;
/// What each CPU takes besides: entries that it keeps for itself of tables that evict, of which those that wait for their first fragment are the largest.
const EACH_CPU: u64 = 400 << 10;
/// What an entry of a flow table takes from the first: of IPv4, and of IPv6.
const EACH: [u64; 2] = [32, 56];
/// What the verifier takes for as long as it works, with a fifth to spare.
const VERIFIER: u64 = 80 << 20;
/// The kernel since which what is loaded counts.
const LOADED_SINCE: (u32, u32) = (5, 11);
/// The kernel since which the verifier's work counts.
const VERIFIER_SINCE: (u32, u32) = (6, 17);

/// Fails if loading programs, and flow tables of so many entries and of IPv6 of `flows6`, could be too much for a group that this process is in, on a machine with so many
/// CPUs.
pub(crate) fn require(flows: u32, flows6: u32, cpus: u32) -> Result<(), Error> {
    let needed = needed([flows, flows6], cpus, kernel::version());
    match limit() {
        Some(limit) if limit < needed => Err(Error::Cramped { limit, needed }),
        _ => Ok(()),
    }
}

/// What counts, in bytes.
fn needed(flows: [u32; 2], cpus: u32, kernel: (u32, u32)) -> u64 {
    if kernel < LOADED_SINCE {
        return 0;
    }
    let verifier = if kernel < VERIFIER_SINCE { 0 } else { VERIFIER };
    let tables = flows.into_iter().zip(EACH);
    let tables: u64 = tables.map(|(flows, each)| each * u64::from(flows)).sum();
    LOADED + EACH_CPU * u64::from(cpus) + tables + verifier
}

/// Asks how many bytes this process may have with all others of a group that it is in. None if there is no limit, or no telling.
fn limit() -> Option<u64> {
    let groups = fs::read_to_string("/proc/thread-self/cgroup").ok()?;
    let mounts = fs::read_to_string("/proc/thread-self/mountinfo").ok()?;
    let place = place(&groups, &mounts)?;
    let limits = place.files().into_iter().filter_map(|file| {
        let text = fs::read_to_string(file).ok()?;
        stated(&text)
    });
    limits.min()
}

/// Where a group has its files, by the version of control groups.
#[derive(Clone, PartialEq, Eq, Debug)]
enum Place {
    /// One file says it for all groups above as well.
    First(PathBuf),
    /// Each group up to the mount says its own.
    Second { group: PathBuf, mount: PathBuf },
}

impl Place {
    fn files(&self) -> Vec<PathBuf> {
        match self {
            Self::First(group) => vec![group.join("memory.stat")],
            Self::Second { group, mount } => group
                .ancestors()
                .take_while(|group| group.starts_with(mount))
                .map(|group| group.join("memory.max"))
                .collect(),
        }
    }
}

/// Reads a limit: alone in its file, or in a line of its own name. `max` is none.
fn stated(text: &str) -> Option<u64> {
    let named = |line: &str| {
        line.strip_prefix("hierarchical_memory_limit ")?
            .parse()
            .ok()
    };
    text.trim()
        .parse()
        .ok()
        .or_else(|| text.lines().find_map(named))
}

/// Finds the group of this process that limits memory: `groups` is `/proc/<process>/cgroup`, `mounts` is
/// `/proc/<process>/mountinfo`.
fn place(groups: &str, mounts: &str) -> Option<Place> {
    let group_of = |controller: &str| {
        groups.lines().find_map(|line| {
            let mut parts = line.splitn(3, ':').skip(1);
            let (controllers, path) = (parts.next()?, parts.next()?);
            controllers
                .split(',')
                .any(|one| one == controller)
                .then_some(path)
        })
    };
    let found = |kind: &str, option: &str, path: &str| {
        mounts.lines().find_map(|line| {
            let (place, source) = line.split_once(" - ")?;
            let mut columns = place.split(' ').skip(3);
            let (root, mount) = (columns.next()?, Path::new(columns.next()?));
            let is_it = source.split(' ').next() == Some(kind)
                && source
                    .split([' ', ','])
                    .any(|one| option.is_empty() || one == option);
            let below = Path::new(path).strip_prefix(root).ok()?;
            is_it.then(|| (mount.join(below), mount.to_owned()))
        })
    };
    if let Some(path) = group_of("memory") {
        return found("cgroup", "memory", path).map(|(group, _)| Place::First(group));
    }
    let (group, mount) = found("cgroup2", "", group_of("")?)?;
    Some(Place::Second { group, mount })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_counts_depends_on_the_kernel() {
        let needed = |kernel| needed([1 << 18; 2], 2, kernel) >> 20;
        assert_eq!(
            [(5, 10), (5, 11), (6, 16), (6, 17), (7, 0)].map(needed),
            [0, 38, 38, 118, 118]
        );
    }

    #[test]
    fn without_ipv6_less_is_enough() {
        let needed = |flows6| needed([1 << 18, flows6], 2, (6, 1)) >> 20;
        assert_eq!([1 << 18, 1 << 10].map(needed), [38, 24]);
    }

    /// As many as the tables are made with: an entry of a packet that waits takes more than two KiB.
    #[test]
    fn each_cpu_has_room_for_what_it_keeps() {
        let needed = |cpus| needed([1 << 18; 2], cpus, (6, 1));
        for cpus in [16, 64, 256] {
            let more = needed(cpus) - needed(2);
            assert!(more >= u64::from(cpus - 2) * 130 * 2_152, "{cpus}: {more}");
        }
        assert!(needed(256) < 150 << 20);
    }

    #[test]
    fn the_group_of_the_first_version() {
        let groups = "5:cpu,cpuacct:/x\n4:memory:/pods/a\n1:name=systemd:/y\n0::/z\n";
        let whole = "30 20 0:26 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu,cpuacct\n\
                     31 20 0:27 / /sys/fs/cgroup/memory rw shared:9 - cgroup cgroup rw,memory\n";
        let part = "31 20 0:27 /pods/a /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n";
        let first = |path: &str| Some(Place::First(path.into()));
        assert_eq!(place(groups, whole), first("/sys/fs/cgroup/memory/pods/a"));
        assert_eq!(place(groups, part), first("/sys/fs/cgroup/memory/"));
        assert_eq!(place(groups, ""), None);
        assert_eq!(
            stated("cache 0\nhierarchical_memory_limit 52428800\nrss 1\n"),
            Some(52_428_800)
        );
    }

    #[test]
    fn the_group_of_the_second_version_and_those_above() {
        let mounts = "31 20 0:27 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw,nsdelegate\n";
        let place = place("0::/pods/a\n", mounts).expect("it is mounted");
        let files = ["pods/a/", "pods/", ""].map(|group| {
            let folder = Path::new("/sys/fs/cgroup").join(group);
            folder.join("memory.max")
        });
        assert_eq!(place.files(), files);
        assert_eq!(stated("52428800\n"), Some(52_428_800));
        assert_eq!(stated("max\n"), None);
    }
}
