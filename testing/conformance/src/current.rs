//! The device that is current on the calling thread, as an application makes it.

use std::cell::Cell;
use std::ffi::{c_int, c_void};
use std::ptr;

use gpu_ipc::backend::DeviceId;
use gpu_ipc::host::HostBackend;
use gpu_ipc::{BackendKind, Gpu};
use libloading::{Library, Symbol};

/// Calls of the vendor's that make a device current, which are the application's to make and so no
/// part of a backend.
fn library(names: &[&str]) -> Library {
    let open = |name: &&str| {
        // SAFETY: `Library::new` runs the library's initialisers: the backend has loaded it
        // already.
        unsafe { Library::new(*name) }.ok()
    };
    names
        .iter()
        .find_map(open)
        .expect("the backend has loaded it")
}

/// Makes a device of `gpu`'s backend current on the calling thread, for good.
pub(crate) fn make_current(gpu: &Gpu, device: DeviceId) {
    match gpu.kind() {
        BackendKind::Host => HostBackend::set_current_device(Some(device)),
        BackendKind::Cuda => cuda(device),
        BackendKind::Hip => hip(device),
        other => panic!("no way to make a device of {other} current"),
    }
}

/// What `hipSetDevice` and `hipGetDevice` stand for: the number of the device that the thread's
/// calls are about.
fn hip(device: DeviceId) {
    let named = std::env::var("GPU_IPC_HIP_LIBRARY").unwrap_or_else(|_| "libamdhip64.so".into());
    let hip = library(&[
        &named,
        "libamdhip64.so.7",
        "libamdhip64.so.6",
        "libamdhip64.so.5",
    ]);
    // SAFETY: `Library::get`: the function has this type in AMD's header.
    let set: Symbol<'_, unsafe extern "C" fn(c_int) -> u32> =
        unsafe { hip.get(b"hipSetDevice") }.expect("it has it");
    // SAFETY: `hipSetDevice` refuses what is no device.
    assert_eq!(unsafe { set(device.0 as c_int) }, 0);
}

/// Makes the primary context current, as `cudaSetDevice` does; retained once for each thread and
/// device, for good.
fn cuda(device: DeviceId) {
    thread_local! {
        static RETAINED: Cell<[*mut c_void; 64]> = const { Cell::new([ptr::null_mut(); 64]) };
    }
    let cuda = library(&["libcuda.so.1", "libcuda.so"]);
    let mut contexts = RETAINED.get();
    let context = &mut contexts[device.0 as usize];
    if context.is_null() {
        type Retain = unsafe extern "C" fn(*mut *mut c_void, c_int) -> u32;
        // SAFETY: `Library::get`: the function has this type in NVIDIA's header.
        let retain: Symbol<'_, Retain> =
            unsafe { cuda.get(b"cuDevicePrimaryCtxRetain") }.expect("it has it");
        // SAFETY: `cuDevicePrimaryCtxRetain` writes one pointer: `context` is one.
        assert_eq!(unsafe { retain(context, device.0 as c_int) }, 0);
    }
    // SAFETY: `Library::get`: the function has this type in NVIDIA's header.
    let set: Symbol<'_, unsafe extern "C" fn(*mut c_void) -> u32> =
        unsafe { cuda.get(b"cuCtxSetCurrent") }.expect("it has it");
    // SAFETY: `cuCtxSetCurrent` asks for a context that is alive: it was retained, for good.
    assert_eq!(unsafe { set(*context) }, 0);
    RETAINED.set(contexts);
}
