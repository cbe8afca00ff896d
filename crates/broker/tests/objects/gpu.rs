//! What only a GPU can show of objects: graphs under an advance, and a dead writer's last writes.
//!
//! The kernels are those of the examples (`look.ptx`: the least and the greatest word) and of the
//! CUDA backend (`write.ptx`: writes on and on).

use std::time::{Duration, Instant};

use backend_cuda::CudaBackend;
use backend_cuda::launch::{Application, CAPTURE_GLOBAL, Graph, Kernel};
use broker::{Client, CreateOptions, Layout, PartSpec, Reader};
use gpu_api::{Access, DeviceId, DevicePtr, Error, Gpu, RawMemory, Sharing};
use ipc_rc::Stream;

use crate::agent::{Agent, Command, Said, client, gpu, serving};
use crate::{Case, until};

pub const CASES: &[Case] = &[
    (
        "gpu::a_captured_graph_sees_the_next_epoch",
        a_captured_graph_sees_the_next_epoch,
    ),
    (
        "gpu::a_child_graph_sees_the_next_epoch",
        a_child_graph_sees_the_next_epoch,
    ),
    (
        "gpu::a_conditional_graph_sees_the_next_epoch",
        a_conditional_graph_sees_the_next_epoch,
    ),
    (
        "gpu::a_dead_writers_late_writes_land_in_nobodys_memory",
        late_writes_land_in_nobodys_memory,
    ),
    (
        "gpu::a_killed_writers_memory_is_watched_and_the_control_is_seen",
        the_control_of_late_writes,
    ),
];

/// Needs two devices.
pub const TWO_DEVICES: &[Case] = &[(
    "gpu::another_device_sees_the_next_epoch",
    another_device_sees_the_next_epoch,
)];

const LOOK: &str = include_str!("../../../../examples/objects/shared/look.ptx");
const WRITE: &str = include_str!("../../../backend-cuda/tests/kernel/write.ptx");
/// Blocks and threads of a kernel.
const SHAPE: (u32, u32) = (256, 256);
/// Bytes of the part that is captured.
const PART: u64 = 32 << 20;
/// Bytes that a writer writes to when it is killed.
const WRITTEN: u64 = 1 << 30;
/// What the next owner of that memory fills it with.
const OURS: u8 = 0x5a;
/// How long the next owner looks at it.
const LOOKED: Duration = Duration::from_millis(300);

/// The kernels, and eight words for what they find.
struct Eye {
    gpu: Gpu,
    application: Application,
    /// Loaded before anything is captured, and before all memory is taken.
    begin: Kernel,
    look: Kernel,
    stream: Stream,
    out: DevicePtr,
}

impl Eye {
    fn open() -> Eye {
        Self::open_on(gpu())
    }

    fn open_on(gpu: Gpu) -> Eye {
        let cuda = CudaBackend::load().expect("an NVIDIA driver");
        let application = Application::begin(&cuda, gpu.device()).expect("a context");
        let kernel = |name| {
            application
                .kernel(LOOK, name)
                .expect("the examples' kernel")
        };
        let (begin, look) = (kernel("begin"), kernel("look"));
        let stream = Stream::create(&gpu).expect("a stream");
        let out = gpu
            .backend()
            .alloc(gpu.device(), PART + 4096, Sharing::Fd)
            .expect("memory")
            .base;
        Eye {
            gpu,
            application,
            begin,
            look,
            stream,
            out,
        }
    }

    /// Queues a look at memory: `out[0]` is the least of its words, `out[1]` the greatest.
    fn queue(&self, at: DevicePtr, bytes: u64) {
        self.launch(&self.begin, (1, 1), &[self.out.0]);
        self.launch(&self.look, SHAPE, &[at.0, bytes / 8, self.out.0]);
    }

    fn launch(&self, kernel: &Kernel, shape: (u32, u32), arguments: &[u64]) {
        // SAFETY: `launch` asks for a live stream and for arguments of the kernel's: this value's
        // stream and memory, and memory that the caller has mapped until the work was waited for.
        unsafe {
            self.application
                .launch(kernel, self.stream.raw(), shape, arguments)
        }
        .expect("a launch");
    }

    /// Waits for what was queued, and returns the two words.
    fn answer(&self) -> (u64, u64) {
        let mut answer = [0u8; 16];
        let (to, backend) = (answer.as_mut_ptr(), self.gpu.backend());
        // SAFETY: `copy_to_host` asks for a live stream and two ranges that are valid until the
        // copy is done: it is waited for below.
        unsafe { backend.copy_to_host(self.stream.raw(), to, self.out, answer.len()) }
            .expect("a copy");
        self.stream.synchronize().expect("the work ends well");
        let word = |at: usize| u64::from_le_bytes(std::array::from_fn(|i| answer[at + i]));
        (word(0), word(8))
    }

    fn look(&self, at: DevicePtr, bytes: u64) -> (u64, u64) {
        self.queue(at, bytes);
        self.answer()
    }

    /// Queues what an engine does in a graph: a copy of the weights, and kernels over both.
    fn queue_work(&self, weights: DevicePtr) {
        let copy = self.out.offset(4096);
        // SAFETY: `copy` asks for a live stream and two ranges that are valid until the copy is
        // done: the weights are mapped whenever it runs, and `out` has a page and as many bytes.
        unsafe {
            self.gpu
                .backend()
                .copy(self.stream.raw(), copy, weights, PART)
        }
        .expect("a copy");
        self.queue(weights, PART);
        self.launch(&self.look, SHAPE, &[copy.0, PART / 8, self.out.0]);
    }
}

/// Puts an object whose every byte is `stamp`.
fn put(client: &Client, stamp: u8) {
    let layout =
        Layout::pack([PartSpec::bytes("w", PART).expect("a part")], &[stamp]).expect("a layout");
    let writer = client
        .create_with("model", layout, &CreateOptions::default())
        .expect("memory");
    let stream = Stream::create(client.gpu()).expect("a stream");
    let at = writer.device_ptr("w").expect("a part");
    // SAFETY: `fill` asks for a live stream and a range that is valid until the fill is done: the
    // commit waits for it.
    unsafe { client.gpu().backend().fill(stream.raw(), at, stamp, PART) }.expect("a fill");
    writer
        .commit(&[&stream])
        .expect("queued")
        .wait()
        .expect("a commit");
}

fn word(stamp: u8) -> u64 {
    u64::from_ne_bytes([stamp; 8])
}

/// Captures once, and compares what each launch finds with the epoch that is mapped.
fn under_an_advance(capture: impl FnOnce(&Eye, &Reader, DevicePtr) -> Graph) {
    let (_dir, _keeper, client) = serving();
    put(&client, 1);
    let mut reader = client.open("model").expect("an object");
    let eye = Eye::open();
    let weights = reader.device_ptr("w").expect("a part");
    reader.used_on(&eye.stream).expect("one device");
    // What is loaded at the first launch is not loaded under a capture.
    eye.queue_work(weights);
    assert_eq!(eye.answer(), (word(1), word(1)));
    let graph = capture(&eye, &reader, weights);
    for stamp in 1..=5 {
        if stamp > 1 {
            put(&client, stamp);
            assert!(reader.advance().expect("a newer epoch"));
            assert_eq!(reader.device_ptr("w"), Some(weights), "the same address");
        }
        for _ in 0..3 {
            // SAFETY: `launch_graph` asks for a live stream, and that all may be done that the
            // graph does: the weights are mapped, and the advance waits for this stream.
            unsafe { eye.application.launch_graph(&graph, eye.stream.raw()) }.expect("a launch");
            assert_eq!(
                eye.answer(),
                (word(stamp), word(stamp)),
                "epoch {stamp} alone"
            );
        }
    }
}

fn a_captured_graph_sees_the_next_epoch() {
    under_an_advance(|eye, _, weights| {
        // SAFETY: `begin_capture` asks for a live stream.
        unsafe {
            eye.application
                .begin_capture(eye.stream.raw(), CAPTURE_GLOBAL)
        }
        .expect("a capture");
        eye.queue_work(weights);
        // SAFETY: `end_capture` asks for the same.
        unsafe { eye.application.end_capture(eye.stream.raw()) }.expect("a graph")
    });
}

fn a_child_graph_sees_the_next_epoch() {
    under_an_advance(|eye, _, weights| {
        // SAFETY: `begin_capture` asks for a live stream.
        unsafe {
            eye.application
                .begin_capture(eye.stream.raw(), CAPTURE_GLOBAL)
        }
        .expect("a capture");
        eye.queue_work(weights);
        // SAFETY: `end_capture_of_child` asks for the same.
        unsafe { eye.application.end_capture_of_child(eye.stream.raw()) }
            .expect("a graph with a child")
    });
}

fn a_conditional_graph_sees_the_next_epoch() {
    under_an_advance(|eye, _, weights| {
        // SAFETY: `begin_capture_of_body` asks for a live stream.
        let body = unsafe {
            eye.application
                .begin_capture_of_body(eye.stream.raw(), CAPTURE_GLOBAL)
        };
        let body = body.expect("a conditional node, as drivers have from CUDA 12.3 on");
        eye.queue_work(weights);
        // SAFETY: `end_capture_of_body` asks for the same.
        unsafe { eye.application.end_capture_of_body(eye.stream.raw(), body) }
            .expect("a graph with a condition")
    });
}

/// A kernel of the second device reads an object of the first, before and after an advance. The
/// reader waits for streams of its own device alone, so the second one's are waited for here.
fn another_device_sees_the_next_epoch() {
    let (dir, _keeper, client) = serving();
    put(&client, 1);
    let (here, there) = (client.gpu().device(), DeviceId(1));
    let backend = client.gpu().backend();
    let other = Gpu::new(backend.clone(), there).expect("the second device");
    backend
        .enable_peer_access(there, here)
        .expect("one reaches the other");
    let eye = Eye::open_on(other.clone());
    let mut reader = client.open("model").expect("an object");
    let weights = reader.device_ptr("w").expect("a part");
    let refused = reader.used_on(&eye.stream);
    assert!(
        matches!(
            refused,
            Err(broker::ObjectError::Gpu(Error::Mismatch { .. }))
        ),
        "{refused:?}"
    );
    for stamp in 1..=5 {
        if stamp > 1 {
            put(&client, stamp);
            assert!(reader.advance().expect("a newer epoch"));
            assert_eq!(reader.device_ptr("w"), Some(weights), "the same address");
        }
        assert_eq!(eye.look(weights, PART), (word(stamp), word(stamp)));
    }
    // A client that names the second device is told which one the object is on.
    let elsewhere = Client::builder(other).dir(&*dir).name("elsewhere");
    let elsewhere = elsewhere.connect().expect("a broker that listens");
    let refused = elsewhere
        .open("model")
        .expect_err("another device")
        .to_string();
    let uuid = client.gpu().uuid().to_string();
    assert!(refused.contains(&uuid), "{refused}");
}

/// Lives as a writer whose kernel writes to its object until the process is killed.
pub fn write_for_ever(dir: &std::path::Path) {
    let client = client(dir);
    let layout =
        Layout::pack([PartSpec::bytes("w", WRITTEN).expect("a part")], b"").expect("a layout");
    let writer = client.create("late", layout).expect("memory");
    let eye = Eye::open();
    let write = eye
        .application
        .kernel(WRITE, "write_on")
        .expect("the backend's kernel");
    let at = writer.device_ptr("w").expect("a part");
    // The longest time that a clock of 64 bits can be asked for: until the process is killed.
    eye.launch(&write, SHAPE, &[at.0, WRITTEN / 8, u64::MAX, 0]);
    harness::say(&Said::Ready);
    harness::next::<Command>();
}

/// All memory that the device has left, so that the next that it gives out is the dead writer's.
/// The writer's context comes back with its object, and is half as large: at least a third of the
/// next piece is the object's.
struct Hoard {
    gpu: Gpu,
    held: Vec<RawMemory>,
}

impl Hoard {
    /// Takes one piece more, if there is one.
    fn take(&mut self, bytes: u64) -> Option<RawMemory> {
        match self.gpu.backend().create_memory(self.gpu.device(), bytes) {
            Ok(memory) => {
                self.held.push(memory);
                Some(memory)
            }
            Err(Error::OutOfMemory { .. }) => None,
            Err(error) => panic!("{error}"),
        }
    }
}

impl Drop for Hoard {
    fn drop(&mut self) {
        for &memory in &self.held {
            // SAFETY: `release_memory` asks for memory that is not yet released: each is held once.
            let _ = unsafe { self.gpu.backend().release_memory(memory) };
        }
    }
}

/// Kills a writer, takes the memory that comes back, and counts the looks at it in which there was
/// a foreign word.
fn foreign_words(with_control: bool) -> (u32, u32) {
    let (dir, _keeper, client) = serving();
    let eye = Eye::open();
    // What the kernels need is loaded before the memory is taken.
    assert_eq!(eye.look(eye.out.offset(4096), 0), (u64::MAX, 0));
    let mut writer = Agent::late_writer(&dir);
    let mut control = with_control.then(|| Control::start(&eye));
    let mut hoard = Hoard {
        gpu: eye.gpu.clone(),
        held: Vec::new(),
    };
    for bytes in [WRITTEN, 64 << 20] {
        while hoard.take(bytes).is_some() {}
    }
    writer.kill();
    let mut given = None;
    until("the dead writer's memory is given out again", || {
        given = hoard.take(WRITTEN);
        given.is_some()
    });
    let memory = given.expect("looked at above");
    let range = eye
        .gpu
        .backend()
        .reserve_range(eye.gpu.device(), WRITTEN, None)
        .expect("addresses");
    // SAFETY: `map_memory` asks for memory that is not released, and for reserved addresses with
    // nothing on them: both were just made.
    unsafe {
        eye.gpu
            .backend()
            .map_memory(range.base, memory, Access::ReadWrite)
    }
    .expect("mapped");
    // SAFETY: `fill` asks for a live stream and a range that is valid until the fill is done: it is
    // waited for below.
    unsafe {
        eye.gpu
            .backend()
            .fill(eye.stream.raw(), range.base, OURS, WRITTEN)
    }
    .expect("a fill");
    eye.stream.synchronize().expect("filled");
    if let Some(control) = &mut control {
        control.write(range.base);
    }
    let (mut looks, mut foreign) = (0, 0);
    let start = Instant::now();
    while start.elapsed() < LOOKED || looks < 10 {
        looks += 1;
        foreign += u32::from(eye.look(range.base, WRITTEN) != (word(OURS), word(OURS)));
    }
    drop(control);
    // SAFETY: `unmap_memory` asks for what was mapped and that no work touches it: every look was
    // waited for, and the control has ended.
    unsafe { eye.gpu.backend().unmap_memory(range.base) }.expect("unmapped");
    // SAFETY: `release_range` asks for a reservation with nothing on it.
    unsafe { eye.gpu.backend().release_range(range) }.expect("given back");
    assert!(client.open("late").is_err(), "nobody ever sees it");
    (looks, foreign)
}

fn late_writes_land_in_nobodys_memory() {
    for _ in 0..3 {
        let (looks, foreign) = foreign_words(false);
        assert_eq!(foreign, 0, "foreign words in {foreign} of {looks} looks");
    }
}

/// The negative control: words that another stream writes while the memory is looked at are seen.
fn the_control_of_late_writes() {
    let (looks, foreign) = foreign_words(true);
    assert!(
        foreign > 0,
        "{looks} looks missed what another stream wrote meanwhile"
    );
}

/// A second stream of this process that writes as a dead writer's kernel would.
struct Control {
    application: Application,
    write: Kernel,
    stream: Stream,
}

impl Control {
    fn start(eye: &Eye) -> Control {
        let cuda = CudaBackend::load().expect("an NVIDIA driver");
        let application = Application::begin(&cuda, eye.gpu.device()).expect("a context");
        let write = application
            .kernel(WRITE, "write_on")
            .expect("the backend's kernel");
        let control = Control {
            application,
            write,
            stream: Stream::create(&eye.gpu).expect("a stream"),
        };
        // A first launch may load: that must not wait until all memory is taken.
        control.launch(eye.out, 0, 1);
        control.stream.synchronize().expect("it does nothing");
        control
    }

    fn write(&mut self, at: DevicePtr) {
        self.launch(at, WRITTEN / 8, 200_000_000);
    }

    fn launch(&self, at: DevicePtr, words: u64, nanoseconds: u64) {
        // SAFETY: `launch` asks for a live stream and for arguments of the kernel's: memory of this
        // many words, which is mapped until the drop has waited.
        unsafe {
            self.application.launch(
                &self.write,
                self.stream.raw(),
                (4, 256),
                &[at.0, words, nanoseconds, 0],
            )
        }
        .expect("a launch");
    }
}

impl Drop for Control {
    fn drop(&mut self) {
        let _ = self.stream.synchronize();
    }
}
