//! The slot under a model checker: `RUSTFLAGS="--cfg gpu_ipc_loom" cargo test -p gpu-ipc-transport
//! --test loom_slot`.
//!
//! The payload is a plain cell, so a missing Acquire or Release is a data race that loom reports.
#![cfg(gpu_ipc_loom)]

use loom::cell::UnsafeCell;
use loom::sync::Arc;
use loom::sync::atomic::AtomicU64;
use loom::thread;
use transport::shared::slot::Claim;
use transport::shared::slot::Generation;
use transport::shared::slot::Revoke;
use transport::shared::slot::Seen;
use transport::shared::slot::Slot;

struct Shared {
    slot: Slot<AtomicU64>,
    block: UnsafeCell<u32>,
}

// SAFETY: `block` is touched only as the slot's protocol allows, which is what loom checks here.
unsafe impl Sync for Shared {}

fn shared() -> (Arc<Shared>, Generation) {
    let shared = Shared {
        slot: Slot::new(AtomicU64::new(0)),
        block: UnsafeCell::new(0),
    };
    (Arc::new(shared), Generation::ZERO.next())
}

impl Shared {
    fn write(&self, value: u32) {
        self.block.with_mut(|block| {
            // SAFETY: loom checks that nobody else touches the cell meanwhile.
            unsafe { *block = value }
        });
    }

    fn read(&self) -> u32 {
        self.block.with(|block| {
            // SAFETY: loom checks that nobody writes the cell meanwhile.
            unsafe { *block }
        })
    }
}

/// What the producer wrote before the grant is seen by the claimant: GRANT pairs with CLAIM.
#[test]
fn a_claim_sees_what_was_granted() {
    loom::model(|| {
        let (shared, g) = shared();
        let consumer = {
            let shared = shared.clone();
            thread::spawn(move || {
                if shared.slot.claim(g) == Claim::Held {
                    assert_eq!(shared.read(), 7);
                }
            })
        };
        shared.write(7);
        shared.slot.grant(g);
        consumer.join().unwrap();
    });
}

/// What the consumer did before the release happens before the producer's reuse: RELEASE pairs with
/// READ.
#[test]
fn a_retirement_sees_what_was_done_before_the_release() {
    loom::model(|| {
        let (shared, g) = shared();
        shared.slot.grant(g);
        let consumer = {
            let shared = shared.clone();
            thread::spawn(move || {
                assert_eq!(shared.slot.claim(g), Claim::Held);
                shared.write(1);
                shared.slot.release(g);
            })
        };
        if shared.slot.read(g) == Seen::Released {
            shared.write(2);
        }
        consumer.join().unwrap();
    });
}

/// Of a claim and a revocation exactly one wins.
#[test]
fn a_claim_and_a_revocation_never_both_win() {
    loom::model(|| {
        let (shared, g) = shared();
        shared.slot.grant(g);
        let consumer = {
            let shared = shared.clone();
            thread::spawn(move || {
                let claimed = shared.slot.claim(g) == Claim::Held;
                if claimed {
                    shared.write(1);
                }
                claimed
            })
        };
        let revoked = shared.slot.revoke(g) == Revoke::Revoked;
        if revoked {
            shared.write(2);
        }
        let claimed = consumer.join().unwrap();
        assert!(claimed != revoked);
    });
}

/// Of two claims of one descriptor exactly one wins.
#[test]
fn two_claims_never_both_win() {
    loom::model(|| {
        let (shared, g) = shared();
        shared.slot.grant(g);
        let other = {
            let shared = shared.clone();
            thread::spawn(move || shared.slot.claim(g) == Claim::Held)
        };
        let first = shared.slot.claim(g) == Claim::Held;
        assert!(first != other.join().unwrap());
    });
}

/// A claim of an older generation never takes the slot's next lease.
#[test]
fn a_stale_claim_takes_nothing() {
    loom::model(|| {
        let (shared, g) = shared();
        shared.slot.grant(g);
        assert_eq!(shared.slot.revoke(g), Revoke::Revoked);
        let stale = {
            let shared = shared.clone();
            thread::spawn(move || shared.slot.claim(g))
        };
        shared.slot.grant(g.next());
        assert!(matches!(
            stale.join().unwrap(),
            Claim::Revoked | Claim::Stale
        ));
        assert_eq!(shared.slot.read(g.next()), Seen::Granted);
    });
}
