//! What a pool is, and which of its blocks are whole, as C reads it.

use std::ffi::{c_char, c_void};
use std::mem::MaybeUninit;

use crate::boundary::out;
use crate::engine::{Identity, Key, Layout, Sealed, bytes_for};
use crate::failure::{Outcome, null};
use crate::object::part::{GPU_IPC_NAME_BYTES, gpu_ipc_identity, name_into};
use crate::sized::{self, sized_struct};

/// A pool had no hold before this one.
pub const GPU_IPC_PREVIOUS_NEVER: u32 = 1;
/// The hold before this one was closed by its holder, behind its streams.
pub const GPU_IPC_PREVIOUS_CLOSED: u32 = 2;
/// The holder before this one died: a filling may have been under way.
pub const GPU_IPC_PREVIOUS_DIED: u32 = 3;

/// What the application calls the contents of a block.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[allow(non_camel_case_types, reason = "the name that C has for it")]
#[repr(C)]
pub struct gpu_ipc_key {
    /// Bytes of the application's own, such as a digest.
    pub bytes: [u8; 16],
}

/// A block that is to be sealed.
#[derive(Clone, Copy, Debug)]
#[allow(non_camel_case_types, reason = "the name that C has for it")]
#[repr(C)]
pub struct gpu_ipc_seal {
    /// What its contents are called.
    pub key: gpu_ipc_key,
    /// Its number.
    pub block: u32,
}

/// A block whose contents are whole.
#[derive(Clone, Copy, Debug)]
#[allow(non_camel_case_types, reason = "the name that C has for it")]
#[repr(C)]
pub struct gpu_ipc_sealed {
    /// What its contents are called.
    pub key: gpu_ipc_key,
    /// Its number.
    pub block: u32,
    /// How often it was given up before its contents were written; 1 for the first.
    pub generation: u32,
}

/// The address and the bytes of a region.
#[derive(Clone, Copy, Debug)]
#[allow(non_camel_case_types, reason = "the name that C has for it")]
#[repr(C)]
pub struct gpu_ipc_region {
    /// The address of its first byte in this process.
    pub ptr: *mut c_void,
    /// Its bytes, as its parts fill them.
    pub len: u64,
}

/// What a pool is.
#[derive(Clone, Copy, Debug)]
#[allow(non_camel_case_types, reason = "the name that C has for it")]
#[repr(C)]
pub struct gpu_ipc_pool_info {
    /// `sizeof(gpu_ipc_pool_info)`.
    pub size: usize,
    /// How often it was adopted: of a holder with this time, of a reader as it was opened.
    pub generation: u64,
    /// Its identity, the same for every holder.
    pub identity: gpu_ipc_identity,
    /// How many parts it has.
    pub part_count: u64,
    /// How many bytes of the user's own it has.
    pub user_len: u64,
    /// How many blocks its journal has entries for.
    pub blocks: u32,
    /// `GPU_IPC_PREVIOUS_...`; 0 of a reader, which has no hold.
    pub previous: u32,
    /// Its name, with a zero byte behind.
    pub name: [c_char; GPU_IPC_NAME_BYTES],
}
sized_struct!(gpu_ipc_pool_info of 312 { size, generation, identity, part_count, user_len, blocks, previous, name });

/// Returns the bytes of a pool's journal for so many blocks: for 128 at least, and for 2,097,024 at
/// most that a pool is made with.
///
/// Keeps: nothing. Thread: any. Blocks: no. Errors: none.
#[unsafe(no_mangle)]
pub extern "C" fn gpu_ipc_journal_bytes(blocks: u32) -> u64 {
    bytes_for(blocks)
}

/// Says what a pool is.
///
/// # Safety
///
/// `info` has as many bytes as its `size` says.
pub(super) unsafe fn write_info(
    info: *mut gpu_ipc_pool_info,
    (name, identity, layout): (&str, Identity, &Layout),
    (generation, blocks, previous): (u64, u32, u32),
) -> Outcome {
    let mut ours = sized::zeroed::<gpu_ipc_pool_info>();
    ours.identity.bytes = identity.0;
    ours.part_count = layout.parts().len() as u64;
    ours.user_len = layout.user().len() as u64;
    (ours.generation, ours.blocks, ours.previous) = (generation, blocks, previous);
    name_into(&mut ours.name, name);
    // SAFETY: `write` asks for what this function asks for.
    unsafe { sized::write(info, &ours) }
}

/// Writes as many values as fit into `capacity`, and how many there are.
///
/// # Safety
///
/// `first` has room for `capacity` values, or is null and `capacity` 0.
pub(super) unsafe fn list<T>(
    values: &[T],
    first: *mut T,
    capacity: usize,
    count: Option<&mut MaybeUninit<usize>>,
) -> Outcome {
    let count = out(count, "count")?;
    if first.is_null() && capacity > 0 {
        return Err(null("the room for a list"));
    }
    count.set(values.len());
    let fits = values.len().min(capacity);
    if fits > 0 {
        // SAFETY: `copy_nonoverlapping` asks for this many values on both sides that do not overlap:
        // the list is the library's own, and the room is as large.
        unsafe { std::ptr::copy_nonoverlapping(values.as_ptr(), first, fits) };
    }
    Ok(())
}

pub(super) fn key_of(key: Option<&gpu_ipc_key>) -> Outcome<Key> {
    key.map(|key| Key(key.bytes)).ok_or_else(|| null("key"))
}

impl gpu_ipc_sealed {
    pub(super) fn of(found: &Sealed) -> gpu_ipc_sealed {
        gpu_ipc_sealed {
            key: gpu_ipc_key { bytes: found.key.0 },
            block: found.block,
            generation: found.generation,
        }
    }

    pub(super) fn found(&self) -> Sealed {
        Sealed {
            block: self.block,
            key: Key(self.key.bytes),
            generation: self.generation,
        }
    }
}
