//! NVIDIA's driver as the device below.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::ptr;

use driver::pool::{self, PoolProperties};
use gpu_api::PoolUsage;
use libloading::os::unix::{Library, RTLD_LAZY, RTLD_LOCAL};

use crate::cuda_functions::{Access, Functions, Handle, Properties};
use crate::machine::{DEVICE, Kind, Machine, NO_DEVICE, NOT_SUPPORTED, Outcome};

const MANAGED: u32 = 8;
const MEMORY_TYPE: u32 = 2;
const ORDINAL: u32 = 9;
const VIRTUAL_MEMORY: u32 = 102;

/// The driver, with the primary context of every device retained until the process ends.
pub(crate) struct Cuda {
    functions: Functions,
    contexts: Vec<u64>,
}

/// Makes something by a function that writes it.
fn made<T: Default>(make: impl FnOnce(*mut T) -> Outcome) -> Outcome<T> {
    let mut place = T::default();
    make(&raw mut place)?;
    Ok(place)
}

/// Reads a text that the driver wrote.
fn text(bytes: &[c_char]) -> String {
    // SAFETY: `from_ptr` asks for a zero within: the last byte was not offered to the driver.
    unsafe { CStr::from_ptr(bytes.as_ptr()) }
        .to_string_lossy()
        .into_owned()
}

fn properties(device: c_int) -> Properties {
    Properties {
        kind: 1,
        handle_types: 1,
        location: [1, device.cast_unsigned()],
        win32: 0,
        flags: [0; 4],
    }
}

impl Cuda {
    pub(crate) fn start() -> Outcome<Cuda> {
        // SAFETY: `open` runs the initialisers of the driver's library, which have no conditions.
        let library = unsafe { Library::open(Some("libcuda.so.1"), RTLD_LAZY | RTLD_LOCAL) };
        let library = std::mem::ManuallyDrop::new(library.map_err(|_| NO_DEVICE)?);
        let functions = Functions::find(&library);
        functions.init(0).map_err(|_| NO_DEVICE)?;
        let count = made(|count| functions.count(count))?;
        if count <= 0 {
            return Err(NO_DEVICE);
        }
        let contexts: Outcome<Vec<u64>> = (0..count)
            .map(|device| made(|context| functions.retain_context(context, device)))
            .collect();
        Ok(Cuda {
            contexts: contexts?,
            functions,
        })
    }
}

impl Machine for Cuda {
    fn count(&self) -> i32 {
        self.contexts.len() as i32
    }

    fn name(&self, device: i32) -> Outcome<String> {
        let mut name = [0; 256];
        self.functions.name(name.as_mut_ptr(), 255, device)?;
        Ok(text(&name))
    }

    fn uuid(&self, device: i32) -> Outcome<[u8; 16]> {
        made(|uuid| self.functions.uuid(uuid, device))
    }

    fn place(&self, device: i32) -> Outcome<String> {
        let mut place = [0; 64];
        self.functions.place(place.as_mut_ptr(), 63, device)?;
        Ok(text(&place))
    }

    fn total(&self, device: i32) -> Outcome<usize> {
        made(|bytes| self.functions.total(bytes, device))
    }

    fn can_reach(&self, device: i32, peer: i32) -> Outcome<bool> {
        made(|can| self.functions.can_access(can, device, peer)).map(|can| can != 0)
    }

    fn reach(&self, _: i32, peer: i32) -> Outcome {
        self.functions.enable_peer(self.contexts[peer as usize], 0)
    }

    fn enter(&self, device: i32) -> Outcome {
        let context = *self.contexts.get(device as usize).ok_or(101_u32)?;
        if made(|current| self.functions.get_context(current))? == context {
            return Ok(());
        }
        self.functions.set_context(context)
    }

    fn exchange_mode(&self, mode: u32) -> Outcome<u32> {
        let mut mode = mode;
        self.functions.exchange_mode(&raw mut mode)?;
        Ok(mode)
    }

    fn device_files(&self) -> &'static str {
        "/dev/nvidia"
    }

    fn synchronize(&self) -> Outcome {
        self.functions.synchronize()
    }

    fn free_and_total(&self) -> Outcome<(usize, usize)> {
        let (mut free, mut total) = (0, 0);
        self.functions.mem_info(&raw mut free, &raw mut total)?;
        Ok((free, total))
    }

    fn alloc(&self, _: i32, len: usize) -> Outcome<u64> {
        made(|base| self.functions.alloc(base, len))
    }

    fn free(&self, base: u64) -> Outcome {
        self.functions.free(base)
    }

    fn range(&self, ptr: u64) -> Outcome<(u64, usize)> {
        let (mut base, mut len) = (0, 0);
        self.functions.range(&raw mut base, &raw mut len, ptr)?;
        Ok((base, len))
    }

    fn kind(&self, ptr: u64) -> Outcome<Option<Kind>> {
        let (asked, mut values) = ([MEMORY_TYPE, MANAGED, ORDINAL], [0_u64; 3]);
        let places = values
            .each_mut()
            .map(|value| ptr::from_mut(value).cast::<c_void>());
        match self
            .functions
            .attributes(3, asked.as_ptr(), places.as_ptr(), ptr)
        {
            Ok(()) => {}
            Err(1) => return Ok(None),
            Err(code) => return Err(code),
        }
        let [kind, managed, device] = values.map(|value| value as u32);
        Ok(match (kind, managed) {
            (1, 0) => Some(Kind::Host),
            (2, managed) => Some(Kind::Device {
                device: device.cast_signed(),
                managed: managed != 0,
            }),
            (_, 0) => None,
            _ => Some(Kind::Device {
                device: device.cast_signed(),
                managed: true,
            }),
        })
    }

    fn host_alloc(&self, len: usize) -> Outcome<usize> {
        made(|start| self.functions.host_alloc(start, len, 1)).map(|start| start as usize)
    }

    fn host_free(&self, ptr: usize) -> Outcome {
        self.functions.host_free(ptr as u64)
    }

    fn register(&self, ptr: usize, len: usize, flags: u32) -> Outcome {
        self.functions.register(ptr as u64, len, flags)
    }

    fn unregister(&self, ptr: usize) -> Outcome {
        self.functions.unregister(ptr as u64)
    }

    fn device_pointer(&self, ptr: usize) -> Outcome<u64> {
        made(|found| self.functions.device_pointer(found, ptr as u64, 0))
    }

    fn pool(&self, device: i32, keep: u64) -> Outcome<u64> {
        let made = made(|made| self.functions.pool(made, &PoolProperties::private(device)))?;
        let (mut keep, mut none) = (keep, 0_i32);
        let settings = [
            (pool::RELEASE_THRESHOLD, (&raw mut keep).cast::<c_void>()),
            (
                pool::REUSE_ALLOW_INTERNAL_DEPENDENCIES,
                (&raw mut none).cast(),
            ),
        ];
        for (attribute, value) in settings {
            self.functions
                .pool_set(made, attribute, value)
                .inspect_err(|_| {
                    // Where that fails too the pool is lost.
                    let _ = self.functions.pool_destroy(made);
                })?;
        }
        Ok(made)
    }

    fn pool_destroy(&self, _: i32, pool: u64) -> Outcome {
        self.functions.pool_destroy(pool)
    }

    fn pool_usage(&self, _: i32, pool: u64) -> Outcome<PoolUsage> {
        let get =
            |attribute| made::<u64>(|value| self.functions.pool_get(pool, attribute, value.cast()));
        let (reserved, most_reserved) = (get(pool::RESERVED_NOW)?, get(pool::RESERVED_MOST)?);
        Ok(PoolUsage {
            reserved,
            most_reserved,
            used: get(pool::USED_NOW)?,
        })
    }

    fn pool_trim(&self, _: i32, pool: u64, keep: usize) -> Outcome {
        self.functions.pool_trim(pool, keep)
    }

    fn pool_alloc(&self, _: i32, pool: u64, stream: u64, len: usize) -> Outcome<u64> {
        made(|base| self.functions.pool_alloc(base, len, pool, stream))
    }

    fn pool_free(&self, stream: u64, base: u64) -> Outcome {
        self.functions.pool_free(base, stream)
    }

    fn granularity(&self, device: i32) -> Outcome<usize> {
        if made(|value| self.functions.attribute(value, VIRTUAL_MEMORY, device))? == 0 {
            return Err(NOT_SUPPORTED);
        }
        made(|size| self.functions.granularity(size, &properties(device), 1))
    }

    fn create(&self, device: i32, len: usize) -> Outcome<u64> {
        made(|handle| self.functions.create(handle, len, &properties(device), 0))
    }

    fn release(&self, handle: u64) -> Outcome {
        self.functions.release(handle)
    }

    fn reserve(&self, len: usize) -> Outcome<u64> {
        made(|base| self.functions.reserve(base, len, 0, 0, 0))
    }

    fn unreserve(&self, base: u64, len: usize) -> Outcome {
        self.functions.unreserve(base, len)
    }

    fn map(&self, base: u64, len: usize, handle: u64) -> Outcome {
        self.functions.map(base, len, 0, handle, 0)
    }

    fn unmap(&self, base: u64, len: usize) -> Outcome {
        self.functions.unmap(base, len)
    }

    fn grant(&self, base: u64, len: usize, device: i32, write: bool) -> Outcome {
        let access = Access {
            location: [1, device.cast_unsigned()],
            flags: if write { 3 } else { 1 },
        };
        self.functions.grant(base, len, &raw const access, 1)
    }

    fn export(&self, handle: u64) -> Outcome<i32> {
        made(|fd| self.functions.export(fd, handle, 1, 0))
    }

    fn import(&self, fd: i32) -> Outcome<u64> {
        made(|handle| self.functions.import(handle, fd as u64, 1))
    }

    fn retain(&self, ptr: u64) -> Outcome<u64> {
        made(|handle| self.functions.retain(handle, ptr))
    }

    fn export_plain(&self, _: u64, _: usize) -> Outcome<i32> {
        Err(NOT_SUPPORTED)
    }

    fn import_plain(&self, _: i32, _: i32, _: usize) -> Outcome<u64> {
        Err(NOT_SUPPORTED)
    }

    fn close_plain(&self, _: u64) -> Outcome {
        Err(NOT_SUPPORTED)
    }

    fn handle(&self, base: u64) -> Outcome<[u8; 64]> {
        let mut handle = Handle([0; 64]);
        self.functions.handle(&raw mut handle, base)?;
        Ok(handle.0)
    }

    fn open(&self, _: i32, handle: [u8; 64]) -> Outcome<u64> {
        made(|base| self.functions.open(base, Handle(handle), 1))
    }

    fn close(&self, base: u64) -> Outcome {
        self.functions.close(base)
    }

    fn event(&self, _: i32, flags: u32) -> Outcome<u64> {
        made(|event| self.functions.event(event, flags))
    }

    fn event_handle(&self, event: u64) -> Outcome<[u8; 64]> {
        let mut handle = Handle([0; 64]);
        self.functions.event_handle(&raw mut handle, event)?;
        Ok(handle.0)
    }

    fn event_open(&self, _: i32, handle: [u8; 64]) -> Outcome<u64> {
        made(|event| self.functions.event_open(event, Handle(handle)))
    }

    fn event_record(&self, event: u64, stream: u64) -> Outcome {
        self.functions.event_record(event, stream)
    }

    fn event_query(&self, event: u64) -> Outcome {
        self.functions.event_query(event)
    }

    fn event_destroy(&self, event: u64) -> Outcome {
        self.functions.event_destroy(event)
    }

    fn stream(&self, _: i32, flags: u32) -> Outcome<u64> {
        made(|stream| self.functions.stream(stream, flags))
    }

    fn stream_destroy(&self, stream: u64) -> Outcome {
        self.functions.stream_destroy(stream)
    }

    fn stream_query(&self, stream: u64) -> Outcome {
        self.functions.stream_query(stream)
    }

    fn stream_synchronize(&self, stream: u64) -> Outcome {
        self.functions.stream_synchronize(stream)
    }

    fn stream_wait(&self, stream: u64, event: u64) -> Outcome {
        self.functions.stream_wait(stream, event, 0)
    }

    fn stream_capturing(&self, stream: u64) -> Outcome<u32> {
        made(|status| self.functions.stream_capturing(stream, status))
    }

    fn stream_id(&self, stream: u64) -> Outcome<u64> {
        made(|identity| self.functions.stream_id(stream, identity))
    }

    fn stream_device(&self, stream: u64) -> Outcome<i32> {
        let context = made(|context| self.functions.stream_context(stream, context))?;
        let before = DEVICE.get();
        self.functions.set_context(context)?;
        let device = made(|device| self.functions.context_device(device));
        self.enter(before)?;
        device
    }

    fn write(&self, stream: u64, word: u64, value: u64) -> Outcome {
        self.functions.write(stream, word, value, 0)
    }

    fn wait_at_least(&self, stream: u64, word: u64, value: u64) -> Outcome {
        self.functions.wait(stream, word, value, 0)
    }

    fn call(
        &self,
        stream: u64,
        function: unsafe extern "C" fn(*mut c_void),
        data: *mut c_void,
    ) -> Outcome {
        self.functions.call(stream, function, data)
    }

    fn copy_in(&self, stream: u64, to: u64, from: *const c_void, len: usize) -> Outcome {
        self.functions.copy_in(to, from, len, stream)
    }

    fn copy_out(&self, stream: u64, to: *mut c_void, from: u64, len: usize) -> Outcome {
        self.functions.copy_out(to, from, len, stream)
    }

    fn copy(&self, stream: u64, to: u64, from: u64, len: usize) -> Outcome {
        self.functions.copy(to, from, len, stream)
    }

    fn fill(&self, stream: u64, to: u64, byte: u8, len: usize) -> Outcome {
        self.functions.fill(to, byte, len, stream)
    }
}
