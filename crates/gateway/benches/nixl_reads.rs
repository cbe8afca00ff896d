//! Measures reads by NIXL between two processes with each kind of memory, and a plain copy between
//! the two devices.
//!
//!     UCX_TLS=tcp GPU_IPC_NIXL=$(ci/test/nixl-wheel) \
//!         cargo bench --manifest-path crates/gateway/Cargo.toml --bench nixl_reads -- [MIB]...
//!
//! `--from cuda:0 --to cuda:1` reads from one GPU to another. A read is given to NIXL whole, and
//! cut as the gateway cuts it, in turns over the same connection, by an agent that polls, as a pull
//! has it, and by one with NIXL's thread. With `--cuts` plain memory is also read in pieces of
//! several lengths, with one, two and four under way. A figure is the median of its rounds after
//! the first, which makes the connection; every byte is looked at once. What fails is said, and the
//! rest goes on.

use std::error::Error;
use std::io::{Read, Write};
use std::process::{ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

use clap::{Parser, ValueEnum};
use gateway::transport::nixl::{Nixl, ask_the_driver};
use gateway::transport::{Pair, Peer, Place, Progress, RemoteSpan, Span, Transport};
use gpu_ipc::backend::{DevicePtr, HostMemory, Sharing};
use gpu_ipc::{BackendKind, Gpu, Stream, detect};

/// Rounds of a size, the first and uncounted one among them.
const ROUNDS: usize = 10;
/// After this time no round is begun.
const ENOUGH: Duration = Duration::from_secs(4);
/// A size is left out when the one before took longer than this.
const SLOW: Duration = Duration::from_millis(1500);
/// More pinned memory than this is not taken.
const MOST_PINNED: u64 = 256 << 20;
/// Bytes looked at or written at a time.
const CHUNK: u64 = 16 << 20;
/// Rounds of one cut, the first and uncounted one among them.
const CUT_ROUNDS: usize = 4;
/// After this time no further cut of a size is tried.
const CUT_ENOUGH: Duration = Duration::from_secs(6);
/// MiB of the pieces of cuts, and how many are under way.
const CUTS: [u64; 6] = [16, 32, 64, 128, 256, 1024];
const UNDER_WAY: [usize; 3] = [1, 2, 4];

type Outcome<T> = Result<T, Box<dyn Error>>;

#[derive(Parser)]
struct Options {
    /// The sizes to read, in MiB.
    #[arg(default_values_t = [1, 64, 256])]
    mib: Vec<u64>,
    /// The device to read from.
    #[arg(long, default_value = "host:0")]
    from: String,
    /// The device to read to.
    #[arg(long, default_value = "host:0")]
    to: String,
    /// Prints the figures as JSON.
    #[arg(long)]
    json: bool,
    /// Reads plain memory in pieces of several lengths too.
    #[arg(long)]
    cuts: bool,
    /// Serves memory of this kind to the process that started this one.
    #[arg(long, hide = true)]
    origin: Option<Kind>,
    /// Cargo's own.
    #[arg(long, hide = true)]
    bench: bool,
}

/// What memory is taken by.
#[derive(ValueEnum, Clone, Copy, PartialEq, Eq, Debug)]
enum Kind {
    /// `cuMemCreate` with a descriptor, as objects are.
    Virtual,
    /// `cudaMalloc`.
    Plain,
    /// Pinned memory of the host.
    Pinned,
}

impl Kind {
    fn name(self) -> &'static str {
        match self {
            Kind::Virtual => "virtual",
            Kind::Plain => "plain",
            Kind::Pinned => "pinned",
        }
    }

    fn most(self) -> u64 {
        if self == Kind::Pinned {
            MOST_PINNED
        } else {
            u64::MAX
        }
    }
}

struct Row {
    what: &'static str,
    agent: &'static str,
    mib: u64,
    whole: f64,
    pieces: f64,
}

/// A read in pieces of one length.
struct Cut {
    agent: &'static str,
    mib: u64,
    piece_mib: u64,
    under_way: usize,
    gb_s: f64,
}

/// What makes an agent's reads go on.
const AGENTS: [&str; 2] = ["polls", "thread"];

impl Row {
    fn json(&self) -> serde_json::Value {
        let Row {
            what,
            agent,
            mib,
            whole,
            pieces,
        } = self;
        serde_json::json!({ "what": what, "agent": agent, "mib": mib, "whole": whole, "pieces": pieces })
    }
}

impl Cut {
    fn json(&self) -> serde_json::Value {
        let Cut {
            agent,
            mib,
            piece_mib,
            under_way,
            gb_s,
        } = self;
        serde_json::json!({ "agent": agent, "mib": mib, "piece_mib": piece_mib, "under_way": under_way, "gb_s": gb_s })
    }
}

fn main() -> Outcome<()> {
    // SAFETY: `ask_the_driver` asks that no other thread runs: this one has started none.
    unsafe { ask_the_driver() };
    let options = Options::parse();
    let largest = options.mib.iter().max().map_or(0, |mib| mib << 20);
    if let Some(kind) = options.origin {
        return serve(&device(&options.from)?, kind, largest.min(kind.most()));
    }
    let gpu = device(&options.to)?;
    // On the host one kind is as another.
    let kinds: &[Kind] = if gpu.kind().in_host_memory() {
        &[Kind::Virtual]
    } else {
        &[Kind::Plain, Kind::Virtual, Kind::Pinned]
    };
    let (mut rows, mut cuts) = (Vec::new(), Vec::new());
    for &kind in kinds {
        for agent in AGENTS {
            // Slow memory is slow by either.
            if agent == AGENTS[1] && kind != kinds[0] {
                continue;
            }
            if let Err(error) = reads(&options, &gpu, kind, agent, &mut rows, &mut cuts) {
                eprintln!("nixl_reads: {} memory, {agent}: {error}", kind.name());
            }
        }
    }
    if options.from != options.to
        && let Err(error) = copies(&options, &gpu, &mut rows)
    {
        eprintln!("nixl_reads: plain copies: {error}");
    }
    if options.json {
        let rows: Vec<_> = rows.iter().map(Row::json).collect();
        let cuts: Vec<_> = cuts.iter().map(Cut::json).collect();
        println!("{}", serde_json::json!({ "rows": rows, "cuts": cuts }));
        return Ok(());
    }
    println!(
        "{:>12} {:>7} {:>8} {:>12} {:>12} {:>7}",
        "memory", "agent", "MiB", "pieces GB/s", "whole GB/s", "ratio"
    );
    for Row {
        what,
        agent,
        mib,
        whole,
        pieces,
    } in rows
    {
        println!(
            "{what:>12} {agent:>7} {mib:>8} {pieces:>12.3} {whole:>12.3} {:>7.2}",
            pieces / whole
        );
    }
    for Cut {
        agent,
        mib,
        piece_mib,
        under_way,
        gb_s,
    } in cuts
    {
        println!(
            "cut: {agent:>7} {mib:>6} MiB in pieces of {piece_mib:>4} MiB, {under_way} under way: {gb_s:>8.3} GB/s"
        );
    }
    Ok(())
}

/// Reads all sizes from a process of its own.
fn reads(
    options: &Options,
    gpu: &Gpu,
    kind: Kind,
    agent: &'static str,
    rows: &mut Vec<Row>,
    cuts: &mut Vec<Cut>,
) -> Outcome<()> {
    let sizes: Vec<u64> = options
        .mib
        .iter()
        .map(|mib| mib << 20)
        .filter(|bytes| *bytes <= kind.most())
        .collect();
    let Some(&largest) = sizes.iter().max() else {
        return Ok(());
    };
    let here = take(gpu, kind, largest)?;
    let mut origin = Command::new(std::env::current_exe()?)
        .args(options.mib.iter().map(u64::to_string))
        .args(["--from", &options.from, "--origin", kind.name()])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()?;
    let mut output = origin.stdout.take().ok_or("no pipe")?;
    let address = number(&mut output)?;
    let place = match number(&mut output)? {
        0 => Place::Host,
        ordinal => Place::Device(u32::try_from(ordinal - 1)?),
    };
    let mut metadata = vec![0; usize::try_from(number(&mut output)?)?];
    output.read_exact(&mut metadata)?;

    let start = if agent == AGENTS[0] {
        Nixl::start_reader
    } else {
        Nixl::start
    };
    let mut nixl = start(&format!("reads-replica-{}-{agent}", kind.name()), None)?;
    // SAFETY: `register`: the memory is never freed.
    let _registration = unsafe { nixl.register(&[here]) }?;
    let ours = nixl.load_peer(&metadata)?;
    nixl.set_pieces(u64::MAX, 1);
    let raw = nixl.load_peer(&metadata)?;
    for bytes in sizes {
        let pair = Pair {
            from: RemoteSpan {
                address,
                bytes,
                place,
            },
            to: Span { bytes, ..here },
        };
        let mut times = [Vec::new(), Vec::new()];
        let begun = Instant::now();
        for round in 0..ROUNDS {
            for (peer, times) in [&*ours, &*raw].into_iter().zip(&mut times) {
                let time = read(peer, pair)?;
                if round > 0 || begun.elapsed() > ENOUGH {
                    times.push(time);
                }
            }
            if begun.elapsed() > ENOUGH && times.iter().all(|times| !times.is_empty()) {
                break;
            }
        }
        check(gpu, here, bytes)?;
        let [pieces, whole] = times.map(median);
        let speed = |time: Duration| bytes as f64 / time.as_secs_f64() / 1e9;
        rows.push(Row {
            what: kind.name(),
            agent,
            mib: bytes >> 20,
            whole: speed(whole),
            pieces: speed(pieces),
        });
        if whole > SLOW {
            break;
        }
        if options.cuts && (kind == Kind::Plain || gpu.kind().in_host_memory()) {
            let begun = Instant::now();
            let all = UNDER_WAY
                .iter()
                .flat_map(|&under_way| CUTS.iter().map(move |&mib| (mib, under_way)));
            for (piece_mib, under_way) in all.filter(|(mib, _)| mib << 20 < bytes) {
                if begun.elapsed() > CUT_ENOUGH {
                    break;
                }
                nixl.set_pieces(piece_mib << 20, under_way);
                let cut = nixl.load_peer(&metadata)?;
                let times = (0..CUT_ROUNDS)
                    .map(|_| read(&*cut, pair))
                    .collect::<Outcome<Vec<_>>>()?;
                let gb_s = speed(median(times[1..].to_vec()));
                cuts.push(Cut {
                    agent,
                    mib: bytes >> 20,
                    piece_mib,
                    under_way,
                    gb_s,
                });
            }
            check(gpu, here, bytes)?;
        }
    }
    drop(origin.stdin.take());
    origin.wait()?;
    Ok(())
}

/// Copies all sizes from one device to the other, in this process.
fn copies(options: &Options, to: &Gpu, rows: &mut Vec<Row>) -> Outcome<()> {
    let from = device(&options.from)?;
    to.backend()
        .enable_peer_access(to.device(), from.device())?;
    from.backend()
        .enable_peer_access(from.device(), to.device())?;
    let largest = options.mib.iter().max().map_or(0, |mib| mib << 20);
    let (source, target) = (
        take(&from, Kind::Plain, largest)?,
        take(to, Kind::Plain, largest)?,
    );
    fill(&from, source)?;
    let stream = Stream::create(to)?;
    for bytes in options.mib.iter().map(|mib| mib << 20) {
        let mut times = Vec::new();
        for round in 0..ROUNDS {
            let begun = Instant::now();
            let (to_at, from_at) = (DevicePtr(target.address), DevicePtr(source.address));
            // SAFETY: `copy`: both are allocations of that length that are never freed, and the
            // stream lives.
            unsafe { to.backend().copy(stream.raw(), to_at, from_at, bytes) }?;
            stream.synchronize()?;
            if round > 0 {
                times.push(begun.elapsed());
            }
        }
        check(to, target, bytes)?;
        let speed = bytes as f64 / median(times).as_secs_f64() / 1e9;
        rows.push(Row {
            what: "peer copy",
            agent: "none",
            mib: bytes >> 20,
            whole: speed,
            pieces: speed,
        });
    }
    Ok(())
}

/// Reads once, and returns how long it took.
fn read(peer: &dyn Peer, pair: Pair) -> Outcome<Duration> {
    let begun = Instant::now();
    // SAFETY: `read`: the destination is never freed, and nobody looks at it before the transfer
    // has ended.
    let mut transfer = unsafe { peer.read(&[pair]) }?;
    while transfer.poll()? != Progress::Done {
        std::thread::yield_now();
    }
    Ok(begun.elapsed())
}

/// Offers memory until the other process closes the pipe.
fn serve(gpu: &Gpu, kind: Kind, bytes: u64) -> Outcome<()> {
    let here = take(gpu, kind, bytes)?;
    fill(gpu, here)?;
    let nixl = Nixl::start(
        &format!("reads-origin-{}-{}", kind.name(), std::process::id()),
        None,
    )?;
    // SAFETY: `register`: the memory is never freed.
    let registration = unsafe { nixl.register(&[here]) }?;
    let metadata = nixl.metadata(&[registration.number()])?;
    let place = match here.place {
        Place::Host => 0,
        Place::Device(ordinal) => u64::from(ordinal) + 1,
    };
    let mut output = std::io::stdout().lock();
    for number in [here.address, place, metadata.len() as u64] {
        output.write_all(&number.to_le_bytes())?;
    }
    output.write_all(&metadata)?;
    output.flush()?;
    std::io::stdin().read_to_end(&mut Vec::new())?;
    Ok(())
}

fn number(from: &mut ChildStdout) -> Outcome<u64> {
    let mut bytes = [0; 8];
    from.read_exact(&mut bytes)?;
    Ok(u64::from_le_bytes(bytes))
}

fn device(name: &str) -> Outcome<Gpu> {
    let found = detect()?;
    let named = |gpu: &&Gpu| format!("{}:{}", gpu.kind(), gpu.device().0) == name;
    Ok(found
        .gpus()
        .iter()
        .find(named)
        .cloned()
        .ok_or_else(|| format!("no device {name}"))?)
}

/// Takes memory that is never freed: a transfer may outlast everything else.
fn take(gpu: &Gpu, kind: Kind, bytes: u64) -> Outcome<Span> {
    let place = match (gpu.kind(), kind) {
        (BackendKind::Host, _) | (_, Kind::Pinned) => Place::Host,
        _ => Place::Device(gpu.device().0),
    };
    let sharing = if kind == Kind::Plain {
        Sharing::Handle
    } else {
        Sharing::Fd
    };
    let address = if kind == Kind::Pinned {
        let memory = HostMemory {
            pinned: true,
            numa_node: None,
        };
        gpu.backend()
            .host_alloc(gpu.device(), usize::try_from(bytes)?, memory)?
            .0 as u64
    } else {
        gpu.backend().alloc(gpu.device(), bytes, sharing)?.base.0
    };
    Ok(Span {
        address,
        bytes,
        place,
    })
}

/// Writes what [`check`] looks for.
fn fill(gpu: &Gpu, span: Span) -> Outcome<()> {
    let stream = Stream::create(gpu)?;
    let mut chunk = vec![0; usize::try_from(CHUNK)?];
    let mut at = 0;
    while at < span.bytes {
        let bytes = usize::try_from(CHUNK.min(span.bytes - at))?;
        contents(&mut chunk[..bytes], at);
        let to = span.address + at;
        if span.place == Place::Host {
            // SAFETY: `copy_nonoverlapping`: the span is mapped, is nobody else's, and is no vector
            // of this process.
            unsafe { std::ptr::copy_nonoverlapping(chunk.as_ptr(), to as *mut u8, bytes) };
        } else {
            // SAFETY: `copy_to_device`: the span is the device's, and both stay until the stream is
            // done.
            unsafe {
                gpu.backend()
                    .copy_to_device(stream.raw(), DevicePtr(to), chunk.as_ptr(), bytes)
            }?;
            stream.synchronize()?;
        }
        at += bytes as u64;
    }
    Ok(())
}

/// Looks at every byte.
fn check(gpu: &Gpu, span: Span, bytes: u64) -> Outcome<()> {
    let stream = Stream::create(gpu)?;
    let (mut right, mut found) = (
        vec![0; usize::try_from(CHUNK)?],
        vec![0; usize::try_from(CHUNK)?],
    );
    let mut at = 0;
    while at < bytes {
        let length = usize::try_from(CHUNK.min(bytes - at))?;
        contents(&mut right[..length], at);
        let from = span.address + at;
        if span.place == Place::Host {
            // SAFETY: `copy_nonoverlapping`: the span is mapped, no transfer writes to it, and it
            // is no vector here.
            unsafe { std::ptr::copy_nonoverlapping(from as *const u8, found.as_mut_ptr(), length) };
        } else {
            // SAFETY: `copy_to_host`: the span is the device's, and both stay until the stream is
            // done.
            unsafe {
                gpu.backend().copy_to_host(
                    stream.raw(),
                    found.as_mut_ptr(),
                    DevicePtr(from),
                    length,
                )
            }?;
            stream.synchronize()?;
        }
        if found[..length] != right[..length] {
            return Err(
                format!("bytes {at} to {} of {bytes} are wrong", at + length as u64).into(),
            );
        }
        at += length as u64;
    }
    Ok(())
}

/// Makes the bytes of a place, a multiple of 8, and after it: no two words of 8 bytes are equal.
fn contents(into: &mut [u8], from: u64) {
    for (index, word) in into.chunks_mut(8).enumerate() {
        let value = (from / 8 + index as u64 + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15);
        word.copy_from_slice(&value.to_le_bytes()[..word.len()]);
    }
}

fn median(mut times: Vec<Duration>) -> Duration {
    times.sort_unstable();
    times[times.len() / 2]
}
