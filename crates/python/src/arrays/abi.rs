//! DLPack's structs and numbers, as `dlpack.h` of github.com/dmlc/dlpack has them: versions 1.x,
//! and the one before.

use pyo3::ffi;
use std::ffi::{CStr, c_void};
use std::ptr;

use crate::data::layout::Dtype;

/// Host memory (`kDLCPU`).
pub(crate) const CPU: i32 = 1;
/// Memory of an NVIDIA GPU (`kDLCUDA`).
pub(crate) const CUDA: i32 = 2;
/// Pinned host memory (`kDLCUDAHost`).
pub(crate) const CUDA_HOST: i32 = 3;
/// Memory of an AMD GPU (`kDLROCM`).
pub(crate) const ROCM: i32 = 10;
/// Managed memory (`kDLCUDAManaged`).
pub(crate) const CUDA_MANAGED: i32 = 13;

/// The flag of memory that must not be written.
pub(crate) const READ_ONLY: u64 = 1;
/// The version that is spoken here.
pub(crate) const VERSION: Version = Version { major: 1, minor: 1 };

pub(crate) const PLAIN: &CStr = c"dltensor";
pub(crate) const PLAIN_USED: &CStr = c"used_dltensor";
pub(crate) const VERSIONED: &CStr = c"dltensor_versioned";
pub(crate) const VERSIONED_USED: &CStr = c"used_dltensor_versioned";

/// `DLPackVersion`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(C)]
pub(crate) struct Version {
    pub major: u32,
    pub minor: u32,
}

/// `DLDevice`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(C)]
pub(crate) struct Device {
    pub kind: i32,
    pub id: i32,
}

impl Device {
    /// Returns DLPack's name of a device.
    pub fn of(gpu: &gpu_ipc::Gpu) -> Device {
        let kind = gpu.kind().arrays().dlpack_device;
        // DLPack has one host.
        let id = if kind == CPU {
            0
        } else {
            gpu.device().0 as i32
        };
        Device { kind, id }
    }

    /// Returns the device as people name it.
    pub fn name(self) -> String {
        match self.kind {
            CPU => "host memory".into(),
            CUDA => format!("cuda:{}", self.id),
            CUDA_HOST => "pinned host memory".into(),
            ROCM => format!("hip:{}", self.id),
            CUDA_MANAGED => "managed memory".into(),
            other => format!("DLPack's device {other}:{}", self.id),
        }
    }
}

/// `DLTensor`.
#[repr(C)]
pub(crate) struct Tensor {
    pub data: *mut c_void,
    pub device: Device,
    pub dimensions: i32,
    pub dtype: Dtype,
    pub shape: *mut i64,
    pub strides: *mut i64,
    pub byte_offset: u64,
}
const _: () = assert!(size_of::<Tensor>() == 48);

/// `DLManagedTensor`.
#[repr(C)]
pub(crate) struct Managed {
    pub tensor: Tensor,
    pub context: *mut c_void,
    pub deleter: Option<unsafe extern "C" fn(*mut Managed)>,
}

/// `DLManagedTensorVersioned`.
#[repr(C)]
pub(crate) struct ManagedVersioned {
    pub version: Version,
    pub context: *mut c_void,
    pub deleter: Option<unsafe extern "C" fn(*mut ManagedVersioned)>,
    pub flags: u64,
    pub tensor: Tensor,
}

/// Returns what a capsule of this name points at; null for one of another name.
///
/// # Safety
///
/// `capsule` is a capsule, and the interpreter's lock is held.
pub(crate) unsafe fn pointer_of(capsule: *mut ffi::PyObject, name: &CStr) -> *mut c_void {
    // SAFETY: `PyCapsule_IsValid` asks for the lock, and takes any object.
    if unsafe { ffi::PyCapsule_IsValid(capsule, name.as_ptr()) } == 0 {
        return ptr::null_mut();
    }
    // SAFETY: `PyCapsule_GetPointer` asks for a valid capsule of that name: just asked.
    unsafe { ffi::PyCapsule_GetPointer(capsule, name.as_ptr()) }
}
