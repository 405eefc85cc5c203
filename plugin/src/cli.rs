//! The operator's command line. Results go to stdout, everything else to stderr; colours and the
//! exit code are decided here.

use std::{
    io,
    path::{Path, PathBuf},
    process::ExitCode,
    time::Duration,
};

use anstyle::{AnsiColor, Style};
use clap::{CommandFactory as _, Parser, Subcommand};

use crate::{
    conf::{BPF_ROOT, one_spelling},
    error::Error,
};

use folders::NetDir;

mod apply;
mod doctor;
mod flows;
mod folders;
mod gc;
mod install;
mod load;
mod metrics;
mod networks;
mod report;
mod selftest;
mod status;
mod trace;
mod uninstall;
mod unload;
mod upgrade;

/// The name that the command line answers to.
pub const NAME: &str = "underpass";

const HEADING: Style = Style::new().bold();
const GOOD: Style = AnsiColor::Green.on_default();
const BAD: Style = AnsiColor::Red.on_default();
const FAINT: Style = Style::new().dimmed();

/// A CNI plugin that carries containers' traffic under the host's network stack. Container runtimes
/// call it by the CNI protocol; these commands are for people.
#[derive(Parser)]
#[command(name = NAME, version, arg_required_else_help = true)]
struct Arguments {
    /// The folder on a bpffs where this node's programs and maps are pinned
    #[arg(long, global = true, value_name = "FOLDER", default_value = BPF_ROOT, value_parser = bpf_root)]
    bpf_root: PathBuf,
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Show what is loaded, where it is attached, the endpoints, and what was counted
    Status {
        /// Print one JSON document
        #[arg(long)]
        json: bool,
    },
    /// List the flows that the programs remember
    Flows {
        /// Print one JSON document
        #[arg(long)]
        json: bool,
    },
    /// Look for what is wrong with this node, and say how to mend it
    ///
    /// Nothing is changed. The exit code is 1 if containers suffer or an ADD would fail.
    Doctor {
        /// Print one JSON document
        #[arg(long)]
        json: bool,
        #[command(flatten)]
        networks: NetDir,
        /// Where the files of the host are: for tests
        #[arg(long, value_name = "FOLDER", default_value = "/", hide = true)]
        host_root: PathBuf,
    },
    /// Write one file that says all about this node, for a bug report
    ///
    /// It has addresses and names, and no values of keys of configs that underpass does not know.
    Report {
        /// The file to write, an uncompressed tar archive; it must not exist
        #[arg(long, value_name = "FILE", default_value = "underpass-report.tar")]
        output: PathBuf,
        #[command(flatten)]
        networks: NetDir,
    },
    /// Print what the programs log, until interrupted
    Trace {
        /// The most detailed level to print
        #[arg(long, default_value = "debug", value_parser = trace::level)]
        level: log::LevelFilter,
    },
    /// Load all programs and pin them, so that no ADD has to wait for the kernel to verify one
    ///
    /// Where they are loaded already, the node's sysctls and IPsec policies are looked at again.
    Load {
        /// Entries of each flow table, a power of two from 1024 to 4194304; by default what suits the
        /// node's memory. Counts when the tables are made, so where nothing is loaded
        #[arg(long, value_name = "N", value_parser = load::flows)]
        flows: Option<u32>,
    },
    /// Put right what the node changed behind our back: uplinks, programs that were taken off, sysctls, IPsec policies
    ///
    /// No container is detached, whatever the runtime knows. A second run changes nothing.
    Apply {
        #[command(flatten)]
        networks: NetDir,
    },
    /// Free what lost DELs have left: attachments whose devices are gone, and leases that no attachment has
    ///
    /// By a list of those that are alive only the runtime can do it: GC of the CNI protocol.
    Gc {
        /// Go by what the node knows, in the place of a runtime's list
        #[arg(long)]
        orphans: bool,
        /// Leave leases alone that are younger
        #[arg(long, value_name = "SECONDS", default_value_t = 600)]
        grace: u64,
        #[command(flatten)]
        networks: NetDir,
    },
    /// Print what is counted and how full tables and pools are, as text for collectors of metrics (`OpenMetrics`)
    Metrics {
        #[command(flatten)]
        networks: NetDir,
    },
    /// Have this executable's programs take over from those of another one, while containers run
    ///
    /// No container is detached and no packet is lost. If this executable can't take over, it says why, and nothing is changed.
    Upgrade,
    /// Put executables, programs and the conflist of a network in their places, in the order in which a runtime can use them
    ///
    /// Nothing is written where all is as it should be, so it can be repeated at any time. Entries that others added to the
    /// conflist stay.
    Install(install::Options),
    /// Remove what `install` made, and nothing else
    ///
    /// Refused while containers are attached, or others have entries in the conflist.
    Uninstall(uninstall::Options),
    /// Attach two throwaway pods to a network as a runtime does, and have them talk to each other
    Selftest(selftest::Options),
    /// Detach the programs from all devices and remove the pins
    Unload {
        /// Even though containers are attached: they lose masquerade and the bypass
        #[arg(long)]
        force: bool,
    },
}

/// How to print a result.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Format {
    Human,
    Json,
}

impl Format {
    const fn new(json: bool) -> Self {
        if json { Self::Json } else { Self::Human }
    }
}

/// Why a command ended early.
#[derive(Debug, thiserror::Error)]
enum Failure {
    #[error(transparent)]
    Plugin(#[from] Error),
    #[error("cannot write the output: {0}")]
    Output(#[from] io::Error),
    #[error(
        "cannot read the programs' log: {0}: run it as root in the initial user namespace, with CAP_SYS_ADMIN and CAP_BPF"
    )]
    Log(#[from] aya_log::Error),
    #[error("cannot wait for records: {0}; see the limits of open files and of memory")]
    Wait(#[source] io::Error),
    #[error(
        "another `underpass trace` is running on this node: records can be read by one only; end that one first"
    )]
    TraceBusy,
    #[error(
        "the flow tables have {loaded} entries since they were loaded, and cannot have {asked}: `underpass unload` first"
    )]
    Loaded {
        /// Entries that there are.
        loaded: u32,
        /// Entries that were asked for.
        asked: u32,
    },
    #[error(
        "{}: containers suffer, or an ADD would fail",
        if *.0 == 1 { "1 finding is an error".to_owned() } else { format!("{} findings are errors", .0) }
    )]
    Unwell(usize),
    #[error(
        "the doctor can't see enough of the node: run it as root in the initial user namespace, with CAP_NET_ADMIN, and CAP_SYS_ADMIN or CAP_BPF and CAP_PERFMON"
    )]
    Blind,
    #[error(
        "cannot write the report to {}: {source}; name another file with --output",
        path.display()
    )]
    Report {
        /// The file that was asked for.
        path: PathBuf,
        /// Why it can't be written.
        source: io::Error,
    },
    #[error(
        "{}: DEL them first (`underpass gc --orphans` frees those whose DELs were lost), or say --force to cut them off from masquerade and bypass",
        if *.0 == 1 { "1 container is attached".to_owned() } else { format!("{} containers are attached", .0) }
    )]
    InUse(usize),
    #[error(
        "{} has entries of others ({others}): have them removed by those who added them, or say --force to remove the whole file",
        path.display()
    )]
    OthersEntries {
        /// The conflist.
        path: PathBuf,
        /// Their types.
        others: String,
    },
    #[error(
        "{} names {name}, which would be gone: remove that network first, or say --force",
        path.display()
    )]
    StillNamed {
        /// The file of another network.
        path: PathBuf,
        /// The plugin that it has.
        name: String,
    },
    #[error(
        "a network that may need what would be gone can't be read: {0}; mend the file or remove it first, or say --force"
    )]
    Unreadable(underpass_cni::Error),
    #[error(
        "the programs of the network in {} are at {}: name them by --bpf-root",
        path.display(),
        pinned.display()
    )]
    OtherPins {
        /// The conflist.
        path: PathBuf,
        /// Its `bpfRoot`.
        pinned: PathBuf,
    },
    #[error(
        "{} is a network, and no list of plugins: move it away if it is not needed",
        .0.display()
    )]
    OtherShape(PathBuf),
    #[error(
        "{} has the network {name}, to which containers are attached: their addresses would be given to others; {advice}",
        path.display()
    )]
    Renamed {
        /// The conflist.
        path: PathBuf,
        /// The network's name.
        name: String,
        /// What to do.
        advice: String,
    },
    #[error(
        "containers have outlived what was loaded at {} ({devices}), and go on with that: programs that are loaded now take the uplinks from it, and the containers lose masquerade and host ports. Drain the node, or delete them (`ip link` names each in the alias of its device), and install then; `underpass load` loads all the same. Nothing was changed",
        root.display()
    )]
    Outlived {
        /// Where the pins should be.
        root: PathBuf,
        /// The hosts' ends of the first few.
        devices: String,
    },
    #[error(transparent)]
    SelfTest(#[from] crate::selftest::Failure),
    #[error(
        "GC by a list of valid attachments is the runtime's, which has one: say --orphans to free what lost DELs have left"
    )]
    NoList,
}

impl From<underpass_cni::Error> for Failure {
    fn from(error: underpass_cni::Error) -> Self {
        Self::Plugin(error.into())
    }
}

impl From<underpass_netlink::Error> for Failure {
    fn from(error: underpass_netlink::Error) -> Self {
        Self::Plugin(error.into())
    }
}

impl From<underpass_dataplane::Error> for Failure {
    fn from(error: underpass_dataplane::Error) -> Self {
        Self::Plugin(error.into())
    }
}

/// Reads `--bpf-root`, in the one way in which the path of a node's pins is written.
fn bpf_root(text: &str) -> Result<PathBuf, String> {
    let root = PathBuf::from(text);
    if !root.is_absolute() {
        return Err("it must be an absolute path, of a folder on a bpffs".to_owned());
    }
    Ok(one_spelling(&root))
}

/// Describes the command line, for what is made of it: man pages and completions.
#[must_use]
pub fn command() -> clap::Command {
    Arguments::command()
}

/// Runs the command that the arguments name.
#[must_use]
pub fn run() -> ExitCode {
    let Arguments { bpf_root, command } = Arguments::parse();
    let mut out = anstream::stdout().lock();
    let answer = match command {
        Command::Status { json } => status::run(&bpf_root, Format::new(json), &mut out),
        Command::Flows { json } => flows::run(&bpf_root, Format::new(json), &mut out),
        Command::Doctor {
            json,
            networks,
            host_root,
        } => {
            let places = doctor::Places {
                bpf_root: &bpf_root,
                net_dir: networks.path(),
                host_root: &host_root,
            };
            doctor::run(places, Format::new(json), &mut out)
        }
        Command::Report { output, networks } => {
            let places = doctor::Places {
                bpf_root: &bpf_root,
                net_dir: networks.path(),
                host_root: Path::new("/"),
            };
            report::run(places, &output, &mut out)
        }
        Command::Trace { level } => trace::run(&bpf_root, level, &mut out),
        Command::Load { flows } => load::run(&bpf_root, flows, &mut out),
        Command::Apply { networks } => apply::run(&bpf_root, &networks, &mut out),
        Command::Gc { orphans: false, .. } => Err(Failure::NoList),
        Command::Gc {
            grace, networks, ..
        } => {
            let grace = Duration::from_secs(grace);
            gc::run(&bpf_root, &networks, grace, &mut out)
        }
        Command::Metrics { networks } => metrics::run(&bpf_root, &networks, &mut out),
        Command::Upgrade => upgrade::run(&bpf_root, &mut out),
        Command::Install(options) => install::run(&bpf_root, options, &mut out),
        Command::Uninstall(options) => uninstall::run(&bpf_root, &options, &mut out),
        Command::Selftest(options) => selftest::run(options, &mut out),
        Command::Unload { force } => unload::run(&bpf_root, force, &mut out),
    };
    match answer {
        Ok(()) => ExitCode::SUCCESS,
        // `underpass flows | head` is not a failure.
        Err(Failure::Output(error)) if error.kind() == io::ErrorKind::BrokenPipe => {
            ExitCode::SUCCESS
        }
        Err(error) => {
            // There is nowhere left to say that stderr is closed.
            let _ = io::Write::write_all(
                &mut anstream::stderr(),
                format!("{BAD}error{BAD:#}: {error}\n").as_bytes(),
            );
            ExitCode::FAILURE
        }
    }
}
