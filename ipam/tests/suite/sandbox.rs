//! Scripts that call the plugins where mounts are their own.

use std::process::Command;

use crate::network::{Via, ours};

/// What each script may use.
///
/// `call <verb> <container>` calls our plugin (`$plugin` names another one) for the network `net`, whose
/// leases are in `$folder`; `$ranges` are its ranges, and `$keys` more keys of its config.
/// `conf` prints that config, and `leases` the names of the leases; `write <name> <content>` makes one
/// as another plugin does, with the lock held. `reboot` has the kernel name another boot, and `machine <id>` makes this another machine.
const PRELUDE: &str = r#"
plugin=$0
base=$(mktemp -d)
folder=$base/networks
ids=$base/ids
mkdir "$folder" "$ids"
end() {
    folder=$base/networks
    cd /
    for at in "$folder/net" "$folder" "$folder/net"; do
        while umount -l "$at" 2> /dev/null; do :; done
    done
    rm -rf "$base"
}
trap end EXIT
ranges='[{"subnet":"10.0.0.0/24"}],[{"subnet":"2001:db8::/64"}]'
keys=
conf() { echo '{"cniVersion":"'${version:-1.1.0}'","name":"net",'"$keys"'"ipam":{"dataDir":"'$folder'","ranges":['"$ranges"']}}'; }
call() { conf | CNI_COMMAND=$1 CNI_CONTAINERID=$2 ${as:-env} "$plugin"; }
leases() { (cd "$folder/net" && grep -l . [0-9]* 2> /dev/null || true); }
write() { flock "$folder/net/lock" sh -c 'printf "$0" > "$1"' "$2" "$folder/net/$1"; }
reboot() { cat /proc/sys/kernel/random/uuid > "$ids/boot"; }
machine() { echo "$1" > "$ids/machine"; }
reboot
machine 0123456789abcdef0123456789abcdef
mount --bind "$ids/boot" /proc/sys/kernel/random/boot_id
mount --bind "$ids/machine" /etc/machine-id
"#;

/// What `script` prints. Needs root, or user namespaces.
pub(crate) fn output_of(script: &str) -> String {
    let Via::Executable(plugin) = ours() else {
        unreachable!("ours is an executable")
    };
    let output = Command::new("unshare")
        .args(["--user", "--map-root-user", "--mount", "sh", "-euc"])
        .arg(format!("{PRELUDE}\n{script}"))
        .arg(plugin)
        .env_clear()
        .env("PATH", std::env::var_os("PATH").unwrap_or_default())
        .envs([
            ("CNI_IFNAME", "eth0"),
            ("CNI_NETNS", "/nonexistent"),
            ("CNI_PATH", "/"),
        ])
        .output()
        .expect("unshare (util-linux) is installed");
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(
        output.status.success(),
        "unshare or the script failed: {stderr}, after it had printed {}",
        String::from_utf8_lossy(&output.stdout)
    );
    String::from_utf8(output.stdout).expect("text")
}

/// The parts of what `script` prints, where it prints `=` between them.
pub(crate) fn parts_of(script: &str) -> Vec<String> {
    let output = output_of(script);
    output
        .split('=')
        .map(|part| part.trim().to_owned())
        .collect()
}

/// The words of a part.
pub(crate) fn words(part: &str) -> Vec<&str> {
    part.split_whitespace().collect()
}
