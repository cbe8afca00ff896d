//! The sends of a sender that are still counted, and what each keeps.

// Tests: `crates/torch/tests/processes/release.rs`, `crates/torch/tests/processes/death.rs`.

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use gpu_api::{RawEvent, Result};
use ipc_rc::Region;
use ipc_rc::SentBlock;

use crate::counter_file::{CounterFile, SLOTS};
use crate::recipient::{Process, Recipient};

/// How many sends each send looks at on the way, so that one who never collects does not keep
/// everything.
const LOOK: usize = 4;

/// Numbers a send of a sender; never used again there.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, PartialOrd, Ord)]
pub struct SendId(pub u64);

/// What a collect brought back.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[non_exhaustive]
pub struct Collected {
    /// Sends that their receivers let go of.
    pub released: u64,
    /// Sends whose recipient is gone, counter and all.
    pub abandoned: u64,
    /// The bytes of both.
    pub bytes: u64,
}

/// A send that is still counted.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct Outstanding {
    /// Which.
    pub id: SendId,
    /// The process it was sent to; `None` when it was not said.
    pub pid: Option<u32>,
    /// Bytes.
    pub bytes: u64,
    /// Since when.
    pub age: Duration,
    /// The process is gone: the next collect after the quarantine takes it back.
    pub gone: bool,
}

/// A send, and what it keeps.
#[derive(Debug)]
pub(crate) struct Sent {
    file: Arc<CounterFile>,
    slot: u32,
    pub block: Arc<SentBlock>,
    pub event: Option<RawEvent>,
    process: Option<Arc<Process>>,
    since: Instant,
    /// What keeps the descriptors open that the receiver takes out of this process.
    pub kept: Kept,
}

/// What a send keeps besides its block, until its receiver lets go.
#[derive(Debug)]
#[expect(dead_code, reason = "kept for its drop")]
pub(crate) enum Kept {
    /// Nothing: the name is the driver's handle.
    Nothing,
    /// The descriptor of a region on its own.
    Descriptor(Arc<OwnedFd>),
    /// The pieces of a range that the block lies in, whose own descriptors are named.
    Pieces(Vec<Arc<Region>>),
}

/// The sends of a sender.
#[derive(Debug, Default)]
pub(crate) struct Ledger {
    /// The file that counters are given out of, and the next one.
    current: Option<(Arc<CounterFile>, u32)>,
    sent: BTreeMap<u64, Sent>,
    next: u64,
    /// Up to where the last send looked.
    cursor: u64,
    /// Events of sends that are outstanding, or about to be.
    pub events: usize,
    /// One descriptor a region, by its base, while a send of it is counted.
    pub exports: BTreeMap<u64, Weak<OwnedFd>>,
}

impl Ledger {
    /// Takes the next counter, in a file of its own after each 10,000, and sets it before anybody
    /// can know of it.
    pub fn count(
        &mut self,
        block: &Arc<SentBlock>,
        to: Recipient,
        event: Option<RawEvent>,
        kept: Kept,
    ) -> Result<(SendId, Arc<CounterFile>, u32)> {
        let (file, slot) = match self.current.take() {
            Some(current) => current,
            None => (Arc::new(CounterFile::create()?), 0),
        };
        file.grant(slot);
        // A used-up file stays with its sends, and goes with the last.
        if slot + 1 < SLOTS {
            self.current = Some((file.clone(), slot + 1));
        }
        let id = self.next;
        self.next += 1;
        let (block, since) = (block.clone(), Instant::now());
        let sent = Sent {
            file: file.clone(),
            slot,
            block,
            event,
            process: to.named(),
            since,
            kept,
        };
        self.sent.insert(id, sent);
        Ok((SendId(id), file, slot))
    }

    /// Lists every send.
    pub fn all(&self) -> Vec<u64> {
        self.sent.keys().copied().collect()
    }

    /// Lists the next few sends, in turn.
    pub fn few(&mut self) -> Vec<u64> {
        let ids: Vec<u64> = self
            .sent
            .range(self.cursor..)
            .map(|(&id, _)| id)
            .take(LOOK)
            .collect();
        self.cursor = if ids.len() < LOOK {
            0
        } else {
            ids[LOOK - 1] + 1
        };
        ids
    }

    /// Takes out those of these sends that nobody holds any more: released, or sent to a process
    /// that has been gone for the quarantine.
    pub fn take_ended(&mut self, ids: &[u64], quarantine: Duration) -> (Collected, Vec<Sent>) {
        let mut collected = Collected::default();
        let mut ended = Vec::new();
        // Asked once each, however much was sent to one process.
        let mut gone: Vec<(Arc<Process>, bool)> = Vec::new();
        for id in ids {
            let Some(sent) = self.sent.get(id) else {
                continue;
            };
            let released = sent.file.count(sent.slot) <= 0;
            let abandoned = !released
                && sent.process.as_ref().is_some_and(|process| {
                    if let Some((_, gone)) =
                        gone.iter().find(|(known, _)| Arc::ptr_eq(known, process))
                    {
                        return *gone;
                    }
                    let is = process
                        .gone_since()
                        .is_some_and(|since| since.elapsed() >= quarantine);
                    gone.push((process.clone(), is));
                    is
                });
            if released || abandoned {
                collected.released += u64::from(released);
                collected.abandoned += u64::from(abandoned);
                collected.bytes += sent.block.len();
                ended.extend(self.sent.remove(id));
            }
        }
        (collected, ended)
    }

    /// Takes out a send, whatever its counter says.
    pub fn take(&mut self, id: SendId) -> Option<Sent> {
        self.sent.remove(&id.0)
    }

    /// Takes out every send.
    pub fn take_all(&mut self) -> Vec<Sent> {
        std::mem::take(&mut self.sent).into_values().collect()
    }

    /// Says which process has a send; whether the send is outstanding.
    pub fn sent_to(&mut self, id: SendId, to: Recipient) -> bool {
        let sent = self.sent.get_mut(&id.0);
        sent.map(|sent| sent.process = to.named()).is_some()
    }

    /// Describes what is still counted, oldest first.
    pub fn outstanding(&self) -> Vec<Outstanding> {
        let describe = |(&id, sent): (&u64, &Sent)| Outstanding {
            id: SendId(id),
            pid: sent.process.as_ref().map(|process| process.pid()),
            bytes: sent.block.len(),
            age: sent.since.elapsed(),
            gone: sent
                .process
                .as_ref()
                .is_some_and(|process| process.gone_since().is_some()),
        };
        self.sent.iter().map(describe).collect()
    }

    /// Says whether nothing is counted.
    pub fn is_empty(&self) -> bool {
        self.sent.is_empty()
    }
}
