//! The image of all containers: a static busybox, as the archive that `docker save` would write. No registry is asked.

use std::{env, fmt::Write as _, fs, path::PathBuf};

use anyhow::{Context as _, Result};
use serde_json::json;
use sha2::{Digest as _, Sha256};

use crate::Cage;

/// The name under which runtimes know it; `localhost` is a registry that none of them would ask without being told to.
pub const NAME: &str = "localhost/busybox:tests";

/// The archive, in the cage.
pub const ARCHIVE: &str = "/run/image/image.tar";

/// Names a static busybox; `cargo xtask test runtimes` unpacks one.
const VARIABLE: &str = "UNDERPASS_TEST_BUSYBOX";

/// A busybox that needs no library, on this machine.
#[must_use]
pub fn busybox() -> PathBuf {
    env::var_os(VARIABLE).map_or_else(|| "/bin/busybox".into(), PathBuf::from)
}

/// Where it is made, in the cage.
const FOLDER: &str = "/run/image";

/// Writes the archive into a cage.
pub(crate) fn write(cage: &Cage) -> Result<()> {
    let folder = cage.path(FOLDER);
    let bin = folder.join("root/bin");
    fs::create_dir_all(&bin).context("make the folder of the image")?;
    let (busybox, inside) = (busybox(), bin.join("busybox"));
    fs::copy(&busybox, &inside).with_context(|| format!("copy {}", busybox.display()))?;
    pack(cage, "root", "layer.tar", &["bin"])?;
    let layer = fs::read(folder.join("layer.tar")).context("read the layer")?;
    let config = json!({
        "architecture": architecture(),
        "os": "linux",
        // What a pod's sandbox runs, which nobody gives a command.
        "config": { "Env": ["PATH=/bin"], "Cmd": ["/bin/busybox", "sleep", "1000000"] },
        "rootfs": { "type": "layers", "diff_ids": [format!("sha256:{}", sum(&layer))] },
    });
    let manifest =
        json!([{ "Config": "config.json", "RepoTags": [NAME], "Layers": ["layer.tar"] }]);
    for (name, content) in [("config.json", config), ("manifest.json", manifest)] {
        cage.write(&format!("{FOLDER}/{name}"), &content.to_string())?;
    }
    pack(
        cage,
        ".",
        "image.tar",
        &["manifest.json", "config.json", "layer.tar"],
    )
}

fn pack(cage: &Cage, from: &str, archive: &str, members: &[&str]) -> Result<()> {
    let (from, archive) = (format!("{FOLDER}/{from}"), format!("{FOLDER}/{archive}"));
    let arguments = [&["-cf", &archive, "-C", &from][..], members].concat();
    cage.expect("tar", &arguments).map(drop)
}

fn sum(bytes: &[u8]) -> String {
    let mut text = String::new();
    for byte in Sha256::digest(bytes) {
        let _ = write!(text, "{byte:02x}");
    }
    text
}

/// This machine's architecture, as images have it.
fn architecture() -> &'static str {
    match env::consts::ARCH {
        "x86_64" => "amd64",
        "aarch64" => "arm64",
        other => other,
    }
}
