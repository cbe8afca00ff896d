//! A consumer dies in a claim or a release: its blocks come back, once, and nobody else's do.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use gpu_ipc::allocators::{Arena, ArenaOptions, Growth};
use gpu_ipc::backend::{Piece, RegionSource, SourceUsage};
use gpu_ipc::{After, Error, Gpu, Participant, ParticipantId, ReceivedBlock, Session, To, Wait};
use harness::wait_until;

use crate::agent::{Call, Said, Told, open_gpu, read_stamp, write_stamp};
use crate::trace::Trace;
use crate::{Case, chosen};

pub const CASES: &[Case] = &[
    ("consumer::dies_before_each_instruction_of_a_claim", || {
        dies_in("claim", |socket| Call::Claim { socket })
    }),
    (
        "consumer::dies_before_each_instruction_of_a_release",
        || dies_in("release", |socket| Call::Release { socket }),
    ),
];

/// A source that counts what is taken and what is given back.
#[derive(Debug)]
struct Counted {
    source: Arc<Arena>,
    taken: AtomicU64,
    given_back: AtomicU64,
}

impl RegionSource for Counted {
    fn take(&self, len: u64, align: u64) -> Result<Piece, Error> {
        let piece = self.source.take(len, align)?;
        self.taken.fetch_add(1, Ordering::AcqRel);
        Ok(piece)
    }

    fn give_back(&self, piece: Piece) {
        self.given_back.fetch_add(1, Ordering::AcqRel);
        self.source.give_back(piece);
    }

    fn trim(&self) -> Result<u64, Error> {
        self.source.trim()
    }

    fn usage(&self) -> SourceUsage {
        self.source.usage()
    }
}

/// A session with a consumer that holds a block all the time.
struct Stage {
    gpu: Gpu,
    source: Arc<Counted>,
    session: Session,
    survivors: ReceivedBlock,
    _survivor: Participant,
    _dir: tempfile::TempDir,
}

const STAMP: u64 = 0x5e1f;

impl Stage {
    fn new() -> Stage {
        let dir = tempfile::tempdir().expect("a directory");
        let gpu = open_gpu();
        let options = ArenaOptions::default().growth(Growth::Fixed(1 << 20));
        let source = Arena::new(gpu.clone(), options).expect("an arena");
        let source = Arc::new(Counted {
            source,
            taken: AtomicU64::new(0),
            given_back: AtomicU64::new(0),
        });
        let builder = Session::builder(gpu.clone())
            .socket(dir.path().join("s"))
            .source(source.clone());
        let session = builder
            .quarantine(Duration::ZERO)
            .open()
            .expect("a session");
        let survivor = Participant::builder(gpu.clone())
            .connect(session.socket_path())
            .expect("connected");
        let block = session.alloc(4096).expect("there is room");
        write_stamp(&gpu, block.device_ptr(), STAMP);
        let descriptor = block
            .share(To::Participant(survivor.id()), After::Done)
            .expect("shared");
        let survivors = survivor
            .claim(descriptor.as_bytes(), Wait::Host, None)
            .expect("claimed");
        drop(block);
        Stage {
            gpu,
            source,
            session,
            survivors,
            _survivor: survivor,
            _dir: dir,
        }
    }

    /// Starts an agent that is at the beginning of its call: it holds one block already.
    fn start(&self, call: fn(PathBuf) -> Call) -> Trace {
        let mut trace = Trace::start(&call(self.session.socket_path().into()));
        let said = trace.hear();
        let Said::Joined(id) = said else {
            panic!("it does not connect: {said:?}")
        };
        let to = To::Participant(ParticipantId(id));
        for answer in [Said::Mapped, Said::Ready] {
            let block = self.session.alloc(4096).expect("there is room");
            let descriptor = block.share(to, After::Done).expect("shared");
            trace.tell(&Told::Descriptor(descriptor.as_bytes().to_vec()));
            assert_eq!(trace.hear(), answer);
        }
        trace.begin();
        trace
    }

    /// Returns what the death that is to come will have to change: leases granted, held, and blocks
    /// in limbo.
    fn standing(&self) -> (u64, u64, u64) {
        self.session.collect();
        let stats = self.session.stats();
        (stats.in_flight, stats.held, stats.limbo_blocks)
    }

    /// Waits for the repair, and compares.
    fn check(&self, deaths: u64) {
        wait_until("the burial", || self.session.stats().deaths == deaths);
        wait_until("the blocks of the dead", || self.standing() == (0, 1, 1));
        let stats = self.session.stats();
        assert_eq!(
            (
                stats.live_blocks,
                stats.leaked_blocks,
                stats.poisoned,
                stats.corrupt_words
            ),
            (1, 0, 0, 0)
        );
        wait_until("their bytes", || {
            self.source.taken.load(Ordering::Acquire)
                == 1 + self.source.given_back.load(Ordering::Acquire)
        });
        assert_eq!(
            read_stamp(&self.gpu, self.survivors.device_ptr()),
            STAMP,
            "the survivor's block was used again"
        );
    }
}

fn dies_in(name: &str, call: fn(PathBuf) -> Call) {
    let stage = Stage::new();
    // The first is watched: which instructions change something? Of a lease, since its block may
    // follow later, by the session's own thread.
    let mut pilot = stage.start(call);
    let leases = || {
        let (in_flight, held, _) = stage.standing();
        (in_flight, held)
    };
    let mut before = leases();
    let mut decisive = Vec::new();
    while pilot.step() {
        let after = leases();
        if after != before {
            decisive.push(pilot.executed());
            before = after;
        }
    }
    let total = pilot.executed();
    pilot.kill();
    assert_eq!(
        decisive.len(),
        1,
        "one instruction of a {name} decides, not {decisive:?}"
    );
    let mut deaths = 1;
    stage.check(deaths);
    let points = chosen(total, &decisive);
    for &at in &points {
        let mut trace = stage.start(call);
        while trace.executed() < at && trace.step() {}
        trace.kill();
        deaths += 1;
        stage.check(deaths);
    }
    println!(
        "{name}: {total} instructions, number {} decides, {} deaths",
        decisive[0],
        points.len()
    );
}
