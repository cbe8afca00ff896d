//! The driver's own pools, and managed memory.

use crate::can;
use gpu_ipc::backend::{Allocation, DevicePtr, MemoryKind, PoolUsage, RawPool};
use gpu_ipc::{Error, Gpu};

use crate::Case;
use crate::queue::{Queue, free};

pub(crate) const CASES: &[Case] = &[
    Case {
        name: "pool::what_its_capabilities_deny_is_refused",
        run: denied,
    },
    Case {
        name: "pool::memory_comes_and_goes_in_a_streams_order",
        run: in_order,
    },
    Case {
        name: "pool::what_a_stream_still_uses_is_no_other_streams",
        run: apart,
    },
    Case {
        name: "pool::is_destroyed_while_memory_of_it_is_out",
        run: destroyed,
    },
    Case {
        name: "pool::managed_memory_is_the_hosts_and_the_devices",
        run: managed,
    },
];

const LEN: u64 = 1 << 20;

/// A pool that is destroyed when it is dropped.
struct Pool<'a> {
    gpu: &'a Gpu,
    raw: RawPool,
}

impl<'a> Pool<'a> {
    /// Makes one that keeps what it has; `None` on a device without pools.
    fn new(gpu: &'a Gpu) -> Option<Pool<'a>> {
        let raw = gpu.backend().create_pool(gpu.device(), u64::MAX);
        can(gpu.caps().pools, "pools").then(|| Pool {
            gpu,
            raw: raw.expect("a pool"),
        })
    }

    fn alloc(&self, queue: &Queue<'_>) -> Allocation {
        // SAFETY: `pool_alloc` asks for a live pool and stream of one device: both live until the
        // end of the case.
        unsafe { self.gpu.backend().pool_alloc(self.raw, queue.raw(), LEN) }.expect("there is room")
    }

    fn usage(&self) -> PoolUsage {
        // SAFETY: `pool_usage` asks for a live pool: `self` keeps it.
        unsafe { self.gpu.backend().pool_usage(self.raw) }.expect("it tells")
    }

    fn trim(&self) {
        // SAFETY: `trim_pool` asks for a live pool: `self` keeps it.
        unsafe { self.gpu.backend().trim_pool(self.raw, 0) }.expect("it trims");
    }
}

impl Drop for Pool<'_> {
    fn drop(&mut self) {
        // SAFETY: `destroy_pool` asks for a live pool: its owner goes.
        let _ = unsafe { self.gpu.backend().destroy_pool(self.raw) };
    }
}

/// Gives memory back behind the work of a stream.
fn give_back(gpu: &Gpu, queue: &Queue<'_>, memory: Allocation) {
    // SAFETY: `pool_free` asks for memory of a pool that no other stream works on, once: the cases
    // see to that.
    unsafe { gpu.backend().pool_free(queue.raw(), memory.base) }.expect("it was out");
}

fn denied(gpu: &Gpu) {
    let backend = gpu.backend();
    let pool = backend.create_pool(gpu.device(), 0);
    assert_eq!(pool.is_ok(), gpu.caps().pools, "{pool:?}");
    match pool {
        // SAFETY: `destroy_pool` asks for a live pool: just made.
        Ok(pool) => unsafe { backend.destroy_pool(pool) }.expect("it goes"),
        Err(error) => assert!(matches!(error, Error::Unsupported { .. }), "{error}"),
    }
    if !can(gpu.caps().managed, "managed memory") {
        // A driver may have such memory and not let host and device touch it at once: then it is
        // had all the same.
        match backend.alloc_managed(gpu.device(), 1) {
            Ok(memory) => free(gpu, memory),
            Err(error) => assert!(
                matches!(error, Error::Unsupported { .. } | Error::Driver { .. }),
                "{error}"
            ),
        }
    }
}

fn in_order(gpu: &Gpu) {
    let Some(pool) = Pool::new(gpu) else { return };
    let queue = Queue::new(gpu);
    for value in 1..20 {
        let memory = pool.alloc(&queue);
        assert!(memory.base.0.is_multiple_of(256) && memory.len >= LEN);
        let info = gpu
            .backend()
            .classify(memory.base.offset(9))
            .expect("it is known");
        assert_eq!((info.kind, info.sharing), (MemoryKind::Pool, None));
        queue.write(memory.base, value);
        queue.write(memory.base.offset(LEN - 8), value);
        assert_eq!(
            (
                queue.read(memory.base),
                queue.read(memory.base.offset(LEN - 8))
            ),
            (value, value)
        );
        let usage = pool.usage();
        assert!(
            usage.used >= LEN
                && usage.reserved >= usage.used
                && usage.most_reserved >= usage.reserved
        );
        assert!(
            // SAFETY: `free` refuses what `alloc` did not give.
            unsafe { gpu.backend().free(memory.base) }.is_err(),
            "it is the pool's"
        );
        give_back(gpu, &queue, memory);
        assert!(
            // SAFETY: `pool_free` refuses what is not out.
            unsafe { gpu.backend().pool_free(queue.raw(), memory.base) }.is_err(),
            "given back twice"
        );
    }
    queue.synchronize();
    assert_eq!(pool.usage().used, 0);
    assert!(pool.usage().reserved >= LEN, "it keeps what it has");
    pool.trim();
    assert_eq!(pool.usage().reserved, 0);
}

fn apart(gpu: &Gpu) {
    let Some(pool) = Pool::new(gpu) else { return };
    let (held, other) = (Queue::new(gpu), Queue::new(gpu));
    let memory = pool.alloc(&held);
    held.write(memory.base, 5);
    let go = held.hold();
    give_back(gpu, &held, memory);
    let second = pool.alloc(&other);
    assert_ne!(
        second.base, memory.base,
        "the first stream may still write there"
    );
    other.write(second.base, 6);
    assert!(!held.is_idle(), "nobody waited for it");
    assert!(pool.usage().used >= LEN);
    drop(go);
    held.synchronize();
    give_back(gpu, &other, second);
    other.synchronize();
    assert_eq!(pool.usage().used, 0);
}

fn destroyed(gpu: &Gpu) {
    let Some(pool) = Pool::new(gpu) else { return };
    let queue = Queue::new(gpu);
    let memory = pool.alloc(&queue);
    drop(pool);
    queue.write(memory.base, 7);
    assert_eq!(queue.read(memory.base), 7);
    give_back(gpu, &queue, memory);
    queue.synchronize();
}

fn managed(gpu: &Gpu) {
    if !can(gpu.caps().managed, "managed memory") {
        return;
    }
    let queue = Queue::new(gpu);
    let memory = gpu
        .backend()
        .alloc_managed(gpu.device(), LEN)
        .expect("there is room");
    let DevicePtr(base) = memory.base;
    queue.write(memory.base, 8);
    let word: *mut u64 = std::ptr::with_exposed_provenance_mut(base as usize);
    // SAFETY: `read` asks for eight aligned bytes that nobody writes: the host reaches managed
    // memory by its address, and the stream is done.
    assert_eq!(unsafe { word.read() }, 8);
    // SAFETY: `write`: as above.
    unsafe { word.write(9) };
    assert_eq!(queue.read(memory.base), 9);
    let info = gpu
        .backend()
        .classify(memory.base.offset(9))
        .expect("it is known");
    assert_eq!((info.kind, info.sharing), (MemoryKind::Managed, None));
    free(gpu, memory);
}
