//! What differs from one CUDA-shaped driver to the next.

use std::ffi::{c_int, c_void};
use std::fmt;
use std::marker::PhantomData;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use gpu_api::{
    AddressRange, BackendKind, DeviceId, DevicePtr, DeviceUuid, DriverError, Error, MemHandle,
    MemoryKind, PointerInfo, RawStream, Result, StreamInfo, StreamOp, WordOps,
};

use crate::calls::{CAPTURE_RELAXED, MemoryHandle, Stream, Symbol};
use crate::code::{Code, NOT_READY, OUT_OF_MEMORY, SUCCESS};
use crate::driver::Driver;
use crate::given::Given;

/// What one version of a driver does otherwise than the next, as data: a backend has one table of
/// them, each with the report or the source line that it rests on.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Quirks {
    /// The flag without which no handle is opened (`cuIpcMemLazyEnablePeerAccess`).
    pub open_flags: u32,
    /// The question that [`granularity`](crate::calls::Calls::granularity) is asked: 0 for the
    /// minimum, 1 for what is recommended.
    pub granularity_flag: u32,
    /// What every allocation is rounded up to at least.
    pub least_granularity: u64,
    /// The handle of physical memory is kept for as long as it is mapped: not every driver keeps
    /// the memory for the mapping's sake alone, or gives the handle again.
    pub keeps_handles: bool,
    /// An import takes a descriptor's number in place of an address; else the address of one.
    pub imports_by_value: bool,
    /// The driver keeps the number of an imported descriptor, and reads it again.
    pub keeps_descriptors: bool,
    /// A mapping that fails is an error, and what is not mapped can be unmapped with an error.
    pub tells_failed_mappings: bool,
    /// The driver maps as many bytes as it is told, whatever a descriptor has.
    pub maps_unchecked: bool,
    /// Destroying a stream waits for all that is queued on it.
    pub destroy_waits: bool,
    /// Bytes behind plain memory that is shared by handle, which the backend keeps to itself: whole
    /// granules.
    pub tail: u64,
}

/// How file descriptors of a device's memory are made.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Descriptor {
    /// From virtual memory.
    Vmm,
    /// From plain memory, as a dma-buf.
    DmaBuf,
}

/// What a vendor calls things, for errors.
#[derive(Clone, Copy, Debug)]
pub struct Words {
    /// What to see for the ways between devices.
    pub topology: &'static str,
    /// The call for plain memory.
    pub plain: &'static str,
    /// The call for virtual memory.
    pub virtual_memory: &'static str,
    /// The call for managed memory.
    pub managed: &'static str,
    /// The calls for host memory.
    pub host: &'static str,
    /// The call for memory of a pool.
    pub pool: &'static str,
    /// What to call instead of those whose memory cannot be shared.
    pub instead: &'static str,
}

/// Plain memory that travels as a dma-buf.
pub trait DmaBuf {
    /// Exports an allocation.
    ///
    /// # Errors
    ///
    /// The driver's.
    fn export(&self, device: DeviceId, base: DevicePtr, len: u64) -> Result<OwnedFd>;

    /// Maps another process' allocation; returns its base and what the mapping rests on.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] for a descriptor that the driver refuses, and the driver's.
    fn import(&self, device: DeviceId, given: &Given, len: u64) -> Result<(u64, usize)>;

    /// Unmaps it.
    ///
    /// # Errors
    ///
    /// The driver's.
    ///
    /// # Safety
    ///
    /// `import` gave both, once, and no unfinished GPU work touches the memory.
    unsafe fn close(&self, device: DeviceId, base: DevicePtr, object: usize) -> Result<()>;
}

/// A vendor's driver: what a backend calls where drivers differ.
///
/// Methods without a body are what no two drivers do alike; none has state of its own beyond the
/// vendor's. Read with `backend-cuda` beside it.
pub trait Vendor: fmt::Debug + Send + Sync + Sized + 'static {
    /// The vendor.
    const KIND: BackendKind;
    /// The backend's name in debug output.
    const NAME: &'static str;
    /// What it calls things.
    const WORDS: Words;

    /// What a scope changed on the calling thread.
    type Thread: Default;

    /// Loads the driver and starts it.
    ///
    /// # Errors
    ///
    /// [`Error::Unavailable`] with what is missing and what to do about it.
    fn load() -> Result<Arc<Self>>;

    /// Says whether a backend that is dropped calls the driver once more: not in a forked child,
    /// where another thread of the parent's may hold a table's lock for good, and not where the
    /// driver's own end is its own affair.
    fn closes(&self) -> bool;

    /// Gives back what the driver keeps for as long as it is used.
    ///
    /// # Safety
    ///
    /// Nothing that was made with the driver is left, and nothing calls it afterwards.
    unsafe fn release(&self);

    /// Returns the calls and the tables.
    fn driver(&self) -> &Driver;

    /// Returns what this version does otherwise.
    fn quirks(&self) -> &Quirks;

    /// Names a code the way the driver does.
    fn code(&self, code: Code) -> DriverError;

    /// Makes the error of a driver that lacks a function.
    fn missing(&self, name: &'static str) -> Error;

    /// Makes the error of what a device does not have, or is not known to do right.
    fn unsupported(&self, what: &'static str, device: DeviceId) -> Error;

    /// Says what may hold memory that nothing uses.
    fn out_of_memory_hint(&self) -> &'static str;

    /// Makes a device current.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] for a device that is none, and the driver's.
    fn on_device(&self, device: DeviceId) -> Result<Scope<'_, Self>>;

    /// Makes any device current: for calls about addresses, which are the same on all of them.
    ///
    /// # Errors
    ///
    /// The driver's.
    fn anywhere(&self) -> Result<Scope<'_, Self>>;

    /// Makes ready for calls that queue on a stream and take what they need from it.
    ///
    /// # Errors
    ///
    /// The driver's.
    fn beside_stream(&self, stream: RawStream) -> Result<Scope<'_, Self>> {
        self.on_device(stream.device)
    }

    /// Makes ready to ask whether a stream is captured.
    ///
    /// # Errors
    ///
    /// The driver's.
    fn asking_stream(&self, stream: RawStream) -> Result<Scope<'_, Self>> {
        self.on_device(stream.device)
    }

    /// Makes ready for calls about physical memory, which need no context.
    ///
    /// # Errors
    ///
    /// The driver's.
    fn without_context(&self, device: DeviceId) -> Result<Scope<'_, Self>> {
        self.on_device(device)
    }

    /// Puts back what a scope changed on the calling thread.
    fn leave(&self, thread: &mut Self::Thread);

    /// Is called after each call that failed.
    fn failed(&self) {}

    /// Returns the device that the thread is on.
    fn current_device(&self, scope: &Scope<'_, Self>) -> Option<DeviceId>;

    /// Counts the devices.
    fn count(&self) -> usize;

    /// Returns the driver's own number of a device.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] for a device that is none.
    fn ordinal(&self, device: DeviceId) -> Result<c_int>;

    /// Finds our number of a device by the driver's.
    fn numbered(&self, ordinal: c_int) -> Option<DeviceId>;

    /// Returns what identifies a device in every process.
    ///
    /// # Errors
    ///
    /// The driver's, and [`Error::Unsupported`] for a device that cannot be told from another.
    fn uuid(&self, device: DeviceId) -> Result<DeviceUuid>;

    /// Returns where a device lies on the PCI bus.
    ///
    /// # Errors
    ///
    /// The driver's.
    fn pci_address(&self, device: DeviceId) -> Result<Option<String>>;

    /// Returns the host's NUMA node that a device is closest to.
    ///
    /// # Errors
    ///
    /// The driver's.
    fn host_numa_node(&self, device: DeviceId) -> Result<Option<u32>>;

    /// Says whether memory of a device is shared by handle.
    fn shares_handles(&self, device: DeviceId) -> bool;

    /// Says whether another process can open a device's events.
    fn shares_events(&self, device: DeviceId) -> bool;

    /// Says whether an imported descriptor can be mapped read-only.
    fn maps_read_only(&self, device: DeviceId) -> bool;

    /// Says what streams of a device do with words.
    fn word_ops(&self, device: DeviceId) -> WordOps;

    /// Says whether a device has managed memory that the host may touch beside its kernels: where it
    /// may not, such an access ends the process.
    fn has_managed(&self, device: DeviceId) -> bool;

    /// Says whether the driver shares a device between processes in one context.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] for a device that is none.
    fn shared_context(&self, device: DeviceId) -> Result<bool>;

    /// Says how file descriptors of a device's memory are made, if at all.
    ///
    /// # Errors
    ///
    /// The driver's.
    fn descriptor(&self, device: DeviceId) -> Result<Option<Descriptor>>;

    /// Says whether a device's physical memory can be mapped where the caller says.
    ///
    /// # Errors
    ///
    /// [`Error::Unsupported`] where it cannot.
    fn require_ranges(&self, device: DeviceId) -> Result<()>;

    /// Says whether a device has pools that are right.
    ///
    /// # Errors
    ///
    /// [`Error::Unsupported`] where it has not.
    fn require_pools(&self, device: DeviceId) -> Result<()>;

    /// Names the files that keep a process' GPU work alive.
    fn device_files(&self) -> &[&'static str];

    /// Returns the number under which the driver shows this process's GPU work; 0 where none is known.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] for a device that this process does not have.
    fn own_sign(&self, device: DeviceId) -> Result<u32>;

    /// Names files that are there for as long as GPU work of a process may run.
    fn signs_of_life(&self, pid: u32, sign: u32) -> Vec<PathBuf>;

    /// Returns for how long GPU work may go on after all signs of a process' life are gone.
    fn quarantine(&self, is_shown: bool) -> Duration;

    /// Opens the way from the scope's device to the memory of a peer.
    ///
    /// # Errors
    ///
    /// [`Error::Unsupported`] where something on the device would not be reached.
    fn open_way(&self, scope: &Scope<'_, Self>, peer: DeviceId) -> Result<(&'static str, Code)>;

    /// Turns a stream's handle into what the driver takes.
    fn stream(raw: RawStream) -> Stream;

    /// Says what the driver knows of a stream.
    ///
    /// # Errors
    ///
    /// As [`GpuStreams::stream_info`](gpu_api::GpuStreams::stream_info).
    ///
    /// # Safety
    ///
    /// `stream` is alive.
    unsafe fn stream_info(&self, stream: RawStream) -> Result<StreamInfo>;

    /// Queues a function, where `stream_call` is missing: [`queued::run`](crate::queued::run), or
    /// [`queued::discard`](crate::queued::discard) after an error, is to be called with `queued`.
    ///
    /// # Errors
    ///
    /// The driver's.
    ///
    /// # Safety
    ///
    /// `stream` is alive, and `queued` is for one call.
    unsafe fn call_back(
        &self,
        scope: &Scope<'_, Self>,
        stream: RawStream,
        queued: *mut c_void,
    ) -> Result<()>;

    /// Queues operations on words, in order.
    ///
    /// # Errors
    ///
    /// [`Error::Unsupported`] for an operation that the device does not have.
    ///
    /// # Safety
    ///
    /// `stream` is alive, the scope is its own, and every word lies in a registration that outlives
    /// the operation.
    unsafe fn queue_words(
        &self,
        scope: &Scope<'_, Self>,
        stream: RawStream,
        ops: &[StreamOp],
    ) -> Result<()>;

    /// Says what memory is that this backend did not make.
    ///
    /// # Errors
    ///
    /// The driver's.
    fn classify(&self, scope: &Scope<'_, Self>, ptr: DevicePtr) -> Result<PointerInfo>;

    /// Says why memory of a kind that is not for sharing cannot be exported, and what to change;
    /// `None` where that says nothing more than that the driver does not know it.
    fn refusal(&self, kind: MemoryKind) -> Option<(&'static str, &'static str)>;

    /// Gets the handle of plain memory.
    ///
    /// # Errors
    ///
    /// As [`GpuHandles::export_handle`](gpu_api::GpuHandles::export_handle).
    fn export_handle(self: &Arc<Self>, base: DevicePtr) -> Result<MemHandle>;

    /// Opens a handle: its base and how much the driver says lies there.
    ///
    /// # Errors
    ///
    /// As [`GpuHandles::open_handle`](gpu_api::GpuHandles::open_handle).
    fn open_handle(self: &Arc<Self>, device: DeviceId, handle: &MemHandle) -> Result<AddressRange>;

    /// Says whether a handle that was exported opens now: see
    /// [`GpuHandles::is_served`](gpu_api::GpuHandles::is_served).
    ///
    /// # Errors
    ///
    /// The driver's.
    fn is_handle_served(self: &Arc<Self>, base: DevicePtr) -> Result<bool> {
        let _ = base;
        Ok(true)
    }

    /// Is called when memory has left the table and not yet the driver.
    fn forgotten(&self, base: DevicePtr) {
        let _ = base;
    }

    /// Refuses a handle that was imported and is of no device's memory.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`].
    fn check_imported(&self, scope: &Scope<'_, Self>, handle: MemoryHandle) -> Result<()> {
        let _ = (scope, handle);
        Ok(())
    }

    /// Returns the calls for plain memory as a dma-buf; `None` on a driver without them.
    fn dma_buf(&self) -> Option<&dyn DmaBuf>;

    /// Allocates managed memory of a whole number of granules.
    ///
    /// # Errors
    ///
    /// [`Error::Unsupported`] on a driver without it.
    fn alloc_managed(&self, device: DeviceId, size: u64) -> Result<DevicePtr>;
}

/// A thread that is ready for calls; dropped, the thread is as it was.
///
/// A call of this library must neither change the context or device that the application made
/// current on its thread, nor destroy a stream capture that it has under way (several calls do,
/// from any thread, unless the calling thread's mode is relaxed: measured on CUDA's driver 580). A
/// vendor's [`Thread`](Vendor::Thread) says what else it changed; all of it is put back, whatever
/// happens in between.
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

    /// Calls a function of the driver that allocates: out of memory says how much there is.
    ///
    /// # Errors
    ///
    /// [`Error::OutOfMemory`], and as [`call`](Scope::call).
    pub fn allocate<F: Copy>(
        &self,
        symbol: &Symbol<F>,
        asked: u64,
        run: impl FnOnce(F) -> Code,
    ) -> Result<()> {
        match self.code(symbol, run)? {
            SUCCESS => Ok(()),
            code => Err(self.allocation_error(symbol.name, code, asked)),
        }
    }

    /// Calls a function of the driver that says whether work is done.
    ///
    /// # Errors
    ///
    /// As [`call`](Scope::call).
    pub fn is_done<F: Copy>(
        &self,
        symbol: &Symbol<F>,
        run: impl FnOnce(F) -> Code,
    ) -> Result<bool> {
        match self.code(symbol, run)? {
            SUCCESS => Ok(true),
            NOT_READY => Ok(false),
            code => Err(self.error(symbol.name, code)),
        }
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
