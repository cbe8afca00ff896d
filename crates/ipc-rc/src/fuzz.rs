//! Fuzz targets: every function that reads what another process wrote. Not part of the API.
//!
//! The same functions are driven by the targets in `fuzz/`, which search for inputs, and by this
//! file's tests, which run what is kept there and a thousand inputs made from each. None may panic,
//! whatever the bytes.

use std::sync::Arc;
use std::time::Duration;

use gpu_api::{BackendKind, DeviceUuid, ParticipantId};

use crate::producer::blocks::reclaimed::ReclaimedBlocks;
use crate::producer::grants::heap_file::HeapFile;
use crate::producer::grants::ledger::{Ledger, Refusal};
use crate::producer::grants::slot_group::Effort;
use transport::os::clock::Tick;
use transport::shared::counter_file::{GROUP, SlotFile};
use transport::shared::slot::{Claim, Generation, Seen, SlotState, decode};
use transport::wire::descriptor::{Descriptor, GrantKind, Names, SealKey, Sealer, SessionId};
use transport::wire::lease_address::LeaseAddress;
use transport::wire::message::{MOST_BYTES, ToParticipant, ToProducer};

/// Reads bytes as a descriptor, as they are and with a good keyed checksum; what is read has the
/// meaning of these bytes and of no others. Says whether there is one.
pub fn descriptor(bytes: &[u8]) -> bool {
    let Ok(descriptor) = Descriptor::decode(bytes) else {
        return false;
    };
    assert_eq!(descriptor.as_bytes(), bytes);
    let fields = descriptor.fields();
    let sealer = sealer(&fields.names());
    let again = sealer.encode(&fields, descriptor.user());
    let (before, after) = (descriptor.as_bytes(), again.as_bytes());
    assert_eq!(
        before[..184],
        after[..184],
        "two byte strings have one meaning"
    );
    let view = sealer.open(after).expect("it was sealed by this key");
    assert_eq!(view.fields(), fields);
    assert_eq!(sealer.open(before).is_some(), before == after);
    true
}

/// Makes a sealer whose key is known: what is fuzzed has it.
pub(crate) fn sealer(names: &Names) -> Sealer {
    Sealer::new(&SealKey::from_bytes([0x5a; 16]), names)
}

/// The sealer of a participant of no session.
pub(crate) fn sealer_of(participant: ParticipantId) -> Sealer {
    sealer(&Names {
        backend: BackendKind::Host,
        kind: GrantKind::Addressed,
        device: DeviceUuid([0; 16]),
        session: SessionId([0; 16]),
        participant,
    })
}

/// Reads bytes as a message to a producer; the first says how many file descriptors came with it.
/// Returns the number of the type of a message that has a meaning.
pub fn to_producer(bytes: &[u8]) -> Option<u8> {
    let (&fds, packet) = bytes.split_first()?;
    let message = ToProducer::decode(packet, usize::from(fds)).ok()?;
    let mut again = [0; MOST_BYTES];
    let len = message.encode(&mut again);
    assert_eq!(&again[..len], packet, "two byte strings have one meaning");
    assert_eq!(message.fds(), usize::from(fds));
    Some(packet[4])
}

/// Reads bytes as a message to a participant, likewise.
pub fn to_participant(bytes: &[u8]) -> Option<u8> {
    let (&fds, packet) = bytes.split_first()?;
    let message = ToParticipant::decode(packet, usize::from(fds)).ok()?;
    let mut again = [0; MOST_BYTES];
    let len = message.encode(&mut again);
    assert_eq!(&again[..len], packet, "two byte strings have one meaning");
    assert_eq!(message.fds(), usize::from(fds));
    Some(packet[4])
}

/// Whose the ledgers are.
const OWNER: ParticipantId = ParticipantId(1);

/// A block, by its number; the count is of its leases.
type Block = Arc<usize>;

/// A participant's ledger and file, as the producer has them.
struct Side {
    ledger: Ledger<Block, HeapFile>,
    file: Arc<HeapFile>,
    /// The grants, with the block's number, in the order of the grants.
    granted: Vec<(LeaseAddress, usize)>,
}

impl Side {
    fn new() -> Side {
        let ledger = Ledger::new();
        ledger.open(OWNER, sealer_of(OWNER));
        let file = Arc::new(HeapFile::new(3 * GROUP));
        ledger.add_file(&file);
        Side {
            ledger,
            file,
            granted: Vec::new(),
        }
    }
}

/// An honest participant's lease.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Stands {
    InFlight,
    Held,
    Released,
    Ended,
}

/// Runs a producer with an honest participant, and one that writes what the bytes say anywhere into
/// its own file. Returns how many words were found corrupt.
///
/// Three bytes are a step: which, and a number that it uses; some steps take a word of eight bytes
/// more. Whatever is written, the honest one's leases stand where it left them, no block comes back
/// more often than it was lent, and at the end of the hostile one all of its come back.
pub fn counter_file(bytes: &[u8]) -> usize {
    let (mut hostile, mut honest) = (Side::new(), Side::new());
    let mut stands: Vec<Stands> = Vec::new();
    let mut lent: Vec<Block> = Vec::new();
    let mut now = Tick::default();
    let mut rest = bytes;
    // Both participants' blocks, by number; true for the honest one's.
    let mut is_honest: Vec<bool> = Vec::new();
    let mut returned: Vec<u32> = Vec::new();
    while let Some((&[step, low, high], after)) = rest.split_first_chunk::<3>() {
        rest = after;
        let number = usize::from(u16::from_le_bytes([low, high]));
        let mut word = || {
            let mut bytes = [0; 8];
            let len = rest.len().min(8);
            bytes[..len].copy_from_slice(&rest[..len]);
            rest = &rest[len..];
            u64::from_le_bytes(bytes)
        };
        let mut found: ReclaimedBlocks<Block> = ReclaimedBlocks::new();
        let pick = |side: &Side| {
            (!side.granted.is_empty()).then(|| side.granted[number % side.granted.len()].0)
        };
        match step % 12 {
            kind @ 0..=1 => {
                let side = if kind == 0 { &mut hostile } else { &mut honest };
                let block: Block = Arc::new(is_honest.len());
                let lapses = (number % 4 == 0).then(|| Duration::from_millis(number as u64));
                match side.ledger.grant(OWNER, &block, now, lapses) {
                    Ok(entry) => {
                        side.granted.push((entry, *block));
                        is_honest.push(kind == 1);
                        returned.push(0);
                        lent.push(block);
                        if kind == 1 {
                            stands.push(Stands::InFlight);
                        }
                    }
                    Err(Refusal::Full) => {}
                    Err(Refusal::Gone) => unreachable!("nobody was closed"),
                }
            }
            2 => hostile.file.scribble_slot(number, word()),
            3 => hostile.file.scribble_dirty(number, word()),
            4 => {
                // What is nearly right: a granted slot's own generation in some state.
                if let Some(entry) = pick(&hostile) {
                    let word = (entry.generation.get() << 3) | (u64::from(step / 12) % 8);
                    hostile.file.scribble_slot(entry.slot as usize, word);
                    hostile.file.dirty()[(entry.slot / GROUP) as usize].mark();
                }
            }
            5 => {
                if !honest.granted.is_empty() {
                    let at = number % honest.granted.len();
                    let entry = honest.granted[at].0;
                    let claim = honest.file.slots()[entry.slot as usize].claim(entry.generation);
                    match stands[at] {
                        Stands::InFlight => {
                            assert_eq!(claim, Claim::Held);
                            stands[at] = Stands::Held;
                        }
                        _ => assert_ne!(claim, Claim::Held, "a lease was claimed twice"),
                    }
                }
            }
            6 => {
                if !honest.granted.is_empty() {
                    let at = number % honest.granted.len();
                    if stands[at] == Stands::Held {
                        let entry = honest.granted[at].0;
                        honest.file.slots()[entry.slot as usize].release(entry.generation);
                        honest.file.dirty()[(entry.slot / GROUP) as usize].mark();
                        stands[at] = Stands::Released;
                    }
                }
            }
            7 => {
                let effort = if number % 2 == 0 {
                    Effort::Marked
                } else {
                    Effort::Everything
                };
                hostile.ledger.collect(effort, &mut found);
                honest.ledger.collect(effort, &mut found);
            }
            8 => {
                hostile.ledger.glance(number, 1 + number % 3, &mut found);
                honest.ledger.glance(number, 1 + number % 3, &mut found);
            }
            9 => {
                let side = if number % 2 == 0 { &hostile } else { &honest };
                found.extend(pick(side).and_then(|entry| side.ledger.revoke(entry)));
            }
            10 => {
                now = now.after(Duration::from_millis(number as u64));
                let mut lapsed = Vec::new();
                hostile.ledger.expire(now, &mut found, &mut lapsed);
                honest.ledger.expire(now, &mut found, &mut lapsed);
            }
            _ => {
                // What it sends may name any lease.
                let generation = Generation::new(word() >> 3).expect("61 bits");
                let entry = LeaseAddress {
                    file: u32::from(step / 12) % 3,
                    slot: number as u32,
                    generation,
                };
                hostile
                    .ledger
                    .with_block(entry, |block| assert!(!is_honest[**block]));
                if let Some(entry) = pick(&hostile) {
                    hostile
                        .ledger
                        .with_block(entry, |block| assert!(!is_honest[**block]));
                }
                let tally = hostile.ledger.tally(now, |_| 1);
                assert_eq!(tally.bytes, tally.in_flight + tally.held + tally.corrupt);
            }
        }
        for block in found.drain() {
            returned[*block] += 1;
            assert_eq!(returned[*block], 1, "a block came back twice");
            if is_honest[*block] {
                let at = honest
                    .granted
                    .iter()
                    .position(|(_, number)| *number == *block)
                    .expect("it was granted");
                assert!(
                    matches!(stands[at], Stands::InFlight | Stands::Released),
                    "{:?} was ended",
                    stands[at]
                );
                stands[at] = Stands::Ended;
            } else {
                // Barred as long as its word says neither: nobody proved that the holder is dead.
                let entry = hostile
                    .granted
                    .iter()
                    .find(|(_, number)| *number == *block)
                    .expect("it was granted")
                    .0;
                let word = match hostile.file.slots()[entry.slot as usize].read(entry.generation) {
                    Seen::Released => continue,
                    Seen::Corrupt(word) => word,
                    seen => unreachable!("{seen:?} came back"),
                };
                assert_eq!(
                    decode(word),
                    Some((SlotState::Revoked, entry.generation)),
                    "a barred block came back"
                );
            }
        }
    }
    // The hostile one dies; the honest one's leases are not touched by that.
    let mut found: ReclaimedBlocks<Block> = ReclaimedBlocks::new();
    hostile.ledger.close(&mut found);
    hostile.ledger.bury(&mut found);
    for block in found.drain() {
        returned[*block] += 1;
        assert_eq!(returned[*block], 1, "a block came back twice");
        assert!(!is_honest[*block]);
    }
    assert!(hostile.ledger.is_empty());
    for (at, &(_, number)) in honest.granted.iter().enumerate() {
        let (out, ended) = (
            Arc::strong_count(&lent[number]) - 1,
            stands[at] == Stands::Ended,
        );
        assert_eq!(
            out,
            usize::from(!ended),
            "the count of an honest one's block, {:?}",
            stands[at]
        );
    }
    for &(_, number) in &hostile.granted {
        assert_eq!(
            (returned[number], Arc::strong_count(&lent[number])),
            (1, 1),
            "a block was lost"
        );
    }
    assert_eq!(honest.ledger.corrupt_words(), 0);
    hostile.ledger.corrupt_words()
}

#[cfg(test)]
#[path = "fuzz_tests.rs"]
mod tests;
