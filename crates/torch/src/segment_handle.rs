//! The bytes by which PyTorch names a segment: a version, a kind, and what that kind needs.
//!
//! | bytes | content |
//! |---|---|
//! | exactly 64 | a driver's handle alone, as releases before the version byte wrote it and every release still reads it |
//! | 0 | version |
//! | 1 | kind: `c` for `cudaMalloc` or `hipMalloc`, `e` for an expandable segment |
//! | `c`: 2.. | the driver's handle, 64 bytes |
//! | `e`: 2..26 | process id (4 bytes and 4 of padding), bytes of a chunk (8), number of chunks (8) |
//! | `e`: 26.. | for each chunk the number of a file descriptor (4) or a fabric handle (64) |
//!
//! All numbers are in the machine's own byte order: the bytes never leave it.

use gpu_api::{Error, MemHandle, Result};

/// The version that PyTorch 2.5 to 2.12 write.
pub const VERSION: u8 = 2;
/// The newest version whose `c` handles are known to be unchanged (PyTorch 2.13).
const NEWEST_PLAIN: u8 = 3;
/// The longest handle that is looked at: far more than a device can hold of the smallest chunks.
pub const MAX_BYTES: usize = 1 << 20;

const RAW: usize = 64;
const HEADER: usize = 24;

/// What a segment handle says.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum SegmentHandle {
    /// A segment of `cudaMalloc` or `hipMalloc`, by the driver's handle.
    Plain(MemHandle),
    /// An expandable segment, by file descriptors of the process that made it.
    Expandable(ExpandableSegment),
}

/// The chunks of an expandable segment that one storage lies in.
#[allow(clippy::len_without_is_empty, reason = "a segment is never empty")]
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ExpandableSegment {
    /// The process whose file descriptors these are, as it sees itself.
    pub pid: u32,
    /// Bytes of a chunk.
    pub chunk_bytes: u64,
    /// A file descriptor for each chunk.
    pub chunks: Chunks,
}

/// By what the chunks of an expandable segment are named. Never empty.
#[derive(Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Chunks {
    /// Numbers of file descriptors.
    Descriptors(Vec<u32>),
    /// Fabric handles: their number.
    Fabric(usize),
}

impl std::fmt::Debug for Chunks {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Chunks::Descriptors(all) => write!(f, "{} file descriptors", all.len()),
            Chunks::Fabric(count) => write!(f, "{count} fabric handles"),
        }
    }
}

impl SegmentHandle {
    /// Reads a handle. Total: every sequence of bytes gives a handle or an error.
    ///
    /// # Errors
    ///
    /// [`Error::Mismatch`] for a version that this library does not know, [`Error::Invalid`] for
    /// bytes that are no handle.
    ///
    /// # Examples
    ///
    /// ```
    /// use gpu_ipc_torch::SegmentHandle;
    ///
    /// let mut bytes = vec![2, b'c'];
    /// bytes.extend([7; 64]);
    /// assert!(matches!(SegmentHandle::decode(&bytes)?, SegmentHandle::Plain(handle) if handle.0 == [7; 64]));
    /// # Ok::<(), gpu_api::Error>(())
    /// ```
    pub fn decode(bytes: &[u8]) -> Result<SegmentHandle> {
        let invalid = |got: String, must| Error::invalid("a PyTorch segment handle", got, must);
        if bytes.len() > MAX_BYTES {
            return Err(invalid(format!("{} bytes", bytes.len()), "at most 1 MiB"));
        }
        if let Ok(raw) = <[u8; RAW]>::try_from(bytes) {
            return Ok(SegmentHandle::Plain(MemHandle(raw)));
        }
        let [version, kind, rest @ ..] = bytes else {
            return Err(invalid(
                format!("{} bytes", bytes.len()),
                "a version, a kind and a handle",
            ));
        };
        let newest = match kind {
            b'c' => NEWEST_PLAIN,
            b'e' => VERSION,
            _ => {
                return Err(invalid(
                    format!("of kind {kind:#04x}"),
                    "of kind 'c' or 'e'",
                ));
            }
        };
        if !(1..=newest).contains(version) {
            return Err(Error::mismatch(
                "the version of PyTorch's segment handle",
                format!("{version} of kind '{}'", char::from(*kind)),
                format!("1 to {newest}"),
                "update this library, or share from a PyTorch that writes a version in this range",
            ));
        }
        if *kind == b'c' {
            return match <[u8; RAW]>::try_from(rest) {
                Ok(raw) => Ok(SegmentHandle::Plain(MemHandle(raw))),
                Err(_) => Err(invalid(
                    format!("{} bytes after its kind", rest.len()),
                    "64 bytes after its kind",
                )),
            };
        }
        ExpandableSegment::decode(rest).map(SegmentHandle::Expandable)
    }
}

impl ExpandableSegment {
    /// Returns the bytes of all chunks; what 64 bits do not hold is no segment.
    pub fn len(&self) -> u64 {
        let count = match &self.chunks {
            Chunks::Descriptors(all) => all.len(),
            Chunks::Fabric(count) => *count,
        };
        self.chunk_bytes.saturating_mul(count as u64)
    }

    /// Writes the bytes that PyTorch from 2.5 on reads. A fabric handle's bytes are not kept: such
    /// chunks are left out.
    ///
    /// # Examples
    ///
    /// ```
    /// use gpu_ipc_torch::{Chunks, ExpandableSegment, SegmentHandle};
    ///
    /// let chunks = Chunks::Descriptors(vec![5, 6]);
    /// let segment = ExpandableSegment { pid: 100, chunk_bytes: 2 << 20, chunks };
    /// assert_eq!(SegmentHandle::decode(&segment.encode())?, SegmentHandle::Expandable(segment));
    /// # Ok::<(), gpu_api::Error>(())
    /// ```
    pub fn encode(&self) -> Vec<u8> {
        let numbers = match &self.chunks {
            Chunks::Descriptors(numbers) => numbers.as_slice(),
            Chunks::Fabric(_) => &[],
        };
        let mut bytes = vec![VERSION, b'e'];
        bytes.extend(self.pid.to_ne_bytes());
        bytes.extend([0; 4]);
        bytes.extend(self.chunk_bytes.to_ne_bytes());
        bytes.extend((numbers.len() as u64).to_ne_bytes());
        bytes.extend(numbers.iter().flat_map(|number| number.to_ne_bytes()));
        bytes
    }

    fn decode(bytes: &[u8]) -> Result<ExpandableSegment> {
        let invalid = |got: String, must| Error::invalid("a PyTorch expandable segment", got, must);
        let Some((header, rest)) = bytes.split_first_chunk::<HEADER>() else {
            return Err(invalid(
                format!("{} bytes", bytes.len()),
                "at least 24 bytes after its kind",
            ));
        };
        let word = |at: usize| u64::from_ne_bytes(std::array::from_fn(|i| header[at + i]));
        let pid = i32::from_ne_bytes(std::array::from_fn(|i| header[i]));
        let (chunk_bytes, count) = (word(8), word(16));
        let Some(pid) = u32::try_from(pid).ok().filter(|&pid| pid > 0) else {
            return Err(invalid(
                format!("of process {pid}"),
                "of a process with a positive number",
            ));
        };
        let count = usize::try_from(count).unwrap_or(usize::MAX);
        if count == 0
            || count > MAX_BYTES
            || chunk_bytes == 0
            || chunk_bytes.checked_mul(count as u64).is_none()
        {
            return Err(invalid(
                format!("{count} chunks of {chunk_bytes} bytes"),
                "a size that fits in 64 bits",
            ));
        }
        let chunks = if rest.len() == count * 4 {
            let (numbers, _) = rest.as_chunks::<4>();
            let numbers: Option<Vec<u32>> = numbers
                .iter()
                .map(|&number| u32::try_from(i32::from_ne_bytes(number)).ok())
                .collect();
            match numbers {
                Some(numbers) => Chunks::Descriptors(numbers),
                None => {
                    return Err(invalid(
                        "a negative file descriptor".into(),
                        "numbers of open file descriptors",
                    ));
                }
            }
        } else if rest.len() == count * RAW {
            Chunks::Fabric(count)
        } else {
            let got = format!("{} bytes for {count} chunks", rest.len());
            return Err(invalid(
                got,
                "4 bytes for each, or 64 for each fabric handle",
            ));
        };
        Ok(ExpandableSegment {
            pid,
            chunk_bytes,
            chunks,
        })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// What `_share_cuda_` writes for an expandable segment, chunk for chunk.
    pub(crate) fn expandable(
        version: u8,
        pid: i32,
        chunk: u64,
        count: u64,
        tail: &[u8],
    ) -> Vec<u8> {
        let mut bytes = vec![version, b'e'];
        bytes.extend(pid.to_ne_bytes());
        bytes.extend([0; 4]);
        bytes.extend(chunk.to_ne_bytes());
        bytes.extend(count.to_ne_bytes());
        bytes.extend(tail);
        bytes
    }

    fn plain(version: u8, kind: u8, payload: &[u8]) -> Vec<u8> {
        [&[version, kind], payload].concat()
    }

    #[test]
    fn plain_handles_of_every_known_version_open() {
        let expected = SegmentHandle::Plain(MemHandle([9; 64]));
        assert_eq!(SegmentHandle::decode(&[9; 64]).expect("raw"), expected);
        for version in 1..=3 {
            assert_eq!(
                SegmentHandle::decode(&plain(version, b'c', &[9; 64])).expect("known"),
                expected
            );
        }
    }

    #[test]
    fn other_versions_are_refused_with_both_sides() {
        for (bytes, theirs) in [
            (plain(0, b'c', &[9; 64]), "0 of kind 'c'"),
            (plain(4, b'c', &[9; 64]), "4 of kind 'c'"),
            (expandable(3, 7, 1 << 21, 1, &[3, 0, 0, 0]), "3 of kind 'e'"),
        ] {
            let text = SegmentHandle::decode(&bytes)
                .expect_err("unknown")
                .to_string();
            assert!(text.contains(theirs) && text.contains("1 to"), "{text}");
        }
    }

    #[test]
    fn an_expandable_segment_gives_its_descriptors() {
        let bytes = expandable(2, 4321, 2 << 20, 2, &[5, 0, 0, 0, 6, 0, 0, 0]);
        let Ok(SegmentHandle::Expandable(segment)) = SegmentHandle::decode(&bytes) else {
            panic!("{bytes:?}")
        };
        assert_eq!(
            (segment.pid, segment.chunk_bytes, segment.len()),
            (4321, 2 << 20, 4 << 20)
        );
        assert_eq!(segment.chunks, Chunks::Descriptors(vec![5, 6]));
        let fabric =
            SegmentHandle::decode(&expandable(2, 4321, 2 << 20, 2, &[0; 128])).expect("fabric");
        assert!(matches!(
            fabric,
            SegmentHandle::Expandable(ExpandableSegment {
                chunks: Chunks::Fabric(2),
                ..
            })
        ));
    }

    #[test]
    fn nonsense_is_refused() {
        for bytes in [
            vec![],
            vec![2],
            plain(2, b'x', &[0; 64]),
            plain(2, b'c', &[0; 63]),
            plain(2, b'c', &[0; 65]),
            expandable(2, 0, 1, 1, &[0; 4]),
            expandable(2, -5, 1, 1, &[0; 4]),
            expandable(2, 5, 0, 1, &[0; 4]),
            expandable(2, 5, 1, 0, &[]),
            expandable(2, 5, 1, u64::MAX, &[]),
            expandable(2, 5, u64::MAX, 2, &[0; 8]),
            expandable(2, 5, 1, 2, &[0; 9]),
            expandable(2, 5, 1, 1, &[0xff; 4]),
            vec![2; MAX_BYTES + 1],
        ] {
            assert!(
                SegmentHandle::decode(&bytes).is_err(),
                "{} bytes",
                bytes.len()
            );
        }
    }

    proptest! {
        #[test]
        fn every_sequence_of_bytes_gives_a_handle_or_an_error(
            mut bytes in proptest::collection::vec(any::<u8>(), 0..200),
            kind in 0..3u8,
        ) {
            let _ = SegmentHandle::decode(&bytes);
            // Random bytes rarely reach the inner decoders.
            if bytes.len() >= 2 && kind > 0 {
                bytes[..2].copy_from_slice(&[2, if kind == 1 { b'c' } else { b'e' }]);
                let _ = SegmentHandle::decode(&bytes);
            }
        }

        #[test]
        fn an_expandable_segment_survives(
            pid in 1..i32::MAX,
            chunk in 1..1u64 << 40,
            fds in proptest::collection::vec(0..i32::MAX, 1..20),
        ) {
            let tail: Vec<u8> = fds.iter().flat_map(|fd| fd.to_ne_bytes()).collect();
            let bytes = expandable(2, pid, chunk, fds.len() as u64, &tail);
            let Ok(SegmentHandle::Expandable(segment)) = SegmentHandle::decode(&bytes) else { panic!("refused") };
            prop_assert_eq!(segment.pid, pid as u32);
            prop_assert_eq!(segment.chunk_bytes, chunk);
            prop_assert_eq!(segment.chunks, Chunks::Descriptors(fds.iter().map(|&fd| fd as u32).collect()));
        }
    }
}
