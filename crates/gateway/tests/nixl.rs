//! Reads by NIXL between two processes, over UCX's TCP. Needs NIXL's library (`ci/test/nixl-wheel`
//! installs it): without it all cases are ignored, and failed under `GPU_IPC_REQUIRE_NIXL=1`.
//!
//! The test program starts itself as the origin: it registers memory, and does what it is told on
//! its standard input.

use std::io::BufRead;
use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::{Duration, Instant};

use gateway::Error;
use gateway::transport::nixl::Nixl;
use gateway::transport::{
    Pair, Peer, Place, Progress, Registration, RemoteSpan, Span, Transfer, Transport,
};
use harness::Lines;
use harness::program::this_program;
use libtest_mimic::{Arguments, Failed, Trial};

const MIB: u64 = 1 << 20;
/// Ends a case that waits for what does not come. Nothing is expected to be fast.
const WATCHDOG: Duration = Duration::from_secs(300);
const ORIGIN: &str = "GPU_IPC_NIXL_TEST_ORIGIN";

type Case = (&'static str, fn());

const CASES: [Case; 10] = [
    (
        "an_object_of_64_mib_arrives_whole",
        an_object_of_64_mib_arrives_whole,
    ),
    (
        "ranges_of_several_registrations_arrive_in_one_transfer",
        ranges_of_several_registrations_arrive_in_one_transfer,
    ),
    (
        "what_is_not_registered_is_refused_on_both_sides",
        what_is_not_registered_is_refused_on_both_sides,
    ),
    (
        "metadata_of_anything_is_refused",
        metadata_of_anything_is_refused,
    ),
    (
        "one_peer_loaded_twice_is_forgotten_once",
        one_peer_loaded_twice_is_forgotten_once,
    ),
    (
        "memory_registered_again_is_loaded_when_nobody_reads",
        memory_registered_again_is_loaded_when_nobody_reads,
    ),
    (
        "a_killed_origin_ends_the_transfer_and_another_serves",
        a_killed_origin_ends_the_transfer_and_another_serves,
    ),
    (
        "a_stopped_origin_keeps_the_transfer_running_until_it_goes_on",
        a_stopped_origin_keeps_the_transfer_running,
    ),
    (
        "a_dropped_transfer_still_writes_so_its_memory_is_kept",
        a_dropped_transfer_still_writes_so_its_memory_is_kept,
    ),
    ("two_threads_read_at_a_time", two_threads_read_at_a_time),
];

fn main() -> ExitCode {
    if std::env::var_os(ORIGIN).is_some() {
        origin();
        return ExitCode::SUCCESS;
    }
    let arguments = Arguments::from_args();
    let missing = if arguments.list { None } else { why_not() };
    if let Some(why) = &missing {
        println!("nixl: skipped: {why}");
        if std::env::var_os("GPU_IPC_REQUIRE_NIXL").is_some() {
            println!("nixl: GPU_IPC_REQUIRE_NIXL is set, so this is an error");
            return ExitCode::FAILURE;
        }
    }
    let trials = CASES
        .into_iter()
        .map(|(name, case)| {
            Trial::test(name, move || {
                case();
                Ok::<(), Failed>(())
            })
            .with_ignored_flag(missing.is_some())
        })
        .collect();
    libtest_mimic::run(&arguments, trials).exit_code()
}

fn why_not() -> Option<String> {
    Nixl::start(&name("probe"), Some("tcp"))
        .err()
        .map(|error| error.to_string())
}

/// A name that no other agent has.
fn name(role: &str) -> String {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    format!(
        "{role}-{}-{}",
        std::process::id(),
        NEXT.fetch_add(1, Ordering::Relaxed)
    )
}

/// Eight bytes of the contents, none of them zero.
fn word(seed: u64, index: u64) -> [u8; 8] {
    ((index + seed).wrapping_mul(0x9E37_79B9_7F4A_7C15) | 0x0101_0101_0101_0101).to_le_bytes()
}

fn byte(seed: u64, at: u64) -> u8 {
    word(seed, at / 8)[(at % 8) as usize]
}

/// Memory that stays mapped for the process' life, because a transfer may never end.
fn memory(bytes: u64) -> &'static mut [u8] {
    Box::leak(vec![0; usize::try_from(bytes).expect("it fits")].into_boxed_slice())
}

fn span(memory: &[u8]) -> Span {
    Span {
        address: memory.as_ptr() as u64,
        bytes: memory.len() as u64,
        place: Place::Host,
    }
}

fn register(nixl: &Nixl, memory: &[u8]) -> Box<dyn Registration> {
    // SAFETY: `register`: the memory is leaked, so it stays mapped.
    unsafe { nixl.register(&[span(memory)]) }.expect("it is registered")
}

// ---- The origin

/// Commands: `new BYTES SEED`, `again INDEX SEED`, `end`. It answers `ADDRESS BYTES METADATA` in
/// hexadecimal.
fn origin() {
    let nixl = Nixl::start(&name("origin"), Some("tcp")).expect("NIXL starts");
    type Held = (&'static mut [u8], Option<Box<dyn Registration>>);
    let mut held: Vec<Held> = Vec::new();
    for line in std::io::stdin().lock().lines() {
        let line = line.expect("a line");
        let words: Vec<&str> = line.split(' ').collect();
        let number = |index: usize| words[index].parse::<u64>().expect("a number");
        let index = match words[0] {
            "new" => {
                held.push((memory(number(1)), None));
                held.len() - 1
            }
            "again" => usize::try_from(number(1)).expect("it fits"),
            _ => return,
        };
        let (memory, registration) = &mut held[index];
        *registration = None;
        for (index, bytes) in memory.chunks_mut(8).enumerate() {
            bytes.copy_from_slice(&word(number(2), index as u64)[..bytes.len()]);
        }
        let registered = registration.insert(register(&nixl, memory));
        let metadata: String = nixl
            .metadata(&[registered.number()])
            .expect("it has metadata")
            .iter()
            .map(|byte| format!("{byte:02x}"))
            .collect();
        println!("{} {} {metadata}", memory.as_ptr() as u64, memory.len());
    }
}

struct Origin(Lines);

/// Memory of an origin, and its metadata when it was registered.
struct Offer {
    from: RemoteSpan,
    metadata: Vec<u8>,
}

impl Origin {
    fn start() -> Self {
        Self(Lines::start(this_program().env(ORIGIN, "1")))
    }

    fn ask(&mut self, command: &str) -> Offer {
        self.0.tell(command);
        let line = self.0.line().expect("it answers");
        let words: Vec<&str> = line.split_whitespace().collect();
        let number = |index: usize| words[index].parse::<u64>().expect("a number");
        let hex = words[2].as_bytes().chunks_exact(2);
        let metadata = hex
            .map(|two| {
                u8::from_str_radix(std::str::from_utf8(two).expect("text"), 16)
                    .expect("hexadecimal")
            })
            .collect();
        Offer {
            from: RemoteSpan {
                address: number(0),
                bytes: number(1),
                place: Place::Host,
            },
            metadata,
        }
    }
}

// ---- The replica

/// As a pull has it: its reads go on when they are polled.
fn replica() -> Nixl {
    Nixl::start_reader(&name("replica"), Some("tcp")).expect("NIXL starts")
}

fn start(peer: &dyn Peer, from: &RemoteSpan, to: &[u8]) -> Result<Box<dyn Transfer>, Error> {
    // SAFETY: `read`: the destination is leaked memory, which nobody touches before the transfer
    // has ended.
    unsafe {
        peer.read(&[Pair {
            from: *from,
            to: span(to),
        }])
    }
}

fn watch(what: &str, mut condition: impl FnMut() -> bool) {
    let begun = Instant::now();
    while !condition() {
        assert!(
            begun.elapsed() < WATCHDOG,
            "waited {WATCHDOG:?} in vain: {what}"
        );
        std::thread::sleep(Duration::from_micros(200));
    }
}

fn end(transfer: &mut dyn Transfer) -> Result<(), Error> {
    let mut last = 0;
    let mut ended = None;
    watch("the transfer ends", || {
        match transfer.poll() {
            Ok(Progress::Running { bytes }) => {
                assert!(bytes >= last, "progress goes back from {last} to {bytes}");
                last = bytes;
            }
            Ok(Progress::Done) => ended = Some(Ok(())),
            Err(error) => ended = Some(Err(error)),
        }
        ended.is_some()
    });
    ended.expect("it was watched")
}

fn check(memory: &[u8], seed: u64) {
    for (index, bytes) in memory.chunks(8).enumerate() {
        let right = word(seed, index as u64);
        assert_eq!(
            bytes,
            &right[..bytes.len()],
            "word {index} of {} bytes by seed {seed}",
            memory.len()
        );
    }
}

// ---- The cases

fn an_object_of_64_mib_arrives_whole() {
    let (mut origin, nixl) = (Origin::start(), replica());
    let bytes = 64 * MIB + 13;
    let offer = origin.ask(&format!("new {bytes} 1"));
    let to = memory(bytes);
    let _registration = register(&nixl, to);
    let peer = nixl.load_peer(&offer.metadata).expect("it is one");
    let mut transfer = start(&*peer, &offer.from, to).expect("it begins");
    end(&mut *transfer).expect("it ends well");
    assert_eq!(transfer.poll().expect("it has ended"), Progress::Done);
    nixl.flush().expect("nothing to flush");
    check(to, 1);
}

fn ranges_of_several_registrations_arrive_in_one_transfer() {
    let (mut origin, nixl) = (Origin::start(), replica());
    let mut offers = Vec::new();
    for seed in 0..5 {
        offers.push(origin.ask(&format!("new {} {seed}", 100_000 * seed + 4096)));
    }
    // Each tells of one registration, and the peer is the same.
    let load = |offer: &Offer| nixl.load_peer(&offer.metadata).expect("it is one");
    let peers: Vec<_> = offers.iter().map(load).collect();
    let peer = &peers[0];
    let targets: Vec<_> = offers
        .iter()
        .map(|offer| memory(offer.from.bytes))
        .collect();
    let _registrations: Vec<_> = targets.iter().map(|to| register(&nixl, to)).collect();
    let pairs: Vec<_> = offers
        .iter()
        .zip(&targets)
        .map(|(offer, to)| Pair {
            from: offer.from,
            to: span(to),
        })
        .collect();
    // SAFETY: `read`: the destinations are leaked memory, which nobody touches before the transfer
    // has ended.
    let mut transfer = unsafe { peer.read(&pairs) }.expect("it begins");
    end(&mut *transfer).expect("it ends well");
    for (seed, to) in targets.iter().enumerate() {
        check(to, seed as u64);
    }
}

fn what_is_not_registered_is_refused_on_both_sides() {
    let (mut origin, nixl) = (Origin::start(), replica());
    let offer = origin.ask("new 65536 1");
    let (to, other) = (memory(65536), memory(65536));
    let registration = register(&nixl, to);
    let peer = nixl.load_peer(&offer.metadata).expect("it is one");

    let refused = start(&*peer, &offer.from, other).expect_err("the destination is not registered");
    assert!(matches!(refused, Error::Invalid { .. }), "{refused}");
    let refused = start(&*peer, &offer.from, &to[..65535]).expect_err("it is shorter");
    assert!(matches!(refused, Error::Invalid { .. }), "{refused}");
    for (address, bytes) in [
        (offer.from.address + 1, 65536),
        (offer.from.address - 1, 65536),
        (u64::MAX - 65535, 65536),
    ] {
        let from = RemoteSpan {
            address,
            bytes,
            place: Place::Host,
        };
        let refused = start(&*peer, &from, to).expect_err("the source is not registered");
        assert!(
            matches!(refused, Error::Transfer { .. } | Error::Invalid { .. }),
            "{refused}"
        );
    }
    drop(registration);
    let refused = start(&*peer, &offer.from, to).expect_err("it is registered no longer");
    assert!(matches!(refused, Error::Invalid { .. }), "{refused}");
    assert!(
        to.iter().chain(other.iter()).all(|&byte| byte == 0),
        "something was written"
    );
}

fn metadata_of_anything_is_refused() {
    let (mut origin, nixl) = (Origin::start(), replica());
    let offer = origin.ask("new 65536 1");
    let garbage: Vec<u8> = (0..1000).map(|at| byte(3, at)).collect();
    let mut replaced = offer.metadata.clone();
    let length = replaced.len();
    // The envelope is right, and what is NIXL's is not.
    replaced.truncate(length - 300);
    replaced.extend(&garbage[..300]);
    let own = nixl.metadata(&[]).expect("it has metadata");
    for wrong in [
        &[][..],
        &garbage,
        &offer.metadata[..length / 2],
        &offer.metadata[..length - 1],
        &replaced,
        &own,
    ] {
        let refused = nixl.load_peer(wrong).expect_err("it is none");
        assert!(matches!(refused, Error::Malformed { .. }), "{refused}");
    }
    // What it refused has left nothing behind.
    let to = memory(65536);
    let _registration = register(&nixl, to);
    let peer = nixl.load_peer(&offer.metadata).expect("it is one");
    end(&mut *start(&*peer, &offer.from, to).expect("it begins")).expect("it ends well");
    check(to, 1);
}

fn one_peer_loaded_twice_is_forgotten_once() {
    let (mut origin, nixl) = (Origin::start(), replica());
    let first = origin.ask("new 65536 1");
    let second = origin.ask("new 65536 2");
    let to = memory(65536);
    let _registration = register(&nixl, to);
    let one = nixl.load_peer(&first.metadata).expect("it is one");
    let refused = start(&*one, &second.from, to).expect_err("it was registered later");
    assert!(matches!(refused, Error::Transfer { .. }), "{refused}");
    let two = nixl.load_peer(&second.metadata).expect("it is one");
    drop(one);
    for (offer, seed) in [(&first, 1), (&second, 2)] {
        end(&mut *start(&*two, &offer.from, to).expect("it begins")).expect("it ends well");
        check(to, seed);
    }
    drop(two);
    let three = nixl.load_peer(&first.metadata).expect("it is one");
    end(&mut *start(&*three, &first.from, to).expect("it begins")).expect("it ends well");
    check(to, 1);
}

fn memory_registered_again_is_loaded_when_nobody_reads() {
    let (mut origin, nixl) = (Origin::start(), replica());
    let first = origin.ask("new 65536 1");
    let to = memory(65536);
    let _registration = register(&nixl, to);
    let one = nixl.load_peer(&first.metadata).expect("it is one");
    let again = origin.ask("again 0 2");
    let refused = nixl
        .load_peer(&again.metadata)
        .expect_err("the registration before is in use");
    assert!(matches!(refused, Error::Unavailable { .. }), "{refused}");
    drop(one);
    let two = nixl.load_peer(&again.metadata).expect("nobody reads");
    end(&mut *start(&*two, &again.from, to).expect("it begins")).expect("it ends well");
    check(to, 2);
}

fn a_killed_origin_ends_the_transfer_and_another_serves() {
    let (mut origin, nixl) = (Origin::start(), replica());
    let bytes = 48 * MIB;
    let offer = origin.ask(&format!("new {bytes} 1"));
    let to = memory(bytes);
    let _registration = register(&nixl, to);
    let peer = nixl.load_peer(&offer.metadata).expect("it is one");
    // Stopped, so that it cannot have answered all before it is killed.
    origin.0.stop();
    let mut transfer = start(&*peer, &offer.from, to).expect("it begins");
    origin.0.kill();
    let error = end(&mut *transfer).expect_err("the origin is dead");
    assert!(matches!(error, Error::Transfer { .. }), "{error}");
    let error = transfer.poll().expect_err("it says so again");
    assert!(matches!(error, Error::Transfer { .. }), "{error}");
    drop((transfer, peer));

    let mut other = Origin::start();
    let offer = other.ask(&format!("new {MIB} 2"));
    let peer = nixl.load_peer(&offer.metadata).expect("it is one");
    let to = &to[..usize::try_from(MIB).expect("it fits")];
    end(&mut *start(&*peer, &offer.from, to).expect("it begins")).expect("it ends well");
    check(to, 2);
}

fn a_stopped_origin_keeps_the_transfer_running() {
    let (mut origin, nixl) = (Origin::start(), replica());
    let offer = origin.ask(&format!("new {} 1", 16 * MIB));
    let to = memory(16 * MIB);
    let _registration = register(&nixl, to);
    let peer = nixl.load_peer(&offer.metadata).expect("it is one");
    origin.0.stop();
    let mut transfer = start(&*peer, &offer.from, to).expect("it begins");
    for _ in 0..1000 {
        let progress = transfer.poll().expect("nothing is known of the origin");
        assert_eq!(progress, Progress::Running { bytes: 0 });
    }
    origin.0.signal(rustix::process::Signal::CONT);
    end(&mut *transfer).expect("it ends well");
    check(to, 1);
}

fn a_dropped_transfer_still_writes_so_its_memory_is_kept() {
    let mut origin = Origin::start();
    // Nobody polls after the drop.
    let nixl = Nixl::start(&name("replica"), Some("tcp")).expect("NIXL starts");
    let offer = origin.ask(&format!("new {MIB} 1"));
    let to = memory(MIB);
    let registration = register(&nixl, to);
    let peer = nixl.load_peer(&offer.metadata).expect("it is one");
    origin.0.stop();
    let transfer = start(&*peer, &offer.from, to).expect("it begins");
    drop((transfer, peer, registration, nixl));
    let first = to.as_ptr();
    // SAFETY: `read_volatile`: leaked memory, which UCX may write to meanwhile, as the case is
    // about.
    assert_eq!(unsafe { first.read_volatile() }, 0);
    origin.0.signal(rustix::process::Signal::CONT);
    // All were dropped, and yet the bytes come: had the request been released, or the memory been
    // given to others, they would come there.
    watch("the bytes arrive", || {
        (0..MIB as usize).step_by(4096).all(|at| {
            // SAFETY: `add`: within the memory.
            let place = unsafe { first.add(at) };
            // SAFETY: `read_volatile`: as above.
            unsafe { place.read_volatile() == byte(1, at as u64) }
        })
    });
}

fn two_threads_read_at_a_time() {
    let (mut origin, nixl) = (Origin::start(), replica());
    let offers = [
        origin.ask(&format!("new {} 0", 8 * MIB)),
        origin.ask(&format!("new {} 1", 8 * MIB)),
    ];
    let failed = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for (seed, offer) in offers.iter().enumerate() {
            let (nixl, failed) = (&nixl, &failed);
            scope.spawn(move || {
                // A panic of a thread ends the case by the flag, and not the other thread's wait.
                let case = || {
                    for _ in 0..5 {
                        let to = memory(8 * MIB);
                        let _registration = register(nixl, to);
                        let peer = nixl.load_peer(&offer.metadata).expect("it is one");
                        end(&mut *start(&*peer, &offer.from, to).expect("it begins"))
                            .expect("it ends well");
                        check(to, seed as u64);
                    }
                };
                failed.fetch_or(std::panic::catch_unwind(case).is_err(), Ordering::Relaxed);
            });
        }
    });
    assert!(!failed.into_inner(), "a thread failed");
}
