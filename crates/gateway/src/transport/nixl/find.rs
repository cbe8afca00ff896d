//! Where NIXL's library is looked for: first match wins, and the error names every place.
//!
//! The wheels `nixl-cu12` and `nixl-cu13` (1.5.1) hold it as
//! `.nixl_cu12.mesonpy.libs/libnixl_capi.so` beside the package, so a hidden folder of
//! `site-packages`. It finds its plug-ins and UCX relative to itself: the folders of a wheel must
//! stay together.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};

use crate::error::{Error, Result};

/// Names the library, or the folder of a Python environment or of an unpacked wheel that holds it.
pub const VARIABLE: &str = "GPU_IPC_NIXL";

const FILE: &str = "libnixl_capi.so";

/// The folders of the wheels that hold the library. Of two wheels, the one of the newer CUDA is
/// taken.
const FOLDERS: [&str; 2] = [".nixl_cu13.mesonpy.libs", ".nixl_cu12.mesonpy.libs"];

const REMEDY: &str = "run `pip install --no-deps nixl-cu12` (nixl-cu13 for CUDA 13) in the Python environment of which \
                      GPU_IPC_NIXL or VIRTUAL_ENV names the folder, or let GPU_IPC_NIXL name libnixl_capi.so";

/// What decides where to look, so that a test can give it.
#[derive(Clone, Default, Debug)]
pub struct Surroundings {
    /// [`VARIABLE`]: a file, a folder with the file, or a Python environment.
    pub named: Option<PathBuf>,
    /// The folder of this program.
    pub program: Option<PathBuf>,
    /// Python environments: `VIRTUAL_ENV` and `CONDA_PREFIX`.
    pub environments: Vec<PathBuf>,
}

impl Surroundings {
    /// Reads the process' environment.
    pub fn of_process() -> Self {
        let folder = |name: &str| {
            std::env::var_os(name)
                .filter(|value| !value.is_empty())
                .map(PathBuf::from)
        };
        Self {
            named: folder(VARIABLE),
            program: std::env::current_exe()
                .ok()
                .and_then(|file| file.parent().map(Path::to_owned)),
            environments: ["VIRTUAL_ENV", "CONDA_PREFIX"]
                .into_iter()
                .filter_map(folder)
                .collect(),
        }
    }

    /// Lists what to load, in order. The last is a bare name, which the loader looks up in its own
    /// path.
    ///
    /// With [`named`](Self::named), nothing else is looked at: a wrong name is an error, not
    /// another library.
    ///
    /// # Errors
    ///
    /// [`Error::Unavailable`] when the named place does not hold the library.
    pub fn candidates(&self) -> Result<Vec<PathBuf>> {
        if let Some(named) = &self.named {
            let found = in_place(named);
            if found.is_empty() {
                return Err(missing(format!(
                    "{VARIABLE} is {}, where no {FILE} is",
                    named.display()
                )));
            }
            return Ok(found);
        }
        let mut found: Vec<_> = self
            .program
            .iter()
            .flat_map(|folder| in_place(folder))
            .collect();
        found.extend(self.environments.iter().flat_map(|folder| in_place(folder)));
        found.push(PathBuf::from(FILE));
        Ok(found)
    }
}

/// Says that the library is missing, with how to get it.
pub fn missing(why: String) -> Error {
    Error::Unavailable {
        what: format!("NIXL's library {FILE}"),
        why,
        remedy: REMEDY,
    }
}

/// The library in a place: the file itself, a folder that holds it, a wheel's folders, a Python
/// environment.
fn in_place(place: &Path) -> Vec<PathBuf> {
    if place.is_file() {
        return vec![place.to_owned()];
    }
    let mut folders = vec![place.to_owned()];
    folders.extend(FOLDERS.iter().map(|folder| place.join(folder)));
    for packages in site_packages(place) {
        folders.extend(FOLDERS.iter().map(|folder| packages.join(folder)));
    }
    folders
        .into_iter()
        .map(|folder| folder.join(FILE))
        .filter(|file| file.is_file())
        .collect()
}

/// `lib/python3.*/site-packages` of a Python environment, newest name last.
fn site_packages(prefix: &Path) -> Vec<PathBuf> {
    let Ok(entries) = std::fs::read_dir(prefix.join("lib")) else {
        return Vec::new();
    };
    let mut found: Vec<_> = entries
        .flatten()
        .map(|entry| entry.path())
        .filter(|path| {
            path.file_name()
                .and_then(OsStr::to_str)
                .is_some_and(|name| name.starts_with("python3"))
        })
        .map(|path| path.join("site-packages"))
        .collect();
    found.sort();
    found
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    fn wheel_in(folder: &Path, version: &str) -> PathBuf {
        let library = folder.join(format!(".nixl_{version}.mesonpy.libs/{FILE}"));
        fs::create_dir_all(library.parent().expect("it has a folder")).expect("a folder");
        fs::write(&library, "").expect("a file");
        library
    }

    #[test]
    fn a_named_file_folder_wheel_and_environment_are_each_enough() {
        let place = tempfile::tempdir().expect("a folder");
        let library = wheel_in(&place.path().join("lib/python3.11/site-packages"), "cu12");
        let wheel = library
            .parent()
            .and_then(Path::parent)
            .expect("a wheel's folder")
            .to_owned();
        for named in [
            library.clone(),
            library.parent().expect("its folder").to_owned(),
            wheel,
            place.path().to_owned(),
        ] {
            let surroundings = Surroundings {
                named: Some(named),
                ..Surroundings::default()
            };
            assert_eq!(
                surroundings.candidates().expect("found"),
                std::slice::from_ref(&library)
            );
        }
    }

    #[test]
    fn a_wrong_name_is_an_error_though_another_library_is_there() {
        let place = tempfile::tempdir().expect("a folder");
        wheel_in(place.path(), "cu12");
        let named = place.path().join("elsewhere");
        let surroundings = Surroundings {
            named: Some(named.clone()),
            program: Some(place.path().to_owned()),
            environments: vec![place.path().to_owned()],
        };
        let text = surroundings
            .candidates()
            .expect_err("it is wrong")
            .to_string();
        assert!(
            text.contains(&named.display().to_string()) && text.contains("pip install"),
            "{text}"
        );
    }

    #[test]
    fn the_program_comes_before_environments_and_the_loader_last() {
        let [beside, environment] = [(); 2].map(|()| tempfile::tempdir().expect("a folder"));
        let first = wheel_in(beside.path(), "cu13");
        let second = wheel_in(beside.path(), "cu12");
        let third = wheel_in(
            &environment.path().join("lib/python3.12/site-packages"),
            "cu12",
        );
        let surroundings = Surroundings {
            named: None,
            program: Some(beside.path().to_owned()),
            environments: vec![environment.path().to_owned()],
        };
        assert_eq!(
            surroundings.candidates().expect("found"),
            [first, second, third, PathBuf::from(FILE)]
        );
    }
}
