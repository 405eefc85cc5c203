//! Child processes that fail with a sentence.

use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus};
use std::thread::sleep;
use std::time::{Duration, Instant};
use std::{env, fmt};

use anyhow::{Context as _, bail};

/// Runs a program to its end; anything but success is an error that names it.
pub(crate) fn run(command: &mut Command) -> anyhow::Result<()> {
    let status = command
        .status()
        .with_context(|| format!("cannot start `{}`", Line(command)))?;
    succeed(command, status)
}

/// What a program prints; anything but success is an error with what it says of that.
pub(crate) fn output(command: &mut Command) -> anyhow::Result<String> {
    let output = command
        .output()
        .with_context(|| format!("cannot start {}", command.get_program().display()))?;
    if !output.status.success() {
        bail!(
            "{} failed: {}",
            command.get_program().display(),
            String::from_utf8_lossy(&output.stderr).trim()
        );
    }
    String::from_utf8(output.stdout)
        .with_context(|| format!("{} printed no UTF-8", command.get_program().display()))
}

/// Runs a program as [`run`] does, but it is killed when the time is over.
pub(crate) fn run_within(command: &mut Command, limit: Duration) -> anyhow::Result<()> {
    let mut child = command
        .spawn()
        .with_context(|| format!("cannot start `{}`", Line(command)))?;
    let start = Instant::now();
    loop {
        if let Some(status) = child
            .try_wait()
            .context("cannot wait for a child process")?
        {
            return succeed(command, status);
        }
        if start.elapsed() > limit {
            // It may have ended in between; either way it is reaped.
            let _ = child.kill();
            child.wait().context("cannot wait for a child process")?;
            bail!(
                "`{}` had not finished after {} s and was stopped",
                Line(command),
                limit.as_secs()
            );
        }
        sleep(Duration::from_millis(50));
    }
}

/// Whether the program is where commands are looked for.
pub(crate) fn on_path(program: &str) -> bool {
    env::split_paths(&path()).any(|folder| folder.join(program).is_file())
}

/// `PATH`, and the folders of administrators' tools, which a user's `PATH` may leave out.
pub(crate) fn path() -> OsString {
    let path = env::var_os("PATH").unwrap_or_default();
    with_system(&path)
}

fn with_system(path: &OsStr) -> OsString {
    let system = ["/usr/sbin", "/sbin"].map(PathBuf::from);
    let folders = env::split_paths(path).chain(system);
    // What was split at colons has none that would prevent joining.
    env::join_paths(folders).unwrap_or_else(|_| path.to_owned())
}

fn succeed(command: &Command, status: ExitStatus) -> anyhow::Result<()> {
    if !status.success() {
        bail!("`{}` failed ({status})", Line(command));
    }
    Ok(())
}

/// A command as a person would type it.
struct Line<'a>(&'a Command);

impl fmt::Display for Line<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let program = Path::new(self.0.get_program());
        write!(
            f,
            "{}",
            program.file_name().unwrap_or(program.as_os_str()).display()
        )?;
        for argument in self.0.get_args() {
            write!(f, " {}", argument.display())?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failure_names_the_command_as_typed() {
        let error =
            run(Command::new("/bin/sh").args(["-c", "exit 3"])).expect_err("exit 3 is a failure");
        assert_eq!(error.to_string(), "`sh -c exit 3` failed (exit status: 3)");
    }

    #[test]
    fn tools_of_administrators_are_looked_for_last() {
        let path = with_system(OsStr::new("/t/bin:/usr/bin"));
        assert_eq!(path, "/t/bin:/usr/bin:/usr/sbin:/sbin");
    }

    #[test]
    fn a_program_that_hangs_is_stopped() {
        let start = Instant::now();
        let error = run_within(Command::new("sleep").arg("60"), Duration::from_millis(200))
            .expect_err("sleep outlives its limit");
        assert!(error.to_string().contains("was stopped"), "{error}");
        assert!(start.elapsed() < Duration::from_secs(30));
    }

    #[test]
    fn a_program_in_time_is_not_stopped() {
        run_within(&mut Command::new("true"), Duration::from_secs(30))
            .expect("true succeeds at once");
    }
}
