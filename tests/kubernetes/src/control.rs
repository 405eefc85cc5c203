//! The control plane: etcd, API server, controller manager and scheduler, on a machine of their own that has no pods.

use std::{path::Path, sync::Arc};

use anyhow::{Context as _, Result};
use serde_json::Value;
use underpass_runtimes::{Cage, containerd::End};
use underpass_tests::Node;

use crate::{
    credentials::{CERTIFICATE, FOLDER, User},
    daemon::Daemon,
    eventually, programs, ranges,
};

/// The control plane of a cluster.
#[derive(Debug)]
pub(crate) struct Control {
    server: Daemon,
    others: Vec<Daemon>,
    cage: Cage,
    url: String,
    certificate: String,
    kubectl: String,
}

impl Control {
    /// Starts all of it on a machine with this IPv4 address, and waits until it answers. The nodes with these names may join.
    pub(crate) fn start(node: &Arc<Node>, address: &str, nodes: &[&str]) -> Result<Self> {
        let cage = Cage::empty_on(node)?;
        std::fs::create_dir_all(cage.path(FOLDER)).context("make the folder of credentials")?;
        let mut users = vec![
            User::admin(),
            User::controller_manager(),
            User::scheduler(),
            User::proxy(),
            User::agent(),
        ];
        users.extend(nodes.iter().map(|node| User::kubelet(node)));
        let tokens: String = users.iter().map(User::line).collect();
        cage.write(&format!("{FOLDER}/tokens.csv"), &tokens)?;
        let key = format!("{FOLDER}/accounts.key");
        cage.expect("openssl", &["genrsa", "-out", &key, "2048"])?;

        let mut etcd = Daemon::new(Path::new(&programs::find("etcd")?), etcd());
        let mut server = Daemon::new(
            &programs::find("kube-apiserver")?,
            api_server(address, &key),
        );
        etcd.start(&cage)?;
        server.start(&cage)?;
        let url = format!("https://{address}:6443");
        let mut control = Self {
            server,
            others: vec![etcd],
            cage,
            url,
            certificate: String::new(),
            kubectl: String::new(),
        };
        control.certificate = control.authority()?;
        control.kubectl = control.credentials(&control.cage, &User::admin())?;
        control.is_up()?;
        control.run(
            "kube-controller-manager",
            &User::controller_manager(),
            manager(&key),
        )?;
        control.run("kube-scheduler", &User::scheduler(), Vec::new())?;
        Ok(control)
    }

    fn run(&mut self, name: &str, user: &User, mut arguments: Vec<String>) -> Result<()> {
        let kubeconfig = self.credentials(&self.cage, user)?;
        arguments.extend(owned(&["--leader-elect=false", "--port=0"]));
        arguments.push(format!("--kubeconfig={kubeconfig}"));
        let mut daemon = Daemon::new(&programs::find(name)?, arguments);
        daemon.start(&self.cage)?;
        self.others.push(daemon);
        Ok(())
    }

    /// The certificate of whoever signed the API server's own, which it makes itself: the last one in its file.
    fn authority(&mut self) -> Result<String> {
        let file = format!("{FOLDER}/apiserver.crt");
        let mut chain = String::new();
        eventually("the API server has a certificate", || {
            self.server.is_alive(&self.cage)?;
            chain = self.cage.read(&file)?;
            Ok(())
        })?;
        let begin = "-----BEGIN CERTIFICATE-----";
        let last = chain.rfind(begin).context("no certificate in the file")?;
        Ok(chain[last..].to_owned())
    }

    /// Writes into a cage what a client there needs to be that user: the path there.
    pub(crate) fn credentials(&self, cage: &Cage, user: &User) -> Result<String> {
        user.write(cage, &self.url, &self.certificate)
    }

    /// As [`Self::credentials`], where `kubectl` runs.
    pub(crate) fn credentials_here(&self, user: &User) -> Result<String> {
        self.credentials(&self.cage, user)
    }

    /// Waits until the API server answers.
    fn is_up(&mut self) -> Result<()> {
        eventually("the API server is ready", || {
            self.server.is_alive(&self.cage)?;
            for daemon in &mut self.others {
                daemon.is_alive(&self.cage)?;
            }
            self.kubectl(&["get", "--raw", "/readyz"]).map(drop)
        })
    }

    /// Ends the API server and nothing else.
    pub(crate) fn stop_server(&mut self) -> Result<()> {
        self.server.stop(&self.cage, End::Kill)
    }

    /// Starts the API server again, and waits for it.
    pub(crate) fn resume_server(&mut self) -> Result<()> {
        self.server.start(&self.cage)?;
        self.is_up()
    }

    /// Runs `kubectl`, which must succeed: its standard output.
    pub(crate) fn kubectl(&self, arguments: &[&str]) -> Result<String> {
        self.kubectl_as(&self.kubectl, arguments)
    }

    /// As [`Self::kubectl`], with the credentials in a file.
    pub(crate) fn kubectl_as(&self, kubeconfig: &str, arguments: &[&str]) -> Result<String> {
        let program = programs::find("kubectl")?;
        let general = [
            "--kubeconfig",
            kubeconfig,
            "--request-timeout=20s",
            "--cache-dir=/run/kubectl",
        ];
        let program = program.to_string_lossy();
        self.cage.expect(&program, &[&general, arguments].concat())
    }

    /// What `kubectl get <arguments>` says.
    pub(crate) fn get(&self, arguments: &[&str]) -> Result<Value> {
        let text = self.kubectl(&[&["get", "--output=json"], arguments].concat())?;
        serde_json::from_str(&text).context("read the JSON of kubectl")
    }

    /// Has the API server know objects.
    pub(crate) fn apply(&self, objects: &[Value]) -> Result<()> {
        let list = serde_json::json!({ "apiVersion": "v1", "kind": "List", "items": objects });
        self.apply_text(&list.to_string())
    }

    /// As [`Self::apply`], for what people write.
    pub(crate) fn apply_text(&self, text: &str) -> Result<()> {
        self.with_objects("apply", text)
    }

    /// Has it forget them.
    pub(crate) fn delete_text(&self, text: &str) -> Result<()> {
        self.with_objects("delete", text)
    }

    fn with_objects(&self, verb: &str, text: &str) -> Result<()> {
        let file = self.file_of(text)?;
        self.kubectl(&[verb, "--filename", &file]).map(drop)
    }

    /// Asks it whether it would take objects as they are, and knows each of their fields. Nothing is changed.
    pub(crate) fn would_apply(&self, text: &str) -> Result<()> {
        let file = self.file_of(text)?;
        // This kubectl compares fields with the schema that the server has published; the server itself refuses values. Later ones have the
        // server do both (`--validate=strict`).
        let apply = ["apply", "--dry-run=server", "--validate=true"];
        let arguments = [&apply[..], &["--filename", &file]].concat();
        self.kubectl(&arguments).map(drop)
    }

    /// What `kubectl` makes of an object by a patch, as JSON. The server is not asked.
    pub(crate) fn patched(&self, object: &str, patch: &str) -> Result<String> {
        let file = self.file_of(object)?;
        let local = ["patch", "--local", "--output=json"];
        let arguments = [&local[..], &["--filename", &file, "--patch", patch]].concat();
        self.kubectl(&arguments)
    }

    /// Writes objects to where `kubectl` finds them: the path there.
    fn file_of(&self, text: &str) -> Result<String> {
        let file = format!("{FOLDER}/objects.yaml");
        self.cage.write(&file, text)?;
        Ok(file)
    }

    /// What each part said last, for who looks for the reason of a failure.
    pub(crate) fn last_words(&self) -> String {
        let all = std::iter::once(&self.server).chain(&self.others);
        let said: Vec<String> = all.map(|daemon| daemon.last_words(&self.cage)).collect();
        said.join("\n\n")
    }

    /// Kills all of it; fails if anything is left.
    pub(crate) fn destroy(self) -> Result<()> {
        self.cage.destroy()
    }
}

fn etcd() -> Vec<String> {
    // Nothing of it has to outlive the test, so it need not wait for disks.
    owned(&[
        "--data-dir=/var/lib/etcd",
        "--unsafe-no-fsync",
        "--log-level=warn",
    ])
}

fn api_server(address: &str, key: &str) -> Vec<String> {
    let mut arguments = owned(&[
        "--etcd-servers=http://127.0.0.1:2379",
        "--secure-port=6443",
        "--authorization-mode=Node,RBAC",
        "--enable-admission-plugins=NodeRestriction",
        "--feature-gates=IPv6DualStack=true",
        "--allow-privileged=true",
        "--service-account-issuer=https://kubernetes.default.svc",
    ]);
    arguments.extend([
        format!("--advertise-address={address}"),
        format!("--cert-dir={FOLDER}"),
        format!("--token-auth-file={FOLDER}/tokens.csv"),
        format!("--service-cluster-ip-range={}", ranges::SERVICES),
        format!("--service-account-key-file={key}"),
        format!("--service-account-signing-key-file={key}"),
    ]);
    arguments
}

fn manager(key: &str) -> Vec<String> {
    let mut arguments = owned(&[
        "--allocate-node-cidrs",
        "--configure-cloud-routes=false",
        // Each controller has the role that it needs, and no more.
        "--use-service-account-credentials",
        "--node-cidr-mask-size-ipv4=24",
        "--node-cidr-mask-size-ipv6=64",
        "--feature-gates=IPv6DualStack=true",
    ]);
    arguments.extend([
        format!("--cluster-cidr={}", ranges::CLUSTER.join(",")),
        format!("--service-cluster-ip-range={}", ranges::SERVICES),
        format!("--service-account-private-key-file={key}"),
        format!("--root-ca-file={CERTIFICATE}"),
    ]);
    arguments
}

pub(crate) fn owned(words: &[&str]) -> Vec<String> {
    words.iter().map(|&word| word.to_owned()).collect()
}
