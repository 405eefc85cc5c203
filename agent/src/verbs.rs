//! The commands of `underpass` that the agent runs: it opens no map itself, so that what it does can be done by hand.

use std::ffi::OsStr;
use std::io;
use std::iter;
use std::path::PathBuf;
use std::process::Stdio;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use anyhow::{Context as _, bail};
use tokio::io::{AsyncRead, AsyncReadExt as _};
use tokio::process::Command;
use tokio::sync::Mutex;
use tokio::time::timeout;

use crate::install::Network;
use crate::options::{Options, Routing};

/// How long a command may take. The first `install` after boot has the kernel verify all programs, and a self-test: seconds, and minutes where all that
/// starts then shares a small processor. To end it sooner would have the next one begin that work from its start.
const LIMIT: Duration = Duration::from_mins(10);

/// A command that failed.
#[derive(Debug)]
pub(crate) struct Failed {
    /// What it had said of its work: it goes on past what it can't do.
    pub(crate) said: String,
    /// Which command it was, and what went wrong.
    pub(crate) why: String,
}

impl Failed {
    /// A command of which nothing was heard.
    fn silently(why: String) -> Self {
        Self {
            said: String::new(),
            why,
        }
    }
}

/// Runs the commands of one executable.
#[derive(Clone, Debug)]
pub(crate) struct Verbs {
    executable: PathBuf,
    options: Options,
    /// Held by the command that runs and changes something: one at a time.
    turn: Arc<Mutex<()>>,
    /// Held by the command that runs and only reads: whoever asks often does not start many.
    look: Arc<Mutex<()>>,
    /// Commands that failed.
    failed: Arc<AtomicU64>,
}

impl Verbs {
    /// Finds the executable: the one that was named, else the one beside ours.
    pub(crate) fn find(options: &Options) -> anyhow::Result<Self> {
        let executable = match &options.underpass {
            Some(path) => path.clone(),
            None => std::env::current_exe()
                .context("cannot find our own executable")?
                .with_file_name("underpass"),
        };
        if !executable.is_file() {
            bail!(
                "there is no executable {}: put it beside the agent, or name it by --underpass",
                executable.display()
            );
        }
        Ok(Self {
            executable,
            options: options.clone(),
            turn: Arc::default(),
            look: Arc::default(),
            failed: Arc::default(),
        })
    }

    /// Waits until the command that runs has ended: killed in the middle, an installation would stay half done until
    /// the next one.
    pub(crate) async fn finish(&self) {
        let _turn = self.turn.lock().await;
    }

    /// Tells whether a command runs that changes something.
    pub(crate) fn are_busy(&self) -> bool {
        self.turn.try_lock().is_err()
    }

    /// Runs a command to its end, though whoever waits for it may go away.
    async fn change(&self, command: Command) -> Result<String, Failed> {
        let turn = Arc::clone(&self.turn).lock_owned().await;
        let failed = Arc::clone(&self.failed);
        let running = tokio::spawn(async move {
            let _turn = turn;
            run(command, &failed).await
        });
        let ended = |error| Failed::silently(format!("the command's task has ended: {error}"));
        running.await.map_err(ended)?
    }

    /// Installs plugin and network, the network last. Changes nothing that is as it should be. With `is_tested` the
    /// network is not tried first by two throwaway pods.
    pub(crate) async fn install(
        &self,
        network: &Network,
        is_tested: bool,
    ) -> Result<String, Failed> {
        let mut command = self.command("install");
        command.arg("--upgrade");
        command.arg("--bin-dir").arg(&self.options.bin_dir);
        command.arg("--net-dir").arg(&self.options.net_dir);
        for range in &network.ranges {
            command.arg("--range").arg(range.to_string());
        }
        for range in &network.cluster {
            command.arg("--cluster-cidr").arg(range.to_string());
        }
        if let Some(mtu) = network.mtu {
            command.arg("--mtu").arg(mtu.to_string());
        }
        if self.options.routing != Routing::Cloud {
            // After a boot pods may be faster than the device.
            let port = self.options.vxlan_port.to_string();
            command.arg("--tunnel-port").arg(port);
        }
        if let Some(config) = &self.options.config {
            command.arg("--config").arg(config);
        }
        if is_tested {
            command.arg("--no-self-test");
        }
        self.change(command).await
    }

    /// Removes network and plugin.
    pub(crate) async fn uninstall(&self) -> Result<String, Failed> {
        let mut command = self.command("uninstall");
        command.arg("--bin-dir").arg(&self.options.bin_dir);
        command.arg("--net-dir").arg(&self.options.net_dir);
        self.change(command).await
    }

    /// Has our programs take over from those of another build, which go on until then.
    pub(crate) async fn upgrade(&self) -> Result<String, Failed> {
        self.change(self.command("upgrade")).await
    }

    /// Puts right what others did to the uplinks.
    pub(crate) async fn apply(&self) -> Result<String, Failed> {
        let mut command = self.command("apply");
        command.arg("--net-dir").arg(&self.options.net_dir);
        self.change(command).await
    }

    /// Frees what lost DELs have left.
    pub(crate) async fn collect(&self) -> Result<String, Failed> {
        let mut command = self.command("gc");
        command.arg("--orphans");
        command.arg("--net-dir").arg(&self.options.net_dir);
        self.change(command).await
    }

    /// Reads what the programs counted, in the format of `OpenMetrics`.
    pub(crate) async fn metrics(&self) -> Result<String, Failed> {
        let _look = self.look.lock().await;
        let mut command = self.command("metrics");
        command.arg("--net-dir").arg(&self.options.net_dir);
        run(command, &self.failed).await
    }

    /// So many commands have failed.
    pub(crate) fn failures(&self) -> u64 {
        self.failed.load(Ordering::Relaxed)
    }

    fn command(&self, verb: &str) -> Command {
        let mut command = Command::new(&self.executable);
        command.arg(verb);
        command.arg("--bpf-root").arg(&self.options.bpf_root);
        command
    }
}

async fn run(command: Command, failed: &AtomicU64) -> Result<String, Failed> {
    let outcome = try_run(command, LIMIT).await;
    if outcome.is_err() {
        failed.fetch_add(1, Ordering::Relaxed);
    }
    outcome
}

/// Names a command in what is said of it: the executable and the verb. A cluster's ranges may be thousands of arguments, and with each node that
/// joins a failure would be another one.
fn name(command: &Command) -> String {
    let command = command.as_std();
    let words = iter::once(command.get_program()).chain(command.get_args().take(1));
    let words: Vec<_> = words.map(OsStr::to_string_lossy).collect();
    words.join(" ")
}

async fn try_run(mut command: Command, limit: Duration) -> Result<String, Failed> {
    let name = name(&command);
    command.stdin(Stdio::null()).kill_on_drop(true);
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    let failed = |error| Failed::silently(format!("cannot run {name}: {error}"));
    let mut child = command.spawn().map_err(failed)?;
    let (mut said, mut complained) = (Vec::new(), Vec::new());
    let (stdout, stderr) = (child.stdout.take(), child.stderr.take());
    let end = async {
        tokio::try_join!(
            child.wait(),
            read(stdout, &mut said),
            read(stderr, &mut complained)
        )
    };
    let end = timeout(limit, end).await;
    // What it had done and why it waited is known of one that is killed, too.
    let said = String::from_utf8_lossy(&said).into_owned();
    let how = match end {
        Ok(Ok((status, ..))) if status.success() => return Ok(said),
        Ok(Ok((status, ..))) => status.to_string(),
        Ok(Err(error)) => return Err(failed(error)),
        Err(_) => format!("killed, as it had not ended within {} s", limit.as_secs()),
    };
    let complained = String::from_utf8_lossy(&complained);
    let why = format!("{name}: {how}: {}", complained.trim());
    Err(Failed { said, why })
}

/// Reads all of a pipe, and keeps what came if it is stopped.
async fn read(pipe: Option<impl AsyncRead + Unpin>, into: &mut Vec<u8>) -> io::Result<usize> {
    match pipe {
        Some(mut pipe) => pipe.read_to_end(into).await,
        None => Ok(0),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn who_is_killed_is_heard() {
        let mut command = Command::new("sh");
        command
            .arg("-c")
            .arg("echo did this; echo waits for that >&2; exec sleep 60");
        let failed = try_run(command, Duration::from_secs(2))
            .await
            .expect_err("killed");
        assert_eq!(failed.said, "did this\n");
        let why = "killed, as it had not ended within 2 s: waits for that";
        assert!(failed.why.ends_with(why), "{}", failed.why);
    }

    #[tokio::test]
    async fn a_failure_is_the_same_for_however_many_nodes() {
        for (executable, why) in [
            ("false", "false install: exit status: 1: "),
            (
                "/nonexistent/underpass",
                "cannot run /nonexistent/underpass install: No such file or directory (os error 2)",
            ),
        ] {
            for nodes in [1_u32, 1_000] {
                let mut command = Command::new(executable);
                command.arg("install");
                for number in 0..nodes {
                    let range = format!("fd00:244:{number:x}::/64");
                    command.arg("--cluster-cidr").arg(range);
                }
                let failed = try_run(command, LIMIT).await.expect_err("a failure");
                assert_eq!(failed.why, why, "{nodes} nodes");
            }
        }
    }

    #[tokio::test]
    async fn who_fails_is_heard() {
        let mut command = Command::new("sh");
        command
            .arg("-c")
            .arg("echo did this; echo not that >&2; exit 3");
        let failed = try_run(command, LIMIT).await.expect_err("a failure");
        assert_eq!(failed.said, "did this\n");
        assert!(
            failed.why.ends_with("exit status: 3: not that"),
            "{}",
            failed.why
        );
    }
}
