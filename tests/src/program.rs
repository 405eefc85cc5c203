//! The `bpf(2)` calls that no library makes for the tests, and programs of a few instructions, made by hand so that no compiler adds anything
//! to them.

use std::{
    ffi::CString,
    io,
    os::fd::{AsRawFd as _, BorrowedFd, FromRawFd as _, OwnedFd},
    path::Path,
};

use anyhow::{Context as _, Result};
use nix::sys::resource::{RLIM_INFINITY, Resource, setrlimit};

/// `BPF_PROG_TYPE_SCHED_CLS`.
const CLASSIFIER: u32 = 3;
const BPF_MAP_DELETE_ELEM: libc::c_long = 3;
const BPF_MAP_GET_NEXT_KEY: libc::c_long = 4;
const BPF_PROG_LOAD: libc::c_long = 5;
const BPF_OBJ_PIN: libc::c_long = 6;
const BPF_OBJ_GET: libc::c_long = 7;
const BPF_PROG_DETACH: libc::c_long = 9;
/// `BPF_NETKIT_PEER`.
const NETKIT_PEER: u32 = 55;

/// The register that points behind the stack frame.
pub const FRAME: u8 = 10;

/// One instruction, as the kernel has it.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Instruction {
    code: u8,
    /// Destination in the lower half, source in the upper.
    registers: u8,
    offset: i16,
    immediate: i32,
}

impl Instruction {
    /// Ends the program; its value is in register 0.
    pub const EXIT: Self = Self::new(0x95, 0, 0, 0);

    const fn new(code: u8, registers: u8, offset: i16, immediate: i32) -> Self {
        Self {
            code,
            registers,
            offset,
            immediate,
        }
    }

    /// `r<register> = value`.
    #[must_use]
    pub const fn set(register: u8, value: i32) -> Self {
        Self::new(0xb7, register, 0, value)
    }

    /// `r<to> = r<from>`.
    #[must_use]
    pub const fn copy(to: u8, from: u8) -> Self {
        Self::new(0xbf, to | from << 4, 0, 0)
    }

    /// `r<register> += value`.
    #[must_use]
    pub const fn add(register: u8, value: i32) -> Self {
        Self::new(0x07, register, 0, value)
    }

    /// Stores eight bytes at `offset` from the end of the stack frame.
    #[must_use]
    pub const fn store(offset: i16, value: i32) -> Self {
        Self::new(0x7a, FRAME, offset, value)
    }

    /// Calls a helper by its number; arguments are in registers 1 to 5, the result in 0.
    #[must_use]
    pub const fn call(helper: i32) -> Self {
        Self::new(0x85, 0, 0, helper)
    }
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

/// What `BPF_PROG_DETACH` needs of `union bpf_attr`.
#[repr(C)]
struct DetachAttributes {
    device: u32,
    fd: u32,
    hook: u32,
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

/// Loads a program for tc and pins it.
pub fn pin(program: &[Instruction], path: &Path) -> Result<()> {
    // Before Linux 5.11 programs count as locked memory, of which a process may have 64 KiB. Later kernels don't care, and who may
    // not raise the limit there need not.
    let _ = setrlimit(Resource::RLIMIT_MEMLOCK, RLIM_INFINITY, RLIM_INFINITY);
    let load = LoadAttributes {
        kind: CLASSIFIER,
        instruction_count: u32::try_from(program.len()).context("count the instructions")?,
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
    let fd = unsafe { open(BPF_PROG_LOAD, &load) }.context("load it")?;
    pin_again(&fd, path)
}

/// Opens a pin, of a program or of a map.
pub(crate) fn open_pin(path: &Path) -> Result<OwnedFd> {
    let path = CString::new(path.as_os_str().as_encoded_bytes()).context("use its path")?;
    let attributes = PinAttributes {
        path: path.as_ptr() as u64,
        fd: 0,
        flags: 0,
    };
    // SAFETY: the path ends with a zero byte and outlives the call.
    unsafe { open(BPF_OBJ_GET, &attributes) }.context("open it")
}

/// Pins what is open.
pub(crate) fn pin_again(object: &OwnedFd, path: &Path) -> Result<()> {
    let path = CString::new(path.as_os_str().as_encoded_bytes()).context("use its path")?;
    let attributes = PinAttributes {
        path: path.as_ptr() as u64,
        fd: object.as_raw_fd().cast_unsigned(),
        flags: 0,
    };
    // SAFETY: the path ends with a zero byte and outlives the call.
    unsafe { bpf(BPF_OBJ_PIN, &attributes) }.context("pin it")?;
    Ok(())
}

/// Removes every entry of a map of any kind with keys, of `key_size` bytes.
pub(crate) fn remove_all(map: BorrowedFd<'_>, key_size: usize) -> Result<()> {
    let mut key = vec![0_u8; key_size];
    loop {
        let first = KeyAttributes {
            map: map.as_raw_fd().cast_unsigned(),
            reserved: 0,
            key: 0,
            next: key.as_mut_ptr() as u64,
        };
        // SAFETY: no key is given, which asks for the first, and there is room for one.
        match unsafe { bpf(BPF_MAP_GET_NEXT_KEY, &first) } {
            Ok(_) => {}
            Err(error) if error.raw_os_error() == Some(libc::ENOENT) => return Ok(()),
            Err(error) => return Err(error).context("ask for a key"),
        }
        let removed = KeyAttributes {
            key: key.as_ptr() as u64,
            next: 0,
            ..first
        };
        // SAFETY: the key is a whole one.
        match unsafe { bpf(BPF_MAP_DELETE_ELEM, &removed) } {
            Ok(_) => {}
            // A program was first.
            Err(error) if error.raw_os_error() == Some(libc::ENOENT) => {}
            Err(error) => return Err(error).context("remove a key"),
        }
    }
}

/// Takes a pinned program off the peer of a netkit device of the calling thread's namespace.
pub fn detach_from_netkit(device: u32, path: &Path) -> Result<()> {
    let fd = open_pin(path)?;
    let detach = DetachAttributes {
        device,
        fd: fd.as_raw_fd().cast_unsigned(),
        hook: NETKIT_PEER,
        flags: 0,
    };
    // SAFETY: no pointers are passed.
    unsafe { bpf(BPF_PROG_DETACH, &detach) }.context("detach it")?;
    Ok(())
}

/// A command that answers with a descriptor.
///
/// # Safety
/// As [`bpf`].
unsafe fn open<T>(command: libc::c_long, attributes: &T) -> Result<OwnedFd> {
    // SAFETY: the caller vouches for the attributes.
    let fd = unsafe { bpf(command, attributes) }?;
    let fd = i32::try_from(fd).context("the kernel's answer is no descriptor")?;
    // SAFETY: the kernel just made this descriptor for us alone.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// # Safety
/// `attributes` must be the beginning of the variant of `union bpf_attr` that the command reads, its pointers valid.
unsafe fn bpf<T>(command: libc::c_long, attributes: &T) -> io::Result<libc::c_long> {
    // SAFETY: the caller vouches for the attributes; size and address are those of one live value.
    let result = unsafe {
        libc::syscall(
            libc::SYS_bpf,
            command,
            std::ptr::from_ref(attributes),
            size_of::<T>(),
        )
    };
    if result < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(result)
}
