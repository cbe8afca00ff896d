//! NVIDIA's driver as the device below.

use std::ffi::c_void;
use std::ptr;

use driver::calls::{
    ACCESS_READ, ACCESS_READ_WRITE, AccessDescription, AllocationProperties, Handle, HostFunction,
    LOCATION_DEVICE, Location,
};
use driver::device::text;
use driver::pool::{self, PoolProperties};
use gpu_api::PoolUsage;
use libloading::os::unix::{Library, RTLD_LAZY, RTLD_LOCAL};

use crate::cuda_functions::Functions;
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

/// Declares methods that only call a function of the driver's, or return what it writes.
macro_rules! calls {
    ($($method:ident($($argument:tt: $type:ty),*) $(-> $made:ty)? = $function:ident($($passed:expr),*);)*) => {
        $(calls!(@one $method($($argument: $type),*) $(-> $made)? = $function($($passed),*));)*
    };
    (@one $method:ident($($argument:tt: $type:ty),*) = $function:ident($($passed:expr),*)) => {
        fn $method(&self, $($argument: $type),*) -> Outcome {
            self.functions.$function($($passed),*)
        }
    };
    (@one $method:ident($($argument:tt: $type:ty),*) -> $made:ty = $function:ident($($passed:expr),*)) => {
        fn $method(&self, $($argument: $type),*) -> Outcome<$made> {
            made(|place| self.functions.$function(place, $($passed),*))
        }
    };
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
    calls! {
        call(stream: u64, function: HostFunction, data: *mut c_void) = call(stream, function, data);
        free(base: u64) = free(base);
        host_free(ptr: usize) = host_free(ptr as u64);
        register(ptr: usize, len: usize, flags: u32) = register(ptr as u64, len, flags);
        unregister(ptr: usize) = unregister(ptr as u64);
        pool_destroy(_: i32, pool: u64) = pool_destroy(pool);
        pool_trim(_: i32, pool: u64, keep: usize) = pool_trim(pool, keep);
        pool_free(stream: u64, base: u64) = pool_free(base, stream);
        release(handle: u64) = release(handle);
        unreserve(base: u64, len: usize) = unreserve(base, len);
        map(base: u64, len: usize, handle: u64) = map(base, len, 0, handle, 0);
        unmap(base: u64, len: usize) = unmap(base, len);
        close(base: u64) = close(base);
        event_record(event: u64, stream: u64) = event_record(event, stream);
        event_query(event: u64) = event_query(event);
        event_destroy(event: u64) = event_destroy(event);
        stream_destroy(stream: u64) = stream_destroy(stream);
        stream_query(stream: u64) = stream_query(stream);
        stream_synchronize(stream: u64) = stream_synchronize(stream);
        stream_wait(stream: u64, event: u64) = stream_wait(stream, event, 0);
        write(stream: u64, word: u64, value: u64) = write(stream, word, value, 0);
        wait_at_least(stream: u64, word: u64, value: u64) = wait(stream, word, value, 0);
        copy_in(stream: u64, to: u64, from: *const c_void, len: usize) = copy_in(to, from, len, stream);
        copy_out(stream: u64, to: *mut c_void, from: u64, len: usize) = copy_out(to, from, len, stream);
        copy(stream: u64, to: u64, from: u64, len: usize) = copy(to, from, len, stream);
        fill(stream: u64, to: u64, byte: u8, len: usize) = fill(to, byte, len, stream);
        uuid(device: i32) -> [u8; 16] = uuid(device);
        total(device: i32) -> usize = total(device);
        alloc(_: i32, len: usize) -> u64 = alloc(len);
        device_pointer(ptr: usize) -> u64 = device_pointer(ptr as u64, 0);
        pool_alloc(_: i32, pool: u64, stream: u64, len: usize) -> u64 = pool_alloc(len, pool, stream);
        create(device: i32, len: usize) -> u64 = create(len, &AllocationProperties::exportable(device), 0);
        reserve(len: usize) -> u64 = reserve(len, 0, 0, 0);
        export(handle: u64) -> i32 = export(handle, 1, 0);
        import(fd: i32) -> u64 = import(fd as u64, 1);
        retain(ptr: u64) -> u64 = retain(ptr);
        open(_: i32, handle: [u8; 64]) -> u64 = open(Handle::new(handle), 1);
        event(_: i32, flags: u32) -> u64 = event(flags);
        event_open(_: i32, handle: [u8; 64]) -> u64 = event_open(Handle::new(handle));
        stream(_: i32, flags: u32) -> u64 = stream(flags);
    }

    fn count(&self) -> i32 {
        self.contexts.len() as i32
    }

    fn name(&self, device: i32) -> Outcome<String> {
        let mut name = [0; 256];
        self.functions.name(name.as_mut_ptr(), 255, device)?;
        Ok(text(&name))
    }

    fn place(&self, device: i32) -> Outcome<String> {
        let mut place = [0; 64];
        self.functions.place(place.as_mut_ptr(), 63, device)?;
        Ok(text(&place))
    }

    fn can_reach(&self, device: i32, peer: i32) -> Outcome<bool> {
        made(|can| self.functions.can_access(can, device, peer)).map(|can| can != 0)
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

    fn granularity(&self, device: i32) -> Outcome<usize> {
        if made(|value| self.functions.attribute(value, VIRTUAL_MEMORY, device))? == 0 {
            return Err(NOT_SUPPORTED);
        }
        made(|size| {
            self.functions
                .granularity(size, &AllocationProperties::exportable(device), 1)
        })
    }

    fn grant(&self, base: u64, len: usize, device: i32, write: bool) -> Outcome {
        let location = Location {
            kind: LOCATION_DEVICE,
            id: device,
        };
        let flags = if write {
            ACCESS_READ_WRITE
        } else {
            ACCESS_READ
        };
        let access = AccessDescription { location, flags };
        self.functions.grant(base, len, &raw const access, 1)
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
        let mut handle = Handle::new([0; 64]);
        self.functions.handle(&raw mut handle, base)?;
        Ok(handle.bytes())
    }

    fn event_handle(&self, event: u64) -> Outcome<[u8; 64]> {
        let mut handle = Handle::new([0; 64]);
        self.functions.event_handle(&raw mut handle, event)?;
        Ok(handle.bytes())
    }

    fn reach(&self, _: i32, peer: i32) -> Outcome {
        self.functions.enable_peer(self.contexts[peer as usize], 0)
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
}
