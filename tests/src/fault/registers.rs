//! Where a stopped process has the number and the arguments of its system call, and how to have it refused. That is all that differs
//! between machines.

use nix::{
    errno::Errno,
    sys::ptrace::{self, regset::NT_PRSTATUS},
    unistd::Pid,
};

/// A system call that is about to be made.
#[derive(Clone, Copy, Debug)]
pub(super) struct Request {
    pub(super) number: i64,
    pub(super) arguments: [u64; 6],
}

impl Request {
    /// Reads it from a thread that the filter has stopped.
    #[cfg(target_arch = "x86_64")]
    pub(super) fn of(thread: Pid) -> nix::Result<Self> {
        let registers = ptrace::getregset::<NT_PRSTATUS>(thread)?;
        Ok(Self {
            number: registers.orig_rax.cast_signed(),
            arguments: [
                registers.rdi,
                registers.rsi,
                registers.rdx,
                registers.r10,
                registers.r8,
                registers.r9,
            ],
        })
    }

    /// Reads it from a thread that the filter has stopped.
    #[cfg(target_arch = "aarch64")]
    pub(super) fn of(thread: Pid) -> nix::Result<Self> {
        let registers = ptrace::getregset::<NT_PRSTATUS>(thread)?.regs;
        let mut arguments = [0; 6];
        arguments.copy_from_slice(&registers[..6]);
        Ok(Self {
            number: registers[8].cast_signed(),
            arguments,
        })
    }
}

/// Has the kernel make no system call, and the thread see this error. With the number -1 the kernel leaves the result alone.
#[cfg(target_arch = "x86_64")]
pub(super) fn refuse(thread: Pid, errno: Errno) -> nix::Result<()> {
    let mut registers = ptrace::getregset::<NT_PRSTATUS>(thread)?;
    registers.orig_rax = u64::MAX;
    registers.rax = result(errno);
    ptrace::setregset::<NT_PRSTATUS>(thread, registers)
}

/// Has the kernel make no system call, and the thread see this error. With the number -1 the kernel leaves the result alone.
#[cfg(target_arch = "aarch64")]
pub(super) fn refuse(thread: Pid, errno: Errno) -> nix::Result<()> {
    /// The kernel has the number apart from the registers, in a set of its own (`NT_ARM_SYSTEM_CALL`).
    const NT_ARM_SYSTEM_CALL: libc::c_int = 0x404;
    let mut registers = ptrace::getregset::<NT_PRSTATUS>(thread)?;
    registers.regs[0] = result(errno);
    ptrace::setregset::<NT_PRSTATUS>(thread, registers)?;
    let mut number: libc::c_int = -1;
    let vector = libc::iovec {
        iov_base: (&raw mut number).cast(),
        iov_len: size_of_val(&number),
    };
    // SAFETY: the kernel reads the number, which is alive, by way of the vector.
    let answer = unsafe {
        libc::ptrace(
            libc::PTRACE_SETREGSET,
            thread.as_raw(),
            NT_ARM_SYSTEM_CALL,
            &raw const vector,
        )
    };
    Errno::result(answer).map(drop)
}

/// An error as a register has it.
fn result(errno: Errno) -> u64 {
    (-i64::from(errno as i32)).cast_unsigned()
}
