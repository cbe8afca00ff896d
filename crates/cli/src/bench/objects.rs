//! Rows of objects: what a broker's memory costs to map, to swap, and to have.

use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use gpu_ipc::backend::{Access, DevicePtr, HostMemory, HostPtr, RawMemory, Sharing};
use gpu_ipc::broker::{Client, Epoch, Layout, PartSpec, Reader, Selector};
use gpu_ipc::{Gpu, Stream};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{PidfdFlags, Signal, kill_process, pidfd_open};

use super::fixture::{PATIENCE, Stage, until, within};
use super::row::{Goal, Row};
use super::sample::{Figures, Pairs};
use crate::bench::options::BenchObjectOptions;
use crate::child::{self, Child};
use crate::failure::{Failure, Result};
use crate::owner::{Owner, connect};
use crate::{Outcome, device, size};

const GIB: u64 = 1 << 30;
/// What open and advance may take beyond one and a half times the raw calls.
const BEYOND: f64 = 300_000.0;
/// What a broker may take of the device beyond its objects.
const BROKER: f64 = (16 << 20) as f64;
/// What a broker that was killed may take until it serves, beyond its death.
const RESTART: f64 = 300_000_000.0;
/// Objects that a broker has when it is killed.
const OBJECTS: u64 = 100;
/// How long the driver may take to give back what a process had that was killed.
const SOON: Duration = Duration::from_secs(10);
/// Readers of one object.
const READERS: usize = 64;

/// All rows of objects.
pub fn rows(stage: &Stage) -> Result<Vec<Row>> {
    let is_host = stage.gpu.kind().in_host_memory();
    let taken = taken(&stage.gpu)?;
    let dir = std::env::temp_dir().join(format!("gpu-ipc-bench-objects-{}", std::process::id()));
    let owner = Owner::start(&stage.gpu, dir, &["--keep-epochs", "2"])?;
    let client = owner.connect(&stage.gpu, "bench")?;
    let mut rows = Vec::new();
    let bytes = if is_host { 64 << 20 } else { 8 * GIB };
    rows.extend(open(stage, &client, bytes)?);
    rows.extend(advance(stage, &client, bytes)?);
    give_back(&client)?;
    let large = largest(stage, taken)?;
    put(&client, "large", large, 200)?;
    rows.push(successor(stage, &owner, large)?);
    rows.push(broker_memory(stage, &owner, &client, taken)?);
    rows.extend(readers(stage, &owner)?);
    give_back(&client)?;
    rows.push(restart(stage, &owner, &client)?);
    // What the host backend does is no driver's work.
    if is_host {
        rows = rows.into_iter().map(Row::without_goal).collect();
    }
    give_back(&client)?;
    Ok(rows)
}

/// Returns the bytes that are taken of the device, by everybody.
pub(super) fn taken(gpu: &Gpu) -> Result<u64> {
    let memory = gpu.backend().memory_info(gpu.device())?;
    Ok(memory.total_bytes - memory.free_bytes)
}

/// Chooses the largest object that fits with room for contexts and a copy's target.
pub(super) fn largest(stage: &Stage, before: u64) -> Result<u64> {
    if stage.gpu.kind().in_host_memory() {
        return Ok(128 << 20);
    }
    // What the last rows gave back is free when the driver says so. What is not back by then is not
    // counted on.
    let _ = within(SOON, "the memory of removed objects", || {
        taken(&stage.gpu).is_ok_and(|taken| taken <= before + (256 << 20))
    });
    let free = stage
        .gpu
        .backend()
        .memory_info(stage.gpu.device())?
        .free_bytes;
    [64, 40, 16, 8, 1]
        .map(|gib| gib * GIB)
        .into_iter()
        .find(|bytes| bytes + 4 * GIB <= free)
        .ok_or_else(|| {
            format!("{free} bytes of the device are free: too few for an object of 1 GiB").into()
        })
}

/// Puts an object of this many parts. Its contents do not matter here.
fn put(client: &Client, name: &str, bytes: u64, parts: u64) -> Result<Epoch> {
    let specs = (0..parts).map(|number| PartSpec::bytes(format!("p{number:06}"), bytes / parts));
    let specs = specs.collect::<Result<Vec<_>, _>>()?;
    let layout = Layout::pack(specs, b"")?;
    let writer = client.create(name, layout)?;
    writer
        .commit(&[])
        .and_then(|commit| commit.wait())
        .map_err(Failure::from)
}

/// Removes everything.
fn give_back(client: &Client) -> Result<()> {
    let listing = client.list()?;
    let mut names: Vec<&str> = listing
        .objects
        .iter()
        .map(|row| row.name.as_str())
        .collect();
    names.dedup();
    for name in names {
        client.remove(name)?;
    }
    Ok(())
}

/// Regions of the bare program: as long as an object's, in descriptors of its own.
struct Bare {
    gpu: Gpu,
    regions: Vec<(OwnedFd, u64)>,
    base: DevicePtr,
    mapped: Vec<(DevicePtr, RawMemory)>,
}

impl Bare {
    fn new(gpu: &Gpu, lens: &[u64]) -> Result<Bare> {
        let backend = gpu.backend();
        let mut regions = Vec::new();
        for &len in lens {
            let memory = backend.create_memory(gpu.device(), len)?;
            // SAFETY: `export_memory` asks for memory that is not yet released: just made.
            let fd = unsafe { backend.export_memory(memory) };
            // SAFETY: `release_memory` asks for the same, and this is the only release.
            unsafe { backend.release_memory(memory) }?;
            regions.push((fd?, memory.len));
        }
        let bytes = regions.iter().map(|(_, len)| len).sum();
        let base = backend.reserve_range(gpu.device(), bytes, None)?.base;
        Ok(Bare {
            gpu: gpu.clone(),
            regions,
            base,
            mapped: Vec::new(),
        })
    }

    fn map(&mut self) -> Result<()> {
        use std::os::fd::AsFd;
        let mut at = self.base;
        for (fd, len) in &self.regions {
            let backend = self.gpu.backend();
            let memory = backend.import_memory(self.gpu.device(), fd.as_fd(), *len)?;
            // SAFETY: `map_memory` asks for memory that is not released and for reserved addresses
            // with nothing on them: the range has room for all regions in order, and `unmap` takes
            // them off.
            unsafe { backend.map_memory(at, memory, Access::ReadWrite) }?;
            self.mapped.push((at, memory));
            at = at.offset(*len);
        }
        Ok(())
    }

    fn unmap(&mut self) -> Result<()> {
        for (at, memory) in self.mapped.drain(..) {
            // SAFETY: `unmap_memory` asks for what was mapped there and that no work touches it:
            // `map` did, and every copy was waited for.
            unsafe { self.gpu.backend().unmap_memory(at) }?;
            // SAFETY: `release_memory` asks for memory that was imported and is not released: once
            // for each.
            unsafe { self.gpu.backend().release_memory(memory) }?;
        }
        Ok(())
    }
}

impl Drop for Bare {
    fn drop(&mut self) {
        // What fails here has failed before; the range is left to the process' end.
        let _ = self.unmap();
    }
}

/// Waits until the link's thread has given back what was dropped, so that it does not do so under
/// the next sample.
fn settle() {
    std::thread::sleep(Duration::from_millis(5));
}

fn lens(reader: &Reader) -> Vec<u64> {
    reader.layout().regions().to_vec()
}

/// Opening an object of 1,000 parts, broker and process warm.
fn open(stage: &Stage, client: &Client, bytes: u64) -> Result<Vec<Row>> {
    put(client, "many", bytes, 1_000)?;
    let first = client.open("many")?;
    let mut bare = Bare::new(&stage.gpu, &lens(&first))?;
    drop(first);
    let mut pairs = Pairs::new(1);
    for round in 0..=stage.choose(20, 3) {
        let mut opened = None;
        let ours = || {
            opened = Some(client.open("many")?);
            Ok(())
        };
        pairs.sample(ours, || bare.map())?;
        drop(opened);
        bare.unmap()?;
        settle();
        // The first round warms the ways.
        if round == 0 {
            pairs = Pairs::new(1);
        }
    }
    let what = "open of an object of 1,000 parts, broker and process warm";
    let row = Row::new("object-open", what, "raw import and map of as many regions")
        .at(bytes, &shown(bytes));
    Ok(vec![row.measured(pairs).goal(Goal::Times(1.5, BEYOND))])
}

/// Going from one epoch to another at the same addresses.
fn advance(stage: &Stage, client: &Client, bytes: u64) -> Result<Vec<Row>> {
    put(client, "many", bytes, 1_000)?;
    let mut reader = client.open("many")?;
    let newest = reader.epoch();
    let mut bare = Bare::new(&stage.gpu, &lens(&reader))?;
    bare.map()?;
    let stream = Stream::create(&stage.gpu)?;
    let at = reader
        .device_ptr("p000000")
        .ok_or("a part without an address")?;
    let (mut raw, mut copy, mut prepared) = (Pairs::new(1), Pairs::new(1), Pairs::new(1));
    let other = |seen| {
        Selector::Epoch(
            "many".into(),
            if seen == newest {
                Epoch(newest.0 - 1)
            } else {
                newest
            },
        )
    };
    for round in 0..=stage.choose(20, 3) {
        let mut swap = || {
            reader
                .advance_to(&other(reader.epoch()))
                .map(drop)
                .map_err(Failure::from)
        };
        raw.sample(&mut swap, || bare.unmap().and_then(|()| bare.map()))?;
        settle();
        let to = bare.base;
        let copied = || {
            // SAFETY: `copy` asks for a live stream and two ranges that are valid until the copy is
            // done: all regions of both are mapped in a row, and it is waited for.
            unsafe { stage.gpu.backend().copy(stream.raw(), to, at, bytes) }?;
            stream.synchronize().map_err(Failure::from)
        };
        copy.sample(&mut swap, copied)?;
        settle();
        let mut next = reader.prepare(&other(reader.epoch()))?;
        let switch = || {
            reader
                .switch(next.take().ok_or("nothing to switch to")?)
                .map_err(Failure::from)
        };
        prepared.sample(switch, copied)?;
        settle();
        if round == 0 {
            (raw, copy, prepared) = (Pairs::new(1), Pairs::new(1), Pairs::new(1));
        }
    }
    let what = "advance to another epoch at the same addresses";
    let beside_raw = Row::new(
        "object-advance",
        what,
        "raw unmap, import and map of as many regions",
    );
    let copied = "a copy of as many bytes on the device";
    let beside_copy = Row::new("object-advance-copy", what, copied);
    let what = "the switch of an advance that was prepared";
    let switched = Row::new("object-switch-copy", what, copied);
    Ok(vec![
        beside_raw
            .at(bytes, &shown(bytes))
            .measured(raw)
            .goal(Goal::Times(1.5, BEYOND)),
        beside_copy
            .at(bytes, &shown(bytes))
            .measured(copy)
            .goal(Goal::Times(0.1, 0.0)),
        switched
            .at(bytes, &shown(bytes))
            .measured(prepared)
            .goal(Goal::Times(0.1, 0.0)),
    ])
}

/// What memory is filled from without a broker: pinned host memory, copied a piece at a time.
pub(super) struct Pinned {
    gpu: Gpu,
    stream: Stream,
    piece: u64,
    from: HostPtr,
    to: DevicePtr,
}

impl Pinned {
    /// Makes it, for so many bytes at most.
    pub(super) fn new(gpu: &Gpu, bytes: u64) -> Result<Pinned> {
        let piece = bytes.min(GIB);
        let pinned = HostMemory {
            pinned: true,
            numa_node: None,
        };
        let (stream, backend) = (Stream::create(gpu)?, gpu.backend());
        let to = backend.alloc(gpu.device(), piece, Sharing::Fd)?.base;
        let pinned = Pinned {
            from: backend.host_alloc(gpu.device(), piece as usize, pinned)?,
            to,
            piece,
            stream,
            gpu: gpu.clone(),
        };
        // The first copy warms the way.
        pinned.copy(piece)?;
        Ok(pinned)
    }

    /// Copies so many bytes, and waits.
    pub(super) fn copy(&self, bytes: u64) -> Result<()> {
        for _ in 0..bytes.div_ceil(self.piece) {
            let from = std::ptr::with_exposed_provenance(self.from.0);
            let (stream, piece) = (self.stream.raw(), self.piece as usize);
            // SAFETY: `copy_to_device` asks for a live stream and two ranges that are valid until
            // the copy is done: both have `piece` bytes, and it is waited for below.
            unsafe {
                self.gpu
                    .backend()
                    .copy_to_device(stream, self.to, from, piece)
            }?;
        }
        self.stream.synchronize().map_err(Failure::from)
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        // SAFETY: `free` asks for memory that came from `alloc`, once, and that nothing uses: every
        // copy was waited for.
        let _ = unsafe { self.gpu.backend().free(self.to) };
        // SAFETY: `host_free` asks the same of what `host_alloc` gave.
        let _ = unsafe { self.gpu.backend().host_free(self.from) };
    }
}

/// Makes the arguments of a process of the benchmark that works with a broker.
pub(super) fn process_args(stage: &Stage, owner: &Owner, process: &str, name: &str) -> Vec<String> {
    let (device, dir) = (stage.gpu.uuid().to_string(), owner.dir().to_string_lossy());
    let words = [
        "bench-process",
        process,
        "--backend",
        stage.gpu.kind().name(),
        "--device",
        &device,
        "--dir",
        &dir,
        "--name",
        name,
    ];
    words.map(str::to_owned).to_vec()
}

/// The open of a process that has just been started, beside the copy that it would need without a
/// broker.
fn successor(stage: &Stage, owner: &Owner, bytes: u64) -> Result<Row> {
    let pinned = Pinned::new(&stage.gpu, bytes)?;
    let mut pairs = Pairs::new(1);
    for _ in 0..stage.choose(3, 1) {
        let args = process_args(stage, owner, "object", "large");
        let mut child = Child::<()>::start(args.iter().map(String::as_str), PATIENCE)?;
        let opened = child.answer()?;
        child.kill()?;
        let start = Instant::now();
        pinned.copy(bytes)?;
        pairs.add(&[opened, start.elapsed().as_nanos() as u64]);
    }
    let what = "the first open of a process that replaces a killed one";
    let row = Row::new(
        "object-successor",
        what,
        "a copy of as many bytes from pinned host memory, 1 GiB at a time",
    );
    Ok(row
        .at(bytes, &shown(bytes))
        .measured(pairs)
        .goal(Goal::Times(1.0 / 200.0, 0.0)))
}

/// Lives as the successor: answers with the nanoseconds of its first open, and waits to be killed.
pub fn run_reader(options: &BenchObjectOptions) -> Outcome {
    child::live(|| -> Result<()> {
        let gpu = device::find(options.backend.kind(), &options.device)?;
        // The driver's context is nobody's choice: it is there before the clock starts.
        drop(Stream::create(&gpu)?);
        let client = connect(&gpu, &options.dir, "bench successor")?;
        let start = Instant::now();
        let reader = client.open(&options.name)?;
        child::reply(&(start.elapsed().as_nanos() as u64))?;
        child::next::<()>()?;
        drop(reader);
        Ok(())
    })
}

/// What a broker takes of the device beyond its objects.
fn broker_memory(stage: &Stage, owner: &Owner, client: &Client, before: u64) -> Result<Row> {
    let objects = client.list()?.bytes;
    let resident = owner
        .broker()
        .map_or(Ok(0), |broker| resident(broker.as_raw_nonzero().get()))?;
    let row = Row::new(
        "object-broker-memory",
        "device memory that a broker takes beyond its objects",
        "the objects",
    );
    let row = row.at(objects, &shown(objects)).bytes();
    let note = format!(
        "the broker's own memory on the host: {}",
        size::show(resident)
    );
    if stage.gpu.kind().in_host_memory() {
        // Without a device there is nothing but the process.
        return Ok(row
            .figures(
                Figures::of(vec![resident as f64], 1),
                Figures::of(vec![objects as f64], 1),
            )
            .note(note));
    }
    let beyond =
        || taken(&stage.gpu).map(|taken| taken.saturating_sub(before).saturating_sub(objects));
    // The readers before were killed, and their contexts may not be back yet.
    let _ = within(SOON, "the contexts of the dead", || {
        beyond().is_ok_and(|beyond| beyond as f64 <= BROKER)
    });
    let beyond = beyond()?;
    let met = Some(beyond as f64 <= BROKER);
    let row = row.figures(
        Figures::of(vec![beyond.max(1) as f64], 1),
        Figures::of(vec![objects as f64], 1),
    );
    Ok(row.judged("at most 16 MiB", met).note(note))
}

/// Returns the bytes that a process has for itself.
fn resident(pid: i32) -> Result<u64> {
    let path = format!("/proc/{pid}/smaps_rollup");
    let text = std::fs::read_to_string(&path).map_err(|e| format!("{path}: {e}"))?;
    let line = text
        .lines()
        .find(|line| line.starts_with("Pss:"))
        .ok_or_else(|| format!("{path} has no Pss"))?;
    let kib: Option<u64> = line
        .split_whitespace()
        .nth(1)
        .and_then(|word| word.parse().ok());
    kib.map(|kib| kib << 10)
        .ok_or_else(|| format!("{path}: {line}").into())
}

/// Many readers of one object, each a participant of its own: the last beside the first.
fn readers(stage: &Stage, owner: &Owner) -> Result<Vec<Row>> {
    let mut pairs = Pairs::new(1);
    let mut grown = 0;
    let count = stage.choose(READERS, 8);
    let clients: Vec<Client> = (0..count)
        .map(|_| owner.connect(&stage.gpu, "bench reader"))
        .collect::<Result<_, _>>()?;
    for round in 0..=stage.choose(8, 1) {
        let before = taken(&stage.gpu)?;
        let mut opened = Vec::new();
        let mut times = Vec::new();
        for client in &clients {
            let start = Instant::now();
            opened.push(client.open("large")?);
            times.push(start.elapsed().as_nanos() as u64);
        }
        // On the host backend a mapping counts for its process, whatever it shares.
        if !stage.gpu.kind().in_host_memory() {
            grown = grown.max(taken(&stage.gpu)?.saturating_sub(before));
        }
        drop(opened);
        settle();
        // The first round warms the ways of each connection.
        if round > 0 {
            pairs.add(&[times[count - 1], times[0]]);
        }
    }
    let what = "open by the last of N readers, each connected for itself";
    let row = Row::new("object-readers", what, "the open by the first of them")
        .at(count as u64, &count.to_string());
    let row = row.measured(pairs);
    let as_fast = row.ratio.is_some_and(|ratio| ratio <= 1.25);
    let note = format!("device memory that all of them took: {}", size::show(grown));
    let goal = "at most 1.25 x floor, and 16 MiB of device memory for all";
    Ok(vec![
        row.judged(goal, Some(as_fast && grown as f64 <= BROKER))
            .note(note),
    ])
}

/// From a broker's death until an open is answered by the next.
fn restart(stage: &Stage, owner: &Owner, client: &Client) -> Result<Row> {
    let objects = stage.choose(OBJECTS, 5);
    for number in 0..objects {
        put(client, &format!("small{number}"), 4096, 1)?;
    }
    let mut pairs = Pairs::new(1);
    for _ in 0..stage.choose(5, 1) {
        let broker = owner.broker().ok_or("no broker holds the lock")?;
        let pidfd =
            pidfd_open(broker, PidfdFlags::empty()).map_err(|e| format!("pidfd_open: {e}"))?;
        let killed = Instant::now();
        kill_process(broker, Signal::KILL).map_err(|e| format!("kill: {e}"))?;
        let limit = Timespec {
            tv_sec: PATIENCE.as_secs().cast_signed(),
            tv_nsec: 0,
        };
        poll(&mut [PollFd::new(&pidfd, PollFlags::IN)], Some(&limit))
            .map_err(|e| format!("poll: {e}"))?;
        let dead = Instant::now();
        let next = owner.connect(&stage.gpu, "bench after a restart")?;
        let served = next.open(&format!("small{}", objects - 1))?;
        pairs.ours.push(dead.elapsed().as_nanos() as f64);
        pairs.floor.push((dead - killed).as_nanos().max(1) as f64);
        drop(served);
        // The client that is to remove everything has found the next broker too.
        until("the connection", || client.is_connected())?;
    }
    let what = "from a broker's death until its successor has answered an open";
    let row = Row::new(
        "object-restart",
        what,
        "its own death, from the kill to its pidfd",
    );
    Ok(row
        .at(objects, &objects.to_string())
        .measured(pairs)
        .goal(Goal::AtMost(RESTART)))
}

pub(super) fn shown(bytes: u64) -> String {
    size::show(bytes).replace(' ', "")
}
