//! Inference on an NVIDIA GPU: a graph that is captured once and launched for every question.
//!
//! It reaches the weights in three ways: by kernels whose arguments are addresses, by a copy, and
//! by a kernel that takes the address from constant memory. `advance` maps other weights at the
//! same addresses, and the graph need not know.
//!
//! The calls of the driver are the application's own; any binding of CUDA will do.

use std::error::Error;

use backend_cuda::CudaBackend;
use backend_cuda::launch::{Application, CAPTURE_GLOBAL, Graph as Captured, Kernel};
use gpu_ipc::Stream;
use gpu_ipc::backend::DevicePtr;
use gpu_ipc::broker::{Client, Layout, PartSpec, Reader, Scratch};

use super::engine::Answer;

/// Blocks and threads of a kernel that looks.
const SHAPE: (u32, u32) = (1024, 256);
/// Bytes that the graph copies, and looks at there.
const SAMPLE: u64 = 4096;
/// Bytes of an answer: two words.
const ANSWER: u64 = 16;

/// A captured graph, and memory for its answer.
pub struct Graph {
    application: Application,
    graph: Captured,
    out: Scratch,
}

impl Graph {
    /// Captures what looks at every word of an object.
    pub fn capture(
        client: &Client,
        stream: &Stream,
        weights: &Reader,
    ) -> Result<Graph, Box<dyn Error>> {
        let gpu = client.gpu();
        let application = Application::begin(&CudaBackend::load()?, gpu.device())?;
        let ptx = include_str!("look.ptx");
        let [begin, look, look_there] = [
            application.kernel(ptx, "begin")?,
            application.kernel(ptx, "look")?,
            application.kernel(ptx, "look_there")?,
        ];
        let specs = vec![
            PartSpec::bytes("answer", ANSWER)?,
            PartSpec::bytes("copy", SAMPLE)?,
        ];
        let out = client.scratch("answer", Layout::pack(specs, &[])?)?;
        out.used_on(stream)?;
        let address = |part| out.device_ptr(part).ok_or("a part without an address");
        let (answer, copy) = (address("answer")?, address("copy")?);
        let mut parts: Vec<(DevicePtr, u64)> = Vec::new();
        for part in weights.layout().parts() {
            parts.push((
                weights
                    .device_ptr(&part.spec.name)
                    .ok_or("a part without an address")?,
                part.spec.len,
            ));
        }
        let (&(first, first_len), &(last, _)) = (
            parts.first().ok_or("no part")?,
            parts.last().ok_or("no part")?,
        );
        let table: Vec<u8> = [first.0, first_len / 8]
            .into_iter()
            .flat_map(u64::to_le_bytes)
            .collect();
        let place = application.variable(&look_there, "table")?;
        // SAFETY: `copy_to_device` asks for a live stream and two ranges that are valid until the
        // copy is done: the table is waited for below, and the module's variable has its 16 bytes.
        unsafe {
            gpu.backend()
                .copy_to_device(stream.raw(), place, table.as_ptr(), table.len())
        }?;
        stream.synchronize()?;
        let launch = |kernel: &Kernel, shape, arguments: &[u64]| {
            // SAFETY: `launch` asks for a live stream and a kernel that may be run with these
            // arguments: parts that are mapped whenever the graph is launched, and this graph's own
            // memory.
            unsafe { application.launch(kernel, stream.raw(), shape, arguments) }
        };
        // SAFETY: `begin_capture` asks for a live stream: the caller's.
        unsafe { application.begin_capture(stream.raw(), CAPTURE_GLOBAL) }?;
        launch(&begin, (1, 1), &[answer.0])?;
        for &(at, len) in &parts {
            launch(&look, SHAPE, &[at.0, len / 8, answer.0])?;
        }
        launch(&look_there, SHAPE, &[answer.0])?;
        // SAFETY: `copy` asks for a live stream and two ranges that are valid until the copy is
        // done: a part has at least as many bytes, and so has the part for the copy; both are there
        // whenever the graph is launched.
        unsafe { gpu.backend().copy(stream.raw(), copy, last, SAMPLE) }?;
        launch(&look, (1, 256), &[copy.0, SAMPLE / 8, answer.0])?;
        // SAFETY: `end_capture` asks for a live stream: the caller's.
        let graph = unsafe { application.end_capture(stream.raw()) }?;
        Ok(Graph {
            application,
            graph,
            out,
        })
    }

    /// Launches the graph, and waits for its answer.
    pub fn answer(&self, stream: &Stream) -> Result<Answer, Box<dyn Error>> {
        // SAFETY: `launch_graph` asks for a live stream, and that all may be done that the graph
        // does: the weights are mapped, and `out` is there until this is dropped.
        unsafe { self.application.launch_graph(&self.graph, stream.raw()) }?;
        stream.synchronize()?;
        let mut answer = [0; ANSWER as usize];
        self.out.read_at("answer", 0, &mut answer)?;
        let word = |at: usize| u64::from_le_bytes(std::array::from_fn(|i| answer[at + i]));
        Ok(Answer {
            lowest: word(0),
            highest: word(8),
        })
    }
}
