//! Streams.

use std::any::Any;
use std::ffi::c_void;
use std::mem::MaybeUninit;
use std::sync::Arc;

use crate::boundary::{call, out_handle};
use crate::callback::Callback;
use crate::engine::Stream;
use crate::kinds::{gpu_ipc_device, gpu_ipc_stream};
use crate::opened::OpenStream;

/// A function that the library calls with the context that came with it.
#[allow(non_camel_case_types, reason = "the name that C has for it")]
pub type gpu_ipc_callback = Option<unsafe extern "C" fn(context: *mut c_void)>;

/// Makes a stream that waits for no other.
///
/// Keeps: nothing. Thread: any. Blocks: no. Errors: `BAD_HANDLE`, `INVALID`, `DRIVER`.
#[unsafe(no_mangle)]
pub extern "C" fn gpu_ipc_stream_create(
    device: *mut gpu_ipc_device,
    stream: Option<&mut MaybeUninit<*mut gpu_ipc_stream>>,
) -> i32 {
    call(|process| {
        let stream = out_handle(stream, "stream")?;
        let made = Stream::create(&*process.get(device)?)?;
        stream.set(process.open(OpenStream {
            stream: made,
            _hold: None,
        })?);
        Ok(())
    })
}

/// Takes an application's stream by the driver's handle: a `cudaStream_t`, `CUstream` or
/// `hipStream_t`.
///
/// Null and 1 are the legacy default stream of `device`. 2 is the calling thread's default stream
/// of `device`, which is taken by calls that queue at once and refused by those where a later
/// moment counts (`..._used_on`).
///
/// The stream must live until `released` was called, which may be after `gpu_ipc_stream_close`: a
/// lease that ends behind the stream's work still needs it. Without `released` it must live until
/// the process ends. No thread may begin to capture it while another is in a call that was given
/// it.
///
/// Keeps: the stream, `released` and `context`, until `released` is called: once, on a thread of
/// the library's own that holds no lock, so that it may call any function. Not in a forked child.
/// Thread: any. Blocks: no. Errors: `BAD_HANDLE`, `INVALID`, `MISMATCH` for a stream of another
/// device or context, `SYSTEM`. After an error `released` is not called.
///
/// # Safety
///
/// `handle` is a live stream, and stays so as said above; `released` may be called with `context`
/// on any thread.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gpu_ipc_stream_borrow(
    device: *mut gpu_ipc_device,
    handle: *mut c_void,
    released: gpu_ipc_callback,
    context: *mut c_void,
    stream: Option<&mut MaybeUninit<*mut gpu_ipc_stream>>,
) -> i32 {
    call(|process| {
        let stream = out_handle(stream, "stream")?;
        let gpu = process.get(device)?;
        let handle = handle.addr() as u64;
        let hold = match released {
            None => None,
            Some(function) => Some(Arc::new(
                process.callbacks.hold(Callback { function, context })?,
            )),
        };
        let keep: Arc<dyn Any + Send + Sync> = match &hold {
            None => Arc::new(()),
            Some(hold) => hold.clone(),
        };
        // SAFETY: `borrow` asks for
        // - a stream that is alive as long as `keep`: its end is told by `released`, until which
        //   the caller keeps the stream, for ever without one;
        // - that no thread begins to capture it meanwhile: so does this function.
        let borrowed = unsafe { Stream::borrow(&gpu, handle, keep) }?;
        let open = process.open(OpenStream {
            stream: borrowed,
            _hold: hold.clone(),
        })?;
        // From here on its end is told.
        hold.iter().for_each(|hold| hold.arm());
        stream.set(open);
        Ok(())
    })
}

/// Blocks until all that is queued on a stream has finished.
///
/// Keeps: nothing. Thread: any. Blocks: as long as the work takes. Errors: `BAD_HANDLE`, `DRIVER`,
/// an error of earlier work among them.
#[unsafe(no_mangle)]
pub extern "C" fn gpu_ipc_stream_synchronize(stream: *mut gpu_ipc_stream) -> i32 {
    call(|process| Ok(process.get(stream)?.stream.synchronize()?))
}

/// Closes a stream. What was used on it keeps it until that work is done; then one that was made
/// here is destroyed, and of a borrowed one it is told. Null is passed over.
///
/// Keeps: nothing. Thread: any. Blocks: no. Errors: `BAD_HANDLE`.
#[unsafe(no_mangle)]
pub extern "C" fn gpu_ipc_stream_close(stream: *mut gpu_ipc_stream) -> i32 {
    call(|process| process.close(stream))
}
