//! Cost against number, without a GPU: `cargo bench --bench scale [-- --csv FILE]`.
//!
//! What share, claim, drop and collect cost with up to 1,000,000 leases outstanding, with up to 100,000 blocks in limbo,
//! and with up to 256 participants; one block shared with up to 256 participants at once; and 1 to 8 threads that each
//! lease a block of their own. Every figure is the least of many rounds; nothing is to grow along a table, but for the
//! last, which is to rise with the cores.

use std::fmt::Write as _;
use std::hint::black_box;
use std::sync::Barrier;
use std::time::{Duration, Instant};

use gpu_ipc::descriptor::Descriptor;
use gpu_ipc::host::{HostBackend, HostConfig};
use gpu_ipc::{After, DeviceId, Gpu, Participant, ReceivedBlock, SentBlock, Session, ShareOptions, To, Wait};

/// Operations of a round.
const BATCH: usize = 64;
/// Rounds of which the least counts.
const ROUNDS: usize = 400;
const LEASES: [usize; 5] = [0, 1_000, 10_000, 100_000, 1_000_000];
const LIMBO: [usize; 4] = [0, 1_000, 10_000, 100_000];
const PARTICIPANTS: [usize; 5] = [1, 4, 16, 64, 256];
const THREADS: [usize; 4] = [1, 2, 4, 8];

fn main() {
    let args: Vec<String> = std::env::args().skip(1).filter(|arg| arg != "--bench").collect();
    let mut csv = String::from("table,number,share,claim,drop_received,drop_sent,collect\n");
    let header = |what: &str| {
        println!(
            "\n{what:<16}{:>10}{:>10}{:>15}{:>11}{:>10}  ns",
            "share", "claim", "drop received", "drop sent", "collect"
        );
    };
    let mut row = |table: &str, number: usize, costs: Costs| {
        let Costs { share, claim, drop_received, drop_sent, collect } = costs;
        println!("{number:<16}{share:>10.1}{claim:>10.1}{drop_received:>15.1}{drop_sent:>11.1}{collect:>10.1}");
        writeln!(csv, "{table},{number},{share:.1},{claim:.1},{drop_received:.1},{drop_sent:.1},{collect:.1}")
            .expect("memory");
    };
    header("leases out");
    for number in LEASES {
        let host = Host::new(1);
        let block = host.session.alloc(4096).expect("there is room");
        let held: Vec<ReceivedBlock> = (0..number).map(|_| host.lease(&block, 0)).collect();
        row("leases", number, host.costs());
        drop(held);
    }
    header("blocks in limbo");
    for number in LIMBO {
        let host = Host::new(1);
        let held: Vec<ReceivedBlock> =
            (0..number).map(|_| host.lease(&host.session.alloc(256).expect("there is room"), 0)).collect();
        row("limbo", number, host.costs());
        drop(held);
    }
    header("participants");
    for number in PARTICIPANTS {
        let host = Host::new(number);
        let block = host.session.alloc(4096).expect("there is room");
        let held: Vec<ReceivedBlock> = (0..number).map(|n| host.lease(&block, n)).collect();
        row("participants", number, host.costs());
        drop(held);
    }
    println!("\n{:<16}{:>12}{:>22}", "fan-out to", "ns in all", "each beyond the first");
    let mut first = None;
    for number in PARTICIPANTS {
        let all = Host::new(number).fan_out();
        let first = *first.get_or_insert(all);
        let each = if number > 1 { format!("{:.1}", (all - first) / (number - 1) as f64) } else { String::new() };
        println!("{number:<16}{all:>12.0}{each:>22}");
        writeln!(csv, "fan_out,{number},{all:.1},,,,").expect("memory");
    }
    let cores = std::thread::available_parallelism().map_or(0, usize::from);
    println!("\n{:<16}{:>16}{:>10}  ({cores} cores)", "threads", "cycles a second", "speed-up");
    let mut one = None;
    for number in THREADS {
        let rate = Host::new(1).cycles_a_second(number);
        println!("{number:<16}{rate:>16.0}{:>10.2}", rate / *one.get_or_insert(rate));
        writeln!(csv, "threads,{number},{rate:.0},,,,").expect("memory");
    }
    if let [flag, file] = &args[..]
        && flag == "--csv"
    {
        std::fs::write(file, csv).expect("the file can be written");
    }
}

/// Nanoseconds of an operation.
struct Costs {
    share: f64,
    claim: f64,
    drop_received: f64,
    drop_sent: f64,
    /// One collect for as many released leases as there are operations in a round, for each of them.
    collect: f64,
}

struct Host {
    session: Session,
    participants: Vec<Participant>,
    _dir: tempfile::TempDir,
}

fn timed<T>(least: &mut Duration, run: impl FnOnce() -> T) -> T {
    let start = Instant::now();
    let value = run();
    *least = start.elapsed().min(*least);
    value
}

fn each(least: Duration) -> f64 {
    least.as_nanos() as f64 / BATCH as f64
}

impl Host {
    fn new(participants: usize) -> Host {
        let dir = tempfile::tempdir().expect("a directory");
        let gpu = Gpu::new(HostBackend::new(HostConfig::default()).expect("it opens"), DeviceId(0)).expect("a device");
        let session = Session::builder(gpu.clone()).socket(dir.path().join("s")).open().expect("a session");
        let connect = |_| Participant::builder(gpu.clone()).connect(session.socket_path()).expect("connected");
        let participants = (0..participants).map(connect).collect();
        Host { session, participants, _dir: dir }
    }

    fn share(&self, block: &SentBlock, n: usize) -> Descriptor {
        block.share(To::Participant(self.participants[n].id()), After::Done).expect("shared")
    }

    fn claim(&self, descriptor: &Descriptor, n: usize) -> ReceivedBlock {
        self.participants[n].claim(descriptor.as_bytes(), Wait::None, None).expect("claimed")
    }

    fn lease(&self, block: &SentBlock, n: usize) -> ReceivedBlock {
        self.claim(&self.share(block, n), n)
    }

    /// Times a round of shares with the last participant, claims, drops of both kinds, and a collect, many times.
    fn costs(&self) -> Costs {
        let n = self.participants.len() - 1;
        let [mut share, mut claim, mut drop_received, mut drop_sent, mut collect] = [Duration::MAX; 5];
        for _ in 0..ROUNDS {
            let blocks: Vec<SentBlock> = (0..BATCH).map(|_| self.session.alloc(256).expect("there is room")).collect();
            let descriptors: Vec<Descriptor> =
                timed(&mut share, || blocks.iter().map(|block| self.share(block, n)).collect());
            let held: Vec<ReceivedBlock> =
                timed(&mut claim, || descriptors.iter().map(|descriptor| self.claim(descriptor, n)).collect());
            timed(&mut drop_sent, || drop(blocks));
            timed(&mut drop_received, || drop(held));
            timed(&mut collect, || black_box(self.session.collect()));
        }
        Costs {
            share: each(share),
            claim: each(claim),
            drop_received: each(drop_received),
            drop_sent: each(drop_sent),
            collect: each(collect),
        }
    }

    /// Times sharing one block with everybody, in nanoseconds.
    fn fan_out(&self) -> f64 {
        let block = self.session.alloc(4096).expect("there is room");
        let grants: Vec<(&SentBlock, To)> =
            self.participants.iter().map(|participant| (&block, To::Participant(participant.id()))).collect();
        let mut least = Duration::MAX;
        for _ in 0..ROUNDS {
            let descriptors = timed(&mut least, || {
                self.session.share_many(&grants, After::Done, &ShareOptions::default()).expect("shared")
            });
            for (n, descriptor) in descriptors.iter().enumerate() {
                drop(self.claim(descriptor, n));
            }
            self.session.collect();
        }
        least.as_nanos() as f64
    }

    /// Has so many threads lease a block of their own, and counts the cycles of all in a second.
    fn cycles_a_second(&self, threads: usize) -> f64 {
        const CYCLES: usize = 400_000;
        let start = Barrier::new(threads);
        let mut best: f64 = 0.0;
        for _ in 0..5 {
            // From the first that began to the last that was done.
            let took = std::thread::scope(|scope| {
                let running: Vec<_> = (0..threads)
                    .map(|_| {
                        scope.spawn(|| {
                            let block = self.session.alloc(4096).expect("there is room");
                            start.wait();
                            let begin = Instant::now();
                            for _ in 0..CYCLES / BATCH {
                                (0..BATCH).for_each(|_| drop(self.lease(&block, 0)));
                                self.session.collect();
                            }
                            (begin, Instant::now())
                        })
                    })
                    .collect();
                let times: Vec<_> = running.into_iter().map(|thread| thread.join().expect("no panic")).collect();
                let begin = times.iter().map(|(begin, _)| *begin).min().expect("threads ran");
                let end = times.iter().map(|(_, end)| *end).max().expect("threads ran");
                end - begin
            });
            best = best.max((threads * (CYCLES / BATCH) * BATCH) as f64 / took.as_secs_f64());
        }
        best
    }
}
