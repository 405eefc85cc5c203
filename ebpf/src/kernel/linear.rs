//! Packet data that is read where it lies.

use core::{mem::MaybeUninit, ptr};

use underpass_abi::Plain;
use underpass_ebpf::packet::{Load, Short};

/// The bytes of a packet that lie in one piece, which is what its headers nearly always do. Cheaper to
/// read than by the helper. Not to be used any more after a helper has changed the packet.
#[derive(Clone, Copy)]
pub struct Linear {
    pub start: usize,
    pub end: usize,
}

impl Linear {
    /// Where so many bytes at `offset` lie, if they are all there.
    #[inline(always)]
    pub fn at<T>(&self, offset: u32) -> Result<usize, Short> {
        let start = self.start + offset as usize;
        if start + size_of::<T>() > self.end {
            return Err(Short);
        }
        Ok(start)
    }

    /// Overwrites the bytes at `offset`. Only of a frame at XDP: a tc program may not write here.
    #[inline(always)]
    pub fn store<T: Plain>(&mut self, offset: u32, value: &T) -> Result<(), Short> {
        let start = self.at::<T>(offset)?;
        match align_of::<T>() {
            8 => overwrite::<T, u64>(start, value),
            4 => overwrite::<T, u32>(start, value),
            2 => overwrite::<T, u16>(start, value),
            _ => overwrite::<T, u8>(start, value),
        }
        Ok(())
    }
}

impl Load for Linear {
    #[inline(always)]
    fn load<T: Plain>(&self, offset: u32) -> Result<T, Short> {
        let start = self.at::<T>(offset)?;
        let mut value = MaybeUninit::<T>::uninit();
        match align_of::<T>() {
            8 => copy::<T, u64>(&mut value, start),
            4 => copy::<T, u32>(&mut value, start),
            2 => copy::<T, u16>(&mut value, start),
            _ => copy::<T, u8>(&mut value, start),
        }
        // SAFETY: filled, and any bytes are a valid `T`.
        Ok(unsafe { value.assume_init() })
    }
}

/// Copies from packet data, word by word.
#[inline(always)]
fn copy<T, W>(to: &mut MaybeUninit<T>, from: usize) {
    for at in 0..size_of::<T>() / size_of::<W>() {
        // SAFETY: inside the packet, as the caller checked and the verifier makes sure, and inside
        // the value. The kernel allows any alignment where the processor does (x86-64, arm64);
        // volatile, so that the compiler draws no conclusions from the type.
        unsafe {
            let word = (from as *const W).add(at).read_volatile();
            to.as_mut_ptr().cast::<W>().add(at).write(word);
        }
    }
}

/// Copies to packet data, word by word.
#[inline(always)]
fn overwrite<T, W>(to: usize, from: &T) {
    for at in 0..size_of::<T>() / size_of::<W>() {
        // SAFETY: as in `copy`, the other way round.
        unsafe {
            let word = ptr::from_ref(from).cast::<W>().add(at).read();
            (to as *mut W).add(at).write_volatile(word);
        }
    }
}
