//! Operations of streams on 64-bit words, where a probe saw them in order.

use driver::calls::WAIT_GEQ;
use driver::{Scope, Vendor};
use gpu_api::{RawStream, Result, StreamOp};

use crate::error;
use crate::hip::Hip;
use crate::proof::Step;

/// Every bit of a word counts in a wait.
const WHOLE: u64 = u64::MAX;

impl Hip {
    /// Queues operations. `hipStreamWriteValue64` comes after all work queued before, says the
    /// manual, and is used only where a probe saw it there.
    ///
    /// # Safety
    ///
    /// As [`Vendor::queue_words`].
    pub(crate) unsafe fn operate(
        &self,
        scope: &Scope<'_, Hip>,
        stream: RawStream,
        ops: &[StreamOp],
    ) -> Result<()> {
        if !self.proved(Step::Words, stream.device) {
            return Err(error::unproved("a stream's operation on words"));
        }
        let waits = ops.iter().any(|op| matches!(op, StreamOp::WaitGeq { .. }));
        if waits && !self.proved(Step::Waits, stream.device) {
            return Err(error::unproved("a stream's wait for a word"));
        }
        let symbols = self.own();
        for op in ops {
            // One after the other: the runtime has no call for several that every version knows.
            match *op {
                StreamOp::Write { word, value } => {
                    scope.call(&symbols.hipStreamWriteValue64, |function| {
                        // SAFETY: `hipStreamWriteValue64`: our caller vouches for the stream and
                        // for the word. Its flags are 0.
                        unsafe { function(Hip::stream(stream), word.0, value, 0) }
                    })?
                }
                StreamOp::WaitGeq { word, value } => {
                    scope.call(&symbols.hipStreamWaitValue64, |function| {
                        // SAFETY: `hipStreamWaitValue64`: our caller vouches for the stream and for
                        // the word.
                        unsafe { function(Hip::stream(stream), word.0, value, WAIT_GEQ, WHOLE) }
                    })?
                }
            }
        }
        Ok(())
    }
}
