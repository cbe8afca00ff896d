//! What each wrapper adds.

mod fake;

use std::io;
use std::sync::Arc;

use allocators::*;
use fake::Fake;
use gpu_api::{Error, Result};

fn cpu() -> (Arc<Fake>, Direct<HostPages>) {
    let fake = Fake::new(1 << 20);
    let cpu = Direct::new(
        "direct",
        HostPages::new(fake.gpu(), gpu_api::HostMemory::default()).expect("pages"),
    );
    (fake, cpu)
}

fn simulated() -> Bfc<Simulated> {
    Bfc::new(BfcOptions::new("bfc").limit(1 << 20), Simulated::new())
}

fn take(allocator: &dyn Allocator, bytes: u64) -> Placed {
    allocator.alloc(Request::new(bytes)).expect("room")
}

fn poke(allocator: &dyn Allocator, address: u64, byte: u8) {
    // SAFETY: `write` asks for a range of one allocation beneath: a guard's marks are within what
    // it took.
    unsafe { allocator.memory().expect("memory").write(address, &[byte]) }.expect("it is written");
}

fn peek(allocator: &dyn Allocator, address: u64, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    // SAFETY: as in `poke`.
    unsafe {
        allocator
            .memory()
            .expect("memory")
            .read(address, &mut bytes)
    }
    .expect("it is read");
    bytes
}

// Guard.

#[test]
fn clean_marks_stay_clean() {
    let (_fake, cpu) = cpu();
    let guard = Guard::new(cpu).expect("memory");
    for bytes in [8, 211, 4096] {
        let placed = take(&guard, bytes);
        assert_eq!((placed.bytes, placed.asked), (bytes, bytes));
        for at in [0, bytes - 1] {
            poke(&guard, placed.address + at, 0);
        }
        assert_eq!(guard.check(placed.address).expect("in use"), None);
        guard.free(placed.address).expect("clean");
    }
}

#[test]
fn a_clobbered_header_is_found() {
    for bytes in [8, 211] {
        let (fake, cpu) = cpu();
        let guard = Guard::new(cpu).expect("memory");
        let placed = guard
            .alloc(Request::new(bytes).tag("weights"))
            .expect("room");
        poke(&guard, placed.address - 1, 7);
        let damage = guard
            .check(placed.address)
            .expect("in use")
            .expect("damaged");
        assert_eq!((damage.at, damage.found, damage.placed), (-1, 7, placed));
        let error = guard.free(placed.address).expect_err("damaged");
        assert!(matches!(error, Error::Invalid { .. }));
        let text = error.to_string();
        assert!(
            text.contains(&format!(
                "0x07 at byte -1 of allocation 1, {bytes} bytes for weights ("
            )),
            "{text}"
        );
        assert!(text.contains("wrappers.rs:"), "who asked: {text}");
        assert_eq!(guard.get(placed.address), Some(placed), "it is not freed");
        guard.free_damaged(placed.address).expect("in use");
        assert_eq!(fake.state().host_live(), 0);
    }
}

#[test]
fn a_clobbered_footer_is_found() {
    for bytes in [8, 22] {
        let (_fake, cpu) = cpu();
        let guard = Guard::new(cpu).expect("memory");
        let placed = take(&guard, bytes);
        for at in [0, 1, 255] {
            poke(&guard, placed.address + bytes + at, 0);
            let damage = guard.check_all().expect("it is read");
            assert_eq!(damage.len(), 1);
            poke(&guard, placed.address + bytes + at, 0xcd);
        }
        assert!(guard.check_all().expect("it is read").is_empty());
        poke(&guard, placed.address + bytes, 1);
        assert!(guard.free(placed.address).is_err());
    }
}

#[test]
fn guarded_memory_keeps_its_alignment() {
    let (_fake, cpu) = cpu();
    let guard =
        Guard::new(Bfc::new(BfcOptions::new("bfc"), HostUpstream::pages(&cpu))).expect("memory");
    for align in [1, 256, 512, 4096] {
        let placed = guard.alloc(Request::new(100).align(align)).expect("room");
        assert!(
            placed.address.is_multiple_of(align.max(256)),
            "{:#x} at {align}",
            placed.address
        );
    }
}

/// Makes pages like those of an allocator.
struct HostUpstream;

impl HostUpstream {
    fn pages(_like: &Direct<HostPages>) -> HostPages {
        HostPages::new(Fake::new(1 << 20).gpu(), gpu_api::HostMemory::default()).expect("pages")
    }
}

#[test]
fn addresses_without_memory_cannot_be_guarded() {
    assert!(matches!(
        Guard::new(simulated()),
        Err(Error::Unsupported { .. })
    ));
    assert!(matches!(
        NanFill::new(simulated()),
        Err(Error::Unsupported { .. })
    ));
}

// NanFill.

#[test]
fn nan_on_alloc_and_on_free() {
    let (_fake, cpu) = cpu();
    let tracking = Arc::new(Guard::new(cpu).expect("memory"));
    let fill = NanFill::new(tracking.clone()).expect("memory");
    let placed = take(&fill, 4 * 1000 + 3);
    let floats = |bytes: &[u8]| -> Vec<f32> {
        bytes
            .as_chunks::<4>()
            .0
            .iter()
            .map(|bytes| f32::from_ne_bytes(*bytes))
            .collect()
    };
    assert!(
        floats(&peek(&fill, placed.address, 4003))
            .iter()
            .all(|float| float.is_nan())
    );
    assert_eq!(
        tracking.check(placed.address).expect("in use"),
        None,
        "nothing beyond the end is filled"
    );
    poke(&fill, placed.address, 0);
    fill.free(placed.address).expect("in use");
}

#[test]
fn what_was_freed_reads_as_nan() {
    let pool = Pool::new(PoolOptions::new("pool"), cpu().1).expect("a pool");
    let pool = Arc::new(pool);
    let fill = NanFill::new(pool.clone()).expect("memory");
    let placed = take(&fill, 8);
    poke(&fill, placed.address, 0);
    poke(&fill, placed.address + 3, 0);
    fill.free(placed.address).expect("in use");
    // The pool keeps the buffer, so that it can be looked at.
    let bytes = peek(&pool, take(&pool, 8).address, 8);
    assert!(f32::from_ne_bytes(bytes[..4].try_into().expect("four")).is_nan());
}

#[test]
fn nan_over_guard_keeps_sizes() {
    let (_fake, cpu) = cpu();
    let stack = NanFill::new(Guard::new(cpu).expect("memory")).expect("memory");
    let placed = take(&stack, 1000);
    assert_eq!(
        (
            placed.asked,
            stack.get(placed.address).map(|placed| placed.asked)
        ),
        (1000, Some(1000))
    );
    stack.free(placed.address).expect("marks are whole");
}

// Tracking.

#[test]
fn tracking_knows_sizes_tags_and_lines() {
    let tracking = Tracking::new(simulated());
    let held = [(4, "a"), (1 << 10, "b"), (5, "a")]
        .map(|(bytes, tag)| tracking.alloc(Request::new(bytes).tag(tag)).expect("room"));
    assert_eq!(
        tracking
            .live()
            .iter()
            .map(|tracked| tracked.placed.number)
            .collect::<Vec<_>>(),
        [1, 2, 3]
    );
    assert!(
        tracking
            .live()
            .iter()
            .all(|tracked| tracked.from.file().ends_with("wrappers.rs"))
    );
    let a = tracking.by_tag()["a"];
    assert_eq!((a.count, a.bytes), (2, 9));
    tracking.free(held[1].address).expect("in use");
    let sizes = tracking.sizes();
    assert_eq!((sizes.total, sizes.peak, sizes.live), (1033, 1033, 9));
    tracking.clear_stats();
    assert_eq!(tracking.sizes().peak, 9);
    assert!(tracking.free(held[1].address).is_err());
    assert_eq!(tracking.live().len(), 2, "a failed free changes nothing");
}

#[test]
fn out_of_memory_leaves_nothing_tracked() {
    let tracking = Tracking::new(Bfc::new(
        BfcOptions::new("bfc"),
        Simulated::new().failing_at(0),
    ));
    assert!(tracking.alloc(Request::new(12)).is_err());
    let sizes = tracking.sizes();
    assert_eq!((sizes.total, sizes.peak, sizes.live), (0, 0, 0));
    assert!(tracking.free(0).is_err());
}

// Limit.

#[test]
fn a_limit_counts_what_was_asked_for_and_can_be_shared() {
    let budget = Arc::new(Budget::new(1000));
    let limits = [(); 2].map(|()| Limit::new(simulated(), budget.clone()));
    let first = take(&limits[0], 900);
    let error = limits[1]
        .alloc(Request::new(101))
        .expect_err("the other has it");
    assert_eq!(
        error.to_string(),
        "out of memory on device 0: asked for 101 bytes, 100 are free; bfc is limited to 1000 bytes"
    );
    take(&limits[1], 100);
    limits[0].free(first.address).expect("in use");
    assert!(limits[0].free(first.address).is_err());
    assert_eq!(budget.used(), 100, "given back once");
    assert_eq!(limits[0].stats().bytes_limit, Some(1000));
    assert!(limits[0].alloc(Request::new(0)).is_err());
    assert_eq!(budget.used(), 100, "what was refused costs nothing");
}

// Log and trace.

#[test]
fn a_log_is_replayed() {
    let log = Log::new(simulated(), Vec::new());
    let held: Vec<u64> = (1..=20)
        .map(|at| {
            log.alloc(Request::new(100 * at).align(512).tag("a, \"b\"\n"))
                .expect("room")
                .address
        })
        .collect();
    held.iter()
        .take(15)
        .for_each(|&address| log.free(address).expect("in use"));
    assert!(log.alloc(Request::new(2 << 20)).is_err());
    assert!(log.free(1).is_err());
    let peak = log.stats().peak_bytes_in_use;
    let csv = String::from_utf8(log.finish().expect("a buffer takes everything")).expect("text");
    assert_eq!(csv.lines().count(), 1 + 20 + 15 + 1);
    assert!(
        csv.lines()
            .nth(1)
            .expect("a line")
            .ends_with(",allocate,0x10000000000,100,0,512,a   b  "),
        "{csv}"
    );
    assert!(csv.contains(",allocate failure,0x0,2097152,"));

    let trace: Trace = csv.parse().expect("a log");
    let replayed = trace.replay(&simulated()).expect("it runs");
    assert_eq!(
        (
            replayed.allocs,
            replayed.frees,
            replayed.left,
            replayed.failures
        ),
        (20, 15, 5, 0)
    );
    assert_eq!(replayed.peak_in_use, peak);
    // On a device of another size the same log does not fit.
    let small = Bfc::new(BfcOptions::new("small").limit(4096), Simulated::new());
    let replayed = trace.replay(&small).expect("it runs");
    assert!(replayed.failures > 0);
    assert_eq!(small.stats().bytes_in_use, 0);
}

#[test]
fn what_is_no_log_is_refused_with_its_line() {
    let parsed = |csv: &str| -> Result<Trace> { csv.parse() };
    for (csv, part) in [
        ("", "the header of a log is , but must be"),
        ("Thread,Time\n", "the header of a log is Thread,Time,"),
        (
            "Action,Pointer,Size\nallocate,zebra,1\n",
            "line 2: allocate,zebra,1, but must be one with an address",
        ),
        (
            "Action,Pointer,Size\n\nallocate,0x1,many\n",
            "line 3: allocate,0x1,many, but must be one with a size",
        ),
        ("Action,Pointer,Size\nreallocate,0x1,1\n", "line 2"),
        (
            "Action,Pointer,Size\nfree\n",
            "line 2: free, but must be one with an address",
        ),
    ] {
        let error = parsed(csv).expect_err(csv).to_string();
        assert!(error.contains(part), "{part}\nnot in\n{error}");
    }
    let trace = parsed("Action,Pointer,Size\nfree,0x1,1\nallocate,0x2,0\n").expect("a log");
    assert_eq!((trace.unknown_frees(), trace.steps().len()), (1, 0));
    let steps = [
        vec![Step::Free { slot: 0 }],
        vec![Step::Alloc {
            slot: 1,
            bytes: 1,
            align: 1,
        }],
    ];
    assert!(steps.into_iter().all(|steps| Trace::new(steps).is_err()));
}

#[test]
fn a_log_that_cannot_be_written_says_so_at_the_end() {
    struct Full(usize);
    impl io::Write for Full {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0 = self.0.checked_sub(1).ok_or(io::ErrorKind::StorageFull)?;
            Ok(bytes.len())
        }
        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }
    let log = Log::new(simulated(), Full(2));
    let held = [take(&log, 1), take(&log, 1)];
    held.into_iter()
        .for_each(|placed| log.free(placed.address).expect("allocating goes on"));
    let error = log.finish().err().expect("it was full");
    assert!(matches!(error, Error::System { .. }), "{error}");
    assert!(Log::new(simulated(), Full(100)).finish().is_ok());
}
