//! bpf(2), where no library makes the call.

use std::{
    ffi::CString,
    io,
    os::{
        fd::{AsFd, AsRawFd as _, FromRawFd as _, OwnedFd},
        unix::ffi::OsStrExt as _,
    },
    path::Path,
};

use nix::sys::resource::{RLIM_INFINITY, Resource, setrlimit};

/// `BPF_PROG_TYPE_SCHED_CLS`.
const CLASSIFIER: u32 = 3;

/// A command, by its number in `linux/bpf.h`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Command {
    MapCreate = 0,
    MapLookup = 1,
    MapUpdate = 2,
    MapDelete = 3,
    MapNextKey = 4,
    ProgramLoad = 5,
    Pin = 6,
    OpenPin = 7,
    ProgramAttach = 8,
    ProgramDetach = 9,
    ObjectInfo = 15,
    ProgramQuery = 16,
    MapLookupBatch = 24,
}

/// What `BPF_PROG_LOAD` needs of `union bpf_attr`.
#[repr(C)]
struct LoadAttributes {
    kind: u32,
    instruction_count: u32,
    instructions: u64,
    license: u64,
    log_level: u32,
    log_size: u32,
    log: u64,
    kernel_version: u32,
    flags: u32,
}

/// What `BPF_OBJ_PIN` and `BPF_OBJ_GET` need of `union bpf_attr`.
#[repr(C)]
struct PinAttributes {
    path: u64,
    fd: u32,
    flags: u32,
}

/// Loads a program for tc that was made by hand, so that no compiler adds anything to it: each word is one
/// instruction, as the kernel has it (`struct bpf_insn`).
pub fn load_classifier(program: &[u64]) -> io::Result<OwnedFd> {
    raise_memory_limit();
    let mut load = LoadAttributes {
        kind: CLASSIFIER,
        instruction_count: u32::try_from(program.len()).map_err(io::Error::other)?,
        instructions: program.as_ptr() as u64,
        // Some helpers are for such programs only.
        license: c"GPL".as_ptr() as u64,
        log_level: 0,
        log_size: 0,
        log: 0,
        kernel_version: 0,
        flags: 0,
    };
    // SAFETY: program and licence outlive the call, and the count is the program's own.
    unsafe { open(Command::ProgramLoad, &mut load) }
}

/// Opens a pin, of a program or of a map.
pub fn open_pin(path: &Path) -> io::Result<OwnedFd> {
    let path = CString::new(path.as_os_str().as_bytes())?;
    let mut attributes = PinAttributes {
        path: path.as_ptr() as u64,
        fd: 0,
        flags: 0,
    };
    // SAFETY: the path ends with a zero byte and outlives the call.
    unsafe { open(Command::OpenPin, &mut attributes) }
}

/// Pins a program or a map that is open.
pub fn pin(object: impl AsFd, path: &Path) -> io::Result<()> {
    let path = CString::new(path.as_os_str().as_bytes())?;
    let mut attributes = PinAttributes {
        path: path.as_ptr() as u64,
        fd: object.as_fd().as_raw_fd().cast_unsigned(),
        flags: 0,
    };
    // SAFETY: the path ends with a zero byte and outlives the call.
    unsafe { call(Command::Pin, &mut attributes) }?;
    Ok(())
}

/// Kernels before 5.11 count maps and programs against this limit; on later ones it does not matter whether it can be raised.
pub(crate) fn raise_memory_limit() {
    let _ = setrlimit(Resource::RLIMIT_MEMLOCK, RLIM_INFINITY, RLIM_INFINITY);
}

/// Makes a call that answers with a descriptor.
///
/// # Safety
/// The attributes must be as [`call`] asks for.
pub(crate) unsafe fn open<A>(command: Command, attributes: &mut A) -> io::Result<OwnedFd> {
    // SAFETY: the caller vouches for the attributes.
    let fd = unsafe { call(command, attributes) }?;
    let fd = i32::try_from(fd).map_err(io::Error::other)?;
    // SAFETY: the kernel just made this descriptor for us alone.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Makes a call.
///
/// # Safety
/// `attributes` must be the beginning of the variant of `union bpf_attr` that the command reads and writes, without
/// padding, and its pointers valid.
pub(crate) unsafe fn call<A>(command: Command, attributes: &mut A) -> io::Result<libc::c_long> {
    // SAFETY: the caller vouches for the attributes; size and address are those of one live value.
    let result = unsafe {
        libc::syscall(
            libc::SYS_bpf,
            command as libc::c_long,
            std::ptr::from_mut(attributes),
            size_of::<A>(),
        )
    };
    if result < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(result)
}
