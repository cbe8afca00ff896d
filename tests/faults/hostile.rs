//! A participant that writes anything into the memory that it shares with the producer, and
//! strangers that say anything to its socket: it harms nobody but itself.

use std::fs::File;
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use gpu_ipc::backend::DeviceId;
use gpu_ipc::host::{HostBackend, HostConfig};
use gpu_ipc::{After, Gpu, Participant, ParticipantId, ReceivedBlock, Session, Stream, To, Wait};
use harness::{WATCHDOG, comes, say};
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketAddrUnix, SocketFlags, SocketType};

use crate::Case;
use crate::agent::{self, Fault, Said, Told, read_stamp, write_stamp};

pub const CASES: &[Case] = &[
    (
        "hostile::a_counter_file_that_its_holder_scribbles_on",
        scribbled_on,
    ),
    (
        "hostile::a_thousand_messages_that_nobody_should_send",
        messages,
    ),
];

/// Throws numbers that follow from a seed.
struct Dice(u64);

impl Dice {
    fn throw(&mut self) -> u64 {
        // splitmix64 (Steele, Lea, Flood 2014).
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }
}

/// A session, and an honest participant that holds a block of it.
struct Stage {
    gpu: Gpu,
    stream: Stream,
    session: Session,
    held: ReceivedBlock,
    honest: Participant,
    dir: tempfile::TempDir,
}

const STAMP: u64 = 0x40e5;

impl Stage {
    fn new() -> Stage {
        let backend = HostBackend::new(HostConfig::default()).expect("it opens");
        let gpu = Gpu::new(backend, DeviceId(0)).expect("there is a device");
        let dir = tempfile::tempdir().expect("a directory");
        let builder = Session::builder(gpu.clone()).socket(dir.path().join("s"));
        let session = builder
            .quarantine(Duration::ZERO)
            .open()
            .expect("a session");
        let stream = Stream::create(&gpu).expect("a stream");
        let honest = Participant::builder(gpu.clone())
            .connect(session.socket_path())
            .expect("connected");
        let held = lend(&gpu, &stream, &session, &honest, STAMP);
        Stage {
            gpu,
            stream,
            session,
            held,
            honest,
            dir,
        }
    }

    /// Looks whether the honest one still has what it had, and gets what it is given.
    fn check(&self) {
        let read = |block: &ReceivedBlock| {
            read_stamp(&self.gpu, &self.stream, block.device_ptr()).expect("it reads")
        };
        assert_eq!(read(&self.held), STAMP, "an honest lease was ended");
        let other = lend(&self.gpu, &self.stream, &self.session, &self.honest, 5);
        assert_eq!(read(&other), 5);
        assert_eq!(read(&self.held), STAMP, "an honest lease was ended");
    }
}

fn lend(
    gpu: &Gpu,
    stream: &Stream,
    session: &Session,
    to: &Participant,
    stamp: u64,
) -> ReceivedBlock {
    let block = session.alloc(4096).expect("there is room");
    write_stamp(gpu, stream, &block, stamp).expect("it writes");
    let descriptor = block
        .share(To::Participant(to.id()), After::Stream(stream))
        .expect("shared");
    to.claim(descriptor.as_bytes(), Wait::Host, Some(WATCHDOG))
        .expect("claimed")
}

fn scribbled_on() {
    let stage = Stage::new();
    let mut corrupt = 0;
    for seed in 0..4u64 {
        let mut hostile = agent::start(Fault::Scribble(seed));
        let said = hostile.ask(&Told::Path(stage.session.socket_path().into()));
        let Said::Joined(id) = said else {
            panic!("it does not connect: {said:?}")
        };
        assert_eq!(hostile.answer(), Some(Said::Scribbling));
        let (mut rounds, before) = (0, stage.session.stats().corrupt_words);
        let noticed = comes(|| {
            for _ in 0..32 {
                let block = stage.session.alloc(4096).expect("there is room");
                // Its file may be full of what it wrote there itself.
                let _ = block.share(
                    To::Participant(ParticipantId(id)),
                    After::Stream(&stage.stream),
                );
            }
            stage.session.collect();
            rounds += 1;
            if rounds % 10 == 0 {
                stage.check();
            }
            corrupt = stage.session.stats().corrupt_words;
            rounds >= 40 && corrupt > before
        });
        assert!(noticed, "nobody noticed anything: it proves nothing");
        drop(hostile);
        let back = comes(|| {
            stage.session.collect();
            stage.session.stats().live_blocks == 1
        });
        assert!(back, "{:?}", stage.session.stats());
    }
    assert!(
        stage.session.stats().corrupt_words >= corrupt,
        "words of the dead are not counted any more"
    );
    stage.check();
    println!("scribbled on: {corrupt} words were found corrupt");
    let Stage {
        session,
        held,
        honest,
        ..
    } = stage;
    drop((held, honest));
    let report = session.shutdown(WATCHDOG);
    assert!(report.clean, "{report:?}");
}

/// Lives as a participant that writes all over its counter file until it is killed.
pub fn scribble(gpu: &Gpu, socket: &Path, seed: u64) {
    let participant = Participant::builder(gpu.clone())
        .connect(socket)
        .expect("connected");
    say(&Said::Joined(participant.id().0));
    let maps = BufReader::new(File::open("/proc/self/maps").expect("proc is mounted"));
    let counters = maps
        .lines()
        .map_while(Result::ok)
        .find(|line| line.contains("gpu-ipc-counters"));
    let counters = counters.expect("a counter file is mapped");
    let (start, end) = counters
        .split(' ')
        .next()
        .and_then(|range| range.split_once('-'))
        .expect("a range");
    let [start, end] = [start, end].map(|text| usize::from_str_radix(text, 16).expect("hex"));
    let word = |index: usize| {
        // SAFETY: `AtomicU64::from_ptr` asks for an aligned word that stays valid: one of a mapping
        // that the participant keeps, and every other user accesses it atomically.
        unsafe { AtomicU64::from_ptr((start + index * 8) as *mut u64) }
    };
    say(&Said::Scribbling);
    let (mut dice, words) = (Dice(seed), (end - start) / 8);
    // The slots that are granted first, and the words that say where to look, are hit most.
    let slots = 8192 / 8 + 4096 / 8;
    loop {
        let throw = dice.throw();
        let index = match throw & 3 {
            0 => (throw >> 8) as usize % words,
            1 => 8192 / 8 + (throw >> 8) as usize % 128,
            2 => slots + (throw >> 8) as usize % (words - slots),
            _ => slots + (throw >> 8) as usize % 256,
        };
        let value = match (throw >> 2) & 3 {
            0 => dice.throw(),
            1 => 1,
            // What could have been written there, of some generation.
            _ => dice.throw() % 512,
        };
        word(index.min(words - 1)).store(value, Ordering::Relaxed);
    }
}

fn messages() {
    let stage = Stage::new();
    let hello = hello(&stage.gpu);
    let address = SocketAddrUnix::new(stage.session.socket_path()).expect("a short path");
    let mut dice = Dice(7);
    let mut sent = 0;
    for turn in 0..250 {
        let stranger = rustix::net::socket_with(
            AddressFamily::UNIX,
            SocketType::SEQPACKET,
            SocketFlags::CLOEXEC,
            None,
        )
        .expect("a socket");
        if rustix::net::connect(&stranger, &address).is_err() {
            // Too many wait to be let in.
            std::thread::yield_now();
            continue;
        }
        for _ in 0..5 {
            let mut packet = hello.clone();
            match dice.throw() % 4 {
                0 => packet.truncate(dice.throw() as usize % (hello.len() + 1)),
                1 => packet.extend((0..dice.throw() % 600).map(|n| n as u8)),
                2 => {
                    packet = (0..dice.throw() % 4096)
                        .map(|_| dice.throw() as u8)
                        .collect()
                }
                _ => {}
            }
            for _ in 0..dice.throw() % 3 {
                let at = dice.throw() as usize % packet.len().max(1);
                if let Some(byte) = packet.get_mut(at) {
                    *byte ^= 1 << (dice.throw() % 8);
                }
            }
            // It may have hung up already.
            sent += usize::from(
                rustix::net::send(
                    &stranger,
                    &packet,
                    SendFlags::NOSIGNAL | SendFlags::DONTWAIT,
                )
                .is_ok(),
            );
        }
        if turn % 50 == 0 {
            stage.check();
        }
    }
    println!("messages: {sent} were taken");
    assert!(sent > 250, "hardly anything arrived");
    let alone = comes(|| {
        stage.session.collect();
        stage.session.stats().participants == 1
    });
    assert!(alone, "{:?}", stage.session.stats());
    stage.check();
    assert!(stage.dir.path().join("s").exists());
}

/// Has a participant say hello to nobody, and returns what it said.
fn hello(gpu: &Gpu) -> Vec<u8> {
    let (ours, theirs) = rustix::net::socketpair(
        AddressFamily::UNIX,
        SocketType::SEQPACKET,
        SocketFlags::CLOEXEC,
        None,
    )
    .expect("a pair");
    let builder = Participant::builder(gpu.clone()).timeout(Some(Duration::ZERO));
    let nobody = builder.connect_by(theirs);
    assert!(nobody.is_err(), "nobody is there");
    let mut packet = vec![0; 4096];
    let (len, _) =
        rustix::net::recv(&ours, &mut packet[..], RecvFlags::DONTWAIT).expect("it said hello");
    packet.truncate(len);
    assert!(len > 8, "that is no hello");
    packet
}
