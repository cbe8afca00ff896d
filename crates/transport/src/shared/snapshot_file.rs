//! A snapshot on its way to another process: a text in a sealed memfd.
//!
//! It may be longer than a message. The reader checks seals and size before it reads, so that the
//! writer can neither change what was checked nor make it read for ever.

use std::fs::File;
use std::io::Write;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;

use gpu_api::{Error, Result};
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, fcntl_get_seals, fstat, memfd_create};

use crate::wire::message::MOST_SNAPSHOT;

/// What keeps the text as it is.
const SEALED: SealFlags = SealFlags::WRITE
    .union(SealFlags::SHRINK)
    .union(SealFlags::GROW)
    .union(SealFlags::SEAL);

/// Puts a text into a sealed file (producer).
///
/// # Errors
///
/// [`Error::System`] when the kernel has no descriptor or no memory left.
pub fn create(text: &str) -> Result<OwnedFd> {
    let file = memfd_create(
        "gpu-ipc-snapshot",
        MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING,
    )
    .map_err(|e| {
        Error::system(
            "memfd_create",
            "raise RLIMIT_NOFILE or close descriptors",
            e,
        )
    })?;
    let mut file = File::from(file);
    file.write_all(text.as_bytes())
        .map_err(|e| Error::system("writing a snapshot", "free memory", e))?;
    fcntl_add_seals(&file, SEALED)
        .map_err(|e| Error::system("sealing a snapshot", "use Linux 3.17 or later", e))?;
    Ok(file.into())
}

/// Reads a text that a producer sent (reader). Nothing is known of it but that it is text.
///
/// # Errors
///
/// [`Error::Invalid`] for a file that could still change, is of another size than `len`, or holds
/// no text.
pub fn read(file: OwnedFd, len: u64) -> Result<String> {
    let invalid = |what, got: String, must| Error::Invalid { what, got, must };
    // Anything but a memfd has no seals to ask for.
    let seals = fcntl_get_seals(&file).unwrap_or(SealFlags::empty());
    if !seals.contains(SealFlags::WRITE | SealFlags::SHRINK | SealFlags::GROW) {
        return Err(invalid(
            "a snapshot's seals",
            format!("{seals:?}"),
            "against writing, shrinking and growing",
        ));
    }
    let size = fstat(&file)
        .map_err(|e| Error::system("fstat of a snapshot", "report this; a memfd has a size", e))?
        .st_size;
    if size <= 0 || size as u64 != len || len > MOST_SNAPSHOT {
        return Err(invalid(
            "the size of a snapshot",
            size.to_string(),
            "what its message said, at most 16,777,216",
        ));
    }
    let mut bytes = vec![0; len as usize];
    // From the start, wherever the writer left the position that both share.
    File::from(file)
        .read_exact_at(&mut bytes, 0)
        .map_err(|e| Error::system("reading a snapshot", "report this; its size was checked", e))?;
    String::from_utf8(bytes).map_err(|e| {
        invalid(
            "a snapshot's good bytes",
            e.utf8_error().valid_up_to().to_string(),
            "all",
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn memfd(bytes: &[u8], seals: SealFlags) -> OwnedFd {
        let file = memfd_create("snapshot", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)
            .expect("a memfd");
        let mut file = File::from(file);
        file.write_all(bytes).expect("it takes bytes");
        fcntl_add_seals(&file, seals).expect("it takes seals");
        file.into()
    }

    #[test]
    fn what_is_written_is_read_and_cannot_be_changed() {
        let text = "{\"a\":1}".repeat(10_000);
        let file = create(&text).expect("a memfd");
        let other = File::from(file.try_clone().expect("dup"));
        assert!(
            other.write_at(b"x", 0).is_err()
                && other.set_len(1).is_err()
                && other.set_len(1 << 20).is_err()
        );
        assert!(fcntl_add_seals(&other, SealFlags::FUTURE_WRITE).is_err());
        assert_eq!(read(file, text.len() as u64).expect("a good file"), text);
    }

    #[test]
    fn what_could_still_change_is_refused() {
        for missing in [SealFlags::WRITE, SealFlags::SHRINK, SealFlags::GROW] {
            let error = read(memfd(b"{}", SEALED.difference(missing)), 2)
                .expect_err("not sealed")
                .to_string();
            assert!(error.contains("a snapshot's seals"), "{error}");
        }
        let (pipe, _writer) = std::io::pipe().expect("a pipe");
        assert!(read(pipe.into(), 2).is_err());
        let plain = File::open("/proc/self/maps").expect("a file");
        assert!(read(plain.into(), 2).is_err());
    }

    #[test]
    fn another_size_than_was_said_is_refused() {
        for (bytes, len) in [(&b"{}"[..], 1), (b"{}", 3), (b"", 0), (b"{}", u64::MAX)] {
            let error = read(memfd(bytes, SEALED), len)
                .expect_err("another size")
                .to_string();
            assert!(error.contains("the size of a snapshot"), "{error}");
        }
        // A hole costs the writer nothing, and the reader must not be made to fill it.
        let file = memfd_create("snapshot", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)
            .expect("a memfd");
        rustix::fs::ftruncate(&file, 1 << 40).expect("it grows");
        fcntl_add_seals(&file, SEALED).expect("it takes seals");
        assert!(read(file, 1 << 40).is_err());
    }

    #[test]
    fn what_is_no_text_is_refused() {
        let error = read(memfd(b"{\"\xff\"}", SEALED), 5)
            .expect_err("no text")
            .to_string();
        assert_eq!(error, "a snapshot's good bytes is 2, but must be all");
    }
}
