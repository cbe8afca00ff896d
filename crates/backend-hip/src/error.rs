//! The runtime's codes, and the errors that they become.

use std::borrow::Cow;
use std::ffi::CStr;

use gpu_api::{BackendKind, DriverError, Error, RawStream};

use driver::code::Code;

use crate::sys::Symbols;

/// What is said of a code that the runtime has no name for.
const UNNAMED: &str = "a code that this runtime does not name";

impl Symbols {
    /// Names a code the way the runtime does.
    pub(crate) fn error(&self, code: Code) -> DriverError {
        DriverError {
            backend: BackendKind::Hip,
            code,
            name: self.name(code),
        }
    }

    /// Names a code and says what it means where it was given.
    pub(crate) fn explained(&self, code: Code, meaning: &str) -> DriverError {
        DriverError {
            backend: BackendKind::Hip,
            code,
            name: Cow::Owned(format!("{}: {meaning}", self.name(code))),
        }
    }

    fn name(&self, code: Code) -> Cow<'static, str> {
        let Some(function) = self.name_of else {
            return Cow::Borrowed(UNNAMED);
        };
        // SAFETY: `hipGetErrorName` takes any number.
        let name = unsafe { function(code) };
        if name.is_null() {
            return Cow::Borrowed(UNNAMED);
        }
        // SAFETY: `CStr::from_ptr`: the manual says that the runtime gave the address of a string
        // that ends with a zero; it is a constant of the runtime's, which is never unloaded.
        let name = unsafe { CStr::from_ptr(name) };
        Cow::Owned(name.to_string_lossy().into_owned())
    }

    /// Makes the error of a runtime that could not be started.
    pub(crate) fn unavailable(&self, call: &'static str, code: Code, version: &str) -> Error {
        let name = self.name(code);
        Error::unavailable(
            BackendKind::Hip,
            format!("{call} of HIP {version} gave {code} ({name})"),
            remedy(code),
        )
    }
}

/// Says what mends a runtime that does not start.
fn remedy(code: Code) -> &'static str {
    match code {
        3 => "the runtime could not be initialised: see the kernel's log for amdgpu and amdkfd",
        35 => "the amdgpu driver is too old for this ROCm: update it",
        // ROCm 5.2 says 101 where later ones say 100.
        100 | 101 => {
            "make a device visible: see `rocminfo`, the rights to /dev/kfd and /dev/dri/renderD* (groups video and \
             render), ROCR_VISIBLE_DEVICES and HIP_VISIBLE_DEVICES (in a container: pass both files in)"
        }
        _ => "see `rocminfo` and the kernel's log",
    }
}

/// Makes the error of a runtime that lacks a function.
pub(crate) fn missing(name: &'static str) -> Error {
    Error::unsupported(
        name,
        "the installed HIP runtime has no such function",
        "update ROCm",
    )
}

/// Makes the error of a stream that nothing is known of.
pub(crate) fn foreign_stream(stream: RawStream) -> Error {
    Error::unsupported(
        "a stream that this library did not make",
        format!(
            "the installed HIP runtime cannot tell {:#x} from a later stream, or not its device",
            stream.handle
        ),
        "use a stream of this library, name it with `HipBackend::adopt_stream`, or update ROCm",
    )
}

/// Makes the error of something that no probe has proved on this machine.
pub(crate) fn unproved(what: &'static str) -> Error {
    Error::unsupported(
        what,
        "no probe has proved it with this runtime and driver",
        "run the probe (`gpu-ipc doctor`) and pass its result on in GPU_IPC_HIP_PROOF",
    )
}
