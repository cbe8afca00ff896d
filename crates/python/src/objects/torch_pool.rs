//! PyTorch's allocator on memory of a pool (`torch.cuda.MemPool` over
//! `torch.cuda.CUDAPluggableAllocator`).
//!
//! PyTorch finds two functions in this library by name and calls them for whole segments, on any
//! thread, with or without the interpreter's lock. They say for which device and no more, so a
//! process has one pool for each device here. A segment keeps the hold.

use std::collections::HashMap;
use std::ffi::{c_int, c_void};
use std::ptr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use gpu_ipc::backend::DevicePtr;
use gpu_ipc::broker::Pool as Hold;
use gpu_ipc::broker::pool::Segments;
use gpu_ipc::{Gpu, Stream};
use pyo3::prelude::*;

use crate::interpreter::errors::{invalid, unsupported};
use crate::interpreter::logging;

/// A part of a pool that PyTorch takes segments from.
struct Place {
    gpu: Gpu,
    hold: Weak<Hold>,
    part: String,
    segments: Segments,
    /// What keeps each segment, by its address.
    taken: HashMap<u64, Arc<Hold>>,
}

/// By device. Empty in a forked child in effect: PyTorch refuses CUDA there.
static PLACES: Mutex<Option<HashMap<c_int, Place>>> = Mutex::new(None);

struct Places(MutexGuard<'static, Option<HashMap<c_int, Place>>>);

impl Places {
    fn lock() -> Places {
        Places(PLACES.lock().unwrap_or_else(PoisonError::into_inner))
    }

    fn all(&mut self) -> &mut HashMap<c_int, Place> {
        self.0.get_or_insert_default()
    }
}

/// Refuses a device on which PyTorch takes no memory of another allocator's.
pub(super) fn check(gpu: &Gpu, hold: &Hold) -> PyResult<()> {
    if gpu.kind().arrays().torch_allocates {
        return Ok(());
    }
    Err(unsupported(
        "a pool of PyTorch's",
        format!("{} is on a {} device", hold.name(), gpu.kind()),
        "connect to the broker with a cuda device; on others make tensors of the parts by `tensors()`",
    ))
}

/// Makes a `torch.cuda.MemPool` over the part that is used on a device.
pub(super) fn make<'py>(py: Python<'py>, gpu: &Gpu) -> PyResult<Bound<'py, PyAny>> {
    let functions = ("gpu_ipc_torch_pool_alloc", "gpu_ipc_torch_pool_free");
    py.import("gpu_ipc._torch")?
        .call_method1("pool", (gpu.device().0, functions.0, functions.1))
}

/// Has the segments of the pool's device lie in a part of it; without a name in its only part.
pub(crate) fn use_part(gpu: &Gpu, hold: &Arc<Hold>, part: Option<&str>) -> PyResult<()> {
    let parts = hold.layout().parts();
    let name = match (part, parts) {
        (Some(name), _) => name,
        (None, [only]) => &only.spec.name,
        (None, _) => {
            return Err(invalid(
                "the part for PyTorch's segments",
                format!("not named, of a pool of {} parts", parts.len()),
                "named: `torch_pool(part)`",
            ));
        }
    };
    let found = hold.layout().part(name).zip(hold.device_ptr(name));
    let Some((of, start)) = found else {
        return Err(invalid(
            "the part for PyTorch's segments",
            format!("{name}, which {} does not have", hold.name()),
            "one of the pool's",
        ));
    };
    let mut places = Places::lock();
    let device = gpu.device().0 as c_int;
    if let Some(place) = places.all().get(&device)
        && let Some(other) = place.hold.upgrade()
    {
        if Arc::ptr_eq(&other, hold) && place.part == name {
            return Ok(());
        }
        return Err(invalid(
            "another torch_pool()",
            format!("for {name} of {}", hold.name()),
            "that of the pool that has the device: a process has one pool and part for each device, until the pool is closed",
        ));
    }
    let place = Place {
        gpu: gpu.clone(),
        hold: Arc::downgrade(hold),
        part: name.to_owned(),
        segments: Segments::of(start, of.spec.len),
        taken: HashMap::new(),
    };
    places.all().insert(device, place);
    Ok(())
}

fn take(size: isize, device: c_int, stream: *mut c_void) -> Result<u64, String> {
    let mut places = Places::lock();
    let place = places.all().get_mut(&device);
    let place = place.ok_or_else(|| format!("no pool is used on device {device}"))?;
    let hold = place
        .hold
        .upgrade()
        .ok_or_else(|| format!("the pool of device {device} was closed"))?;
    let stream = borrow(&place.gpu, stream).map_err(|error| error.to_string())?;
    hold.used_on(&stream).map_err(|error| error.to_string())?;
    let bytes = u64::try_from(size).unwrap_or(0);
    let start = place.segments.take(bytes).ok_or_else(|| {
        let (part, name) = (&place.part, hold.name());
        format!("no gap of {size} bytes in {part} of {name}: make the part larger")
    })?;
    place.taken.insert(start.0, hold);
    Ok(start.0)
}

fn give(start: u64, device: c_int, stream: *mut c_void) -> Result<(), gpu_ipc::Error> {
    let gpu = match Places::lock().all().get(&device) {
        Some(place) if place.taken.contains_key(&start) => place.gpu.clone(),
        _ => return Ok(()),
    };
    // The next segment here may be another stream's. The driver's own free waits as well.
    borrow(&gpu, stream)?.synchronize()?;
    let hold = Places::lock().all().get_mut(&device).and_then(|place| {
        place.segments.give(DevicePtr(start));
        place.taken.remove(&start)
    });
    // Not under the lock.
    drop(hold);
    Ok(())
}

fn borrow(gpu: &Gpu, stream: *mut c_void) -> Result<Stream, gpu_ipc::Error> {
    let handle = stream.expose_provenance() as u64;
    // SAFETY: `Stream::borrow` asks for a stream that is alive as long as `keep` is: PyTorch's
    // streams live as long as the process; and that no thread begins to capture it meanwhile:
    // PyTorch takes and frees segments of streams that it does not capture.
    unsafe { Stream::borrow(gpu, handle, Arc::new(())) }
}

/// Takes a segment of a device's pool; null when there is none, which PyTorch takes for no memory.
///
/// # Safety
///
/// None of its own: it is what PyTorch's `CUDAPluggableAllocator` calls.
#[unsafe(no_mangle)]
pub extern "C" fn gpu_ipc_torch_pool_alloc(
    size: isize,
    device: c_int,
    stream: *mut c_void,
) -> *mut c_void {
    match take(size, device, stream) {
        Ok(start) => ptr::with_exposed_provenance_mut(start as usize),
        Err(why) => {
            logging::error_later(format!("torch_pool: {why}"));
            ptr::null_mut()
        }
    }
}

/// Takes a segment back, once the work on its stream is done.
///
/// # Safety
///
/// None of its own: it is what PyTorch's `CUDAPluggableAllocator` calls. What was not taken here is
/// passed over.
#[unsafe(no_mangle)]
pub extern "C" fn gpu_ipc_torch_pool_free(
    start: *mut c_void,
    _size: isize,
    device: c_int,
    stream: *mut c_void,
) {
    if let Err(error) = give(start.expose_provenance() as u64, device, stream) {
        // When its work ends is not known, so its place is not given out again.
        logging::error_later(format!("torch_pool: a segment stays taken: {error}"));
    }
}
