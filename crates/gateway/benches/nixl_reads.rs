//! Measures reads by NIXL between two processes: as the gateway does them, beside NIXL with each range in one request.
//!
//!     UCX_TLS=tcp GPU_IPC_NIXL=$(ci/nixl-wheel) \
//!         cargo bench --manifest-path crates/gateway/Cargo.toml --bench nixl_reads -- [MIB]...
//!
//! Both go over the same connection, in turns. A row is the median of its rounds, with every byte looked at once.

use std::error::Error;
use std::io::{Read, Write};
use std::process::{Command, Stdio};
use std::time::Instant;

use gateway::transport::nixl::Nixl;
use gateway::transport::{Pair, Peer, Place, Progress, RemoteSpan, Span, Transport};

const ROUNDS: usize = 9;
const ORIGIN: &str = "GPU_IPC_NIXL_READS_ORIGIN";

type Outcome<T> = Result<T, Box<dyn Error>>;

fn main() -> Outcome<()> {
    // Cargo adds an option of its own.
    let sizes = std::env::args().skip(1).filter(|size| size != "--bench");
    let sizes: Vec<u64> = sizes.map(|size| size.parse()).collect::<Result<_, _>>()?;
    let sizes = if sizes.is_empty() { vec![1, 64, 256] } else { sizes };
    let largest = sizes.iter().max().map_or(0, |&mib| mib << 20);
    // Leaked: a transfer may outlast everything else.
    let memory: &'static mut [u8] = Box::leak(vec![0; usize::try_from(largest)?].into_boxed_slice());
    let here = Span { address: memory.as_ptr() as u64, bytes: largest, place: Place::Host };
    if std::env::var_os(ORIGIN).is_some() {
        return serve(memory, here);
    }

    let mut origin = Command::new(std::env::current_exe()?)
        .args(sizes.iter().map(u64::to_string))
        .env(ORIGIN, "1")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()?;
    let mut output = origin.stdout.take().ok_or("no pipe")?;
    let mut head = [0; 16];
    output.read_exact(&mut head)?;
    let (address, length) = (u64::from_le_bytes(head[..8].try_into()?), u64::from_le_bytes(head[8..].try_into()?));
    let mut metadata = vec![0; usize::try_from(length)?];
    output.read_exact(&mut metadata)?;

    let mut nixl = Nixl::start("reads-replica", None)?;
    // SAFETY: `register`: the memory is leaked.
    let _registration = unsafe { nixl.register(&[here]) }?;
    let ours = nixl.load_peer(&metadata)?;
    nixl.set_pieces(u64::MAX, 1);
    let raw = nixl.load_peer(&metadata)?;
    println!("{:>8} {:>14} {:>14} {:>7}", "MiB", "gateway GB/s", "raw GB/s", "ratio");
    for mib in sizes {
        let bytes = mib << 20;
        let pair = Pair { from: RemoteSpan { address, bytes, place: Place::Host }, to: Span { bytes, ..here } };
        let mut speeds = [Vec::new(), Vec::new()];
        for round in 0..=ROUNDS {
            for (peer, speeds) in [&*ours, &*raw].into_iter().zip(&mut speeds) {
                let speed = read(peer, pair)?;
                // The first makes the connection and touches the pages.
                if round > 0 {
                    speeds.push(speed);
                }
            }
        }
        // SAFETY: `from_raw_parts`: the leaked memory, into which no transfer is under way.
        let arrived = unsafe { std::slice::from_raw_parts(here.address as *const u8, usize::try_from(bytes)?) };
        if let Some(at) = (0..arrived.len()).find(|&at| arrived[at] != contents(at)) {
            return Err(format!("byte {at} of {bytes} is {}", arrived[at]).into());
        }
        let [ours, raw] = speeds.map(|mut speeds| {
            speeds.sort_by(f64::total_cmp);
            speeds[speeds.len() / 2]
        });
        println!("{mib:>8} {ours:>14.3} {raw:>14.3} {:>7.2}", ours / raw);
    }
    drop(origin.stdin.take());
    origin.wait()?;
    Ok(())
}

/// Reads once, and returns GB/s.
fn read(peer: &dyn Peer, pair: Pair) -> Outcome<f64> {
    let begun = Instant::now();
    // SAFETY: `read`: the destination is leaked memory, which nobody looks at before the transfer has ended.
    let mut transfer = unsafe { peer.read(&[pair]) }?;
    while transfer.poll()? != Progress::Done {
        std::thread::yield_now();
    }
    Ok(pair.to.bytes as f64 / begun.elapsed().as_secs_f64() / 1e9)
}

fn contents(at: usize) -> u8 {
    (at.wrapping_mul(0x9E37_79B1) >> 13) as u8
}

/// Offers the memory until the other process closes the pipe.
fn serve(memory: &mut [u8], here: Span) -> Outcome<()> {
    for (at, byte) in memory.iter_mut().enumerate() {
        *byte = contents(at);
    }
    let nixl = Nixl::start("reads-origin", None)?;
    // SAFETY: `register`: the memory is leaked.
    let _registration = unsafe { nixl.register(&[here]) }?;
    let metadata = nixl.metadata()?;
    let mut output = std::io::stdout().lock();
    output.write_all(&here.address.to_le_bytes())?;
    output.write_all(&(metadata.len() as u64).to_le_bytes())?;
    output.write_all(&metadata)?;
    output.flush()?;
    std::io::stdin().read_to_end(&mut Vec::new())?;
    Ok(())
}
