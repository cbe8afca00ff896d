//! The calls on streams, events and words: each queues an operation for the stream's worker, or
//! asks about one.

use std::collections::btree_map::Entry;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use gpu_api::contain;
use gpu_api::groups::*;
use gpu_api::{
    CaptureStatus, DeviceId, DevicePtr, Error, EventHandle, EventKind, HostPtr, MAX_BATCH,
    RawEvent, RawStream, Result, StreamIdentity, StreamInfo, StreamOp, WordOps, WordPtr,
    refuse_capture,
};

use crate::backend::HostBackend;
use crate::error::{INVALID_VALUE, driver};
use crate::event::Event;
use crate::stream::Stream;

const PAGE: usize = 4096;

/// Points at a registered word.
fn word(word: WordPtr) -> *const AtomicU64 {
    word.0 as *const AtomicU64
}

// SAFETY: `GpuEvents`: `query_event` compares with a number that the stream's worker sets after all
// operations before it.
unsafe impl GpuEvents for HostBackend {
    fn create_event(&self, device: DeviceId, kind: EventKind) -> Result<RawEvent> {
        self.check_device("create_event", device)?;
        let event = Arc::new(Event::new(kind)?);
        let number = self.number();
        self.tables().events.insert(number, event);
        Ok(RawEvent(number))
    }

    unsafe fn record_event(&self, event: RawEvent, stream: RawStream) -> Result<()> {
        let (event, stream) = (
            self.event("record_event", event)?,
            self.queue("record_event", stream)?,
        );
        let number = event.record();
        stream.push(move || event.complete(number));
        Ok(())
    }

    unsafe fn query_event(&self, event: RawEvent) -> Result<bool> {
        let event = self.event("query_event", event)?;
        Ok(event.is_complete(event.last()))
    }

    unsafe fn stream_wait_event(&self, stream: RawStream, event: RawEvent) -> Result<()> {
        let (event, stream) = (
            self.event("stream_wait_event", event)?,
            self.queue("stream_wait_event", stream)?,
        );
        let number = event.last();
        let waits = self.waits.clone();
        stream.push(move || waits.wait(|| event.is_complete(number)));
        Ok(())
    }

    unsafe fn destroy_event(&self, event: RawEvent) -> Result<()> {
        match self.tables().events.remove(&event.0) {
            Some(_) => Ok(()),
            None => Err(driver("destroy_event", DeviceId(0), INVALID_VALUE)),
        }
    }
}

// SAFETY: `GpuStreams`: a stream is idle when its queue is empty and its worker waits.
unsafe impl GpuStreams for HostBackend {
    fn create_stream(&self, device: DeviceId) -> Result<RawStream> {
        self.check_device("create_stream", device)?;
        let stream = Stream::start(device, self.broken[device.0 as usize].clone())?;
        let number = self.number();
        self.tables().streams.insert(number, stream);
        Ok(RawStream::new(device, number))
    }

    unsafe fn destroy_stream(&self, stream: RawStream) -> Result<()> {
        let mut tables = self.tables();
        // The default streams have another number than their handles: they are nobody's to destroy.
        match tables
            .streams
            .get(&stream.handle)
            .filter(|found| found.device == stream.device)
        {
            Some(found) => {
                found.destroy();
                tables.streams.remove(&stream.handle);
                Ok(())
            }
            None => Err(driver("destroy_stream", stream.device, INVALID_VALUE)),
        }
    }

    unsafe fn query_stream(&self, stream: RawStream) -> Result<bool> {
        Ok(self.stream("query_stream", stream)?.is_idle())
    }

    unsafe fn synchronize_stream(&self, stream: RawStream) -> Result<()> {
        let stream = self.stream("synchronize_stream", stream)?;
        stream.synchronize();
        self.check_device("synchronize_stream", stream.device)
    }

    unsafe fn stream_info(&self, stream: RawStream) -> Result<StreamInfo> {
        let other = self
            .tables()
            .streams
            .get(&stream.handle)
            .map(|found| found.device);
        if let Some(other) = other.filter(|other| *other != stream.device) {
            return Err(Error::mismatch(
                "the stream's device",
                other,
                stream.device,
                "pass a stream of the device that the session or participant was opened on",
            ));
        }
        let (number, found) = self.find_stream("stream_info", stream)?;
        Ok(StreamInfo {
            identity: StreamIdentity(number),
            device: found.device,
            context: 0,
        })
    }
}

// SAFETY: `GpuHostFunctions`: the stream's worker takes the function out of its queue and calls it.
unsafe impl GpuHostFunctions for HostBackend {
    unsafe fn host_function(
        &self,
        stream: RawStream,
        function: Box<dyn FnOnce() + Send>,
    ) -> Result<()> {
        self.queue("host_function", stream)?
            .push(|| contain(function));
        Ok(())
    }
}

// SAFETY: `GpuCaptures`: the answer is what was set of the stream, and a batch asks first.
unsafe impl GpuCaptures for HostBackend {
    unsafe fn capture_status(&self, stream: RawStream) -> Result<CaptureStatus> {
        Ok(self.stream("capture_status", stream)?.capture())
    }

    unsafe fn batch_uncaptured(&self, stream: RawStream, ops: &[StreamOp]) -> Result<()> {
        // SAFETY: `capture_status` asks for a live stream: our caller vouches for it.
        refuse_capture(stream, unsafe { self.capture_status(stream) }?)?;
        // SAFETY: `stream_batch` has our conditions.
        unsafe { self.stream_batch(stream, ops) }
    }

    unsafe fn batch_behind(
        &self,
        stream: RawStream,
        others: &[(RawEvent, RawStream)],
        ops: &[StreamOp],
    ) -> Result<()> {
        for &(event, other) in others {
            // SAFETY: `capture_status` asks for a live stream: our caller vouches for it.
            refuse_capture(other, unsafe { self.capture_status(other) }?)?;
            // SAFETY: `record_event` asks for both alive and of one device: as above.
            unsafe { self.record_event(event, other) }?;
            // SAFETY: `stream_wait_event` asks for both alive: as above.
            unsafe { self.stream_wait_event(stream, event) }?;
        }
        // SAFETY: `stream_batch` has our conditions.
        unsafe { self.stream_batch(stream, ops) }
    }
}

// SAFETY: `GpuEventHandles`: a handle names the event's file by inode, which is compared.
unsafe impl GpuEventHandles for HostBackend {
    unsafe fn event_handle(&self, event: RawEvent) -> Result<EventHandle> {
        self.event("event_handle", event)?
            .handle()
            .unwrap_or_else(|| {
                Err(Error::unsupported(
                    "the handle of a local event",
                    "only interprocess events have one",
                    "create it with `EventKind::Interprocess`",
                ))
            })
    }

    fn open_event(&self, device: DeviceId, handle: &EventHandle) -> Result<RawEvent> {
        self.check_device("open_event", device)?;
        let event = Arc::new(Event::open(device, handle)?);
        let number = self.number();
        self.tables().events.insert(number, event);
        Ok(RawEvent(number))
    }
}

// SAFETY: `GpuCopies`: a copy writes the range that it was given.
unsafe impl GpuCopies for HostBackend {
    unsafe fn copy_to_device(
        &self,
        stream: RawStream,
        to: DevicePtr,
        from: *const u8,
        len: usize,
    ) -> Result<()> {
        let from = from as usize;
        self.queue("copy_to_device", stream)?
            .push(move || move_bytes(from, to.0 as usize, len));
        Ok(())
    }

    unsafe fn copy_to_host(
        &self,
        stream: RawStream,
        to: *mut u8,
        from: DevicePtr,
        len: usize,
    ) -> Result<()> {
        let to = to as usize;
        self.queue("copy_to_host", stream)?
            .push(move || move_bytes(from.0 as usize, to, len));
        Ok(())
    }

    unsafe fn copy(
        &self,
        stream: RawStream,
        to: DevicePtr,
        from: DevicePtr,
        len: u64,
    ) -> Result<()> {
        self.queue("copy", stream)?
            .push(move || move_bytes(from.0 as usize, to.0 as usize, len as usize));
        Ok(())
    }

    unsafe fn fill(&self, stream: RawStream, to: DevicePtr, byte: u8, len: u64) -> Result<()> {
        self.queue("fill", stream)?.push(move || {
            // SAFETY: `write_bytes` asks for a range that is valid for writes: the caller of `fill`
            // keeps it so until the fill is done. Other processes may touch it at once, as with any
            // device memory; nothing here reads it, and no reference to it exists.
            unsafe { std::ptr::write_bytes(to.0 as *mut u8, byte, len as usize) };
        });
        Ok(())
    }
}

// SAFETY: `GpuWords`: words are written by the stream's worker, in the order of its queue.
unsafe impl GpuWords for HostBackend {
    fn word_ops(&self, _: DeviceId) -> Result<WordOps> {
        Ok(WordOps {
            writes: self.config.stream_writes,
            waits: self.config.stream_waits,
        })
    }

    unsafe fn register_words(&self, start: HostPtr, len: usize) -> Result<WordPtr> {
        if !start.0.is_multiple_of(PAGE) || !len.is_multiple_of(PAGE) || len == 0 {
            let got = format!("{len} bytes at {start:?}");
            return Err(Error::invalid("memory to register", got, "whole pages"));
        }
        match self.tables().words.entry(start.0) {
            Entry::Occupied(_) => Err(driver(
                "register_words",
                DeviceId(0),
                (712, "already registered"),
            )),
            Entry::Vacant(entry) => {
                entry.insert(len);
                Ok(WordPtr(start.0 as u64))
            }
        }
    }

    unsafe fn unregister_words(&self, start: HostPtr) -> Result<()> {
        self.block_while_waiting();
        match self.tables().words.remove(&start.0) {
            Some(_) => Ok(()),
            None => Err(driver(
                "unregister_words",
                DeviceId(0),
                (713, "not registered"),
            )),
        }
    }

    unsafe fn stream_batch(&self, stream: RawStream, ops: &[StreamOp]) -> Result<()> {
        if ops.is_empty() || ops.len() > MAX_BATCH {
            let got = format!("{} operations", ops.len());
            return Err(Error::invalid("a batch", got, "1 to 255 operations"));
        }
        let is_there = |op: &StreamOp| match op {
            StreamOp::Write { .. } => self.config.stream_writes,
            StreamOp::WaitGeq { .. } => self.config.stream_waits,
        };
        if !ops.iter().all(is_there) {
            return Err(Error::unsupported(
                "writing or waiting for words on a stream",
                "the backend was set up without",
                "ask `Caps::stream_writes` and `Caps::stream_waits` first",
            ));
        }
        let stream = self.queue("stream_batch", stream)?;
        {
            let tables = self.tables();
            for op in ops {
                let (StreamOp::Write { word, .. } | StreamOp::WaitGeq { word, .. }) = *op;
                let at = word.0 as usize;
                let inside = tables
                    .words
                    .range(..=at)
                    .next_back()
                    .is_some_and(|(start, len)| at + 8 <= start + len);
                if !inside || !at.is_multiple_of(8) {
                    let got = format!("{at:#x}");
                    return Err(Error::invalid("a stream's word", got, "in a registration"));
                }
            }
        }
        let (ops, waits) = (ops.to_vec(), self.waits.clone());
        stream.push(move || {
            for op in ops {
                match op {
                    StreamOp::Write { word: at, value } => {
                        // SAFETY: `&*` of an `AtomicU64`: the caller of `stream_batch` keeps the
                        // registered memory, the word was found aligned and inside, and every
                        // process touches it as an atomic.
                        let word = unsafe { &*word(at) };
                        word.store(value, Ordering::Release);
                    }
                    StreamOp::WaitGeq { word: at, value } => {
                        // SAFETY: as above.
                        let word = unsafe { &*word(at) };
                        waits.wait(|| {
                            word.load(Ordering::Acquire)
                                .wrapping_sub(value)
                                .cast_signed()
                                >= 0
                        });
                    }
                }
            }
        });
        Ok(())
    }
}

fn move_bytes(from: usize, to: usize, len: usize) {
    // SAFETY: `ptr::copy` asks for two ranges that are valid for `len` bytes: the caller of the
    // copy keeps them so until it is done. Other processes may touch device memory at once; no
    // reference to it exists.
    unsafe { std::ptr::copy(from as *const u8, to as *mut u8, len) };
}
