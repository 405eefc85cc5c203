//! What a result was measured with: absolute figures mean nothing without it.

use std::{fs, process::Command, thread};

use anyhow::{Context as _, Result};
use nix::sys::utsname::uname;
use serde::Serialize;

/// The machine and the programs on it.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Machine {
    kernel: String,
    architecture: String,
    cpu: String,
    cores: usize,
    memory_mib: u64,
    /// Whether the processor says that it is a virtual one.
    virtualized: bool,
    /// Runnable processes in the minute before the first measurement: well above 0, and the figures are not to be trusted.
    load_average: f64,
    iptables: String,
    reference_plugins: String,
}

impl Machine {
    /// Looks at this one.
    pub(crate) fn here() -> Result<Self> {
        let name = uname().context("ask for the kernel's name")?;
        let cpuinfo = fs::read_to_string("/proc/cpuinfo").context("read /proc/cpuinfo")?;
        let meminfo = fs::read_to_string("/proc/meminfo").context("read /proc/meminfo")?;
        let load = fs::read_to_string("/proc/loadavg").context("read /proc/loadavg")?;
        let kib: u64 = field(&meminfo, "MemTotal")
            .and_then(|value| value.split(' ').next())
            .and_then(|value| value.parse().ok())
            .context("find MemTotal in /proc/meminfo")?;
        Ok(Self {
            kernel: name.release().to_string_lossy().into_owned(),
            architecture: name.machine().to_string_lossy().into_owned(),
            cpu: field(&cpuinfo, "model name")
                .unwrap_or("unknown")
                .to_owned(),
            cores: thread::available_parallelism().map_or(1, usize::from),
            memory_mib: kib / 1024,
            virtualized: field(&cpuinfo, "flags")
                .is_some_and(|flags| flags.split(' ').any(|flag| flag == "hypervisor")),
            load_average: load
                .split(' ')
                .next()
                .and_then(|value| value.parse().ok())
                .context("read a number from /proc/loadavg")?,
            iptables: first_line(Command::new("iptables").arg("--version")),
            reference_plugins: first_line(Command::new("dpkg-query").args([
                "--show",
                "--showformat=${Package} ${Version}",
                "containernetworking-plugins",
            ])),
        })
    }

    /// Whether others keep the machine from measuring anything, as far as the minute before tells.
    pub(crate) fn is_busy(&self) -> bool {
        self.load_average > 1.0
    }

    /// A name for files: kernel, architecture, number of cores.
    pub(crate) fn slug(&self) -> String {
        format!("{}-{}-{}cpu", self.kernel, self.architecture, self.cores)
    }

    /// One line for people.
    pub(crate) fn describe(&self) -> String {
        format!(
            "{} ({} cores{}), {} MiB, kernel {} {}; load average before: {}",
            self.cpu,
            self.cores,
            if self.virtualized { ", virtual" } else { "" },
            self.memory_mib,
            self.kernel,
            self.architecture,
            self.load_average
        )
    }

    /// One line for people about what is compared with.
    pub(crate) fn peers(&self) -> String {
        format!("{}; {}", self.reference_plugins, self.iptables)
    }
}

/// The value of the first line `name: value`.
fn field<'a>(text: &'a str, name: &str) -> Option<&'a str> {
    text.lines().find_map(|line| {
        let (key, value) = line.split_once(':')?;
        (key.trim() == name).then(|| value.trim())
    })
}

/// What a program says first, or that it says nothing: a version is no reason to fail.
fn first_line(command: &mut Command) -> String {
    let name = command.get_program().display().to_string();
    command
        .output()
        .ok()
        .and_then(|output| {
            let text = String::from_utf8(output.stdout).ok()?;
            Some(text.lines().next()?.to_owned())
        })
        .unwrap_or_else(|| format!("unknown, {name} does not say"))
}

#[cfg(test)]
mod tests {
    use super::field;

    #[test]
    fn the_first_line_of_a_name_counts() {
        let text = "model name\t: One\nflags\t\t: fpu vme\nmodel name\t: Two\n";
        assert_eq!(field(text, "model name"), Some("One"));
        assert_eq!(field(text, "flags"), Some("fpu vme"));
        assert_eq!(field(text, "model"), None);
    }
}
