//! A program that runs in a cage for as long as a test wants it to.

use std::{
    fs::OpenOptions,
    path::{Path, PathBuf},
    process::{Child, Stdio},
};

use anyhow::{Context as _, Result, ensure};
use underpass_runtimes::{Cage, containerd::End};

/// How many characters of a program's name the kernel keeps for its process.
const NAME_LEN: usize = 15;
/// So many lines of a log tell why something failed.
const LAST_LINES: usize = 25;

/// A daemon, and how to start it again.
#[derive(Debug)]
pub(crate) struct Daemon {
    program: PathBuf,
    arguments: Vec<String>,
    environment: Vec<(String, String)>,
    child: Option<Child>,
}

impl Daemon {
    /// A daemon that does not run yet.
    pub(crate) fn new(program: &Path, arguments: Vec<String>) -> Self {
        Self {
            program: program.to_owned(),
            arguments,
            environment: Vec::new(),
            child: None,
        }
    }

    /// Gives it a variable of the environment.
    pub(crate) fn env(mut self, name: &str, value: &str) -> Self {
        self.set(name, Some(value));
        self
    }

    /// Has it started with another value of a variable the next time, or without it.
    pub(crate) fn set(&mut self, name: &str, value: Option<&str>) {
        self.environment.retain(|(known, _)| known != name);
        let variable = value.map(|value| (name.to_owned(), value.to_owned()));
        self.environment.extend(variable);
    }

    /// Starts it. What it says goes to the end of its log.
    pub(crate) fn start(&mut self, cage: &Cage) -> Result<()> {
        let name = self.name();
        ensure!(self.child.is_none(), "{name} runs already");
        let log = OpenOptions::new()
            .create(true)
            .append(true)
            .open(cage.path(&self.log_file()))
            .with_context(|| format!("make the log of {name}"))?;
        let mut command = cage.command(&self.program.to_string_lossy());
        command
            .args(&self.arguments)
            .envs(self.environment.iter().cloned())
            .stdin(Stdio::null())
            .stdout(log.try_clone()?)
            .stderr(log);
        let child = command.spawn().with_context(|| format!("start {name}"))?;
        self.child = Some(child);
        Ok(())
    }

    /// Ends it and nothing else.
    pub(crate) fn stop(&mut self, cage: &Cage, how: End) -> Result<()> {
        let name = self.name();
        let signal = match how {
            End::Term => "TERM",
            End::Kill => "KILL",
        };
        let known: String = name.chars().take(NAME_LEN).collect();
        let running = cage.processes(&known)?;
        ensure!(running.len() == 1, "one {name}, not {running:?}");
        for process in running {
            cage.expect("sh", &["-c", &format!("kill -{signal} {process}")])?;
        }
        // Its parent, which is on our side, ends with it.
        if let Some(mut child) = self.child.take() {
            child.wait().with_context(|| format!("wait for {name}"))?;
        }
        Ok(())
    }

    /// Fails if it has ended by itself.
    pub(crate) fn is_alive(&mut self, cage: &Cage) -> Result<()> {
        let name = self.name();
        let child = self
            .child
            .as_mut()
            .with_context(|| format!("{name} was not started"))?;
        let ended = child.try_wait().context("ask for a child process")?;
        ensure!(
            ended.is_none(),
            "it ended ({ended:?}): {}",
            self.last_words(cage)
        );
        Ok(())
    }

    /// Its name, and the last lines that it said.
    pub(crate) fn last_words(&self, cage: &Cage) -> String {
        let log = self.log(cage);
        let lines: Vec<&str> = log.lines().collect();
        let from = lines.len().saturating_sub(LAST_LINES);
        format!("{} said\n{}", self.name(), lines[from..].join("\n"))
    }

    /// All that it said.
    pub(crate) fn log(&self, cage: &Cage) -> String {
        cage.read(&self.log_file()).unwrap_or_default()
    }

    fn name(&self) -> String {
        let name = self.program.file_name().unwrap_or_default();
        name.to_string_lossy().into_owned()
    }

    fn log_file(&self) -> String {
        format!("/run/{}.log", self.name())
    }
}
