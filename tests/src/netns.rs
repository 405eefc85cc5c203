//! A network namespace as a handle: work is done on short-lived threads that enter it and die, so nothing has to be restored.

use std::{
    fs::{self, File},
    io::Write as _,
    os::{
        fd::{AsFd as _, AsRawFd, OwnedFd, RawFd},
        unix::process::{CommandExt as _, ExitStatusExt as _},
    },
    panic::resume_unwind,
    path::{Path, PathBuf},
    process::{Command, Output, Stdio},
    sync::{Arc, mpsc},
    thread,
    time::Duration,
};

use anyhow::{Context as _, Result, bail, ensure};
use nix::{
    mount::{MsFlags, mount},
    sched::{CloneFlags, setns, unshare},
    sys::signal::{Signal, kill},
    unistd::Pid,
};

use crate::{frame, ioctl, patience};

/// Where a node's network namespaces have their files, in its own `/run`.
const FOLDER: &str = "/run/netns";

/// How long a command of a fixture, or a call of the plugin, may take: three nodes of a slow machine may have the kernel verify their programs at once.
const COMMAND_TIMEOUT: Duration = Duration::from_mins(2);

/// A network namespace, seen from the mount namespace of its node. It lives as long as a handle or a mount of it does.
#[derive(Clone, Debug)]
pub struct Netns {
    name: String,
    /// Where the files of its siblings are.
    folder: PathBuf,
    path: PathBuf,
    net: Arc<OwnedFd>,
    mounts: Arc<OwnedFd>,
}

impl Netns {
    /// A new network namespace in a new mount namespace, with an own, empty `/run` and an own bpffs at `/sys/fs/bpf`.
    pub fn isolated(name: &str) -> Result<Self> {
        let (net, mounts) = thread::spawn(|| {
            unshare(CloneFlags::CLONE_FS | CloneFlags::CLONE_NEWNS | CloneFlags::CLONE_NEWNET)
                .context("make namespaces")?;
            let none: Option<&str> = None;
            mount(none, "/", none, MsFlags::MS_REC | MsFlags::MS_PRIVATE, none)
                .context("keep mounts private")?;
            mount(
                Some("run"),
                "/run",
                Some("tmpfs"),
                MsFlags::empty(),
                Some("mode=755"),
            )
            .context("mount a tmpfs on /run")?;
            mount(
                Some("bpf"),
                "/sys/fs/bpf",
                Some("bpf"),
                MsFlags::empty(),
                Some("mode=700"),
            )
            .context("mount a bpffs on /sys/fs/bpf")?;
            fs::create_dir(FOLDER).context("make /run/netns")?;
            anyhow::Ok((own("net")?, own("mnt")?))
        })
        .join()
        .unwrap_or_else(|panic| resume_unwind(panic))?;
        let netns = Self {
            name: name.to_owned(),
            folder: PathBuf::from(FOLDER),
            path: Path::new(FOLDER).join(name),
            net: Arc::new(net),
            mounts: Arc::new(mounts),
        };
        netns.prepare()?;
        Ok(netns)
    }

    /// Another network namespace on the same node, with a file at [`Self::path`].
    pub fn sibling(&self, name: &str) -> Result<Self> {
        let path = self.folder.join(name);
        let net = self.run(|| {
            File::create_new(&path).with_context(|| format!("make {}", path.display()))?;
            unshare(CloneFlags::CLONE_NEWNET).context("make a network namespace")?;
            let none: Option<&str> = None;
            mount(
                Some("/proc/thread-self/ns/net"),
                &path,
                none,
                MsFlags::MS_BIND,
                none,
            )
            .with_context(|| format!("mount a network namespace on {}", path.display()))?;
            own("net")
        })?;
        let netns = Self {
            name: name.to_owned(),
            folder: self.folder.clone(),
            path,
            net: Arc::new(net),
            mounts: Arc::clone(&self.mounts),
        };
        netns.prepare()?;
        Ok(netns)
    }

    /// Another network namespace with the same mounts, whose siblings may have the names that ours have.
    pub fn beside(&self, name: &str) -> Result<Self> {
        let folder = self.folder.join(format!("beside-{name}"));
        self.run(|| fs::create_dir(&folder))
            .with_context(|| format!("make {}", folder.display()))?;
        let netns = self.sibling(name)?;
        Ok(Self { folder, ..netns })
    }

    /// The same network namespace with mounts of its own: a copy of the node's, to which `arrange` does something. What the node
    /// mounts later is mounted there, too, as for a container that asks for it.
    pub fn with_mounts(&self, arrange: impl FnOnce() -> Result<()> + Send) -> Result<Self> {
        let mounts = self.run(|| {
            let none: Option<&str> = None;
            let propagate = |how| mount(none, "/", none, MsFlags::MS_REC | how, none);
            propagate(MsFlags::MS_SHARED).context("share mounts")?;
            unshare(CloneFlags::CLONE_NEWNS).context("make a mount namespace")?;
            propagate(MsFlags::MS_SLAVE).context("keep mounts from the node")?;
            arrange()?;
            own("mnt")
        })?;
        Ok(Self {
            mounts: Arc::new(mounts),
            ..self.clone()
        })
    }

    /// A network namespace that somebody else has made, seen from the same node. It has no file.
    #[must_use]
    pub fn adopt(&self, name: &str, net: OwnedFd) -> Self {
        Self {
            name: name.to_owned(),
            folder: self.folder.clone(),
            path: PathBuf::new(),
            net: Arc::new(net),
            mounts: Arc::clone(&self.mounts),
        }
    }

    /// The name it was made with.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Its file, valid in the mount namespace of the node.
    #[must_use]
    pub fn path(&self) -> PathBuf {
        self.path.clone()
    }

    /// Removes its file, so that the path leads nowhere: what a runtime sees after a container died.
    pub fn unlink(&self) -> Result<()> {
        self.run(|| {
            let path = self.path();
            nix::mount::umount2(&path, nix::mount::MntFlags::MNT_DETACH)
                .with_context(|| format!("unmount {}", path.display()))?;
            fs::remove_file(&path).with_context(|| format!("remove {}", path.display()))
        })
    }

    /// Does some work inside, on a thread of its own.
    ///
    /// # Panics
    /// If the work does, or the namespace can't be entered.
    pub fn run<T: Send>(&self, work: impl FnOnce() -> T + Send) -> T {
        thread::scope(|scope| {
            scope
                .spawn(|| {
                    self.enter().expect("a namespace can be entered by root");
                    work()
                })
                .join()
                .unwrap_or_else(|panic| resume_unwind(panic))
        })
    }

    fn enter(&self) -> nix::Result<()> {
        unshare(CloneFlags::CLONE_FS)?;
        setns(self.mounts.as_fd(), CloneFlags::CLONE_NEWNS)?;
        setns(self.net.as_fd(), CloneFlags::CLONE_NEWNET)
    }

    /// Runs a command inside, with `stdin` as its input. It is killed when it takes too long, or when this process dies.
    pub fn output(&self, command: &mut Command, stdin: &[u8]) -> Result<Output> {
        let text = format!("{command:?}");
        self.run(|| {
            die_together(command)
                .stdin(Stdio::piped())
                .stdout(Stdio::piped())
                .stderr(Stdio::piped());
            let mut child = command.spawn().with_context(|| format!("run {text}"))?;
            let id = Pid::from_raw(child.id().cast_signed());
            // A command that does not read its input closes the pipe: its exit status says what happened.
            let _ = child.stdin.take().map(|mut pipe| pipe.write_all(stdin));
            thread::scope(|scope| {
                let (done, finished) = mpsc::channel::<()>();
                let watchdog = scope.spawn(move || {
                    let late = finished.recv_timeout(patience::here(COMMAND_TIMEOUT))
                        == Err(mpsc::RecvTimeoutError::Timeout);
                    if late {
                        let _ = kill(id, Signal::SIGKILL);
                    }
                    late
                });
                let output = child.wait_with_output();
                drop(done);
                ensure!(
                    !watchdog.join().unwrap_or(true),
                    "{text} took longer than {:?} and was killed",
                    patience::here(COMMAND_TIMEOUT)
                );
                output.with_context(|| format!("wait for {text}"))
            })
        })
    }

    /// Starts a command inside, and kills it by SIGKILL after `delay` unless it has ended by then: whether it was killed.
    pub fn kill_after(&self, command: &mut Command, stdin: &[u8], delay: Duration) -> Result<bool> {
        self.run(|| {
            let mut child = command
                .stdin(Stdio::piped())
                .stdout(Stdio::null())
                .stderr(Stdio::null())
                .spawn()
                .with_context(|| format!("run {command:?}"))?;
            let _ = child.stdin.take().map(|mut pipe| pipe.write_all(stdin));
            thread::sleep(delay);
            let _ = child.kill();
            let status = child.wait().context("wait for a killed command")?;
            Ok(status.signal() == Some(libc::SIGKILL))
        })
    }

    /// As [`Self::output`], for a command that must succeed: its standard output.
    pub fn expect(&self, command: &mut Command, stdin: &[u8]) -> Result<String> {
        let output = self.output(command, stdin)?;
        if !output.status.success() {
            bail!(
                "in {}: {command:?} failed ({}): {}{}",
                self.name,
                output.status,
                String::from_utf8_lossy(&output.stderr).trim(),
                if stdin.is_empty() {
                    String::new()
                } else {
                    format!("\nits input was:\n{}", String::from_utf8_lossy(stdin))
                }
            );
        }
        String::from_utf8(output.stdout).with_context(|| format!("{command:?} printed no text"))
    }

    /// Runs lines of `ip` in one go, as an operator types them: for what [`Self::rtnl`] has no words for.
    pub fn ip(&self, lines: &[String]) -> Result<()> {
        self.expect(
            Command::new("ip").args(["-batch", "-"]),
            lines.join("\n").as_bytes(),
        )?;
        Ok(())
    }

    /// Loads rules of nftables.
    pub fn nft(&self, rules: &str) -> Result<()> {
        self.expect(Command::new("nft").args(["-f", "-"]), rules.as_bytes())?;
        Ok(())
    }

    /// What `ip -json <arguments>` says.
    pub fn ip_json(&self, arguments: &[&str]) -> Result<serde_json::Value> {
        let text = self.expect(Command::new("ip").arg("-json").args(arguments), &[])?;
        if text.trim().is_empty() {
            return Ok(serde_json::Value::Array(Vec::new()));
        }
        serde_json::from_str(&text).with_context(|| format!("read the JSON of ip {arguments:?}"))
    }

    /// The MAC of a device.
    pub fn mac(&self, device: &str) -> Result<[u8; 6]> {
        let links = self.ip_json(&["link", "show", "dev", device])?;
        frame::mac(links[0]["address"].as_str().unwrap_or_default())
    }

    /// Takes the filters off one direction of a device, `ingress` or `egress`.
    pub fn take_filters_off(&self, device: &str, direction: &str) -> Result<()> {
        let mut delete = Command::new("tc");
        delete.args(["filter", "del", "dev", device, direction]);
        self.expect(&mut delete, &[]).map(drop)
    }

    /// The number of a device.
    pub fn ifindex(&self, device: &str) -> Result<u32> {
        self.run(|| nix::net::if_::if_nametoindex(device))
            .with_context(|| format!("find the device {device} in {}", self.name))
    }

    /// Sets `/proc/sys/<key>` of this namespace; `key` uses slashes.
    pub fn set_sysctl(&self, key: &str, value: &str) -> Result<()> {
        self.run(|| fs::write(Path::new("/proc/sys").join(key), value))
            .with_context(|| format!("set {key} in {}", self.name))
    }

    /// Reads `/proc/sys/<key>` of this namespace.
    pub fn sysctl(&self, key: &str) -> Result<String> {
        self.run(|| fs::read_to_string(Path::new("/proc/sys").join(key)))
            .map(|value| value.trim().to_owned())
            .with_context(|| format!("read {key} in {}", self.name))
    }

    /// Loopback up, ping sockets allowed, no waiting for duplicate addresses on devices made by fixtures.
    fn prepare(&self) -> Result<()> {
        self.set_sysctl("net/ipv4/ping_group_range", "0 0")?;
        self.set_sysctl("net/ipv6/conf/default/accept_dad", "0")?;
        self.run(|| ioctl::set_up("lo"))
            .with_context(|| format!("set lo up in {}", self.name))
    }
}

impl AsRawFd for Netns {
    fn as_raw_fd(&self) -> RawFd {
        self.net.as_raw_fd()
    }
}

fn own(kind: &str) -> Result<OwnedFd> {
    let path = format!("/proc/thread-self/ns/{kind}");
    Ok(File::open(&path)
        .with_context(|| format!("open {path}"))?
        .into())
}

/// Has the process of a command killed when the thread that starts it dies.
pub fn die_together(command: &mut Command) -> &mut Command {
    // SAFETY: prctl is async-signal-safe and touches nothing of the parent.
    unsafe {
        command.pre_exec(|| {
            libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
            Ok(())
        })
    }
}
