//! What the kernel refuses, in words: its answer, which libraries leave to the source of their errors, and what to
//! do about it.

use std::{error::Error, ffi::OsStr, fmt, io, iter, path::Path};

use aya::programs::ProgramError;

/// An error of a library as people need it: with the kernel's answer, and what to do.
pub(crate) struct Refusal<'a>(pub(crate) &'a (dyn Error + 'static));

impl fmt::Display for Refusal<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(ProgramError::LoadError {
            io_error,
            verifier_log,
        }) = self.0.downcast_ref()
        {
            let log = verifier_log.to_string();
            return load(f, io_error, log.trim());
        }
        let mut text = self.0.to_string();
        for source in sources(self.0) {
            let source = source.to_string();
            // Some have their source's text in their own.
            if !text.contains(&source) {
                text.push_str(": ");
                text.push_str(&source);
            }
        }
        f.write_str(&text)?;
        match answer(self.0) {
            Some(error) => f.write_str(remedy(error)),
            None => Ok(()),
        }
    }
}

/// A program that the kernel did not load. The log comes last: what is too long for a message keeps its beginning
/// and its end.
fn load(f: &mut fmt::Formatter<'_>, error: &io::Error, log: &str) -> fmt::Result {
    write!(f, "the kernel refused to load it: {error}")?;
    // The verifier had no objection.
    if log.is_empty() || error.raw_os_error() == Some(ENOTSUPP) {
        return f.write_str(remedy(error));
    }
    write!(
        f,
        ": if it may not do all that root may (CAP_BPF, CAP_NET_ADMIN, CAP_PERFMON), let it; else report this, with \
         `uname -r` and the whole of the verifier's log: {log}"
    )
}

fn sources<'a>(
    error: &'a (dyn Error + 'static),
) -> impl Iterator<Item = &'a (dyn Error + 'static)> {
    iter::successors(error.source(), |&error| error.source())
}

/// Finds the kernel's answer.
fn answer<'a>(error: &'a (dyn Error + 'static)) -> Option<&'a io::Error> {
    iter::once(error)
        .chain(sources(error))
        .find_map(|error| error.downcast_ref())
}

/// What kernels that have no interpreter say of a program that they could not compile (`bpf_prog_select_runtime` of `kernel/bpf/core.c`). It
/// is the kernel's own number, which no C library has words for.
const ENOTSUPP: i32 = 524;

/// Says what to do about the kernel's answer, as it follows the answer.
pub(crate) fn remedy(error: &io::Error) -> &'static str {
    match error.raw_os_error() {
        Some(libc::EPERM | libc::EACCES) => {
            ": run it as root in the initial user namespace, with CAP_NET_ADMIN, and CAP_SYS_ADMIN or CAP_BPF and CAP_PERFMON"
        }
        Some(libc::E2BIG) => {
            ": the map is full; detach containers that are not needed (`underpass status` lists them), or have GC remove what is left of dead ones"
        }
        Some(libc::ENOMEM) => {
            ": the kernel has no memory for it; raise the memory limit of the cgroup that the runtime is in"
        }
        Some(libc::EMFILE) => ": raise the limit of open files (RLIMIT_NOFILE) of the runtime",
        Some(libc::ENFILE) => ": raise the limit of open files of the node (fs.file-max)",
        Some(libc::ENOENT) => {
            ": a part of the pins is gone; remove the folder v<layout> in bpfRoot with `rm -r`, and recreate the containers: the next ADD loads anew"
        }
        Some(libc::ENOSYS) => ": this kernel has no eBPF; it needs CONFIG_BPF_SYSCALL",
        Some(ENOTSUPP) => {
            ": it could not compile the program for this processor; see that net.core.bpf_jit_enable is 1, and `dmesg` for want of memory"
        }
        _ => "",
    }
}

/// Says what to do about what another build has loaded.
pub(crate) fn upgrade_remedy(root: &Path) -> String {
    format!(
        "run `underpass upgrade --bpf-root {}`, which has this build take over while traffic goes on, or put that executable back",
        root.display()
    )
}

/// Says what to do about a file or folder that can't be used, as it follows the kernel's answer.
pub(crate) fn file_remedy(error: &io::Error, path: &Path) -> &'static str {
    let has_dot = |part: &OsStr| part.as_encoded_bytes().contains(&b'.');
    match error.raw_os_error() {
        // `bpf_lookup` of `kernel/bpf/inode.c`.
        Some(libc::EPERM) if path.iter().any(has_dot) => {
            ": a bpffs has no names with a dot, choose another bpfRoot"
        }
        Some(libc::EPERM | libc::EACCES) => ": run it as root of the node, with all capabilities",
        Some(libc::EROFS) => ": make that file system writable (`mount -o remount,rw`)",
        Some(libc::ENOSPC | libc::EDQUOT) => ": free space on that file system",
        Some(libc::EEXIST | libc::ENOTDIR) => {
            ": something that is no folder is in its place, remove it"
        }
        Some(libc::ENOTEMPTY) => {
            ": what is there is not complete, and no call of this plugin has made it; remove it with `rm -r`"
        }
        Some(libc::ENAMETOOLONG) => ": choose a shorter bpfRoot",
        Some(libc::ENOENT) if path.starts_with("/proc") => ": mount procfs at /proc",
        Some(libc::ENOENT) if path.starts_with("/dev") => {
            ": the runtime needs the devices of the node below /dev"
        }
        Some(libc::ENOENT | libc::EMFILE | libc::ENFILE | libc::ENOMEM | libc::ENOSYS) => {
            remedy(error)
        }
        _ => "",
    }
}

#[cfg(test)]
mod tests {
    use aya::{maps::MapError, sys::SyscallError};

    use super::*;

    fn call_refused(errno: i32) -> MapError {
        MapError::from(SyscallError {
            call: "bpf_map_update_elem",
            io_error: io::Error::from_raw_os_error(errno),
        })
    }

    #[test]
    fn the_kernels_answer_is_told_and_what_to_do() {
        let told = |errno| Refusal(&call_refused(errno)).to_string();
        for (errno, answer, advice) in [
            (libc::E2BIG, "Argument list too long", "the map is full"),
            (libc::ENOMEM, "Cannot allocate memory", "memory limit"),
            (libc::EPERM, "Operation not permitted", "CAP_BPF"),
            (libc::EMFILE, "Too many open files", "RLIMIT_NOFILE"),
            (libc::ENOENT, "No such file or directory", "rm -r"),
        ] {
            let text = told(errno);
            assert!(text.starts_with("`bpf_map_update_elem` failed: "), "{text}");
            assert!(text.contains(answer) && text.contains(advice), "{text}");
        }
        assert!(told(libc::EINVAL).ends_with("(os error 22)"));
    }

    #[test]
    fn a_program_that_was_not_compiled_is_no_fault_of_the_program() {
        struct Load(i32);
        impl fmt::Display for Load {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                load(
                    f,
                    &io::Error::from_raw_os_error(self.0),
                    "processed 7 insns",
                )
            }
        }

        let text = Load(ENOTSUPP).to_string();
        assert!(
            text.contains("bpf_jit_enable") && !text.contains("7 insns"),
            "{text}"
        );
        let text = Load(libc::EINVAL).to_string();
        assert!(
            text.contains("report this") && text.ends_with("7 insns"),
            "{text}"
        );
    }

    #[test]
    fn an_answer_is_told_once_however_deep_it_lies() {
        let error = aya::EbpfError::MapError(MapError::CreateError {
            name: "FLOWS4".to_owned(),
            io_error: io::Error::from_raw_os_error(libc::ENOMEM),
        });
        let text = Refusal(&error).to_string();
        assert!(
            text.starts_with("map error: failed to create map `FLOWS4`: Cannot allocate memory"),
            "{text}"
        );
        assert_eq!(text.matches("FLOWS4").count(), 1, "{text}");
        assert!(text.contains("memory limit"), "{text}");
    }

    #[test]
    fn a_file_says_what_is_wrong_with_it() {
        let told =
            |errno, path: &str| file_remedy(&io::Error::from_raw_os_error(errno), Path::new(path));
        assert!(told(libc::EPERM, "/sys/fs/bpf/a.b/v7").contains("no names with a dot"));
        assert!(told(libc::EPERM, "/sys/fs/bpf/a").contains("root"));
        assert!(told(libc::ENOENT, "/proc/thread-self/ns/net").contains("procfs"));
        assert!(told(libc::EROFS, "/run/underpass").contains("writable"));
    }
}
