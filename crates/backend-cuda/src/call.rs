//! Contexts: which one is current on the calling thread around a call, and the primary ones.

use std::mem;
use std::ptr;

use driver::code::{INVALID_CONTEXT, SUCCESS};
use driver::{Scope, Vendor};
use gpu_api::lock::Acquire;
use gpu_api::{DeviceId, Error, RawStream, Result};

use crate::cuda::Cuda;
use crate::error;
use crate::sys::{CUcontext, CUdevice};

/// Whether a scope pushed a context on the calling thread.
#[derive(Debug, Default)]
pub struct Pushed(bool);

impl Cuda {
    /// Begins a scope: relaxed if the driver does that without a context, else when one is entered.
    pub(crate) fn relaxed(&self) -> Result<Scope<'_, Cuda>> {
        let mut scope = Scope::untouched(self, None);
        match scope.relax() {
            SUCCESS | INVALID_CONTEXT => Ok(scope),
            code => Err(scope.error(self.driver().calls.exchange_capture_mode.name, code)),
        }
    }

    /// Makes a device's primary context current.
    pub(crate) fn enter_device<'a>(
        &'a self,
        mut scope: Scope<'a, Cuda>,
        device: DeviceId,
    ) -> Result<Scope<'a, Cuda>> {
        scope.device = Some(device);
        let context = self.primary(&scope, device)?;
        self.enter(scope, context)
    }

    fn enter<'a>(&self, mut scope: Scope<'a, Cuda>, context: CUcontext) -> Result<Scope<'a, Cuda>> {
        if self.current(&scope)? != context {
            scope.call(&self.own.cuCtxPushCurrent, |function| {
                // SAFETY: `cuCtxPushCurrent` asks for a context: `context` is a primary one that
                // `primary` retained, that of a stream that is alive, or one that the caller of
                // `on_context` vouches for.
                unsafe { function(context) }
            })?;
            scope.thread.0 = true;
        }
        match scope.relax() {
            SUCCESS => Ok(scope),
            code => Err(scope.error(self.driver().calls.exchange_capture_mode.name, code)),
        }
    }

    /// Pops what a scope pushed.
    pub(crate) fn pop(&self, pushed: &mut Pushed) {
        let function = self.own.cuCtxPopCurrent.function;
        if let (true, Some(function)) = (mem::take(&mut pushed.0), function) {
            let mut context = ptr::null_mut();
            // SAFETY: `cuCtxPopCurrent` writes one pointer: `context` is one. What it pops is what
            // `enter` pushed.
            let _ = unsafe { function(&raw mut context) };
        }
    }

    /// Makes ready for `cuStreamIsCapturing` and `cuStreamBatchMemOp`, which take what they need
    /// from the stream that they are given, whatever context is current: the manual lists no
    /// `CUDA_ERROR_INVALID_CONTEXT` for them, and on driver 580 they work without any. To ask for
    /// the current context and compare it costs 40 ns, a fifteenth of the batch.
    ///
    /// A default stream is that of a context.
    pub(crate) fn enter_beside(&self, raw: RawStream) -> Result<Scope<'_, Cuda>> {
        if !raw.is_default() {
            let mut scope = self.relaxed()?;
            // Without a mode the driver wants a context to relax the thread, or is too old to
            // capture.
            if scope.is_relaxed() {
                scope.device = Some(raw.device);
                return Ok(scope);
            }
        }
        self.on_device(raw.device)
    }

    /// Makes any context current. Contexts of our own come first: they outlive what is registered
    /// in them, which the application's may not.
    pub(crate) fn enter_any(&self) -> Result<Scope<'_, Cuda>> {
        let scope = self.relaxed()?;
        let retained = self
            .devices
            .iter()
            .position(|device| device.context.get().is_some());
        if let Some(found) = retained {
            return self.enter_device(scope, DeviceId(found as u32));
        }
        if self.current(&scope)?.is_null() {
            return self.enter_device(scope, DeviceId(0));
        }
        let device = self.device_number()?;
        self.enter_device(scope, device)
    }

    /// Makes a context of the application's current.
    ///
    /// # Safety
    ///
    /// `context` is alive.
    pub(crate) unsafe fn on_context(&self, context: CUcontext) -> Result<Scope<'_, Cuda>> {
        self.enter(self.relaxed()?, context)
    }

    /// Returns the number of the device whose context is current.
    pub(crate) fn device_number(&self) -> Result<DeviceId> {
        let function = self
            .own
            .cuCtxGetDevice
            .function
            .ok_or_else(|| error::missing("cuCtxGetDevice"))?;
        let mut ordinal: CUdevice = 0;
        // SAFETY: `cuCtxGetDevice` writes one integer: `ordinal` is one.
        let code = unsafe { function(&raw mut ordinal) };
        match (code, self.numbered(ordinal)) {
            (SUCCESS, Some(device)) => Ok(device),
            // The scope must not ask for its device once more: this is what answers it.
            _ => Err(Error::Driver {
                call: "cuCtxGetDevice",
                device: DeviceId(0),
                source: self.own.error(code),
            }),
        }
    }

    /// Returns a device's primary context, retained on first use and kept until the backend is
    /// dropped.
    pub(crate) fn primary(&self, scope: &Scope<'_, Cuda>, device: DeviceId) -> Result<CUcontext> {
        let (entry, ordinal) = (self.device(device)?, self.ordinal(device)?);
        if let Some(context) = entry.context.get() {
            return Ok(ptr::with_exposed_provenance_mut(*context));
        }
        let _retaining = entry.retaining.acquire();
        if let Some(context) = entry.context.get() {
            return Ok(ptr::with_exposed_provenance_mut(*context));
        }
        let mut context: CUcontext = ptr::null_mut();
        scope.call(&self.own.cuDevicePrimaryCtxRetain, |function| {
            // SAFETY: `cuDevicePrimaryCtxRetain` writes one pointer: `context` is one. The ordinal
            // is the driver's.
            unsafe { function(&raw mut context, ordinal) }
        })?;
        let _ = entry.context.set(context.expose_provenance());
        Ok(context)
    }

    /// Gives the primary contexts back.
    ///
    /// # Safety
    ///
    /// Nothing that was made in them is left, and nobody calls this driver afterwards.
    pub(crate) unsafe fn release_contexts(&self) {
        let Ok(scope) = self.relaxed() else { return };
        for device in &self.devices {
            if let (Some(_), Ok(ordinal)) = (device.context.get(), device.ordinal) {
                // Nobody is left to be told of an error, and a context that stays is no worse than
                // one unreleased.
                let _ = scope.code(&self.own.cuDevicePrimaryCtxRelease, |function| {
                    // SAFETY: `cuDevicePrimaryCtxRelease` asks for a context that was retained:
                    // `primary` did so once.
                    unsafe { function(ordinal) }
                });
            }
        }
    }

    /// Returns the context that is current on this thread; null where there is none.
    pub(crate) fn current(&self, scope: &Scope<'_, Cuda>) -> Result<CUcontext> {
        let mut context = ptr::null_mut();
        scope.call(&self.own.cuCtxGetCurrent, |function| {
            // SAFETY: `cuCtxGetCurrent` writes one pointer: `context` is one.
            unsafe { function(&raw mut context) }
        })?;
        Ok(context)
    }

    /// Finds the context that a stream was made in.
    ///
    /// # Safety
    ///
    /// `raw` is alive, and no default stream.
    pub(crate) unsafe fn context_of(
        &self,
        scope: &Scope<'_, Cuda>,
        raw: RawStream,
    ) -> Result<CUcontext> {
        let mut context = ptr::null_mut();
        scope.call(&self.own.cuStreamGetCtx, |function| {
            // SAFETY: `cuStreamGetCtx`: our caller vouches for the stream; it writes one pointer:
            // `context` is one.
            unsafe { function(Cuda::stream(raw).cast(), &raw mut context) }
        })?;
        Ok(context)
    }
}
