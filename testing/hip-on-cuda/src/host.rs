//! Shared memory as the device below: the host backend, and [`MemoryFiles`] where HIP has virtual
//! memory.

use std::collections::{BTreeMap, HashMap};
use std::ffi::c_void;
use std::os::fd::{BorrowedFd, IntoRawFd};
use std::ptr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use backend_host::{HostBackend, HostConfig};
use driver::calls::HostFunction;
use gpu_api::groups::*;
use gpu_api::{
    Access, DeviceId, DeviceInfo, DevicePtr, Error, EventHandle, EventKind, HostMemory, HostPtr,
    MemHandle, MemoryKind, PoolUsage, RawEvent, RawPool, RawStream, Sharing, StreamOp, WordPtr,
};

use crate::machine::{
    DEVICE, INVALID_VALUE, Kind, Machine, NO_DEVICE, NOT_SUPPORTED, Outcome, UNKNOWN,
};
use crate::memory_files::{GRANULARITY, MemoryFiles, OUT_OF_MEMORY};
use crate::turns::Turns;

const NOT_READY: u32 = 600;
const PAGE: usize = 4096;

#[derive(Default)]
struct Tables {
    files: MemoryFiles,
    registered: BTreeMap<usize, usize>,
    /// Devices of the streams, which HIP finds by the stream alone.
    streams: HashMap<u64, i32>,
}

pub(crate) struct Host {
    backend: Arc<HostBackend>,
    turns: Arc<Turns>,
    tables: Mutex<Tables>,
}

/// Gives HIP's code for an error of the host backend.
fn code(error: Error) -> u32 {
    match error {
        Error::Driver { source, .. } => source.code,
        Error::OutOfMemory { .. } => OUT_OF_MEMORY,
        Error::Invalid { .. } => INVALID_VALUE,
        Error::Unsupported { .. } => NOT_SUPPORTED,
        _ => UNKNOWN,
    }
}

/// Calls a method of the host backend.
macro_rules! host {
    ($self:ident.$method:ident($($argument:expr),*)) => {
        // SAFETY: the host backend's method: its conditions are those that HIP's caller vouches
        // for.
        unsafe { $self.backend.$method($($argument),*) }.map_err(code)
    };
}

fn device(number: i32) -> DeviceId {
    DeviceId(number.cast_unsigned())
}

fn raw_pool(number: i32, handle: u64) -> RawPool {
    RawPool {
        device: device(number),
        handle,
    }
}

/// Borrows a descriptor of HIP's caller.
fn borrowed<'a>(fd: i32) -> Outcome<BorrowedFd<'a>> {
    if fd < 0 {
        return Err(INVALID_VALUE);
    }
    // SAFETY: `borrow_raw` asks for an open descriptor: HIP's caller gave it for the call, and what
    // is below 0 is sorted out above.
    Ok(unsafe { BorrowedFd::borrow_raw(fd) })
}

impl Host {
    pub(crate) fn start() -> Outcome<Host> {
        let backend = HostBackend::new(HostConfig::from_env().map_err(|_| NO_DEVICE)?)
            .map_err(|_| NO_DEVICE)?;
        if backend.device_count().map_err(code)? == 0 {
            return Err(NO_DEVICE);
        }
        Ok(Host {
            backend,
            turns: Arc::default(),
            tables: Mutex::default(),
        })
    }

    fn tables(&self) -> MutexGuard<'_, Tables> {
        self.tables.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Turns HIP's handle of a stream into the host backend's. The default streams are those of the
    /// current device.
    fn real(&self, stream: u64) -> RawStream {
        let number = self
            .tables()
            .streams
            .get(&stream)
            .copied()
            .unwrap_or_else(|| DEVICE.get());
        RawStream::new(device(number), stream)
    }

    /// Turns HIP's handle of a stream into the host backend's, for work that has to wait for the
    /// hardware's queue.
    fn queue(&self, stream: u64) -> Outcome<RawStream> {
        let real = self.real(stream);
        if self.turns.matter() {
            let (turns, number) = (self.turns.clone(), real.device.0 as i32);
            let turn = Box::new(move || turns.take(number, stream, false));
            host!(self.host_function(real, turn))?;
        }
        Ok(real)
    }

    fn info(&self, number: i32) -> Outcome<DeviceInfo> {
        self.backend.device_info(device(number)).map_err(code)
    }
}

impl Machine for Host {
    fn count(&self) -> i32 {
        self.backend.device_count().map_or(0, |count| count as i32)
    }

    fn name(&self, number: i32) -> Outcome<String> {
        Ok(self.info(number)?.name)
    }

    fn uuid(&self, number: i32) -> Outcome<[u8; 16]> {
        Ok(self.info(number)?.uuid.0)
    }

    fn place(&self, number: i32) -> Outcome<String> {
        Ok(format!("0000:{number:02x}:00.0"))
    }

    fn total(&self, number: i32) -> Outcome<usize> {
        Ok(self.info(number)?.total_bytes as usize)
    }

    fn can_reach(&self, _: i32, _: i32) -> Outcome<bool> {
        Ok(true)
    }

    fn reach(&self, _: i32, _: i32) -> Outcome {
        Ok(())
    }

    fn enter(&self, _: i32) -> Outcome {
        Ok(())
    }

    fn exchange_mode(&self, mode: u32) -> Outcome<u32> {
        thread_local! {
            static MODE: std::cell::Cell<u32> = const { std::cell::Cell::new(0) };
        }
        Ok(MODE.replace(mode))
    }

    fn device_files(&self) -> &'static str {
        "/memfd:gpu-ipc-host"
    }

    fn synchronize(&self) -> Outcome {
        // The streams are independent of what is closed here, and none is waited for by the
        // conformance of a close.
        Ok(())
    }

    fn free_and_total(&self) -> Outcome<(usize, usize)> {
        let current = DEVICE.get();
        let info = self.backend.memory_info(device(current)).map_err(code)?;
        let used = self.tables().files.used(current);
        Ok((
            (info.free_bytes as usize).saturating_sub(used),
            info.total_bytes as usize,
        ))
    }

    fn alloc(&self, number: i32, len: usize) -> Outcome<u64> {
        if len > self.free_and_total()?.0 {
            return Err(OUT_OF_MEMORY);
        }
        let made = self
            .backend
            .alloc(device(number), len as u64, Sharing::Handle);
        Ok(made.map_err(code)?.base.0)
    }

    fn free(&self, base: u64) -> Outcome {
        host!(self.free(DevicePtr(base)))
    }

    fn range(&self, ptr: u64) -> Outcome<(u64, usize)> {
        if let Some((base, len, _)) = self.tables().files.find(ptr) {
            return Ok((base, len));
        }
        let range = self
            .backend
            .address_range(DevicePtr(ptr))
            .map_err(|_| INVALID_VALUE)?;
        Ok((range.base.0, range.len as usize))
    }

    fn kind(&self, ptr: u64) -> Outcome<Option<Kind>> {
        {
            let tables = self.tables();
            if let Some((_, _, device)) = tables.files.find(ptr) {
                return Ok(Some(Kind::Device {
                    device,
                    managed: false,
                }));
            }
            let registered = tables.registered.range(..=ptr as usize).next_back();
            if registered.is_some_and(|(start, len)| (ptr as usize) < start + len) {
                return Ok(Some(Kind::Host));
            }
        }
        let info = self.backend.classify(DevicePtr(ptr)).map_err(code)?;
        Ok(match info.kind {
            MemoryKind::Unknown => None,
            MemoryKind::Host => Some(Kind::Host),
            _ => Some(Kind::Device {
                device: info.device.map_or(0, |device| device.0 as i32),
                managed: false,
            }),
        })
    }

    fn host_alloc(&self, len: usize) -> Outcome<usize> {
        let memory = HostMemory {
            pinned: true,
            numa_node: None,
        };
        let made = self.backend.host_alloc(device(DEVICE.get()), len, memory);
        Ok(made.map_err(code)?.0)
    }

    fn host_free(&self, ptr: usize) -> Outcome {
        host!(self.host_free(HostPtr(ptr)))
    }

    fn register(&self, ptr: usize, len: usize, _: u32) -> Outcome {
        let whole = len.next_multiple_of(PAGE);
        host!(self.register_words(HostPtr(ptr), whole))?;
        self.tables().registered.insert(ptr, whole);
        Ok(())
    }

    fn unregister(&self, ptr: usize) -> Outcome {
        self.tables().registered.remove(&ptr).ok_or(713_u32)?;
        host!(self.unregister_words(HostPtr(ptr)))
    }

    fn device_pointer(&self, ptr: usize) -> Outcome<u64> {
        self.tables()
            .registered
            .contains_key(&ptr)
            .then_some(ptr as u64)
            .ok_or(INVALID_VALUE)
    }

    fn pool(&self, number: i32, keep: u64) -> Outcome<u64> {
        let made = self.backend.create_pool(device(number), keep);
        Ok(made.map_err(code)?.handle)
    }

    fn pool_destroy(&self, number: i32, pool: u64) -> Outcome {
        host!(self.destroy_pool(raw_pool(number, pool)))
    }

    fn pool_usage(&self, number: i32, pool: u64) -> Outcome<PoolUsage> {
        host!(self.pool_usage(raw_pool(number, pool)))
    }

    fn pool_trim(&self, number: i32, pool: u64, keep: usize) -> Outcome {
        host!(self.trim_pool(raw_pool(number, pool), keep as u64))
    }

    fn pool_alloc(&self, number: i32, pool: u64, stream: u64, len: usize) -> Outcome<u64> {
        let (pool, stream) = (raw_pool(number, pool), self.real(stream));
        Ok(host!(self.pool_alloc(pool, stream, len as u64))?.base.0)
    }

    fn pool_free(&self, stream: u64, base: u64) -> Outcome {
        let stream = self.queue(stream)?;
        host!(self.pool_free(stream, DevicePtr(base)))
    }

    fn granularity(&self, _: i32) -> Outcome<usize> {
        Ok(GRANULARITY)
    }

    fn create(&self, number: i32, len: usize) -> Outcome<u64> {
        if !len.is_multiple_of(GRANULARITY) || len == 0 {
            return Err(INVALID_VALUE);
        }
        if len > self.free_and_total()?.0 {
            return Err(OUT_OF_MEMORY);
        }
        self.tables().files.create(number, len)
    }

    fn release(&self, handle: u64) -> Outcome {
        self.tables().files.release(handle)
    }

    fn reserve(&self, len: usize) -> Outcome<u64> {
        self.tables().files.reserve(len)
    }

    fn unreserve(&self, base: u64, len: usize) -> Outcome {
        self.tables().files.unreserve(base, len)
    }

    fn map(&self, base: u64, len: usize, handle: u64) -> Outcome {
        self.tables().files.map(base, len, handle)
    }

    fn unmap(&self, base: u64, len: usize) -> Outcome {
        // SAFETY: `MemoryFiles::unmap` asks that nobody use the mapping: HIP's caller vouches for
        // it.
        unsafe { self.tables().files.unmap(base, len) }
    }

    fn grant(&self, base: u64, len: usize, _: i32, write: bool) -> Outcome {
        self.tables().files.grant(base, len, write)
    }

    fn export(&self, handle: u64) -> Outcome<i32> {
        self.tables().files.export(handle)
    }

    fn import(&self, fd: i32) -> Outcome<u64> {
        self.tables().files.import(borrowed(fd)?, DEVICE.get())
    }

    fn retain(&self, ptr: u64) -> Outcome<u64> {
        self.tables().files.retain(ptr)
    }

    fn export_plain(&self, base: u64, len: usize) -> Outcome<i32> {
        if self.range(base)? != (base, len) {
            return Err(INVALID_VALUE);
        }
        // The host backend's handle names the descriptor of this process that has the memory.
        let handle = self.backend.export_handle(DevicePtr(base)).map_err(code)?;
        let number = i32::from_le_bytes(handle.0[12..16].try_into().map_err(|_| UNKNOWN)?);
        // SAFETY: `borrow_raw` asks for an open descriptor: the host backend keeps it while the
        // memory is there.
        let fd = unsafe { BorrowedFd::borrow_raw(number) };
        Ok(fd.try_clone_to_owned().map_err(|_| UNKNOWN)?.into_raw_fd())
    }

    fn import_plain(&self, number: i32, fd: i32, len: usize) -> Outcome<u64> {
        let (device, fd) = (device(number), borrowed(fd)?);
        let made = self
            .backend
            .import_fd(device, fd, len as u64, Access::ReadWrite);
        Ok(made.map_err(code)?.0)
    }

    fn close_plain(&self, base: u64) -> Outcome {
        host!(self.close(DevicePtr(base)))
    }

    fn handle(&self, base: u64) -> Outcome<[u8; 64]> {
        Ok(self.backend.export_handle(DevicePtr(base)).map_err(code)?.0)
    }

    fn open(&self, number: i32, handle: [u8; 64]) -> Outcome<u64> {
        let opened = self.backend.open_handle(device(number), &MemHandle(handle));
        Ok(opened.map_err(code)?.0)
    }

    fn close(&self, base: u64) -> Outcome {
        host!(self.close(DevicePtr(base)))
    }

    fn event(&self, number: i32, flags: u32) -> Outcome<u64> {
        let kind = if flags & 4 == 0 {
            EventKind::Local
        } else {
            EventKind::Interprocess
        };
        let made = self.backend.create_event(device(number), kind);
        Ok(made.map_err(code)?.0)
    }

    fn event_handle(&self, event: u64) -> Outcome<[u8; 64]> {
        Ok(host!(self.event_handle(RawEvent(event)))?.0)
    }

    fn event_open(&self, number: i32, handle: [u8; 64]) -> Outcome<u64> {
        let opened = self
            .backend
            .open_event(device(number), &EventHandle(handle));
        Ok(opened.map_err(code)?.0)
    }

    fn event_record(&self, event: u64, stream: u64) -> Outcome {
        let stream = self.queue(stream)?;
        host!(self.record_event(RawEvent(event), stream))
    }

    fn event_query(&self, event: u64) -> Outcome {
        let done = host!(self.query_event(RawEvent(event)))?;
        done.then_some(()).ok_or(NOT_READY)
    }

    fn event_destroy(&self, event: u64) -> Outcome {
        host!(self.destroy_event(RawEvent(event)))
    }

    fn stream(&self, number: i32, _: u32) -> Outcome<u64> {
        let made = self.backend.create_stream(device(number));
        let made = made.map_err(code)?.handle;
        self.tables().streams.insert(made, number);
        self.turns.bind(number, made);
        Ok(made)
    }

    fn stream_destroy(&self, stream: u64) -> Outcome {
        let real = self.real(stream);
        host!(self.destroy_stream(real))?;
        self.tables().streams.remove(&stream);
        self.turns.unbind(real.device.0 as i32, stream);
        Ok(())
    }

    fn stream_query(&self, stream: u64) -> Outcome {
        let stream = self.real(stream);
        let done = host!(self.query_stream(stream))?;
        done.then_some(()).ok_or(NOT_READY)
    }

    fn stream_synchronize(&self, stream: u64) -> Outcome {
        let stream = self.real(stream);
        host!(self.synchronize_stream(stream))
    }

    fn stream_wait(&self, stream: u64, event: u64) -> Outcome {
        let stream = self.queue(stream)?;
        host!(self.stream_wait_event(stream, RawEvent(event)))
    }

    fn stream_capturing(&self, _: u64) -> Outcome<u32> {
        Ok(0)
    }

    fn stream_id(&self, stream: u64) -> Outcome<u64> {
        let stream = self.real(stream);
        Ok(host!(self.stream_info(stream))?.identity.0)
    }

    fn stream_device(&self, stream: u64) -> Outcome<i32> {
        Ok(self.real(stream).device.0 as i32)
    }

    fn write(&self, stream: u64, word: u64, value: u64) -> Outcome {
        let stream = self.queue(stream)?;
        let word = WordPtr(word);
        host!(self.stream_batch(stream, &[StreamOp::Write { word, value }]))
    }

    fn wait_at_least(&self, stream: u64, word: u64, value: u64) -> Outcome {
        let real = self.real(stream);
        let wait = [StreamOp::WaitGeq {
            word: WordPtr(word),
            value,
        }];
        if !self.turns.begin() {
            return host!(self.stream_batch(real, &wait));
        }
        let number = real.device.0 as i32;
        let (taking, leaving) = (self.turns.clone(), self.turns.clone());
        let take = Box::new(move || taking.take(number, stream, true));
        host!(self.host_function(real, take))?;
        host!(self.stream_batch(real, &wait))?;
        let leave = Box::new(move || leaving.leave(number, stream));
        host!(self.host_function(real, leave))
    }

    fn call(&self, stream: u64, function: HostFunction, data: *mut c_void) -> Outcome {
        let stream = self.queue(stream)?;
        let data = data.expose_provenance();
        let run = Box::new(move || {
            // SAFETY: the function: HIP's caller vouches for it and for its data.
            unsafe { function(ptr::with_exposed_provenance_mut(data)) }
        });
        host!(self.host_function(stream, run))
    }

    fn copy_in(&self, stream: u64, to: u64, from: *const c_void, len: usize) -> Outcome {
        let stream = self.queue(stream)?;
        host!(self.copy_to_device(stream, DevicePtr(to), from.cast(), len))
    }

    fn copy_out(&self, stream: u64, to: *mut c_void, from: u64, len: usize) -> Outcome {
        let stream = self.queue(stream)?;
        host!(self.copy_to_host(stream, to.cast(), DevicePtr(from), len))
    }

    fn copy(&self, stream: u64, to: u64, from: u64, len: usize) -> Outcome {
        let stream = self.queue(stream)?;
        host!(self.copy(stream, DevicePtr(to), DevicePtr(from), len as u64))
    }

    fn fill(&self, stream: u64, to: u64, byte: u8, len: usize) -> Outcome {
        let stream = self.queue(stream)?;
        host!(self.fill(stream, DevicePtr(to), byte, len as u64))
    }
}
