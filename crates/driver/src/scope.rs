//! The state of the calling thread around a call of the driver.
//!
//! A call of this library must neither change the context or device that the application made
//! current on its thread, nor destroy a stream capture that it has under way (several calls do,
//! from any thread, unless the calling thread's mode is relaxed: measured on CUDA's driver 580). A
//! vendor's [`Thread`](Vendor::Thread) says what else it changed; [`Scope`] puts all of it back,
//! whatever happens in between.

use std::marker::PhantomData;

use gpu_api::{DeviceId, Error, Result};

use crate::calls::{CAPTURE_RELAXED, Symbol};
use crate::code::{Code, OUT_OF_MEMORY, SUCCESS};
use crate::vendor::Vendor;

/// A thread that is ready for calls; dropped, the thread is as it was.
pub struct Scope<'a, V: Vendor> {
    /// The driver that is called.
    pub vendor: &'a V,
    /// The device that the calls are for; `None` where only the thread tells.
    pub device: Option<DeviceId>,
    /// What the vendor changed on the thread.
    pub thread: V::Thread,
    /// The capture mode to put back; `None` while the thread's mode was not touched.
    mode: Option<u32>,
    /// What it puts back is the calling thread's.
    not_send: PhantomData<*const ()>,
}

impl<'a, V: Vendor> Scope<'a, V> {
    /// Begins a scope that leaves the thread as it is.
    pub fn untouched(vendor: &'a V, device: Option<DeviceId>) -> Scope<'a, V> {
        Scope {
            vendor,
            device,
            thread: V::Thread::default(),
            mode: None,
            not_send: PhantomData,
        }
    }

    /// Sets the thread's capture mode to relaxed, if it is not yet. Drivers too old to capture have
    /// no mode.
    pub fn relax(&mut self) -> Code {
        let symbol = &self.vendor.driver().calls.exchange_capture_mode;
        let (None, Some(function)) = (self.mode, symbol.function) else {
            return SUCCESS;
        };
        let mut mode = CAPTURE_RELAXED;
        // SAFETY: `exchange_capture_mode` reads a mode and writes the former: `mode` is one.
        let code = unsafe { function(&raw mut mode) };
        if code == SUCCESS {
            self.mode = Some(mode);
        }
        code
    }

    /// Says whether the thread's mode was relaxed.
    pub fn is_relaxed(&self) -> bool {
        self.mode.is_some()
    }

    /// Calls a function of the driver; a code other than success is an error.
    ///
    /// # Errors
    ///
    /// [`Error::Driver`] with the code, [`Error::Unsupported`] for a function that the driver lacks.
    pub fn call<F: Copy>(&self, symbol: &Symbol<F>, run: impl FnOnce(F) -> Code) -> Result<()> {
        match self.code(symbol, run)? {
            SUCCESS => Ok(()),
            code => Err(self.error(symbol.name, code)),
        }
    }

    /// Calls a function of the driver and hands on what it returned.
    ///
    /// # Errors
    ///
    /// [`Error::Unsupported`] for a function that the driver lacks.
    pub fn code<F: Copy>(&self, symbol: &Symbol<F>, run: impl FnOnce(F) -> Code) -> Result<Code> {
        let function = symbol
            .function
            .ok_or_else(|| self.vendor.missing(symbol.name))?;
        let code = run(function);
        if code != SUCCESS {
            self.vendor.failed();
        }
        Ok(code)
    }

    /// Makes the error of a call.
    pub fn error(&self, call: &'static str, code: Code) -> Error {
        Error::Driver {
            call,
            device: self.device(),
            source: self.vendor.code(code),
        }
    }

    /// Makes the error of a call that allocates: out of memory says how much there is.
    pub fn allocation_error(&self, call: &'static str, code: Code, asked: u64) -> Error {
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
            hint: self.vendor.out_of_memory_hint().to_owned(),
        }
    }

    /// Names the device that the calls are for, or that the thread is on.
    pub fn device(&self) -> DeviceId {
        self.device
            .or_else(|| self.vendor.current_device(self))
            .unwrap_or(DeviceId(0))
    }

    /// Returns free and total bytes of the current device.
    ///
    /// # Errors
    ///
    /// The driver's.
    pub fn memory_info(&self) -> Result<(u64, u64)> {
        let (mut free, mut total) = (0, 0);
        self.call(&self.vendor.driver().calls.mem_info, |function| {
            // SAFETY: `mem_info` writes two sizes: `free` and `total` are such.
            unsafe { function(&raw mut free, &raw mut total) }
        })?;
        Ok((free as u64, total as u64))
    }
}

impl<V: Vendor> Drop for Scope<'_, V> {
    fn drop(&mut self) {
        // Each call undoes one that succeeded on this thread; they fail only where the driver is
        // gone, and then there is nothing to put back.
        let exchange = &self.vendor.driver().calls.exchange_capture_mode;
        if let (Some(mut mode), Some(function)) = (self.mode.take(), exchange.function) {
            // SAFETY: `exchange_capture_mode` reads a mode and writes the former: `mode` is one
            // that the driver itself gave.
            let _ = unsafe { function(&raw mut mode) };
        }
        self.vendor.leave(&mut self.thread);
    }
}
