//! Measures this project's plugin against the kernel's limits and the reference plugins. Needs root.
//!
//! Everything happens in namespaces that only this process holds: however it ends, nothing is left. It ends in time, too.

use std::{
    fs,
    panic::resume_unwind,
    path::{Path, PathBuf},
    process::ExitCode,
    thread::ScopedJoinHandle,
    time::{Duration, Instant},
};

use anstream::{eprintln, println};
use anyhow::{Context as _, Result, bail};
use clap::{Parser, ValueEnum};
use nix::unistd::alarm;
use serde::Serialize;
use underpass_tests::{node::find_plugin, privilege};

mod control;
mod cpu;
mod fdinfo;
mod load;
mod machine;
mod others;
mod path;
mod plugin;
mod program;
mod redirect;
mod report;
mod sample;
mod target;
mod traffic;

use load::{Load, Timing};
use machine::Machine;
use others::Used;
use path::Paths;

/// Measures underpass against the kernel's limits and the reference plugins.
#[derive(Parser)]
#[command(name = "cargo xtask bench", bin_name = "cargo xtask bench")]
struct Arguments {
    /// Fewer and shorter rounds, and no crowded nodes: a few minutes instead of half an hour.
    #[arg(long)]
    quick: bool,
    /// Measure only this; may be given several times. The result is printed, but not kept, except that of Services alone.
    #[arg(long, value_enum)]
    only: Vec<Part>,
    /// Both ends of all traffic on one core, so that all work counts, and no time is spent on waking another one.
    #[arg(long)]
    one_core: bool,
    /// Measure only ways whose name, such as `pod to pod, learned`, has this text in it, beside their limits; may be given several times.
    /// The result is printed, but not kept.
    #[arg(long, value_name = "TEXT")]
    way: Vec<String>,
    /// Measure only these loads; may be given several times. The result is printed, but not kept.
    #[arg(long, value_enum)]
    load: Vec<Load>,
    /// The executable of another build, whose ways are measured beside this one's. The result is printed, but not kept.
    #[arg(long, value_name = "FILE")]
    before: Option<PathBuf>,
    /// What version of the sources this is, for the record.
    #[arg(long, default_value = "unknown")]
    revision: String,
    /// Rounds of traffic.
    #[arg(long)]
    rounds: Option<usize>,
    /// Milliseconds that each load is counted for in a round.
    #[arg(long)]
    window: Option<u64>,
}

impl Arguments {
    /// Whether this is no measurement of all that a part of it has to say.
    const fn is_choice(&self) -> bool {
        !self.way.is_empty() || !self.load.is_empty() || self.before.is_some()
    }
}

/// A part of the measurement.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
enum Part {
    /// Packets on all paths.
    Traffic,
    /// Packets to a host port with and without XDP, which are part of the former.
    Xdp,
    /// Packets to Services, straight to their endpoints, and by the stack alone. Only when it is asked for.
    Services,
    /// The time of calls.
    Control,
    /// The time that programs take for a packet.
    Program,
}

/// How much is measured.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Settings {
    quick: bool,
    /// Rounds of traffic on all paths.
    rounds: usize,
    /// Milliseconds of traffic before it counts.
    warm_up_ms: u64,
    /// Milliseconds of traffic that count.
    window_ms: u64,
    /// Whether both ends of traffic share a core.
    one_core: bool,
    /// What is sent.
    #[serde(skip)]
    loads: Vec<Load>,
    /// Containers on the node while calls are timed.
    containers: Vec<usize>,
    /// Timed ADDs and DELs for each plugin and number of containers.
    calls: usize,
    /// Series of many ADDs at once.
    series: usize,
    /// Single runs of each program.
    runs: usize,
    /// The longest time that all of it may take, in seconds.
    #[serde(skip)]
    limit_s: u32,
}

impl Settings {
    fn of(arguments: &Arguments) -> Self {
        // Many clients on two cores measure the scheduler.
        let loads = if arguments.one_core && !arguments.only.contains(&Part::Services) {
            Load::ALL.to_vec()
        } else {
            Load::SINGLE.to_vec()
        };
        let mut settings = if arguments.quick {
            Self {
                quick: true,
                one_core: arguments.one_core,
                loads: loads.clone(),
                rounds: 3,
                warm_up_ms: 50,
                window_ms: 250,
                containers: vec![30],
                calls: 21,
                series: 3,
                runs: 4_000,
                limit_s: 12 * 60,
            }
        } else {
            Self {
                quick: false,
                one_core: arguments.one_core,
                loads: loads.clone(),
                rounds: 7,
                warm_up_ms: 150,
                window_ms: 800,
                containers: vec![30, 250, 1_000],
                calls: 31,
                series: 7,
                runs: 20_000,
                limit_s: 40 * 60,
            }
        };
        if !arguments.load.is_empty() {
            settings.loads.clone_from(&arguments.load);
        }
        settings.rounds = arguments.rounds.unwrap_or(settings.rounds);
        settings.window_ms = arguments.window.unwrap_or(settings.window_ms);
        settings
    }

    const fn timing(&self) -> Timing {
        Timing {
            warm_up: Duration::from_millis(self.warm_up_ms),
            window: Duration::from_millis(self.window_ms),
        }
    }
}

/// Everything that was measured, as it is kept.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Outcome {
    revision: String,
    machine: Machine,
    settings: Settings,
    /// Seconds that it took.
    duration_s: u64,
    /// Cores that other processes took on average meanwhile.
    others: Option<f64>,
    traffic: Vec<traffic::Series>,
    bypassed: Vec<path::Bypassed>,
    /// What could not be measured on this machine, and why.
    left_out: Vec<String>,
    control: Option<control::Outcome>,
    programs: Option<program::Outcome>,
    targets: Vec<target::Target>,
}

fn main() -> ExitCode {
    match run(&Arguments::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(arguments: &Arguments) -> Result<()> {
    if let Some(reason) = privilege::missing().or_else(|| find_plugin().err().map(str::to_owned)) {
        bail!("{reason}");
    }
    let begin = Instant::now();
    let settings = Settings::of(arguments);
    if settings.one_core {
        cpu::share();
    }
    if let Some(executable) = &arguments.before {
        plugin::compare_with(executable)?;
    }
    // The namespaces go with the process, so the bluntest of clocks is good enough.
    alarm::set(settings.limit_s);
    let wanted = |part| arguments.only.is_empty() || arguments.only.contains(&part);

    let mut outcome = Outcome {
        revision: arguments.revision.clone(),
        machine: Machine::here()?,
        settings,
        duration_s: 0,
        others: None,
        traffic: Vec::new(),
        bypassed: Vec::new(),
        left_out: Vec::new(),
        control: None,
        programs: None,
        targets: Vec::new(),
    };
    if outcome.machine.is_busy() {
        eprintln!(
            "warning: others use this machine: {}",
            outcome.machine.describe()
        );
    }
    let used = Used::now()?;
    // The paths stay until all is done: the kernel would take them down in the background of the next part.
    let mut paths: Option<Paths> = None;
    let is_about_services = arguments.only.contains(&Part::Services);
    if is_about_services || wanted(Part::Traffic) || wanted(Part::Xdp) {
        eprintln!("traffic: building the paths");
        let built = paths.insert(if is_about_services {
            Paths::build_services()?
        } else if wanted(Part::Traffic) {
            Paths::build()?
        } else {
            Paths::build_xdp()?
        });
        built.retain(&arguments.way);
        outcome.traffic = traffic::measure(&built.ways, &outcome.settings)?;
        outcome.bypassed = built.bypassed()?;
        outcome.left_out.clone_from(&built.left_out);
    }
    if wanted(Part::Program) {
        eprintln!("programs: single runs, then under traffic");
        outcome.programs = Some(program::measure(outcome.settings.runs)?);
    }
    if wanted(Part::Control) {
        outcome.control = Some(control::measure(&outcome.settings)?);
    }
    outcome.targets = target::judge(&outcome);
    outcome.others = Some(Used::now()?.others_since(&used));
    outcome.duration_s = begin.elapsed().as_secs();
    drop(paths);

    println!("{}", report::table(&outcome));
    match arguments.only[..] {
        _ if arguments.is_choice() => Ok(()),
        [] => {
            let kind = match (outcome.settings.quick, outcome.settings.one_core) {
                (true, false) => "quick",
                (false, false) => "full",
                (true, true) => "quick-one-core",
                (false, true) => "one-core",
            };
            keep(&outcome, kind)
        }
        [Part::Services] if outcome.settings.quick => Ok(()),
        [Part::Services] if outcome.settings.one_core => keep(&outcome, "services-one-core"),
        [Part::Services] => keep(&outcome, "services"),
        _ => Ok(()),
    }
}

/// Writes table, JSON and plot, each complete or not at all.
fn keep(outcome: &Outcome, kind: &str) -> Result<()> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("results");
    fs::create_dir_all(&folder).with_context(|| format!("make {}", folder.display()))?;
    let name = format!("{}-{kind}", outcome.machine.slug());
    let json = serde_json::to_string_pretty(outcome).context("write the result as JSON")?;
    for (extension, text) in [
        ("json", json),
        ("txt", report::table(outcome)),
        ("svg", report::plot(outcome)),
    ] {
        let file: PathBuf = folder.join(format!("{name}.{extension}"));
        let draft = file.with_extension(format!("{extension}.new"));
        fs::write(&draft, text.trim_end().to_owned() + "\n")
            .and_then(|()| fs::rename(&draft, &file))
            .with_context(|| format!("write {}", file.display()))?;
        eprintln!("wrote {}", file.display());
    }
    Ok(())
}

/// What a thread found out; its panic goes on here.
pub(crate) fn join<T>(thread: ScopedJoinHandle<'_, T>) -> T {
    thread.join().unwrap_or_else(|panic| resume_unwind(panic))
}
