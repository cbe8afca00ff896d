//! What an application does with its GPU, for tests: kernels, graphs, and memory that is not this
//! library's.
//!
//! These calls are the application's, so nothing here relaxes the capture mode: what a test wants
//! to see is whether the library's own calls disturb them.

// Tests: `crates/backend-cuda/tests/gpu`, `tests/processes/kernel.rs`.

use std::ffi::{CString, c_char, c_void};
use std::ptr;
use std::sync::Arc;

use gpu_api::{DeviceId, DevicePtr, Error, RawStream, Result};

use driver::Vendor;
use driver::calls::Symbol;
use driver::code::{Code, SUCCESS};

use crate::backend::CudaBackend;
use crate::cuda::Cuda;
use crate::error;
use crate::sys::{CUcontext, CUdeviceptr, CUstream, look};

/// A stream capture that other threads' unsafe calls destroy.
pub const CAPTURE_GLOBAL: u32 = 0;

driver::symbols! {
    /// Calls of an application.
    Launching;

    cuCtxSetCurrent: fn(CUcontext);
    cuModuleLoadData: fn(*mut *mut c_void, *const c_void);
    cuModuleGetFunction: fn(*mut *mut c_void, *mut c_void, *const c_char);
    cuModuleGetGlobal: fn(*mut CUdeviceptr, *mut usize, *mut c_void, *const c_char);
    cuLaunchKernel: fn(*mut c_void, u32, u32, u32, u32, u32, u32, u32, CUstream, *mut *mut c_void, *mut *mut c_void);
    cuStreamBeginCapture: fn(CUstream, u32);
    cuStreamEndCapture: fn(CUstream, *mut *mut c_void);
    cuGraphInstantiateWithFlags: fn(*mut *mut c_void, *mut c_void, u64);
    cuGraphCreate: fn(*mut *mut c_void, u32);
    cuGraphAddChildGraphNode: fn(*mut *mut c_void, *mut c_void, *const *mut c_void, usize, *mut c_void);
    cuGraphAddNode: fn(*mut *mut c_void, *mut c_void, *const *mut c_void, usize, *mut NodeParameters);
    cuGraphConditionalHandleCreate: fn(*mut u64, *mut c_void, CUcontext, u32, u32);
    cuStreamBeginCaptureToGraph: fn(CUstream, *mut c_void, *const *mut c_void, *const c_void, usize, u32);
    cuGraphDestroy: fn(*mut c_void);
    cuGraphLaunch: fn(*mut c_void, CUstream);
    cuMemAllocAsync: fn(*mut CUdeviceptr, usize, CUstream);
}

/// An application on a device, in its primary context.
pub struct Application {
    cuda: Arc<CudaBackend>,
    device: DeviceId,
    context: CUcontext,
    symbols: Launching,
}

/// A kernel and its module; it is never unloaded.
pub struct Kernel {
    function: *mut c_void,
    module: *mut c_void,
}

/// A captured graph, ready to be launched; it is never destroyed.
pub struct Graph(*mut c_void);

/// A graph that is captured into the body of a conditional node.
pub struct Body {
    /// The graph that has the node.
    outer: *mut c_void,
}

/// A graph node's type with a body that a condition decides about:
/// `CU_GRAPH_NODE_TYPE_CONDITIONAL`.
const CONDITIONAL: u32 = 13;
/// A condition that has its default value at each launch: `CU_GRAPH_COND_ASSIGN_DEFAULT`.
const ASSIGN_DEFAULT: u32 = 1;

/// `CUgraphNodeParams` of CUDA 12.3 and later, for a conditional node: 256 bytes, of which the
/// manual wants those that are not used to be 0.
#[repr(C)]
pub struct NodeParameters {
    kind: u32,
    reserved: [u32; 3],
    handle: u64,
    /// 0: `CU_GRAPH_COND_TYPE_IF`.
    condition: u32,
    /// Bodies.
    size: u32,
    /// Written by the driver: its own array of the bodies' graphs.
    bodies: *const *mut c_void,
    context: CUcontext,
    unused: [u64; 26],
}
const _: () = assert!(
    size_of::<NodeParameters>() == 256 && core::mem::offset_of!(NodeParameters, bodies) == 32
);

impl Application {
    /// Begins an application: it makes the device's primary context current on the calling thread,
    /// for good.
    pub fn begin(cuda: &Arc<CudaBackend>, device: DeviceId) -> Result<Application> {
        let context = ptr::with_exposed_provenance_mut(cuda.context(device)? as usize);
        // SAFETY: `find` asks that what `look` finds have the row's prototype: each is that in
        // cuda.h.
        let symbols = unsafe { Launching::find(&look) };
        let application = Application {
            cuda: Arc::clone(cuda),
            device,
            context,
            symbols,
        };
        application.make_current()?;
        Ok(application)
    }

    /// Makes the primary context current on this thread too.
    pub fn make_current(&self) -> Result<()> {
        self.call(&self.symbols.cuCtxSetCurrent, |function| {
            // SAFETY: `cuCtxSetCurrent` asks for a context that is alive: the backend retains it.
            unsafe { function(self.context) }
        })
    }

    /// Compiles PTX and finds a kernel in it.
    pub fn kernel(&self, ptx: &str, name: &str) -> Result<Kernel> {
        let invalid = |_| Error::invalid("the PTX", "a zero byte", "text");
        let (ptx, name) = (
            CString::new(ptx).map_err(invalid)?,
            CString::new(name).map_err(invalid)?,
        );
        let (mut module, mut kernel) = (ptr::null_mut(), ptr::null_mut());
        self.call(&self.symbols.cuModuleLoadData, |function| {
            // SAFETY: `cuModuleLoadData` writes one pointer and reads text that ends with a zero:
            // both live here.
            unsafe { function(&raw mut module, ptx.as_ptr().cast()) }
        })?;
        self.call(&self.symbols.cuModuleGetFunction, |function| {
            // SAFETY: `cuModuleGetFunction` writes one pointer and reads a name: both live here.
            // The module was loaded.
            unsafe { function(&raw mut kernel, module, name.as_ptr()) }
        })?;
        Ok(Kernel {
            function: kernel,
            module,
        })
    }

    /// Finds a variable of a kernel's module, in constant or global memory.
    pub fn variable(&self, kernel: &Kernel, name: &str) -> Result<DevicePtr> {
        let invalid = |_| Error::invalid("a variable's name", "a zero byte", "text");
        let name = CString::new(name).map_err(invalid)?;
        let (mut base, mut bytes) = (0, 0);
        self.call(&self.symbols.cuModuleGetGlobal, |function| {
            // SAFETY: `cuModuleGetGlobal` writes an address and a size and reads a name: all live
            // here. The module was loaded and is never unloaded.
            unsafe { function(&raw mut base, &raw mut bytes, kernel.module, name.as_ptr()) }
        })?;
        Ok(DevicePtr(base))
    }

    /// Launches a kernel whose parameters are all 64 bits wide.
    ///
    /// # Safety
    ///
    /// `stream` is alive, and the kernel may be run with these arguments.
    pub unsafe fn launch(
        &self,
        kernel: &Kernel,
        stream: RawStream,
        (blocks, threads): (u32, u32),
        arguments: &[u64],
    ) -> Result<()> {
        let mut addresses: Vec<*mut c_void> = arguments
            .iter()
            .map(|argument| ptr::from_ref(argument).cast_mut().cast())
            .collect();
        self.call(&self.symbols.cuLaunchKernel, |function| {
            // SAFETY: `cuLaunchKernel` reads one address for each of the kernel's parameters: our
            // caller vouches for their number, and for what the kernel does.
            unsafe {
                function(
                    kernel.function,
                    blocks,
                    1,
                    1,
                    threads,
                    1,
                    1,
                    0,
                    Cuda::stream(stream).cast(),
                    addresses.as_mut_ptr(),
                    ptr::null_mut(),
                )
            }
        })
    }

    /// Begins to capture a stream.
    ///
    /// # Safety
    ///
    /// `stream` is alive.
    pub unsafe fn begin_capture(&self, stream: RawStream, mode: u32) -> Result<()> {
        self.call(&self.symbols.cuStreamBeginCapture, |function| {
            // SAFETY: `cuStreamBeginCapture` asks for a stream that is alive: our caller vouches
            // for it.
            unsafe { function(Cuda::stream(stream).cast(), mode) }
        })
    }

    /// Ends a capture and makes its graph ready.
    ///
    /// # Safety
    ///
    /// `stream` is alive.
    pub unsafe fn end_capture(&self, stream: RawStream) -> Result<Graph> {
        // SAFETY: `captured` has our condition.
        let graph = unsafe { self.captured(stream) }?;
        self.ready(graph)
    }

    /// Ends a capture and makes a graph ready whose only node is the captured one, as a child.
    ///
    /// # Safety
    ///
    /// `stream` is alive.
    pub unsafe fn end_capture_of_child(&self, stream: RawStream) -> Result<Graph> {
        // SAFETY: `captured` has our condition.
        let child = unsafe { self.captured(stream) }?;
        let (outer, mut node) = (self.empty_graph()?, ptr::null_mut());
        self.call(&self.symbols.cuGraphAddChildGraphNode, |function| {
            // SAFETY: `cuGraphAddChildGraphNode` writes one node and copies the child: both graphs
            // were made here, and no dependency is named.
            unsafe { function(&raw mut node, outer, ptr::null(), 0, child) }
        })?;
        self.destroy(child)?;
        self.ready(outer)
    }

    /// Begins to capture a stream into the body of a conditional node that every launch takes. From
    /// CUDA 12.3 on.
    ///
    /// # Safety
    ///
    /// `stream` is alive.
    pub unsafe fn begin_capture_of_body(&self, stream: RawStream, mode: u32) -> Result<Body> {
        let (outer, mut handle, mut node) = (self.empty_graph()?, 0, ptr::null_mut());
        self.call(&self.symbols.cuGraphConditionalHandleCreate, |function| {
            // SAFETY: `cuGraphConditionalHandleCreate` writes one handle: the graph was made here,
            // and the context is the one that the backend retains.
            unsafe { function(&raw mut handle, outer, self.context, 1, ASSIGN_DEFAULT) }
        })?;
        let mut parameters = NodeParameters {
            kind: CONDITIONAL,
            reserved: [0; 3],
            handle,
            condition: 0,
            size: 1,
            bodies: ptr::null(),
            context: self.context,
            unused: [0; 26],
        };
        self.call(&self.symbols.cuGraphAddNode, |function| {
            // SAFETY: `cuGraphAddNode` writes one node, and reads and writes parameters of this
            // kind: they live here, and the handle is the graph's own.
            unsafe { function(&raw mut node, outer, ptr::null(), 0, &raw mut parameters) }
        })?;
        // SAFETY: the driver has set `bodies` to its array of `size` graphs, which lives as long as
        // the outer graph.
        let body = unsafe { parameters.bodies.read() };
        self.call(&self.symbols.cuStreamBeginCaptureToGraph, |function| {
            // SAFETY: `cuStreamBeginCaptureToGraph` asks for a stream that is alive, which our
            // caller vouches for, and for a graph: the node's body. No dependency is named.
            unsafe {
                function(
                    Cuda::stream(stream).cast(),
                    body,
                    ptr::null(),
                    ptr::null(),
                    0,
                    mode,
                )
            }
        })?;
        Ok(Body { outer })
    }

    /// Ends the capture into a conditional node's body, and makes the graph ready that has the
    /// node.
    ///
    /// # Safety
    ///
    /// `stream` is alive.
    pub unsafe fn end_capture_of_body(&self, stream: RawStream, body: Body) -> Result<Graph> {
        // SAFETY: `captured` has our condition. The body belongs to its node.
        unsafe { self.captured(stream) }?;
        self.ready(body.outer)
    }

    /// # Safety
    ///
    /// `stream` is alive.
    unsafe fn captured(&self, stream: RawStream) -> Result<*mut c_void> {
        let mut graph = ptr::null_mut();
        self.call(&self.symbols.cuStreamEndCapture, |function| {
            // SAFETY: `cuStreamEndCapture` writes one pointer: `graph` is one. Our caller vouches
            // for the stream.
            unsafe { function(Cuda::stream(stream).cast(), &raw mut graph) }
        })?;
        Ok(graph)
    }

    fn empty_graph(&self) -> Result<*mut c_void> {
        let mut graph = ptr::null_mut();
        self.call(&self.symbols.cuGraphCreate, |function| {
            // SAFETY: `cuGraphCreate` writes one pointer: `graph` is one.
            unsafe { function(&raw mut graph, 0) }
        })?;
        Ok(graph)
    }

    /// Makes a graph ready to be launched, and destroys the one that it was made of.
    fn ready(&self, graph: *mut c_void) -> Result<Graph> {
        let mut ready = ptr::null_mut();
        self.call(&self.symbols.cuGraphInstantiateWithFlags, |function| {
            // SAFETY: `cuGraphInstantiateWithFlags` writes one pointer: `ready` is one. The callers
            // made the graph.
            unsafe { function(&raw mut ready, graph, 0) }
        })?;
        self.destroy(graph)?;
        Ok(Graph(ready))
    }

    fn destroy(&self, graph: *mut c_void) -> Result<()> {
        self.call(&self.symbols.cuGraphDestroy, |function| {
            // SAFETY: `cuGraphDestroy` asks for a graph that is alive: the callers made it, and
            // what was made of it is a copy.
            unsafe { function(graph) }
        })
    }

    /// Launches a graph.
    ///
    /// # Safety
    ///
    /// `stream` is alive, and all that the graph does may be done.
    pub unsafe fn launch_graph(&self, graph: &Graph, stream: RawStream) -> Result<()> {
        self.call(&self.symbols.cuGraphLaunch, |function| {
            // SAFETY: `cuGraphLaunch` asks for a graph that is ready: it is never destroyed. Our
            // caller vouches for the stream and for what the graph does.
            unsafe { function(graph.0, Cuda::stream(stream).cast()) }
        })
    }

    /// Allocates from the stream-ordered pool, as `cudaMallocAsync` does, until the process ends.
    ///
    /// # Safety
    ///
    /// `stream` is alive.
    pub unsafe fn pool_alloc(&self, stream: RawStream, len: usize) -> Result<DevicePtr> {
        let mut base = 0;
        self.call(&self.symbols.cuMemAllocAsync, |function| {
            // SAFETY: `cuMemAllocAsync` writes one address: `base` is one. Our caller vouches for
            // the stream.
            unsafe { function(&raw mut base, len, Cuda::stream(stream).cast()) }
        })?;
        Ok(DevicePtr(base))
    }

    fn call<F: Copy>(&self, symbol: &Symbol<F>, run: impl FnOnce(F) -> Code) -> Result<()> {
        let function = symbol.function.ok_or_else(|| error::missing(symbol.name))?;
        match run(function) {
            SUCCESS => Ok(()),
            code => {
                let source = self.cuda.own.error(code);
                Err(Error::Driver {
                    call: symbol.name,
                    device: self.device,
                    source,
                })
            }
        }
    }
}

// SAFETY: `Send`: the pointers are the driver's handles, which the manual lets any thread use.
unsafe impl Send for Application {}
// SAFETY: `Sync`: as for `Send`; no method changes what they point to but through the driver, which
// locks.
unsafe impl Sync for Application {}
// SAFETY: `Send`: a handle of the driver's, which the manual lets any thread use.
unsafe impl Send for Kernel {}
// SAFETY: `Sync`: as for `Send`.
unsafe impl Sync for Kernel {}
// SAFETY: `Send`: a handle of the driver's; the manual asks that a graph be launched by one thread
// at a time only, which `Graph` not being `Sync` sees to.
unsafe impl Send for Graph {}
