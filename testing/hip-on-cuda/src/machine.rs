//! What HIP's functions need of the device below them.
//!
//! Conditions are those of the HIP function that asks: addresses, streams and events are alive, and
//! ranges are valid.

use std::cell::Cell;
use std::ffi::c_void;

use driver::calls::HostFunction;
use gpu_api::PoolUsage;

/// A result with HIP's code, which is CUDA's where both have one.
pub(crate) type Outcome<T = ()> = Result<T, u32>;

pub(crate) const INVALID_VALUE: u32 = 1;
pub(crate) const NO_DEVICE: u32 = 100;
pub(crate) const NOT_SUPPORTED: u32 = 801;
pub(crate) const UNKNOWN: u32 = 999;

thread_local! {
    /// The thread's current device.
    pub(crate) static DEVICE: Cell<i32> = const { Cell::new(0) };
}

/// What memory an address lies in.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Kind {
    Host,
    Device { device: i32, managed: bool },
}

pub(crate) trait Machine: Send + Sync {
    fn count(&self) -> i32;
    fn name(&self, device: i32) -> Outcome<String>;
    fn uuid(&self, device: i32) -> Outcome<[u8; 16]>;
    fn place(&self, device: i32) -> Outcome<String>;
    fn total(&self, device: i32) -> Outcome<usize>;
    fn can_reach(&self, device: i32, peer: i32) -> Outcome<bool>;
    fn reach(&self, device: i32, peer: i32) -> Outcome;
    /// Makes a device the one that the thread's calls are about.
    fn enter(&self, device: i32) -> Outcome;
    fn exchange_mode(&self, mode: u32) -> Outcome<u32>;
    fn device_files(&self) -> &'static str;
    fn synchronize(&self) -> Outcome;

    fn free_and_total(&self) -> Outcome<(usize, usize)>;
    fn alloc(&self, device: i32, len: usize) -> Outcome<u64>;
    fn free(&self, base: u64) -> Outcome;
    fn range(&self, ptr: u64) -> Outcome<(u64, usize)>;
    fn kind(&self, ptr: u64) -> Outcome<Option<Kind>>;
    fn host_alloc(&self, len: usize) -> Outcome<usize>;
    fn host_free(&self, ptr: usize) -> Outcome;
    fn register(&self, ptr: usize, len: usize, flags: u32) -> Outcome;
    fn unregister(&self, ptr: usize) -> Outcome;
    fn device_pointer(&self, ptr: usize) -> Outcome<u64>;

    /// Makes a pool that keeps this number of bytes, and whose allocations wait for no other
    /// stream.
    fn pool(&self, device: i32, keep: u64) -> Outcome<u64>;
    fn pool_destroy(&self, device: i32, pool: u64) -> Outcome;
    fn pool_usage(&self, device: i32, pool: u64) -> Outcome<PoolUsage>;
    fn pool_trim(&self, device: i32, pool: u64, keep: usize) -> Outcome;
    fn pool_alloc(&self, device: i32, pool: u64, stream: u64, len: usize) -> Outcome<u64>;
    fn pool_free(&self, stream: u64, base: u64) -> Outcome;

    fn granularity(&self, device: i32) -> Outcome<usize>;
    fn create(&self, device: i32, len: usize) -> Outcome<u64>;
    fn release(&self, handle: u64) -> Outcome;
    fn reserve(&self, len: usize) -> Outcome<u64>;
    fn unreserve(&self, base: u64, len: usize) -> Outcome;
    fn map(&self, base: u64, len: usize, handle: u64) -> Outcome;
    fn unmap(&self, base: u64, len: usize) -> Outcome;
    fn grant(&self, base: u64, len: usize, device: i32, write: bool) -> Outcome;
    fn export(&self, handle: u64) -> Outcome<i32>;
    fn import(&self, fd: i32) -> Outcome<u64>;
    fn retain(&self, ptr: u64) -> Outcome<u64>;
    /// Exports plain memory as a descriptor, and maps one.
    fn export_plain(&self, base: u64, len: usize) -> Outcome<i32>;
    fn import_plain(&self, device: i32, fd: i32, len: usize) -> Outcome<u64>;
    fn close_plain(&self, base: u64) -> Outcome;

    fn handle(&self, base: u64) -> Outcome<[u8; 64]>;
    fn open(&self, device: i32, handle: [u8; 64]) -> Outcome<u64>;
    fn close(&self, base: u64) -> Outcome;

    fn event(&self, device: i32, flags: u32) -> Outcome<u64>;
    fn event_handle(&self, event: u64) -> Outcome<[u8; 64]>;
    fn event_open(&self, device: i32, handle: [u8; 64]) -> Outcome<u64>;
    fn event_record(&self, event: u64, stream: u64) -> Outcome;
    fn event_query(&self, event: u64) -> Outcome;
    fn event_destroy(&self, event: u64) -> Outcome;

    fn stream(&self, device: i32, flags: u32) -> Outcome<u64>;
    fn stream_destroy(&self, stream: u64) -> Outcome;
    fn stream_query(&self, stream: u64) -> Outcome;
    fn stream_synchronize(&self, stream: u64) -> Outcome;
    fn stream_wait(&self, stream: u64, event: u64) -> Outcome;
    fn stream_capturing(&self, stream: u64) -> Outcome<u32>;
    fn stream_id(&self, stream: u64) -> Outcome<u64>;
    fn stream_device(&self, stream: u64) -> Outcome<i32>;
    fn write(&self, stream: u64, word: u64, value: u64) -> Outcome;
    fn wait_at_least(&self, stream: u64, word: u64, value: u64) -> Outcome;
    fn call(&self, stream: u64, function: HostFunction, data: *mut c_void) -> Outcome;
    fn copy_in(&self, stream: u64, to: u64, from: *const c_void, len: usize) -> Outcome;
    fn copy_out(&self, stream: u64, to: *mut c_void, from: u64, len: usize) -> Outcome;
    fn copy(&self, stream: u64, to: u64, from: u64, len: usize) -> Outcome;
    fn fill(&self, stream: u64, to: u64, byte: u8, len: usize) -> Outcome;
}
