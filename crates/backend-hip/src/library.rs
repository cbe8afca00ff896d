//! Finding the runtime's library.
//!
//! In this order: the file that [`LIBRARY`] names, and then no other; a copy that the process has
//! loaded already, for PyTorch brings its own, and two runtimes in one process do not know of each
//! other's memory; the newest by its name with a number; the development link; the usual place of
//! ROCm's own packages.

use std::env;
use std::error::Error as _;
use std::ffi::{OsStr, OsString};

use gpu_api::{BackendKind, Error, Result};
use libloading::os::unix::{Library, RTLD_LAZY, RTLD_LOCAL};

/// Names the library to load: for a ROCm in an unusual place, or for a library that stands in for
/// it.
///
/// Not heeded in a program that runs with more rights than its user (set-user-id).
pub const LIBRARY: &str = "GPU_IPC_HIP_LIBRARY";

const NAMES: [&str; 5] = [
    "libamdhip64.so.8",
    "libamdhip64.so.7",
    "libamdhip64.so.6",
    "libamdhip64.so.5",
    "libamdhip64.so",
];
const PLACES: [&str; 2] = [
    "/opt/rocm/lib/libamdhip64.so",
    "/opt/rocm/hip/lib/libamdhip64.so",
];

/// Loads the runtime's library.
///
/// # Errors
///
/// [`Error::Unavailable`] with what the loader said.
pub(crate) fn load() -> Result<Library> {
    if let Some(path) = named() {
        return open(&path, RTLD_LAZY | RTLD_LOCAL).map_err(|error| Error::Unavailable {
            backend: BackendKind::Hip,
            why: format!(
                "{LIBRARY} names {}, which cannot be loaded: {}",
                path.display(),
                reason(&error)
            ),
            remedy: "name a libamdhip64.so, or unset the variable",
        });
    }
    for name in NAMES {
        if let Ok(library) = open(OsStr::new(name), RTLD_LAZY | libc::RTLD_NOLOAD) {
            return Ok(library);
        }
    }
    let mut broken = None;
    for name in NAMES.into_iter().chain(PLACES) {
        match open(OsStr::new(name), RTLD_LAZY | RTLD_LOCAL) {
            Ok(library) => return Ok(library),
            // A library that is there but lacks one of its own is worth telling; one that is not
            // there is not.
            Err(error) => {
                let said = reason(&error);
                if !said.starts_with(name) {
                    broken.get_or_insert(said);
                }
            }
        }
    }
    Err(Error::Unavailable {
        backend: BackendKind::Hip,
        why: broken.map_or_else(
            || "no libamdhip64.so (ROCm 5 to 8) can be loaded".to_owned(),
            |said| format!("libamdhip64.so cannot be loaded: {said}"),
        ),
        remedy: "install ROCm's HIP runtime, or name its library in GPU_IPC_HIP_LIBRARY",
    })
}

fn named() -> Option<OsString> {
    let path = env::var_os(LIBRARY).filter(|path| !path.is_empty())?;
    // SAFETY: `getauxval` has no conditions.
    let secure = unsafe { libc::getauxval(libc::AT_SECURE) };
    (secure == 0).then_some(path)
}

fn open(name: &OsStr, flags: i32) -> Result<Library, libloading::Error> {
    // SAFETY: `Library::open` runs the initialisers of the library: the HIP runtime's have no
    // conditions.
    unsafe { Library::open(Some(name), flags) }
}

/// Returns what the system's loader said.
fn reason(error: &libloading::Error) -> String {
    error
        .source()
        .map_or_else(|| error.to_string(), ToString::to_string)
}
