//! `underpass report`: one file for whoever looks into a fault, with what our own commands say and what is around them.
//!
//! Addresses, names of devices and containers, and the firewall's rules are in it, as a fault can't be understood without them.
//! What a config has in keys that we do not know is left out, as that may be a secret. What can't be had is replaced
//! by a file that says why: a report of a broken node is the one that is wanted.

use std::{
    env,
    fs::{self, OpenOptions},
    io::{self, Write as _},
    os::unix::fs::OpenOptionsExt as _,
    path::Path,
    time::{SystemTime, UNIX_EPOCH},
};

use underpass_abi::ABI;
use underpass_dataplane::{kernel, object};

use super::{
    Failure, Format,
    doctor::{
        self, Places,
        firewall::command::{self, Answer},
    },
    flows, status,
};

mod archive;
mod network;
mod redact;

use archive::Archive;

/// Begins the path of everything in the file.
const FOLDER: &str = "underpass-report";

/// What is printed at the beginning of the report, and says what is in it.
const README: &str = "\
What `underpass report` found on a node. It has addresses, names of devices, networks and containers, and the firewall's rules;
what configs have in keys that underpass does not know is left out.

version.txt      versions of the executable, of what it loads, and of the kernel
status.json      underpass status --json
flows.json       underpass flows --json
doctor.json      underpass doctor --json
network.json     devices, addresses and routes of the main table
sysctls.txt      the settings of the kernel that matter
networks/        the folder of networks
nft.txt, iptables.txt, ip6tables.txt
                 the firewall's rules, where these commands are installed
*.missing.txt    why something of that is not here
";

/// The kernel's settings that our documents speak of, below `/proc/sys`.
const SYSCTLS: [&str; 8] = [
    "net/core/bpf_jit_enable",
    "net/ipv4/conf/all/rp_filter",
    "net/ipv4/ip_forward",
    "net/ipv6/conf/all/disable_ipv6",
    "net/ipv6/conf/all/forwarding",
    "net/netfilter/nf_conntrack_count",
    "net/netfilter/nf_conntrack_max",
    "net/netfilter/nf_conntrack_tcp_be_liberal",
];

pub(super) fn run(
    places: Places<'_>,
    output: &Path,
    out: &mut impl io::Write,
) -> Result<(), Failure> {
    let report = collect(places).end();
    let mut options = OpenOptions::new();
    let written = options
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(output)
        .and_then(|mut file| file.write_all(&report));
    written.map_err(|source| Failure::Report {
        path: output.to_owned(),
        source,
    })?;
    writeln!(
        out,
        "{} has {} KiB: addresses and names are in it, so look at it before you show it to others",
        output.display(),
        report.len().div_ceil(1024)
    )?;
    Ok(())
}

/// Looks at everything, one after the other.
fn collect(places: Places<'_>) -> Archive {
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    let mut archive = Archive::new(FOLDER, now.map_or(0, |now| now.as_secs()));
    archive.add("README.txt", README.as_bytes());
    archive.add("version.txt", version().as_bytes());
    let root = places.bpf_root;
    said(&mut archive, "status", |out| {
        status::run(root, Format::Json, out)
    });
    said(&mut archive, "flows", |out| {
        flows::run(root, Format::Json, out)
    });
    said(&mut archive, "doctor", |out| {
        match doctor::run(places, Format::Json, out) {
            // Which is why somebody wants the report.
            Err(Failure::Unwell(_)) => Ok(()),
            answer => answer,
        }
    });
    said(&mut archive, "network", |out| {
        let network = network::collect()?;
        serde_json::to_writer_pretty(out, &network).map_err(io::Error::from)?;
        Ok(())
    });
    archive.add("sysctls.txt", sysctls().as_bytes());
    networks(&mut archive, places.net_dir);
    let rules = [
        ("nft", command::nft(&["list", "ruleset"])),
        (
            "iptables",
            command::iptables("iptables", Path::new(command::LEGACY4)),
        ),
        (
            "ip6tables",
            command::iptables("ip6tables", Path::new(command::LEGACY6)),
        ),
    ];
    for (name, answer) in rules {
        match answer {
            Answer::Text(text) => archive.add(&format!("{name}.txt"), text.as_bytes()),
            Answer::Absent => missing(&mut archive, name, "it is not installed, or has no rules"),
            Answer::Unknown(why) => missing(&mut archive, name, &why),
        }
    }
    archive
}

/// Adds what a command of ours says.
fn said(
    archive: &mut Archive,
    name: &str,
    command: impl FnOnce(&mut Vec<u8>) -> Result<(), Failure>,
) {
    let mut text = Vec::new();
    match command(&mut text) {
        Ok(()) => archive.add(&format!("{name}.json"), &text),
        Err(error) => missing(archive, name, &error.to_string()),
    }
}

fn missing(archive: &mut Archive, name: &str, why: &str) {
    archive.add(
        &format!("{name}.missing.txt"),
        format!("{why}\n").as_bytes(),
    );
}

/// The C library that this executable is linked with.
const LIBC: &str = if cfg!(target_env = "musl") {
    "musl"
} else {
    "glibc"
};

fn version() -> String {
    let built = fs::read_to_string("/proc/version").unwrap_or_default();
    format!(
        "underpass {}, layout {ABI}, build {:08x}, for {} with {LIBC}\nLinux {}\n{built}",
        env!("CARGO_PKG_VERSION"),
        object::build(),
        env::consts::ARCH,
        kernel::release(),
    )
}

fn sysctls() -> String {
    let line = |path: &&str| {
        let value = fs::read_to_string(Path::new("/proc/sys").join(path));
        let value = value.as_deref().map_or("absent", str::trim);
        format!("{} = {value}\n", path.replace('/', "."))
    };
    SYSCTLS.iter().map(line).collect()
}

/// Adds the networks, without what may be a secret.
fn networks(archive: &mut Archive, folder: &Path) {
    let found = match underpass_cni::net_dir::read(folder) {
        Ok(found) => found,
        Err(error) => {
            let why = format!("cannot read {}: {error}", folder.display());
            return missing(archive, "networks", &why);
        }
    };
    if found.is_empty() {
        let why = format!("there is none in {}", folder.display());
        missing(archive, "networks", &why);
    }
    for (number, network) in found.into_iter().enumerate() {
        match network {
            Ok(network) => {
                let name = network.path.file_name().unwrap_or_default();
                let text = format!("{:#}\n", redact::network(&network.document));
                archive.add(&format!("networks/{}", name.display()), text.as_bytes());
            }
            // Which has its path.
            Err(error) => {
                missing(archive, &format!("networks/{number}"), &error.to_string());
            }
        }
    }
}
