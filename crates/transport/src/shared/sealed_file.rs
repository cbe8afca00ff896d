//! Immutable files: how manifests, listings and snapshots travel, and how a keeper keeps manifests.
//!
//! Each is a sealed memfd, so it may be longer than a message. Seals and size are checked before a
//! byte is read: the sender can neither change what was checked nor make the receiver read without
//! end.

use std::fs::File;
use std::io::Write;
use std::ops::RangeInclusive;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt;

use gpu_api::{Error, Result};
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, fcntl_get_seals, fstat, memfd_create};

const SEALS: SealFlags = SealFlags::WRITE
    .union(SealFlags::SHRINK)
    .union(SealFlags::GROW)
    .union(SealFlags::SEAL);

/// Makes an empty memfd that can be sealed.
///
/// # Errors
///
/// [`Error::System`] when the process has no descriptor left.
pub(super) fn empty(name: &str) -> Result<File> {
    memfd_create(name, MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)
        .map(File::from)
        .map_err(|e| Error::without_descriptors("memfd_create", e))
}

/// Puts bytes into a sealed file.
///
/// # Errors
///
/// [`Error::System`] when the kernel has no descriptor or no memory left.
pub fn create(name: &str, bytes: &[u8]) -> Result<OwnedFd> {
    let mut file = empty(name)?;
    file.write_all(bytes)
        .map_err(|e| Error::system("writing a sealed file", "free memory", e))?;
    fcntl_add_seals(&file, SEALS)
        .map_err(|e| Error::system("sealing a file", "use Linux 3.17 or later", e))?;
    Ok(file.into())
}

/// Reads a sealed file whose size is one of `sizes`.
///
/// # Errors
///
/// [`Error::Invalid`] for a file that could still change or is of another size; [`Error::System`]
/// when it cannot be read.
pub fn read(file: BorrowedFd<'_>, sizes: RangeInclusive<u64>) -> Result<Vec<u8>> {
    let invalid = |what, got: String, must| Error::invalid(what, got, must);
    // Anything but a memfd has no seals to ask for.
    let seals = fcntl_get_seals(file).unwrap_or(SealFlags::empty());
    if !seals.contains(SealFlags::WRITE | SealFlags::SHRINK | SealFlags::GROW) {
        let must = "a memfd sealed against writing, shrinking and growing";
        return Err(invalid("a file's seals", format!("{seals:?}"), must));
    }
    let size = fstat(file)
        .map_err(|e| Error::system("fstat of a sealed file", "report this", e))?
        .st_size;
    let Some(len) = u64::try_from(size).ok().filter(|len| sizes.contains(len)) else {
        let must = "as many bytes as were said, and at most 64 MiB";
        return Err(invalid("the size of a sealed file", size.to_string(), must));
    };
    let mut bytes = vec![0; len as usize];
    let file = file
        .try_clone_to_owned()
        .map_err(|e| Error::without_descriptors("dup", e))?;
    // From the start, wherever the writer left the position that both share.
    File::from(file)
        .read_exact_at(&mut bytes, 0)
        .map_err(|e| Error::system("reading a sealed file", "free memory", e))?;
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::AsFd;

    fn memfd(bytes: &[u8], seals: SealFlags) -> File {
        let mut file = empty("gpu-ipc-test").expect("a memfd");
        file.write_all(bytes).expect("it takes bytes");
        fcntl_add_seals(&file, seals).expect("it takes seals");
        file
    }

    #[test]
    fn what_is_written_is_read_and_cannot_be_changed() {
        let text = b"contents".repeat(10_000);
        let file = File::from(create("gpu-ipc-test", &text).expect("a memfd"));
        assert!(
            file.write_at(b"x", 0).is_err()
                && file.set_len(1).is_err()
                && file.set_len(1 << 20).is_err()
        );
        assert!(fcntl_add_seals(&file, SealFlags::FUTURE_WRITE).is_err());
        let len = text.len() as u64;
        assert_eq!(read(file.as_fd(), 0..=len).expect("a good file"), text);
        assert_eq!(read(file.as_fd(), len..=len).expect("a good file"), text);
    }

    #[test]
    fn what_could_still_change_is_refused() {
        for missing in [SealFlags::WRITE, SealFlags::SHRINK, SealFlags::GROW] {
            let error = read(memfd(b"{}", SEALS.difference(missing)).as_fd(), 0..=100)
                .expect_err("not sealed")
                .to_string();
            assert!(error.contains("a file's seals"), "{error}");
        }
        let (pipe, _writer) = std::io::pipe().expect("a pipe");
        assert!(read(pipe.as_fd(), 0..=100).is_err());
        let plain = File::open("/proc/self/maps").expect("a file");
        assert!(read(plain.as_fd(), 0..=100).is_err());
    }

    #[test]
    fn another_size_than_was_said_is_refused() {
        for (bytes, sizes) in [
            (&b"{}"[..], 1..=1),
            (b"{}", 3..=3),
            (b"{}", 0..=1),
            (b"", 1..=100),
            (b"{}", u64::MAX..=u64::MAX),
        ] {
            let error = read(memfd(bytes, SEALS).as_fd(), sizes)
                .expect_err("another size")
                .to_string();
            assert!(error.contains("the size of a sealed file"), "{error}");
        }
        // A hole costs the writer nothing, and the reader must not be made to fill it.
        let file = empty("gpu-ipc-test").expect("a memfd");
        rustix::fs::ftruncate(&file, 1 << 40).expect("it grows");
        fcntl_add_seals(&file, SEALS).expect("it takes seals");
        let error = read(file.as_fd(), 0..=64 << 20)
            .expect_err("too long")
            .to_string();
        assert!(error.contains("1099511627776"), "{error}");
    }
}
