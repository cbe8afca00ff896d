//! Pools of the driver's and managed memory: what is set up, what is refused, and what is left when
//! a call fails.

use gpu_api::groups::*;
use gpu_api::{CaptureStatus, DevicePtr, Error, Gpu, MemoryKind, PoolUsage, RawStream, Sharing};

use crate::fake::{self, GPU, Kind};
use crate::{Case, Library};

macro_rules! case {
    ($name:ident, $library:ident, $environment:expr) => {
        Case {
            name: stringify!($name),
            library: Library::$library,
            environment: $environment,
            run: $name,
        }
    };
}

pub const CASES: &[Case] = &[
    case!(
        a_pool_keeps_what_it_is_told_and_makes_nobody_wait,
        Whole,
        &[]
    ),
    case!(every_failure_of_a_pool_leaves_nothing, Whole, &[]),
    case!(
        a_pool_outlives_its_destruction_while_memory_of_it_is_out,
        Whole,
        &[]
    ),
    case!(pools_stay_out_of_captures, Whole, &[]),
    case!(a_return_that_failed_is_never_tried_again, Whole, &[]),
    case!(managed_memory_is_freed_and_never_exported, Whole, &[]),
    case!(every_failure_of_managed_memory_leaves_nothing, Whole, &[]),
    case!(an_old_driver_has_neither_pools_nor_a_node, Old, &[]),
    case!(
        the_driver_names_the_numa_node,
        Whole,
        &[("FAKE_NUMA_NODE", "1")]
    ),
];

fn a_pool_keeps_what_it_is_told_and_makes_nobody_wait() {
    let cuda = fake::cuda();
    let stream = cuda.create_stream(GPU).expect("a stream");
    fake::clear_trace();
    let pool = cuda.create_pool(GPU, 1 << 20).expect("a pool");
    let set_up = [
        "cuDevicePrimaryCtxRetain",
        "cuMemPoolCreate",
        "cuMemPoolSetAttribute",
        "cuMemPoolSetAttribute",
    ]
    .map(str::to_owned);
    assert_eq!(fake::trace(), set_up[1..]);
    assert_eq!(
        fake::flags(Kind::MemPool, pool.handle),
        0,
        "no allocation waits for another stream"
    );
    // SAFETY: `pool_alloc`: the pool and the stream are alive.
    let memory = unsafe { cuda.pool_alloc(pool, stream, 1000) }.expect("there is room");
    let info = cuda.classify(memory.base).expect("it is known");
    assert_eq!((info.kind, info.sharing), (MemoryKind::Pool, None));
    // SAFETY: `pool_usage`: the pool is alive.
    let usage = unsafe { cuda.pool_usage(pool) }.expect("it can be asked");
    assert_eq!(
        usage,
        PoolUsage {
            reserved: 2 << 20,
            most_reserved: 2 << 20,
            used: 1000
        }
    );
    assert!(
        // SAFETY: `free` asks for memory of `alloc`: it is refused for any other.
        unsafe { cuda.free(memory.base) }.is_err(),
        "a pool's memory goes back to the pool"
    );
    // SAFETY: `pool_free`: allocated above, nothing uses it, and the stream is alive.
    unsafe { cuda.pool_free(stream, memory.base) }.expect("it is there");
    assert!(
        // SAFETY: `pool_free`: it is refused.
        unsafe { cuda.pool_free(stream, memory.base) }.is_err(),
        "once"
    );
    // SAFETY: `trim_pool` and `destroy_pool`: the pool is alive.
    unsafe { cuda.trim_pool(pool, 0) }.expect("it is there");
    // SAFETY: as above.
    unsafe { cuda.destroy_pool(pool) }.expect("it is there");
    // SAFETY: `destroy_stream`: alive, and nobody uses it afterwards.
    unsafe { cuda.destroy_stream(stream) }.expect("it is there");
    assert_eq!((fake::all_live(), fake::violations()), (vec![], 0));
}

fn every_failure_of_a_pool_leaves_nothing() {
    let cuda = fake::cuda();
    let stream = cuda.create_stream(GPU).expect("a stream");
    // SAFETY: `destroy_pool`: made by the attempt.
    fake::each_failure(
        || cuda.create_pool(GPU, 0),
        |pool| unsafe { cuda.destroy_pool(pool) }.expect("no failure is left"),
    );
    let pool = cuda.create_pool(GPU, 0).expect("a pool");
    fake::each_failure(
        // SAFETY: `pool_alloc`: the pool and the stream are alive.
        || unsafe { cuda.pool_alloc(pool, stream, 1000) },
        // SAFETY: `pool_free`: allocated by the attempt, and nothing uses it.
        |made| unsafe { cuda.pool_free(stream, made.base) }.expect("no failure is left"),
    );
    // SAFETY: `pool_usage`: the pool is alive.
    fake::each_failure(|| unsafe { cuda.pool_usage(pool) }, drop);
    // SAFETY: `trim_pool`: the pool is alive.
    fake::each_failure(|| unsafe { cuda.trim_pool(pool, 0) }, drop);
}

fn a_pool_outlives_its_destruction_while_memory_of_it_is_out() {
    let cuda = fake::cuda();
    let stream = cuda.create_stream(GPU).expect("a stream");
    let pool = cuda.create_pool(GPU, 0).expect("a pool");
    // SAFETY: `pool_alloc`: the pool and the stream are alive.
    let memory = unsafe { cuda.pool_alloc(pool, stream, 1000) }.expect("there is room");
    // SAFETY: `destroy_pool`: the pool is alive.
    unsafe { cuda.destroy_pool(pool) }.expect("memory of it is no hindrance");
    assert_eq!(fake::live(Kind::Pool), 1);
    // SAFETY: `pool_free`: allocated above, and nothing uses it.
    unsafe { cuda.pool_free(stream, memory.base) }.expect("it is still there");
    assert_eq!(
        (
            fake::live(Kind::MemPool),
            fake::live(Kind::Pool),
            fake::violations()
        ),
        (0, 0, 0)
    );
}

fn pools_stay_out_of_captures() {
    let cuda = fake::cuda();
    // Beside a capture that it orders it counts as captured.
    let stream = RawStream::new(GPU, RawStream::LEGACY);
    let pool = cuda.create_pool(GPU, 0).expect("a pool");
    // SAFETY: `pool_alloc`: the pool and the stream are alive.
    let memory = unsafe { cuda.pool_alloc(pool, stream, 1000) }.expect("there is room");
    fake::set_capture(1);
    assert_eq!(
        // SAFETY: `capture_status`: the stream is alive.
        unsafe { cuda.capture_status(stream) }.expect("it can be asked"),
        CaptureStatus::Active
    );
    // SAFETY: as above.
    let refused = unsafe { cuda.pool_alloc(pool, stream, 1000) }.expect_err("a graph would own it");
    assert!(matches!(refused, Error::Capturing { .. }), "{refused}");
    // SAFETY: `pool_free`: it is refused.
    let refused =
        unsafe { cuda.pool_free(stream, memory.base) }.expect_err("a graph would free it");
    assert!(matches!(refused, Error::Capturing { .. }), "{refused}");
    assert_eq!(fake::capture(), 1, "the capture goes on");
    fake::set_capture(0);
    // SAFETY: `pool_free`: allocated above, and nothing uses it.
    unsafe { cuda.pool_free(stream, memory.base) }.expect("it stayed");
    assert_eq!(fake::violations(), 0);
}

fn a_return_that_failed_is_never_tried_again() {
    let cuda = fake::cuda();
    let stream = cuda.create_stream(GPU).expect("a stream");
    let pool = cuda.create_pool(GPU, 0).expect("a pool");
    // SAFETY: `pool_alloc`: the pool and the stream are alive.
    let memory = unsafe { cuda.pool_alloc(pool, stream, 1000) }.expect("there is room");
    fake::fail("cuMemFreeAsync", 719);
    // SAFETY: `pool_free`: allocated above, and nothing uses it.
    let error = unsafe { cuda.pool_free(stream, memory.base) }.expect_err("the call failed");
    assert_eq!(fake::code(&error), Some(719));
    // SAFETY: `pool_free`: it is refused.
    let error =
        unsafe { cuda.pool_free(stream, memory.base) }.expect_err("nobody knows what is left");
    assert!(error.to_string().contains("leaked"), "{error}");
}

fn managed_memory_is_freed_and_never_exported() {
    let cuda = fake::cuda();
    let memory = cuda.alloc_managed(GPU, 1).expect("there is room");
    assert_eq!(memory.len, 0x20_0000);
    let inside = DevicePtr(memory.base.0 + 100);
    let info = cuda.classify(inside).expect("it is known");
    assert_eq!((info.kind, info.sharing), (MemoryKind::Managed, None));
    for error in [
        cuda.export_handle(memory.base).map(drop),
        cuda.export_fd(memory.base).map(drop),
    ] {
        let error = error.expect_err("it moves");
        assert!(error.to_string().contains("managed"), "{error}");
    }
    // SAFETY: `free`: allocated above, and nothing uses it.
    unsafe { cuda.free(memory.base) }.expect("it is there");
    let plain = cuda.alloc(GPU, 1, Sharing::Handle).expect("there is room");
    // SAFETY: `free`: allocated above, and nothing uses it.
    unsafe { cuda.free(plain.base) }.expect("it is there");
    assert_eq!((fake::all_live(), fake::violations()), (vec![], 0));
}

fn every_failure_of_managed_memory_leaves_nothing() {
    let cuda = fake::cuda();
    fake::each_failure(
        || cuda.alloc_managed(GPU, 1),
        // SAFETY: `free`: allocated by the attempt, and nothing uses it.
        |made| unsafe { cuda.free(made.base) }.expect("no failure is left"),
    );
}

fn an_old_driver_has_neither_pools_nor_a_node() {
    let cuda = fake::cuda();
    let caps = cuda.caps(GPU).expect("it can be asked");
    assert!(!caps.pools && !caps.managed, "{caps:?}");
    assert!(matches!(
        cuda.create_pool(GPU, 0),
        Err(Error::Unsupported { .. })
    ));
    assert!(matches!(
        cuda.alloc_managed(GPU, 1),
        Err(Error::Unsupported { .. })
    ));
    assert_eq!(cuda.host_numa_node(GPU).expect("it can be asked"), None);
}

fn the_driver_names_the_numa_node() {
    let cuda = fake::cuda();
    assert_eq!(cuda.host_numa_node(GPU).expect("it can be asked"), Some(1));
    let gpu = Gpu::new(cuda, GPU).expect("a device");
    assert_eq!(gpu.numa_node().expect("the driver told"), Some(1));
}
