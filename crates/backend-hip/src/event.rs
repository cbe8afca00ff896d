//! Events, local and interprocess.

use std::ptr;

use gpu_api::{DeviceId, EventHandle, EventKind, GpuEvents, RawEvent, RawStream, Result};

use crate::backend::HipBackend;
use crate::call::{self, Scope};
use crate::error::{self, NOT_READY, SUCCESS};
use crate::proof::Step;
use crate::sys::{EVENT_DISABLE_TIMING, EVENT_INTERPROCESS, Event, Handle};

/// Turns an event's number into what the runtime takes.
fn event(raw: RawEvent) -> Event {
    ptr::with_exposed_provenance_mut(raw.0 as usize)
}

// SAFETY: the condition of `GpuEvents`: `query_event` says `true` on success only, which the manual
// gives to work that has completed.
unsafe impl GpuEvents for HipBackend {
    fn create_event(&self, device: DeviceId, kind: EventKind) -> Result<RawEvent> {
        let flags = match kind {
            EventKind::Local => EVENT_DISABLE_TIMING,
            EventKind::Interprocess if self.driver.caps(device)?.event_ipc => {
                EVENT_DISABLE_TIMING | EVENT_INTERPROCESS
            }
            EventKind::Interprocess => {
                return Err(error::unproved("an interprocess event"));
            }
        };
        let scope = self.driver.on_device(device)?;
        let mut made = ptr::null_mut();
        scope.call(&self.driver.symbols.hipEventCreateWithFlags, |function| {
            // SAFETY: `hipEventCreateWithFlags` writes one pointer: `made` is one.
            unsafe { function(&raw mut made, flags) }
        })?;
        Ok(self.event_made(made, device))
    }

    unsafe fn record_event(&self, raw: RawEvent, stream: RawStream) -> Result<()> {
        let scope = self.driver.on_stream(stream)?;
        scope.call(&self.driver.symbols.hipEventRecord, |function| {
            // SAFETY: `hipEventRecord` asks for both alive and of one context: our caller vouches
            // for it, and the driver refuses the latter.
            unsafe { function(event(raw), call::stream(stream)) }
        })
    }

    unsafe fn query_event(&self, raw: RawEvent) -> Result<bool> {
        let scope = self.on_event(raw)?;
        let symbol = &self.driver.symbols.hipEventQuery;
        let code = scope.code(symbol, |function| {
            // SAFETY: `hipEventQuery` asks for an event that is alive: our caller vouches for it.
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
        scope.call(&self.driver.symbols.hipStreamWaitEvent, |function| {
            // SAFETY: `hipStreamWaitEvent` asks for both alive: our caller vouches for it. Its
            // flags are 0.
            unsafe { function(call::stream(stream), event(raw), 0) }
        })
    }

    unsafe fn event_handle(&self, raw: RawEvent) -> Result<EventHandle> {
        let scope = self.on_event(raw)?;
        let mut handle = Handle { reserved: [0; 64] };
        scope.call(&self.driver.symbols.hipIpcGetEventHandle, |function| {
            // SAFETY: `hipIpcGetEventHandle` writes 64 bytes: `handle` has as many. Our caller
            // vouches for the event.
            unsafe { function(&raw mut handle, event(raw)) }
        })?;
        Ok(EventHandle(handle.reserved.map(|byte| byte as u8)))
    }

    fn open_event(&self, device: DeviceId, handle: &EventHandle) -> Result<RawEvent> {
        if !self.driver.proved(Step::Events) {
            return Err(error::unproved("opening an interprocess event"));
        }
        let scope = self.driver.on_device(device)?;
        let handle = Handle {
            reserved: handle.0.map(|byte| byte as _),
        };
        let mut opened = ptr::null_mut();
        scope.call(&self.driver.symbols.hipIpcOpenEventHandle, |function| {
            // SAFETY: `hipIpcOpenEventHandle` writes one pointer: `opened` is one. It checks the
            // handle's bytes.
            unsafe { function(&raw mut opened, handle) }
        })?;
        Ok(self.event_made(opened, device))
    }

    unsafe fn destroy_event(&self, raw: RawEvent) -> Result<()> {
        let scope = self.on_event(raw)?;
        self.events.remove(raw.0);
        scope.call(&self.driver.symbols.hipEventDestroy, |function| {
            // SAFETY: `hipEventDestroy` asks for an event that is alive: our caller vouches for it,
            // and that nobody uses it afterwards.
            unsafe { function(event(raw)) }
        })
    }
}

impl HipBackend {
    fn event_made(&self, made: Event, device: DeviceId) -> RawEvent {
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
