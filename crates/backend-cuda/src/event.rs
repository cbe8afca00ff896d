//! Events, local and interprocess.

use std::ptr;

use gpu_api::{DeviceId, Error, EventHandle, EventKind, GpuEvents, RawEvent, RawStream, Result};

use crate::backend::CudaBackend;
use crate::call::{self, Scope};
use crate::error::{NOT_READY, SUCCESS};
use crate::sys::{CUevent, CUipcEventHandle, EVENT_DISABLE_TIMING, EVENT_INTERPROCESS};

/// Turns an event's number into what the driver takes.
fn event(raw: RawEvent) -> CUevent {
    ptr::with_exposed_provenance_mut(raw.0 as usize)
}

// SAFETY: the condition of `GpuEvents`: `query_event` says `true` on success only, which the manual
// gives to work that has completed.
unsafe impl GpuEvents for CudaBackend {
    fn create_event(&self, device: DeviceId, kind: EventKind) -> Result<RawEvent> {
        let flags = match kind {
            EventKind::Local => EVENT_DISABLE_TIMING,
            EventKind::Interprocess if self.driver.caps(device)?.event_ipc => {
                EVENT_DISABLE_TIMING | EVENT_INTERPROCESS
            }
            EventKind::Interprocess => {
                return Err(Error::Unsupported {
                    what: "an interprocess event",
                    why: format!("{device} has none"),
                    remedy: "order work by words in shared memory",
                });
            }
        };
        let scope = self.driver.on_device(device)?;
        let mut made = ptr::null_mut();
        scope.call(&self.driver.symbols.cuEventCreate, |function| {
            // SAFETY: `cuEventCreate` writes one pointer: `made` is one.
            unsafe { function(&raw mut made, flags) }
        })?;
        Ok(self.event_made(made, device))
    }

    unsafe fn record_event(&self, raw: RawEvent, stream: RawStream) -> Result<()> {
        let scope = self.driver.on_stream(stream)?;
        // SAFETY: `record_within` has our conditions, and the scope is the stream's.
        unsafe { self.record_within(&scope, raw, stream) }
    }

    unsafe fn query_event(&self, raw: RawEvent) -> Result<bool> {
        let scope = self.on_event(raw)?;
        let symbol = &self.driver.symbols.cuEventQuery;
        let code = scope.code(symbol, |function| {
            // SAFETY: `cuEventQuery` asks for an event that is alive: our caller vouches for it.
            unsafe { function(event(raw)) }
        })?;
        match code {
            SUCCESS => Ok(true),
            NOT_READY => Ok(false),
            code => Err(scope.error(symbol.name, code)),
        }
    }

    unsafe fn stream_wait_event(&self, stream: RawStream, raw: RawEvent) -> Result<()> {
        let scope = self.driver.on_stream(stream)?;
        // SAFETY: `await_within` has our conditions, and the scope is the stream's.
        unsafe { self.await_within(&scope, stream, raw) }
    }

    unsafe fn event_handle(&self, raw: RawEvent) -> Result<EventHandle> {
        let scope = self.on_event(raw)?;
        let mut handle = CUipcEventHandle { reserved: [0; 64] };
        scope.call(&self.driver.symbols.cuIpcGetEventHandle, |function| {
            // SAFETY: `cuIpcGetEventHandle` writes 64 bytes: `handle` has as many. Our caller
            // vouches for the event.
            unsafe { function(&raw mut handle, event(raw)) }
        })?;
        Ok(EventHandle(handle.reserved.map(|byte| byte as u8)))
    }

    fn open_event(&self, device: DeviceId, handle: &EventHandle) -> Result<RawEvent> {
        let scope = self.driver.on_device(device)?;
        let handle = CUipcEventHandle {
            reserved: handle.0.map(|byte| byte as _),
        };
        let mut opened = ptr::null_mut();
        scope.call(&self.driver.symbols.cuIpcOpenEventHandle, |function| {
            // SAFETY: `cuIpcOpenEventHandle` writes one pointer: `opened` is one. It checks the
            // handle's bytes.
            unsafe { function(&raw mut opened, handle) }
        })?;
        Ok(self.event_made(opened, device))
    }

    unsafe fn destroy_event(&self, raw: RawEvent) -> Result<()> {
        let scope = self.on_event(raw)?;
        let device = self.events.remove(raw.0);
        let result = scope.call(&self.driver.symbols.cuEventDestroy, |function| {
            // SAFETY: `cuEventDestroy` asks for an event that is alive: our caller vouches for it,
            // and that nobody uses it afterwards.
            unsafe { function(event(raw)) }
        });
        if let (Err(_), Some(device)) = (&result, device) {
            // It may live: its context must not be given back.
            self.events.insert(raw.0, device);
        }
        result
    }
}

impl CudaBackend {
    /// # Safety
    ///
    /// `raw` and `stream` are alive and of the scope's context.
    pub(crate) unsafe fn record_within(
        &self,
        scope: &Scope<'_>,
        raw: RawEvent,
        stream: RawStream,
    ) -> Result<()> {
        scope.call(&self.driver.symbols.cuEventRecord, |function| {
            // SAFETY: `cuEventRecord` asks for both alive and of one context: our caller vouches
            // for it, and the driver refuses the latter.
            unsafe { function(event(raw), call::stream(stream)) }
        })
    }

    /// # Safety
    ///
    /// `stream` and `raw` are alive, and the scope is of the stream's context.
    pub(crate) unsafe fn await_within(
        &self,
        scope: &Scope<'_>,
        stream: RawStream,
        raw: RawEvent,
    ) -> Result<()> {
        scope.call(&self.driver.symbols.cuStreamWaitEvent, |function| {
            // SAFETY: `cuStreamWaitEvent` asks for both alive: our caller vouches for it. Its flags
            // are 0.
            unsafe { function(call::stream(stream), event(raw), 0) }
        })
    }

    fn event_made(&self, made: CUevent, device: DeviceId) -> RawEvent {
        let raw = RawEvent(made.expose_provenance() as u64);
        self.events.insert(raw.0, device);
        raw
    }

    fn on_event(&self, raw: RawEvent) -> Result<Scope<'_>> {
        match self.events.device(raw.0) {
            Some(device) => self.driver.on_device(device),
            None => self.driver.anywhere(),
        }
    }
}
