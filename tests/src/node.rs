//! The host of containers: a network namespace with an uplink, and its own `/run` and bpffs.

use std::{
    env, fs,
    net::SocketAddr,
    path::{Path, PathBuf},
    process::Command,
    sync::{LazyLock, OnceLock},
};

use anyhow::{Context as _, Result, ensure};
use serde_json::Value;

use crate::{
    loaded::{self, Set},
    netns::Netns,
    privilege,
};

/// Where the reference plugins are, for delegation and for comparison.
pub const REFERENCE: &str = "/usr/lib/cni";

/// A throwaway node.
#[derive(Debug)]
pub struct Node {
    netns: Netns,
    bpf_root: PathBuf,
    data_dir: PathBuf,
    /// What its pins were loaded as. It is free when the node goes.
    set: Option<Set>,
    /// How many packets connection tracking had called INVALID when the first of its pods went with the test.
    pub(crate) invalid: OnceLock<u64>,
}

impl Node {
    /// The uplink's name on the node.
    pub const UPLINK: &str = "eth0";

    /// A node with nothing but loopback. What its first ADD would load may be there already, where that saves much time.
    pub fn new() -> Result<Self> {
        let mut node = Self::unloaded()?;
        node.set = loaded::lend(&node).context("use what is loaded")?;
        Ok(node)
    }

    /// A node with nothing but loopback, for tests about what is loaded and when.
    pub fn unloaded() -> Result<Self> {
        let netns = Netns::isolated("node")?;
        Self::of(netns, "/sys/fs/bpf/underpass", "/run/cni/networks")
    }

    /// Another node with the same mounts: nothing but its folders tells it apart.
    pub fn beside(&self) -> Result<Self> {
        let netns = self.netns.beside("other")?;
        Self::of(netns, "/sys/fs/bpf/other", "/run/cni/other")
    }

    fn of(netns: Netns, bpf_root: &str, data_dir: &str) -> Result<Self> {
        let data_dir = PathBuf::from(data_dir);
        netns
            .run(|| fs::create_dir_all(&data_dir))
            .context("make the folder of leases")?;
        Ok(Self {
            netns,
            bpf_root: PathBuf::from(bpf_root),
            data_dir,
            set: None,
            invalid: OnceLock::new(),
        })
    }

    /// Its network namespace.
    #[must_use]
    pub fn netns(&self) -> &Netns {
        &self.netns
    }

    /// `bpfRoot` of its networks.
    #[must_use]
    pub fn bpf_root(&self) -> &Path {
        &self.bpf_root
    }

    /// `ipam.dataDir` of its networks.
    #[must_use]
    pub fn data_dir(&self) -> &Path {
        &self.data_dir
    }

    /// What a command of the plugin's command line prints here, where it must succeed.
    pub fn underpass(&self, arguments: &[&str]) -> Result<String> {
        self.underpass_of(plugin(), arguments)
    }

    /// What a command of another executable's command line prints here, where it must succeed.
    pub fn underpass_of(&self, program: &Path, arguments: &[&str]) -> Result<String> {
        let mut command = Command::new(program);
        command.env_clear().args(arguments);
        self.netns.expect(&mut command, &[])
    }

    /// What a command of the plugin's command line says here on its standard error, where it must fail.
    pub fn underpass_error(&self, arguments: &[&str]) -> Result<String> {
        let mut command = Command::new(plugin());
        command.env_clear().args(arguments);
        let output = self.netns.output(&mut command, &[])?;
        ensure!(!output.status.success(), "{arguments:?} succeeded");
        Ok(String::from_utf8_lossy(&output.stderr).into_owned())
    }

    /// The entries that `underpass flows` shows for these two ends, in whatever order.
    pub fn flows(&self, ends: [SocketAddr; 2]) -> Result<Vec<Value>> {
        let said = self.underpass(&["flows", "--json"])?;
        let lines: Vec<Value> = serde_json::from_str(&said).context("read the JSON of flows")?;
        let wanted = ends.map(|end| Value::from(end.to_string()));
        let is_between = |line: &Value| {
            let shown = line["ends"].as_array();
            shown.is_some_and(|shown| wanted.iter().all(|end| shown.contains(end)))
        };
        Ok(lines.into_iter().filter(is_between).collect())
    }
}

/// The plugin under test: `UNDERPASS_BIN`, else the workspace's release build; or a sentence that says how to get one.
pub fn find_plugin() -> Result<&'static Path, &'static str> {
    static PLUGIN: LazyLock<Result<PathBuf, String>> = LazyLock::new(|| {
        let path = env::var_os("UNDERPASS_BIN").map_or_else(default_plugin, PathBuf::from);
        path.canonicalize().map_err(|error| {
            format!(
                "there is no plugin to test at {} ({error}): build it with `cargo xtask build`, \
                 or name one in UNDERPASS_BIN",
                path.display()
            )
        })
    });
    match &*PLUGIN {
        Ok(path) => Ok(path),
        Err(sentence) => Err(sentence),
    }
}

/// The plugin under test.
///
/// # Panics
/// If there is none, with the command that builds it.
#[must_use]
pub fn plugin() -> &'static Path {
    find_plugin().unwrap_or_else(|sentence| panic!("{sentence}"))
}

/// The plugin `flannel`: `UNDERPASS_FLANNEL`, else the one that set-up keeps. `None` if it is missing; that is said, and under
/// `CI=true` it is a failure.
#[must_use]
pub fn flannel() -> Option<PathBuf> {
    let default = || workspace().join(".toolchain/flannel/flannel");
    let path = env::var_os("UNDERPASS_FLANNEL").map_or_else(default, PathBuf::from);
    if !path.is_file() {
        privilege::skip(&format!(
            "there is no plugin flannel at {}: run `cargo xtask setup`, which unpacks one, or name one in UNDERPASS_FLANNEL",
            path.display()
        ));
        return None;
    }
    Some(path)
}

fn workspace() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

fn default_plugin() -> PathBuf {
    let workspace = workspace();
    let target =
        env::var_os("CARGO_TARGET_DIR").map_or_else(|| workspace.join("target"), PathBuf::from);
    target.join("release/underpass")
}

/// `CNI_PATH` of calls: the folder of the plugin under test, then the reference plugins.
#[must_use]
pub fn cni_path() -> String {
    let own = plugin().parent().unwrap_or(Path::new("/"));
    format!("{}:{REFERENCE}", own.display())
}
