//! The seccomp filter by which the plugin stops at some system calls, and at no others: most of an ADD's only look, and a stop at each
//! would take several times longer than the ADD.

use std::{io, mem::offset_of};

use libc::{
    BPF_ABS, BPF_JEQ, BPF_JMP, BPF_K, BPF_LD, BPF_RET, BPF_W, PR_SET_SECCOMP, SECCOMP_MODE_FILTER,
    SECCOMP_RET_ALLOW, SECCOMP_RET_TRACE, c_long, seccomp_data, sock_filter, sock_fprog,
};

/// A program of classic BPF.
#[derive(Clone, Debug)]
pub(super) struct Filter(Vec<sock_filter>);

impl Filter {
    /// A filter that leaves the system calls with these numbers to the tracer.
    ///
    /// # Panics
    /// If a number is none, or there are more than a jump can pass.
    pub(super) fn stopping_at(numbers: &[c_long]) -> Self {
        let offset = u32::try_from(offset_of!(seccomp_data, nr)).expect("a small structure");
        let mut program = vec![instruction(BPF_LD | BPF_W | BPF_ABS, offset, 0)];
        for (at, number) in numbers.iter().enumerate() {
            let to_trace = u8::try_from(numbers.len() - at).expect("a few numbers");
            let number = u32::try_from(*number).expect("numbers of system calls are small");
            program.push(instruction(BPF_JMP | BPF_JEQ | BPF_K, number, to_trace));
        }
        program.push(instruction(BPF_RET | BPF_K, SECCOMP_RET_ALLOW, 0));
        program.push(instruction(BPF_RET | BPF_K, SECCOMP_RET_TRACE, 0));
        Self(program)
    }

    /// Puts the calling process, and all that it will start, under the filter. It is async-signal-safe, and needs `CAP_SYS_ADMIN`.
    pub(super) fn install(&self) -> io::Result<()> {
        let program = sock_fprog {
            len: u16::try_from(self.0.len()).map_err(io::Error::other)?,
            filter: self.0.as_ptr().cast_mut(),
        };
        // SAFETY: the kernel copies the program, which is alive, and writes nothing to it.
        match unsafe { libc::prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &raw const program) } {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        }
    }
}

/// An instruction that jumps over the next `if_true` ones where it compares.
fn instruction(code: u32, operand: u32, if_true: u8) -> sock_filter {
    sock_filter {
        code: u16::try_from(code).expect("codes have 16 bits"),
        jt: if_true,
        jf: 0,
        k: operand,
    }
}
