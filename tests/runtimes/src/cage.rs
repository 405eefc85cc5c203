//! A place on a node where a runtime and all that it starts live and die together: processes, mounts and control groups of its own.
//!
//! ```text
//!   this process ──pipe──> init of a PID namespace ── runtime, shims, containers      ends: all of them are killed
//!                ──pipe──> keeper                                                     ends: the control groups are removed
//! ```
//!
//! Whatever ends this process closes both pipes. Files are on file systems in memory that go with the last process.

use std::{
    collections::BTreeSet,
    fs,
    io::{BufRead as _, BufReader, Write as _},
    os::unix::process::CommandExt as _,
    path::{Path, PathBuf},
    process::{self, Child, Command, Stdio},
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use anyhow::{Context as _, Result, bail, ensure};
use nix::sched::{CloneFlags, unshare};
use underpass_tests::{Node, netns::Netns, node, patience};

use crate::{plugins, wait_until};

/// Where runtimes have what must not be seen by others, nor outlast them: config, plugins, images, states, locks.
const OWN: [&str; 7] = [
    "/etc/cni",
    "/etc/containers",
    "/opt",
    "/var/lib",
    "/var/log",
    "/var/tmp",
    "/dev/shm",
];

/// Where the kernel shows control groups, in whatever version.
const CGROUPS: &str = "/sys/fs/cgroup";

/// How long a command of a runtime may take.
const COMMAND_TIMEOUT: Duration = Duration::from_secs(40);

/// Mounts what the cage has for itself, says who its init is, and waits for the end of the pipe. It must not become `cat`, which would
/// leave the orphans that come to it lying about.
const INIT: &str = r#"set -e
for folder in "$@"; do mount -t tmpfs -o mode=755 own "$folder"; done
chmod 1777 /var/tmp /dev/shm
mount -t proc proc /proc
echo ready
cat >/dev/null
exit 0"#;

/// Waits for the end of the pipe and of the init that it was told, and removes the control groups.
const KEEPER: &str = r#"read -r init
cat >/dev/null
lives() { grep -q '^State:.[^ZX]' "/proc/$init/status" 2>/dev/null; }
left() { find "$1" -depth -type d -path "*/$2*" 2>/dev/null; }
for attempt in $(seq 100); do
    if lives; then sleep 0.1; continue; fi
    left "$@" | while read -r folder; do rmdir "$folder" 2>/dev/null; done
    [ -z "$(left "$@")" ] && exit 0
    sleep 0.1
done
exit 1"#;

/// A cage on a node. Dropping it kills what is inside.
#[derive(Debug)]
pub struct Cage {
    node: Arc<Node>,
    init: Child,
    keeper: Child,
    cgroup: String,
}

impl Cage {
    /// A cage with no runtime in it, but with the plugins where runtimes look for them.
    pub fn on(node: &Arc<Node>) -> Result<Self> {
        let cage = Self::empty_on(node)?;
        cage.furnish()?;
        Ok(cage)
    }

    /// A cage with nothing in it.
    pub fn empty_on(node: &Arc<Node>) -> Result<Self> {
        static CAGES: AtomicUsize = AtomicUsize::new(0);
        for folder in OWN {
            ensure!(
                Path::new(folder).is_dir(),
                "there is no {folder} to mount on, which Debian's package podman would bring: make one"
            );
        }
        let number = CAGES.fetch_add(1, Ordering::Relaxed);
        let cgroup = format!("underpass-cage-{}-{number}", process::id());
        // First, so that nothing is made that nobody removes.
        let mut keeper = shell(KEEPER, &[CGROUPS, &cgroup])
            .stdout(Stdio::null())
            .spawn()
            .context("start the keeper")?;
        let init = start_init(node.netns())?;
        if let Some(pipe) = &mut keeper.stdin {
            writeln!(pipe, "{}", init.id()).context("tell the keeper")?;
        }
        Ok(Self {
            node: Arc::clone(node),
            init,
            keeper,
            cgroup,
        })
    }

    fn furnish(&self) -> Result<()> {
        for folder in ["/etc/cni/net.d", plugins::FOLDER, "/run/image"] {
            let path = self.path(folder);
            fs::create_dir_all(&path).with_context(|| format!("make {folder}"))?;
        }
        let from = node::plugin();
        for name in plugins::NAMES {
            let to = self.path(plugins::FOLDER).join(name);
            // A copy: what is in a folder that this cage has for itself is not seen inside.
            fs::copy(from, &to).with_context(|| format!("copy the plugin {}", from.display()))?;
        }
        Ok(())
    }

    /// The node it is on.
    #[must_use]
    pub fn node(&self) -> &Arc<Node> {
        &self.node
    }

    /// Where control groups of containers belong, as runtimes want it: from the root of each hierarchy.
    #[must_use]
    pub fn cgroup(&self) -> String {
        format!("/{}", self.cgroup)
    }

    /// The path by which this process reaches a file of the cage.
    #[must_use]
    pub fn path(&self, inside: &str) -> PathBuf {
        PathBuf::from(format!("/proc/{}/root{inside}", self.init.id()))
    }

    /// Writes a file of the cage, at once as far as readers can tell.
    pub fn write(&self, inside: &str, text: &str) -> Result<()> {
        let path = self.path(inside);
        let unfinished = path.with_extension("new");
        fs::write(&unfinished, text)
            .and_then(|()| fs::rename(&unfinished, &path))
            .with_context(|| format!("write {inside}"))
    }

    /// Reads a file of the cage.
    pub fn read(&self, inside: &str) -> Result<String> {
        fs::read_to_string(self.path(inside)).with_context(|| format!("read {inside}"))
    }

    /// The network namespace of a process, by the number that the process has in the cage.
    pub fn netns_of(&self, pid: u32, name: &str) -> Result<Netns> {
        let path = self.path(&format!("/proc/{pid}/ns/net"));
        let file =
            fs::File::open(&path).with_context(|| format!("open the network of process {pid}"))?;
        Ok(self.node.netns().adopt(name, file.into()))
    }

    /// A command to be run inside. Its first process is not the command, which therefore has a number of its own in the cage.
    #[must_use]
    pub fn command(&self, program: &str) -> Command {
        let mut command = Command::new("nsenter");
        let target = self.init.id().to_string();
        command
            .args(["--target", &target, "--mount", "--net", "--pid"])
            .args(["--", program])
            .env_clear()
            .env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin")
            .env("HOME", "/run");
        command
    }

    /// Runs a program inside, which must succeed in time: its standard output.
    pub fn expect(&self, program: &str, arguments: &[&str]) -> Result<String> {
        // Whoever kills nsenter does not kill what it has started.
        let limit = patience::here(COMMAND_TIMEOUT).as_secs().to_string();
        let mut command = self.command("timeout");
        command.args(["--kill-after=5", &limit, program]);
        self.node.netns().expect(command.args(arguments), &[])
    }

    /// Processes of this name that live in the cage.
    pub fn processes(&self, name: &str) -> Result<BTreeSet<u32>> {
        let mut found = BTreeSet::new();
        for entry in fs::read_dir(self.path("/proc")).context("list the processes of the cage")? {
            let entry = entry?;
            let Some(pid) = entry.file_name().to_str().and_then(|pid| pid.parse().ok()) else {
                continue;
            };
            // One that has ended in the meantime has no name.
            let known = fs::read_to_string(entry.path().join("comm"));
            if known.is_ok_and(|known| known.trim_end() == name) {
                found.insert(pid);
            }
        }
        Ok(found)
    }

    /// Kills all processes of this name in the cage, of which there must be one, and waits until they are gone.
    pub fn kill_all(&self, name: &str) -> Result<()> {
        let pids = self.processes(name)?;
        ensure!(!pids.is_empty(), "no process {name} in the cage");
        let pids: Vec<String> = pids.iter().map(u32::to_string).collect();
        // Some may end with the first of them, before it is their turn.
        let line = format!("kill -KILL {} || true", pids.join(" "));
        self.expect("sh", &["-c", &line])?;
        wait_until("those that were killed are gone", || {
            let left = self.processes(name)?;
            ensure!(left.is_empty(), "{name} still runs: {left:?}");
            Ok(())
        })
    }

    /// Kills all that is inside, as if this process had been killed; fails if anything is left of it.
    pub fn destroy(mut self) -> Result<()> {
        self.end()
    }

    fn end(&mut self) -> Result<()> {
        drop(self.init.stdin.take());
        self.init.wait().context("wait for the init of a cage")?;
        drop(self.keeper.stdin.take());
        let status = self.keeper.wait().context("wait for a keeper")?;
        ensure!(
            status.success(),
            "control groups of {} are left",
            self.cgroup
        );
        Ok(())
    }
}

impl Drop for Cage {
    fn drop(&mut self) {
        if let Err(error) = self.end() {
            anstream::eprintln!("the end of a cage: {error:#}");
            assert!(std::thread::panicking(), "the end of a cage failed");
        }
    }
}

/// A shell that reads from a pipe of this process until that ends, and that no signal for this process's group meets.
fn shell(script: &str, arguments: &[&str]) -> Command {
    let mut command = Command::new("/bin/sh");
    command
        .args(["-c", script, "sh"])
        .args(arguments)
        .env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin")
        .stdin(Stdio::piped())
        .process_group(0);
    command
}

fn start_init(netns: &Netns) -> Result<Child> {
    let mut init = netns
        .run(|| {
            unshare(CloneFlags::CLONE_NEWNS | CloneFlags::CLONE_NEWPID)?;
            shell(INIT, &OWN).stdout(Stdio::piped()).spawn()
        })
        .context("start the init of a cage")?;
    let mut said = String::new();
    if let Some(output) = init.stdout.take() {
        BufReader::new(output)
            .read_line(&mut said)
            .context("listen to the init of a cage")?;
    }
    if said.trim_end() != "ready" {
        bail!("the init of a cage could not mount what it needs");
    }
    Ok(init)
}
