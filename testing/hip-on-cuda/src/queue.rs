//! HIP's functions about streams, events, words and copies.

use std::collections::BTreeSet;
use std::ffi::{c_int, c_void};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use gpu_api::lock::Acquire;

use crate::device::entered;
use crate::export::{hip, put};
use crate::machine::{DEVICE, INVALID_VALUE, Machine, NOT_SUPPORTED, Outcome};
use crate::pool;
use crate::settings::{Fault, Settings};
use crate::sharing::Handle;

const NOT_READY: u32 = 600;
const INTERPROCESS: u32 = 4;
const DISABLE_TIMING: u32 = 2;
/// Flags of events that AMD alone has; at most one of them.
const AMD_EVENT_FLAGS: u32 = 0xe000_0000;

/// Waits that are good before a runtime loses count.
const LAPSE: u32 = 32;

/// Waits for events of other processes.
static WAITS: AtomicU32 = AtomicU32::new(0);

/// An event of another process was destroyed here.
static FORGOTTEN: AtomicBool = AtomicBool::new(false);

/// Events that were opened from another process.
static OPENED: Mutex<BTreeSet<u64>> = Mutex::new(BTreeSet::new());

/// Streams that are alive.
static MADE: Mutex<Vec<u64>> = Mutex::new(Vec::new());

/// Says whether the device of a stream has no words.
fn lacks_words(machine: &dyn Machine, stream: u64) -> Outcome<bool> {
    let settings = Settings::get();
    let is_last = machine.stream_device(stream)? == machine.count() - 1;
    Ok(settings.has(Fault::NoWords) || settings.has(Fault::PoorDevice) && is_last)
}

/// Blocks until an event is complete, as AMD's emulation does.
fn complete(machine: &dyn Machine, event: u64) -> Outcome {
    loop {
        match machine.event_query(event) {
            Err(NOT_READY) => std::thread::yield_now(),
            other => return other,
        }
    }
}

/// Calls a function that takes a stream and a status, as `hipStreamAddCallback` does, with what
/// stands beside it.
unsafe extern "C" fn call_back(packed: *mut c_void) {
    // SAFETY: `Box::from_raw`: `hipStreamAddCallback` packed it, for one call.
    let packed = unsafe { Box::from_raw(packed.cast::<Packed>()) };
    // SAFETY: the callback: HIP's caller vouches for it and for its data.
    unsafe { (packed.callback)(packed.stream, 0, packed.data) };
}

struct Packed {
    callback: unsafe extern "C" fn(u64, u32, *mut c_void),
    stream: u64,
    data: *mut c_void,
}

hip! {
    hipEventCreateWithFlags(event: u64; flags: u32) {
        let (machine, device) = entered()?;
        if flags & INTERPROCESS != 0 && flags & DISABLE_TIMING == 0 || (flags & AMD_EVENT_FLAGS).count_ones() > 1 {
            return Err(INVALID_VALUE);
        }
        machine.event(device, flags & !AMD_EVENT_FLAGS)
    }
    hipIpcOpenEventHandle(event: u64; handle: Handle) {
        let (machine, device) = entered()?;
        let event = machine.event_open(device, handle.bytes())?;
        OPENED.acquire().insert(event);
        Ok(event)
    }
    hipEventRecord(; event: u64, stream: u64) {
        entered()?.0.event_record(event, stream)
    }
    hipEventQuery(; event: u64) {
        entered()?.0.event_query(event)
    }
    hipEventDestroy(; event: u64) {
        let machine = entered()?.0;
        if OPENED.acquire().remove(&event) {
            FORGOTTEN.store(true, Ordering::Relaxed);
        }
        if Settings::get().has(Fault::DestroyEventWaits) {
            let all = MADE.acquire().clone();
            all.into_iter().try_for_each(|stream| machine.stream_synchronize(stream))?;
        }
        machine.event_destroy(event)
    }
    hipStreamCreateWithFlags(stream: u64; flags: u32) {
        let (machine, device) = entered()?;
        let stream = machine.stream(device, flags)?;
        MADE.acquire().push(stream);
        Ok(stream)
    }
    hipStreamDestroy(; stream: u64) {
        let machine = entered()?.0;
        // AMD's waits for all that is queued, its header says; an error of that work ends the wait.
        let _ = machine.stream_synchronize(stream);
        MADE.acquire().retain(|made| *made != stream);
        machine.stream_destroy(stream)
    }
    hipStreamQuery(; stream: u64) {
        entered()?.0.stream_query(stream)
    }
    hipStreamSynchronize(; stream: u64) {
        entered()?.0.stream_synchronize(stream)
    }
    hipStreamWaitEvent(; stream: u64, event: u64, flags: u32) {
        let (machine, settings) = (entered()?.0, Settings::get());
        if flags != 0 {
            return Err(INVALID_VALUE);
        }
        let foreign = OPENED.acquire().contains(&event);
        let lapsed = foreign && WAITS.fetch_add(1, Ordering::Relaxed) >= LAPSE;
        let lies = settings.has(Fault::EventLies)
            || settings.has(Fault::EventLapses) && lapsed
            || settings.has(Fault::EventForgets) && FORGOTTEN.load(Ordering::Relaxed);
        if foreign && lies {
            return Ok(());
        }
        if foreign && settings.has(Fault::EventBlocks) {
            return complete(machine, event);
        }
        machine.stream_wait(stream, event)
    }
    hipStreamGetDevice(; stream: u64, device: *mut c_int) {
        // SAFETY: `put`: HIP's caller points to a number.
        unsafe { put(device, entered()?.0.stream_device(stream)) }
    }
    hipStreamGetId(; stream: u64, identity: *mut u64) {
        // SAFETY: `put`: HIP's caller points to a number.
        unsafe { put(identity, entered()?.0.stream_id(stream)) }
    }
    hipStreamIsCapturing(; stream: u64, status: *mut u32) {
        let (machine, captures) = (entered()?.0, Settings::get().has(Fault::Captures));
        // SAFETY: `put`: HIP's caller points to a number.
        unsafe { put(status, if captures { Ok(1) } else { machine.stream_capturing(stream) }) }
    }
    hipStreamWriteValue64(; stream: u64, word: u64, value: u64, flags: u32) {
        let (machine, settings) = (entered()?.0, Settings::get());
        if lacks_words(machine, stream)? {
            return Err(NOT_SUPPORTED);
        }
        if flags != 0 {
            return Err(INVALID_VALUE);
        }
        if settings.has(Fault::EarlyWords) {
            // A stream of its own has nothing before it.
            let other = machine.stream(DEVICE.get(), 1)?;
            machine.write(other, word, value)?;
            machine.stream_synchronize(other)?;
            return machine.stream_destroy(other);
        }
        machine.write(stream, word, value)
    }
    hipStreamWaitValue64(; stream: u64, word: u64, value: u64, flags: u32, mask: u64) {
        let machine = entered()?.0;
        if lacks_words(machine, stream)? {
            return Err(NOT_SUPPORTED);
        }
        if flags == 0 && mask == u64::MAX { machine.wait_at_least(stream, word, value) } else { Err(INVALID_VALUE) }
    }
    hipLaunchHostFunc(; stream: u64, function: unsafe extern "C" fn(*mut c_void), data: *mut c_void) {
        entered()?.0.call(stream, function, data)
    }
    hipStreamAddCallback(
        ; stream: u64, callback: unsafe extern "C" fn(u64, u32, *mut c_void), data: *mut c_void, flags: u32
    ) {
        let machine = entered()?.0;
        if flags != 0 {
            return Err(INVALID_VALUE);
        }
        // Lost where it is not queued, as an error of earlier work leaves it open whether it was.
        let packed = Box::into_raw(Box::new(Packed { callback, stream, data }));
        machine.call(stream, call_back, packed.cast())
    }
    hipMemcpyHtoDAsync(; to: u64, from: *const c_void, len: usize, stream: u64) {
        let machine = entered()?.0;
        machine.copy_in(stream, to, from, len)?;
        pool::written(machine, stream, to, len)
    }
    hipMemcpyDtoHAsync(; to: *mut c_void, from: u64, len: usize, stream: u64) {
        entered()?.0.copy_out(stream, to, from, len)
    }
    hipMemcpyDtoDAsync(; to: u64, from: u64, len: usize, stream: u64) {
        let machine = entered()?.0;
        machine.copy(stream, to, from, len)?;
        pool::written(machine, stream, to, len)
    }
    hipMemsetD8Async(; to: u64, byte: u8, len: usize, stream: u64) {
        let machine = entered()?.0;
        machine.fill(stream, to, byte, len)?;
        pool::written(machine, stream, to, len)
    }
}
