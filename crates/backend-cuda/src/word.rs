//! 64-bit words in shared memory that streams write and wait for.

use std::ffi::c_void;
use std::ptr;

use gpu_api::vendor::checks;
use gpu_api::{DeviceId, Error, GpuWords, HostPtr, RawEvent, RawStream, Result, StreamOp, WordPtr};

use crate::backend::CudaBackend;
use crate::call::{self, Scope};
use crate::error::{NOT_SUPPORTED, SUCCESS};
use crate::host;
use crate::sys::{BatchOperation, WAIT_GEQ, WAIT_VALUE_64, WRITE_VALUE_64};

/// Batches up to here are built on the stack; a release is one of two, a share one of a few.
const SMALL_BATCH: usize = 8;

// SAFETY: the condition of `GpuWords`: writes have the barrier that the manual describes as the
// default: after all work before them.
unsafe impl GpuWords for CudaBackend {
    unsafe fn register_words(&self, start: HostPtr, len: usize) -> Result<WordPtr> {
        checks::whole_pages(start, len)?;
        let scope = self.driver.anywhere()?;
        let address: *mut c_void = ptr::with_exposed_provenance_mut(start.0);
        // SAFETY: `register` asks for memory that is mapped until it is unregistered: our caller
        // vouches for it.
        unsafe { host::register(&scope, address, len) }?;
        let mut words = 0;
        let found = scope.call(&self.driver.symbols.cuMemHostGetDevicePointer, |function| {
            // SAFETY: `cuMemHostGetDevicePointer` writes one address: `words` is one. The memory
            // was registered for devices above. Its flags are 0.
            unsafe { function(&raw mut words, address, 0) }
        });
        if let Err(error) = found {
            let _ = scope.call(&self.driver.symbols.cuMemHostUnregister, |function| {
                // SAFETY: `cuMemHostUnregister` asks for memory that is registered and not in use:
                // above, and no stream was told of it.
                unsafe { function(address) }
            });
            return Err(error);
        }
        let device = scope.device();
        self.registrations.insert(start, device);
        Ok(WordPtr(words))
    }

    unsafe fn unregister_words(&self, start: HostPtr) -> Result<()> {
        let device = self.registrations.take(start)?;
        // SAFETY: `words_end` asks for a registration out of the table that no stream uses: our
        // caller vouches for it.
        let result = unsafe { self.words_end(start, device) };
        if result.is_err() {
            self.registrations.leak(start, device);
        }
        result
    }

    unsafe fn stream_batch(&self, stream: RawStream, ops: &[StreamOp]) -> Result<()> {
        // SAFETY: `words_batch` has our conditions.
        unsafe { self.words_batch(stream, ops, false) }
    }

    unsafe fn batch_uncaptured(&self, stream: RawStream, ops: &[StreamOp]) -> Result<()> {
        // SAFETY: `words_batch` has our conditions.
        unsafe { self.words_batch(stream, ops, true) }
    }

    unsafe fn batch_behind(
        &self,
        stream: RawStream,
        others: &[(RawEvent, RawStream)],
        ops: &[StreamOp],
    ) -> Result<()> {
        let scope = self.driver.on_stream(stream)?;
        for &(event, other) in others {
            // SAFETY: `status_within` asks for a stream that is alive, and for its scope: our
            // caller vouches for both.
            gpu_api::refuse_capture(other, unsafe { self.status_within(&scope, other) }?)?;
            // SAFETY: `record_within` asks for both alive and of the scope's context: our caller
            // vouches for it.
            unsafe { self.record_within(&scope, event, other) }?;
            // SAFETY: `await_within` asks for both alive, and for the stream's scope: as above.
            unsafe { self.await_within(&scope, stream, event) }?;
        }
        // SAFETY: `batch_within` has our conditions, and the scope is the stream's.
        unsafe { self.batch_within(&scope, stream, ops) }
    }
}

impl CudaBackend {
    /// # Safety
    ///
    /// `start` came out of the table, and no operation on its words is unfinished on any stream of
    /// this process.
    unsafe fn words_end(&self, start: HostPtr, device: DeviceId) -> Result<()> {
        let address: *mut c_void = ptr::with_exposed_provenance_mut(start.0);
        self.pass_own_streams();
        let scope = self.driver.on_device(device)?;
        scope.call(&self.driver.symbols.cuMemHostUnregister, |function| {
            // SAFETY: `cuMemHostUnregister` asks for memory that is registered and not in use: it
            // was taken out of the table once, and our caller vouches for the rest.
            unsafe { function(address) }
        })
    }

    /// Queues operations; on a stream that may be captured only after a look in the same scope that
    /// it is not.
    ///
    /// # Safety
    ///
    /// `stream` is alive, and every word lies in a registration that outlives the operation.
    pub(crate) unsafe fn words_batch(
        &self,
        stream: RawStream,
        ops: &[StreamOp],
        may_capture: bool,
    ) -> Result<()> {
        let scope = self.driver.beside_stream(stream)?;
        if may_capture {
            // SAFETY: `status_within` asks for a stream that is alive, and for its scope: as above.
            gpu_api::refuse_capture(stream, unsafe { self.status_within(&scope, stream) }?)?;
        }
        // SAFETY: `batch_within` has our conditions, and the scope is the stream's.
        unsafe { self.batch_within(&scope, stream, ops) }
    }

    /// # Safety
    ///
    /// As [`words_batch`](CudaBackend::words_batch), and the scope is the stream's.
    unsafe fn batch_within(
        &self,
        scope: &Scope<'_>,
        stream: RawStream,
        ops: &[StreamOp],
    ) -> Result<()> {
        checks::batch(ops)?;
        let mut small = [BatchOperation::default(); SMALL_BATCH];
        let mut large = Vec::new();
        let batch: &mut [BatchOperation] = if ops.len() <= SMALL_BATCH {
            &mut small[..ops.len()]
        } else {
            large.resize(ops.len(), BatchOperation::default());
            &mut large
        };
        for (place, op) in batch.iter_mut().zip(ops) {
            *place = operation(op);
        }
        let symbol = &self.driver.symbols.cuStreamBatchMemOp;
        let code = scope.code(symbol, |function| {
            // SAFETY: `cuStreamBatchMemOp` reads as many operations as it is told: the slice's, and
            // copies them. Our caller vouches for the stream and for the words. Its flags are 0.
            unsafe {
                function(
                    call::stream(stream),
                    batch.len() as u32,
                    batch.as_mut_ptr(),
                    0,
                )
            }
        })?;
        match code {
            SUCCESS => Ok(()),
            NOT_SUPPORTED => Err(Error::Unsupported {
                what: "a stream's operation on words",
                why: format!("{} refuses it", scope.device()),
                remedy: "wait on the host: `Caps::stream_waits` says when",
            }),
            code => Err(scope.error(symbol.name, code)),
        }
    }
}

fn operation(op: &StreamOp) -> BatchOperation {
    let (operation, word, value, flags) = match *op {
        // Without the flag that leaves the barrier out: a release must not be seen before the work
        // it ends.
        StreamOp::Write { word, value } => (WRITE_VALUE_64, word, value, 0),
        StreamOp::WaitGeq { word, value } => (WAIT_VALUE_64, word, value, WAIT_GEQ),
    };
    BatchOperation {
        operation,
        address: word.0,
        value,
        flags,
        ..BatchOperation::default()
    }
}

#[cfg(test)]
mod tests {
    use std::mem::offset_of;

    use cudarc::driver::sys;

    use super::*;

    #[test]
    fn an_operation_lies_in_memory_as_the_driver_reads_it() {
        type Write = sys::CUstreamBatchMemOpParams_union_CUstreamMemOpWriteValueParams_st;
        assert_eq!(
            offset_of!(BatchOperation, operation),
            offset_of!(Write, operation)
        );
        assert_eq!(
            offset_of!(BatchOperation, address),
            offset_of!(Write, address)
        );
        assert_eq!(
            offset_of!(BatchOperation, value),
            offset_of!(Write, __bindgen_anon_1)
        );
        assert_eq!(offset_of!(BatchOperation, flags), offset_of!(Write, flags));
        assert_eq!(offset_of!(BatchOperation, alias), offset_of!(Write, alias));
    }

    #[test]
    fn writes_keep_their_barrier_and_waits_compare_cyclically() {
        let write = operation(&StreamOp::Write {
            word: WordPtr(0x40),
            value: 7,
        });
        assert_eq!(
            (write.operation, write.address, write.value, write.flags),
            (5, 0x40, 7, 0)
        );
        let wait = operation(&StreamOp::WaitGeq {
            word: WordPtr(0x48),
            value: 8,
        });
        assert_eq!(
            (wait.operation, wait.address, wait.value, wait.flags),
            (4, 0x48, 8, 0)
        );
    }
}
