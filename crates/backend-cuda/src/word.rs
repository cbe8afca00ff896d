//! Operations of streams on 64-bit words, all of a batch in one call.

use driver::calls::WAIT_GEQ;
use driver::code::{NOT_SUPPORTED, SUCCESS};
use driver::{Scope, Vendor};
use gpu_api::{Error, RawStream, Result, StreamOp};

use crate::cuda::Cuda;
use crate::sys::{BatchOperation, WAIT_VALUE_64, WRITE_VALUE_64};

/// Batches up to here are built on the stack; a release is one of two, a share one of a few.
const SMALL_BATCH: usize = 8;

impl Cuda {
    /// Queues operations. Writes have the barrier that the manual describes as the default: after
    /// all work before them.
    ///
    /// # Safety
    ///
    /// As [`Vendor::queue_words`].
    pub(crate) unsafe fn batch(
        &self,
        scope: &Scope<'_, Cuda>,
        stream: RawStream,
        ops: &[StreamOp],
    ) -> Result<()> {
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
        let symbol = &self.own.cuStreamBatchMemOp;
        let code = scope.code(symbol, |function| {
            // SAFETY: `cuStreamBatchMemOp` reads as many operations as it is told: the slice's, and
            // copies them. Our caller vouches for the stream and for the words. Its flags are 0.
            unsafe {
                function(
                    Cuda::stream(stream).cast(),
                    batch.len() as u32,
                    batch.as_mut_ptr(),
                    0,
                )
            }
        })?;
        match code {
            SUCCESS => Ok(()),
            NOT_SUPPORTED => Err(Error::unsupported(
                "a stream's operation on words",
                format!("{} refuses it", scope.device()),
                "wait on the host: `Caps::stream_waits` says when",
            )),
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

    use gpu_api::WordPtr;

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
