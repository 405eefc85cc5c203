//! bpf(2), where no library makes the call.

use std::{
    ffi::CString,
    io,
    os::{
        fd::{AsFd, AsRawFd as _, BorrowedFd, FromRawFd as _, OwnedFd},
        unix::ffi::OsStrExt as _,
    },
    path::Path,
};

/// `BPF_PROG_TYPE_SCHED_CLS`.
const CLASSIFIER: u32 = 3;

/// A command, by its number in `linux/bpf.h`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Command {
    MapDelete = 3,
    MapNextKey = 4,
    ProgramLoad = 5,
    Pin = 6,
    OpenPin = 7,
    ProgramAttach = 8,
    ProgramDetach = 9,
    ProgramQuery = 16,
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

/// What `BPF_MAP_GET_NEXT_KEY` and `BPF_MAP_DELETE_ELEM` need of `union bpf_attr`.
#[repr(C)]
struct KeyAttributes {
    map: u32,
    reserved: u32,
    key: u64,
    /// Where the next one goes; unused by a deletion.
    next: u64,
}

/// Loads a program for tc that was made by hand, so that no compiler adds anything to it: each word is one
/// instruction, as the kernel has it (`struct bpf_insn`).
pub fn load_classifier(program: &[u64]) -> io::Result<OwnedFd> {
    crate::object::raise_memory_limit();
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

/// Removes every entry of a map of any kind with keys, of `key_size` bytes.
pub fn remove_all(map: BorrowedFd<'_>, key_size: usize) -> io::Result<()> {
    let mut key = vec![0_u8; key_size];
    loop {
        let mut first = KeyAttributes {
            map: map.as_raw_fd().cast_unsigned(),
            reserved: 0,
            key: 0,
            next: key.as_mut_ptr() as u64,
        };
        // SAFETY: no key is given, which asks for the first, and there is room for one.
        match unsafe { call(Command::MapNextKey, &mut first) } {
            Ok(_) => {}
            Err(error) if error.raw_os_error() == Some(libc::ENOENT) => return Ok(()),
            Err(error) => return Err(error),
        }
        let mut removed = KeyAttributes {
            key: key.as_ptr() as u64,
            next: 0,
            ..first
        };
        // SAFETY: the key is a whole one.
        match unsafe { call(Command::MapDelete, &mut removed) } {
            Ok(_) => {}
            // A program was first.
            Err(error) if error.raw_os_error() == Some(libc::ENOENT) => {}
            Err(error) => return Err(error),
        }
    }
}

/// Makes a call that answers with a descriptor.
///
/// # Safety
/// The attributes must be as [`call`] asks for.
unsafe fn open<A>(command: Command, attributes: &mut A) -> io::Result<OwnedFd> {
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
