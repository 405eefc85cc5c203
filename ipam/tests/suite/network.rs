//! A network in a folder of its own, and calls to plugins for it.

use std::collections::{BTreeMap, HashMap};
use std::ffi::OsString;
use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::LazyLock;

use serde_json::{Map, Value, json};
use tempfile::TempDir;
use underpass_cni::serve::answer;
use underpass_cni::{About, Version};
use underpass_ipam::HostLocal;

const ABOUT: About<'_> = About {
    name: "underpass-ipam",
    version: "0",
    supported: &Version::ALL,
};

/// Which plugin answers.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Via<'a> {
    /// Ours, in this process.
    Library,
    /// An executable.
    Executable(&'a Path),
}

/// Our own plugin, as the test runner built it. Asked for at run time: a compiler wrapper that is a shell script loses
/// variables with a dash in their names.
pub(crate) fn ours() -> Via<'static> {
    static OURS: LazyLock<PathBuf> = LazyLock::new(|| {
        let from = |runner: &str| std::env::var_os(format!("{runner}_BIN_EXE_underpass-ipam"));
        from("CARGO")
            .or_else(|| from("NEXTEST"))
            .expect("cargo test or cargo nextest runs this")
            .into()
    });
    Via::Executable(&OURS)
}

/// The network `net`, whose leases live as long as this value.
pub(crate) struct Network {
    folder: TempDir,
    conf: Map<String, Value>,
}

/// One interface of one container.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Of<'a>(pub(crate) &'a str, pub(crate) &'a str);

/// A refused call: code and message.
pub(crate) type Refusal = (u64, String);

impl Network {
    /// A network whose IPAM has these keys, and a `dataDir` that does not exist yet.
    pub(crate) fn new(ipam: Value) -> Self {
        let folder = TempDir::new().expect("a temporary folder");
        let Value::Object(mut ipam) = ipam else {
            panic!("ipam is an object")
        };
        ipam.insert("type".into(), "host-local".into());
        ipam.insert(
            "dataDir".into(),
            folder.path().join("networks").to_string_lossy().into(),
        );
        let Value::Object(conf) =
            json!({"cniVersion": "1.1.0", "name": "net", "type": "any", "ipam": ipam})
        else {
            unreachable!("an object was written");
        };
        Self { folder, conf }
    }

    /// A pool for each subnet.
    pub(crate) fn with_subnets(subnets: &[&str]) -> Self {
        let sets: Vec<_> = subnets
            .iter()
            .map(|subnet| json!([{"subnet": subnet}]))
            .collect();
        Self::new(json!({"ranges": sets}))
    }

    /// The folder of the leases.
    pub(crate) fn dir(&self) -> PathBuf {
        self.folder.path().join("networks/net")
    }

    /// Sets a key of the config.
    pub(crate) fn set(&mut self, key: &str, value: Value) {
        self.conf.insert(key.into(), value);
    }

    /// Calls the plugin: the document it printed, null for none, or its refusal.
    pub(crate) fn call(&self, via: Via<'_>, verb: &str, of: Of<'_>) -> Result<Value, Refusal> {
        let vars = vars(verb, of);
        let conf = Value::Object(self.conf.clone()).to_string();
        let (success, stdout) = match via {
            Via::Library => {
                let outcome = answer(
                    &ABOUT,
                    &HostLocal,
                    |name| vars.get(name).map(OsString::from),
                    conf.as_bytes(),
                );
                (outcome.success, outcome.stdout)
            }
            Via::Executable(path) => {
                let output = self
                    .start(path, verb, of)
                    .wait_with_output()
                    .expect("the plugin ends");
                (
                    output.status.success(),
                    String::from_utf8(output.stdout).expect("text"),
                )
            }
        };
        let document: Value = match stdout.as_str() {
            "" => Value::Null,
            text => serde_json::from_str(text).expect("one JSON document"),
        };
        if success {
            return Ok(document);
        }
        let code = document["code"].as_u64().expect("a code");
        Err((
            code,
            document["msg"].as_str().expect("a message").to_owned(),
        ))
    }

    /// Starts an executable and gives it its config.
    pub(crate) fn start(&self, path: &Path, verb: &str, of: Of<'_>) -> Child {
        self.start_heard(path, verb, of, Stdio::null())
    }

    /// Does what [`Self::start`] does; its stderr goes there.
    pub(crate) fn start_heard(&self, path: &Path, verb: &str, of: Of<'_>, stderr: Stdio) -> Child {
        let mut child = Command::new(path)
            .envs(vars(verb, of))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(stderr)
            .spawn()
            .expect("the plugin starts");
        let mut stdin = child.stdin.take().expect("a pipe");
        let conf = Value::Object(self.conf.clone()).to_string();
        stdin
            .write_all(conf.as_bytes())
            .expect("the plugin reads its config");
        child
    }

    /// ADD: the addresses without their prefix lengths.
    pub(crate) fn add(&self, via: Via<'_>, of: Of<'_>) -> Result<Vec<String>, Refusal> {
        self.call(via, "ADD", of).map(|result| addresses(&result))
    }

    /// DEL, which has to succeed.
    pub(crate) fn del(&self, via: Via<'_>, of: Of<'_>) {
        assert_eq!(self.call(via, "DEL", of), Ok(Value::Null));
    }

    /// What is leased: address to the content of its file.
    pub(crate) fn leases(&self) -> BTreeMap<String, String> {
        let Ok(entries) = fs::read_dir(self.dir()) else {
            return BTreeMap::new();
        };
        let files = entries.map(|entry| entry.expect("an entry").path());
        files
            .map(|path| {
                (
                    path.file_name()
                        .expect("a name")
                        .to_string_lossy()
                        .into_owned(),
                    path,
                )
            })
            .filter(|(name, _)| {
                name != "lock" && !name.starts_with("last_reserved_ip.") && !name.starts_with('.')
            })
            .map(|(name, path)| (name, fs::read_to_string(path).expect("a lease")))
            .collect()
    }

    /// Writes a file among the leases, as another program would.
    pub(crate) fn write(&self, name: &str, content: &str) {
        fs::create_dir_all(self.dir()).expect("a folder");
        fs::write(self.dir().join(name), content).expect("a file");
    }

    /// Reads a file among the leases.
    pub(crate) fn read(&self, name: &str) -> String {
        fs::read_to_string(self.dir().join(name)).expect("a file")
    }
}

fn vars<'a>(verb: &'a str, of: Of<'a>) -> HashMap<&'static str, &'a str> {
    HashMap::from([
        ("CNI_COMMAND", verb),
        ("CNI_CONTAINERID", of.0),
        ("CNI_IFNAME", of.1),
        ("CNI_NETNS", "/run/netns/that-does-not-exist"),
        ("CNI_PATH", "/usr/lib/cni"),
    ])
}

/// The addresses of a result.
pub(crate) fn addresses(result: &Value) -> Vec<String> {
    let ips = result["ips"].as_array().expect("addresses").iter();
    ips.map(|ip| ip["address"].as_str().expect("an address"))
        .map(|address| {
            address
                .split_once('/')
                .expect("a prefix length")
                .0
                .to_owned()
        })
        .collect()
}
