//! A carrier of descriptors can alter them, and mend every checksum that needs no key. A claim of
//! what it altered is an error that maps, queues and spends nothing; the true one stays claimable.

use std::hash::Hasher;
use std::time::Duration;

use backend_host::{HostBackend, HostConfig};
use gpu_api::{DeviceId, Error, Gpu};
use ipc_rc::{
    After, ClaimError, Claims, Descriptor, Participant, SentBlock, Session, ShareOptions, Stream,
    To, Wait,
};
use proptest::prelude::*;
use siphasher::sip::SipHasher13;

/// A wait that is longer will never end.
const PATIENCE: Duration = Duration::from_secs(120);
const LEN: u64 = 4096;
/// The bit of a region's number that says that it is only read.
const READ_ONLY: u64 = 1 << 62;

/// Where the fields lie, with their bytes: the table of `docs/WIRE.md`.
const FIELDS: [(&str, usize, usize); 20] = [
    ("magic", 0, 4),
    ("version", 4, 2),
    ("backend", 6, 1),
    ("kind", 7, 1),
    ("device", 8, 16),
    ("session", 24, 16),
    ("participant", 40, 8),
    ("file", 48, 4),
    ("slot", 52, 4),
    ("generation", 56, 8),
    ("region", 64, 8),
    ("offset", 72, 8),
    ("length", 80, 8),
    ("fence word", 88, 4),
    ("fence file", 92, 4),
    ("fence value", 96, 8),
    ("flags", 104, 8),
    ("user", 112, 64),
    ("padding", 176, 8),
    ("keyed checksum", 184, 8),
];

/// A session with a block between two others, and two participants that hold nothing.
struct World {
    session: Session,
    neighbours: [SentBlock; 2],
    block: SentBlock,
    work: Stream,
    reader: Participant,
    other: Participant,
    queue: Stream,
    _dir: tempfile::TempDir,
}

impl World {
    fn open() -> World {
        let dir = tempfile::tempdir().expect("a directory");
        let host = HostBackend::new(HostConfig::default()).expect("it opens");
        let gpu = Gpu::new(host, DeviceId(0)).expect("a device");
        let session = Session::builder(gpu.clone())
            .socket(dir.path().join("s"))
            .open()
            .expect("a session");
        let join = || {
            Participant::builder(gpu.clone())
                .connect(session.socket_path())
                .expect("connected")
        };
        let alloc = || session.alloc(LEN).expect("there is room");
        let (before, block, after) = (alloc(), alloc(), alloc());
        World {
            neighbours: [before, after],
            block,
            work: Stream::create(&gpu).expect("a stream"),
            reader: join(),
            other: join(),
            queue: Stream::create(&gpu).expect("a stream"),
            session,
            _dir: dir,
        }
    }

    /// Shares the block in each way that there is.
    fn shared(&self) -> [Descriptor; 6] {
        let reader = To::Participant(self.reader.id());
        let ticket = To::Ticket(Claims::Once);
        let (any, read_only) = (ShareOptions::default(), ShareOptions::default().read_only());
        [
            (reader, After::Done, any),
            (reader, After::Stream(&self.work), any),
            (ticket, After::Done, any),
            (ticket, After::Stream(&self.work), any),
            (reader, After::Done, read_only),
            (ticket, After::Done, read_only),
        ]
        .map(|(to, after, options)| self.block.share_with(to, after, &options).expect("shared"))
    }

    /// Tries to claim what was altered, in every way that there is.
    fn refuses(&self, bytes: &[u8], what: &str) {
        for wait in [Wait::None, Wait::Host, Wait::Stream(&self.queue)] {
            let error = self
                .reader
                .claim(bytes, wait, Some(PATIENCE))
                .expect_err(what);
            let is_said = matches!(
                error,
                ClaimError::Refused { .. }
                    | ClaimError::Backend(Error::BadDescriptor { .. } | Error::Mismatch { .. })
            );
            assert!(is_said, "{what}: {error:?}");
        }
        let tried = self.reader.try_claim(bytes, Wait::None).expect_err(what);
        assert!(!matches!(tried, ClaimError::WouldBlock), "{what} is asked");
        self.reader.prefetch(&[bytes]).expect("passed over");
        self.reader.abandon(bytes);
    }

    /// Checks that nothing was mapped or queued.
    fn is_untouched(&self) {
        assert_eq!(self.reader.mappings(), 0, "a region was mapped");
        for holder in self.session.stats().holders {
            assert_eq!(holder.mappings, 0, "the producer was asked for a region");
        }
        // It would wait for a value that never comes.
        self.queue.synchronize().expect("nothing was queued");
    }

    /// Claims what was not altered.
    fn claims(&self, shared: &Descriptor) {
        // A ticket by another than the one that tried: that one would find its own answer again.
        let claimant = match shared.is_ticket() {
            true => &self.other,
            false => &self.reader,
        };
        let held = claimant
            .claim(shared.as_bytes(), Wait::Host, Some(PATIENCE))
            .expect("the true one is claimable");
        assert_eq!(held.len(), LEN);
    }
}

/// Mends the checksum of altered bytes as far as a carrier can, in each way that it can.
fn mended(altered: [u8; 192], true_one: &[u8; 192]) -> Vec<[u8; 192]> {
    let covered = if altered[104] & 1 == 0 { 112 } else { 176 };
    let guesses = [[0; 16], [0xff; 16], *b"0123456789abcdef"];
    let guessed = guesses.map(|key| {
        let mut hash = SipHasher13::new_with_key(&key);
        hash.write(&altered[..covered]);
        let mut guessed = altered;
        guessed[184..].copy_from_slice(&hash.finish().to_le_bytes());
        guessed
    });
    let mut all = vec![altered];
    all.extend(guessed);
    all.retain(|bytes| bytes != true_one);
    all
}

/// What a carrier could write into a field of a descriptor: what it is in others, what is next to
/// it, and what has a meaning of its own.
fn values(world: &World, shared: &Descriptor, at: usize, len: usize) -> Vec<Vec<u8>> {
    let bytes = shared.as_bytes();
    let there = &bytes[at..at + len];
    let mut values: Vec<Vec<u8>> = vec![vec![0; len], vec![0xff; len]];
    let mut others: Vec<Descriptor> = world.shared().to_vec();
    for block in &world.neighbours {
        for to in [
            To::Participant(world.reader.id()),
            To::Participant(world.other.id()),
            To::Ticket(Claims::Unlimited),
        ] {
            others.push(block.share(to, After::Stream(&world.work)).expect("shared"));
        }
    }
    values.extend(others.iter().map(|d| d.as_bytes()[at..at + len].to_vec()));
    for bit in [0, 1, 7, 8 * len - 1] {
        let mut value = there.to_vec();
        value[bit / 8] ^= 1 << (bit % 8);
        values.push(value);
    }
    if let Ok(number) = <[u8; 8]>::try_from(there) {
        let number = u64::from_le_bytes(number);
        let numbers = [
            number.wrapping_sub(1),
            number.wrapping_add(1),
            number.wrapping_add(256),
            number / 2,
            number.wrapping_mul(2),
            1 << 20,
            (32 << 20) - LEN,
            32 << 20,
            1 << 40,
            1 << 60,
            number ^ READ_ONLY,
        ];
        values.extend(numbers.map(|number| number.to_le_bytes().to_vec()));
    }
    if let Ok(number) = <[u8; 4]>::try_from(there) {
        let number = u32::from_le_bytes(number);
        let numbers = [
            number.wrapping_sub(1),
            number.wrapping_add(1),
            511,
            512,
            8192,
        ];
        values.extend(numbers.map(|number| number.to_le_bytes().to_vec()));
    }
    values.retain(|value| value != there);
    values.sort();
    values.dedup();
    values
}

#[test]
fn every_field_altered_to_every_kind_of_value_is_refused_and_the_true_one_stays() {
    let world = World::open();
    let all = world.shared();
    let mut tried = 0;
    for (n, shared) in all.iter().enumerate() {
        let true_one = shared.as_bytes();
        for (field, at, len) in FIELDS {
            for value in values(&world, shared, at, len) {
                let mut altered = *true_one;
                altered[at..at + len].copy_from_slice(&value);
                for bytes in mended(altered, true_one) {
                    world.refuses(&bytes, &format!("{field} of {n} as {value:?}"));
                    tried += 1;
                }
            }
        }
        world.is_untouched();
    }
    assert!(tried > 3_000, "only {tried} were tried");
    all.iter().for_each(|shared| world.claims(shared));
}

#[test]
fn a_fence_taken_out_or_put_in_is_refused() {
    let world = World::open();
    let [plain, fenced, ..] = world.shared();
    let mut without = *fenced.as_bytes();
    without[88..104].copy_from_slice(&plain.as_bytes()[88..104]);
    let mut with = *plain.as_bytes();
    with[88..104].copy_from_slice(&fenced.as_bytes()[88..104]);
    // A value that never comes.
    let mut late = *fenced.as_bytes();
    late[96..104].copy_from_slice(&(1u64 << 60).to_le_bytes());
    for (altered, true_one) in [(without, &fenced), (with, &plain), (late, &fenced)] {
        for bytes in mended(altered, true_one.as_bytes()) {
            world.refuses(&bytes, "an altered fence");
        }
    }
    world.is_untouched();
    [plain, fenced]
        .iter()
        .for_each(|shared| world.claims(shared));
}

#[test]
fn what_is_only_read_is_not_made_writable_by_a_carrier_nor_the_other_way_round() {
    let world = World::open();
    for shared in world.shared() {
        let mut altered = *shared.as_bytes();
        let region = u64::from_le_bytes(*altered[64..].first_chunk().expect("8 bytes"));
        altered[64..72].copy_from_slice(&(region ^ READ_ONLY).to_le_bytes());
        for bytes in mended(altered, shared.as_bytes()) {
            if let Ok(read) = Descriptor::decode(&bytes) {
                assert_ne!(read.is_read_only(), shared.is_read_only());
            }
            world.refuses(&bytes, "another access");
        }
        world.is_untouched();
    }
    world
        .shared()
        .iter()
        .for_each(|shared| world.claims(shared));
}

#[test]
fn any_bytes_altered_together_are_refused_and_the_true_one_stays() {
    let world = World::open();
    let all = world.shared();
    // More than a host stream holds back is not needed: each case is 15 claims.
    let mut runner = proptest::test_runner::TestRunner::new(ProptestConfig::with_cases(128));
    let edit = (0..192usize, any::<u8>());
    let edits = (0..all.len(), proptest::collection::vec(edit, 1..24));
    let done = runner.run(&edits, |(n, edits)| {
        let true_one = all[n].as_bytes();
        let mut altered = *true_one;
        for (at, byte) in edits {
            altered[at] = byte;
        }
        for bytes in mended(altered, true_one) {
            world.refuses(&bytes, "altered");
        }
        world.is_untouched();
        Ok(())
    });
    done.expect("each is refused");
    all.iter().for_each(|shared| world.claims(shared));
}

#[test]
fn a_part_of_another_descriptor_is_refused() {
    let world = World::open();
    let reader = To::Participant(world.reader.id());
    let share = |block: &SentBlock| block.share(reader, After::Done).expect("shared");
    let (ours, theirs) = (share(&world.block), share(&world.neighbours[1]));
    // Both are the producer's and for the same participant: the parts are good, the whole is not.
    for at in (8..192).step_by(8) {
        let mut spliced = *ours.as_bytes();
        spliced[at..].copy_from_slice(&theirs.as_bytes()[at..]);
        if spliced == *theirs.as_bytes() || spliced == *ours.as_bytes() {
            continue;
        }
        for bytes in mended(spliced, ours.as_bytes()) {
            world.refuses(&bytes, &format!("spliced at {at}"));
        }
    }
    world.is_untouched();
    world.claims(&ours);
    world.claims(&theirs);
}

#[test]
fn the_device_is_named_when_it_is_another() {
    let world = World::open();
    let all = world.shared();
    for shared in &all {
        let mut altered = *shared.as_bytes();
        altered[8] ^= 1;
        let error = world
            .reader
            .claim(&altered, Wait::None, Some(PATIENCE))
            .expect_err("another device");
        let text = error.to_string();
        assert!(
            matches!(
                error,
                ClaimError::Backend(Error::BadDescriptor {
                    what: "the device",
                    ..
                })
            ) && text.contains(&world.session.gpu().uuid().to_string()),
            "{text}"
        );
    }
    world.is_untouched();
    all.iter().for_each(|shared| world.claims(shared));
}

#[test]
fn a_descriptor_for_another_participant_names_both() {
    let world = World::open();
    let ours = world
        .block
        .share(To::Participant(world.reader.id()), After::Done)
        .expect("shared");
    let theirs = world
        .other
        .claim(ours.as_bytes(), Wait::None, Some(PATIENCE))
        .expect_err("it is the reader's");
    let (to, by) = (world.reader.id().to_string(), world.other.id().to_string());
    assert!(
        matches!(&theirs, ClaimError::Refused { why, .. } if why.contains(&to) && why.contains(&by)),
        "{theirs}"
    );
    // With the number of the other written in: its key is another.
    let mut altered = *ours.as_bytes();
    altered[40..48].copy_from_slice(&world.other.id().0.to_le_bytes());
    for bytes in mended(altered, ours.as_bytes()) {
        let error = world
            .other
            .claim(&bytes, Wait::None, Some(PATIENCE))
            .expect_err("sealed with another's key");
        assert!(
            matches!(error, ClaimError::Backend(Error::BadDescriptor { .. })),
            "{error:?}"
        );
    }
    world.is_untouched();
    world.claims(&ours);
}

#[test]
fn an_altered_descriptor_cancels_nothing() {
    let world = World::open();
    for shared in world.shared() {
        let mut altered = *shared.as_bytes();
        (altered[104], altered[112]) = (1, altered[112] ^ 1);
        for bytes in mended(altered, shared.as_bytes()) {
            let descriptor = Descriptor::decode(&bytes).expect("as a producer could write it");
            let refused = world.block.cancel(&descriptor).expect_err("it was altered");
            assert!(matches!(refused, Error::BadDescriptor { .. }), "{refused}");
        }
        world.claims(&shared);
    }
}
