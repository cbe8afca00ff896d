//! What an object's bytes are, in 32 bytes: origin and replica compare it before a commit, so that
//! whoever writes to the fabric, or a link that alters bytes, is found.
//!
//! Each region is cut into pieces of [`PIECE`] bytes; the digest is BLAKE3 of the pieces' BLAKE3
//! hashes, each behind its length. A hash for accidents alone would not do: one who alters bytes on
//! purpose can make most of them come out the same. Pieces are hashed by several threads.
//!
//! Memory of a device has none: the CPU does not reach it.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

use gpu_ipc::backend::thread;
use serde::{Deserialize, Serialize};

use crate::transport::{Place, Span};

/// Bytes of a piece.
pub const PIECE: u64 = 1 << 20;
/// Threads that hash one object at most: others read and copy meanwhile.
const MOST_THREADS: usize = 4;

/// See the module.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[serde(into = "String", try_from = "String")]
pub struct Digest(pub [u8; 32]);

impl Digest {
    /// Digests an object, region by region; none for memory of a device.
    ///
    /// # Safety
    ///
    /// The regions are mapped and readable, and nobody writes to them.
    pub unsafe fn of(object: &[Span]) -> Option<Digest> {
        if object.iter().any(|region| region.place != Place::Host) {
            return None;
        }
        let pieces: Vec<Span> = object.iter().flat_map(pieces).collect();
        let hashes = Mutex::new(vec![[0; 32]; pieces.len()]);
        let next = AtomicUsize::new(0);
        let work = || {
            loop {
                let index = next.fetch_add(1, Ordering::Relaxed);
                let Some(piece) = pieces.get(index) else {
                    return;
                };
                // SAFETY: `from_raw_parts`: our caller keeps the piece mapped, and as it is.
                let bytes = unsafe {
                    std::slice::from_raw_parts(piece.address as *const u8, piece.bytes as usize)
                };
                let hash = blake3::hash(bytes);
                hashes.lock().unwrap_or_else(PoisonError::into_inner)[index] = *hash.as_bytes();
            }
        };
        let threads = std::thread::available_parallelism().map_or(1, usize::from);
        std::thread::scope(|scope| {
            // This thread is one of them, and does all where there is no other.
            for _ in 1..threads.min(MOST_THREADS).min(pieces.len()) {
                let _ = thread::start_scoped(scope, "gateway-digests", work);
            }
            work();
        });
        let mut all = blake3::Hasher::new();
        let hashes = hashes.into_inner().unwrap_or_else(PoisonError::into_inner);
        for (piece, hash) in pieces.iter().zip(&hashes) {
            all.update(&piece.bytes.to_le_bytes());
            all.update(hash);
        }
        Some(Digest(*all.finalize().as_bytes()))
    }
}

impl std::fmt::Display for Digest {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl From<Digest> for String {
    fn from(digest: Digest) -> String {
        digest.to_string()
    }
}

impl TryFrom<String> for Digest {
    type Error = String;

    fn try_from(text: String) -> Result<Digest, String> {
        let digest = blake3::Hash::from_hex(&text).map_err(|e| format!("a digest: {e}"))?;
        Ok(Digest(*digest.as_bytes()))
    }
}

fn pieces(region: &Span) -> impl Iterator<Item = Span> + use<> {
    let region = *region;
    (0..region.bytes.div_ceil(PIECE)).map(move |index| Span {
        address: region.address + index * PIECE,
        bytes: PIECE.min(region.bytes - index * PIECE),
        ..region
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn span(bytes: &[u8]) -> Span {
        Span {
            address: bytes.as_ptr() as u64,
            bytes: bytes.len() as u64,
            place: Place::Host,
        }
    }

    fn digest(regions: &[&[u8]]) -> Digest {
        let spans: Vec<Span> = regions.iter().map(|region| span(region)).collect();
        // SAFETY: `of`: the regions are this test's own.
        unsafe { Digest::of(&spans) }.expect("host memory")
    }

    #[test]
    fn every_byte_and_every_region_counts() {
        let bytes: Vec<u8> = (0..5 * PIECE as u32 / 2).map(|n| (n % 251) as u8).collect();
        let whole = digest(&[&bytes]);
        assert_eq!(whole, digest(&[&bytes.clone()]));
        for at in [0, PIECE as usize - 1, PIECE as usize, bytes.len() - 1] {
            let mut other = bytes.clone();
            other[at] ^= 1;
            assert_ne!(whole, digest(&[&other]), "byte {at}");
        }
        let (first, second) = bytes.split_at(1000);
        assert_ne!(whole, digest(&[first, second]));
        assert_ne!(digest(&[second, first]), digest(&[first, second]));
        assert_ne!(digest(&[]), digest(&[&[0]]));
    }

    #[test]
    fn a_digest_is_64_digits_and_a_devices_memory_has_none() {
        let digest = digest(&[b"bytes"]);
        let text = serde_json::to_string(&digest).expect("text");
        assert_eq!(text.len(), 66);
        assert_eq!(
            serde_json::from_str::<Digest>(&text).expect("it is one"),
            digest
        );
        serde_json::from_str::<Digest>("\"12\"").expect_err("too short");
        let device = Span {
            place: Place::Device(0),
            ..span(b"bytes")
        };
        // SAFETY: `of`: memory of a device is not read.
        assert_eq!(unsafe { Digest::of(&[device]) }, None);
    }
}
