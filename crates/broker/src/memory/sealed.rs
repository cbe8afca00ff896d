//! Immutable files: how manifests travel, and how they are kept.
//!
//! Seals and size are checked before a byte is read, so that the sender can neither change what was
//! checked nor make the receiver read for ever.

use std::fs::File;
use std::io::Write;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt;

use gpu_api::{Error, Result};
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, fcntl_get_seals, fstat, memfd_create};

const SEALS: SealFlags = SealFlags::WRITE
    .union(SealFlags::SHRINK)
    .union(SealFlags::GROW)
    .union(SealFlags::SEAL);

/// Puts bytes into a sealed file.
///
/// # Errors
///
/// [`Error::System`] when the kernel has no descriptor or no memory left.
pub fn create(name: &str, bytes: &[u8]) -> Result<OwnedFd> {
    let file =
        memfd_create(name, MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).map_err(|e| {
            Error::system(
                "memfd_create",
                "raise RLIMIT_NOFILE or close descriptors",
                e,
            )
        })?;
    let mut file = File::from(file);
    file.write_all(bytes)
        .map_err(|e| Error::system("writing a sealed file", "free memory", e))?;
    fcntl_add_seals(&file, SEALS)
        .map_err(|e| Error::system("sealing a file", "use Linux 3.17 or later", e))?;
    Ok(file.into())
}

/// Reads a sealed file of at most `most` bytes.
///
/// # Errors
///
/// [`Error::Invalid`] for a file that could still change or is of another size; [`Error::System`]
/// when it cannot be read.
pub fn read(file: BorrowedFd<'_>, most: u64) -> Result<Vec<u8>> {
    let invalid = |what, got: String, must| Error::Invalid { what, got, must };
    // Anything but a memfd has no seals to ask for.
    let seals = fcntl_get_seals(file).unwrap_or(SealFlags::empty());
    if !seals.contains(SealFlags::WRITE | SealFlags::SHRINK | SealFlags::GROW) {
        let must = "a memfd sealed against writing, shrinking and growing";
        return Err(invalid("a file's seals", format!("{seals:?}"), must));
    }
    let size = fstat(file)
        .map_err(|e| Error::system("fstat of a sealed file", "report this", e))?
        .st_size;
    let size = u64::try_from(size).ok().filter(|&size| size <= most);
    let Some(size) = size else {
        return Err(invalid(
            "the size of a sealed file",
            "more".into(),
            "at most 64 MiB",
        ));
    };
    let mut bytes = vec![0; size as usize];
    let file = file.as_fd().try_clone_to_owned();
    let file = File::from(
        file.map_err(|e| Error::system("dup", "raise RLIMIT_NOFILE or close descriptors", e))?,
    );
    // From the start, wherever the writer left the position that both share.
    file.read_exact_at(&mut bytes, 0)
        .map_err(|e| Error::system("reading a sealed file", "free memory", e))?;
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_is_read_and_cannot_be_changed() {
        let file = create("gpu-ipc-test", b"contents").expect("a memfd");
        assert_eq!(read(file.as_fd(), 100).expect("a good file"), b"contents");
        assert!(read(file.as_fd(), 7).is_err(), "one byte too many");
        assert!(File::from(file).write_at(b"x", 0).is_err());
    }

    #[test]
    fn what_could_still_change_is_refused() {
        for missing in [SealFlags::WRITE, SealFlags::SHRINK, SealFlags::GROW] {
            let file = memfd_create("x", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)
                .expect("a memfd");
            fcntl_add_seals(&file, SEALS.difference(missing)).expect("it takes seals");
            let error = read(file.as_fd(), 100).expect_err("not sealed").to_string();
            assert!(error.contains("a file's seals"), "{error}");
        }
        let (pipe, _writer) = std::io::pipe().expect("a pipe");
        assert!(read(pipe.as_fd(), 100).is_err());
    }
}
