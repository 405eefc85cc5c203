//! What the tests need of the machine, and what happens where it is missing.

use std::{env, fs, io, os::unix::process::CommandExt as _, path::Path, process::Command};

use nix::{
    sched::{CloneFlags, unshare},
    unistd::Uid,
};

/// Tools that fixtures run, each with what it is needed for.
const TOOLS: &[(&str, &str)] = &[
    ("ip", "links, addresses and routes (Debian: iproute2)"),
    ("nft", "firewall rules and counters (Debian: nftables)"),
    (
        "conntrack",
        "what connection tracking knows (Debian: conntrack)",
    ),
];

/// The first thing that this machine lacks, as a sentence; `None` if tests can run.
#[must_use]
pub fn missing() -> Option<String> {
    if !Uid::effective().is_root() {
        return Some("network namespaces and eBPF programs need root: run it with sudo".to_owned());
    }
    if let Some((tool, purpose)) = TOOLS.iter().find(|(tool, _)| find(tool).is_none()) {
        return Some(format!(
            "the command `{tool}` is missing, needed for {purpose}: run `cargo xtask setup`"
        ));
    }
    if !Path::new("/sys/fs/bpf").is_dir() {
        return Some("there is no /sys/fs/bpf: this kernel has no eBPF file system".to_owned());
    }
    let namespaces = std::thread::spawn(|| {
        unshare(CloneFlags::CLONE_FS | CloneFlags::CLONE_NEWNS | CloneFlags::CLONE_NEWNET)
    })
    .join();
    match namespaces {
        Ok(Ok(())) => None,
        Ok(Err(error)) => Some(format!(
            "this process may not make network and mount namespaces ({error}): \
             a container needs CAP_SYS_ADMIN, CAP_NET_ADMIN and CAP_BPF (docker: --privileged)"
        )),
        Err(_) => Some("no thread could be started".to_owned()),
    }
}

/// True if the test can't run here; the reason is printed.
///
/// # Panics
/// With the reason, if the environment says `CI=true`: a skipped test must not look like one that passed.
#[must_use]
pub fn skipped() -> bool {
    let reason = missing();
    if let Some(reason) = &reason {
        skip(reason);
    }
    reason.is_some()
}

/// Prints why a test can't run here.
///
/// # Panics
/// With the reason, if the environment says `CI=true`.
pub fn skip(reason: &str) {
    assert!(
        env::var("CI").as_deref() != Ok("true"),
        "can't run here, and CI=true forbids to skip: {reason}"
    );
    anstream::eprintln!("skipped: {reason}");
}

/// A capability, by its number in `linux/capability.h`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[expect(missing_docs, reason = "the kernel's names")]
pub enum Capability {
    NetAdmin = 12,
    SysAdmin = 21,
    Perfmon = 38,
    Bpf = 39,
}

/// Has a command start without these capabilities, as that of a runtime which may not do all that root may.
pub fn without<'a>(command: &'a mut Command, capabilities: &[Capability]) -> &'a mut Command {
    let capabilities = capabilities.to_vec();
    // SAFETY: prctl is async-signal-safe and touches nothing of the parent.
    unsafe {
        command.pre_exec(move || {
            for capability in &capabilities {
                // An executable of root gets what this set has.
                if libc::prctl(libc::PR_CAPBSET_DROP, *capability as libc::c_ulong, 0, 0, 0) != 0 {
                    return Err(io::Error::last_os_error());
                }
            }
            Ok(())
        })
    }
}

/// Where a command is, also if it is an administrator's.
#[must_use]
pub fn find(tool: &str) -> Option<std::path::PathBuf> {
    let path = env::var_os("PATH").unwrap_or_default();
    env::split_paths(&path)
        .chain(["/usr/sbin".into(), "/sbin".into()])
        .map(|folder| folder.join(tool))
        .find(|file| fs::metadata(file).is_ok_and(|file| file.is_file()))
}
