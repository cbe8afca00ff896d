//! Stream-ordered pools: refused with the reason, and used as CUDA's are where they are proved.

use backend_hip::{PoolDefect, Proof, Step};
use gpu_api::groups::*;
use gpu_api::{Error, MemoryKind, RawPool, RawStream};

use crate::{Case, GPU, Library, WHOLE, proved, version};

/// A version without a report.
const RIGHT: (&str, &str) = ("GPU_IPC_SHIM_VERSION", "71400000");

macro_rules! case {
    ($name:ident, $environment:expr) => {
        Case {
            name: stringify!($name),
            library: WHOLE,
            environment: $environment,
            run: $name,
        }
    };
}

pub const CASES: &[Case] = &[
    case!(
        pools_without_a_proof_are_refused_with_what_was_reported,
        &[]
    ),
    case!(pools_are_refused_with_what_the_probe_saw, &[]),
    Case {
        name: "pools_that_the_runtime_lacks_are_refused",
        library: Library::Without(&["hipMallocFromPoolAsync"]),
        environment: &[],
        run: lacking,
    },
    case!(a_pool_comes_and_goes_whole, &[RIGHT]),
    case!(
        a_pool_outlives_its_destruction_while_memory_of_it_is_out,
        &[RIGHT]
    ),
    case!(
        pools_stay_out_of_captures,
        &[RIGHT, ("GPU_IPC_SHIM_INJECT", "captures")]
    ),
    case!(
        null_is_no_memory,
        &[RIGHT, ("GPU_IPC_SHIM_INJECT", "pool-gives-null")]
    ),
    case!(
        a_return_that_failed_is_never_tried_again,
        &[RIGHT, ("GPU_IPC_SHIM_INJECT", "pool-free-fails")]
    ),
];

fn refused(proof: Proof) -> String {
    let hip = backend_hip::Hip::load_with(Some(proof)).expect("it is of here");
    assert!(!hip.caps(GPU).expect("it is a device").pools);
    let error = hip.create_pool(GPU, 0).expect_err("it is not proved");
    assert!(matches!(error, Error::Unsupported { .. }), "{error:?}");
    error.to_string()
}

fn pools_without_a_proof_are_refused_with_what_was_reported() {
    let text = refused(Proof::new(version(), [Step::Words]));
    for expected in [
        "no probe has proved it",
        "rocm-systems#10943",
        "GPU_IPC_HIP_TRY=pools",
        "GPU_IPC_HIP_PROOF",
    ] {
        assert!(text.contains(expected), "{expected}: {text}");
    }
}

fn pools_are_refused_with_what_the_probe_saw() {
    let text = refused(
        Proof::new(version(), [Step::Pools]).with_pool_defects([PoolDefect::IgnoresThreshold]),
    );
    for expected in [
        "the probe saw here",
        "a pool gives memory back that it was told to keep",
        "rocm-systems#11690",
    ] {
        assert!(text.contains(expected), "{expected}: {text}");
    }
    assert!(!text.contains("#10943"), "what was only reported: {text}");
}

fn lacking() {
    let text = refused(Proof::new(version(), [Step::Pools]));
    assert!(
        text.contains("hipMallocFromPoolAsync") && text.contains("update ROCm"),
        "{text}"
    );
}

fn a_pool_comes_and_goes_whole() {
    let hip = proved(&[Step::Pools]);
    assert!(hip.caps(GPU).expect("it is a device").pools);
    let before = hip.memory_info(GPU).expect("it tells").free_bytes;
    let stream = hip.create_stream(GPU).expect("a stream");
    let pool = hip.create_pool(GPU, u64::MAX).expect("a pool");
    // SAFETY: `pool_alloc`: the pool and the stream are alive.
    let memory = unsafe { hip.pool_alloc(pool, stream, 1000) }.expect("there is room");
    assert!(matches!(
        // SAFETY: `pool_alloc`: as above.
        unsafe { hip.pool_alloc(pool, stream, 0) },
        Err(Error::Invalid { .. })
    ));
    let info = hip.classify(memory.base.offset(999)).expect("it is known");
    assert_eq!(
        (info.kind, info.sharing, info.device),
        (MemoryKind::Pool, None, Some(GPU))
    );
    for error in [
        hip.export_handle(memory.base).map(drop),
        hip.export_fd(memory.base).map(drop),
    ] {
        let error = error.expect_err("it has no handle");
        assert!(error.to_string().contains("stream-ordered"), "{error}");
    }
    // SAFETY: `pool_usage`: the pool is alive.
    let usage = unsafe { hip.pool_usage(pool) }.expect("it can be asked");
    assert!(
        usage.used >= 1000 && usage.reserved >= usage.used && usage.most_reserved >= usage.reserved,
        "{usage:?}"
    );
    assert!(
        // SAFETY: `free` asks for memory of `alloc`: it is refused for any other.
        unsafe { hip.free(memory.base) }.is_err(),
        "a pool's memory goes back to the pool"
    );
    // SAFETY: `pool_free`: allocated above, nothing uses it, and the stream is alive.
    unsafe { hip.pool_free(stream, memory.base) }.expect("it is there");
    assert!(
        // SAFETY: `pool_free`: it is refused.
        unsafe { hip.pool_free(stream, memory.base) }.is_err(),
        "once"
    );
    // SAFETY: `synchronize_stream`: it is alive.
    unsafe { hip.synchronize_stream(stream) }.expect("it ends");
    // SAFETY: `trim_pool` and `pool_usage`: the pool is alive.
    unsafe { hip.trim_pool(pool, 0) }.expect("it is there");
    // SAFETY: as above.
    let usage = unsafe { hip.pool_usage(pool) }.expect("it can be asked");
    assert_eq!((usage.reserved, usage.used), (0, 0));
    // SAFETY: `destroy_pool`: the pool is alive.
    unsafe { hip.destroy_pool(pool) }.expect("it is there");
    // SAFETY: `destroy_pool`: the library refuses what it does not know.
    assert!(unsafe { hip.destroy_pool(pool) }.is_err(), "once");
    assert_eq!(hip.memory_info(GPU).expect("it tells").free_bytes, before);
}

fn a_pool_outlives_its_destruction_while_memory_of_it_is_out() {
    let hip = proved(&[Step::Pools]);
    let stream = hip.create_stream(GPU).expect("a stream");
    let pool = hip.create_pool(GPU, 0).expect("a pool");
    // SAFETY: `pool_alloc`: the pool and the stream are alive.
    let memory = unsafe { hip.pool_alloc(pool, stream, 1000) }.expect("there is room");
    // SAFETY: `destroy_pool`: the pool is alive.
    unsafe { hip.destroy_pool(pool) }.expect("memory of it is no hindrance");
    // SAFETY: `fill`: the stream and the memory are alive.
    unsafe { hip.fill(stream, memory.base, 7, 1000) }.expect("it is still there");
    // SAFETY: `pool_free`: allocated above, and the fill is queued before.
    unsafe { hip.pool_free(stream, memory.base) }.expect("it is still there");
}

fn pools_stay_out_of_captures() {
    let hip = proved(&[Step::Pools]);
    let stream = hip.create_stream(GPU).expect("a stream");
    let pool = hip.create_pool(GPU, 0).expect("a pool");
    // SAFETY: `pool_alloc`: the pool and the stream are alive.
    let refused = unsafe { hip.pool_alloc(pool, stream, 1000) }.expect_err("a graph would own it");
    assert!(matches!(refused, Error::Capturing { .. }), "{refused}");
    // SAFETY: `pool_free`: it is refused.
    let refused = unsafe { hip.pool_free(stream, gpu_api::DevicePtr(0x10)) }
        .expect_err("a graph would free it");
    assert!(matches!(refused, Error::Capturing { .. }), "{refused}");
}

fn null_is_no_memory() {
    let hip = proved(&[Step::Pools]);
    let (stream, pool) = (
        hip.create_stream(GPU).expect("a stream"),
        hip.create_pool(GPU, 0).expect("a pool"),
    );
    let asked = hip.memory_info(GPU).expect("it tells").total_bytes + 1;
    let alloc = |pool: RawPool, stream: RawStream| {
        // SAFETY: `pool_alloc`: the pool and the stream are alive.
        unsafe { hip.pool_alloc(pool, stream, asked) }
    };
    match alloc(pool, stream) {
        Err(Error::OutOfMemory { asked: told, .. }) => assert_eq!(told, asked),
        other => panic!("{other:?}"),
    }
}

fn a_return_that_failed_is_never_tried_again() {
    let hip = proved(&[Step::Pools]);
    let (stream, pool) = (
        hip.create_stream(GPU).expect("a stream"),
        hip.create_pool(GPU, 0).expect("a pool"),
    );
    // SAFETY: `pool_alloc`: the pool and the stream are alive.
    let memory = unsafe { hip.pool_alloc(pool, stream, 1000) }.expect("there is room");
    // SAFETY: `pool_free`: allocated above, and nothing uses it.
    let error = unsafe { hip.pool_free(stream, memory.base) }.expect_err("the call failed");
    assert!(
        matches!(&error, Error::Driver { source, .. } if source.code == 719),
        "{error:?}"
    );
    // SAFETY: `pool_free`: it is refused.
    let error =
        unsafe { hip.pool_free(stream, memory.base) }.expect_err("nobody knows what is left");
    assert!(error.to_string().contains("leaked"), "{error}");
}
