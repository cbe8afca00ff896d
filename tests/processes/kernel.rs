//! What an application does with an NVIDIA GPU: kernels that write on and on, a kernel that breaks
//! its context, graphs.

use backend_cuda::CudaBackend;
use backend_cuda::launch::{Application, CAPTURE_GLOBAL, Graph, Kernel};
use gpu_ipc::backend::{DeviceId, DevicePtr, Sharing};
use gpu_ipc::{Gpu, Stream};

use crate::device::read_stamp;

/// Longer than any case takes.
const FOR_EVER: u64 = 600_000_000_000;

/// The application's side of a device, on the thread that made it.
pub struct Kernels {
    application: Application,
    write_on: Kernel,
}

impl Kernels {
    pub fn open() -> Kernels {
        Self::open_on(DeviceId(0))
    }

    pub fn open_on(device: DeviceId) -> Kernels {
        let cuda = CudaBackend::load().expect("the backend that is tested is CUDA");
        let application = Application::begin(&cuda, device).expect("a context");
        let ptx = include_str!("../../crates/backend-cuda/tests/kernel/write.ptx");
        let write_on = application.kernel(ptx, "write_on").expect("it compiles");
        Kernels {
            application,
            write_on,
        }
    }

    /// Returns the least and the greatest of the words at an address, as a kernel reads them.
    pub fn look(&self, gpu: &Gpu, stream: &Stream, ptr: DevicePtr, words: u64) -> (u64, u64) {
        let ptx = include_str!("../../examples/objects/shared/look.ptx");
        let kernel = |name| self.application.kernel(ptx, name).expect("it compiles");
        let (begin, look) = (kernel("begin"), kernel("look"));
        let out = gpu.backend().alloc(gpu.device(), 4096, Sharing::Fd);
        let out = out.expect("memory").base;
        let second = out.offset(8);
        for (kernel, arguments) in [
            (&begin, [out.0].as_slice()),
            (&look, &[ptr.0, words, out.0]),
        ] {
            // SAFETY: `launch` asks for a live stream, which the caller keeps, and for arguments of
            // the kernel's: memory of this call's and of a block that is held.
            unsafe { (self.application).launch(kernel, stream.raw(), (64, 128), arguments) }
                .expect("launched");
        }
        (
            read_stamp(gpu, stream, out),
            read_stamp(gpu, stream, second),
        )
    }

    fn launch(&self, stream: &Stream, arguments: [u64; 4]) {
        // SAFETY: `launch` asks for a live stream, which the caller keeps, and for a kernel that
        // may be run so: it has four parameters, and the callers' arguments are addresses of blocks
        // that are held, or break the context on purpose.
        unsafe {
            self.application
                .launch(&self.write_on, stream.raw(), (8, 128), &arguments)
        }
        .expect("launched");
    }

    /// Writes 1, 2, 3, ... into every word until the process dies.
    pub fn write_on(&self, stream: &Stream, ptr: DevicePtr, words: u64) {
        self.launch(stream, [ptr.0, words, FOR_EVER, 0]);
    }

    /// Writes 1 into every word.
    pub fn write_once(&self, stream: &Stream, ptr: DevicePtr, words: u64) {
        self.launch(stream, [ptr.0, words, 0, 0]);
    }

    /// Breaks the context: the sticky error of an application's own kernel.
    pub fn crash(&self, stream: &Stream) {
        self.launch(stream, [0x10, 1, 1000, 0]);
    }

    /// Captures what `queue` puts on a stream, in the mode that calls of other threads may destroy.
    pub fn capture(&self, stream: &Stream, queue: impl FnOnce()) -> Graph {
        // SAFETY: `begin_capture` asks for a live stream: the caller keeps it.
        unsafe { self.application.begin_capture(stream.raw(), CAPTURE_GLOBAL) }.expect("it begins");
        queue();
        // SAFETY: `end_capture` asks for a live stream: as above.
        unsafe { self.application.end_capture(stream.raw()) }.expect("nobody destroyed the capture")
    }

    /// Launches a graph.
    pub fn launch_graph(&self, graph: &Graph, stream: &Stream) {
        // SAFETY: `launch_graph` asks for a live stream, and that all may be done that the graph
        // does: it writes into a block that is kept for it.
        unsafe { self.application.launch_graph(graph, stream.raw()) }.expect("launched");
    }
}
