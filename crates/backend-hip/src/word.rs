//! 64-bit words in shared memory that streams write and wait for.

use std::ffi::c_void;
use std::ptr;

use gpu_api::vendor::checks;
use gpu_api::{Error, GpuWords, HostPtr, RawStream, Result, StreamOp, WordPtr};

use crate::backend::HipBackend;
use crate::call;
use crate::error;
use crate::host;
use crate::proof::Step;
use crate::sys::WAIT_GEQ;

/// Every bit of a word counts in a wait.
const WHOLE: u64 = u64::MAX;

// SAFETY: the condition of `GpuWords`: `hipStreamWriteValue64` comes after all work queued before,
// says the manual, and is used only where a probe saw it there.
unsafe impl GpuWords for HipBackend {
    unsafe fn register_words(&self, start: HostPtr, len: usize) -> Result<WordPtr> {
        checks::whole_pages(start, len)?;
        let scope = self.driver.anywhere()?;
        let address: *mut c_void = ptr::with_exposed_provenance_mut(start.0);
        // SAFETY: `register` asks for memory that is mapped until it is unregistered: our caller
        // vouches for it.
        unsafe { host::register(&scope, address, len) }?;
        let mut words = 0;
        let found = scope.call(&self.driver.symbols.hipHostGetDevicePointer, |function| {
            // SAFETY: `hipHostGetDevicePointer` writes one address: `words` is one. The memory was
            // registered for devices above. Its flags are 0.
            unsafe { function(&raw mut words, address, 0) }
        });
        if let Err(error) = found {
            let _ = scope.call(&self.driver.symbols.hipHostUnregister, |function| {
                // SAFETY: `hipHostUnregister` asks for memory that is registered and not in use:
                // above, and no stream was told of it.
                unsafe { function(address) }
            });
            return Err(error);
        }
        self.registrations.insert(start.0 as u64, scope.device());
        Ok(WordPtr(words))
    }

    unsafe fn unregister_words(&self, start: HostPtr) -> Result<()> {
        let device = self
            .registrations
            .remove(start.0 as u64)
            .ok_or_else(|| Error::Invalid {
                what: "the address",
                got: format!("{start:?}, which is not registered"),
                must: "the start of what `register_words` took",
            })?;
        let address: *mut c_void = ptr::with_exposed_provenance_mut(start.0);
        self.pass_known_streams();
        let scope = self.driver.on_device(device)?;
        scope.call(&self.driver.symbols.hipHostUnregister, |function| {
            // SAFETY: `hipHostUnregister` asks for memory that is registered and not in use: it was
            // taken out of the table once, and our caller vouches for the rest.
            unsafe { function(address) }
        })
    }

    unsafe fn stream_batch(&self, stream: RawStream, ops: &[StreamOp]) -> Result<()> {
        checks::batch(ops)?;
        if !self.driver.proved(Step::Words) {
            return Err(error::unproved("a stream's operation on words"));
        }
        let waits = ops.iter().any(|op| matches!(op, StreamOp::WaitGeq { .. }));
        if waits && !self.driver.proved(Step::Waits) {
            return Err(error::unproved("a stream's wait for a word"));
        }
        let scope = self.driver.on_stream(stream)?;
        let symbols = &self.driver.symbols;
        for op in ops {
            // One after the other: the runtime has no call for several that every version knows.
            match *op {
                StreamOp::Write { word, value } => {
                    scope.call(&symbols.hipStreamWriteValue64, |function| {
                        // SAFETY: `hipStreamWriteValue64`: our caller vouches for the stream and
                        // for the word. Its flags are 0.
                        unsafe { function(call::stream(stream), word.0, value, 0) }
                    })?
                }
                StreamOp::WaitGeq { word, value } => {
                    scope.call(&symbols.hipStreamWaitValue64, |function| {
                        // SAFETY: `hipStreamWaitValue64`: our caller vouches for the stream and for
                        // the word.
                        unsafe { function(call::stream(stream), word.0, value, WAIT_GEQ, WHOLE) }
                    })?
                }
            }
        }
        Ok(())
    }
}
