//! The scripts of `bfc_conformance`, with their figures, on memory: the host backend's device
//! memory, memory that is exported, and host memory.

use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use allocators::*;
use backend_host::{HostBackend, HostConfig};
use gpu_api::{DeviceId, Error, Gpu, HostMemory};

const GIB: u64 = 1 << 30;
const MIB: u64 = 1 << 20;

fn gpu() -> Gpu {
    let config = HostConfig::default().bytes_per_device(4 * GIB);
    Gpu::new(HostBackend::new(config).expect("it opens"), DeviceId(0)).expect("a device")
}

trait Upstream: SubAllocator {
    fn make() -> Self;
}

impl Upstream for DeviceMemory {
    fn make() -> DeviceMemory {
        DeviceMemory::new(gpu()).expect("memory")
    }
}

impl Upstream for Shareable {
    fn make() -> Shareable {
        Shareable::new(DeviceMemory::make())
    }
}

impl Upstream for HostPages {
    fn make() -> HostPages {
        HostPages::new(
            gpu(),
            HostMemory {
                pinned: true,
                numa_node: None,
            },
        )
        .expect("pages")
    }
}

fn bfc<U: Upstream>(limit: u64, growth: Growth) -> Bfc<U> {
    Bfc::new(
        BfcOptions::new("bfc").limit(limit).growth(growth),
        U::make(),
    )
}

fn take<U: SubAllocator>(bfc: &Bfc<U>, bytes: u64) -> u64 {
    bfc.alloc(Request::new(bytes)).expect("room").address
}

/// Allocations, bytes in use, their peak, the largest.
fn figures<U: SubAllocator>(bfc: &Bfc<U>) -> (u64, u64, u64, u64) {
    let stats = bfc.stats();
    (
        stats.num_allocs,
        stats.bytes_in_use,
        stats.peak_bytes_in_use,
        stats.largest_alloc_size,
    )
}

fn no_dups<U: Upstream>() {
    let bfc = bfc::<U>(GIB, Growth::Whole);
    let mut held: Vec<u64> = (1..1024).map(|bytes| take(&bfc, bytes)).collect();
    assert_eq!(figures(&bfc), (1023, 654_336, 654_336, 1024));
    held.sort_unstable();
    for pair in held.windows(2) {
        assert!(pair[0] + bfc.get(pair[0]).expect("in use").asked <= pair[1]);
    }
    held.into_iter()
        .for_each(|address| bfc.free(address).expect("in use"));
    assert_eq!(figures(&bfc), (1023, 0, 654_336, 1024));
}

fn exercise_coalescing<U: Upstream>() {
    let bfc = bfc::<U>(GIB, Growth::Whole);
    let first = take(&bfc, 4096);
    bfc.free(first).expect("in use");
    let sizes = [1024 * 4, 1_048_576 * 8, 2048 * 8, 10_485_760 * 4];
    for _ in 0..1024 {
        let held = sizes.map(|bytes| take(&bfc, bytes));
        held.into_iter()
            .for_each(|address| bfc.free(address).expect("in use"));
    }
    assert_eq!(figures(&bfc), (4097, 0, sizes.iter().sum(), 10_485_760 * 4));
    assert_eq!(take(&bfc, 4096), first);
}

fn allocated_against_requested<U: Upstream>() {
    let bfc = bfc::<U>(GIB, Growth::Whole);
    let placed = bfc.alloc(Request::new(4)).expect("room");
    assert_eq!((placed.asked, placed.bytes), (4, 256));
}

fn growth_doubles_from_two_mebibytes<U: Upstream>() {
    let bfc = bfc::<U>(GIB, Growth::DEFAULT);
    let reserved = |bytes| {
        take(&bfc, bytes);
        bfc.stats().bytes_reserved / MIB
    };
    assert_eq!(
        [1, 2 * MIB, 30 * MIB, 30 * MIB, 30 * MIB].map(reserved),
        [2, 6, 38, 70, 134]
    );
}

fn physical_allocator_ooms_fragmentation<U: Upstream>() {
    let options = BfcOptions::new("bfc")
        .limit(512 * MIB)
        .collect_regions(false);
    let bfc = Bfc::new(options, U::make());
    let held: Vec<u64> = (0..128).map(|_| take(&bfc, 4 * MIB)).collect();
    held[..127]
        .iter()
        .for_each(|&address| bfc.free(address).expect("in use"));
    assert!(matches!(
        bfc.alloc(Request::new(508 * MIB)),
        Err(Error::OutOfMemory { .. })
    ));
    assert!(bfc.snapshot().fragmentation() > 0.0);
}

fn region_deallocation<U: Upstream>() {
    let bfc = bfc::<U>(2 * GIB, Growth::DEFAULT);
    let held: Vec<u64> = (0..128).map(|_| take(&bfc, 4 * MIB)).collect();
    held[..127]
        .iter()
        .for_each(|&address| bfc.free(address).expect("in use"));
    let before = bfc.stats().bytes_reserved;
    let freed = bfc.trim().expect("upstream takes them");
    assert_eq!(bfc.snapshot().regions.len(), 1);
    assert_eq!(freed, before - bfc.stats().bytes_reserved);
}

fn custom_memory_limit<U: Upstream>() {
    let bfc = bfc::<U>(2 * MIB, Growth::Whole);
    take(&bfc, 256);
    assert!(matches!(
        bfc.alloc(Request::new(8 * MIB)),
        Err(Error::OutOfMemory { .. })
    ));
    assert_eq!(bfc.stats().bytes_limit, Some(2 * MIB));
}

fn retry_success_with_three_users_and_room_for_two<U: Upstream>() {
    let bfc = Arc::new(bfc::<U>(2 * MIB, Growth::Whole));
    let patient = || Request::new(MIB).wait_until(Instant::now() + Duration::from_secs(600));
    thread::scope(|scope| {
        for _ in 0..3 {
            scope.spawn(|| {
                for _ in 0..500 {
                    let placed = bfc
                        .alloc(patient())
                        .expect("the other two give theirs back");
                    bfc.free(placed.address).expect("in use");
                }
            });
        }
    });
    assert_eq!(
        (bfc.stats().num_allocs, bfc.stats().bytes_in_use),
        (1500, 0)
    );
    assert!(bfc.stats().peak_bytes_in_use <= 2 * MIB);
}

macro_rules! on {
    ($($upstream:ident as $name:ident: $($case:ident),*;)*) => {$(
        mod $name {
            $(#[test]
            fn $case() {
                super::$case::<super::$upstream>();
            })*
        }
    )*};
}

on! {
    DeviceMemory as device_memory: no_dups, exercise_coalescing, allocated_against_requested,
        growth_doubles_from_two_mebibytes, physical_allocator_ooms_fragmentation, region_deallocation,
        custom_memory_limit, retry_success_with_three_users_and_room_for_two;
    Shareable as shareable_memory: no_dups, exercise_coalescing, allocated_against_requested,
        growth_doubles_from_two_mebibytes, physical_allocator_ooms_fragmentation, region_deallocation,
        custom_memory_limit, retry_success_with_three_users_and_room_for_two;
    HostPages as host_memory: no_dups, exercise_coalescing, allocated_against_requested,
        growth_doubles_from_two_mebibytes, physical_allocator_ooms_fragmentation, region_deallocation,
        custom_memory_limit, retry_success_with_three_users_and_room_for_two;
}
