//! What a ledger does at its edges: full files, shards, threads, burials, and the participant that
//! follows. `ledger_property` has what it does in any order.

use std::collections::BTreeSet;
use std::sync::Arc;

use super::*;
use crate::fuzz::sealer_of;
use crate::producer::grants::heap_file::HeapFile;
use transport::shared::slot::Claim;

type Block = Arc<u32>;

const OWNER: ParticipantId = ParticipantId(1);

#[test]
fn a_full_ledger_says_so_and_goes_on_in_the_next_file() {
    let ledger = Ledger::<Block, HeapFile>::new();
    ledger.open(OWNER, sealer_of(OWNER));
    let block = Arc::new(0);
    ledger.add_file(&Arc::new(HeapFile::new(GROUP)));
    for _ in 0..GROUP {
        ledger
            .grant(OWNER, &block, Tick::default(), None)
            .expect("a free slot");
    }
    assert_eq!(
        ledger.grant(OWNER, &block, Tick::default(), None),
        Err(Refusal::Full)
    );
    ledger.add_file(&Arc::new(HeapFile::new(2 * GROUP)));
    let entry = ledger
        .grant(OWNER, &block, Tick::default(), None)
        .expect("a slot of the second file");
    assert_eq!(entry.file, 1);
    assert!(ledger.revoke(entry).is_some());
}

#[test]
fn threads_that_share_at_once_get_different_slots() {
    let ledger = Arc::new(Ledger::<Block, HeapFile>::new());
    ledger.open(OWNER, sealer_of(OWNER));
    ledger.add_file(&Arc::new(HeapFile::new(FIRST_SLOTS)));
    let block = Arc::new(0);
    let threads: Vec<_> = (0..8)
        .map(|_| {
            let (ledger, block) = (ledger.clone(), block.clone());
            std::thread::spawn(move || {
                let grant = || {
                    ledger
                        .grant(OWNER, &block, Tick::default(), None)
                        .expect("a free slot")
                        .slot
                };
                (0..1_000).map(|_| grant()).collect::<Vec<u32>>()
            })
        })
        .collect();
    let mut slots: Vec<u32> = threads
        .into_iter()
        .flat_map(|t| t.join().expect("no panic"))
        .collect();
    slots.sort_unstable();
    slots.dedup();
    assert_eq!(slots.len(), 8_000);
    assert_eq!(Arc::strong_count(&block), 8_001);
}

#[test]
fn threads_are_spread_over_the_shards_and_each_keeps_its_own() {
    let begin = || {
        std::thread::spawn(|| {
            let own = own_shard();
            assert!((0..100).all(|_| own_shard() == own));
            own
        })
    };
    let own: BTreeSet<usize> = (0..64).map(|_| begin().join().expect("no panic")).collect();
    assert!(own.len() > SHARDS / 2, "{own:?}");
}

#[test]
fn a_thread_leaves_its_shard_for_good_only_when_that_is_full() {
    let ledger = Ledger::new();
    ledger.open(OWNER, sealer_of(OWNER));
    ledger.add_file(&Arc::new(HeapFile::new(FIRST_SLOTS)));
    let block: Block = Arc::new(0);
    let each = FIRST_SLOTS / SHARDS as u32;
    let shard = || {
        ledger
            .grant(OWNER, &block, Tick::default(), None)
            .expect("a free slot")
            .slot
            / each
    };
    let own = shard();
    let locked = ledger.shards[own as usize].shard.acquire();
    assert_ne!(shard(), own, "somebody is in it at this moment");
    drop(locked);
    for _ in 1..each {
        assert_eq!(shard(), own);
    }
    let next = shard();
    assert_ne!(next, own, "it is full");
    assert_eq!(shard(), next);
}

#[test]
fn a_grant_that_races_a_burial_is_seen_by_it_or_refused() {
    for _ in 0..200 {
        let ledger = Arc::new(Ledger::<Block, HeapFile>::new());
        ledger.open(OWNER, sealer_of(OWNER));
        ledger.add_file(&Arc::new(HeapFile::new(FIRST_SLOTS)));
        let block = Arc::new(0);
        let granting = {
            let (ledger, block) = (ledger.clone(), block.clone());
            std::thread::spawn(
                move || while ledger.grant(OWNER, &block, Tick::default(), None).is_ok() {},
            )
        };
        let mut out = ReclaimedBlocks::new();
        ledger.close(&mut out);
        granting.join().expect("no panic");
        ledger.bury(&mut out);
        drop(out);
        assert!(ledger.is_empty());
        assert_eq!(
            Arc::strong_count(&block),
            1,
            "a lease was granted to the dead and forgotten"
        );
    }
}

#[test]
fn the_sizes_of_files_double_up_to_a_limit() {
    let sizes: Vec<u32> = (0..6)
        .map(Ledger::<Block, HeapFile>::next_file_slots)
        .collect();
    assert_eq!(sizes, [8_192, 16_384, 32_768, 65_536, 65_536, 65_536]);
    assert_eq!(
        Ledger::<Block, HeapFile>::next_file_slots(u32::MAX),
        MOST_SLOTS
    );
}

#[test]
fn a_ledger_that_was_left_is_its_next_owners_alone() {
    let ledger = Ledger::new();
    let block: Block = Arc::new(0);
    let next = ParticipantId(OWNER.0 + 1);
    assert_eq!(
        ledger.grant(OWNER, &block, Tick::default(), None),
        Err(Refusal::Gone),
        "nobody's"
    );
    ledger.open(OWNER, sealer_of(OWNER));
    ledger.add_file(&Arc::new(HeapFile::new(GROUP)));
    let first = ledger
        .grant(OWNER, &block, Tick::default(), None)
        .expect("a free slot");
    assert_eq!(
        ledger.grant(next, &block, Tick::default(), None),
        Err(Refusal::Gone),
        "another's"
    );
    let mut out = ReclaimedBlocks::new();
    ledger.close(&mut out);
    assert_eq!(out.len(), 1);
    out.drain().for_each(drop);
    ledger.leave();
    ledger.open(next, sealer_of(next));
    ledger.add_file(&Arc::new(HeapFile::new(GROUP)));
    assert_eq!(
        ledger.grant(OWNER, &block, Tick::default(), None),
        Err(Refusal::Gone),
        "it left"
    );
    assert!(
        ledger.with_block(first, |_| ()).is_none(),
        "a lease of the one before"
    );
    assert!(ledger.grant(next, &block, Tick::default(), None).is_ok());
}

#[test]
fn a_file_that_came_too_late_is_not_the_next_participants() {
    let ledger: Ledger<Block, HeapFile> = Ledger::new();
    ledger.open(OWNER, sealer_of(OWNER));
    let mut out = ReclaimedBlocks::new();
    ledger.close(&mut out);
    ledger.bury(&mut out);
    ledger.leave();
    ledger.add_file(&Arc::new(HeapFile::new(GROUP)));
    let next = ParticipantId(2);
    ledger.open(next, sealer_of(next));
    let file = Arc::new(HeapFile::new(GROUP));
    ledger.add_file(&file);
    let entry = ledger
        .grant(next, &Arc::new(7), Tick::default(), None)
        .expect("there is room");
    assert_eq!(entry.file, 0);
    assert_eq!(
        file.slots()[entry.slot as usize].claim(entry.generation),
        Claim::Held
    );
}

#[test]
fn a_grant_without_a_time_to_live_outlasts_every_clock() {
    let ledger = Ledger::<Block, HeapFile>::new();
    ledger.open(OWNER, sealer_of(OWNER));
    let file = Arc::new(HeapFile::new(FIRST_SLOTS));
    ledger.add_file(&file);
    // 300 days after the clock began: more than 32 bits of 4 ms.
    let now = Tick::default().after(Duration::from_secs(300 * 86_400));
    let (forever, hour) = (Arc::new(1), Duration::from_secs(3_600));
    let kept = ledger
        .grant(OWNER, &forever, now, None)
        .expect("a free slot");
    let brief = ledger
        .grant(OWNER, &Arc::new(2), now, Some(hour))
        .expect("a free slot");
    let (mut out, mut lapsed) = (ReclaimedBlocks::new(), Vec::new());
    assert_eq!(
        ledger.expire(now, &mut out, &mut lapsed),
        now.after(hour),
        "when to come again"
    );
    assert!(lapsed.is_empty());
    assert_eq!(
        ledger.expire(now.after(hour), &mut out, &mut lapsed),
        Tick::NEVER
    );
    assert_eq!(lapsed, [brief]);
    assert_eq!(ledger.tally(now.after(hour), |_| 1).oldest, hour);
    assert_eq!(
        file.slots()[kept.slot as usize].claim(kept.generation),
        Claim::Held
    );
}

#[test]
fn a_claimed_lease_is_not_looked_at_again_for_its_time() {
    let ledger = Ledger::<Block, HeapFile>::new();
    ledger.open(OWNER, sealer_of(OWNER));
    let file = Arc::new(HeapFile::new(FIRST_SLOTS));
    ledger.add_file(&file);
    let (now, time) = (Tick::default(), Duration::from_secs(1));
    let first = ledger
        .grant(OWNER, &Arc::new(1), now, Some(time))
        .expect("a free slot");
    let claimed = ledger
        .grant(OWNER, &Arc::new(2), now, Some(2 * time))
        .expect("a free slot");
    assert_eq!(
        file.slots()[claimed.slot as usize].claim(claimed.generation),
        Claim::Held
    );
    let (mut out, mut lapsed) = (ReclaimedBlocks::new(), Vec::new());
    assert_eq!(
        ledger.expire(now.after(time), &mut out, &mut lapsed),
        Tick::NEVER
    );
    assert_eq!(lapsed, [first]);
}
