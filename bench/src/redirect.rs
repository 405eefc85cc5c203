//! The two smallest programs there are, made by hand so that no compiler adds anything to them.

use std::{
    ffi::CString,
    io,
    os::fd::{AsRawFd as _, FromRawFd as _, OwnedFd},
    path::Path,
};

use anyhow::{Context as _, Result};

/// `BPF_PROG_TYPE_SCHED_CLS`.
const CLASSIFIER: u32 = 3;
const BPF_PROG_LOAD: libc::c_long = 5;
const BPF_OBJ_PIN: libc::c_long = 6;

/// `bpf_redirect`.
const REDIRECT: i32 = 23;

/// One instruction, as the kernel has it.
#[repr(C)]
#[derive(Clone, Copy)]
struct Instruction {
    code: u8,
    /// Destination in the lower half, source in the upper.
    registers: u8,
    offset: i16,
    immediate: i32,
}

impl Instruction {
    /// `r<register> = value`.
    const fn set(register: u8, value: i32) -> Self {
        Self {
            code: 0xb7,
            registers: register,
            offset: 0,
            immediate: value,
        }
    }

    const fn call(helper: i32) -> Self {
        Self {
            code: 0x85,
            registers: 0,
            offset: 0,
            immediate: helper,
        }
    }

    const EXIT: Self = Self {
        code: 0x95,
        registers: 0,
        offset: 0,
        immediate: 0,
    };
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

/// What `BPF_OBJ_PIN` needs of `union bpf_attr`.
#[repr(C)]
struct PinAttributes {
    path: u64,
    fd: u32,
    flags: u32,
}

/// Pins a program that sends everything out of one device.
pub(crate) fn pin_redirect(ifindex: u32, path: &Path) -> Result<()> {
    let program = [
        Instruction::set(1, ifindex.cast_signed()),
        Instruction::set(2, 0),
        Instruction::call(REDIRECT),
        Instruction::EXIT,
    ];
    pin(&program, path).with_context(|| format!("pin a redirecting program at {}", path.display()))
}

/// Pins a program that does nothing: what the measuring of programs costs by itself.
pub(crate) fn pin_nothing(path: &Path) -> Result<()> {
    pin(&[Instruction::set(0, 0), Instruction::EXIT], path)
        .with_context(|| format!("pin an empty program at {}", path.display()))
}

fn pin(program: &[Instruction], path: &Path) -> Result<()> {
    let load = LoadAttributes {
        kind: CLASSIFIER,
        instruction_count: u32::try_from(program.len()).context("count the instructions")?,
        instructions: program.as_ptr() as u64,
        license: c"Apache-2.0".as_ptr() as u64,
        log_level: 0,
        log_size: 0,
        log: 0,
        kernel_version: 0,
        flags: 0,
    };
    // SAFETY: program and licence outlive the call, and the count is the program's own.
    let fd = unsafe { bpf(BPF_PROG_LOAD, &load) }.context("load it")?;
    let fd = i32::try_from(fd).context("the kernel's answer is no descriptor")?;
    // SAFETY: the kernel just made this descriptor for us alone.
    let fd = unsafe { OwnedFd::from_raw_fd(fd) };
    let path = CString::new(path.as_os_str().as_encoded_bytes()).context("use its path")?;
    let attributes = PinAttributes {
        path: path.as_ptr() as u64,
        fd: fd.as_raw_fd().cast_unsigned(),
        flags: 0,
    };
    // SAFETY: the path ends with a zero byte and outlives the call.
    unsafe { bpf(BPF_OBJ_PIN, &attributes) }.context("pin it")?;
    Ok(())
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
