//! The driver's codes, and the errors that they become.

use std::borrow::Cow;
use std::ffi::CStr;
use std::ptr;

use gpu_api::{BackendKind, DeviceId, DriverError, Error};

use driver::code::{Code, SUCCESS};

use crate::sys::Own;

/// What is said of a code that the driver has no name for.
const UNNAMED: &str = "a code that this driver does not name";

impl Own {
    /// Names a code the way the driver does.
    pub(crate) fn error(&self, code: Code) -> DriverError {
        DriverError {
            backend: BackendKind::Cuda,
            code,
            name: self.name(code),
        }
    }

    fn name(&self, code: Code) -> Cow<'static, str> {
        let Some(function) = self.cuGetErrorName.function else {
            return Cow::Borrowed(UNNAMED);
        };
        let mut name = ptr::null();
        // SAFETY: `cuGetErrorName` writes one pointer: `name` is one. Any number may be asked for.
        let result = unsafe { function(code, &raw mut name) };
        if result != SUCCESS || name.is_null() {
            return Cow::Borrowed(UNNAMED);
        }
        // SAFETY: `CStr::from_ptr`: the manual says that the driver gave the address of a string
        // that ends with a zero; it is a constant of the driver's, which is never unloaded.
        let name = unsafe { CStr::from_ptr(name) };
        Cow::Owned(name.to_string_lossy().into_owned())
    }

    /// Makes the error of a driver that could not be started.
    pub(crate) fn unavailable(&self, call: &'static str, code: Code) -> Error {
        let name = self.name(code);
        Error::unavailable(
            BackendKind::Cuda,
            format!("{call} gave {code} ({name})"),
            remedy(code),
        )
    }
}

/// Says what mends a driver that does not start.
fn remedy(code: Code) -> &'static str {
    match code {
        34 => {
            "the library found is the toolkit's stub: take the toolkit's `stubs` directory out of LD_LIBRARY_PATH, or \
             install the NVIDIA driver"
        }
        35 | 36 | 227 => "the NVIDIA driver is too old: update it",
        46 => {
            "another process has the device for itself, or its compute mode forbids use: see `nvidia-smi -q`"
        }
        100 | 101 => {
            "make a device visible: see `nvidia-smi -L`, /dev/nvidia0 and CUDA_VISIBLE_DEVICES (in a container: pass \
             the GPU in)"
        }
        304 => {
            "the files under /dev/nvidia* cannot be opened: see their owner and mode, and the container's settings"
        }
        802 => "the system is not ready: start the NVIDIA fabric manager",
        803 => {
            "the kernel module and the library are of different versions: reboot, or load the matching module"
        }
        804 => {
            "this device cannot use the compatibility library: remove the cuda-compat package, or update the driver"
        }
        805..=810 => "the MPS daemon does not answer: start it, or unset CUDA_MPS_PIPE_DIRECTORY",
        _ => "see `nvidia-smi` and the kernel's log",
    }
}

/// Makes the error of a machine without the driver's library.
pub(crate) fn no_library() -> Error {
    Error::unavailable(
        BackendKind::Cuda,
        "libcuda.so.1 cannot be loaded",
        "install the NVIDIA driver, or in a container pass the GPU in (`--gpus all`)",
    )
}

/// Makes the error of a driver that lacks a function.
pub(crate) fn missing(name: &'static str) -> Error {
    Error::unsupported(
        name,
        "the installed driver has no such function",
        "update the NVIDIA driver",
    )
}

/// Makes the error of what a device does not have.
pub(crate) fn unsupported(what: &'static str, device: DeviceId) -> Error {
    let (why, remedy) = match what {
        "memory that is shared by file descriptor" => (
            format!("{device} has no virtual memory management, or does not export it"),
            "share by handle (`Sharing::Handle`)",
        ),
        "an interprocess event" => (
            format!("{device} has none"),
            "order work by words in shared memory",
        ),
        _ => (
            format!("{device} has no such operation"),
            "choose another device or backend",
        ),
    };
    Error::unsupported(what, why, remedy)
}
