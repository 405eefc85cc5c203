//! `cargo xtask image`: the agent's image, as one file that container engines import and registries take.

use std::env::consts::ARCH;
use std::fs;
use std::path::PathBuf;

use anyhow::Context as _;
use underpass_image::{NAME, Source, archive};

use crate::workspace::Workspace;
use crate::{build, licences, report};

const VERSION: &str = env!("CARGO_PKG_VERSION");

pub(crate) fn run(workspace: &Workspace) -> anyhow::Result<()> {
    build::executables(workspace)?;
    let file = pack(workspace)?;
    report::step("packed", &format!("{} as {NAME}:{VERSION}", file.display()));
    Ok(())
}

/// Packs the executables that are built: the archive.
pub(crate) fn pack(workspace: &Workspace) -> anyhow::Result<PathBuf> {
    let image = archive(&Source {
        executables: &workspace.releases(),
        licences: &workspace.root,
        of_others: &licences::gather(workspace)?,
        version: VERSION,
        time: time()?,
    })?;
    let dist = workspace.target.join("dist");
    fs::create_dir_all(&dist).with_context(|| format!("cannot create {}", dist.display()))?;
    let file = dist.join(format!("underpass-agent-{VERSION}-{ARCH}-image.tar"));
    fs::write(&file, image).with_context(|| format!("cannot write {}", file.display()))?;
    Ok(file)
}

/// When files were changed last: what reproducible builds agree upon, else the beginning of time, so that the same executables
/// are the same layer.
fn time() -> anyhow::Result<u64> {
    match std::env::var("SOURCE_DATE_EPOCH") {
        Ok(seconds) => seconds
            .parse()
            .context("SOURCE_DATE_EPOCH is no number of seconds"),
        Err(_) => Ok(0),
    }
}
