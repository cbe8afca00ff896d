//! The CUDA driver's own calls, looked up and called as a program in C would, with the context made
//! current once.
//!
//! A code is a plain number and a missing function an error: cudarc's own functions panic without
//! one, and take a code that their headers do not list for undefined behaviour.

use std::cell::{Cell, RefCell};
use std::ffi::{CStr, c_char, c_int, c_void};
use std::os::fd::AsRawFd;
use std::ptr;

use cudarc::driver::sys::{
    self, CUcontext, CUdevice, CUdeviceptr, CUevent, CUipcMemHandle, CUstream,
};
use gpu_ipc::backend::{DevicePtr, RawEvent, RawStream, WordPtr};
use gpu_ipc::{Gpu, Stream};

use super::calls::{Floor, Foreign, Opened};
use crate::failure::Result;

type MemoryHandle = u64;

/// A wait for at least the value; a write that orders what is before it.
const PLAIN: u32 = 0;
const LAZY_PEER_ACCESS: u32 = 1;
const POSIX_FD: u32 = 1;
const WRITE_VALUE_64: u32 = 5;
const LOCATION_DEVICE: u32 = 1;
const ACCESS_READ_WRITE: u32 = 3;

/// Writes the device's time, in nanoseconds, to the word at an address. All processes of a device
/// read one clock.
const STAMP: &CStr = c"
.version 7.0
.target sm_70
.address_size 64
.visible .entry stamp(.param .u64 to)
{
    .reg .b64 %to, %now;
    ld.param.u64 %to, [to];
    mov.u64 %now, %globaltimer;
    st.volatile.global.u64 [%to], %now;
    ret;
}
";

/// One write of a batch (`CUstreamBatchMemOpParams`).
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct Operation {
    kind: u32,
    address: CUdeviceptr,
    value: u64,
    flags: u32,
    alias: CUdeviceptr,
    pad: u64,
}
const _: () = assert!(size_of::<Operation>() == size_of::<sys::CUstreamBatchMemOpParams>());

/// Which device may reach a mapping, and how (`CUmemAccessDesc`).
#[repr(C)]
#[derive(Clone, Copy)]
struct Access {
    location: u32,
    ordinal: c_int,
    flags: u32,
}
const _: () = assert!(size_of::<Access>() == size_of::<sys::CUmemAccessDesc>());

macro_rules! functions {
    ($($name:ident as $symbol:literal: fn($($argument:ty),* $(,)?);)*) => {
        #[allow(non_snake_case, reason = "the manual's names can be looked up, ours could not")]
        struct Functions {
            $($name: unsafe extern "C" fn($($argument),*) -> u32,)*
        }

        impl Functions {
            fn load() -> Result<Functions> {
                // SAFETY: `is_culib_present` runs the initialisers of the libraries that it tries:
                // the driver's have no conditions, and the backend has loaded it already.
                if !unsafe { sys::is_culib_present() } {
                    return Err("the CUDA driver's library cannot be loaded".into());
                }
                // SAFETY: `culib` panics where the library cannot be loaded: it can.
                let library = unsafe { sys::culib() };
                Ok(Functions {
                    $($name: {
                        // SAFETY: `Library::get` asks that the type be the symbol's: each row is
                        // the prototype in cuda.h, with the result as the integer that C passes it
                        // as.
                        let found = unsafe {
                            library.get::<unsafe extern "C" fn($($argument),*) -> u32>($symbol.as_bytes())
                        };
                        *found.map_err(|_| format!("the CUDA driver has no {}", $symbol))?
                    },)*
                })
            }
        }
    };
}

functions! {
    cuCtxSetCurrent as "cuCtxSetCurrent": fn(CUcontext);
    cuCtxGetDevice as "cuCtxGetDevice": fn(*mut CUdevice);
    cuStreamWriteValue64 as "cuStreamWriteValue64_v2": fn(CUstream, CUdeviceptr, u64, u32);
    cuStreamWaitValue64 as "cuStreamWaitValue64_v2": fn(CUstream, CUdeviceptr, u64, u32);
    cuStreamBatchMemOp as "cuStreamBatchMemOp_v2": fn(CUstream, u32, *mut Operation, u32);
    cuStreamWaitEvent as "cuStreamWaitEvent": fn(CUstream, CUevent, u32);
    cuStreamSynchronize as "cuStreamSynchronize": fn(CUstream);
    cuEventCreate as "cuEventCreate": fn(*mut CUevent, u32);
    cuEventRecord as "cuEventRecord": fn(CUevent, CUstream);
    cuEventElapsedTime as "cuEventElapsedTime": fn(*mut f32, CUevent, CUevent);
    cuMemsetD8Async as "cuMemsetD8Async": fn(CUdeviceptr, u8, usize, CUstream);
    cuModuleLoadData as "cuModuleLoadData": fn(*mut *mut c_void, *const c_void);
    cuModuleGetFunction as "cuModuleGetFunction": fn(*mut *mut c_void, *mut c_void, *const c_char);
    cuLaunchKernel as "cuLaunchKernel":
        fn(*mut c_void, u32, u32, u32, u32, u32, u32, u32, CUstream, *mut *mut c_void, *mut *mut c_void);
    cuMemImportFromShareableHandle as "cuMemImportFromShareableHandle": fn(*mut MemoryHandle, *mut c_void, u32);
    cuMemAddressReserve as "cuMemAddressReserve": fn(*mut CUdeviceptr, usize, usize, CUdeviceptr, u64);
    cuMemMap as "cuMemMap": fn(CUdeviceptr, usize, usize, MemoryHandle, u64);
    cuMemSetAccess as "cuMemSetAccess": fn(CUdeviceptr, usize, *const Access, usize);
    cuMemRelease as "cuMemRelease": fn(MemoryHandle);
    cuMemUnmap as "cuMemUnmap": fn(CUdeviceptr, usize);
    cuMemAddressFree as "cuMemAddressFree": fn(CUdeviceptr, usize);
    cuIpcOpenMemHandle as "cuIpcOpenMemHandle_v2": fn(*mut CUdeviceptr, CUipcMemHandle, u32);
    cuIpcCloseMemHandle as "cuIpcCloseMemHandle": fn(CUdeviceptr);
}

/// The driver, with a device's primary context current on the thread that made this.
pub struct Cuda {
    functions: Functions,
    ordinal: CUdevice,
    /// Before and after a stretch.
    clock: (CUevent, CUevent),
    batch: RefCell<Vec<Operation>>,
    /// Loaded when it is first launched, and never unloaded.
    stamp: Cell<*mut c_void>,
}

impl std::fmt::Debug for Cuda {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Cuda")
            .field("ordinal", &self.ordinal)
            .finish_non_exhaustive()
    }
}

fn stream(raw: RawStream) -> CUstream {
    ptr::with_exposed_provenance_mut(raw.handle as usize)
}

fn event(raw: RawEvent) -> CUevent {
    ptr::with_exposed_provenance_mut(raw.0 as usize)
}

fn good(call: &str, code: u32) -> Result<()> {
    if code == 0 {
        Ok(())
    } else {
        Err(format!("{call} gave {code}").into())
    }
}

impl Cuda {
    /// Makes the device's primary context current on this thread, as an application has it.
    pub fn new(gpu: &Gpu) -> Result<Cuda> {
        let functions = Functions::load()?;
        let of = Stream::create(gpu)?;
        // SAFETY: `stream_info` asks for a live stream: `of` is one.
        let context = unsafe { gpu.backend().stream_info(of.raw()) }?.context;
        // SAFETY: `cuCtxSetCurrent` asks for a context that is alive: the primary one, which the
        // backend retains.
        let code = unsafe {
            (functions.cuCtxSetCurrent)(ptr::with_exposed_provenance_mut(context as usize))
        };
        good("cuCtxSetCurrent", code)?;
        let mut ordinal = 0;
        // SAFETY: `cuCtxGetDevice` writes one integer: `ordinal` is one.
        good("cuCtxGetDevice", unsafe {
            (functions.cuCtxGetDevice)(&raw mut ordinal)
        })?;
        let make = || {
            let mut made = ptr::null_mut();
            // SAFETY: `cuEventCreate` writes one pointer: `made` is one. Without flags it keeps the
            // time.
            good("cuEventCreate", unsafe {
                (functions.cuEventCreate)(&raw mut made, 0)
            })?;
            Ok::<CUevent, String>(made)
        };
        let clock = (make()?, make()?);
        Ok(Cuda {
            clock,
            functions,
            ordinal,
            batch: RefCell::default(),
            stamp: Cell::new(ptr::null_mut()),
        })
    }

    /// Returns the kernel that writes the device's time.
    fn stamp_kernel(&self) -> Result<*mut c_void> {
        if !self.stamp.get().is_null() {
            return Ok(self.stamp.get());
        }
        let (f, mut module, mut kernel) = (&self.functions, ptr::null_mut(), ptr::null_mut());
        // SAFETY: `cuModuleLoadData` writes one pointer and reads text that ends with a zero: both
        // live here.
        good("cuModuleLoadData", unsafe {
            (f.cuModuleLoadData)(&raw mut module, STAMP.as_ptr().cast())
        })?;
        // SAFETY: `cuModuleGetFunction` writes one pointer and reads a name: both live here. The
        // module was loaded.
        good("cuModuleGetFunction", unsafe {
            (f.cuModuleGetFunction)(&raw mut kernel, module, c"stamp".as_ptr())
        })?;
        self.stamp.set(kernel);
        Ok(kernel)
    }

    fn open_fd(&self, fd: c_int, len: usize) -> Result<u64> {
        let f = &self.functions;
        let mut handle = 0;
        let number = ptr::without_provenance_mut(fd as usize);
        // SAFETY: `cuMemImportFromShareableHandle` writes one handle; for this type the address is
        // a descriptor's number.
        let code = unsafe { (f.cuMemImportFromShareableHandle)(&raw mut handle, number, POSIX_FD) };
        good("cuMemImportFromShareableHandle", code)?;
        let mut base = 0;
        // SAFETY: `cuMemAddressReserve` writes one address: `base` is one.
        good("cuMemAddressReserve", unsafe {
            (f.cuMemAddressReserve)(&raw mut base, len, 0, 0, 0)
        })?;
        // SAFETY: `cuMemMap` asks for a reservation without a mapping and a live handle: both were
        // just made.
        good("cuMemMap", unsafe { (f.cuMemMap)(base, len, 0, handle, 0) })?;
        let access = Access {
            location: LOCATION_DEVICE,
            ordinal: self.ordinal,
            flags: ACCESS_READ_WRITE,
        };
        // SAFETY: `cuMemSetAccess` reads as many descriptions as it is told: one.
        good("cuMemSetAccess", unsafe {
            (f.cuMemSetAccess)(base, len, &raw const access, 1)
        })?;
        // SAFETY: `cuMemRelease` asks for a live handle, once.
        good("cuMemRelease", unsafe { (f.cuMemRelease)(handle) })?;
        Ok(base)
    }
}

impl Floor for Cuda {
    fn write(&self, to: RawStream, word: WordPtr, value: u64) -> Result<()> {
        // SAFETY: `cuStreamWriteValue64` asks for a live stream and a registered word: `Floor` is
        // given no others.
        good("cuStreamWriteValue64", unsafe {
            (self.functions.cuStreamWriteValue64)(stream(to), word.0, value, PLAIN)
        })
    }

    fn writes(&self, to: RawStream, word: WordPtr, value: u64, count: usize) -> Result<()> {
        let mut batch = self.batch.borrow_mut();
        batch.clear();
        batch.resize(
            count,
            Operation {
                kind: WRITE_VALUE_64,
                address: word.0,
                value,
                ..Operation::default()
            },
        );
        // SAFETY: `cuStreamBatchMemOp` reads as many operations as it is told; stream and word as
        // in `write`.
        let code = unsafe {
            (self.functions.cuStreamBatchMemOp)(stream(to), count as u32, batch.as_mut_ptr(), PLAIN)
        };
        good("cuStreamBatchMemOp", code)
    }

    fn wait(&self, on: RawStream, word: WordPtr, value: u64) -> Result<()> {
        // SAFETY: `cuStreamWaitValue64` asks for a live stream and a registered word: `Floor` is
        // given no others.
        good("cuStreamWaitValue64", unsafe {
            (self.functions.cuStreamWaitValue64)(stream(on), word.0, value, PLAIN)
        })
    }

    fn record(&self, what: RawEvent, on: RawStream) -> Result<()> {
        // SAFETY: `cuEventRecord` asks for a live event and stream: `Floor` is given no others.
        good("cuEventRecord", unsafe {
            (self.functions.cuEventRecord)(event(what), stream(on))
        })
    }

    fn wait_event(&self, on: RawStream, what: RawEvent) -> Result<()> {
        // SAFETY: `cuStreamWaitEvent` asks for a live stream and event: `Floor` is given no others.
        good("cuStreamWaitEvent", unsafe {
            (self.functions.cuStreamWaitEvent)(stream(on), event(what), PLAIN)
        })
    }

    fn settle(&self, on: RawStream) -> Result<()> {
        // SAFETY: `cuStreamSynchronize` asks for a live stream: `Floor` is given no others.
        good("cuStreamSynchronize", unsafe {
            (self.functions.cuStreamSynchronize)(stream(on))
        })
    }

    fn fill(&self, on: RawStream, to: DevicePtr, len: u64) -> Result<()> {
        // SAFETY: `cuMemsetD8Async` asks for a live stream and a valid range: `Floor` is given no
        // others.
        good("cuMemsetD8Async", unsafe {
            (self.functions.cuMemsetD8Async)(to.0, 0, len as usize, stream(on))
        })
    }

    fn stamp(&self, on: RawStream, to: DevicePtr) -> Result<()> {
        let kernel = self.stamp_kernel()?;
        let mut address = to.0;
        let mut arguments = [(&raw mut address).cast::<c_void>()];
        let (f, none) = (&self.functions, ptr::null_mut());
        // SAFETY: `cuLaunchKernel` asks for a live kernel and stream and reads as many arguments as
        // the kernel has: one, an address that `Floor` is given to be written.
        let code = unsafe {
            (f.cuLaunchKernel)(
                kernel,
                1,
                1,
                1,
                1,
                1,
                1,
                0,
                stream(on),
                arguments.as_mut_ptr(),
                none,
            )
        };
        good("cuLaunchKernel", code)
    }

    fn stretch(&self, on: RawStream, work: &mut dyn FnMut() -> Result<()>) -> Result<f64> {
        let (from, to) = self.clock;
        // SAFETY: `cuEventRecord` asks for a live event and stream: ours and, as above, the
        // caller's.
        good("cuEventRecord", unsafe {
            (self.functions.cuEventRecord)(from, stream(on))
        })?;
        work()?;
        // SAFETY: as above.
        good("cuEventRecord", unsafe {
            (self.functions.cuEventRecord)(to, stream(on))
        })?;
        self.settle(on)?;
        let mut milliseconds = 0.0;
        // SAFETY: `cuEventElapsedTime` writes one float and asks for two events that have
        // completed: so they have.
        let code = unsafe { (self.functions.cuEventElapsedTime)(&raw mut milliseconds, from, to) };
        good("cuEventElapsedTime", code)?;
        Ok(f64::from(milliseconds) * 1e6)
    }

    fn open(&self, foreign: &Foreign) -> Result<Opened> {
        match foreign {
            Foreign::Fd(fd, len) => Ok(Opened {
                address: self.open_fd(fd.as_raw_fd(), *len as usize)?,
                len: *len,
                is_fd: true,
            }),
            Foreign::Handle(handle) => {
                let handle = CUipcMemHandle {
                    reserved: handle.0.map(|byte| byte as _),
                };
                let mut base = 0;
                // SAFETY: `cuIpcOpenMemHandle` writes one address: `base` is one. It checks the
                // handle's bytes.
                let code = unsafe {
                    (self.functions.cuIpcOpenMemHandle)(&raw mut base, handle, LAZY_PEER_ACCESS)
                };
                good("cuIpcOpenMemHandle", code)?;
                Ok(Opened {
                    address: base,
                    len: 0,
                    is_fd: false,
                })
            }
        }
    }

    fn close(&self, opened: Opened) -> Result<()> {
        let f = &self.functions;
        if !opened.is_fd {
            // SAFETY: `cuIpcCloseMemHandle` asks for what was opened and is not in use: `open` made
            // it.
            return good("cuIpcCloseMemHandle", unsafe {
                (f.cuIpcCloseMemHandle)(opened.address)
            });
        }
        // SAFETY: `cuMemUnmap` asks for a whole mapping that nothing uses: `open` made it.
        good("cuMemUnmap", unsafe {
            (f.cuMemUnmap)(opened.address, opened.len as usize)
        })?;
        // SAFETY: `cuMemAddressFree` asks for a whole reservation without a mapping: so it is.
        good("cuMemAddressFree", unsafe {
            (f.cuMemAddressFree)(opened.address, opened.len as usize)
        })
    }
}
