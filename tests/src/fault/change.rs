//! Which system calls change something that outlives the process, and with which error each could fail.

use std::{
    ffi::OsStr,
    fmt,
    fs::{self, File},
    os::unix::{ffi::OsStrExt as _, fs::FileExt as _},
};

use libc::c_long;
use nix::{errno::Errno, unistd::Pid};

use super::registers::Request;

/// A system call that changes something.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Change {
    /// Its name and what it is about, for people.
    pub what: String,
    /// An error that it could fail with.
    pub errno: Errno,
}

impl fmt::Display for Change {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.what)
    }
}

/// What has to be looked at before it is known whether a system call changes something.
#[derive(Clone, Copy, Debug)]
enum Look {
    /// Nothing: it does. The argument with that number is a path.
    Path(usize),
    /// Nothing: it does. Its first argument is a file.
    File,
    /// A path, and flags: it does if the file is made, or can be written to.
    Open { path: usize, flags: usize },
    /// A file: not if it is one of the three that every process has, which carry the answer.
    Write,
    /// The header of a netlink message.
    Message,
    /// The command of bpf(2).
    Bpf,
    /// The command of ioctl(2).
    Ioctl,
}

use Look::{Bpf, Ioctl, Message, Open, Path, Write};

/// System calls that may change something, with their names and an error for each.
const KNOWN: &[(c_long, &str, Look, Errno)] = &[
    (libc::SYS_bpf, "bpf", Bpf, Errno::ENOMEM),
    (libc::SYS_sendto, "sendto", Message, Errno::ENOBUFS),
    (libc::SYS_sendmsg, "sendmsg", Look::File, Errno::ENOBUFS),
    (
        libc::SYS_openat,
        "openat",
        Open { path: 1, flags: 2 },
        Errno::ENOSPC,
    ),
    (libc::SYS_write, "write", Write, Errno::ENOSPC),
    (libc::SYS_writev, "writev", Write, Errno::ENOSPC),
    (libc::SYS_pwrite64, "pwrite64", Write, Errno::ENOSPC),
    (libc::SYS_ftruncate, "ftruncate", Look::File, Errno::EIO),
    (libc::SYS_fallocate, "fallocate", Look::File, Errno::ENOSPC),
    (libc::SYS_fsync, "fsync", Look::File, Errno::EIO),
    (libc::SYS_fdatasync, "fdatasync", Look::File, Errno::EIO),
    (libc::SYS_fchmod, "fchmod", Look::File, Errno::EIO),
    (libc::SYS_fchmodat, "fchmodat", Path(1), Errno::EIO),
    (libc::SYS_fchown, "fchown", Look::File, Errno::EIO),
    (libc::SYS_fchownat, "fchownat", Path(1), Errno::EIO),
    (libc::SYS_utimensat, "utimensat", Path(1), Errno::EIO),
    (libc::SYS_mkdirat, "mkdirat", Path(1), Errno::ENOSPC),
    (libc::SYS_mknodat, "mknodat", Path(1), Errno::ENOSPC),
    (libc::SYS_linkat, "linkat", Path(3), Errno::ENOSPC),
    (libc::SYS_symlinkat, "symlinkat", Path(2), Errno::ENOSPC),
    (libc::SYS_unlinkat, "unlinkat", Path(1), Errno::EIO),
    (libc::SYS_renameat2, "renameat2", Path(3), Errno::ENOSPC),
    (libc::SYS_mount, "mount", Path(1), Errno::ENOMEM),
    (libc::SYS_umount2, "umount2", Path(0), Errno::EBUSY),
    (libc::SYS_setns, "setns", Look::File, Errno::ENOMEM),
    (libc::SYS_flock, "flock", Look::File, Errno::ENOLCK),
    (libc::SYS_ioctl, "ioctl", Ioctl, Errno::EOPNOTSUPP),
];

/// The same for those that newer machines were never given.
#[cfg(target_arch = "x86_64")]
const OLDER: &[(c_long, &str, Look, Errno)] = &[
    (
        libc::SYS_open,
        "open",
        Open { path: 0, flags: 1 },
        Errno::ENOSPC,
    ),
    (libc::SYS_creat, "creat", Path(0), Errno::ENOSPC),
    (libc::SYS_mkdir, "mkdir", Path(0), Errno::ENOSPC),
    (libc::SYS_mknod, "mknod", Path(0), Errno::ENOSPC),
    (libc::SYS_link, "link", Path(1), Errno::ENOSPC),
    (libc::SYS_symlink, "symlink", Path(1), Errno::ENOSPC),
    (libc::SYS_unlink, "unlink", Path(0), Errno::EIO),
    (libc::SYS_rmdir, "rmdir", Path(0), Errno::EIO),
    (libc::SYS_rename, "rename", Path(1), Errno::ENOSPC),
    (libc::SYS_renameat, "renameat", Path(3), Errno::ENOSPC),
    (libc::SYS_chmod, "chmod", Path(0), Errno::EIO),
    (libc::SYS_chown, "chown", Path(0), Errno::EIO),
];

/// The same for those that newer machines were never given: this one is newer.
#[cfg(not(target_arch = "x86_64"))]
const OLDER: &[(c_long, &str, Look, Errno)] = &[];

/// Commands of bpf(2) that change something (`enum bpf_cmd`).
const BPF: &[(u64, &str)] = &[
    (0, "MAP_CREATE"),
    (2, "MAP_UPDATE_ELEM"),
    (3, "MAP_DELETE_ELEM"),
    (5, "PROG_LOAD"),
    (6, "OBJ_PIN"),
    (8, "PROG_ATTACH"),
    (9, "PROG_DETACH"),
    (18, "BTF_LOAD"),
    (21, "MAP_LOOKUP_AND_DELETE_ELEM"),
    (22, "MAP_FREEZE"),
    (25, "MAP_LOOKUP_AND_DELETE_BATCH"),
    (26, "MAP_UPDATE_BATCH"),
    (27, "MAP_DELETE_BATCH"),
    (28, "LINK_CREATE"),
    (29, "LINK_UPDATE"),
    (34, "LINK_DETACH"),
    (35, "PROG_BIND_MAP"),
];

/// Numbers of the system calls that may change something.
pub(super) fn numbers() -> Vec<c_long> {
    let known = KNOWN.iter().chain(OLDER);
    known.map(|(number, ..)| *number).collect()
}

impl Change {
    /// Says what a system call will change; nothing, if it only looks.
    pub(super) fn of(thread: Pid, request: &Request) -> Option<Self> {
        let mut known = KNOWN.iter().chain(OLDER);
        let (_, name, look, errno) = known.find(|(number, ..)| *number == request.number)?;
        let about = about(thread, *look, &request.arguments)?;
        Some(Self {
            what: format!("{name}({about})"),
            errno: *errno,
        })
    }
}

fn about(thread: Pid, look: Look, arguments: &[u64; 6]) -> Option<String> {
    match look {
        Path(at) => Some(text(thread, arguments[at])),
        Look::File => Some(file(thread, arguments[0])),
        Open { path, flags } => {
            let changing = libc::O_WRONLY | libc::O_RDWR | libc::O_CREAT | libc::O_TRUNC;
            let is_changing = arguments[flags] & u64::from(changing.cast_unsigned()) != 0;
            is_changing.then(|| text(thread, arguments[path]))
        }
        Write => {
            let is_answer = arguments[0] <= u64::from(libc::STDERR_FILENO.cast_unsigned());
            (!is_answer).then(|| file(thread, arguments[0]))
        }
        Message => message(thread, arguments[1]),
        Bpf => {
            let command = BPF.iter().find(|(number, _)| *number == arguments[0])?;
            Some(command.1.to_owned())
        }
        Ioctl => (arguments[1] == libc::SIOCETHTOOL).then(|| "SIOCETHTOOL".to_owned()),
    }
}

/// The message's type, if it changes something: types come in fours, NEW, DEL, GET and SET (`RTM_*`). Who changes something asks for an
/// acknowledgement; other protocols than that of routes, which count differently, are only asked here.
fn message(thread: Pid, at: u64) -> Option<String> {
    const FIRST: u16 = 16;
    const GET: u16 = 2;
    const NLM_F_ACK: u16 = 4;
    let header = memory(thread, at, 8);
    let field = |at: usize| Some(u16::from_ne_bytes(*header.get(at..)?.first_chunk()?));
    let (kind, flags) = (field(4)?, field(6)?);
    let is_changing = flags & NLM_F_ACK != 0 && kind >= FIRST && kind % 4 != GET;
    is_changing.then(|| match kind {
        16 => "RTM_NEWLINK".to_owned(),
        17 => "RTM_DELLINK".to_owned(),
        19 => "RTM_SETLINK".to_owned(),
        20 => "RTM_NEWADDR".to_owned(),
        24 => "RTM_NEWROUTE".to_owned(),
        28 => "RTM_NEWNEIGH".to_owned(),
        36 => "RTM_NEWQDISC".to_owned(),
        37 => "RTM_DELQDISC".to_owned(),
        44 => "RTM_NEWTFILTER".to_owned(),
        45 => "RTM_DELTFILTER".to_owned(),
        kind => format!("netlink message {kind}"),
    })
}

/// The path of a file that the process has open.
fn file(thread: Pid, number: u64) -> String {
    let link = format!("/proc/{thread}/fd/{number}");
    fs::read_link(link).map_or_else(|_| number.to_string(), |path| path.display().to_string())
}

/// A text in the process's memory, up to its zero.
fn text(thread: Pid, at: u64) -> String {
    const LONGEST: usize = 256;
    let bytes = memory(thread, at, LONGEST);
    let text = bytes.split(|&byte| byte == 0).next().unwrap_or_default();
    OsStr::from_bytes(text).to_string_lossy().into_owned()
}

/// So many bytes of the process's memory, or as many as there are.
fn memory(thread: Pid, at: u64, length: usize) -> Vec<u8> {
    let mut bytes = vec![0; length];
    let read = File::open(format!("/proc/{thread}/mem"))
        .and_then(|memory| memory.read_at(&mut bytes, at))
        .unwrap_or(0);
    bytes.truncate(read);
    bytes
}
