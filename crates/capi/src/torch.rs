//! PyTorch's allocator on memory of a session (`torch.cuda.memory.CUDAPluggableAllocator`).
//!
//! PyTorch finds two functions by name and calls them for whole segments, on any thread. They say
//! for which device and no more, so a process has one session for each device here.

use std::ffi::{c_int, c_void};
use std::ptr;
use std::sync::Arc;

use crate::boundary::{call, value_or};
use crate::engine::{Error, Stream};
use crate::failure::{Failure, Outcome};
use crate::kinds::gpu_ipc_session;
use crate::pools::Pool;

/// Lets PyTorch allocate its segments of this session's device from the session, by
/// `gpu_ipc_torch_alloc` and `gpu_ipc_torch_free`. To be called once for each device, before
/// PyTorch allocates there.
///
/// Keeps: the session, until the process ends: segments may outlive the handle. Thread: any.
/// Blocks: no. Errors: `BAD_HANDLE`, `UNSUPPORTED` for a session that is on no CUDA device,
/// `INVALID` when another session has that device.
#[unsafe(no_mangle)]
pub extern "C" fn gpu_ipc_torch_use(session: *mut gpu_ipc_session) -> i32 {
    call(|process| {
        let session = process.get(session)?.session.clone();
        if !session.gpu().kind().arrays().torch_allocates {
            return Err(Error::unsupported(
                "an allocator of PyTorch's",
                format!("the session is on a {} device", session.gpu().kind()),
                "open the session on a cuda device",
            )
            .into());
        }
        let device = session.gpu().device().0 as c_int;
        let mut pools = process.pools.lock();
        if pools
            .get(&device)
            .is_some_and(|pool| pool.session.id() != session.id())
        {
            return Err(Failure::invalid(
                "the session of a device",
                "a second one",
                "the first: a process has one for each device",
            ));
        }
        pools.entry(device).or_insert_with(|| Pool::of(session));
        Ok(())
    })
}

/// Allocates a segment for PyTorch; null when there is none, which PyTorch takes for no memory. For
/// `CUDAPluggableAllocator(path, "gpu_ipc_torch_alloc", "gpu_ipc_torch_free")`.
///
/// Keeps: nothing. Thread: any. Blocks: as `gpu_ipc_alloc`. Errors: as `gpu_ipc_alloc`; `INVALID`
/// for a device that no session was named for by `gpu_ipc_torch_use`.
#[unsafe(no_mangle)]
pub extern "C" fn gpu_ipc_torch_alloc(
    size: isize,
    device: c_int,
    stream: *mut c_void,
) -> *mut c_void {
    // PyTorch waits on its own streams before it uses a segment.
    let _ = stream;
    value_or(ptr::null_mut(), |process| {
        // The driver may take long, so the lock is not held meanwhile.
        let session = process
            .pools
            .lock()
            .get(&device)
            .map(|pool| pool.session.clone());
        let session = session.ok_or_else(|| no_pool(device))?;
        let bytes = u64::try_from(size);
        let bytes = bytes
            .map_err(|_| Failure::invalid("the size of a segment", size.to_string(), "above 0"))?;
        let block = session.alloc(bytes)?;
        let start = block.device_ptr().0 as usize;
        let mut pools = process.pools.lock();
        pools
            .get_mut(&device)
            .ok_or_else(|| no_pool(device))?
            .segments
            .insert(start, block);
        Ok(ptr::with_exposed_provenance_mut(start))
    })
}

/// Takes a segment of PyTorch's back. It stays with those who hold leases on parts of it, and until
/// the work on its stream is done. What was not allocated here is passed over.
///
/// Keeps: nothing. Thread: any. Blocks: no. Errors: `DRIVER`, `MISMATCH`: then the segment is kept
/// until the process ends, for nobody knows when its work is done.
#[unsafe(no_mangle)]
pub extern "C" fn gpu_ipc_torch_free(
    start: *mut c_void,
    size: isize,
    device: c_int,
    stream: *mut c_void,
) {
    // The segment's own length counts.
    let _ = size;
    value_or((), |process| -> Outcome {
        let (segment, session) = {
            let mut pools = process.pools.lock();
            let Some(pool) = pools.get_mut(&device) else {
                return Ok(());
            };
            let Some(segment) = pool.segments.remove(&start.addr()) else {
                return Ok(());
            };
            (segment, pool.session.clone())
        };
        // SAFETY: `Stream::borrow` asks for a stream that is alive as long as `keep` is: PyTorch's
        // streams live as long as the process; and that nobody begins to capture it meanwhile:
        // PyTorch frees no segment while it captures.
        let used = unsafe { Stream::borrow(session.gpu(), stream.addr() as u64, Arc::new(())) };
        match used.and_then(|stream| segment.used_on(&stream)) {
            Ok(()) => Ok(()),
            Err(error) => {
                std::mem::forget(segment);
                Err(error.into())
            }
        }
    });
}

#[cold]
fn no_pool(device: c_int) -> Failure {
    Failure::invalid(
        "the device of a segment",
        device.to_string(),
        "one that gpu_ipc_torch_use named a session for",
    )
}
