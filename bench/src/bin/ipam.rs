//! Times ADD and DEL of `underpass-ipam` and of the reference `host-local`, each on a folder of its own with as many leases as the other's,
//! in turns. Needs no privilege; everything happens in a temporary folder.

use std::{
    env, fs,
    io::Write as _,
    net::Ipv4Addr,
    path::{Path, PathBuf},
    process::{Command, ExitCode, Stdio},
    time::{Duration, Instant, SystemTime},
};

use anstream::{eprintln, println};
use anyhow::{Context as _, Result, ensure};
use serde_json::json;
use underpass_tests::node::find_plugin;

const REFERENCE: &str = "/usr/lib/cni/host-local";
/// Leases of others that are there while calls are timed, and how many calls of each kind are.
const SIZES: [(u32, usize); 3] = [(10, 200), (1_000, 60), (60_000, 12)];
/// The first of the pool's addresses.
const FIRST: Ipv4Addr = Ipv4Addr::new(10, 1, 0, 2);
const NETWORK: &str = "bench";

fn main() -> ExitCode {
    match compare() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn compare() -> Result<()> {
    let ours = match env::var_os("UNDERPASS_IPAM_BIN") {
        Some(path) => PathBuf::from(path),
        None => find_plugin()
            .map_err(anyhow::Error::msg)?
            .with_file_name("underpass-ipam"),
    };
    println!("Medians in ms of calls in turns; a ratio is the reference's median by ours.\n");
    println!("| leases | call | host-local | underpass-ipam | ratio |\n|---|---|---|---|---|");
    for (leases, calls) in SIZES {
        let mut plugins = [
            Subject::new(Path::new(REFERENCE), leases)?,
            Subject::new(&ours, leases)?,
        ];
        for call in 0..=calls {
            for subject in &mut plugins {
                let [add, del] = subject.round(call)?;
                // The first builds the index, once after each boot.
                if call > 0 {
                    subject.adds.push(add);
                    subject.dels.push(del);
                }
            }
        }
        let [theirs, ours] = &mut plugins;
        for (name, theirs, ours) in [
            ("ADD", &mut theirs.adds, &mut ours.adds),
            ("DEL", &mut theirs.dels, &mut ours.dels),
        ] {
            let [theirs, ours] = [median(theirs), median(ours)];
            let ratio = theirs.as_secs_f64() / ours.as_secs_f64();
            let [theirs, ours] = [theirs, ours].map(|time| time.as_secs_f64() * 1e3);
            println!("| {leases} | {name} | {theirs:.2} | {ours:.2} | {ratio:.1} |");
        }
    }
    Ok(())
}

/// One plugin with a folder of leases, removed in the end.
struct Subject {
    program: PathBuf,
    folder: PathBuf,
    adds: Vec<Duration>,
    dels: Vec<Duration>,
}

impl Subject {
    fn new(program: &Path, leases: u32) -> Result<Self> {
        let name = program.file_name().unwrap_or_default().to_string_lossy();
        let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH)?;
        let subject = Self {
            program: program.to_owned(),
            folder: env::temp_dir().join(format!("{name}-{leases}-{}", since.as_nanos())),
            adds: Vec::new(),
            dels: Vec::new(),
        };
        let network = subject.folder.join(NETWORK);
        fs::create_dir_all(&network).with_context(|| format!("make {}", network.display()))?;
        let first = FIRST.to_bits();
        for lease in 0..leases {
            let ip = Ipv4Addr::from_bits(first + lease);
            fs::write(
                network.join(ip.to_string()),
                format!("other-{lease}\r\neth0"),
            )?;
        }
        let last = Ipv4Addr::from_bits(first + leases - 1);
        fs::write(network.join("last_reserved_ip.0"), last.to_string())?;
        Ok(subject)
    }

    /// The time of an ADD, and of the DEL for it.
    fn round(&self, call: usize) -> Result<[Duration; 2]> {
        let container = format!("container-{call}");
        Ok([self.call("ADD", &container)?, self.call("DEL", &container)?])
    }

    fn call(&self, verb: &str, container: &str) -> Result<Duration> {
        let conf = json!({
            "cniVersion": "1.0.0",
            "name": NETWORK,
            "type": "bridge",
            "ipam": { "type": "host-local", "dataDir": self.folder, "subnet": "10.1.0.0/16" },
        })
        .to_string();
        let mut command = Command::new(&self.program);
        command
            .env_clear()
            .envs([
                ("CNI_COMMAND", verb),
                ("CNI_CONTAINERID", container),
                ("CNI_IFNAME", "eth0"),
                ("CNI_NETNS", "/nonexistent"),
                ("CNI_PATH", "/nonexistent"),
            ])
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::null());
        let begin = Instant::now();
        let mut child = command
            .spawn()
            .with_context(|| format!("run {}", self.program.display()))?;
        let mut stdin = child.stdin.take().context("a pipe")?;
        stdin.write_all(conf.as_bytes())?;
        drop(stdin);
        let status = child.wait()?;
        let time = begin.elapsed();
        ensure!(
            status.success(),
            "{verb} of {} failed",
            self.program.display()
        );
        Ok(time)
    }
}

impl Drop for Subject {
    fn drop(&mut self) {
        // What is left of a temporary folder does no harm.
        let _ = fs::remove_dir_all(&self.folder);
    }
}

fn median(times: &mut [Duration]) -> Duration {
    times.sort_unstable();
    times[times.len() / 2]
}
