//! Waiting for the producer's work on a block.

use std::time::Duration;

use gpu_api::{Error, StreamOp};

use crate::consumer::claim_error::ClaimError;
use crate::consumer::connection::asking::Patience;
use crate::consumer::connection::link::Link;
use crate::stream::Stream;
use transport::shared::counter_file::timeline_word;
use transport::shared::timeline;
use transport::wire::descriptor::Fence;

/// How a claim waits for the producer's work on the block.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub enum Wait<'a> {
    /// Not at all: the caller asks [`ReceivedBlock::state`](crate::ReceivedBlock::state).
    None,
    /// On this thread, under the claim's deadline.
    Host,
    /// On this stream of the participant's device, which counts as
    /// [used](crate::ReceivedBlock::used_on): nothing is queued if the CPU sees that the work is
    /// done. The calling thread's default stream (handle 2) waits, but does not count: its later
    /// work has to be over before the block is dropped.
    Stream(&'a Stream),
}

impl Link {
    /// Refuses a stream of another device, and one that is being captured.
    #[inline(always)]
    pub(crate) fn check_stream(&self, wait: Wait<'_>) -> Result<(), ClaimError> {
        if let Wait::Stream(stream) = wait {
            stream.require(&self.facts.gpu)?;
            if stream.is_capturing()? {
                return Err(ClaimError::Capturing);
            }
            // Made here, where a failure loses nothing.
            stream.ahead()?;
        }
        Ok(())
    }

    pub(crate) fn wait_on_host(&self, fence: &Fence, patience: Patience) -> Result<(), ClaimError> {
        let mut pause = Duration::from_micros(1);
        for turn in 0u32.. {
            if self.files.look(fence) != timeline::Fence::Pending {
                return Ok(());
            }
            if patience.is_over() {
                self.watch_fence(*fence);
                return Err(Error::deadline("the producer's work on the block").into());
            }
            if turn < 100 {
                std::hint::spin_loop();
            } else {
                // A GPU's store wakes nobody, so there is nothing to wait for but time.
                std::thread::sleep(pause);
                pause = (pause * 2).min(Duration::from_millis(1));
            }
        }
        Ok(())
    }

    /// Says whether a wait is this thread's: streams do not reach words that are not registered.
    pub(crate) fn waits_on_host(&self, fence: &Fence, wait: Wait<'_>) -> bool {
        let cannot_queue = || {
            !self.facts.gpu.caps().stream_waits
                || self
                    .files
                    .get(fence.file)
                    .is_none_or(|file| file.registered.is_none())
        };
        matches!(wait, Wait::Host) || (matches!(wait, Wait::Stream(_)) && cannot_queue())
    }

    /// Waits for the producer's work on a block that is held.
    pub(crate) fn wait_after_claim(
        &self,
        fence: &Fence,
        wait: Wait<'_>,
        patience: Patience,
    ) -> Result<(), ClaimError> {
        if self.waits_on_host(fence, wait) {
            return self.wait_on_host(fence, patience);
        }
        if let Wait::Stream(stream) = wait
            && self.files.look(fence) == timeline::Fence::Pending
        {
            let ahead = stream.ahead()?;
            self.queue_wait(ahead, fence)?;
            stream.follow(ahead)?;
        }
        Ok(())
    }

    pub(crate) fn queue_wait(&self, stream: &Stream, fence: &Fence) -> Result<(), ClaimError> {
        let Some(base) = self.files.get(fence.file).and_then(|file| file.registered) else {
            return Ok(());
        };
        let word = base.word(timeline_word(fence.word));
        // SAFETY: `stream_batch` asks for a live stream, which the caller keeps, and for a word in
        // a registration that outlives the operation: the block counts as used on the stream, so
        // the link's files stay registered until the wait is over.
        unsafe {
            self.facts.gpu.backend().stream_batch(
                stream.raw(),
                &[StreamOp::WaitGeq {
                    word,
                    value: fence.value,
                }],
            )
        }?;
        Ok(())
    }
}
