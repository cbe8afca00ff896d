//! Events, local and interprocess.

use std::ptr;

use gpu_api::lock::Acquire;
use gpu_api::{
    DeviceId, EventHandle, EventKind, GpuEventHandles, GpuEvents, RawEvent, RawStream, Result,
};

use crate::backend::Backend;
use crate::calls::{EVENT_DISABLE_TIMING, EVENT_INTERPROCESS, Event, Handle};
use crate::vendor::{Scope, Vendor};

/// Turns an event's number into what the driver takes.
fn event(raw: RawEvent) -> Event {
    ptr::with_exposed_provenance_mut(raw.0 as usize)
}

// SAFETY: the condition of `GpuEvents`: `query_event` says `true` on success only, which the manual
// gives to work that has completed.
unsafe impl<V: Vendor> GpuEvents for Backend<V> {
    fn create_event(&self, device: DeviceId, kind: EventKind) -> Result<RawEvent> {
        let flags = match kind {
            EventKind::Local => EVENT_DISABLE_TIMING,
            EventKind::Interprocess if self.shares_events(device) => {
                EVENT_DISABLE_TIMING | EVENT_INTERPROCESS
            }
            EventKind::Interprocess => {
                return Err(Vendor::unsupported(
                    &**self,
                    "an interprocess event",
                    device,
                ));
            }
        };
        let scope = self.on_device(device)?;
        let mut made = ptr::null_mut();
        scope.call(&self.driver().calls.event_create, |function| {
            // SAFETY: `event_create` writes one pointer: `made` is one.
            unsafe { function(&raw mut made, flags) }
        })?;
        Ok(self.event_made(made, device))
    }

    unsafe fn record_event(&self, raw: RawEvent, stream: RawStream) -> Result<()> {
        let scope = self.on_device(stream.device)?;
        // SAFETY: `record_within` has our conditions, and the scope is the stream's.
        unsafe { self.record_within(&scope, raw, stream) }
    }

    unsafe fn query_event(&self, raw: RawEvent) -> Result<bool> {
        let scope = self.on_event(raw)?;
        scope.is_done(&self.driver().calls.event_query, |function| {
            // SAFETY: `event_query` asks for an event that is alive: our caller vouches for it.
            unsafe { function(event(raw)) }
        })
    }

    unsafe fn stream_wait_event(&self, stream: RawStream, raw: RawEvent) -> Result<()> {
        let scope = self.on_device(stream.device)?;
        // SAFETY: `await_within` has our conditions, and the scope is the stream's.
        unsafe { self.await_within(&scope, stream, raw) }
    }

    unsafe fn destroy_event(&self, raw: RawEvent) -> Result<()> {
        let scope = self.on_event(raw)?;
        let device = self.driver().events.acquire().remove(&raw.0);
        let result = scope.call(&self.driver().calls.event_destroy, |function| {
            // SAFETY: `event_destroy` asks for an event that is alive: our caller vouches for it,
            // and that nobody uses it afterwards.
            unsafe { function(event(raw)) }
        });
        if let (Err(_), Some(device)) = (&result, device) {
            // It may live: its context must not be given back.
            self.driver().events.acquire().insert(raw.0, device);
        }
        result
    }
}

// SAFETY: the condition of `GpuEventHandles`: a handle is what the driver gave of the event.
unsafe impl<V: Vendor> GpuEventHandles for Backend<V> {
    unsafe fn event_handle(&self, raw: RawEvent) -> Result<EventHandle> {
        let scope = self.on_event(raw)?;
        let mut handle = Handle::new([0; 64]);
        scope.call(&self.driver().calls.event_handle_get, |function| {
            // SAFETY: `event_handle_get` writes 64 bytes: `handle` has as many. Our caller
            // vouches for the event.
            unsafe { function(&raw mut handle, event(raw)) }
        })?;
        Ok(EventHandle(handle.bytes()))
    }

    fn open_event(&self, device: DeviceId, handle: &EventHandle) -> Result<RawEvent> {
        if !self.shares_events(device) {
            let what = "opening an interprocess event";
            return Err(self.unsupported(what, device));
        }
        let scope = self.on_device(device)?;
        let handle = Handle::new(handle.0);
        let mut opened = ptr::null_mut();
        scope.call(&self.driver().calls.event_handle_open, |function| {
            // SAFETY: `event_handle_open` writes one pointer: `opened` is one. It checks the
            // handle's bytes.
            unsafe { function(&raw mut opened, handle) }
        })?;
        Ok(self.event_made(opened, device))
    }
}

impl<V: Vendor> Backend<V> {
    /// # Safety
    ///
    /// `raw` and `stream` are alive and of the scope's context.
    pub(crate) unsafe fn record_within(
        &self,
        scope: &Scope<'_, V>,
        raw: RawEvent,
        stream: RawStream,
    ) -> Result<()> {
        scope.call(&self.driver().calls.event_record, |function| {
            // SAFETY: `event_record` asks for both alive and of one context: our caller vouches
            // for it, and the driver refuses the latter.
            unsafe { function(event(raw), V::stream(stream)) }
        })
    }

    /// # Safety
    ///
    /// `stream` and `raw` are alive, and the scope is of the stream's context.
    pub(crate) unsafe fn await_within(
        &self,
        scope: &Scope<'_, V>,
        stream: RawStream,
        raw: RawEvent,
    ) -> Result<()> {
        scope.call(&self.driver().calls.stream_wait_event, |function| {
            // SAFETY: `stream_wait_event` asks for both alive: our caller vouches for it. Its flags
            // are 0.
            unsafe { function(V::stream(stream), event(raw), 0) }
        })
    }

    fn event_made(&self, made: Event, device: DeviceId) -> RawEvent {
        let raw = RawEvent(made.expose_provenance() as u64);
        self.driver().events.acquire().insert(raw.0, device);
        raw
    }

    fn on_event(&self, raw: RawEvent) -> Result<Scope<'_, V>> {
        let device = self.driver().events.acquire().get(&raw.0).copied();
        match device {
            Some(device) => self.on_device(device),
            None => self.anywhere(),
        }
    }
}
