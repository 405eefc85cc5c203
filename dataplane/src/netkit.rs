//! The program of a netkit pair, which runs where the container's end sends.
//!
//! The kernel takes it by bpf(2) and by the number of the host's end, though it sits on the other:
//! no way leads to it from inside the container, and it goes with the pair. aya knows nothing of it,
//! so these are the three commands as `linux/bpf.h` has them (6.7, `drivers/net/netkit.c`).

use std::{
    io,
    os::fd::{AsRawFd as _, BorrowedFd},
};

use underpass_abi::endpoint::LOOPBACK;

use crate::{
    Error,
    bpf::{self, Command},
};

/// Attach type: the container's end.
const BPF_NETKIT_PEER: u32 = 55;
/// Flag of `BPF_PROG_ATTACH`: in the place of another program.
const BPF_F_REPLACE: u32 = 1 << 2;
/// The kernel allows 63 programs at one hook (`BPF_MPROG_MAX`, one less than 64).
const PROGRAMS_MAX: u32 = 64;
/// Room for their ids.
pub(crate) type Ids = [u32; PROGRAMS_MAX as usize];

/// Attributes of `BPF_PROG_ATTACH` and `BPF_PROG_DETACH`.
#[repr(C)]
#[derive(Default)]
struct ChangeAttributes {
    target_ifindex: u32,
    attach_bpf_fd: u32,
    attach_type: u32,
    attach_flags: u32,
    replace_bpf_fd: u32,
    relative: u32,
    expected_revision: u64,
}

impl ChangeAttributes {
    fn of(index: u32, program: BorrowedFd<'_>) -> Self {
        Self {
            target_ifindex: index,
            attach_bpf_fd: program.as_raw_fd().cast_unsigned(),
            attach_type: BPF_NETKIT_PEER,
            ..Self::default()
        }
    }
}

/// Attributes of `BPF_PROG_QUERY`.
#[repr(C)]
#[derive(Default)]
struct QueryAttributes {
    target_ifindex: u32,
    attach_type: u32,
    query_flags: u32,
    attach_flags: u32,
    prog_ids: u64,
    count: u32,
    reserved: u32,
    prog_attach_flags: u64,
    link_ids: u64,
    link_attach_flags: u64,
    revision: u64,
}

/// Tells whether the running kernel has netkit devices. It is asked for the programs of a device that is
/// none: a kernel with netkit says so, any other does not know what is asked for.
#[must_use]
pub fn is_supported() -> bool {
    let answer = query(LOOPBACK, BPF_NETKIT_PEER, &mut [0; PROGRAMS_MAX as usize]);
    answer.is_err_and(|error| error.raw_os_error() == Some(libc::ENXIO))
}

/// Attaches a program to what the container behind the device sends, after others that are there.
pub fn attach(index: u32, name: &str, program: BorrowedFd<'_>) -> Result<(), Error> {
    change(Command::ProgramAttach, index, program).map_err(|source| Error::Netkit {
        action: "attach the program to the peer of",
        device: name.to_owned(),
        source,
    })
}

/// Puts a program into the place of another one that is attached.
pub(crate) fn replace(
    index: u32,
    name: &str,
    old: BorrowedFd<'_>,
    new: BorrowedFd<'_>,
) -> Result<(), Error> {
    let mut attributes = ChangeAttributes {
        attach_flags: BPF_F_REPLACE,
        replace_bpf_fd: old.as_raw_fd().cast_unsigned(),
        ..ChangeAttributes::of(index, new)
    };
    // SAFETY: these are the attributes of the command, and they hold no address.
    let answer = unsafe { bpf::call(Command::ProgramAttach, &mut attributes) };
    answer.map(drop).map_err(|source| Error::Netkit {
        action: "replace the program at the peer of",
        device: name.to_owned(),
        source,
    })
}

/// Takes a program off again. Returns whether it was there.
pub fn detach(index: u32, name: &str, program: BorrowedFd<'_>) -> Result<bool, Error> {
    match change(Command::ProgramDetach, index, program) {
        Ok(()) => Ok(true),
        Err(error) if is_absent(&error) => Ok(false),
        Err(source) => Err(Error::Netkit {
            action: "detach the program from the peer of",
            device: name.to_owned(),
            source,
        }),
    }
}

/// Asks for the ids of the programs that run on what the container behind the device sends; none if there is no
/// such device.
pub fn programs(index: u32) -> Result<Vec<u32>, Error> {
    let mut ids: Ids = [0; PROGRAMS_MAX as usize];
    match query(index, BPF_NETKIT_PEER, &mut ids) {
        Ok(count) => Ok(ids.into_iter().take(count).collect()),
        // The peer end of a pair, whose programs are not its own business, answers EACCES.
        Err(error) if is_absent(&error) || error.raw_os_error() == Some(libc::EACCES) => {
            Ok(Vec::new())
        }
        Err(source) => Err(Error::Netkit {
            action: "ask for the programs at the peer of",
            device: format!("device number {index}"),
            source,
        }),
    }
}

/// No such device, another kind of device, or no such program on it.
fn is_absent(error: &io::Error) -> bool {
    matches!(
        error.raw_os_error(),
        Some(libc::ENODEV | libc::ENXIO | libc::ENOENT)
    )
}

fn change(command: Command, index: u32, program: BorrowedFd<'_>) -> io::Result<()> {
    let mut attributes = ChangeAttributes::of(index, program);
    // SAFETY: these are the attributes of both commands, and they hold no address.
    unsafe { bpf::call(command, &mut attributes) }?;
    Ok(())
}

/// Fills `ids` with the programs of that type on a device, and returns how many there are.
pub(crate) fn query(index: u32, attach_type: u32, ids: &mut Ids) -> io::Result<usize> {
    let mut attributes = QueryAttributes {
        target_ifindex: index,
        attach_type,
        prog_ids: ids.as_mut_ptr().addr() as u64,
        count: PROGRAMS_MAX,
        ..QueryAttributes::default()
    };
    // SAFETY: these are the command's attributes, and the one address is that of the buffer, which has room for
    // as many as are asked for and lives longer than the call.
    unsafe { bpf::call(Command::ProgramQuery, &mut attributes) }?;
    Ok(attributes.count as usize)
}
