//! A node of the cluster: a kubelet with containerd, kube-proxy, and the agent.

use std::{collections::BTreeSet, net::IpAddr, sync::Arc};

use anyhow::{Context as _, Result};
use serde_json::{Value, json};
use underpass_runtimes::{Cage, Containerd, containerd::End, image};
use underpass_tests::{Family, Node, netns::Netns};

use crate::{
    control::{Control, owned},
    credentials::User,
    daemon::Daemon,
    eventually, programs, ranges,
};

/// What a kubelet sets in the kernel for the whole machine, which is none of a test's business: it sees these values instead.
const SYSCTLS: [(&str, &str); 6] = [
    ("vm/overcommit_memory", "1"),
    ("vm/panic_on_oom", "0"),
    ("kernel/panic", "10"),
    ("kernel/panic_on_oops", "1"),
    ("kernel/keys/root_maxkeys", "1000000"),
    ("kernel/keys/root_maxbytes", "25000000"),
];

/// Where containerd listens, in a cage.
const RUNTIME: &str = "unix:///run/containerd/containerd.sock";
/// What a kubelet is started with, in a cage.
const CONFIG: &str = "/run/kubernetes/kubelet.json";
/// Where a kubelet looks for pods that no API server knows, in a cage.
const MANIFESTS: &str = "/run/kubernetes/manifests";
/// The number by which the agent knows its routes.
const PROTOCOL: &str = "117";
/// Where the agent serves health and metrics.
const HEALTH: &str = "127.0.0.1:9810";

/// A node.
#[derive(Debug)]
pub(crate) struct Member {
    pub(crate) name: String,
    pub(crate) node: Arc<Node>,
    pub(crate) containerd: Containerd,
    pub(crate) kubelet: Daemon,
    proxy: Daemon,
    pub(crate) agent: Daemon,
    /// The link it is on, 0 or 1.
    pub(crate) link: u8,
    /// Its number on this link.
    pub(crate) number: u8,
}

impl Member {
    /// A node on which nothing runs yet but containerd.
    pub(crate) fn new(control: &Control, node: Arc<Node>, link: u8, number: u8) -> Result<Self> {
        let name = format!("node{number}");
        let cage = Cage::empty_on(&node)?;
        cover_sysctls(&cage)?;
        // As an init of a machine leaves them: what is mounted on the node later is seen by containers that ask for it.
        cage.expect("mount", &["--make-rshared", "/"])?;
        let kubelet_user = control.credentials(&cage, &User::kubelet(&name))?;
        let proxy_user = control.credentials(&cage, &User::proxy())?;
        let agent_user = control.credentials(&cage, &User::agent())?;
        cage.write(CONFIG, &kubelet_config(&cage).to_string())?;
        std::fs::create_dir_all(cage.path(MANIFESTS)).context("make the folder of manifests")?;
        make_groups(&cage)?;
        let addresses = Family::BOTH.map(|family| ranges::node(family, link, number).to_string());
        let kubelet = Daemon::new(
            &programs::find("kubelet")?,
            kubelet_arguments(&name, &kubelet_user, &addresses.join(",")),
        );
        let proxy = Daemon::new(
            &programs::find("kube-proxy")?,
            proxy_arguments(&name, &proxy_user),
        );
        let mut arguments = owned(&["--node", &name, "--resync", "2", "--listen", HEALTH]);
        for range in ranges::CLUSTER {
            arguments.extend(owned(&["--cluster-cidr", range]));
        }
        let agent = Daemon::new(&programs::agent()?, arguments).env("KUBECONFIG", &agent_user);
        Ok(Self {
            name,
            containerd: Containerd::start(cage)?,
            node,
            kubelet,
            proxy,
            agent,
            link,
            number,
        })
    }

    pub(crate) fn cage(&self) -> &Cage {
        self.containerd.cage()
    }

    /// Starts kubelet and kube-proxy.
    pub(crate) fn start(&mut self) -> Result<()> {
        self.kubelet.start(self.containerd.cage())?;
        self.proxy.start(self.containerd.cage())
    }

    pub(crate) fn start_agent(&mut self) -> Result<()> {
        self.agent.start(self.containerd.cage())
    }

    pub(crate) fn stop_agent(&mut self, how: End) -> Result<()> {
        self.agent.stop(self.containerd.cage(), how)
    }

    /// Ends kube-proxy; its rules stay.
    pub(crate) fn stop_proxy(&mut self) -> Result<()> {
        self.proxy.stop(self.containerd.cage(), End::Kill)
    }

    pub(crate) fn start_proxy(&mut self) -> Result<()> {
        self.proxy.start(self.containerd.cage())
    }

    /// Ends the runtime as a crash does, and starts another.
    pub(crate) fn restart_runtime(&mut self) -> Result<()> {
        self.containerd.restart(End::Kill)
    }

    /// Ends the kubelet and starts another.
    pub(crate) fn restart_kubelet(&mut self) -> Result<()> {
        self.kubelet.stop(self.containerd.cage(), End::Term)?;
        self.kubelet.start(self.containerd.cage())
    }

    /// Runs a command of the installed plugin's command line, which must succeed: its standard output.
    pub(crate) fn underpass(&self, arguments: &[&str]) -> Result<String> {
        let program = programs::underpass()?;
        self.cage().expect(&program.to_string_lossy(), arguments)
    }

    /// Its address on its link.
    pub(crate) fn address(&self, family: Family) -> IpAddr {
        ranges::node(family, self.link, self.number)
    }

    /// Has the kubelet run a pod that no API server knows of.
    pub(crate) fn add_static_pod(&self, name: &str, pod: &Value) -> Result<()> {
        self.cage().write(&static_pod(name), &pod.to_string())
    }

    /// Has the kubelet end such a pod.
    pub(crate) fn remove_static_pod(&self, name: &str) -> Result<()> {
        std::fs::remove_file(self.cage().path(&static_pod(name)))
            .with_context(|| format!("remove the manifest of {name}"))
    }

    /// The addresses that are leased.
    pub(crate) fn leases(&self) -> Result<BTreeSet<IpAddr>> {
        let script = "find /var/lib/cni/networks -type f -printf '%f\\n' 2>/dev/null || true";
        let said = self.cage().expect("sh", &["-c", script])?;
        // The other files there are named like nobody's address.
        Ok(said
            .lines()
            .filter_map(|name| name.replace('_', ":").parse().ok())
            .collect())
    }

    /// The routes that have the agent's number, as the kernel says.
    pub(crate) fn routes(&self) -> Result<Vec<String>> {
        let mut routes = Vec::new();
        for family in ["-4", "-6"] {
            let list = self
                .node
                .netns()
                .ip_json(&[family, "route", "show", "proto", PROTOCOL])?;
            let list = list.as_array().into_iter().flatten();
            routes.extend(list.filter_map(|route| route["dst"].as_str().map(str::to_owned)));
        }
        Ok(routes)
    }

    /// The names of all devices.
    pub(crate) fn devices(&self) -> Result<BTreeSet<String>> {
        let links = self.node.netns().ip_json(&["link", "show"])?;
        let links = links.as_array().into_iter().flatten();
        Ok(links
            .filter_map(|link| link["ifname"].as_str().map(str::to_owned))
            .collect())
    }

    /// What each part said last, for who looks for the reason of a failure.
    pub(crate) fn last_words(&self) -> String {
        let all = [&self.kubelet, &self.proxy, &self.agent];
        let said = all.map(|daemon| format!("{}: {}", self.name, daemon.last_words(self.cage())));
        said.join("\n\n")
    }

    /// Kills all of it; fails if anything is left.
    pub(crate) fn destroy(self) -> Result<()> {
        self.containerd.destroy()
    }

    /// Waits until the agent says that the network is installed.
    pub(crate) fn is_installed(&mut self) -> Result<()> {
        let cage = self.containerd.cage();
        let agent = &mut self.agent;
        eventually(
            &format!("the network of {} is installed", self.name),
            || {
                agent.is_alive(cage)?;
                let url = format!("http://{HEALTH}/readyz");
                let busybox = image::busybox();
                let wget = ["wget", "-qO", "-", &url];
                cage.expect(&busybox.to_string_lossy(), &wget)
                    .map(drop)
                    .with_context(|| agent.last_words(cage))
            },
        )
    }

    /// The network namespace of a container, by the runtime's number of it.
    pub(crate) fn netns_of(&self, container: &str, name: &str) -> Result<Netns> {
        self.cage().netns_of(self.process_of(container)?, name)
    }

    /// Kills the process that holds a pod's namespaces.
    pub(crate) fn kill_sandbox(&self, name: &str) -> Result<()> {
        let labels = format!(
            "labels.\"io.kubernetes.pod.name\"=={name},labels.\"io.cri-containerd.kind\"==sandbox"
        );
        let listed = self
            .containerd
            .ctr(&["containers", "ls", "--quiet", &labels])?;
        let process = self.process_of(listed.trim())?;
        let kill = format!("kill -KILL {process}");
        self.cage().expect("sh", &["-c", &kill]).map(drop)
    }

    /// The first process of a container, as the cage numbers it.
    fn process_of(&self, container: &str) -> Result<u32> {
        let listed = self.containerd.ctr(&["task", "ls"])?;
        let mut lines = listed
            .lines()
            .map(|line| line.split_ascii_whitespace().collect::<Vec<_>>());
        let process = lines.find_map(|task| match task[..] {
            [id, process, "RUNNING"] if id == container => Some(process.to_owned()),
            _ => None,
        });
        let process =
            process.with_context(|| format!("{container} does not run on {}", self.name))?;
        process.parse().context("read the number of a process")
    }
}

fn static_pod(name: &str) -> String {
    format!("{MANIFESTS}/{name}.json")
}

/// Makes the control groups below which a kubelet makes its own: it wants to find them, by each controller.
fn make_groups(cage: &Cage) -> Result<()> {
    let script = "for folder in /sys/fs/cgroup/*/; do \
        [ -e \"$folder/cgroup.procs\" ] && mkdir -p \"$folder$1\"; done; \
        [ -e /sys/fs/cgroup/cgroup.procs ] && mkdir -p \"/sys/fs/cgroup$1\"; \
        cp \"/sys/fs/cgroup/cpuset/cpuset.cpus\" \"/sys/fs/cgroup/cpuset$1/\" 2>/dev/null; \
        cp \"/sys/fs/cgroup/cpuset/cpuset.mems\" \"/sys/fs/cgroup/cpuset$1/\" 2>/dev/null; true";
    cage.expect("sh", &["-c", script, "sh", &cage.cgroup()])
        .map(drop)
}

/// Has processes of a cage see other values of what holds for the whole machine. They can't change it any more either.
fn cover_sysctls(cage: &Cage) -> Result<()> {
    std::fs::create_dir_all(cage.path("/run/sysctl"))?;
    for (key, value) in SYSCTLS {
        let file = format!("/run/sysctl/{}", key.replace('/', "."));
        cage.write(&file, &format!("{value}\n"))?;
        cage.expect("mount", &["--bind", &file, &format!("/proc/sys/{key}")])?;
    }
    Ok(())
}

fn kubelet_config(cage: &Cage) -> Value {
    json!({
        "kind": "KubeletConfiguration",
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "authentication": { "anonymous": { "enabled": true }, "webhook": { "enabled": false } },
        "authorization": { "mode": "AlwaysAllow" },
        "featureGates": { "IPv6DualStack": true },
        "cgroupDriver": "cgroupfs",
        "cgroupRoot": cage.cgroup(),
        // Without these groups the runtime would put containers beside the cage's own.
        "cgroupsPerQOS": true,
        "enforceNodeAllocatable": [],
        // It compares the kernel's settings with what it wants, and does not change them.
        "protectKernelDefaults": true,
        "failSwapOn": false,
        "oomScoreAdj": 0,
        "volumePluginDir": "/var/lib/kubelet/volume-plugins",
        "staticPodPath": MANIFESTS,
        "fileCheckFrequency": "1s",
        "syncFrequency": "5s",
        "nodeStatusUpdateFrequency": "2s",
        "readOnlyPort": 0,
        // How full the machine's disks are is not what is tested.
        "evictionHard": { "memory.available": "0%", "nodefs.available": "0%", "nodefs.inodesFree": "0%", "imagefs.available": "0%" },
        "imageGCHighThresholdPercent": 100,
    })
}

fn kubelet_arguments(name: &str, kubeconfig: &str, addresses: &str) -> Vec<String> {
    vec![
        format!("--config={CONFIG}"),
        format!("--kubeconfig={kubeconfig}"),
        format!("--hostname-override={name}"),
        format!("--node-ip={addresses}"),
        "--container-runtime=remote".to_owned(),
        format!("--container-runtime-endpoint={RUNTIME}"),
        format!("--pod-infra-container-image={}", image::NAME),
        "--root-dir=/var/lib/kubelet".to_owned(),
        "--cert-dir=/var/lib/kubelet/pki".to_owned(),
    ]
}

fn proxy_arguments(name: &str, kubeconfig: &str) -> Vec<String> {
    let mut arguments = owned(&[
        "--proxy-mode=iptables",
        "--feature-gates=IPv6DualStack=true",
        // The table of connections belongs to the machine.
        "--conntrack-max-per-core=0",
        "--conntrack-min=0",
        "--conntrack-tcp-timeout-established=0",
        "--conntrack-tcp-timeout-close-wait=0",
        "--iptables-min-sync-period=1s",
    ]);
    arguments.extend([
        format!("--kubeconfig={kubeconfig}"),
        format!("--hostname-override={name}"),
        format!("--cluster-cidr={}", ranges::CLUSTER.join(",")),
    ]);
    arguments
}
