//! One guest: Debian's kernel on an emulated machine (no KVM needed), the host's root read-only under a memory overlay.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};

use super::initramfs;
use super::kernel::Kernel;
use crate::emulator::Emulator;

const BOOT: &str = include_str!("boot.sh");

/// Memory of a guest, in MiB: what it writes to "disk" is in there too.
const MEMORY: &str = "3072";

/// A guest that is to run a job. It sees `folder` as `/guest`, the one place where it writes to the host.
pub(super) struct Guest<'a> {
    pub(super) emulator: &'a Emulator,
    pub(super) kernel: &'a Kernel,
    pub(super) folder: PathBuf,
    /// After that it is ended, whatever it does.
    pub(super) limit: Duration,
}

impl Guest<'_> {
    /// Where the guest's kernel and its start say what they do.
    pub(super) fn console(&self) -> PathBuf {
        self.folder.join("console.log")
    }

    /// Runs a shell script in the guest; `watch` is called a few times a second meanwhile. Returns the script's exit code.
    pub(super) fn run(&self, job: &str, mut watch: impl FnMut()) -> anyhow::Result<i32> {
        let write = |name: &str, content: &[u8]| {
            let path = self.folder.join(name);
            fs::write(&path, content).with_context(|| format!("cannot write {}", path.display()))
        };
        write("boot.sh", BOOT.as_bytes())?;
        write("job.sh", job.as_bytes())?;
        write(
            "initramfs.cpio",
            &initramfs::build(self.kernel, self.emulator.busybox())?,
        )?;

        let console = File::create(self.console()).context("cannot create the console's log")?;
        let mut machine = Machine(
            self.command()
                .stdin(Stdio::null())
                .stderr(
                    console
                        .try_clone()
                        .context("cannot share the console's log")?,
                )
                .stdout(console)
                .spawn()
                .context("cannot start the emulator")?,
        );
        let start = Instant::now();
        loop {
            let ended = machine
                .0
                .try_wait()
                .context("cannot wait for the emulator")?;
            watch();
            if ended.is_some() {
                break;
            }
            if start.elapsed() > self.limit {
                bail!(
                    "the guest had not finished after {} s and was ended: see {}",
                    self.limit.as_secs(),
                    self.console().display()
                );
            }
            sleep(Duration::from_millis(200));
        }
        let status = fs::read_to_string(self.folder.join("status")).unwrap_or_default();
        status.trim().parse().with_context(|| {
            format!(
                "the guest went down before its job had ended: see {}",
                self.console().display()
            )
        })
    }

    fn command(&self) -> Command {
        // A guest ends with who started it, however that ends.
        let mut command = Command::new("setpriv");
        command.args(["--pdeathsig", "KILL", "nice", "-n", "10"]);
        self.emulator.append_to(&mut command);
        command.args([
            "-nodefaults",
            "-no-reboot",
            "-display",
            "none",
            "-serial",
            "stdio",
        ]);
        // Two processors, but one thread that runs them in turn: with a thread for each, 6.12 has died of a breakpoint that the kernel
        // itself had put there to patch its code, as if a processor had run a stale translation of it.
        command.args(["-machine", "pc", "-accel", "tcg,thread=single", "-smp", "2"]);
        // A fifth level of page tables is one more to walk in software. Processors that tell of fast string instructions (ERMS, FSRM)
        // make the kernel copy and clear by single bytes, each of which is emulated: without them everything takes half the time.
        command.args(["-cpu", "max,la57=off,erms=off,fsrm=off", "-m", MEMORY]);
        command.arg("-kernel").arg(self.kernel.image());
        command
            .arg("-initrd")
            .arg(self.folder.join("initramfs.cpio"));
        command.args([
            "-append",
            "console=ttyS0 quiet mitigations=off oops=panic panic=-1",
        ]);
        share(
            &mut command,
            "host",
            Path::new("/"),
            ",readonly=on,multidevs=remap",
        );
        share(
            &mut command,
            "modules",
            &self.kernel.modules(),
            ",readonly=on",
        );
        share(&mut command, "guest", &self.folder, "");
        command
    }
}

fn share(command: &mut Command, tag: &str, folder: &Path, options: &str) {
    // A comma in a path is written twice.
    let path = folder.display().to_string().replace(',', ",,");
    command.arg("-fsdev").arg(format!(
        "local,id={tag},path={path},security_model=none{options}"
    ));
    command
        .arg("-device")
        .arg(format!("virtio-9p-pci,fsdev={tag},mount_tag={tag}"));
}

/// A running emulator; ends with its owner.
struct Machine(Child);

impl Drop for Machine {
    fn drop(&mut self) {
        // It may have ended by itself; either way it is reaped.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}
