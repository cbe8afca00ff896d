//! What orders GPU work: words in shared memory, and interprocess events.

use std::os::fd::{AsFd, OwnedFd};
use std::ptr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use gpu_api::{
    DevicePtr, EventHandle, EventKind, GpuCopies, GpuEventHandles, GpuEvents, GpuMemory,
    GpuStreams, GpuWords, HostPtr, RawEvent, RawStream, Sharing, StreamOp, WordPtr,
};
use rustix::mm::{MapFlags, ProtFlags};

use crate::runtime::{Runtime, Seen, expect, told};

const BYTES: usize = 4096;
const LEN: u64 = 2 << 20;
/// More than the hardware's queues that AMD spreads streams over, so that some must share one with
/// a waiting stream.
const STREAMS: usize = 16;
/// More recordings than the 32 that some runtimes count before they start over.
const ROUNDS: usize = 40;

/// The first of the words that streams write after their wait.
const MANY: usize = 16;
/// What work of a moment may take.
const MOMENT: Duration = Duration::from_secs(5);

/// A page of shared memory that streams write and wait for. Kept until the process ends.
struct Words {
    start: *mut AtomicU64,
    registered: WordPtr,
}

impl Words {
    fn map(runtime: &Runtime, file: &OwnedFd) -> Result<Words, String> {
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: `mmap` without a fixed address has no conditions.
        let start = unsafe {
            rustix::mm::mmap(
                ptr::null_mut(),
                BYTES,
                protection,
                MapFlags::SHARED,
                file,
                0,
            )
        };
        let start = start.map_err(|errno| format!("mmap: {errno}"))?;
        let at = HostPtr(start.expose_provenance());
        // SAFETY: `register_words` asks for bytes that stay mapped: until the process ends.
        let registered = unsafe { runtime.hip.register_words(at, BYTES) }.map_err(told)?;
        Ok(Words {
            start: start.cast(),
            registered,
        })
    }

    fn get(&self, index: usize) -> &AtomicU64 {
        assert!(index < BYTES / size_of::<u64>(), "the page has fewer words");
        // SAFETY: `add` stays within the page: just asserted.
        let word = unsafe { self.start.add(index) };
        // SAFETY: the reference is to an aligned word of a page that stays mapped, and that
        // everybody uses atomically.
        unsafe { &*word }
    }

    fn load(&self, index: usize) -> u64 {
        self.get(index).load(Ordering::Acquire)
    }

    fn store(&self, index: usize, value: u64) {
        self.get(index).store(value, Ordering::Release);
    }

    /// Ends every wait of this page.
    fn end_waits(&self) {
        (0..BYTES / size_of::<u64>()).for_each(|index| self.store(index, 1 << 62));
    }

    fn await_in(&self, runtime: &Runtime, stream: RawStream, index: usize, value: u64) -> Seen {
        self.queue(
            runtime,
            stream,
            StreamOp::WaitGeq {
                word: self.registered.word(index),
                value,
            },
        )
    }

    fn write_in(&self, runtime: &Runtime, stream: RawStream, index: usize, value: u64) -> Seen {
        self.queue(
            runtime,
            stream,
            StreamOp::Write {
                word: self.registered.word(index),
                value,
            },
        )
    }

    fn queue(&self, runtime: &Runtime, stream: RawStream, op: StreamOp) -> Seen {
        // SAFETY: `stream_batch` asks for a live stream and for words that stay registered: both
        // until the process ends.
        unsafe { runtime.hip.stream_batch(stream, &[op]) }.map_err(told)
    }
}

/// Memory that streams fill: two halves of a length.
struct Halves {
    first: DevicePtr,
}

impl Halves {
    fn alloc(runtime: &Runtime) -> Result<Halves, String> {
        Ok(Halves {
            first: runtime
                .hip
                .alloc(runtime.device, 2 * LEN, Sharing::Handle)
                .map_err(told)?
                .base,
        })
    }

    fn second(&self) -> DevicePtr {
        self.first.offset(LEN)
    }

    /// Queues a fill of the first half and a copy of it to the second.
    fn work(&self, runtime: &Runtime, stream: RawStream, byte: u8) -> Seen {
        // SAFETY: `fill` asks for a live stream and a range that stays valid: both until the
        // process ends.
        unsafe { runtime.hip.fill(stream, self.first, byte, LEN) }.map_err(told)?;
        // SAFETY: `copy` asks for the same of both ranges.
        unsafe { runtime.hip.copy(stream, self.second(), self.first, LEN) }.map_err(told)
    }

    /// Says whether the work is done, by the last bytes of the copy.
    fn is_done(&self, runtime: &Runtime, stream: RawStream, byte: u8) -> Result<bool, String> {
        Ok(
            runtime.read_by(stream, self.second().offset(LEN - 8))?
                == u64::from_le_bytes([byte; 8]),
        )
    }
}

fn shared_words(runtime: &Runtime) -> Result<(OwnedFd, Words), String> {
    let file = rustix::fs::memfd_create("gpu-ipc-probe", rustix::fs::MemfdFlags::CLOEXEC);
    let file = file.map_err(|errno| format!("memfd_create: {errno}"))?;
    rustix::fs::ftruncate(&file, BYTES as u64).map_err(|errno| format!("ftruncate: {errno}"))?;
    let words = Words::map(runtime, &file)?;
    Ok((file, words))
}

/// Looks until the processor sees a word's value. A write that never comes is waited for until this
/// process is killed.
fn await_word(words: &Words, index: usize, value: u64) {
    while words.load(index) < value {
        std::thread::yield_now();
    }
}

pub(crate) fn words_here(runtime: &Runtime) -> Seen {
    let (file, words) = shared_words(runtime)?;
    let memory = Halves::alloc(runtime)?;
    let other = runtime.hip.create_stream(runtime.device).map_err(told)?;
    // A write comes after the work before it, however long that takes.
    let go = runtime.hold(runtime.stream)?;
    memory.work(runtime, runtime.stream, 7)?;
    words.write_in(runtime, runtime.stream, 1, 5)?;
    expect(
        "a stream's write waits for the work before it",
        words.load(1) == 0,
    )?;
    drop(go);
    runtime.synchronize(runtime.stream)?;
    expect("a stream writes a word", words.load(1) == 5)?;
    expect(
        "the work before a write is done",
        memory.is_done(runtime, other, 7)?,
    )?;
    // And so it does in passing, as the processor and another stream see it.
    for round in 8..8 + ROUNDS as u8 {
        memory.work(runtime, runtime.stream, round)?;
        words.write_in(runtime, runtime.stream, 1, round.into())?;
        await_word(&words, 1, round.into());
        expect(
            "the work before a write is done when it is seen",
            memory.is_done(runtime, other, round)?,
        )?;
    }
    // The same between two processes.
    runtime.channel.send(b"w", Some(file.as_fd()))?;
    memory.work(runtime, runtime.stream, 9)?;
    words.write_in(runtime, runtime.stream, 4, 9)?;
    runtime.channel.await_point(b'd')?;
    expect("a stream there writes a word of both", words.load(5) == 1)
}

pub(crate) fn words_there(runtime: &Runtime) -> Seen {
    let (_, file) = runtime.channel.receive::<1>()?;
    let words = Words::map(runtime, &file.ok_or("no descriptor came")?)?;
    await_word(&words, 4, 9);
    words.write_in(runtime, runtime.stream, 5, 1)?;
    runtime.synchronize(runtime.stream)?;
    runtime.channel.tell(b'd')
}

/// Counts the hardware queues that AMD spreads a device's streams over.
fn hardware_queues() -> usize {
    std::env::var("GPU_MAX_HW_QUEUES")
        .ok()
        .and_then(|text| text.parse().ok())
        .unwrap_or(4)
}

/// Waits until a stream is idle, for no longer than work of a moment may take. Otherwise every wait
/// of this page ends, so that none spins on when this process is killed.
fn await_idle(runtime: &Runtime, words: &Words, stream: RawStream, what: &str) -> Seen {
    let until = Instant::now() + MOMENT;
    while !runtime.is_idle(stream)? {
        if Instant::now() > until {
            words.end_waits();
            return Err(format!("not so: {what}"));
        }
        std::thread::yield_now();
    }
    Ok(())
}

pub(crate) fn waits_here(runtime: &Runtime) -> Seen {
    let (file, words) = shared_words(runtime)?;
    let stream = || runtime.hip.create_stream(runtime.device).map_err(told);
    let memory = Halves::alloc(runtime)?;

    // More streams wait at once than there are queues of the hardware, and others work on,
    // whichever they share.
    let held = (0..=hardware_queues())
        .map(|_| stream())
        .collect::<Result<Vec<_>, _>>()?;
    for (n, &held) in held.iter().enumerate() {
        words.await_in(runtime, held, 0, 1)?;
        words.write_in(runtime, held, MANY + n, 5)?;
    }
    for _ in 0..STREAMS {
        let other = stream()?;
        memory.work(runtime, other, 7)?;
        words.write_in(runtime, other, 2, 1)?;
        await_idle(
            runtime,
            &words,
            other,
            "more streams than there are hardware queues wait, and another works on",
        )?;
    }
    for (n, &held) in held.iter().enumerate() {
        expect(
            "a stream waits for a word",
            !runtime.is_idle(held)? && words.load(MANY + n) == 0,
        )?;
    }
    words.store(0, 1);
    for (n, &held) in held.iter().enumerate() {
        await_idle(runtime, &words, held, "a wait ends")?;
        expect("a stream goes on after its wait", words.load(MANY + n) == 5)?;
    }

    // A wait ends at its value and above, up to the value that stands for the producer's death.
    for (value, ends) in [(4, false), (5, true), (6, true), (1 << 62, true)] {
        let waiting = stream()?;
        words.store(3, value);
        words.await_in(runtime, waiting, 3, 5)?;
        if !ends {
            let other = stream()?;
            words.write_in(runtime, other, 2, 2)?;
            await_idle(
                runtime,
                &words,
                other,
                "one stream waits and another works on",
            )?;
            expect("a wait for 5 does not end at 4", !runtime.is_idle(waiting)?)?;
            words.store(3, 5);
        }
        await_idle(runtime, &words, waiting, "a wait for 5 ends at 5 and above")?;
    }

    // The same between two processes.
    runtime.channel.send(b"w", Some(file.as_fd()))?;
    runtime.channel.await_point(b'q')?;
    expect("a stream there waits", words.load(5) == 0)?;
    memory.work(runtime, runtime.stream, 9)?;
    words.write_in(runtime, runtime.stream, 4, 9)?;
    runtime.channel.await_point(b'd')?;
    expect("a stream there went on", words.load(5) == 1)?;
    runtime.channel.await_point(b'q')?;
    words.store(6, 1 << 62);
    runtime.channel.await_point(b'd')
}

pub(crate) fn waits_there(runtime: &Runtime) -> Seen {
    let (_, file) = runtime.channel.receive::<1>()?;
    let words = Words::map(runtime, &file.ok_or("no descriptor came")?)?;
    words.await_in(runtime, runtime.stream, 4, 9)?;
    words.write_in(runtime, runtime.stream, 5, 1)?;
    expect("a stream here waits", !runtime.is_idle(runtime.stream)?)?;
    runtime.channel.tell(b'q')?;
    await_idle(
        runtime,
        &words,
        runtime.stream,
        "a write there ends a wait here",
    )?;
    runtime.channel.tell(b'd')?;
    // A word that a processor there writes ends a wait here: so are the waiters of a dead producer
    // let go.
    words.await_in(runtime, runtime.stream, 6, 3)?;
    runtime.channel.tell(b'q')?;
    await_idle(
        runtime,
        &words,
        runtime.stream,
        "a processor there ends a wait here",
    )?;
    runtime.channel.tell(b'd')
}

pub(crate) fn events_here(runtime: &Runtime) -> Seen {
    let event = runtime
        .hip
        .create_event(runtime.device, EventKind::Interprocess)
        .map_err(told)?;
    for round in 0..ROUNDS + 2 {
        let go = runtime.hold(runtime.stream)?;
        // SAFETY: `record_event` asks for a live event and stream of one device: until the process
        // ends.
        unsafe { runtime.hip.record_event(event, runtime.stream) }.map_err(told)?;
        if round == 0 {
            // SAFETY: `event_handle` asks for a live event: until the process ends.
            let handle = unsafe { runtime.hip.event_handle(event) }.map_err(told)?;
            runtime.channel.send(&handle.0, None)?;
        }
        runtime.channel.tell(b'r')?;
        runtime.channel.await_point(b'q')?;
        drop(go);
        runtime.channel.await_point(b'd')?;
        runtime.synchronize(runtime.stream)?;
    }
    Ok(())
}

pub(crate) fn events_there(runtime: &Runtime) -> Seen {
    let (handle, _) = runtime.channel.receive()?;
    let open = || {
        runtime
            .hip
            .open_event(runtime.device, &EventHandle(handle))
            .map_err(told)
    };
    let mut event = open()?;
    for round in 0..ROUNDS + 2 {
        if round == ROUNDS {
            // Some runtimes forget the event for everybody when one importer destroys it. SAFETY:
            // `destroy_event` asks for an event that nobody uses afterwards: it is replaced.
            unsafe { runtime.hip.destroy_event(event) }.map_err(told)?;
            event = open()?;
        }
        wait_once(runtime, event)?;
    }
    Ok(())
}

fn wait_once(runtime: &Runtime, event: RawEvent) -> Seen {
    runtime.channel.await_point(b'r')?;
    // A runtime that blocks here blocks until the other side goes on, and that waits for this one.
    // SAFETY: `stream_wait_event` asks for a live stream and event: the latter is the caller's.
    unsafe { runtime.hip.stream_wait_event(runtime.stream, event) }.map_err(told)?;
    expect(
        "a stream waits for the event",
        !runtime.is_idle(runtime.stream)?,
    )?;
    runtime.channel.tell(b'q')?;
    runtime.synchronize(runtime.stream)?;
    runtime.channel.tell(b'd')
}
