//! The directory of a broker and its keeper: who may write in it decides who can take their sockets
//! away.

use std::fs::{self, Metadata};
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::Path;

use gpu_api::{Error, Result};

/// Makes the directory if it is not there, for this user alone, and checks it.
///
/// # Errors
///
/// [`Error::Invalid`], by name, for a directory that cannot be made or used, or that a stranger may
/// write in.
pub fn prepare(dir: &Path) -> Result<()> {
    if !dir.exists() {
        fs::DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(dir)
            .map_err(|e| unusable(dir, &e.to_string()))?;
    }
    check(dir)
}

/// Refuses a directory that every user may write in, or that a third user owns: they could put other
/// sockets in place of those that are in it.
///
/// # Errors
///
/// As [`prepare`].
pub fn check(dir: &Path) -> Result<()> {
    let is = fs::metadata(dir).map_err(|e| unusable(dir, &e.to_string()))?;
    if !is.is_dir() {
        return Err(unusable(dir, "it is no directory"));
    }
    let uid = rustix::process::geteuid().as_raw();
    why_unsafe(&is, uid).map_or(Ok(()), |why| Err(unusable(dir, &why)))
}

fn why_unsafe(is: &Metadata, uid: u32) -> Option<String> {
    let (owner, mode) = (is.uid(), is.mode() & 0o7777);
    if owner != uid && owner != 0 {
        return Some(format!("it belongs to uid {owner}"));
    }
    // In one with the sticky bit nobody takes away what is another's.
    (mode & 0o1002 == 0o002).then(|| format!("every user may write in it (mode {mode:o})"))
}

fn unusable(dir: &Path, why: &str) -> Error {
    Error::invalid(
        "the directory of a broker",
        format!("{}: {why}", dir.display()),
        "a directory of this user or of root in which no other user may write",
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::Permissions;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn a_directory_is_made_and_one_that_is_open_to_all_is_refused_by_name() {
        let root = tempfile::tempdir().expect("a directory");
        let dir = root.path().join("new/one");
        prepare(&dir).expect("it is made");
        let mode = |dir: &Path| fs::metadata(dir).expect("it is there").mode() & 0o7777;
        assert_eq!(mode(&dir), 0o700);
        let set = |mode| fs::set_permissions(&dir, Permissions::from_mode(mode)).expect("ours");
        for good in [0o755, 0o1777, 0o770] {
            set(good);
            prepare(&dir).unwrap_or_else(|error| panic!("{good:o}: {error}"));
        }
        set(0o777);
        let error = prepare(&dir).expect_err("anybody's").to_string();
        assert!(
            error.contains("new/one: every user may write in it (mode 777)"),
            "{error}"
        );
        let file = root.path().join("file");
        fs::write(&file, b"").expect("written");
        let error = prepare(&file).expect_err("no directory").to_string();
        assert!(error.contains("file: it is no directory"), "{error}");
        let error = prepare(&file.join("below")).expect_err("none").to_string();
        assert!(error.contains("file/below: "), "{error}");
    }
}
