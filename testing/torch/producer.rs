//! A producer in Rust, a consumer in Python: an unmodified PyTorch opens what a session allocated.
//!
//! ```text
//! cargo run --features torch,cuda --example torch_producer -- [--backend cuda] [--python python3]
//!     [--consumer testing/torch/consumer.py] [--count 10000] [--big-mib 1024] [--sharing handle|fd]
//! ```
//!
//! This program binds a socket, starts the consumer, and sends it tensors of every type, views with
//! offsets and strides, one of no bytes and a large one; then many in a row; then it kills
//! consumers that hold something. With `--sharing fd` the consumer opens them as expandable
//! segments, and then blocks across pieces of memory that grows in place as segments of several
//! chunks. The frames are those of `gpu_tensors.py`. Each check is a line; the last line sums up.

use std::os::unix::net::UnixListener;
use std::path::PathBuf;
use std::process::{Child, Command, ExitCode};
use std::sync::Arc;
use std::time::{Duration, Instant};

use gpu_ipc::backend::Sharing;
use gpu_ipc::torch::{Collected, Dtype, Fields, Layout, Recipient, SendId, Sender, TensorMessage};
use gpu_ipc::{After, Gpu, SentBlock, Session, Stream};
use wire::{Checks, PATIENCE, Result, Wire, gather, left_behind, open, pattern};

mod pieces;
mod wire;

/// How many of the long row are on their way at once.
const WINDOW: usize = 32;
/// Bytes of each of them.
const SMALL: u64 = 4096;

fn main() -> ExitCode {
    match Options::parse().and_then(|options| produce(&options)) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            println!("torch_producer: FAILED: {error}");
            ExitCode::FAILURE
        }
    }
}

struct Options {
    backend: String,
    python: String,
    consumer: String,
    count: usize,
    big: u64,
    sharing: Sharing,
}

impl Options {
    fn parse() -> Result<Options> {
        let mut options = Options {
            backend: "cuda".into(),
            python: "python3".into(),
            consumer: "testing/torch/consumer.py".into(),
            count: 10_000,
            big: 1 << 30,
            sharing: Sharing::Handle,
        };
        for pair in std::env::args().skip(1).collect::<Vec<_>>().chunks(2) {
            match pair {
                [name, value] if name == "--sharing" && value == "handle" => {
                    options.sharing = Sharing::Handle
                }
                [name, value] if name == "--sharing" && value == "fd" => {
                    options.sharing = Sharing::Fd
                }
                [name, value] if name == "--backend" => options.backend.clone_from(value),
                [name, value] if name == "--python" => options.python.clone_from(value),
                [name, value] if name == "--consumer" => options.consumer.clone_from(value),
                [name, value] if name == "--count" => options.count = value.parse()?,
                [name, value] if name == "--big-mib" => options.big = value.parse::<u64>()? << 20,
                _ => {
                    return Err(
                        "usage: torch_producer [--backend B] [--python P] [--consumer FILE] [--count N] [--big-mib N] \
                         [--sharing handle|fd]"
                            .into(),
                    );
                }
            }
        }
        Ok(options)
    }
}

/// A consumer, and the way to it.
struct Consumer {
    child: Child,
    wire: Wire,
    to: Recipient,
    torch: String,
}

impl Consumer {
    fn start(options: &Options) -> Result<Consumer> {
        let dir = tempfile::tempdir()?;
        let path: PathBuf = dir.path().join("tensors");
        let listener = UnixListener::bind(&path)?;
        listener.set_nonblocking(true)?;
        let mut child = Command::new(&options.python)
            .arg(&options.consumer)
            .arg(&path)
            .spawn()?;
        let start = Instant::now();
        let socket = loop {
            match listener.accept() {
                Ok((socket, _)) => break socket,
                Err(e)
                    if e.kind() == std::io::ErrorKind::WouldBlock && start.elapsed() < PATIENCE => {
                }
                Err(e) => return Err(e.into()),
            }
            if let Some(status) = child.try_wait()? {
                return Err(format!("the consumer ended before it connected: {status}").into());
            }
            std::thread::sleep(Duration::from_millis(5));
        };
        socket.set_nonblocking(false)?;
        let mut wire = Wire::new(socket)?;
        let hello = wire.text()?;
        let (pid, torch) = hello.split_once(' ').ok_or("no greeting")?;
        // It is connected and a child of ours: this number is its own.
        Ok(Consumer {
            to: Recipient::process(pid.parse()?)?,
            torch: torch.into(),
            child,
            wire,
        })
    }

    fn end(mut self) -> Result<()> {
        self.wire.send("end")?;
        self.wire.agreed()?;
        let status = self.child.wait()?;
        if status.success() {
            Ok(())
        } else {
            Err(format!("the consumer ended with {status}").into())
        }
    }

    fn kill(mut self) -> Result<()> {
        self.child.kill()?;
        self.child.wait()?;
        Ok(())
    }
}

/// The sending side.
struct Producer {
    gpu: Gpu,
    session: Session,
    sender: Sender,
    stream: Stream,
}

impl Producer {
    fn block(&self, bytes: &[u8]) -> Result<Arc<SentBlock>> {
        let block = Arc::new(self.session.alloc(bytes.len() as u64)?);
        self.stream.write(&*block, bytes)?;
        Ok(block)
    }

    fn message(
        &self,
        block: &Arc<SentBlock>,
        to: &Recipient,
        layout: &Layout,
    ) -> Result<(SendId, Vec<u8>)> {
        let sending = self
            .sender
            .send(block, to.clone(), After::Stream(&self.stream))?;
        let message = TensorMessage {
            fields: sending.fields,
            uuid: Some(sending.uuid),
            layout: layout.clone(),
        };
        Ok((sending.id, message.encode()?))
    }

    /// Has a tensor looked at, and its release seen by one collect.
    fn look(
        &self,
        consumer: &mut Consumer,
        layout: &Layout,
        storage: &[u8],
        seed: u64,
    ) -> Result<()> {
        let block = self.block(storage)?;
        let (_, message) = self.message(&block, &consumer.to, layout)?;
        consumer.wire.send(format!("look {seed}"))?;
        consumer.wire.send(message)?;
        let small = storage.len() < 1 << 20;
        consumer.wire.send(if small {
            gather(layout, storage)?
        } else {
            Vec::new()
        })?;
        consumer.wire.agreed()?;
        drop(block);
        self.released(1)
    }

    fn released(&self, count: u64) -> Result<()> {
        let Collected {
            released,
            abandoned,
            ..
        } = self.sender.collect();
        match self.sender.outstanding().len() {
            0 if (released, abandoned) == (count, 0) => Ok(()),
            left => Err(format!(
                "one collect brought back {released} of {count}, {abandoned} abandoned, {left} left"
            )
            .into()),
        }
    }
}

fn view(dtype: Dtype, offset: u64, shape: &[u64], strides: &[u64]) -> Layout {
    Layout {
        dtype,
        offset,
        shape: shape.to_vec(),
        strides: strides.to_vec(),
    }
}

fn produce(options: &Options) -> Result<bool> {
    let gpu = open(&options.backend)?;
    let dir = tempfile::tempdir()?;
    let session = Session::builder(gpu.clone())
        .socket(dir.path().join("s"))
        .sharing(options.sharing)
        .open()?;
    let producer = Producer {
        sender: Sender::new(gpu.clone()),
        stream: Stream::create(&gpu)?,
        session,
        gpu,
    };
    let mut consumer = Consumer::start(options)?;
    let torch = consumer.torch.clone();
    println!(
        "torch_producer: PyTorch {torch} opens blocks of {}",
        producer.gpu.info().name
    );
    let mut checks = Checks::default();

    for (seed, &dtype) in Dtype::ALL.iter().enumerate() {
        let (seed, layout) = (seed as u64, Layout::contiguous(dtype, &[6, 5, 4]));
        let storage = pattern(dtype, 120 * dtype.bytes() as usize, seed);
        checks.note(
            &format!("{} contiguous", dtype.name()),
            producer.look(&mut consumer, &layout, &storage, seed),
        );
    }
    for (name, layout) in [
        ("a column, x[:, 1]", view(Dtype::F32, 1, &[6], &[20])),
        ("transposed, x.t()", view(Dtype::F16, 0, &[20, 6], &[1, 20])),
        (
            "rows from an offset, x[2:5]",
            view(Dtype::I64, 40, &[3, 20], &[20, 1]),
        ),
        (
            "every third, x[::3, 1::2]",
            view(Dtype::Bf16, 1, &[2, 10], &[60, 2]),
        ),
        ("expanded, stride 0", view(Dtype::U8, 3, &[4, 7], &[0, 1])),
        ("a scalar", view(Dtype::F64, 119, &[], &[])),
        (
            "a view of no elements",
            view(Dtype::C64, 7, &[0, 3], &[3, 1]),
        ),
    ] {
        let storage = pattern(layout.dtype, 120 * layout.dtype.bytes() as usize, 5);
        checks.note(
            &format!("view: {name}"),
            producer.look(&mut consumer, &layout, &storage, 5),
        );
    }
    checks.note("a tensor of no bytes", no_bytes(&mut consumer));
    checks.note(
        "mixed types in one region (test_mixed_types_cuda_sharing)",
        mixed(&producer, &mut consumer),
    );
    checks.note(
        "the consumer's fill is seen here (test_cuda_simple)",
        filled(&producer, &mut consumer),
    );
    checks.note(
        "one block sent twice is at one address (test_cuda_simple)",
        twice(&producer, &mut consumer),
    );
    checks.note(
        "five sent and dropped at once (test_cuda_memory_allocation)",
        five(&producer, &mut consumer),
    );
    let name = format!(
        "work queued before the send is waited for by its event (test_event_multiprocess), {} MiB",
        options.big >> 20
    );
    checks.note(&name, ordered(&producer, &mut consumer, options.big));
    let big = pattern(Dtype::F32, options.big as usize, 3);
    let layout = Layout::contiguous(Dtype::F32, &[options.big / 4]);
    checks.note(
        &format!("{} MiB", options.big >> 20),
        producer.look(&mut consumer, &layout, &big, 3),
    );
    drop(big);
    let name = format!(
        "{} tensors in a row, counters at zero, files rotated (test_cuda_send_many)",
        options.count
    );
    checks.note(&name, row(&producer, &mut consumer, options.count));
    let pid = consumer.child.id();
    checks.note("the consumer ends", consumer.end());

    checks.note(
        "a killed consumer's tensors come back when its pid is gone",
        killed(&producer, options),
    );
    checks.note(
        "without a pid they are held until it is named",
        told(&producer, options),
    );
    if options.sharing == Sharing::Fd {
        pieces::check(&producer.gpu, options, &mut checks)?;
    }

    let Producer {
        sender,
        session,
        stream,
        ..
    } = producer;
    drop(sender);
    let left = [pid, std::process::id()].into_iter().find_map(left_behind);
    checks.note(
        "no file is left in /dev/shm (leak_checker)",
        left.map_or(Ok(()), |name| Err(name.into())),
    );
    checks.note("no block is left", emptied(&session));
    drop(stream);
    let Checks { passed, failed } = checks;
    println!("torch_producer: PyTorch {torch}: {passed} checks passed, {failed} failed, 0 skipped");
    Ok(failed == 0)
}

fn no_bytes(consumer: &mut Consumer) -> Result<()> {
    let layout = Layout::contiguous(Dtype::F32, &[0, 3]);
    let message = TensorMessage {
        fields: Fields::default(),
        uuid: None,
        layout,
    };
    consumer.wire.send("look 0")?;
    consumer.wire.send(message.encode()?)?;
    consumer.wire.send("")?;
    consumer.wire.agreed()
}

fn mixed(producer: &Producer, consumer: &mut Consumer) -> Result<()> {
    let kinds = [(Dtype::F32, 4000), (Dtype::U8, 1001), (Dtype::F64, 80)];
    for (dtype, bytes) in kinds {
        let block = producer.block(&pattern(dtype, bytes, 9))?;
        let layout = Layout::contiguous(dtype, &[bytes as u64 / dtype.bytes()]);
        consumer.wire.send("hold 9")?;
        consumer
            .wire
            .send(producer.message(&block, &consumer.to, &layout)?.1)?;
        consumer.wire.agreed()?;
    }
    let_go(producer, consumer, kinds.len() as u64)
}

/// Has the consumer compare once more what it holds and drop it, and sees all of it in one collect.
fn let_go(producer: &Producer, consumer: &mut Consumer, count: u64) -> Result<()> {
    if producer.sender.collect() != Collected::default() {
        return Err("something came back that is held".into());
    }
    consumer.wire.send("again")?;
    consumer.wire.agreed()?;
    consumer.wire.send("drop")?;
    consumer.wire.agreed()?;
    producer.released(count)
}

fn filled(producer: &Producer, consumer: &mut Consumer) -> Result<()> {
    let mut expected = pattern(Dtype::U8, 400, 1);
    let block = producer.block(&expected)?;
    let layout = view(Dtype::U8, 1, &[20], &[20]);
    consumer.wire.send("fill 1")?;
    consumer
        .wire
        .send(producer.message(&block, &consumer.to, &layout)?.1)?;
    consumer.wire.agreed()?;
    producer.released(1)?;
    for row in 0..20 {
        expected[1 + 20 * row] = 1;
    }
    let mut read = [0; 400];
    producer.stream.read(&*block, &mut read)?;
    match read[..] == expected {
        true => Ok(()),
        false => Err("other bytes than those filled".into()),
    }
}

fn twice(producer: &Producer, consumer: &mut Consumer) -> Result<()> {
    let block = producer.block(&pattern(Dtype::I32, 4000, 2))?;
    let layout = Layout::contiguous(Dtype::I32, &[1000]);
    consumer.wire.send("pair 2")?;
    for _ in 0..2 {
        // A counter stands for one opening: each is sent by itself.
        consumer
            .wire
            .send(producer.message(&block, &consumer.to, &layout)?.1)?;
    }
    consumer.wire.agreed()?;
    producer.released(2)
}

fn five(producer: &Producer, consumer: &mut Consumer) -> Result<()> {
    emptied(&producer.session)?;
    for seed in 0..5 {
        let block = producer.block(&pattern(Dtype::F32, 1 << 20, seed))?;
        let layout = Layout::contiguous(Dtype::F32, &[1 << 18]);
        consumer.wire.send(format!("hold {seed}"))?;
        consumer
            .wire
            .send(producer.message(&block, &consumer.to, &layout)?.1)?;
        drop(block);
        consumer.wire.agreed()?;
    }
    if producer.session.stats().live_blocks != 5 {
        return Err("a block went before it was let go of".into());
    }
    let_go(producer, consumer, 5)?;
    emptied(&producer.session)
}

/// Waits until the session has all its blocks back: it waits for the streams that used them.
fn emptied(session: &Session) -> Result<()> {
    let start = Instant::now();
    while session.stats().live_blocks > 0 {
        session.collect();
        if start.elapsed() > PATIENCE {
            return Err(format!("{} blocks stay", session.stats().live_blocks).into());
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    Ok(())
}

/// Sends while the GPU is still busy with a block: who does not wait for the event reads zeros.
fn ordered(producer: &Producer, consumer: &mut Consumer, busy: u64) -> Result<()> {
    let (scratch, expected) = (producer.session.alloc(busy.max(1 << 20))?, vec![7; 4096]);
    let block = producer.block(&[0; 4096])?;
    for _ in 0..100 {
        producer.stream.fill(&scratch, 1)?;
    }
    producer.stream.fill(&*block, 7)?;
    let layout = Layout::contiguous(Dtype::U8, &[4096]);
    let (_, message) = producer.message(&block, &consumer.to, &layout)?;
    // No pattern: only what is sent beside it is compared.
    consumer.wire.send("bytes")?;
    consumer.wire.send(message)?;
    consumer.wire.send(&expected)?;
    consumer.wire.agreed()?;
    producer.released(1)
}

fn row(producer: &Producer, consumer: &mut Consumer, count: usize) -> Result<()> {
    consumer.wire.send(format!("stream {count}"))?;
    let layout = Layout::contiguous(Dtype::U8, &[SMALL]);
    let mut answered = 0;
    for number in 0..count {
        if number - answered == WINDOW {
            consumer.wire.agreed()?;
            answered += 1;
        }
        let block = Arc::new(producer.session.alloc(SMALL)?);
        // No wait here: the event tells the consumer's stream.
        producer.stream.fill(&*block, (number % 251) as u8)?;
        consumer
            .wire
            .send(producer.message(&block, &consumer.to, &layout)?.1)?;
        if number % 64 == 63 {
            producer.sender.collect();
        }
    }
    for _ in answered..count {
        consumer.wire.agreed()?;
    }
    consumer.wire.agreed()?;
    producer.sender.collect();
    match producer.sender.outstanding().len() {
        0 => Ok(()),
        left => Err(format!("{left} are still counted").into()),
    }
}

/// Starts a consumer that opens one tensor and is sent another that it never opens, kills it, and
/// returns who it was.
fn orphan(producer: &Producer, options: &Options, by_pid: bool) -> Result<Recipient> {
    let mut consumer = Consumer::start(options)?;
    let to = if by_pid {
        consumer.to.clone()
    } else {
        Recipient::Unknown
    };
    let layout = Layout::contiguous(Dtype::U8, &[4096]);
    for command in ["hold 4", "lost"] {
        let block = producer.block(&pattern(Dtype::U8, 4096, 4))?;
        consumer.wire.send(command)?;
        consumer
            .wire
            .send(producer.message(&block, &to, &layout)?.1)?;
        consumer.wire.agreed()?;
    }
    if producer.sender.collect() != Collected::default() {
        return Err("something came back while the consumer lived".into());
    }
    let named = consumer.to.clone();
    consumer.kill()?;
    Ok(named)
}

fn killed(producer: &Producer, options: &Options) -> Result<()> {
    orphan(producer, options, true)?;
    let all_gone = producer.sender.outstanding().iter().all(|send| send.gone);
    if !all_gone {
        return Err("the report does not say that the consumer is gone".into());
    }
    match producer.sender.wait_released(PATIENCE) {
        true => Ok(()),
        false => Err("what a dead consumer held does not come back".into()),
    }
}

fn told(producer: &Producer, options: &Options) -> Result<()> {
    let consumer = orphan(producer, options, false)?;
    let left = producer.sender.outstanding();
    if producer.sender.collect() != Collected::default() || left.len() != 2 {
        return Err(format!("{} of 2 are reported as held", left.len()).into());
    }
    for send in left {
        if !producer.sender.sent_to(send.id, consumer.clone()) {
            return Err("it was not outstanding".into());
        }
    }
    match producer.sender.wait_released(PATIENCE) {
        true => Ok(()),
        false => Err("what a dead consumer held does not come back".into()),
    }
}
