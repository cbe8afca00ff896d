//! The ring on the host's memory, with a transport that takes as many polls as it is told, fails
//! and hangs.

use std::collections::HashMap;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use proptest::prelude::*;

use super::*;
use crate::transport::Place;
use crate::transport::staging::InObject;

const SLOT: u64 = 64;

/// What the steps do, and what was seen of them.
#[derive(Default, Debug)]
struct Script {
    /// Polls that each step takes: fill, read, copy.
    polls: [usize; 3],
    /// The step that fails, and at which of its begins or ends.
    fails: Option<(usize, When, usize)>,
    /// Reads from this one on never end.
    hangs: Option<usize>,
    begun: [AtomicUsize; 3],
    /// How many of each kind have ended: a link, and each side's copies, serve one after the other.
    served: [AtomicUsize; 3],
    running: [AtomicUsize; 3],
    /// Whether all three were seen running at a time.
    overlapped: AtomicBool,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum When {
    Begins,
    Ends,
}

const FILL: usize = 0;
const READ: usize = 1;
const COPY: usize = 2;

/// A step that was begun: its number and the polls it still takes.
#[derive(Debug)]
struct Step {
    kind: usize,
    number: usize,
    /// How many of its kind are served before it.
    turn: usize,
    left: usize,
}

impl Script {
    fn begin(&self, kind: usize) -> Result<Step> {
        let number = self.begun[kind].fetch_add(1, Ordering::Relaxed);
        if self.fails == Some((kind, When::Begins, number)) {
            return Err(Error::Transfer {
                why: format!("step {kind} does not begin"),
            });
        }
        let before = self.running[kind].fetch_add(1, Ordering::Relaxed);
        if self
            .running
            .iter()
            .all(|running| running.load(Ordering::Relaxed) > 0)
        {
            self.overlapped.store(true, Ordering::Relaxed);
        }
        let turn = self.served[kind].load(Ordering::Relaxed) + before;
        Ok(Step {
            kind,
            number,
            turn,
            left: self.polls[kind],
        })
    }

    fn poll(&self, step: &mut Step) -> Result<bool> {
        if step.turn != self.served[step.kind].load(Ordering::Relaxed) {
            return Ok(false);
        }
        if step.left > 0
            || (step.kind == READ && self.hangs.is_some_and(|from| step.number >= from))
        {
            step.left = step.left.saturating_sub(1);
            return Ok(false);
        }
        self.running[step.kind].fetch_sub(1, Ordering::Relaxed);
        self.served[step.kind].fetch_add(1, Ordering::Relaxed);
        if self.fails == Some((step.kind, When::Ends, step.number)) {
            return Err(Error::Transfer {
                why: format!("step {} fails", step.kind),
            });
        }
        Ok(true)
    }
}

/// Memory of both sides, which outlives every ring of a case.
type Bytes = Arc<Mutex<Vec<u8>>>;

struct Origin {
    script: Arc<Script>,
    object: Vec<u8>,
    slots: Vec<Bytes>,
    steps: HashMap<usize, (Step, Range<u64>)>,
    /// Wanted, and not asked for.
    noted: Vec<(usize, Range<u64>)>,
}

impl Source for Origin {
    fn fill(&mut self, slot: usize, bytes: Range<u64>) {
        assert!(
            self.noted.iter().all(|(noted, _)| *noted != slot),
            "slot {slot} is wanted twice"
        );
        self.noted.push((slot, bytes));
    }

    fn send(&mut self) -> Result<()> {
        for (slot, bytes) in self.noted.drain(..) {
            let step = self.script.begin(FILL)?;
            assert!(
                self.steps.insert(slot, (step, bytes)).is_none(),
                "slot {slot} is being filled"
            );
        }
        Ok(())
    }

    fn filled(&mut self, slot: usize) -> Result<bool> {
        if self.noted.iter().any(|(noted, _)| *noted == slot) {
            return Ok(false);
        }
        let never = || Error::Transfer {
            why: format!("step {FILL} was not begun"),
        };
        let (step, bytes) = self.steps.get_mut(&slot).ok_or_else(never)?;
        if !self.script.poll(step)? {
            return Ok(false);
        }
        let piece = &self.object[bytes.start as usize..bytes.end as usize];
        self.slots[slot].lock().expect("no panic")[..piece.len()].copy_from_slice(piece);
        self.steps.remove(&slot);
        Ok(true)
    }
}

/// Bits of an address that count bytes; those above are the index of a buffer.
const OFFSET: u32 = 32;

/// Finds the buffer of an address, and the byte in it.
fn place(of: u64, buffers: &[Bytes]) -> (Bytes, usize) {
    (
        Arc::clone(&buffers[(of >> OFFSET) as usize]),
        (of & ((1 << OFFSET) - 1)) as usize,
    )
}

/// Reads by the index of a buffer.
#[derive(Debug)]
struct Wire {
    script: Arc<Script>,
    from: Vec<Bytes>,
    to: Vec<Bytes>,
}

impl Peer for Wire {
    unsafe fn read(&self, pairs: &[Pair]) -> Result<Box<dyn Transfer>> {
        let step = self.script.begin(READ)?;
        let part = |pair: &Pair| {
            assert_eq!(pair.from.bytes, pair.to.bytes);
            (
                place(pair.from.address, &self.from),
                place(pair.to.address, &self.to),
                pair.to.bytes as usize,
            )
        };
        Ok(Box::new(Flight {
            script: Arc::clone(&self.script),
            step,
            parts: pairs.iter().map(part).collect(),
        }))
    }
}

/// A buffer, and the byte of it at which a part begins.
type Side = (Bytes, usize);

#[derive(Debug)]
struct Flight {
    script: Arc<Script>,
    step: Step,
    parts: Vec<(Side, Side, usize)>,
}

impl Transfer for Flight {
    fn poll(&mut self) -> Result<Progress> {
        if !self.script.poll(&mut self.step)? {
            // The half of it, once it is this read's turn.
            let all: usize = self.parts.iter().map(|(_, _, bytes)| bytes).sum();
            let is_served = self.step.turn == self.script.served[READ].load(Ordering::Relaxed);
            return Ok(Progress::Running {
                bytes: if is_served { all as u64 / 2 } else { 0 },
            });
        }
        for ((from, first), (to, at), bytes) in &self.parts {
            let from = from.lock().expect("no panic");
            to.lock().expect("no panic")[*at..at + bytes]
                .copy_from_slice(&from[*first..first + bytes]);
        }
        Ok(Progress::Done)
    }
}

struct Copies {
    script: Arc<Script>,
    slots: Vec<Bytes>,
    object: Bytes,
    steps: HashMap<usize, (Step, Range<u64>)>,
}

impl Landing for Copies {
    fn spans(&self, slot: usize, piece: &Range<u64>) -> Result<Vec<Span>> {
        Ok(vec![Span {
            address: (slot as u64) << OFFSET,
            bytes: piece.end - piece.start,
            place: Place::Host,
        }])
    }

    unsafe fn copy(&mut self, slot: usize, to: Range<u64>) -> Result<()> {
        let step = self.script.begin(COPY)?;
        assert!(
            self.steps.insert(slot, (step, to)).is_none(),
            "slot {slot} is being copied"
        );
        Ok(())
    }

    fn copied(&mut self, slot: usize) -> Result<bool> {
        let (step, to) = self.steps.get_mut(&slot).expect("it is being copied");
        if !self.script.poll(step)? {
            return Ok(false);
        }
        let slots = self.slots[slot].lock().expect("no panic");
        let object = &mut self.object.lock().expect("no panic")[to.start as usize..to.end as usize];
        object.copy_from_slice(&slots[..object.len()]);
        self.steps.remove(&slot);
        Ok(true)
    }
}

struct Case {
    ring: Ring<Origin>,
    script: Arc<Script>,
    object: Bytes,
    right: Vec<u8>,
}

/// The origin's side of a case: its slots, its object, and what fills the slots with it.
fn origin(script: &Arc<Script>, slots: usize, bytes: usize) -> (Vec<Bytes>, Vec<u8>, Origin) {
    let from = buffers(slots);
    let right: Vec<u8> = (0..bytes).map(|at| (at * 7 / 3) as u8 | 1).collect();
    let origin = Origin {
        script: Arc::clone(script),
        object: right.clone(),
        slots: from.clone(),
        steps: HashMap::new(),
        noted: Vec::new(),
    };
    (from, right, origin)
}

fn buffers(count: usize) -> Vec<Bytes> {
    (0..count)
        .map(|_| Arc::new(Mutex::new(vec![0; SLOT as usize])))
        .collect()
}

fn remote(slots: usize) -> Vec<RemoteSpan> {
    let slot = |slot| RemoteSpan {
        address: slot << OFFSET,
        bytes: SLOT,
        place: Place::Host,
    };
    (0..slots as u64).map(slot).collect()
}

fn case(slots: usize, bytes: usize, script: Script) -> Case {
    let script = Arc::new(script);
    let (from, right, origin) = origin(&script, slots, bytes);
    let to = buffers(slots);
    let object: Bytes = Arc::new(Mutex::new(vec![0; bytes]));
    let wire = Wire {
        script: Arc::clone(&script),
        from,
        to: to.clone(),
    };
    let copies = Copies {
        script: Arc::clone(&script),
        slots: to,
        object: Arc::clone(&object),
        steps: HashMap::new(),
    };
    // SAFETY: `Ring::new`: no address is dereferenced here, each is the index of a buffer behind a
    // lock.
    let ring = unsafe {
        Ring::new(
            Box::new(wire),
            origin,
            Box::new(copies),
            remote(slots),
            bytes as u64,
            Arc::default(),
        )
    };
    Case {
        ring: ring.expect("slots"),
        script,
        object,
        right,
    }
}

impl Case {
    /// Polls until it ends, or for `polls` polls.
    fn run(&mut self, polls: usize) -> Option<Result<()>> {
        let mut last = 0;
        for _ in 0..polls {
            match self.ring.poll() {
                Ok(Progress::Running { bytes }) => {
                    assert!(bytes >= last, "progress goes back");
                    last = bytes;
                }
                Ok(Progress::Done) => return Some(Ok(())),
                Err(error) => return Some(Err(error)),
            }
        }
        None
    }
}

const ENOUGH: usize = 100_000;

#[test]
fn the_three_steps_of_different_pieces_run_at_a_time() {
    let mut case = case(
        4,
        64 * 40,
        Script {
            polls: [3, 3, 3],
            ..Script::default()
        },
    );
    // One after the other, 40 pieces of three steps take 40 * 3 * 4 polls.
    case.run(300).expect("it ends").expect("well");
    assert!(
        case.script.overlapped.load(Ordering::Relaxed),
        "no three steps ran at a time"
    );
}

#[test]
fn a_step_that_has_ended_lets_the_next_begin_at_the_same_look() {
    let mut case = case(4, 64 * 4, Script::default());
    case.run(2)
        .expect("one look asks, the next takes all other steps of a round")
        .expect("well");
    assert_eq!(*case.object.lock().expect("no panic"), case.right);
}

#[test]
fn the_time_without_a_read_is_counted_to_what_was_waited_for() {
    for (polls, filling) in [([1_000, 0, 0], true), ([0, 0, 1_000], false)] {
        let mut case = case(
            1,
            64 * 3,
            Script {
                polls,
                ..Script::default()
            },
        );
        case.run(ENOUGH).expect("it ends").expect("well");
        let times = &case.ring.times;
        let [reading, filled, copied] =
            [&times.reading, &times.filling, &times.copying].map(|of| of.load(Ordering::Relaxed));
        let waited = if filling {
            filled > 0 && copied == 0
        } else {
            copied > 0
        };
        assert!(waited && reading == 0, "{polls:?}: {times:?}");
    }
}

#[test]
fn bytes_are_told_as_they_arrive_and_not_by_whole_pieces() {
    let mut case = case(
        2,
        128,
        Script {
            polls: [0, 20, 20],
            ..Script::default()
        },
    );
    let mut told = Vec::new();
    while let Progress::Running { bytes } = case.ring.poll().expect("well") {
        told.push(bytes);
    }
    // Each piece has 64 bytes, of which a read that is under way tells the half; the second read is
    // served at the look at which the first has ended.
    told.dedup();
    assert_eq!(told, [0, 32, 96, 128]);
}

#[test]
fn one_slot_never_overlaps_and_yet_ends() {
    let mut case = case(
        1,
        64 * 5 + 1,
        Script {
            polls: [1, 0, 2],
            ..Script::default()
        },
    );
    case.run(ENOUGH).expect("it ends").expect("well");
    assert!(!case.script.overlapped.load(Ordering::Relaxed));
    assert_eq!(*case.object.lock().expect("no panic"), case.right);
}

#[test]
fn a_failure_of_each_step_at_each_piece_is_told_when_nothing_runs() {
    for kind in [FILL, READ, COPY] {
        for when in [When::Begins, When::Ends] {
            for number in 0..10 {
                let script = Script {
                    polls: [1, 2, 3],
                    fails: Some((kind, when, number)),
                    ..Script::default()
                };
                let mut case = case(3, 64 * 10, script);
                let error = case
                    .run(ENOUGH)
                    .expect("it ends")
                    .expect_err("a step fails")
                    .to_string();
                assert!(error.contains(&format!("step {kind}")), "{error}");
                let running: usize = case
                    .script
                    .running
                    .iter()
                    .map(|one| one.load(Ordering::Relaxed))
                    .sum();
                assert_eq!(
                    running, 0,
                    "step {kind} {when:?} {number}: told while steps run"
                );
                let begun: Vec<_> = case
                    .script
                    .begun
                    .iter()
                    .map(|one| one.load(Ordering::Relaxed))
                    .collect();
                case.ring.poll().expect_err("it says so again");
                let after: Vec<_> = case
                    .script
                    .begun
                    .iter()
                    .map(|one| one.load(Ordering::Relaxed))
                    .collect();
                assert_eq!(begun, after, "a step began after the end");
            }
        }
    }
}

#[test]
fn a_read_that_never_ends_keeps_the_ring_running() {
    let mut case = case(
        3,
        64 * 10,
        Script {
            polls: [0, 1, 1],
            hangs: Some(4),
            ..Script::default()
        },
    );
    assert!(case.run(10_000).is_none(), "it ended");
    assert!(
        case.script.running[READ].load(Ordering::Relaxed) > 0,
        "nothing hangs"
    );
}

#[test]
fn a_failure_beside_a_read_that_never_ends_is_not_told() {
    let fails = Some((COPY, When::Ends, 0));
    let mut case = case(
        3,
        64 * 10,
        Script {
            polls: [0, 1, 5],
            hangs: Some(1),
            fails,
            ..Script::default()
        },
    );
    assert!(
        case.run(10_000).is_none(),
        "it was told while a read writes to a buffer"
    );
}

#[test]
fn slots_of_several_lengths_and_none_are_refused() {
    let slot = |bytes| RemoteSpan {
        address: 0,
        bytes,
        place: Place::Host,
    };
    for slots in [vec![], vec![slot(0)], vec![slot(64), slot(32)]] {
        let script = Arc::default();
        let wire = Wire {
            script: Arc::clone(&script),
            from: Vec::new(),
            to: Vec::new(),
        };
        let (_, _, origin) = origin(&script, 1, 64);
        let landing = Box::new(InObject { object: Vec::new() });
        // SAFETY: `Ring::new`: nothing is ever polled.
        let refused =
            unsafe { Ring::new(Box::new(wire), origin, landing, slots, 64, Arc::default()) };
        assert!(matches!(
            refused.expect_err("no ring"),
            Error::Invalid { .. }
        ));
    }
}

#[test]
fn an_object_without_the_bytes_is_told_when_nothing_runs() {
    let script = Arc::new(Script {
        polls: [0, 5, 0],
        ..Script::default()
    });
    let (from, _, origin) = origin(&script, 2, 256);
    let wire = Wire {
        script: Arc::clone(&script),
        from,
        to: buffers(1),
    };
    let landing = Box::new(InObject {
        object: vec![Span {
            address: 0,
            bytes: SLOT,
            place: Place::Host,
        }],
    });
    // SAFETY: `Ring::new`: no address is dereferenced here.
    let ring = unsafe {
        Ring::new(
            Box::new(wire),
            origin,
            landing,
            remote(2),
            256,
            Arc::default(),
        )
    };
    let mut ring = ring.expect("slots");
    let error = (0..ENOUGH)
        .find_map(|_| ring.poll().err())
        .expect("it ends")
        .to_string();
    assert!(error.contains("bytes of an object"), "{error}");
    assert_eq!(
        script.running[READ].load(Ordering::Relaxed),
        0,
        "told while a read runs"
    );
}

proptest! {
    #[test]
    fn every_byte_arrives_whatever_the_speeds(
        slots in 1usize..6,
        bytes in 0usize..1_000,
        polls in prop::array::uniform3(0usize..6),
    ) {
        let mut case = case(slots, bytes, Script { polls, ..Script::default() });
        case.run(ENOUGH).expect("it ends").expect("well");
        prop_assert_eq!(&*case.object.lock().expect("no panic"), &case.right);
        prop_assert!(matches!(case.ring.poll(), Ok(Progress::Done)));
    }

    #[test]
    fn every_byte_lands_in_an_object_of_several_regions(
        slots in 1usize..6,
        regions in prop::collection::vec(1usize..200, 1..6),
        polls in prop::array::uniform3(0usize..6),
    ) {
        let script = Arc::new(Script { polls, ..Script::default() });
        let bytes: usize = regions.iter().sum();
        let (from, right, origin) = origin(&script, slots, bytes);
        let to: Vec<Bytes> = regions.iter().map(|&bytes| Arc::new(Mutex::new(vec![0; bytes]))).collect();
        let region = |(index, &bytes): (usize, &usize)| {
            Span { address: (index as u64) << OFFSET, bytes: bytes as u64, place: Place::Host }
        };
        let landing = Box::new(InObject { object: regions.iter().enumerate().map(region).collect() });
        let wire = Wire { script: Arc::clone(&script), from, to: to.clone() };
        // SAFETY: `Ring::new`: no address is dereferenced here.
        let ring = unsafe { Ring::new(Box::new(wire), origin, landing, remote(slots), bytes as u64, Arc::default()) };
        let mut ring = ring.expect("slots");
        let mut polls = 0..ENOUGH;
        while !matches!(ring.poll().expect("well"), Progress::Done) {
            prop_assert!(polls.next().is_some(), "it does not end");
        }
        let found: Vec<u8> = to.iter().flat_map(|region| region.lock().expect("no panic").clone()).collect();
        prop_assert_eq!(found, right);
    }
}
