//! The calls on streams, events and words.

use std::sync::PoisonError;

use gpu_ipc::Result;
use gpu_ipc::backend::groups::*;
use gpu_ipc::backend::{
    CaptureStatus, DeviceId, DevicePtr, EventHandle, EventKind, HostPtr, RawEvent, RawStream,
    StreamInfo, StreamOp, WordOps, WordPtr, refuse_capture,
};

use super::{Faulty, Thing};

// SAFETY: `GpuEvents`: the backend below keeps it; a call that fails has done nothing.
unsafe impl<B: GpuBackend> GpuEvents for Faulty<B> {
    fn create_event(&self, device: DeviceId, kind: EventKind) -> Result<RawEvent> {
        let mut made = RawEvent(0);
        self.gives("create_event", || {
            made = self.backend.create_event(device, kind)?;
            Ok(Thing::Event(made.0))
        })?;
        Ok(made)
    }

    unsafe fn record_event(&self, event: RawEvent, stream: RawStream) -> Result<()> {
        self.turn("record_event")?;
        // SAFETY: `record_event`: the caller's own promise.
        unsafe { self.backend.record_event(event, stream) }
    }

    unsafe fn query_event(&self, event: RawEvent) -> Result<bool> {
        self.turn("query_event")?;
        // SAFETY: `query_event`: the caller's own promise.
        unsafe { self.backend.query_event(event) }
    }

    unsafe fn stream_wait_event(&self, stream: RawStream, event: RawEvent) -> Result<()> {
        self.turn("stream_wait_event")?;
        // SAFETY: `stream_wait_event`: the caller's own promise.
        unsafe { self.backend.stream_wait_event(stream, event) }
    }

    unsafe fn destroy_event(&self, event: RawEvent) -> Result<()> {
        // SAFETY: `destroy_event`: the caller's own promise.
        self.takes("destroy_event", Thing::Event(event.0), || unsafe {
            self.backend.destroy_event(event)
        })
    }
}

// SAFETY: `GpuStreams`: the backend below keeps it; a call that fails has done nothing.
unsafe impl<B: GpuBackend> GpuStreams for Faulty<B> {
    fn create_stream(&self, device: DeviceId) -> Result<RawStream> {
        let mut made = RawStream::new(device, 0);
        self.gives("create_stream", || {
            made = self.backend.create_stream(device)?;
            Ok(Thing::Stream(made.handle))
        })?;
        Ok(made)
    }

    unsafe fn destroy_stream(&self, stream: RawStream) -> Result<()> {
        // SAFETY: `destroy_stream`: the caller's own promise.
        self.takes("destroy_stream", Thing::Stream(stream.handle), || unsafe {
            self.backend.destroy_stream(stream)
        })
    }

    unsafe fn query_stream(&self, stream: RawStream) -> Result<bool> {
        self.turn("query_stream")?;
        // SAFETY: `query_stream`: the caller's own promise.
        unsafe { self.backend.query_stream(stream) }
    }

    unsafe fn synchronize_stream(&self, stream: RawStream) -> Result<()> {
        self.turn("synchronize_stream")?;
        // SAFETY: `synchronize_stream`: the caller's own promise.
        unsafe { self.backend.synchronize_stream(stream) }
    }

    unsafe fn stream_info(&self, stream: RawStream) -> Result<StreamInfo> {
        self.turn("stream_info")?;
        // SAFETY: `stream_info`: the caller's own promise.
        unsafe { self.backend.stream_info(stream) }
    }
}

// SAFETY: `GpuEventHandles`: the backend below keeps it; a call that fails has done nothing.
unsafe impl<B: GpuBackend> GpuEventHandles for Faulty<B> {
    unsafe fn event_handle(&self, event: RawEvent) -> Result<EventHandle> {
        self.turn("event_handle")?;
        // SAFETY: `event_handle`: the caller's own promise.
        unsafe { self.below().event_handle(event) }
    }

    fn open_event(&self, device: DeviceId, handle: &EventHandle) -> Result<RawEvent> {
        let mut made = RawEvent(0);
        self.gives("open_event", || {
            made = self.below().open_event(device, handle)?;
            Ok(Thing::Event(made.0))
        })?;
        Ok(made)
    }
}

// SAFETY: `GpuHostFunctions`: the backend below keeps it; a call that fails has done nothing.
unsafe impl<B: GpuBackend> GpuHostFunctions for Faulty<B> {
    unsafe fn host_function(
        &self,
        stream: RawStream,
        function: Box<dyn FnOnce() + Send>,
    ) -> Result<()> {
        self.turn("host_function")?;
        // SAFETY: `host_function`: the caller's own promise.
        unsafe { self.below().host_function(stream, function) }
    }
}

// SAFETY: `GpuCaptures`: the backend below keeps it; a call that fails has done nothing.
unsafe impl<B: GpuBackend> GpuCaptures for Faulty<B> {
    unsafe fn capture_status(&self, stream: RawStream) -> Result<CaptureStatus> {
        self.turn("capture_status")?;
        // SAFETY: `capture_status`: the caller's own promise.
        let status = unsafe { self.below().capture_status(stream) };
        if std::thread::current().name() == Some("gpu-ipc-participant")
            && let Some(act) = self
                .capture
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
                .take()
        {
            act(&self.backend);
        }
        status
    }

    unsafe fn batch_uncaptured(&self, stream: RawStream, ops: &[StreamOp]) -> Result<()> {
        // SAFETY: `capture_status`: the caller's own promise.
        refuse_capture(stream, unsafe { self.capture_status(stream) }?)?;
        // SAFETY: `stream_batch`: the caller's own promise.
        unsafe { self.stream_batch(stream, ops) }
    }

    unsafe fn batch_behind(
        &self,
        stream: RawStream,
        others: &[(RawEvent, RawStream)],
        ops: &[StreamOp],
    ) -> Result<()> {
        for &(event, other) in others {
            // SAFETY: `capture_status`: the caller's own promise.
            refuse_capture(other, unsafe { self.capture_status(other) }?)?;
            // SAFETY: `record_event`: the caller's own promise.
            unsafe { self.record_event(event, other) }?;
            // SAFETY: `stream_wait_event`: the caller's own promise.
            unsafe { self.stream_wait_event(stream, event) }?;
        }
        // SAFETY: `stream_batch`: the caller's own promise.
        unsafe { self.stream_batch(stream, ops) }
    }
}

// SAFETY: `GpuCopies`: the backend below keeps it; a call that fails has done nothing.
unsafe impl<B: GpuBackend> GpuCopies for Faulty<B> {
    unsafe fn copy_to_device(
        &self,
        stream: RawStream,
        to: DevicePtr,
        from: *const u8,
        len: usize,
    ) -> Result<()> {
        self.turn("copy_to_device")?;
        // SAFETY: `copy_to_device`: the caller's own promise.
        unsafe { self.backend.copy_to_device(stream, to, from, len) }
    }

    unsafe fn copy_to_host(
        &self,
        stream: RawStream,
        to: *mut u8,
        from: DevicePtr,
        len: usize,
    ) -> Result<()> {
        self.turn("copy_to_host")?;
        // SAFETY: `copy_to_host`: the caller's own promise.
        unsafe { self.backend.copy_to_host(stream, to, from, len) }
    }

    unsafe fn copy(
        &self,
        stream: RawStream,
        to: DevicePtr,
        from: DevicePtr,
        len: u64,
    ) -> Result<()> {
        self.turn("copy")?;
        // SAFETY: `copy`: the caller's own promise.
        unsafe { self.backend.copy(stream, to, from, len) }
    }

    unsafe fn fill(&self, stream: RawStream, to: DevicePtr, byte: u8, len: u64) -> Result<()> {
        self.turn("fill")?;
        // SAFETY: `fill`: the caller's own promise.
        unsafe { self.backend.fill(stream, to, byte, len) }
    }
}

// SAFETY: `GpuWords`: the backend below keeps it; a call that fails has done nothing.
unsafe impl<B: GpuBackend> GpuWords for Faulty<B> {
    fn word_ops(&self, device: DeviceId) -> Result<WordOps> {
        self.backend.word_ops(device)
    }

    unsafe fn register_words(&self, start: HostPtr, len: usize) -> Result<WordPtr> {
        let mut made = WordPtr(0);
        self.gives("register_words", || {
            // SAFETY: `register_words`: the caller's own promise.
            made = unsafe { self.backend.register_words(start, len) }?;
            Ok(Thing::Words(start.0))
        })?;
        Ok(made)
    }

    unsafe fn unregister_words(&self, start: HostPtr) -> Result<()> {
        // SAFETY: `unregister_words`: the caller's own promise.
        self.takes("unregister_words", Thing::Words(start.0), || unsafe {
            self.backend.unregister_words(start)
        })
    }

    unsafe fn stream_batch(&self, stream: RawStream, ops: &[StreamOp]) -> Result<()> {
        self.turn("stream_batch")?;
        // SAFETY: `stream_batch`: the caller's own promise.
        unsafe { self.backend.stream_batch(stream, ops) }
    }
}
