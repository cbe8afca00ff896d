//! The state of the calling thread around a call of the driver: which context is current, and the
//! capture mode.
//!
//! A call of ours must neither change the context that the application made current on its thread
//! nor destroy a stream capture that it has under way (several calls do, from any thread, unless
//! the calling thread's mode is relaxed: measured on driver 580). [`Scope`] sets both, or what of
//! them the calls depend on, and puts both back, whatever happens in between.

use std::marker::PhantomData;
use std::mem;
use std::ptr;
use std::sync::PoisonError;

use gpu_api::{DeviceId, Error, RawStream, Result};

use crate::driver::Driver;
use crate::error::{self, INVALID_CONTEXT, OUT_OF_MEMORY, SUCCESS};
use crate::sys::{CAPTURE_RELAXED, CUcontext, CUdevice, CUstream, Code, Symbol};

/// A thread that is ready for calls; dropped, the thread is as it was.
pub(crate) struct Scope<'a> {
    pub(crate) driver: &'a Driver,
    /// The device that the calls are for; `None` where only the current context tells.
    device: Option<DeviceId>,
    pushed: bool,
    /// The mode to put back; `None` while the thread's mode was not touched.
    mode: Option<u32>,
    /// What it puts back is the calling thread's.
    thread: PhantomData<*const ()>,
}

/// Turns a stream's handle into what the driver takes. Handles 0, 1 and 2 are the default streams.
pub(crate) fn stream(raw: RawStream) -> CUstream {
    ptr::with_exposed_provenance_mut(raw.handle as usize)
}

impl Driver {
    /// Makes the device's primary context current.
    pub(crate) fn on_device(&self, device: DeviceId) -> Result<Scope<'_>> {
        let scope = self.relaxed()?;
        scope.enter_device(device)
    }

    /// Leaves the current context as it is, for calls about physical memory, which is no context's:
    /// a process that makes none costs the device no more than that memory.
    pub(crate) fn without_context(&self, device: DeviceId) -> Result<Scope<'_>> {
        let mut scope = self.relaxed()?;
        scope.device = Some(device);
        Ok(scope)
    }

    /// Makes ready for calls that queue on a stream: its device's primary context is the only one
    /// that has it.
    pub(crate) fn on_stream(&self, raw: RawStream) -> Result<Scope<'_>> {
        self.on_device(raw.device)
    }

    /// Leaves context and mode as they are, for `cuStreamIsCapturing`: it asks about captures and
    /// ends none, and takes what it needs from the stream that it is given.
    ///
    /// A default stream is that of a context, as in [`on_stream`](Driver::on_stream).
    pub(crate) fn asking_stream(&self, raw: RawStream) -> Result<Scope<'_>> {
        if raw.is_default() {
            self.on_stream(raw)
        } else {
            Ok(self.untouched(Some(raw.device)))
        }
    }

    /// Makes ready for `cuStreamIsCapturing` and `cuStreamBatchMemOp`, which take what they need
    /// from the stream that they are given, whatever context is current: the manual lists no
    /// `CUDA_ERROR_INVALID_CONTEXT` for them, and on driver 580 they work without any. To ask for
    /// the current context and compare it costs 40 ns, a fifteenth of the batch.
    ///
    /// A default stream is that of a context, as in [`on_stream`](Driver::on_stream).
    pub(crate) fn beside_stream(&self, raw: RawStream) -> Result<Scope<'_>> {
        if !raw.is_default() {
            let mut scope = self.relaxed()?;
            // Without a mode the driver wants a context to relax the thread, or is too old to
            // capture.
            if scope.mode.is_some() {
                scope.device = Some(raw.device);
                return Ok(scope);
            }
        }
        self.on_stream(raw)
    }

    /// Makes any context current: for calls that ask about addresses, which are the same in all of
    /// them.
    ///
    /// Contexts of our own come first: they outlive what is registered in them, which the
    /// application's may not.
    pub(crate) fn anywhere(&self) -> Result<Scope<'_>> {
        let scope = self.relaxed()?;
        if let Some(device) = self.retained() {
            return scope.enter_device(device);
        }
        let current = scope.current()?;
        if current.is_null() {
            return scope.enter_device(DeviceId(0));
        }
        let device = self.device_number(&scope)?;
        scope.enter_device(device)
    }

    /// Makes a context of the application's current.
    ///
    /// # Safety
    ///
    /// `context` is alive.
    pub(crate) unsafe fn on_context(&self, context: CUcontext) -> Result<Scope<'_>> {
        let scope = self.relaxed()?;
        scope.enter(context)
    }

    /// Begins a scope that leaves the thread as it is.
    fn untouched(&self, device: Option<DeviceId>) -> Scope<'_> {
        Scope {
            driver: self,
            device,
            pushed: false,
            mode: None,
            thread: PhantomData,
        }
    }

    /// Begins a scope: relaxed if the driver does that without a context, else when one is entered.
    pub(crate) fn relaxed(&self) -> Result<Scope<'_>> {
        let mut scope = self.untouched(None);
        match scope.relax() {
            SUCCESS | INVALID_CONTEXT => Ok(scope),
            code => Err(scope.error(self.symbols.cuThreadExchangeStreamCaptureMode.name, code)),
        }
    }

    /// Returns the number of the device whose context is current in `scope`.
    pub(crate) fn device_number(&self, scope: &Scope<'_>) -> Result<DeviceId> {
        let function = self
            .symbols
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
                source: scope.driver.symbols.error(code),
            }),
        }
    }

    /// Returns a device's primary context, retained on first use and kept until the backend is
    /// dropped.
    pub(crate) fn primary(&self, scope: &Scope<'_>, device: DeviceId) -> Result<CUcontext> {
        let (entry, ordinal) = (self.device(device)?, self.ordinal(device)?);
        if let Some(context) = entry.context.get() {
            return Ok(ptr::with_exposed_provenance_mut(*context));
        }
        let _retaining = entry
            .retaining
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        if let Some(context) = entry.context.get() {
            return Ok(ptr::with_exposed_provenance_mut(*context));
        }
        let mut context: CUcontext = ptr::null_mut();
        scope.call(&self.symbols.cuDevicePrimaryCtxRetain, |function| {
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
    pub(crate) unsafe fn release(&self) {
        let Ok(scope) = self.relaxed() else { return };
        for device in &self.devices {
            if let (Some(_), Ok(ordinal)) = (device.context.get(), device.ordinal) {
                // Nobody is left to be told of an error, and a context that stays is no worse than
                // one unreleased.
                let _ = scope.code(&self.symbols.cuDevicePrimaryCtxRelease, |function| {
                    // SAFETY: `cuDevicePrimaryCtxRelease` asks for a context that was retained:
                    // `primary` did so once.
                    unsafe { function(ordinal) }
                });
            }
        }
    }
}

impl Scope<'_> {
    /// Calls a function of the driver; a code other than success is an error.
    pub(crate) fn call<F: Copy>(
        &self,
        symbol: &Symbol<F>,
        run: impl FnOnce(F) -> Code,
    ) -> Result<()> {
        match self.code(symbol, run)? {
            SUCCESS => Ok(()),
            code => Err(self.error(symbol.name, code)),
        }
    }

    /// Calls a function of the driver and hands on what it returned.
    pub(crate) fn code<F: Copy>(
        &self,
        symbol: &Symbol<F>,
        run: impl FnOnce(F) -> Code,
    ) -> Result<Code> {
        let function = symbol.function.ok_or_else(|| error::missing(symbol.name))?;
        Ok(run(function))
    }

    /// Makes the error of a call that allocates: out of memory says how much there is.
    pub(crate) fn allocation_error(&self, call: &'static str, code: Code, asked: u64) -> Error {
        if code != OUT_OF_MEMORY {
            return self.error(call, code);
        }
        // Where the driver does not even tell that, nothing is free as far as the caller is
        // concerned.
        let (free, _) = self.memory_info().unwrap_or((0, 0));
        Error::OutOfMemory {
            device: self.device(),
            asked,
            free,
            hint: "collect or drop blocks, trim, or see `nvidia-smi` for other processes on the device".to_owned(),
        }
    }

    /// Makes the error of a call.
    pub(crate) fn error(&self, call: &'static str, code: Code) -> Error {
        Error::Driver {
            call,
            device: self.device(),
            source: self.driver.symbols.error(code),
        }
    }

    /// Names the device that the calls are for, or of the context that is current.
    pub(crate) fn device(&self) -> DeviceId {
        self.device
            .or_else(|| self.driver.device_number(self).ok())
            .unwrap_or(DeviceId(0))
    }

    /// Returns the context that is current on this thread; null where there is none.
    pub(crate) fn current(&self) -> Result<CUcontext> {
        let mut context = ptr::null_mut();
        self.call(&self.driver.symbols.cuCtxGetCurrent, |function| {
            // SAFETY: `cuCtxGetCurrent` writes one pointer: `context` is one.
            unsafe { function(&raw mut context) }
        })?;
        Ok(context)
    }

    /// Returns free and total bytes of the current device.
    pub(crate) fn memory_info(&self) -> Result<(u64, u64)> {
        let (mut free, mut total) = (0, 0);
        self.call(&self.driver.symbols.cuMemGetInfo, |function| {
            // SAFETY: `cuMemGetInfo` writes two sizes: `free` and `total` are such.
            unsafe { function(&raw mut free, &raw mut total) }
        })?;
        Ok((free as u64, total as u64))
    }

    /// Finds the context that a stream was made in.
    ///
    /// # Safety
    ///
    /// `raw` is alive, and no default stream.
    pub(crate) unsafe fn context_of(&self, raw: RawStream) -> Result<CUcontext> {
        let mut context = ptr::null_mut();
        self.call(&self.driver.symbols.cuStreamGetCtx, |function| {
            // SAFETY: `cuStreamGetCtx`: our caller vouches for the stream; it writes one pointer:
            // `context` is one.
            unsafe { function(stream(raw), &raw mut context) }
        })?;
        Ok(context)
    }

    fn enter_device(mut self, device: DeviceId) -> Result<Self> {
        self.device = Some(device);
        let context = self.driver.primary(&self, device)?;
        self.enter(context)
    }

    fn enter(mut self, context: CUcontext) -> Result<Self> {
        if self.current()? != context {
            self.call(&self.driver.symbols.cuCtxPushCurrent, |function| {
                // SAFETY: `cuCtxPushCurrent` asks for a context: `context` is a primary one that
                // `primary` retained, that of a stream that is alive, or one that the caller of
                // `on_context` vouches for.
                unsafe { function(context) }
            })?;
            self.pushed = true;
        }
        if self.mode.is_none() {
            let code = self.relax();
            if code != SUCCESS {
                return Err(self.error(
                    self.driver.symbols.cuThreadExchangeStreamCaptureMode.name,
                    code,
                ));
            }
        }
        Ok(self)
    }

    /// Sets the thread's capture mode to relaxed. Drivers too old to capture have no mode.
    fn relax(&mut self) -> Code {
        let Some(function) = self
            .driver
            .symbols
            .cuThreadExchangeStreamCaptureMode
            .function
        else {
            return SUCCESS;
        };
        let mut mode = CAPTURE_RELAXED;
        // SAFETY: `cuThreadExchangeStreamCaptureMode` reads a mode and writes the former: `mode` is
        // one.
        let code = unsafe { function(&raw mut mode) };
        if code == SUCCESS {
            self.mode = Some(mode);
        }
        code
    }
}

impl Drop for Scope<'_> {
    fn drop(&mut self) {
        // Both calls undo one that succeeded on this thread; they fail only where the driver is
        // gone, and then there is nothing to put back.
        if let (Some(mut mode), Some(function)) = (
            self.mode.take(),
            self.driver
                .symbols
                .cuThreadExchangeStreamCaptureMode
                .function,
        ) {
            // SAFETY: `cuThreadExchangeStreamCaptureMode` reads a mode and writes the former:
            // `mode` is one that the driver itself gave.
            let _ = unsafe { function(&raw mut mode) };
        }
        if let (true, Some(function)) = (
            mem::take(&mut self.pushed),
            self.driver.symbols.cuCtxPopCurrent.function,
        ) {
            let mut context = ptr::null_mut();
            // SAFETY: `cuCtxPopCurrent` writes one pointer: `context` is one. What it pops is what
            // `enter` pushed.
            let _ = unsafe { function(&raw mut context) };
        }
    }
}
