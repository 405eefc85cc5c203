//! Maps as bytes: of another build, or of a kind that no library knows.

use std::{
    ffi::CStr,
    io,
    mem::{offset_of, zeroed},
    os::fd::{AsFd as _, AsRawFd as _, OwnedFd},
    path::Path,
};

use aya::{
    Pod,
    maps::{HashMap, IterableMap as _, MapData},
};

use crate::bpf::{self, Command, call};

/// `BPF_MAP_TYPE_HASH`.
const HASH: u32 = 1;
/// Kinds of maps (`enum bpf_map_type`) that have a value for each CPU: a look-up gives all of them.
const PER_CPU: [u32; 4] = [5, 6, 10, 21];

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

/// What `BPF_OBJ_GET_INFO_BY_FD` needs of `union bpf_attr`.
#[repr(C)]
struct InfoAttributes {
    object: u32,
    /// Room for the answer, in bytes.
    length: u32,
    info: u64,
}

/// The beginning of `struct bpf_map_info`.
#[repr(C)]
struct Info {
    kind: u32,
    id: u32,
    key_size: u32,
    value_size: u32,
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

/// A map that is open, with the sizes that the kernel has for it: so no call reads or writes more than there is.
#[derive(Debug)]
pub struct RawMap {
    fd: OwnedFd,
    key_size: usize,
    /// Nothing where each CPU has a value of its own.
    value_size: Option<usize>,
}

impl RawMap {
    /// Opens a pinned one.
    pub fn open(path: &Path) -> io::Result<Self> {
        Self::of(bpf::open_pin(path)?)
    }

    /// Takes one that is open. Fails if it is no map.
    pub fn of(fd: OwnedFd) -> io::Result<Self> {
        // SAFETY: any bytes are a value of it.
        let mut info: Info = unsafe { zeroed() };
        let mut attributes = InfoAttributes {
            object: fd.as_raw_fd().cast_unsigned(),
            length: u32::try_from(size_of::<Info>()).map_err(io::Error::other)?,
            info: (&raw mut info) as u64,
        };
        // SAFETY: there is room for as much as the attributes say.
        unsafe { call(Command::ObjectInfo, &mut attributes) }?;
        let size = |size: u32| usize::try_from(size).map_err(io::Error::other);
        Ok(Self {
            key_size: size(info.key_size)?,
            value_size: if PER_CPU.contains(&info.kind) {
                None
            } else {
                Some(size(info.value_size)?)
            },
            fd,
        })
    }

    /// Makes one that no object has. At most 15 bytes of the name are taken; the kind is one of `enum bpf_map_type`, and sizes are in bytes.
    pub(crate) fn create(
        name: &CStr,
        kind: u32,
        (key_size, value_size): (usize, usize),
        max_entries: u32,
    ) -> io::Result<Self> {
        bpf::raise_memory_limit();
        let mut attributes = CreateAttributes {
            kind,
            key_size: u32::try_from(key_size).map_err(io::Error::other)?,
            value_size: u32::try_from(value_size).map_err(io::Error::other)?,
            max_entries,
            flags: 0,
            inner_map: 0,
            numa_node: 0,
            name: [0; 16],
        };
        for (to, from) in attributes.name[..15].iter_mut().zip(name.to_bytes()) {
            *to = *from;
        }
        // SAFETY: the attributes have no pointers.
        Self::of(unsafe { bpf::open(Command::MapCreate, &mut attributes) }?)
    }

    /// Makes a hash that no object has, whose keys and values have so many bytes.
    pub fn create_hash(
        name: &CStr,
        key_size: usize,
        value_size: usize,
        max_entries: u32,
    ) -> io::Result<Self> {
        Self::create(name, HASH, (key_size, value_size), max_entries)
    }

    /// Pins it.
    pub fn pin(&self, path: &Path) -> io::Result<()> {
        bpf::pin(&self.fd, path)
    }

    /// Reads the value of a key; `NotFound` if there is none.
    pub(crate) fn value(&self, key: &[u8]) -> io::Result<Vec<u8>> {
        self.require_key(key)?;
        let mut value = vec![0; self.value_size()?];
        let mut attributes = self.element(key, value.as_mut_ptr() as u64);
        // SAFETY: the key has the size of the map's, and there is room for a value.
        unsafe { call(Command::MapLookup, &mut attributes) }?;
        Ok(value)
    }

    /// Sets the value of a key.
    pub(crate) fn set_value(&self, key: &[u8], value: &[u8]) -> io::Result<()> {
        self.require_key(key)?;
        let size = self.value_size()?;
        if value.len() != size {
            return Err(wrong_size("value", value.len(), size));
        }
        let mut attributes = self.element(key, value.as_ptr() as u64);
        // SAFETY: key and value have the sizes of the map's; the kernel reads both.
        unsafe { call(Command::MapUpdate, &mut attributes) }?;
        Ok(())
    }

    /// Lists the keys, while nobody else removes any.
    pub(crate) fn keys(&self) -> io::Result<Vec<Vec<u8>>> {
        let mut keys: Vec<Vec<u8>> = Vec::new();
        while let Some(next) = self.next_key(keys.last().map(Vec::as_slice))? {
            keys.push(next);
        }
        Ok(keys)
    }

    /// Gives the key that comes after one, or the first.
    pub(crate) fn next_key(&self, after: Option<&[u8]>) -> io::Result<Option<Vec<u8>>> {
        if let Some(key) = after {
            self.require_key(key)?;
        }
        let mut next = vec![0; self.key_size];
        let mut attributes = KeyAttributes {
            map: self.number(),
            reserved: 0,
            key: after.map_or(0, |key| key.as_ptr() as u64),
            next: next.as_mut_ptr() as u64,
        };
        // SAFETY: no key asks for the first; one that is given has the size of the map's, and there is room for another.
        let found = found(unsafe { call(Command::MapNextKey, &mut attributes) })?;
        Ok(found.then_some(next))
    }

    /// Removes every entry of a map of any kind that has keys.
    pub fn remove_all(&self) -> io::Result<()> {
        while let Some(key) = self.next_key(None)? {
            let mut removed = KeyAttributes {
                map: self.number(),
                reserved: 0,
                key: key.as_ptr() as u64,
                next: 0,
            };
            // SAFETY: the key is one of the map's. A program may have been first.
            found(unsafe { call(Command::MapDelete, &mut removed) })?;
        }
        Ok(())
    }

    /// Tells whether there is an entry with a key.
    pub(crate) fn has_key(&self, key: &[u8]) -> io::Result<bool> {
        found(self.value(key))
    }

    /// How many bytes a value has. Fails for a map that has one for each CPU.
    pub(crate) fn value_size(&self) -> io::Result<usize> {
        self.value_size
            .ok_or_else(|| io::Error::other("each CPU has a value of its own in this map"))
    }

    fn require_key(&self, key: &[u8]) -> io::Result<()> {
        if key.len() == self.key_size {
            return Ok(());
        }
        Err(wrong_size("key", key.len(), self.key_size))
    }

    fn element(&self, key: &[u8], value: u64) -> ElementAttributes {
        ElementAttributes {
            map: self.number(),
            reserved: 0,
            key: key.as_ptr() as u64,
            value,
            flags: 0,
        }
    }

    fn number(&self) -> u32 {
        self.fd.as_raw_fd().cast_unsigned()
    }
}

fn wrong_size(what: &str, given: usize, size: usize) -> io::Error {
    io::Error::other(format!(
        "a {what} of this map has {size} bytes, not {given}"
    ))
}

/// Tells whether there was an entry.
fn found<T>(answer: io::Result<T>) -> io::Result<bool> {
    match answer {
        Ok(_) => Ok(true),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
        Err(error) => Err(error),
    }
}

/// Visits all entries of a hash map, each at most once, whatever is removed meanwhile. One call reads many of
/// them, since 5.6. (What aya has opened as a map of these types has keys and values of their sizes.)
pub(crate) fn visit<K: Pod, V: Pod>(
    map: &HashMap<MapData, K, V>,
    mut visit: impl FnMut(&K, &V),
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
            map: map.map().fd().as_fd().as_raw_fd().cast_unsigned(),
            element_flags: 0,
            flags: 0,
        };
        // SAFETY: there is room for as many keys and values as are asked for, of the map's sizes.
        let is_more = found(unsafe { call(Command::MapLookupBatch, &mut attributes) })?;
        let count = usize::try_from(attributes.count).map_or(ROOM, |count| count.min(ROOM));
        // SAFETY: the kernel has filled so many; a `Pod` is valid whatever its bytes are.
        unsafe {
            keys.set_len(count);
            values.set_len(count);
        }
        for (key, value) in keys.iter().zip(&values) {
            visit(key, value);
        }
        keys.clear();
        values.clear();
        if !is_more {
            return Ok(());
        }
        after = (&raw const end) as u64;
    }
}

const _: () = assert!(offset_of!(Info, value_size) == 12);
