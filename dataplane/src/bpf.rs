//! bpf(2), where no library makes the call.

use std::{
    ffi::{CStr, CString},
    io,
    os::{
        fd::{AsFd, AsRawFd as _, BorrowedFd, FromRawFd as _, OwnedFd},
        unix::ffi::OsStrExt as _,
    },
    path::Path,
};

use aya::Pod;

/// `BPF_MAP_TYPE_HASH`.
const HASH: u32 = 1;
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

/// What `BPF_MAP_CREATE` needs of `union bpf_attr`.
#[repr(C)]
struct CreateAttributes {
    kind: u32,
    key_size: u32,
    value_size: u32,
    max_entries: u32,
    flags: u32,
    inner_map: u32,
    numa_node: u32,
    /// Ends with a zero byte.
    name: [u8; 16],
}

impl CreateAttributes {
    /// Describes a map whose keys and values have four bytes.
    fn new(name: &CStr, kind: u32, max_entries: u32) -> Self {
        let mut attributes = Self {
            kind,
            key_size: 4,
            value_size: 4,
            max_entries,
            flags: 0,
            inner_map: 0,
            numa_node: 0,
            name: [0; 16],
        };
        for (to, from) in attributes.name[..15].iter_mut().zip(name.to_bytes()) {
            *to = *from;
        }
        attributes
    }
}

/// What `BPF_MAP_LOOKUP_ELEM` and `BPF_MAP_UPDATE_ELEM` need of `union bpf_attr`.
#[repr(C)]
struct ElementAttributes {
    map: u32,
    reserved: u32,
    key: u64,
    value: u64,
    flags: u64,
}

impl ElementAttributes {
    fn new(map: BorrowedFd<'_>, key: &[u8], value: &mut [u8]) -> Self {
        Self {
            map: map.as_raw_fd().cast_unsigned(),
            reserved: 0,
            key: key.as_ptr() as u64,
            value: value.as_mut_ptr() as u64,
            flags: 0,
        }
    }
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

/// What `BPF_MAP_LOOKUP_BATCH` needs of `union bpf_attr`.
#[repr(C)]
struct BatchAttributes {
    /// Where the last answer ended; 0 for the beginning.
    after: u64,
    /// Where this one ends.
    end: u64,
    keys: u64,
    values: u64,
    /// How many there is room for, and then how many there are.
    count: u32,
    map: u32,
    element_flags: u64,
    flags: u64,
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

/// Makes a map that no object has, whose keys and values have four bytes. At most 15 bytes of the name are
/// taken; the kind is one of `enum bpf_map_type`.
pub(crate) fn create_map(name: &CStr, kind: u32, max_entries: u32) -> io::Result<OwnedFd> {
    let mut attributes = CreateAttributes::new(name, kind, max_entries);
    // SAFETY: the attributes have no pointers.
    unsafe { open(Command::MapCreate, &mut attributes) }
}

/// Makes a hash that no object has, whose keys and values have so many bytes. At most 15 bytes of the name are taken.
pub fn create_hash(
    name: &CStr,
    key_size: usize,
    value_size: usize,
    max_entries: u32,
) -> io::Result<OwnedFd> {
    crate::object::raise_memory_limit();
    let mut attributes = CreateAttributes {
        key_size: u32::try_from(key_size).map_err(io::Error::other)?,
        value_size: u32::try_from(value_size).map_err(io::Error::other)?,
        ..CreateAttributes::new(name, HASH, max_entries)
    };
    // SAFETY: the attributes have no pointers.
    unsafe { open(Command::MapCreate, &mut attributes) }
}

/// Sets the entry of a map whose keys and values have four bytes.
pub(crate) fn update(map: BorrowedFd<'_>, key: u32, value: u32) -> io::Result<()> {
    set_value(map, &key.to_ne_bytes(), &mut value.to_ne_bytes())
}

/// Tells whether a map whose keys and values have four bytes has the key.
pub(crate) fn has_key(map: BorrowedFd<'_>, key: u32) -> io::Result<bool> {
    found(value(map, &key.to_ne_bytes(), size_of::<u32>()))
}

/// Gives any key of a map whose keys have four bytes.
pub(crate) fn first_key(map: BorrowedFd<'_>) -> io::Result<Option<u32>> {
    let mut key = [0; 4];
    let found = next_key(map, None, &mut key)?;
    Ok(found.then_some(u32::from_ne_bytes(key)))
}

/// Reads the value of a key, which has as many bytes as are asked for. Not of a map that has values for each CPU.
pub(crate) fn value(map: impl AsFd, key: &[u8], size: usize) -> io::Result<Vec<u8>> {
    let mut value = vec![0; size];
    let mut attributes = ElementAttributes::new(map.as_fd(), key, &mut value);
    // SAFETY: key and value outlive the call; who asks knows the sizes of the map's.
    unsafe { call(Command::MapLookup, &mut attributes) }?;
    Ok(value)
}

/// Sets the value of a key, both with the sizes of the map's.
pub(crate) fn set_value(map: impl AsFd, key: &[u8], value: &mut [u8]) -> io::Result<()> {
    let mut attributes = ElementAttributes::new(map.as_fd(), key, value);
    // SAFETY: as for [`value`].
    unsafe { call(Command::MapUpdate, &mut attributes) }?;
    Ok(())
}

/// Lists the keys of a map, which have `key_size` bytes, while nobody else removes any.
pub(crate) fn keys(map: impl AsFd, key_size: usize) -> io::Result<Vec<Vec<u8>>> {
    let mut keys: Vec<Vec<u8>> = Vec::new();
    let mut next = vec![0; key_size];
    while next_key(map.as_fd(), keys.last().map(Vec::as_slice), &mut next)? {
        keys.push(next.clone());
    }
    Ok(keys)
}

/// Counts the entries of a map whose keys have `key_size` bytes, while nobody else removes any.
pub(crate) fn count_keys(map: BorrowedFd<'_>, key_size: usize) -> io::Result<usize> {
    Ok(keys(map, key_size)?.len())
}

/// Writes the key that comes after one, or the first. Both have the size of the map's keys. Returns false
/// if there is none.
fn next_key(map: BorrowedFd<'_>, after: Option<&[u8]>, next: &mut [u8]) -> io::Result<bool> {
    let mut attributes = KeyAttributes {
        map: map.as_raw_fd().cast_unsigned(),
        reserved: 0,
        key: after.map_or(0, |key| key.as_ptr() as u64),
        next: next.as_mut_ptr() as u64,
    };
    // SAFETY: no key asks for the first; one that is given is whole, and there is room for the next.
    found(unsafe { call(Command::MapNextKey, &mut attributes) })
}

/// Tells whether there was an entry.
fn found<T>(answer: io::Result<T>) -> io::Result<bool> {
    match answer {
        Ok(_) => Ok(true),
        Err(error) if error.raw_os_error() == Some(libc::ENOENT) => Ok(false),
        Err(error) => Err(error),
    }
}

/// Reads all entries of a hash map, as [`visit`] does.
pub(crate) fn entries<K: Pod, V: Pod>(map: BorrowedFd<'_>) -> io::Result<Vec<(K, V)>> {
    let mut all = Vec::new();
    visit(map, |key, value| all.push((key, value)))?;
    Ok(all)
}

/// Visits all entries of a hash map, each at most once, whatever is removed meanwhile. One call reads many of
/// them, since 5.6.
pub(crate) fn visit<K: Pod, V: Pod>(
    map: BorrowedFd<'_>,
    mut visit: impl FnMut(K, V),
) -> io::Result<()> {
    /// More than any bucket ever holds.
    const ROOM: usize = 256;
    let (mut keys, mut values) = (Vec::<K>::with_capacity(ROOM), Vec::<V>::with_capacity(ROOM));
    // The number of a bucket.
    let mut end = 0_u32;
    let mut after = 0;
    loop {
        let mut attributes = BatchAttributes {
            after,
            end: (&raw mut end) as u64,
            keys: keys.as_mut_ptr() as u64,
            values: values.as_mut_ptr() as u64,
            count: u32::try_from(ROOM).map_err(io::Error::other)?,
            map: map.as_raw_fd().cast_unsigned(),
            element_flags: 0,
            flags: 0,
        };
        // SAFETY: there is room for as many keys and values as are asked for; who opens a map compares the
        // sizes of both with the kernel's.
        let is_more = found(unsafe { call(Command::MapLookupBatch, &mut attributes) })?;
        let count = usize::try_from(attributes.count).map_or(ROOM, |count| count.min(ROOM));
        // SAFETY: the kernel has filled so many; a `Pod` is valid whatever its bytes are.
        unsafe {
            keys.set_len(count);
            values.set_len(count);
        }
        for (key, value) in keys.drain(..).zip(values.drain(..)) {
            visit(key, value);
        }
        if !is_more {
            return Ok(());
        }
        after = (&raw const end) as u64;
    }
}

/// Removes every entry of a map of any kind with keys, of `key_size` bytes.
pub fn remove_all(map: BorrowedFd<'_>, key_size: usize) -> io::Result<()> {
    let mut key = vec![0_u8; key_size];
    while next_key(map, None, &mut key)? {
        let mut removed = KeyAttributes {
            map: map.as_raw_fd().cast_unsigned(),
            reserved: 0,
            key: key.as_ptr() as u64,
            next: 0,
        };
        // SAFETY: the key is a whole one. A program may have been first.
        found(unsafe { call(Command::MapDelete, &mut removed) })?;
    }
    Ok(())
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
