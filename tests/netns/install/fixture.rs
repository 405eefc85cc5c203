//! A machine that is about to be a node: it has folders of its own for plugins, networks and leases.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    os::unix::fs::{MetadataExt as _, symlink},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    time::Duration,
};

use nix::mount::{MsFlags, mount};
use serde_json::Value;
use underpass_tests::{
    netns::Netns,
    node::{cni_path, plugin},
    prelude::*,
    runtime::Call,
};

/// The folder of plugins, in the machine's own `/run`.
pub(super) const BIN: &str = "/run/opt/bin";
/// The folder of networks.
pub(super) const NET: &str = "/run/opt/net.d";
/// The installed plugin.
const INSTALLED: &str = "/run/opt/bin/underpass";
/// Where leases are by default; it is the machine's own here.
const LEASES: &str = "/var/lib/cni/networks";
/// The name of the conflist.
pub(super) const FILE: &str = "10-underpass.conflist";
/// The name that it has while an uninstall is under way.
pub(super) const ASIDE: &str = ".10-underpass.conflist.uninstall";
/// Its path.
pub(super) const CONFLIST: &str = "/run/opt/net.d/10-underpass.conflist";

pub(super) struct Machine {
    pub(super) lab: Lab,
}

/// What tells a file from another one that has its name: inode, length, and time of the last change.
pub(super) type Files = BTreeMap<PathBuf, (u64, u64, i64, i64)>;

/// A container that the installed plugin attached.
pub(super) struct Attached<'a> {
    machine: &'a Machine,
    netns: Netns,
    result: Value,
    conf: Value,
}

/// The options for networks of these families.
pub(super) fn ranges(families: &[Family]) -> Vec<&'static str> {
    families
        .iter()
        .flat_map(|family| ["--range", family.pods()])
        .collect()
}

/// A command that runs in the background.
pub(super) struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Machine {
    pub(super) fn new() -> Result<Self> {
        Self::of(Lab::new()?)
    }

    /// A machine on which nothing is loaded, for tests about that.
    pub(super) fn unloaded() -> Result<Self> {
        Self::of(Lab::unloaded()?)
    }

    fn of(lab: Lab) -> Result<Self> {
        lab.node
            .netns()
            .run(|| {
                let none: Option<&str> = None;
                mount(
                    Some("var"),
                    "/var/lib",
                    Some("tmpfs"),
                    MsFlags::empty(),
                    none,
                )
            })
            .context("mount a tmpfs on /var/lib")?;
        Ok(Self { lab })
    }

    pub(super) fn arguments(verb: &str, more: &[&str]) -> Vec<String> {
        let mut arguments = vec![verb, "--bin-dir", BIN, "--net-dir", NET];
        arguments.extend(more);
        arguments.into_iter().map(str::to_owned).collect()
    }

    pub(super) fn command(verb: &str, more: &[&str]) -> Command {
        let mut command = Command::new(plugin());
        command.env_clear().args(Self::arguments(verb, more));
        command
    }

    pub(super) fn run(&self, verb: &str, more: &[&str]) -> Result<String> {
        self.run_by(plugin(), verb, more)
    }

    pub(super) fn run_by(&self, program: &Path, verb: &str, more: &[&str]) -> Result<String> {
        let arguments = Self::arguments(verb, more);
        let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
        self.lab.node.underpass_of(program, &arguments)
    }

    pub(super) fn error(&self, verb: &str, more: &[&str]) -> Result<String> {
        self.error_by(plugin(), verb, more)
    }

    pub(super) fn error_by(&self, program: &Path, verb: &str, more: &[&str]) -> Result<String> {
        let mut command = Command::new(program);
        command.env_clear().args(Self::arguments(verb, more));
        let output = self.lab.node.netns().output(&mut command, &[])?;
        ensure!(!output.status.success(), "{verb} {more:?} succeeded");
        Ok(String::from_utf8_lossy(&output.stderr).into_owned())
    }

    pub(super) fn install(&self, families: &[Family], more: &[&str]) -> Result<String> {
        self.run("install", &[&ranges(families)[..], more].concat())
    }

    /// Starts a command of the installed executable, which runs until this is dropped.
    pub(super) fn start(&self, arguments: &[&str]) -> Result<Running> {
        let mut command = Command::new(INSTALLED);
        command.env_clear().args(arguments).stdout(Stdio::null());
        self.spawn(&mut command)
    }

    /// Starts an uninstall, which is killed when this is dropped.
    pub(super) fn start_uninstall(&self) -> Result<Running> {
        self.spawn(&mut Self::command("uninstall", &[]))
    }

    fn spawn(&self, command: &mut Command) -> Result<Running> {
        let child = self.lab.node.netns().run(|| command.spawn());
        Ok(Running(
            child.with_context(|| format!("start {command:?}"))?,
        ))
    }

    /// Starts an install and kills it: whether it was.
    pub(super) fn kill_install(&self, after: Duration) -> Result<bool> {
        let mut command = Self::command("install", &ranges(&Family::BOTH));
        self.lab.node.netns().kill_after(&mut command, &[], after)
    }

    pub(super) fn read(&self, path: &str) -> Result<Option<Vec<u8>>> {
        self.lab.node.netns().run(|| match fs::read(path) {
            Ok(content) => Ok(Some(content)),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error).with_context(|| format!("read {path}")),
        })
    }

    /// The conflist, which must be one if there is any.
    pub(super) fn conflist(&self) -> Result<Option<Value>> {
        self.read(CONFLIST)?
            .map(|text| serde_json::from_slice(&text).context("the conflist is no JSON"))
            .transpose()
    }

    pub(super) fn make_folders(&self) -> Result<()> {
        self.lab
            .node
            .netns()
            .run(|| [BIN, NET].iter().try_for_each(fs::create_dir_all))?;
        Ok(())
    }

    pub(super) fn write(&self, path: &str, content: &[u8]) -> Result<()> {
        self.lab.node.netns().run(|| {
            let folder = Path::new(path).parent().context("it has a folder")?;
            fs::create_dir_all(folder)?;
            fs::write(path, content).with_context(|| format!("write {path}"))
        })
    }

    /// Makes a link in the folder of plugins.
    pub(super) fn link(&self, target: &str, name: &str) -> Result<()> {
        let path = Path::new(BIN).join(name);
        Ok(self.lab.node.netns().run(|| symlink(target, path))?)
    }

    pub(super) fn names(&self, folder: &str) -> Result<BTreeSet<String>> {
        self.lab.node.netns().run(|| {
            let entries = fs::read_dir(folder).with_context(|| format!("list {folder}"))?;
            entries
                .map(|entry| Ok(entry?.file_name().to_string_lossy().into_owned()))
                .collect()
        })
    }

    /// Empties the folders of plugins and networks.
    pub(super) fn clear(&self) -> Result<()> {
        self.lab.node.netns().run(|| {
            for folder in [BIN, NET] {
                if fs::exists(folder)? {
                    fs::remove_dir_all(folder)?;
                }
            }
            Ok(())
        })
    }

    /// Fails unless a runtime finds a whole network whose ADD works, or none: whether there is one. `name` is that of a container that
    /// was never there.
    pub(super) fn expect_sound(&self, name: &str) -> Result<bool> {
        for (file, origin) in [
            ("underpass", plugin().to_owned()),
            ("underpass-ipam", plugin().with_file_name("underpass-ipam")),
        ] {
            if let Some(executable) = self.read(&format!("{BIN}/{file}"))? {
                ensure!(executable == fs::read(origin)?, "half of {file}");
            }
        }
        for name in self.leftovers()? {
            let extension = Path::new(&name).extension();
            ensure!(extension.is_some_and(|end| end == "tmp"), "{name}");
        }
        if self.conflist()?.is_none() {
            return Ok(false);
        }
        self.pod(name)?.del()?;
        Ok(true)
    }

    /// The names of temporary files, in both folders.
    pub(super) fn leftovers(&self) -> Result<Vec<String>> {
        let mut names = Vec::new();
        for folder in [BIN, NET] {
            if self.lab.node.netns().run(|| fs::exists(folder))? {
                names.extend(self.names(folder)?);
            }
        }
        names.retain(|name| name.starts_with('.'));
        Ok(names)
    }

    /// All files of the folders of plugins and networks, and all folders and files of leases.
    pub(super) fn files(&self) -> Result<Files> {
        self.lab.node.netns().run(|| {
            let mut files = Files::new();
            for folder in [BIN, NET] {
                collect(Path::new(folder), &mut files)?;
            }
            // What is in the folders of leases changes with each call.
            for folder in [LEASES, "/var/lib/cni/networks/.underpass"] {
                let path = Path::new(folder);
                for entry in fs::read_dir(path).into_iter().flatten() {
                    files.insert(entry?.path(), (0, 0, 0, 0));
                }
            }
            Ok(files)
        })
    }

    /// Has the installed plugin attach a container to the installed network.
    pub(super) fn pod(&self, name: &str) -> Result<Attached<'_>> {
        let document = self.conflist()?.context("there is no conflist")?;
        let mut conf = document["plugins"][0].clone();
        for key in ["name", "cniVersion"] {
            conf[key] = document[key].clone();
        }
        let netns = self.lab.node.netns().sibling(name)?;
        let mut attached = Attached {
            machine: self,
            netns,
            result: Value::Null,
            conf,
        };
        attached.result = attached.call("ADD").run(&self.lab.node)?.result()?;
        Ok(attached)
    }
}

impl Attached<'_> {
    fn call(&self, verb: &str) -> Call {
        let mut conf = self.conf.clone();
        if !self.result.is_null() {
            conf["prevResult"] = self.result.clone();
        }
        Call::new(verb)
            .by(Path::new(INSTALLED))
            .env("CNI_PATH", &cni_path())
            .attachment(
                self.netns.name(),
                &self.netns.path().display().to_string(),
                Pod::IFNAME,
            )
            .stdin(conf.to_string().as_bytes())
    }

    pub(super) fn netns(&self) -> &Netns {
        &self.netns
    }

    /// Its address.
    pub(super) fn ip(&self, family: Family) -> std::net::IpAddr {
        let ips = self.result["ips"].as_array();
        ips.into_iter()
            .flatten()
            .filter_map(|ip| ip["address"].as_str()?.split('/').next()?.parse().ok())
            .find(|&ip| Family::of(ip) == family)
            .unwrap_or_else(|| panic!("no {family:?} address in {}", self.result))
    }

    pub(super) fn del(self) -> Result<()> {
        self.call("DEL").run(&self.machine.lab.node)?.silence()
    }
}

fn collect(folder: &Path, files: &mut Files) -> Result<()> {
    for entry in fs::read_dir(folder).into_iter().flatten() {
        let path = entry?.path();
        let file = fs::symlink_metadata(&path)?;
        let identity = (file.ino(), file.len(), file.mtime(), file.mtime_nsec());
        files.insert(path, identity);
    }
    Ok(())
}
