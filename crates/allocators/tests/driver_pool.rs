//! The driver's own pool as an allocator: orders, budgets, failures half-way, and an end with
//! memory in use.

mod fake;
mod random;

use std::collections::BTreeMap;
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use allocators::*;
use backend_host::{HostBackend, HostConfig};
use fake::{Fake, FakeState};
use gpu_api::{CaptureStatus, DeviceId, Error, Gpu, RawStream, StreamIdentity};
use random::Random;

const MIB: u64 = 1 << 20;

struct Device {
    backend: Arc<HostBackend>,
    gpu: Gpu,
    stream: RawStream,
}

impl Device {
    fn new(bytes: u64) -> Device {
        let backend =
            HostBackend::new(HostConfig::default().bytes_per_device(bytes)).expect("it opens");
        let gpu = Gpu::new(backend.clone(), DeviceId(0)).expect("a device");
        let stream = gpu.backend().create_stream(gpu.device()).expect("a stream");
        Device {
            backend,
            gpu,
            stream,
        }
    }

    fn pool(&self) -> DriverPool {
        DriverPool::new("pool", self.gpu.clone(), u64::MAX).expect("a pool")
    }

    fn free_bytes(&self) -> u64 {
        self.gpu
            .backend()
            .memory_info(self.gpu.device())
            .expect("it answers")
            .free_bytes
    }

    fn know(&self, pool: &DriverPool) -> StreamIdentity {
        // SAFETY: `know_stream` asks for a stream that outlives its use: it goes with the device,
        // after the pool.
        unsafe { pool.know_stream(self.stream) }.expect("a stream of ours")
    }

    /// Lets the stream work until the sender is used or dropped.
    fn busy(&self) -> Sender<()> {
        let (end, ended) = channel::<()>();
        let work = Box::new(move || {
            let _ = ended.recv();
        });
        // SAFETY: `host_function` asks for a live stream that nobody captures: ours goes with the
        // device.
        unsafe { self.gpu.backend().host_function(self.stream, work) }.expect("it is queued");
        end
    }

    /// Stands for the work that is queued on the stream.
    fn work(&self) -> Work {
        // SAFETY: `work_on` asks for a live stream of the device: ours goes with it.
        unsafe { Recorded::work_on(&self.gpu, self.stream) }.expect("an event")
    }

    fn pass(&self) {
        // SAFETY: `synchronize_stream` asks for a live stream: ours goes with the device.
        unsafe { self.gpu.backend().synchronize_stream(self.stream) }.expect("it ends");
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        // SAFETY: `destroy_stream` asks for a live stream that nobody uses afterwards: this is its
        // owner's drop.
        unsafe { self.gpu.backend().destroy_stream(self.stream) }.expect("it is alive");
    }
}

/// Waits for something that a thread of the pool's own does.
fn eventually(holds: impl Fn() -> bool) {
    while !holds() {
        thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn a_known_stream_gets_its_own_memory_at_once_and_nobody_else_does() {
    let device = Device::new(MIB);
    let pool = device.pool();
    let own = device.know(&pool);
    let placed = pool.alloc(Request::new(MIB).on(own)).expect("room");
    let end = device.busy();
    pool.free_after(placed.address, vec![device.work()])
        .expect("in use");
    assert!(
        matches!(
            pool.alloc(Request::new(MIB)),
            Err(Error::OutOfMemory { .. })
        ),
        "it is still worked on"
    );
    let again = pool
        .alloc(Request::new(MIB).on(own))
        .expect("in the stream's order");
    assert_eq!(again.address, placed.address);
    drop(end);
    device.pass();
    pool.free(again.address).expect("in use");
    assert_eq!(
        pool.alloc(Request::new(MIB))
            .expect("the work is done")
            .address,
        placed.address
    );
}

#[test]
fn work_of_a_stream_that_is_not_known_is_waited_for_without_the_host() {
    let device = Device::new(MIB);
    let pool = device.pool();
    let placed = pool.alloc(Request::new(MIB)).expect("room");
    let end = device.busy();
    pool.free_after(placed.address, vec![device.work()])
        .expect("it does not wait");
    assert!(pool.free(placed.address).is_err(), "it is freed already");
    assert_eq!(
        (pool.stats().bytes_in_use, pool.stats().bytes_reserved),
        (0, MIB)
    );
    assert!(matches!(
        pool.alloc(Request::new(MIB)),
        Err(Error::OutOfMemory { .. })
    ));
    assert_eq!(pool.trim().expect("nothing to give"), 0);
    drop(end);
    device.pass();
    pool.alloc(Request::new(MIB)).expect("the work is done");
}

#[test]
fn work_that_was_noted_outlasts_a_plain_free() {
    let device = Device::new(MIB);
    let pool = device.pool();
    let placed = pool.alloc(Request::new(MIB)).expect("room");
    let end = device.busy();
    pool.record_work(placed.address, device.work())
        .expect("in use");
    assert!(
        pool.record_work(placed.address + 1, device.work()).is_err(),
        "inside is another address"
    );
    pool.free(placed.address).expect("in use");
    assert!(
        pool.alloc(Request::new(1)).is_err(),
        "the device is full of it"
    );
    let waiter = thread::scope(|scope| {
        let pool = &pool;
        let waiter = scope.spawn(move || {
            pool.alloc(Request::new(MIB).wait_until(Instant::now() + Duration::from_secs(600)))
        });
        drop(end);
        waiter.join().expect("no panic")
    });
    waiter.expect("the work ended while it waited");
}

#[test]
fn a_captured_stream_takes_nothing_and_what_is_freed_behind_it_waits() {
    let device = Device::new(MIB);
    let pool = device.pool();
    let own = device.know(&pool);
    let placed = pool.alloc(Request::new(MIB).on(own)).expect("room");
    let work = device.work();
    device
        .backend
        .set_capture(device.stream, CaptureStatus::Active);
    assert!(
        pool.alloc(Request::new(1).on(own)).is_err(),
        "the graph would own it"
    );
    pool.free_after(placed.address, vec![work])
        .expect("it waits for the work before the capture");
    // The capture is aborted.
    device
        .backend
        .set_capture(device.stream, CaptureStatus::Invalidated);
    device
        .backend
        .set_capture(device.stream, CaptureStatus::None);
    device.pass();
    pool.alloc(Request::new(MIB)).expect("nothing was lost");
}

#[test]
fn large_alignments_are_kept_and_addresses_inside_are_found() {
    let device = Device::new(64 * MIB);
    let pool = device.pool();
    for align in [1, 256, 512, 4096, 1 << 21] {
        let placed = pool.alloc(Request::new(1000).align(align)).expect("room");
        assert!(
            placed.address.is_multiple_of(align),
            "{:#x} at {align}",
            placed.address
        );
        assert_eq!(pool.find(placed.address + 999), Some(placed));
        assert_eq!(pool.find(placed.address + 1024), None);
        pool.free(placed.address).expect("in use");
    }
}

#[test]
fn when_the_device_is_full_neighbours_and_what_is_kept_make_room() {
    let device = Device::new(8 * MIB);
    let relief = Arc::new(Relief::new());
    let pool = device.pool().relief(relief.clone());
    let memory = DeviceMemory::new(device.gpu.clone()).expect("memory");
    let bfc = Relieved::new(Bfc::new(BfcOptions::new("bfc"), memory), relief);
    // What best fit keeps idle goes to the pool, and the other way round.
    for _ in 0..3 {
        let placed = pool.alloc(Request::new(8 * MIB)).expect("all of it");
        pool.free(placed.address).expect("in use");
        let placed = bfc.alloc(Request::new(8 * MIB)).expect("all of it");
        bfc.free(placed.address).expect("in use");
    }
    let placed = bfc.alloc(Request::new(MIB)).expect("room");
    let error = pool
        .alloc(Request::new(8 * MIB))
        .expect_err("a part of it is in use");
    assert!(error.to_string().contains("pool: in use 0"), "{error}");
    bfc.free(placed.address).expect("in use");
}

#[test]
fn an_end_with_pending_memory_waits_for_its_work_behind_the_scenes() {
    let device = Device::new(MIB);
    let pool = device.pool();
    let placed = pool.alloc(Request::new(MIB)).expect("room");
    let end = device.busy();
    pool.free_after(placed.address, vec![device.work()])
        .expect("in use");
    drop(pool);
    assert_eq!(device.free_bytes(), 0, "the stream may still write there");
    drop(end);
    eventually(|| device.free_bytes() == MIB);
}

#[test]
fn an_end_with_memory_in_use_leaves_it_usable() {
    let device = Device::new(MIB);
    let pool = device.pool();
    let memory = pool.memory().expect("there is some");
    let placed = pool.alloc(Request::new(1000)).expect("room");
    drop(pool);
    // SAFETY: `write` asks for a range of a live allocation: the pool is gone, its memory stays
    // until it is freed.
    unsafe { memory.write(placed.address, b"still here") }.expect("it is there");
}

/// Makes each call fail in turn: nothing may be left but what a failed giving back leaks.
#[test]
fn every_failure_half_way_leaves_nothing() {
    let mut failures = 0;
    for nth in 1.. {
        let fake = Fake::new(64 * MIB);
        let budget = Arc::new(Budget::new(64 * MIB));
        let gpu = fake.gpu();
        fake.state().fails_at = nth;
        let run = || -> gpu_api::Result<()> {
            let pool = DriverPool::new("pool", gpu.clone(), 0)?.budget(budget.clone());
            let placed = pool.alloc(Request::new(MIB))?;
            let result = pool.trim();
            pool.free(placed.address)?;
            result.map(drop)
        };
        let result = run();
        let reached = fake.state().calls >= nth;
        assert_eq!(result.is_err(), reached, "call {nth}");
        let left = fake.live_bytes();
        let FakeState { pools, streams, .. } = *fake.state();
        assert_eq!((left, pools, streams), (0, 0, 0), "call {nth}");
        assert_eq!(budget.used(), 0, "call {nth}");
        failures += usize::from(reached);
        if !reached {
            break;
        }
    }
    assert!(failures >= 6, "{failures} calls");
}

#[test]
fn what_the_driver_does_not_take_back_is_leaked_and_counts() {
    let fake = Fake::new(4 * MIB);
    let budget = Arc::new(Budget::new(4 * MIB));
    let pool = DriverPool::new("pool", fake.gpu(), 0)
        .expect("a pool")
        .budget(budget.clone());
    let placed = pool.alloc(Request::new(3 * MIB)).expect("room");
    fake.state().refuses_free = true;
    pool.free(placed.address).expect_err("the driver fails");
    fake.state().refuses_free = false;
    assert!(
        pool.free(placed.address).is_err(),
        "it is nobody's any more"
    );
    assert_eq!(
        (
            pool.leaked_bytes(),
            budget.used(),
            pool.stats().bytes_in_use
        ),
        (3 * MIB, 3 * MIB, 0)
    );
    assert!(matches!(
        pool.alloc(Request::new(2 * MIB)),
        Err(Error::OutOfMemory { .. })
    ));
}

/// Threads allocate, give back plainly and behind a stream's work, and note work; no two hold the
/// same bytes, and the sums are right at the end.
#[test]
fn threads_never_hold_the_same_bytes() {
    for seed in [1, 2, 3] {
        let device = Device::new(16 * MIB);
        let pool = device.pool();
        let own = device.know(&pool);
        let held: Mutex<BTreeMap<u64, u64>> = Mutex::default();
        let claim = |placed: Placed| {
            let mut held = held.lock().expect("no test panics under it");
            let before = held.range(..placed.address + placed.bytes).next_back();
            assert!(
                before.is_none_or(|(&at, &len)| at + len <= placed.address),
                "{placed:?} overlaps {before:?}"
            );
            held.insert(placed.address, placed.bytes);
        };
        thread::scope(|scope| {
            for number in 0..4 {
                let (pool, device, held, claim) = (&pool, &device, &held, &claim);
                scope.spawn(move || {
                    let mut random = Random::new(seed * 100 + number);
                    let mut mine: Vec<u64> = Vec::new();
                    for _ in 0..800 {
                        if mine.len() > 12 || (random.one_in(2) && !mine.is_empty()) {
                            let address = random.take_one(&mut mine);
                            held.lock()
                                .expect("no test panics under it")
                                .remove(&address);
                            match random.below(3) {
                                0 => pool.free(address),
                                1 => pool.free_after(address, vec![device.work()]),
                                _ => pool
                                    .record_work(address, device.work())
                                    .and_then(|()| pool.free(address)),
                            }
                            .expect("in use");
                            assert!(pool.free(address ^ 64).is_err(), "never handed out");
                        } else {
                            let request = Request::new(1 + random.below(100_000));
                            let request = if random.one_in(3) {
                                request.on(own)
                            } else {
                                request
                            };
                            // What was given back behind work is room once that work is done.
                            let placed = (0..1000)
                                .find_map(|_| {
                                    let placed = pool.alloc(request);
                                    placed.inspect_err(|_| device.pass()).ok()
                                })
                                .expect("room for all of them");
                            claim(placed);
                            mine.push(placed.address);
                        }
                    }
                    for address in mine {
                        held.lock()
                            .expect("no test panics under it")
                            .remove(&address);
                        pool.free(address).expect("in use");
                    }
                });
            }
        });
        device.pass();
        pool.trim().expect("all of it is idle");
        let stats = pool.stats();
        assert_eq!(
            (
                stats.bytes_in_use,
                stats.bytes_reserved,
                device.free_bytes()
            ),
            (0, 0, 16 * MIB)
        );
    }
}
