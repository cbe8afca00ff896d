//! Finding the runtime's library.
//!
//! In this order: the file that [`LIBRARY`] names, and then no other; a copy that the process has
//! loaded already, for PyTorch brings its own, and two runtimes in one process do not know of each
//! other's memory; the newest by its name with a number; the development link; the places of
//! ROCm's own packages, under the same names.

use std::env;
use std::error::Error as _;
use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};

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
/// Lists the directories of ROCm's own packages: that of `ROCM_PATH`, the usual one, those of
/// packages by version (`/opt/rocm/core-7.14`, without a meta-package the only one there is:
/// ROCm/legacy-rocm-build#6632; `/opt/rocm-6.4.1`), the newest first, and that of ROCm 5.
fn places(rocm_path: Option<&OsStr>, opt: &Path) -> Vec<PathBuf> {
    let rocm = opt.join("rocm");
    let mut places: Vec<PathBuf> = rocm_path.map(PathBuf::from).into_iter().collect();
    places.push(rocm.clone());
    places.extend(newest(&rocm, "core"));
    places.extend(newest(opt, "rocm-"));
    places.push(rocm.join("hip"));
    places.into_iter().map(|place| place.join("lib")).collect()
}

/// Lists the entries of a directory that begin with a name, by the numbers in theirs, the highest
/// first.
fn newest(directory: &Path, begin: &str) -> Vec<PathBuf> {
    let numbers = |name: &str| -> Vec<u32> {
        name.split(|c: char| !c.is_ascii_digit())
            .filter_map(|part| part.parse().ok())
            .collect()
    };
    let entries = std::fs::read_dir(directory).into_iter().flatten().flatten();
    let mut found: Vec<(Vec<u32>, PathBuf)> = entries
        .filter_map(|entry| {
            let name = entry.file_name().into_string().ok()?;
            name.starts_with(begin)
                .then(|| (numbers(&name), entry.path()))
        })
        .collect();
    found.sort();
    found.into_iter().rev().map(|(_, path)| path).collect()
}

/// Loads the runtime's library.
///
/// # Errors
///
/// [`Error::Unavailable`] with what the loader said.
pub(crate) fn load() -> Result<Library> {
    if let Some(path) = named() {
        return open(&path, RTLD_LAZY | RTLD_LOCAL).map_err(|error| {
            Error::unavailable(
                BackendKind::Hip,
                format!(
                    "{LIBRARY} names {}, which cannot be loaded: {}",
                    path.display(),
                    reason(&error)
                ),
                "name a libamdhip64.so, or unset the variable",
            )
        });
    }
    for name in NAMES {
        if let Ok(library) = open(OsStr::new(name), RTLD_LAZY | libc::RTLD_NOLOAD) {
            return Ok(library);
        }
    }
    let mut broken = None;
    let rocm_path = env::var_os("ROCM_PATH").filter(|path| !path.is_empty());
    let places = places(rocm_path.as_deref(), Path::new("/opt"));
    let in_places = places
        .iter()
        .flat_map(|place| NAMES.map(|name| place.join(name)));
    for file in NAMES.into_iter().map(PathBuf::from).chain(in_places) {
        match open(file.as_os_str(), RTLD_LAZY | RTLD_LOCAL) {
            Ok(library) => return Ok(library),
            // A library that is there but lacks one of its own is worth telling; one that is not
            // there is not.
            Err(error) => {
                let said = reason(&error);
                if !said.starts_with(&*file.to_string_lossy()) {
                    broken.get_or_insert(said);
                }
            }
        }
    }
    Err(Error::unavailable(
        BackendKind::Hip,
        broken.map_or_else(
            || "no libamdhip64.so (ROCm 5 to 8) can be loaded".to_owned(),
            |said| format!("libamdhip64.so cannot be loaded: {said}"),
        ),
        "install ROCm's HIP runtime, or name its library in GPU_IPC_HIP_LIBRARY",
    ))
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn packages_by_version_are_found_the_newest_first() {
        let opt = tempfile::tempdir().expect("a directory");
        for name in [
            "rocm/core-7.9",
            "rocm/core-7.14",
            "rocm-6.4.1",
            "rocm/other",
        ] {
            std::fs::create_dir_all(opt.path().join(name)).expect("made");
        }
        let found = places(Some(OsStr::new("/my/rocm")), opt.path());
        let expected = [
            "rocm/lib",
            "rocm/core-7.14/lib",
            "rocm/core-7.9/lib",
            "rocm-6.4.1/lib",
            "rocm/hip/lib",
        ];
        assert_eq!(found[0], Path::new("/my/rocm/lib"));
        let rest: Vec<PathBuf> = expected.iter().map(|name| opt.path().join(name)).collect();
        assert_eq!(found[1..], rest);
    }
}
