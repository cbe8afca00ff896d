//! The files by which processes reach a driver, and the variables that hide devices.

use std::env;
use std::ffi::OsString;
use std::path::Path;

use gpu_ipc::BackendKind;
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;

use super::check::{Check, CheckState};

/// The check of a driver's file.
const FILE: &str = "device file";

/// Looks at what belongs to a vendor.
pub fn checks(kind: BackendKind) -> Vec<Check> {
    let Some(file) = kind.driver_files().first() else {
        return Vec::new();
    };
    let visible = kind
        .variables()
        .iter()
        .filter_map(|variable| judge_visible(variable, env::var_os(variable)));
    std::iter::once(judge_file(FILE, Path::new(file), kind.driver_remedy()))
        .chain(visible)
        .collect()
}

/// Says whether a check means that a driver is installed, so that its failure is no mere absence.
pub fn shows_driver(check: &Check) -> bool {
    check.name == FILE && check.state != CheckState::Absent
}

fn judge_file(name: &str, path: &Path, remedy: &str) -> Check {
    let shown = path.display();
    match rustix::fs::open(path, OFlags::RDWR | OFlags::CLOEXEC, Mode::empty()) {
        Ok(_) => Check::ok(name, format!("{shown} opens")),
        Err(Errno::NOENT) => Check::absent(name, format!("no {shown}"))
            .why("no driver is visible")
            .remedy(remedy),
        Err(error) => Check::failed(name, format!("{shown}: {error}"))
            .why("this user cannot reach the driver")
            .remedy(
                "give it the right: the groups video and render, or the container's device rules",
            ),
    }
}

fn judge_visible(variable: &str, value: Option<OsString>) -> Option<Check> {
    let value = value?;
    let shown = value.to_string_lossy();
    Some(if matches!(shown.trim(), "" | "-1") {
        Check::warning(variable, format!("{shown:?}"))
            .why("it hides every device from this process")
            .remedy(format!("unset {variable}"))
    } else {
        Check::ok(variable, format!("{shown:?}: only these devices are seen"))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_that_is_not_there_is_no_failure_and_one_that_does_not_open_is() {
        assert_eq!(
            judge_file("x", Path::new("/dev/null"), "r").state,
            CheckState::Ok
        );
        assert_eq!(
            judge_file("x", Path::new("/dev/no such file"), "r").state,
            CheckState::Absent
        );
        let directory = judge_file("x", Path::new("/"), "r");
        assert_eq!(
            directory.state,
            CheckState::Failed,
            "a directory cannot be written"
        );
    }

    #[test]
    fn a_variable_that_hides_everything_is_named() {
        assert!(judge_visible("V", None).is_none());
        for hides in ["", "-1"] {
            assert_eq!(
                judge_visible("V", Some(hides.into())).map(|check| check.state),
                Some(CheckState::Warning)
            );
        }
        assert_eq!(
            judge_visible("V", Some("0,2".into())).map(|check| check.state),
            Some(CheckState::Ok)
        );
    }
}
