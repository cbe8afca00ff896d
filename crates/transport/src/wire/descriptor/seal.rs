//! The keyed checksum of descriptors: who has no key can neither make nor alter one.
//!
//! It is SipHash-1-3 under a key of 128 bits: of the 112 bytes before the user's, and of the user's
//! 64 when a flag says that there are some. Each byte that it does not cover is zero, or the
//! descriptor is refused. The first [`HEAD`] bytes are the same in all descriptors of one kind to one
//! participant, so they are compared rather than hashed: a [`Sealer`] holds them, and the hash's
//! state behind them.
//!
//! | descriptor | key | made by | known to |
//! |---|---|---|---|
//! | addressed | the participant's own | the producer | the producer and that participant |
//! | ticket | the session's | the producer | the producer and all its participants |
//!
//! So a participant can forge what is addressed to itself, and tickets. The first gives it nothing
//! that it may not reach already. Of a ticket only the number is believed: place, length and fence
//! are in the producer's answer.

use std::fmt;
use std::hash::Hasher;
use std::ops::Deref;

use siphasher::sip::SipHasher13;

use super::Descriptor;
use super::fields::{Fence, Fields, Names};
use super::key::SealKey;
use super::layout::{
    AT_DEVICE, AT_FENCE_VALUE, AT_FENCE_WORD, AT_FILE, AT_FLAGS, AT_GENERATION, AT_LEN, AT_OFFSET,
    AT_PARTICIPANT, AT_REGION, AT_SESSION, AT_SUM, AT_USER, AT_ZERO, BYTES, HAS_USER, HEAD, MAGIC,
    NO_FENCE, VERSION,
};
use super::view::{View, is_any};

/// Seals descriptors with one key, and verifies them. A copy is not wiped: [`KeptSealer`] is.
#[derive(Clone, Copy)]
pub struct Sealer {
    head: [u8; HEAD],
    /// The state of the hash after the head.
    hash: SipHasher13,
}

impl Sealer {
    /// Makes the sealer of descriptors that begin so.
    pub fn new(key: &SealKey, names: &Names) -> Sealer {
        let mut head = [0; HEAD];
        let mut put = |at: usize, bytes: &[u8]| head[at..at + bytes.len()].copy_from_slice(bytes);
        let [low, high] = VERSION.to_le_bytes();
        put(0, &MAGIC);
        put(
            MAGIC.len(),
            &[low, high, names.backend as u8, names.kind as u8],
        );
        put(AT_DEVICE, &names.device.0);
        put(AT_SESSION, &names.session.0);
        put(AT_PARTICIPANT, &names.participant.0.to_le_bytes());
        let mut hash = SipHasher13::new_with_key(key.as_bytes());
        hash.write(&head);
        Sealer { head, hash }
    }

    /// Writes down a grant. What the head says is the sealer's.
    ///
    /// # Panics
    ///
    /// In debug builds, if the fields name other things than the sealer, or `decode` would refuse
    /// the result.
    #[inline]
    pub fn encode(&self, fields: &Fields, user: &[u8; 64]) -> Descriptor {
        // Eight bytes at a time, as the checksum reads them: what was just stored in smaller parts
        // is slow to read back.
        let both = |low: u32, high: u32| (u64::from(low) | u64::from(high) << 32).to_le_bytes();
        let fence = fields.fence.unwrap_or(Fence {
            word: NO_FENCE,
            file: 0,
            value: 0,
        });
        let mut d = Descriptor([0; BYTES]);
        d.put(0, self.head);
        d.put(AT_FILE, both(fields.file, fields.slot));
        d.put(AT_GENERATION, fields.generation.to_le_bytes());
        d.put(AT_REGION, fields.region.0.to_le_bytes());
        d.put(AT_OFFSET, fields.offset.to_le_bytes());
        d.put(AT_LEN, fields.len.to_le_bytes());
        d.put(AT_FENCE_WORD, both(fence.word, fence.file));
        d.put(AT_FENCE_VALUE, fence.value.to_le_bytes());
        if is_any(user) {
            d.put(AT_FLAGS, HAS_USER.to_le_bytes());
            d.put(AT_USER, *user);
        }
        d.put(AT_SUM, self.sum(&d.0));
        debug_assert_eq!(View(&d.0).fields(), *fields, "sealed by another's sealer");
        debug_assert!(
            View::decode(&d.0).is_ok(),
            "an encoded descriptor is refused: {:?}",
            View::decode(&d.0)
        );
        d
    }

    /// Looks at bytes that somebody sent; `None` for what was not sealed by this sealer, whatever
    /// the reason.
    #[inline(always)]
    pub fn open<'a>(&self, bytes: &'a [u8; BYTES]) -> Option<View<'a>> {
        let view = View(bytes);
        (self.heads(bytes)
            && bytes.last_chunk() == Some(&self.sum(bytes))
            && view.check_body().is_ok())
        .then_some(view)
    }

    /// Says whether bytes begin with the head, word by word as [`is_any`] looks.
    #[inline(always)]
    fn heads(&self, bytes: &[u8; BYTES]) -> bool {
        let words = bytes.as_chunks::<8>().0.iter();
        let differ = words
            .zip(self.head.as_chunks().0)
            .fold(0, |differ, (a, b)| {
                differ | (u64::from_ne_bytes(*a) ^ u64::from_ne_bytes(*b))
            });
        differ == 0
    }

    /// Hashes what is behind the head from the state that is kept, without a copy of the hasher.
    #[inline(always)]
    fn sum(&self, bytes: &[u8; BYTES]) -> [u8; 8] {
        let sum = if View(bytes).has_user() {
            self.hash.hash(&bytes[HEAD..AT_ZERO])
        } else {
            self.hash.hash(&bytes[HEAD..AT_USER])
        };
        sum.to_le_bytes()
    }
}

impl fmt::Debug for Sealer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Sealer(..)")
    }
}

/// A sealer that is wiped when it is dropped.
#[derive(Debug)]
pub struct KeptSealer(Sealer);

impl From<Sealer> for KeptSealer {
    fn from(sealer: Sealer) -> KeptSealer {
        KeptSealer(sealer)
    }
}

impl Deref for KeptSealer {
    type Target = Sealer;

    #[inline]
    fn deref(&self) -> &Sealer {
        &self.0
    }
}

impl Drop for KeptSealer {
    fn drop(&mut self) {
        // SAFETY: `zeroize_flat_type` asks for memory that is valid to write, of a type without
        // references or other indirection, and valid when it is all zero: a mutable reference to
        // arrays and numbers.
        unsafe { zeroize::zeroize_flat_type(&raw mut self.0) };
    }
}

/// The two sealers of a participant's connection.
#[derive(Debug)]
pub struct Seals {
    addressed: KeptSealer,
    tickets: KeptSealer,
}

impl Seals {
    /// Keeps the sealer of what is addressed to the participant, and that of the session's tickets.
    pub fn new(addressed: Sealer, tickets: Sealer) -> Seals {
        Seals {
            addressed: addressed.into(),
            tickets: tickets.into(),
        }
    }

    /// Looks at bytes that somebody sent; `None` for what the producer did not seal for this
    /// participant, whatever the reason.
    #[inline(always)]
    pub fn open<'a>(&self, bytes: &'a [u8]) -> Option<View<'a>> {
        let bytes = bytes.try_into().ok()?;
        let sealer = if View(bytes).is_ticket() {
            &self.tickets
        } else {
            &self.addressed
        };
        sealer.open(bytes)
    }

    /// Looks at bytes as [`open`](Seals::open) does, but returns tickets alone, and computes no
    /// checksum of other descriptors.
    #[inline(always)]
    pub fn open_ticket<'a>(&self, bytes: &'a [u8]) -> Option<View<'a>> {
        let bytes = bytes.try_into().ok()?;
        View(bytes)
            .is_ticket()
            .then(|| self.tickets.open(bytes))
            .flatten()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::descriptor::fields::GrantKind;
    use crate::wire::descriptor::layout::SessionId;
    use gpu_api::{BackendKind, DeviceUuid, ParticipantId, RegionId};

    fn names() -> Names {
        Names {
            backend: BackendKind::Cuda,
            kind: GrantKind::Addressed,
            device: DeviceUuid(*b"0123456789abcdef"),
            session: SessionId([0xa5; 16]),
            participant: ParticipantId(7),
        }
    }

    fn key() -> SealKey {
        SealKey::from_bytes(std::array::from_fn(|n| n as u8))
    }

    fn fields() -> Fields {
        let Names {
            backend,
            kind,
            device,
            session,
            participant,
        } = names();
        Fields {
            backend,
            kind,
            device,
            session,
            participant,
            file: 1,
            slot: 2,
            generation: 3,
            region: RegionId(4),
            offset: 4096,
            len: 512,
            fence: Some(Fence {
                file: 0,
                word: 6,
                value: 8,
            }),
        }
    }

    fn hash(key: &SealKey, bytes: &[u8]) -> u64 {
        let mut hash = SipHasher13::new_with_key(key.as_bytes());
        hash.write(bytes);
        hash.finish()
    }

    /// The vectors of `docs/WIRE.md`.
    #[test]
    fn the_algorithm_is_the_documents() {
        let document =
            std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/WIRE.md"))
                .expect("the document");
        let counting: [u8; 184] = std::array::from_fn(|n| n as u8);
        let sealed = Sealer::new(&key(), &names()).encode(&fields(), &[9; 64]);
        for (what, sum) in [
            ("no bytes", hash(&key(), &[])),
            ("bytes 00, 01 to b7", hash(&key(), &counting)),
            (
                "the descriptor below",
                u64::from_le_bytes(*sealed.as_bytes().last_chunk().expect("192 bytes")),
            ),
        ] {
            let row = format!("| {what} | `{sum:016x}` |");
            assert!(document.contains(&row), "docs/WIRE.md lacks {row}");
        }
        let hex: String = sealed
            .as_bytes()
            .iter()
            .map(|b| format!("{b:02x}"))
            .collect();
        for part in hex.as_bytes().chunks(64) {
            let part = std::str::from_utf8(part).expect("digits");
            assert!(document.contains(part), "docs/WIRE.md lacks {part}");
        }
    }

    #[test]
    fn the_checksum_is_of_all_bytes_that_are_not_zero() {
        for (user, covered) in [([9; 64], AT_ZERO), ([0; 64], AT_USER)] {
            let sealed = Sealer::new(&key(), &names()).encode(&fields(), &user);
            let (before, sum) = sealed.as_bytes().split_at(AT_SUM);
            assert_eq!(sum, hash(&key(), &before[..covered]).to_le_bytes());
            assert!(before[covered..].iter().all(|&byte| byte == 0));
        }
    }

    #[test]
    fn what_was_sealed_opens_and_nothing_else() {
        let sealer = Sealer::new(&key(), &names());
        for user in [[9; 64], [0; 64]] {
            let sealed = sealer.encode(&fields(), &user);
            let view = sealer.open(sealed.as_bytes()).expect("its own");
            assert_eq!(view.fields(), fields());
            for bit in 0..8 * BYTES {
                let mut altered = *sealed.as_bytes();
                altered[bit / 8] ^= 1 << (bit % 8);
                assert!(sealer.open(&altered).is_none(), "bit {bit}");
            }
        }
        let sealed = sealer.encode(&fields(), &[9; 64]);
        let other = SealKey::from_bytes([3; 16]);
        assert!(
            Sealer::new(&other, &names())
                .open(sealed.as_bytes())
                .is_none(),
            "another's key"
        );
    }

    #[test]
    fn a_kept_sealer_is_wiped_when_it_is_dropped() {
        let mut kept = std::mem::ManuallyDrop::new(KeptSealer(Sealer::new(&key(), &names())));
        // SAFETY: `ManuallyDrop::drop` asks that the value is not used again: its bytes alone are.
        unsafe { std::mem::ManuallyDrop::drop(&mut kept) };
        let start = (&raw const kept).cast::<u8>();
        let left = (0..size_of::<KeptSealer>()).filter(|&at| {
            // SAFETY: `add` asks for a place inside the variable.
            let byte = unsafe { start.add(at) };
            // SAFETY: `read` asks for a byte that was written: the drop has written all of them.
            let byte = unsafe { byte.read() };
            byte != 0
        });
        assert_eq!(left.count(), 0);
    }

    #[test]
    fn keys_are_drawn_and_never_shown() {
        let (a, b) = (
            SealKey::random().expect("random numbers"),
            SealKey::random().expect("random numbers"),
        );
        assert_ne!(a, b);
        let sealer = Sealer::new(&a, &names());
        let seals = Seals::new(sealer, sealer);
        assert_eq!(format!("{a:?}"), "SealKey(..)");
        assert_eq!(format!("{sealer:?}"), "Sealer(..)");
        assert_eq!(
            format!("{seals:?}"),
            "Seals { addressed: KeptSealer(Sealer(..)), tickets: KeptSealer(Sealer(..)) }"
        );
    }
}
