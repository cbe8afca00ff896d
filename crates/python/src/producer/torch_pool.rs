//! PyTorch's allocator on memory of a session (`torch.cuda.MemPool` over
//! `torch.cuda.CUDAPluggableAllocator`).
//!
//! PyTorch finds two functions in this library by name and calls them for whole segments, on any
//! thread, with or without the interpreter's lock. They say for which device and no more, so there
//! is one pool for each device and process. A segment is a block of the session. It keeps the
//! session, so tensors outlive its closing.

use pyo3::prelude::*;
use std::ffi::{c_int, c_void};
use std::ptr;
use std::sync::{Arc, Mutex, PoisonError};

use super::shared::{Lent, Shared};
use crate::interpreter::errors::{invalid, unsupported};
use crate::interpreter::logging;

struct Pool {
    device: c_int,
    session: Arc<Shared>,
    /// PyTorch's own object, the same for every call.
    made: Py<PyAny>,
    segments: Vec<Lent>,
}

/// Empty in a forked child in effect: PyTorch refuses CUDA there.
static POOLS: Mutex<Vec<Pool>> = Mutex::new(Vec::new());

fn pools() -> std::sync::MutexGuard<'static, Vec<Pool>> {
    POOLS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Returns the pool of a session, made at the first call.
pub(crate) fn open<'py>(py: Python<'py>, session: &Arc<Shared>) -> PyResult<Bound<'py, PyAny>> {
    if !session.gpu.kind().arrays().torch_allocates {
        return Err(unsupported(
            "a pool of PyTorch's",
            format!("the session is on a {} device", session.gpu.kind()),
            "open the session on a cuda device; on others share tensors by copy=True, or blocks of session.alloc",
        ));
    }
    let device = session.gpu.device().0 as c_int;
    let known = |pools: &[Pool]| match pools.iter().find(|pool| pool.device == device) {
        Some(pool) if Arc::ptr_eq(&pool.session, session) => Some(Ok(pool.made.clone_ref(py))),
        Some(_) => Some(Err(invalid(
            "a second session's torch_pool()",
            "asked for",
            "the first's: a process has one pool for each device",
        ))),
        None => None,
    };
    if let Some(pool) = known(&pools()) {
        return pool.map(|made| made.into_bound(py));
    }
    let made = py.import("gpu_ipc._torch")?.call_method1(
        "pool",
        (device, "gpu_ipc_torch_alloc", "gpu_ipc_torch_free"),
    )?;
    let mut pools = pools();
    if let Some(pool) = known(&pools) {
        // Another thread was faster. Nothing of the one made here was allocated yet.
        drop(pools);
        return pool.map(|made| made.into_bound(py));
    }
    pools.push(Pool {
        device,
        session: session.clone(),
        made: made.clone().unbind(),
        segments: Vec::new(),
    });
    Ok(made)
}

/// Allocates a segment of a device's pool; null when there is none, which PyTorch takes for no
/// memory.
///
/// # Safety
///
/// None of its own: it is what PyTorch's `CUDAPluggableAllocator` calls.
#[unsafe(no_mangle)]
pub extern "C" fn gpu_ipc_torch_alloc(
    size: isize,
    device: c_int,
    _stream: *mut c_void,
) -> *mut c_void {
    let session = pools()
        .iter()
        .find(|pool| pool.device == device)
        .map(|pool| pool.session.clone());
    let Some(session) = session else {
        logging::error_later(format!(
            "torch_pool: no session of this process has a pool on cuda:{device}"
        ));
        return ptr::null_mut();
    };
    let Ok(bytes) = u64::try_from(size) else {
        return ptr::null_mut();
    };
    match session.session.alloc(bytes) {
        Ok(block) => {
            let lent = Lent::new(block, &session, true);
            let start = ptr::with_exposed_provenance_mut(lent.start() as usize);
            if let Some(pool) = pools().iter_mut().find(|pool| pool.device == device) {
                pool.segments.push(lent);
            }
            start
        }
        Err(error) => {
            logging::error_later(format!("torch_pool: no segment of {bytes} bytes: {error}"));
            ptr::null_mut()
        }
    }
}

/// Takes a segment back. It stays with those who hold leases on parts of it, and until the work on
/// its stream is done.
///
/// # Safety
///
/// None of its own: it is what PyTorch's `CUDAPluggableAllocator` calls. What was not allocated
/// here is passed over.
#[unsafe(no_mangle)]
pub extern "C" fn gpu_ipc_torch_free(
    start: *mut c_void,
    _size: isize,
    device: c_int,
    stream: *mut c_void,
) {
    let start = start.expose_provenance() as u64;
    let segment = pools()
        .iter_mut()
        .find(|pool| pool.device == device)
        .and_then(|pool| {
            let place = pool
                .segments
                .iter()
                .position(|segment| segment.start() == start)?;
            Some(pool.segments.swap_remove(place))
        });
    let Some(segment) = segment else { return };
    // SAFETY: `Stream::borrow` asks for a stream that is alive as long as `keep` is: PyTorch's
    // streams live as long as the process; and that nobody begins to capture it meanwhile: PyTorch
    // frees no segment while it captures.
    let used = unsafe {
        gpu_ipc::Stream::borrow(
            &segment.session().gpu,
            stream.expose_provenance() as u64,
            Arc::new(()),
        )
    };
    if let Err(error) = used.and_then(|stream| segment.block().used_on(&stream)) {
        // Nobody knows when its work ends.
        logging::error_later(format!("torch_pool: a segment is kept for ever: {error}"));
        std::mem::forget(segment);
    }
}
