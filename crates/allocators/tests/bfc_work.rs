//! Work of several streams on one allocation: nobody gets the bytes before all of it is done.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use allocators::{Allocator, Bfc, BfcOptions, Placed, Request, Simulated, Work};
use gpu_api::{Error, StreamIdentity};

const BLOCK: u64 = 1 << 20;
const A: StreamIdentity = StreamIdentity(1);
const B: StreamIdentity = StreamIdentity(2);

/// Room for a single block.
fn bfc() -> Bfc<Simulated> {
    Bfc::new(BfcOptions::new("bfc").limit(BLOCK), Simulated::new())
}

fn take(bfc: &Bfc<Simulated>) -> Placed {
    bfc.alloc(Request::new(BLOCK)).expect("room")
}

/// Work that ends when it is told to.
#[derive(Clone, Default)]
struct End(Arc<AtomicBool>);

impl End {
    fn work(&self, stream: Option<StreamIdentity>) -> Work {
        let end = self.0.clone();
        let is_done = move || end.load(Ordering::SeqCst);
        stream.map_or_else(
            || Work::alone(is_done.clone()),
            |stream| Work::on(stream, is_done.clone()),
        )
    }

    fn now(&self) {
        self.0.store(true, Ordering::SeqCst);
    }
}

fn is_free_for(bfc: &Bfc<Simulated>, request: Request) -> bool {
    match bfc.alloc(request) {
        Ok(placed) => {
            bfc.free_after_all(placed.address, Vec::new())
                .expect("in use");
            true
        }
        Err(Error::OutOfMemory { .. }) => false,
        Err(error) => panic!("{error}"),
    }
}

#[test]
fn a_free_after_several_streams_waits_for_all_of_them() {
    let bfc = bfc();
    let (a, b) = (End::default(), End::default());
    bfc.free_after_all(take(&bfc).address, vec![a.work(Some(A)), b.work(Some(B))])
        .expect("in use");
    for stream in [A, B] {
        assert!(
            !is_free_for(&bfc, Request::new(BLOCK).on(stream)),
            "the other still works on it"
        );
    }
    a.now();
    bfc.settle();
    assert!(
        !is_free_for(&bfc, Request::new(BLOCK).on(A)),
        "its own work is done, that of the other is not"
    );
    // Only its own is left: it comes after that in any case.
    let again = bfc
        .alloc(Request::new(BLOCK).on(B))
        .expect("in its own order");
    bfc.free(again.address).expect("in use");
    assert!(!is_free_for(&bfc, Request::new(BLOCK)));
    b.now();
    assert!(is_free_for(&bfc, Request::new(BLOCK)));
}

#[test]
fn work_that_was_noted_outlasts_a_plain_free() {
    let bfc = bfc();
    let (a, b) = (End::default(), End::default());
    let placed = take(&bfc);
    bfc.record_work(placed.address, b.work(Some(B)))
        .expect("in use");
    bfc.free_after_all(placed.address, vec![a.work(Some(A))])
        .expect("in use");
    a.now();
    bfc.settle();
    assert!(!is_free_for(&bfc, Request::new(BLOCK).on(A)));
    b.now();
    let placed = take(&bfc);
    let late = End::default();
    bfc.record_work(placed.address, late.work(None))
        .expect("in use");
    bfc.free(placed.address).expect("in use");
    assert!(!is_free_for(&bfc, Request::new(BLOCK)));
    assert_eq!(
        (
            bfc.snapshot().pending_bytes,
            bfc.trim().expect("nothing is idle")
        ),
        (BLOCK, 0)
    );
    late.now();
    assert_eq!(bfc.settle(), BLOCK);
    assert!(
        bfc.record_work(placed.address, late.work(None)).is_err(),
        "it is freed"
    );
}

#[test]
fn work_that_ends_while_its_chunk_is_in_use_is_forgotten() {
    let bfc = bfc();
    let work = End::default();
    let placed = take(&bfc);
    bfc.record_work(placed.address, work.work(Some(B)))
        .expect("in use");
    work.now();
    assert_eq!(bfc.settle(), 0, "it is still in use");
    bfc.free(placed.address).expect("in use");
    assert!(is_free_for(&bfc, Request::new(BLOCK)));
}

#[test]
fn what_a_stream_took_again_keeps_the_work_from_before() {
    // The new owner knows nothing of the first one's work, and frees when his own is done.
    let bfc = bfc();
    let first = End::default();
    bfc.free_after_all(take(&bfc).address, vec![first.work(Some(A))])
        .expect("in use");
    let again = bfc.alloc(Request::new(BLOCK).on(A)).expect("its own");
    bfc.free(again.address).expect("in use");
    assert!(
        !is_free_for(&bfc, Request::new(BLOCK).on(B)),
        "the first work may still write there"
    );
    assert_eq!(
        bfc.trim().expect("nothing is idle"),
        0,
        "and its region stays"
    );
    // Through the front door of every allocator, and again and again.
    let allocator: &dyn Allocator = &bfc;
    for _ in 0..100 {
        let again = allocator.alloc(Request::new(BLOCK).on(A)).expect("its own");
        allocator.free(again.address).expect("in use");
    }
    first.now();
    assert!(is_free_for(&bfc, Request::new(BLOCK).on(B)));
}

#[test]
fn work_of_no_stream_is_asked_for_one_by_one() {
    let bfc = Bfc::new(BfcOptions::new("bfc").limit(2 * BLOCK), Simulated::new());
    let (first, second) = (End::default(), End::default());
    let held = [take(&bfc), take(&bfc)];
    bfc.free_after_all(held[0].address, vec![first.work(None)])
        .expect("in use");
    bfc.free_after_all(held[1].address, vec![second.work(None)])
        .expect("in use");
    second.now();
    assert_eq!(bfc.settle(), BLOCK, "no order among them");
    first.now();
    assert_eq!(bfc.settle(), BLOCK);
}
