//! A producer and its consumers, and how one round of operations is counted and timed.

use std::hint::black_box;
use std::time::{Duration, Instant};

use gpu_ipc::backend::DeviceId;
use gpu_ipc::host::{HostBackend, HostConfig};
use gpu_ipc::session::ShareOptions;
use gpu_ipc::{After, Descriptor, Gpu, Participant, ReceivedBlock, SentBlock, Session, To, Wait};

use crate::heap::{Heap, HeapForEach, OneHeap};
use crate::stepper;

/// Operations of a round.
pub const BATCH: usize = 64;
/// Participants of a fan-out.
pub const CROWD: usize = 8;
/// Bytes of a piece.
const PIECE: u64 = 2 << 20;

/// What is there before the first round.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Before {
    /// A block that one participant has mapped.
    Block,
    /// The same, and blocks in limbo.
    Limbo(usize),
    /// The block lies across two pieces of an arena that grew in place.
    Pieces,
    /// [`CROWD`] participants more.
    Crowd,
}

/// A producer and a consumer, and what a round needs.
pub struct Pair {
    pub session: Session,
    pub participant: Participant,
    crowd: Vec<Participant>,
    pub block: SentBlock,
    pub burden: u64,
    /// Marks what is counted.
    pub marks: bool,
    pub spent: Duration,
    in_limbo: Vec<ReceivedBlock>,
    pub heap: Option<Heap<OneHeap>>,
    pub thread_heaps: Option<Heap<HeapForEach>>,
    _dir: tempfile::TempDir,
}

impl Pair {
    pub fn new(before: Before, burden: u64) -> Pair {
        let dir = tempfile::tempdir().expect("a directory");
        let gpu = Gpu::new(
            HostBackend::new(HostConfig::default()).expect("it opens"),
            DeviceId(0),
        )
        .expect("a device");
        let builder = Session::builder(gpu.clone()).socket(dir.path().join("s"));
        let (builder, bytes) = match before {
            Before::Pieces => (
                builder.grows_in_place(true).region_bytes(PIECE),
                PIECE + 4096,
            ),
            _ => (builder, 4096),
        };
        let session = builder.open().expect("a session");
        if before == Before::Pieces {
            // The arena keeps both pieces.
            drop([
                session.alloc(PIECE).expect("there is room"),
                session.alloc(PIECE).expect("there is room"),
            ]);
        }
        let block = session.alloc(bytes).expect("there is room");
        assert_eq!(
            session.stats().source.regions,
            if before == Before::Pieces { 2 } else { 1 }
        );
        let join = || {
            Participant::builder(gpu.clone())
                .connect(session.socket_path())
                .expect("connected")
        };
        let participant = join();
        let crowd = (0..if before == Before::Crowd { CROWD } else { 0 })
            .map(|_| join())
            .collect();
        let mut pair = Pair {
            session,
            participant,
            crowd,
            block,
            burden,
            marks: false,
            spent: Duration::ZERO,
            in_limbo: Vec::new(),
            heap: None,
            thread_heaps: None,
            _dir: dir,
        };
        for _ in 0..if let Before::Limbo(blocks) = before {
            blocks
        } else {
            0
        } {
            let block = pair.session.alloc(256).expect("there is room");
            let received = pair.lease(&block);
            pair.in_limbo.push(received);
        }
        // The region is mapped from here on.
        drop(pair.lease(&pair.block));
        pair.claim_all(&pair.share_all());
        pair.session.collect();
        pair
    }

    /// Counts and times what happens to each of some things.
    pub fn measure<I, T>(&mut self, input: Vec<I>, run: impl Fn(&Pair, I) -> T) -> Vec<T> {
        let mut output = Vec::with_capacity(input.len());
        let start = Instant::now();
        if self.marks {
            stepper::mark();
        }
        for one in input {
            output.push(run(self, one));
            for n in 0..self.burden {
                black_box(n);
            }
        }
        if self.marks {
            stepper::mark();
        }
        self.spent += start.elapsed();
        output
    }

    pub fn to(&self) -> To {
        To::Participant(self.participant.id())
    }

    pub fn share(&self, block: &SentBlock) -> Descriptor {
        block.share(self.to(), After::Done).expect("shared")
    }

    pub fn claim(&self, descriptor: &Descriptor) -> ReceivedBlock {
        self.participant
            .claim(descriptor.as_bytes(), Wait::None, None)
            .expect("claimed")
    }

    pub fn lease(&self, block: &SentBlock) -> ReceivedBlock {
        self.claim(&self.share(block))
    }

    pub fn share_all(&self) -> Vec<Descriptor> {
        let grants: Vec<_> = self
            .crowd
            .iter()
            .map(|one| (&self.block, To::Participant(one.id())))
            .collect();
        self.session
            .share_many(&grants, After::Done, &ShareOptions::default())
            .expect("shared")
    }

    pub fn claim_all(&self, descriptors: &[Descriptor]) {
        for (one, descriptor) in self.crowd.iter().zip(descriptors) {
            drop(
                one.claim(descriptor.as_bytes(), Wait::None, None)
                    .expect("claimed"),
            );
        }
    }

    pub fn descriptors(&self) -> Vec<Descriptor> {
        (0..BATCH).map(|_| self.share(&self.block)).collect()
    }

    pub fn blocks(&self) -> Vec<SentBlock> {
        (0..BATCH)
            .map(|_| self.session.alloc(256).expect("there is room"))
            .collect()
    }

    pub fn leases(&self) -> Vec<ReceivedBlock> {
        (0..BATCH)
            .map(|_| self.claim(&self.share(&self.block)))
            .collect()
    }
}
