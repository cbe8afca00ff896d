//! The bytes that travel.

use std::ffi::c_void;

use crate::boundary::{array, call};
use crate::engine::Descriptor;
use crate::failure::Outcome;
use crate::sized::{self, sized_struct};

/// The bytes of a descriptor.
pub const GPU_IPC_DESCRIPTOR_BYTES: usize = 192;

/// A grant of one block: plain bytes, which may be copied and sent by any transport.
#[derive(Clone, Copy, Debug)]
#[allow(non_camel_case_types, reason = "the name that C has for it")]
#[repr(C)]
pub struct gpu_ipc_descriptor {
    /// To send whole and unchanged.
    pub bytes: [u8; GPU_IPC_DESCRIPTOR_BYTES],
}

impl gpu_ipc_descriptor {
    pub(crate) fn decode(&self) -> Outcome<Descriptor> {
        Ok(Descriptor::decode(&self.bytes)?)
    }
}

/// What a descriptor says. It says nothing about the grant, which may be revoked, claimed, or of
/// another session.
#[derive(Clone, Copy, Debug)]
#[allow(non_camel_case_types, reason = "the name that C has for it")]
#[repr(C)]
pub struct gpu_ipc_descriptor_info {
    /// `sizeof(gpu_ipc_descriptor_info)`.
    pub size: usize,
    /// Bytes of the block that it grants.
    pub len: u64,
    /// The participant that alone can claim it; 0 for a ticket.
    pub participant: u64,
    /// The session that granted it.
    pub session: [u8; 16],
    /// Bytes of the user's own.
    pub user: [u8; 64],
}
sized_struct!(gpu_ipc_descriptor_info of 104 { size, len, participant, session, user });

/// Reads what a descriptor says, of bytes that somebody sent.
///
/// Keeps: nothing. Thread: any. Blocks: no. Errors: `BAD_DESCRIPTOR` naming the first field that is
/// wrong, `MISMATCH` for another version, `INVALID`.
///
/// # Safety
///
/// There are `len` bytes; `info` has as many bytes as its `size` says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gpu_ipc_descriptor_get_info(
    bytes: *const c_void,
    len: usize,
    info: *mut gpu_ipc_descriptor_info,
) -> i32 {
    call(|_| {
        // SAFETY: `array` asks for what this function asks for.
        let bytes = unsafe { array(bytes.cast::<u8>(), len, "bytes") }?;
        let descriptor = Descriptor::decode(bytes)?;
        let ours = gpu_ipc_descriptor_info {
            size: 0,
            len: descriptor.len(),
            participant: descriptor
                .addressee()
                .map_or(0, |participant| participant.0),
            session: descriptor.session().0,
            user: *descriptor.user(),
        };
        // SAFETY: `write` asks for what this function asks for.
        unsafe { sized::write(info, &ours) }
    })
}
