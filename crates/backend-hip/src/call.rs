//! The state of the calling thread around a call of the runtime: its current device, its capture
//! mode, its last error.
//!
//! A call of ours must not change the device that the application made current on its thread, nor
//! destroy a stream capture that it has under way, nor leave an error behind that the application
//! finds with `hipGetLastError` and takes for its own. [`Scope`] sets the first two and puts them
//! back, whatever happens in between, and clears the third.

use std::ffi::c_int;
use std::marker::PhantomData;
use std::ptr;

use gpu_api::{DeviceId, Error, RawStream, Result};

use crate::driver::Driver;
use crate::error::{self, OUT_OF_MEMORY, SUCCESS};
use crate::sys::{CAPTURE_RELAXED, Code, Stream, Symbol};

/// A thread that is ready for calls; dropped, the thread is as it was.
pub(crate) struct Scope<'a> {
    pub(crate) driver: &'a Driver,
    device: DeviceId,
    /// The device to put back; `None` while the thread's device was not touched.
    former: Option<c_int>,
    /// The mode to put back; `None` while the thread's mode was not touched.
    mode: Option<u32>,
    /// What it puts back is the calling thread's.
    thread: PhantomData<*const ()>,
}

/// Turns a stream's handle into what the runtime takes. Handles 0, 1 and 2 are the default streams;
/// runtimes before ROCm 7 know the legacy one as 0 only.
pub(crate) fn stream(raw: RawStream) -> Stream {
    let handle = if raw.handle == 1 {
        RawStream::LEGACY
    } else {
        raw.handle
    };
    ptr::with_exposed_provenance_mut(handle as usize)
}

impl Driver {
    /// Makes a device current.
    pub(crate) fn on_device(&self, device: DeviceId) -> Result<Scope<'_>> {
        let ordinal = self.ordinal(device)?;
        let mut scope = self.anywhere()?;
        scope.device = device;
        let current = scope.current()?;
        if current != ordinal {
            scope.call(&self.symbols.hipSetDevice, |function| {
                // SAFETY: `hipSetDevice` refuses what is no device.
                unsafe { function(ordinal) }
            })?;
            scope.former = Some(current);
        }
        Ok(scope)
    }

    /// Makes a stream's device current: the default streams are those of the current device, and
    /// the runtime does not check what it is given of the others.
    pub(crate) fn on_stream(&self, raw: RawStream) -> Result<Scope<'_>> {
        self.on_device(raw.device)
    }

    /// Leaves the current device as it is: for calls about addresses, which are the same on all of
    /// them.
    pub(crate) fn anywhere(&self) -> Result<Scope<'_>> {
        let mut scope = Scope {
            driver: self,
            device: DeviceId(0),
            former: None,
            mode: None,
            thread: PhantomData,
        };
        if let Some(function) = self.symbols.hipThreadExchangeStreamCaptureMode.function {
            let mut mode = CAPTURE_RELAXED;
            // SAFETY: `hipThreadExchangeStreamCaptureMode` reads a mode and writes the former:
            // `mode` is one.
            match unsafe { function(&raw mut mode) } {
                SUCCESS => scope.mode = Some(mode),
                code => {
                    return Err(
                        scope.error(self.symbols.hipThreadExchangeStreamCaptureMode.name, code)
                    );
                }
            }
        }
        Ok(scope)
    }
}

impl Scope<'_> {
    /// Calls a function of the runtime; a code other than success is an error.
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

    /// Calls a function of the runtime and hands on what it returned.
    pub(crate) fn code<F: Copy>(
        &self,
        symbol: &Symbol<F>,
        run: impl FnOnce(F) -> Code,
    ) -> Result<Code> {
        let function = symbol.function.ok_or_else(|| error::missing(symbol.name))?;
        let code = run(function);
        if let (true, Some(clear)) = (
            code != SUCCESS,
            self.driver.symbols.hipGetLastError.function,
        ) {
            // SAFETY: `hipGetLastError` has no conditions.
            let _ = unsafe { clear() };
        }
        Ok(code)
    }

    /// Makes the error of a call that allocates: out of memory says how much there is.
    pub(crate) fn allocation_error(&self, call: &'static str, code: Code, asked: u64) -> Error {
        if code != OUT_OF_MEMORY {
            return self.error(call, code);
        }
        // Where the runtime does not even tell that, nothing is free as far as the caller is
        // concerned.
        let (free, _) = self.memory_info().unwrap_or((0, 0));
        Error::OutOfMemory {
            device: self.device(),
            asked,
            free,
            hint: self.driver.version().out_of_memory_hint().to_owned(),
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

    /// Names the device that was asked for.
    pub(crate) fn device(&self) -> DeviceId {
        self.device
    }

    /// Returns the device that is current on this thread.
    pub(crate) fn current(&self) -> Result<c_int> {
        let mut current: c_int = 0;
        self.call(&self.driver.symbols.hipGetDevice, |function| {
            // SAFETY: `hipGetDevice` writes one integer: `current` is one.
            unsafe { function(&raw mut current) }
        })?;
        Ok(current)
    }

    /// Returns free and total bytes of the current device.
    pub(crate) fn memory_info(&self) -> Result<(u64, u64)> {
        let (mut free, mut total) = (0, 0);
        self.call(&self.driver.symbols.hipMemGetInfo, |function| {
            // SAFETY: `hipMemGetInfo` writes two sizes: `free` and `total` are such.
            unsafe { function(&raw mut free, &raw mut total) }
        })?;
        Ok((free as u64, total as u64))
    }
}

impl Drop for Scope<'_> {
    fn drop(&mut self) {
        // Both calls undo one that succeeded on this thread; they fail only where the runtime is
        // gone, and then there is nothing to put back.
        if let (Some(former), Some(function)) = (
            self.former.take(),
            self.driver.symbols.hipSetDevice.function,
        ) {
            // SAFETY: `hipSetDevice` refuses what is no device; this one the runtime itself named.
            let _ = unsafe { function(former) };
        }
        if let (Some(mut mode), Some(function)) = (
            self.mode.take(),
            self.driver
                .symbols
                .hipThreadExchangeStreamCaptureMode
                .function,
        ) {
            // SAFETY: `hipThreadExchangeStreamCaptureMode` reads a mode and writes the former:
            // `mode` is one that the runtime itself gave.
            let _ = unsafe { function(&raw mut mode) };
        }
    }
}
