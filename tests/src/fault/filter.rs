//! Seccomp filters. By one the plugin stops at some system calls, and at no others: most of an ADD's only look, and a stop at each
//! would take several times longer than the ADD. By another it gets no threads.

use std::{io, mem::offset_of};

use libc::{
    BPF_ABS, BPF_JEQ, BPF_JMP, BPF_JSET, BPF_K, BPF_LD, BPF_RET, BPF_W, CLONE_THREAD, EAGAIN,
    ENOSYS, PR_SET_SECCOMP, SECCOMP_MODE_FILTER, SECCOMP_RET_ALLOW, SECCOMP_RET_ERRNO,
    SECCOMP_RET_TRACE, SYS_clone, SYS_clone3, c_long, seccomp_data, sock_filter, sock_fprog,
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

    /// A filter under which there are processes to be had, and no threads: as where a group of processes is full. (The kernel lets no
    /// filter see what `clone3` is asked for; who does not find that asks by `clone`.)
    ///
    /// # Panics
    /// If a constant of the kernel is larger than it is.
    pub(super) fn without_threads() -> Self {
        let offset = |at: usize| u32::try_from(at).expect("a small structure");
        let number = |number: c_long| u32::try_from(number).expect("a small number");
        let errno = |errno: i32| SECCOMP_RET_ERRNO | errno.cast_unsigned();
        let load = |at: usize| instruction(BPF_LD | BPF_W | BPF_ABS, offset(at), 0);
        let jump =
            |how: u32, operand: u32, over: u8| instruction(BPF_JMP | how | BPF_K, operand, over);
        let answer = |action: u32| instruction(BPF_RET | BPF_K, action, 0);
        Self(vec![
            load(offset_of!(seccomp_data, nr)),
            jump(BPF_JEQ, number(SYS_clone3), 5),
            jump(BPF_JEQ, number(SYS_clone), 1),
            answer(SECCOMP_RET_ALLOW),
            load(offset_of!(seccomp_data, args)),
            jump(BPF_JSET, CLONE_THREAD.cast_unsigned(), 2),
            answer(SECCOMP_RET_ALLOW),
            answer(errno(ENOSYS)),
            answer(errno(EAGAIN)),
        ])
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
