//! A trainer in Python, a consumer in Rust: what an unmodified PyTorch shares is opened here.
//! Started by
//!
//! ```text
//! python3 testing/torch/trainer.py --consumer PATH_OF_THIS_PROGRAM
//! ```
//!
//! It connects to the socket it is given and does what each frame says, as `consumer.py` does in
//! the other direction: look, bytes, fill, hold, again, drop, pair, stream, lost, and `decline`,
//! which lets a tensor go without opening it. Frames are those of `gpu_tensors.py`. Each is
//! answered by `ok` or by what is wrong.

use std::collections::VecDeque;
use std::error::Error;
use std::os::unix::net::UnixStream;
use std::process::ExitCode;

use gpu_ipc::torch::{Layout, ReceivedStorage, Receiver, ReceiverStats, TensorMessage};
use gpu_ipc::{BackendKind, Stream, Wait, detect};
use wire::{PATIENCE, Result, Wire, gather, open, pattern};

mod wire;

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let done = match args.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        [socket] if !socket.starts_with('-') => consume("cuda", socket),
        [socket, backend] if !socket.starts_with('-') => consume(backend, socket),
        _ => Err(
            "usage: torch_consumer SOCKET [host|cuda|hip]; `testing/torch/trainer.py` starts it"
                .into(),
        ),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("torch_consumer: {}", chain(&*error));
            ExitCode::FAILURE
        }
    }
}

/// Returns an error's text with those of its causes.
fn chain(error: &dyn Error) -> String {
    std::iter::successors(error.source(), |error| (*error).source())
        .fold(error.to_string(), |text, error| format!("{text}: {error}"))
}

/// A tensor that is open here.
struct Tensor {
    storage: ReceivedStorage,
    layout: Layout,
}

/// The receiving side; the device is the one of the first tensor that names it.
struct Consumer {
    backend: String,
    wire: Wire,
    side: Option<(Receiver, Stream)>,
    kept: Vec<(Tensor, u64)>,
}

fn consume(backend: &str, socket: &str) -> Result<()> {
    let trainer =
        UnixStream::connect(socket).map_err(|e| format!("no trainer listens at {socket}: {e}"))?;
    let mut wire = Wire::new(trainer)?;
    wire.send(std::process::id().to_string())?;
    let mut consumer = Consumer {
        backend: backend.into(),
        wire,
        side: None,
        kept: Vec::new(),
    };
    loop {
        let line = consumer.wire.text()?;
        let words: Vec<&str> = line.split(' ').collect();
        let number = words.get(1).and_then(|word| word.parse().ok()).unwrap_or(0);
        let answer = match words[0] {
            "end" => break,
            command => consumer.run(command, number),
        };
        consumer.wire.send(
            answer
                .err()
                .map_or("ok".into(), |error| format!("{line}: {}", chain(&*error))),
        )?;
    }
    consumer.kept.clear();
    let stats = consumer.settled()?;
    if stats.opened + stats.released + stats.segments == 0 {
        return Err("nothing was opened".into());
    }
    println!(
        "torch_consumer: {} opened, {} counters decreased, {} segments left",
        stats.opened, stats.released, stats.segments
    );
    consumer.wire.send("ok")
}

impl Consumer {
    fn side(&mut self, message: &TensorMessage) -> Result<(Receiver, Stream)> {
        if self.side.is_none() {
            let kind = BackendKind::ALL
                .into_iter()
                .find(|kind| kind.name() == self.backend);
            let gpu = match (message.uuid, kind) {
                (Some(uuid), Some(kind)) => detect()?.device(kind, uuid)?,
                _ => open(&self.backend)?,
            };
            self.side = Some((Receiver::new(gpu.clone())?, Stream::create(&gpu)?));
        }
        self.side.clone().ok_or_else(|| "made above".into())
    }

    /// Opens a frame's tensor; the stream waits for the sender's work.
    fn tensor(&mut self, frame: &[u8]) -> Result<(Tensor, Stream)> {
        let message = TensorMessage::decode(frame)?;
        let (receiver, stream) = self.side(&message)?;
        let mut storage = message.fields.decode()?;
        storage.uuid = message.uuid;
        match receiver.open(&storage, Wait::Stream(&stream), None) {
            Ok(storage) => Ok((
                Tensor {
                    storage,
                    layout: message.layout,
                },
                stream,
            )),
            Err(error) => {
                // What is not opened here is not to be kept there.
                receiver.decline(&storage)?;
                Err(error.into())
            }
        }
    }

    /// Waits until the counters of what was dropped are decreased, so that the answer comes after
    /// them.
    fn settled(&self) -> Result<ReceiverStats> {
        let Some((receiver, _)) = &self.side else {
            return Ok(ReceiverStats::default());
        };
        if !receiver.wait_released(PATIENCE) {
            return Err("dropped tensors are not given back".into());
        }
        let stats = receiver.stats();
        match (stats.kept, stats.over_released) {
            (0, 0) => Ok(stats),
            _ => Err(format!("{stats:?}").into()),
        }
    }

    fn run(&mut self, command: &str, number: u64) -> Result<()> {
        match command {
            "look" => {
                // Every frame is read before anything can fail: none is taken for the next command.
                let (frame, expected) = (self.wire.receive()?, self.wire.receive()?);
                let (tensor, stream) = self.tensor(&frame)?;
                let bytes = compare(&tensor, &stream, number)?;
                if !expected.is_empty() && gather(&tensor.layout, &bytes)? != expected {
                    return Err(format!("the elements of {:?} differ", tensor.layout).into());
                }
            }
            "bytes" => {
                let (frame, expected) = (self.wire.receive()?, self.wire.receive()?);
                let (tensor, stream) = self.tensor(&frame)?;
                let bytes = contents(&tensor, &stream)?;
                if gather(&tensor.layout, &bytes)? != expected {
                    return Err("the elements differ".into());
                }
            }
            "fill" => {
                let frame = self.wire.receive()?;
                let (tensor, stream) = self.tensor(&frame)?;
                compare(&tensor, &stream, number)?;
                // Not waited for: the counter goes down when it is done.
                tensor.storage.fill(&stream, 1)?;
            }
            "hold" => {
                let frame = self.wire.receive()?;
                let (tensor, stream) = self.tensor(&frame)?;
                compare(&tensor, &stream, number)?;
                self.kept.push((tensor, number));
            }
            "again" => {
                let Some((_, stream)) = &self.side else {
                    return Err("nothing is held".into());
                };
                for (tensor, seed) in &self.kept {
                    compare(tensor, stream, *seed)?;
                }
            }
            "drop" => self.kept.clear(),
            "pair" => {
                let frames = [self.wire.receive()?, self.wire.receive()?];
                let ((one, stream), (other, _)) =
                    (self.tensor(&frames[0])?, self.tensor(&frames[1])?);
                if one.storage.device_ptr() != other.storage.device_ptr() {
                    return Err("one storage is at two addresses".into());
                }
                compare(&one, &stream, number)?;
                compare(&other, &stream, number)?;
            }
            "stream" => self.row(number)?,
            "decline" => {
                let message = TensorMessage::decode(&self.wire.receive()?)?;
                self.side(&message)?.0.decline(&message.fields.decode()?)?;
            }
            other => return Err(format!("no such command: {other}").into()),
        }
        self.settled()?;
        Ok(())
    }

    fn row(&mut self, count: u64) -> Result<()> {
        let mut last = VecDeque::new();
        for number in 0..count {
            let frame = self.wire.receive()?;
            let (tensor, stream) = self.tensor(&frame)?;
            let bytes = contents(&tensor, &stream)?;
            if bytes.is_empty() || bytes.iter().any(|&byte| u64::from(byte) != number % 251) {
                return Err(format!("tensor {number} begins with {:?}", bytes.first()).into());
            }
            last.push_back(tensor);
            if last.len() > 8 {
                last.pop_front();
            }
            self.wire.send("ok")?;
        }
        Ok(())
    }
}

/// Reads a whole storage.
fn contents(tensor: &Tensor, stream: &Stream) -> Result<Vec<u8>> {
    let mut bytes = vec![0; usize::try_from(tensor.storage.len())?];
    tensor.storage.read(stream, &mut bytes)?;
    Ok(bytes)
}

/// Compares a whole storage with its pattern, and returns it.
fn compare(tensor: &Tensor, stream: &Stream, seed: u64) -> Result<Vec<u8>> {
    let bytes = contents(tensor, stream)?;
    if bytes != pattern(tensor.layout.dtype, bytes.len(), seed) {
        return Err(format!("the storage of {:?} differs", tensor.layout).into());
    }
    Ok(bytes)
}
