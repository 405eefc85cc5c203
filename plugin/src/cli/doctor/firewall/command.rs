//! The commands by which the firewall's rules are read.

use std::{
    env, fs, io,
    path::{Path, PathBuf},
    process::Command,
};

/// Where administrators' commands are, for those whose PATH leaves it out.
const FOLDERS: [&str; 3] = ["/usr/local/sbin", "/usr/sbin", "/sbin"];

/// The kernel's lists of tables of the older kind of iptables, for IPv4 and for IPv6.
pub(in crate::cli) const LEGACY4: &str = "/proc/net/ip_tables_names";
pub(in crate::cli) const LEGACY6: &str = "/proc/net/ip6_tables_names";

/// What a command said.
#[derive(Debug)]
pub(in crate::cli) enum Answer {
    /// The rules.
    Text(String),
    /// There is no such command, or it has no rules to tell of.
    Absent,
    /// There are rules that could not be read, and why.
    Unknown(String),
}

/// Asks nftables for what these arguments say.
pub(in crate::cli) fn nft(arguments: &[&str]) -> Answer {
    match find("nft") {
        Some(nft) => run(&nft, arguments),
        None => Answer::Absent,
    }
}

/// Asks for the filter rules of iptables. Its older kind has rules only where `legacy`, the kernel's list of that kind's
/// tables, has the table; to ask for others would make them.
pub(in crate::cli) fn iptables(program: &str, legacy: &Path) -> Answer {
    let tables = fs::read_to_string(legacy).unwrap_or_default();
    let has_legacy = tables.lines().any(|table| table == "filter");
    let Some(found) = find(program) else {
        return if has_legacy {
            Answer::Unknown(format!(
                "the kernel has rules of {program}, and there is no {program} to read them"
            ))
        } else {
            Answer::Absent
        };
    };
    let is_nft =
        matches!(run(&found, &["-V"]), Answer::Text(version) if version.contains("nf_tables"));
    if has_legacy {
        let older = find(&format!("{program}-legacy"));
        return match older.or_else(|| (!is_nft).then_some(found)) {
            Some(older) => run(&older, &["-S"]),
            None => Answer::Unknown(format!(
                "the kernel has rules of {program}-legacy, and there is no such command to read them"
            )),
        };
    }
    if !is_nft {
        return Answer::Absent;
    }
    match run(&found, &["-S"]) {
        // A table that nft alone understands: that will be asked.
        Answer::Unknown(_) => Answer::Absent,
        answer => answer,
    }
}

fn find(program: &str) -> Option<PathBuf> {
    let path = env::var_os("PATH").unwrap_or_default();
    let folders = env::split_paths(&path).chain(FOLDERS.map(PathBuf::from));
    let mut candidates = folders
        .filter(|folder| folder.is_absolute())
        .map(|folder| folder.join(program));
    candidates.find(|candidate| candidate.is_file())
}

fn run(program: &Path, arguments: &[&str]) -> Answer {
    let title = program.display();
    match Command::new(program).args(arguments).output() {
        Ok(output) if output.status.success() => {
            Answer::Text(String::from_utf8_lossy(&output.stdout).into_owned())
        }
        Ok(output) => {
            let said = String::from_utf8_lossy(&output.stderr);
            let said = said.lines().next().unwrap_or_default();
            Answer::Unknown(format!("{title} failed ({}): {said}", output.status))
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound => Answer::Absent,
        Err(error) => Answer::Unknown(format!("cannot run {title}: {error}")),
    }
}
