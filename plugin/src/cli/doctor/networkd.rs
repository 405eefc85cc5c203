//! Whether systemd-networkd takes away routes that it did not make: it does unless `ManageForeignRoutes` says no.

use std::{
    collections::BTreeMap,
    ffi::OsString,
    fs, io,
    path::{Path, PathBuf},
};

use super::{Diagnosis, Node, Report};

/// It writes this file when it starts. (The folder is there on every node with systemd.)
const STATE: &str = "run/systemd/netif/state";
/// Where the services that run have a folder each: cgroups of version 2, and of version 1.
const SERVICES: [&str; 2] = [
    "sys/fs/cgroup/system.slice",
    "sys/fs/cgroup/systemd/system.slice",
];
const SERVICE: &str = "systemd-networkd.service";
/// The folders of its configuration; a file in one of them hides its namesakes in those after it.
const FOLDERS: [&str; 4] = [
    "etc/systemd",
    "run/systemd",
    "usr/local/lib/systemd",
    "usr/lib/systemd",
];

pub(super) fn check(node: &Node<'_>, report: &mut Report) {
    let host = node.places.host_root;
    if !runs(host) {
        return;
    }
    match read(host) {
        Ok(texts) => report.add(takes_routes_away(&texts)),
        Err(error) => report.not_checked("networkd-routes", error),
    }
}

/// Tells whether it runs. Its file stays when it stops, and the folder of its service does not.
fn runs(host: &Path) -> bool {
    let services = SERVICES.iter().map(|folder| host.join(folder));
    let mut services = services.filter(|folder| folder.is_dir());
    host.join(STATE).is_file()
        && services
            .next()
            .is_none_or(|folder| folder.join(SERVICE).is_dir())
}

/// Reads the configuration in the order in which networkd does: the main file, then the drop-ins by their names.
fn read(host: &Path) -> Result<Vec<String>, String> {
    let mut drop_ins: BTreeMap<OsString, PathBuf> = BTreeMap::new();
    let mut main = None;
    for folder in FOLDERS {
        let folder = host.join(folder);
        let file = folder.join("networkd.conf");
        if main.is_none() && file.is_file() {
            main = Some(file);
        }
        let folder = folder.join("networkd.conf.d");
        let entries = match fs::read_dir(&folder) {
            Ok(entries) => entries,
            Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
            Err(error) => return Err(format!("cannot list {}: {error}", folder.display())),
        };
        for path in entries.flatten().map(|entry| entry.path()) {
            if let (Some(name), Some("conf")) = (
                path.file_name(),
                path.extension().and_then(|ending| ending.to_str()),
            ) {
                drop_ins.entry(name.to_owned()).or_insert(path);
            }
        }
    }
    let files = main.into_iter().chain(drop_ins.into_values());
    files
        .map(|file| {
            fs::read_to_string(&file)
                .map_err(|error| format!("cannot read {}: {error}", file.display()))
        })
        .collect()
}

/// The last word counts; an empty one is the default, which is yes.
fn manages_foreign_routes(texts: &[String]) -> bool {
    let mut manages = true;
    for text in texts {
        let mut in_network = false;
        for line in text.lines().map(str::trim) {
            if line.starts_with('[') {
                in_network = line == "[Network]";
                continue;
            }
            let Some((key, value)) = line.split_once('=') else {
                continue;
            };
            if in_network && key.trim() == "ManageForeignRoutes" {
                let value = value.trim().to_ascii_lowercase();
                manages = !matches!(value.as_str(), "no" | "false" | "off" | "0" | "n" | "f");
            }
        }
    }
    manages
}

fn takes_routes_away(texts: &[String]) -> Option<Diagnosis> {
    manages_foreign_routes(texts).then(|| {
        Diagnosis::warning(
            "networkd-routes",
            "systemd-networkd runs, and removes routes that others made on devices that it manages, when it starts or its configuration changes: containers or other nodes may lose theirs",
            "mkdir -p /etc/systemd/networkd.conf.d && printf '[Network]\\nManageForeignRoutes=no\\n' > /etc/systemd/networkd.conf.d/underpass.conf && systemctl restart systemd-networkd",
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn manages(texts: &[&str]) -> bool {
        let texts: Vec<_> = texts.iter().map(|&text| text.to_owned()).collect();
        manages_foreign_routes(&texts)
    }

    #[test]
    fn the_last_word_counts() {
        let yes = "[Network]\nManageForeignRoutes=yes\n";
        let no = "[Network]\n  ManageForeignRoutes = no\n";
        assert!(manages(&[]));
        assert!(manages(&["[Network]\n#ManageForeignRoutes=no\n"]));
        assert!(manages(&["[DHCPv4]\nManageForeignRoutes=no\n"]));
        assert!(!manages(&[no]));
        assert!(manages(&[no, yes]));
        assert!(!manages(&[yes, no]));
        assert!(manages(&[no, "[Network]\nManageForeignRoutes=\n"]));
    }

    #[test]
    fn what_would_mend_it_does() {
        let found = takes_routes_away(&[]).expect("a finding");
        let written = found.fix.split('\'').nth(1).expect("a quoted text");
        assert_eq!(takes_routes_away(&[written.replace("\\n", "\n")]), None);
    }
}
