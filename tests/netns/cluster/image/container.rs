//! What a container runtime and the kubelet make of image and manifest: a root, mounts, and a process in them.

use std::{
    ffi::CStr,
    fs,
    io::{self, Cursor},
    os::unix::process::CommandExt as _,
    path::{Path, PathBuf},
    process::Command,
};

use nix::mount::{MsFlags, mount};
use serde_json::{Value, json};
use underpass_image::{Source, archive};
use underpass_tests::{node::plugin, prelude::*};

use super::super::{
    agent::Agent,
    api::AT,
    member::{BIN, LOG, Member, NET},
};

/// The container's root, on its node.
const ROOT: &str = "/run/container";
/// The same, as the kernel takes it.
const ROOT_C: &CStr = c"/run/container";
/// What the kubelet puts into each container of a service account.
const ACCOUNT: &str = "/var/run/secrets/kubernetes.io/serviceaccount";
/// The devices that every container has.
const DEVICES: [&str; 5] = ["null", "zero", "full", "random", "urandom"];

const NONE: Option<&str> = None;

/// A container that can be started on a node.
pub(super) struct Container {
    entrypoint: String,
    pod: Value,
}

impl Container {
    /// Unpacks the image, and mounts what the manifest says.
    pub(super) fn new(member: &Member, pod: &Value) -> Result<Self> {
        let (config, layer) = image()?;
        let entrypoint = config["config"]["Entrypoint"][0].as_str();
        let container = Self {
            entrypoint: entrypoint.context("an entrypoint")?.to_owned(),
            pod: pod.clone(),
        };
        member.node.netns().run(|| {
            mount_new("tmpfs", Path::new(ROOT))?;
            tar::Archive::new(Cursor::new(layer)).unpack(ROOT)?;
            container.mount_as_a_runtime()?;
            container.mount_volumes()?;
            let read_only =
                &container.pod["containers"][0]["securityContext"]["readOnlyRootFilesystem"];
            ensure!(*read_only == true, "{read_only}");
            mount(
                NONE,
                ROOT,
                NONE,
                MsFlags::MS_REMOUNT | MsFlags::MS_RDONLY,
                NONE,
            )?;
            Ok(())
        })?;
        Ok(container)
    }

    /// Starts what the image runs, with the environment that the manifest says.
    pub(super) fn start(&self, member: &Member) -> Result<Agent> {
        let mut command = command(&self.entrypoint);
        let log = member.node.netns().run(|| fs::File::create(LOG))?;
        command.stderr(log);
        // In place of the Service's address, as the API of tests speaks no TLS.
        command.env("KUBECONFIG", format!("{ACCOUNT}/kubeconfig"));
        let variables = self.pod["containers"][0]["env"].as_array();
        for variable in variables.context("an environment")? {
            let name = variable["name"].as_str().context("a name")?;
            let from = &variable["valueFrom"]["fieldRef"]["fieldPath"];
            match (variable["value"].as_str(), from.as_str()) {
                (Some(value), _) => command.env(name, value),
                (None, Some("spec.nodeName")) => command.env(name, &member.name),
                _ => anyhow::bail!("nobody knows {variable}"),
            };
        }
        Agent::start(command, member.node.netns())
    }

    /// Where a path of the node is on the node of a test, which has few folders of its own.
    pub(super) fn on_node(path: &str) -> Result<PathBuf> {
        let own = [
            ("/opt/cni/bin", BIN),
            ("/etc/cni/net.d", NET),
            ("/lib/modules", "/run/modules"),
            ("/boot", "/run/boot"),
            ("/etc/machine-id", "/run/machine-id"),
        ];
        for (there, here) in own {
            if let Ok(rest) = Path::new(path).strip_prefix(there) {
                return Ok(if rest == Path::new("") {
                    here.into()
                } else {
                    Path::new(here).join(rest)
                });
            }
        }
        ensure!(
            ["/run/", "/var/lib/", "/sys/fs/bpf"]
                .iter()
                .any(|private| path.starts_with(private)),
            "{path} would be that of the machine which runs the test"
        );
        Ok(path.into())
    }

    /// Mounts what every privileged container has, and the token's folder.
    fn mount_as_a_runtime(&self) -> Result<()> {
        mount_new("proc", &inside("/proc"))?;
        mount_new("sysfs", &inside("/sys"))?;
        mount_new("tmpfs", &inside("/dev"))?;
        for device in DEVICES {
            let path = format!("/dev/{device}");
            bind(Path::new(&path), &inside(&path))?;
        }
        let account = inside(ACCOUNT);
        mount_new("tmpfs", &account)?;
        fs::write(account.join("ca.crt"), include_bytes!("ca.crt"))?;
        fs::write(account.join("kubeconfig"), kubeconfig().to_string())?;
        ensure!(
            self.pod["hostNetwork"] == true,
            "it is in the node's network"
        );
        Ok(())
    }

    /// Mounts what the manifest has, and checks of the node what the kubelet would check.
    fn mount_volumes(&self) -> Result<()> {
        // Every node has one.
        fs::write(
            Self::on_node("/etc/machine-id")?,
            "0123456789abcdef0123456789abcdef\n",
        )?;
        let list = |value: &Value| value.as_array().cloned().context("a list");
        let volumes = list(&self.pod["volumes"])?;
        for wanted in list(&self.pod["containers"][0]["volumeMounts"])? {
            let volume = volumes
                .iter()
                .find(|volume| volume["name"] == wanted["name"]);
            let host = &volume.context("a volume")?["hostPath"];
            let source = Self::on_node(host["path"].as_str().context("a path")?)?;
            match host["type"].as_str() {
                Some("DirectoryOrCreate") => fs::create_dir_all(&source)?,
                Some("Directory") => ensure!(source.is_dir(), "{host}"),
                Some("File") => ensure!(source.is_file(), "{host}"),
                _ => anyhow::bail!("nobody knows {host}"),
            }
            let target = inside(wanted["mountPath"].as_str().context("a path")?);
            bind(&source, &target)?;
            if wanted["readOnly"] == true {
                let flags = MsFlags::MS_BIND | MsFlags::MS_REMOUNT | MsFlags::MS_RDONLY;
                mount(NONE, &target, NONE, flags, NONE)?;
            }
        }
        Ok(())
    }
}

/// Where the API server is. The image has no certificates of authorities, so a client has to be told the cluster's.
fn kubeconfig() -> Value {
    json!({
        "apiVersion": "v1", "kind": "Config", "current-context": "c",
        "clusters": [{"name": "c", "cluster": {
            "server": format!("http://{AT}"), "certificate-authority": format!("{ACCOUNT}/ca.crt"),
        }}],
        "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
        "users": [{"name": "u", "user": {}}],
    })
}

/// What the agent has said.
pub(super) fn log(member: &Member) -> String {
    let read = || fs::read_to_string(LOG);
    member.node.netns().run(read).unwrap_or_default()
}

/// A program of the image, to be run with an empty environment on the container's node.
pub(super) fn command(program: &str) -> Command {
    let mut command = Command::new(program);
    command.env_clear();
    // SAFETY: chroot and chdir are plain system calls, and touch nothing of the parent.
    unsafe {
        command.pre_exec(|| {
            if libc::chroot(ROOT_C.as_ptr()) != 0 || libc::chdir(c"/".as_ptr()) != 0 {
                return Err(io::Error::last_os_error());
            }
            Ok(())
        })
    };
    command
}

/// A path of the container, on its node.
fn inside(path: &str) -> PathBuf {
    Path::new(ROOT).join(path.trim_start_matches('/'))
}

fn mount_new(kind: &str, at: &Path) -> Result<()> {
    fs::create_dir_all(at).with_context(|| format!("make {}", at.display()))?;
    mount(Some(kind), at, Some(kind), MsFlags::empty(), NONE)
        .with_context(|| format!("mount {kind} on {}", at.display()))
}

/// Binds a file or a folder, and makes what it is mounted on.
fn bind(source: &Path, target: &Path) -> Result<()> {
    let parent = target.parent().context("a folder")?;
    if source.is_dir() {
        fs::create_dir_all(target)?;
    } else {
        fs::create_dir_all(parent)?;
        fs::write(target, "")?;
    }
    mount(Some(source), target, NONE, MsFlags::MS_BIND, NONE)
        .with_context(|| format!("bind {} to {}", source.display(), target.display()))
}

/// The config and the only layer of the image, as an engine reads them.
fn image() -> Result<(Value, Vec<u8>)> {
    let nothing = tempfile::tempdir()?;
    let packed = archive(&Source {
        executables: plugin().parent().context("a folder")?,
        licences: &Path::new(env!("CARGO_MANIFEST_DIR")).join(".."),
        of_others: nothing.path(),
        version: env!("CARGO_PKG_VERSION"),
        time: 0,
    })?;
    let folder = tempfile::tempdir()?;
    tar::Archive::new(Cursor::new(packed)).unpack(folder.path())?;
    let blob = |descriptor: &Value| -> Result<Vec<u8>> {
        let digest = descriptor["digest"].as_str().context("a digest")?;
        let path = folder.path().join("blobs").join(digest.replace(':', "/"));
        fs::read(&path).with_context(|| format!("read {}", path.display()))
    };
    let json = |content: Vec<u8>| -> Result<Value> { Ok(serde_json::from_slice(&content)?) };
    let index = json(fs::read(folder.path().join("index.json"))?)?;
    let manifest = json(blob(&index["manifests"][0])?)?;
    let config = json(blob(&manifest["config"])?)?;
    Ok((config, blob(&manifest["layers"][0])?))
}
