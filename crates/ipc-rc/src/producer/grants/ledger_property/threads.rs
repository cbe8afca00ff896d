//! Threads that grant, claim, release, revoke and collect at once, as they do in a session. There
//! is no map: each lease says itself where it stands, and ends once.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Duration;

use crate::fuzz::sealer_of;
use crate::producer::blocks::count::Count;
use crate::producer::blocks::reclaimed::ReclaimedBlocks;
use crate::producer::grants::heap_file::HeapFile;
use crate::producer::grants::ledger::{Ledger, Refusal};
use crate::producer::grants::slot_group::Effort;
use gpu_api::ParticipantId;
use transport::os::clock::Tick;
use transport::shared::counter_file::{GROUP, SlotFile};
use transport::shared::slot::Claim;
use transport::wire::lease_address::LeaseAddress;

const OWNER: ParticipantId = ParticipantId(1);
const GRANTED: u8 = 0;
const HELD: u8 = 1;
const RELEASED: u8 = 2;
const ENDED: u8 = 3;

/// Leases that each producing thread grants.
const EACH: usize = if cfg!(miri) { 50 } else { 20_000 };
const PAIRS: usize = 3;

/// A lease as its block has it.
#[derive(Debug)]
struct Lease {
    stands: AtomicU8,
    count: Arc<Count>,
}

impl Drop for Lease {
    fn drop(&mut self) {
        self.count.sub(64);
    }
}

struct Shared {
    ledger: Ledger<Arc<Lease>, HeapFile>,
    file: Arc<HeapFile>,
    count: Arc<Count>,
    ended: AtomicUsize,
    revoked: AtomicUsize,
    done: AtomicBool,
    failed: AtomicBool,
}

/// Tells the others when its thread panics: nobody waits for what will not come.
struct Alarm<'a>(&'a AtomicBool);

impl Drop for Alarm<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.store(true, Ordering::Release);
        }
    }
}

impl Shared {
    /// Ends what a collect found: each was let go of, and none ended before.
    fn end(&self, mut out: ReclaimedBlocks<Arc<Lease>>) {
        for lease in out.drain() {
            let stood = lease.stands.swap(ENDED, Ordering::AcqRel);
            assert_eq!(stood, RELEASED, "a lease ended that stood at {stood}");
            self.ended.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Grants, hands every lease to a consumer, and takes some back.
    fn produce(&self, number: usize, consumer: &Sender<(Arc<Lease>, LeaseAddress)>) {
        let _alarm = Alarm(&self.failed);
        for n in 0..EACH {
            self.count.add(64);
            let lease = Arc::new(Lease {
                stands: AtomicU8::new(GRANTED),
                count: self.count.clone(),
            });
            // A mark that was lost may leave the ledger full for ever.
            let mut tries = 0;
            let (now, time_to_live) = (Tick::default(), Some(Duration::from_secs(9)));
            let entry = loop {
                let begun = if n.is_multiple_of(3) {
                    self.ledger.begin()
                } else {
                    None
                };
                let granted =
                    begun.and_then(|mut shard| shard.grant(OWNER, &lease, now, time_to_live).ok());
                match granted
                    .map_or_else(|| self.ledger.grant(OWNER, &lease, now, time_to_live), Ok)
                {
                    Ok(entry) => break entry,
                    Err(Refusal::Full) => {
                        tries += 1;
                        assert!(tries < 20_000_000, "nothing comes back any more");
                        assert!(
                            !self.failed.load(Ordering::Acquire),
                            "another thread found something"
                        );
                        std::thread::yield_now();
                    }
                    Err(Refusal::Gone) => panic!("nobody died"),
                }
            };
            consumer.send((lease.clone(), entry)).expect("a consumer");
            if (n + number).is_multiple_of(5) && self.ledger.revoke(entry).is_some() {
                let stood = lease.stands.swap(ENDED, Ordering::AcqRel);
                assert_eq!(stood, GRANTED, "a revoked lease stood at {stood}");
                self.revoked.fetch_add(1, Ordering::Relaxed);
            }
        }
    }

    /// Claims what comes, holds the last few, and lets go.
    fn consume(&self, leases: &Receiver<(Arc<Lease>, LeaseAddress)>) {
        let _alarm = Alarm(&self.failed);
        let mut held = std::collections::VecDeque::new();
        let let_go = |(lease, entry): (Arc<Lease>, LeaseAddress)| {
            let stood = lease.stands.swap(RELEASED, Ordering::AcqRel);
            assert_eq!(stood, HELD, "a lease that was held stood at {stood}");
            self.file.slots()[entry.slot as usize].release(entry.generation);
            self.file.dirty()[(entry.slot / GROUP) as usize].mark();
        };
        for (lease, entry) in leases {
            let slot = &self.file.slots()[entry.slot as usize];
            if slot.claim(entry.generation) == Claim::Held {
                let stood = lease.stands.swap(HELD, Ordering::AcqRel);
                assert_eq!(stood, GRANTED, "a claimed lease stood at {stood}");
                held.push_back((lease, entry));
            }
            if held.len() > 7 {
                let_go(held.pop_front().expect("some"));
            }
        }
        held.into_iter().for_each(let_go);
    }
}

#[test]
fn threads_that_do_everything_at_once_end_every_lease_once() {
    // Two groups in some shards: full at times.
    let file = Arc::new(HeapFile::new(20 * GROUP));
    let count = Arc::new(Count::default());
    let (ended, revoked, done, failed) = Default::default();
    let shared = Shared {
        ledger: Ledger::new(),
        file,
        count,
        ended,
        revoked,
        done,
        failed,
    };
    shared.ledger.open(OWNER, sealer_of(OWNER));
    shared.ledger.add_file(&shared.file);
    std::thread::scope(|scope| {
        let shared = &shared;
        let collectors = [Effort::Marked, Effort::Everything].map(|effort| {
            scope.spawn(move || {
                let _alarm = Alarm(&shared.failed);
                let mut shard = 0;
                while !shared.done.load(Ordering::Acquire) {
                    let mut out = ReclaimedBlocks::new();
                    match effort {
                        Effort::Marked => shared.ledger.collect(effort, &mut out),
                        Effort::Everything => shared.ledger.glance(shard, 4, &mut out),
                    }
                    shard += 1;
                    shared.end(out);
                    std::thread::yield_now();
                }
            })
        });
        let pairs: Vec<_> = (0..PAIRS)
            .flat_map(|number| {
                let (to, from) = channel();
                [
                    scope.spawn(move || shared.produce(number, &to)),
                    scope.spawn(move || shared.consume(&from)),
                ]
            })
            .collect();
        let worked: Vec<_> = pairs.into_iter().map(|thread| thread.join()).collect();
        shared.done.store(true, Ordering::Release);
        let collected = collectors.map(|thread| thread.join());
        assert!(
            worked.iter().chain(&collected).all(Result::is_ok),
            "a thread found something"
        );
    });
    let mut out = ReclaimedBlocks::new();
    shared.ledger.collect(Effort::Marked, &mut out);
    shared.end(out);
    let (ended, revoked) = (shared.ended.into_inner(), shared.revoked.into_inner());
    assert_eq!(
        ended + revoked,
        PAIRS * EACH,
        "{ended} ended, {revoked} revoked: a mark was lost"
    );
    assert!(ended > 0 && shared.ledger.is_empty());
    assert_eq!(shared.count.sum(), Default::default());
}
