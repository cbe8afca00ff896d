//! The origin's staging rings: lent to leases, used again, never freed.
//!
//! | step | who | what |
//! |---|---|---|
//! | lend | origin, when it grants | a ring that no other lease has goes into what the lease holds, its slots filled with the first pieces |
//! | read | replica | a slot, when it was told that its piece is there |
//! | fill | replica asks, when its read of the slot has ended | the origin looks that the lease is live and the slot's number has risen, copies the piece, waits for the copy, and only then says yes |
//! | end | origin | the ring goes back with all that the lease held, after the lease has ended |
//!
//! Why a confirmed copy is right though its bytes went through a ring: while the lease is live, its
//! slots are its own, and the lease's thread writes pieces of its object to them, and nothing else
//! does. The replica reads a slot between the yes to its last question for it and its next
//! question, so nobody writes there meanwhile. Bytes that were read after the lease's end may be of
//! any object; then the confirmation says no.
//!
//! | message | lost | late or repeated |
//! |---|---|---|
//! | a question to fill | the replica asks again, with a higher number | the number has not risen: the slot is left alone, and the answer is no |
//! | its answer | the same | it is the answer to a question that nobody waits for |
//!
//! A repeated question would otherwise write to a slot that is being read. A replica that dies or
//! is stopped asks nothing: the lease's timer ends it. `tests/staging.rs` checks this on a model,
//! with four controls.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};

use gpu_ipc::Gpu;

use crate::error::Result;
use crate::message::Fill;
use crate::net::call::Lent as Described;
use crate::transport::choice::Way;
use crate::transport::staging::{LEAST, LEAST_STAGED, Staging, shape};
use crate::transport::{Place, Registration, Span, Transport};

/// Rings of one way, in all.
const MOST: usize = 4;
/// A ring takes at most this part of the device memory that is free.
const SHARE: u64 = 8;

/// Slots as the user wants them; else those that a way has by itself.
#[derive(Clone, Copy, Default, Debug)]
pub struct Slots {
    /// Bytes of each of the device's; with `always` of all.
    pub bytes: Option<u64>,
    /// How many a ring of the device has.
    pub count: Option<usize>,
    /// Whether objects of any length have a ring.
    pub always: bool,
}

/// The rings of a gateway, by way.
pub struct Rings {
    gpu: Gpu,
    transport: Arc<dyn Transport>,
    wanted: Slots,
    made: Mutex<BTreeMap<Way, usize>>,
    free: Arc<Mutex<Vec<Ring>>>,
}

struct Ring {
    way: Way,
    staging: &'static Staging,
    registration: Box<dyn Registration>,
}

/// A ring that a lease has: goes back to the others when it is dropped.
pub struct Lent {
    ring: Option<Ring>,
    free: Arc<Mutex<Vec<Ring>>>,
    order: Mutex<Order>,
    filled: u64,
}

/// The last number of each slot that was heard: a question whose number has not risen is an old
/// one.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct Order(Vec<u64>);

impl Order {
    /// Begins with all slots at 0, which no question has.
    pub fn new(slots: usize) -> Order {
        Order(vec![0; slots])
    }

    /// Takes a question's number. Says no to one that has not risen, and to a slot that is not
    /// there.
    pub fn take(&mut self, slot: usize, number: u64) -> bool {
        match self.0.get_mut(slot) {
            Some(last) if number > *last => {
                *last = number;
                true
            }
            _ => false,
        }
    }
}

impl Rings {
    /// Has none yet.
    pub fn new(gpu: Gpu, transport: Arc<dyn Transport>, wanted: Slots) -> Rings {
        Rings {
            gpu,
            transport,
            wanted,
            made: Mutex::default(),
            free: Arc::default(),
        }
    }

    /// Lends a ring of each way that is possible, filled with the first pieces. A ring that cannot
    /// be had is missing.
    ///
    /// # Safety
    ///
    /// The object is mapped and readable, and never changes.
    pub unsafe fn lend(&self, ways: &[Way], object: &[Span]) -> Vec<Lent> {
        let bytes: u64 = object.iter().map(|region| region.bytes).sum();
        if bytes < LEAST_STAGED && !self.wanted.always {
            return Vec::new();
        }
        let mut lent = Vec::new();
        for &way in ways.iter().filter(|way| **way != Way::Direct) {
            // SAFETY: `lend_one` has our condition.
            match unsafe { self.lend_one(way, object, bytes) } {
                Ok(Some(one)) => lent.push(one),
                Ok(None) => tracing::warn!(%way, "all {MOST} rings are lent; a read goes without"),
                Err(error) => tracing::warn!(%error, "a read goes without a ring"),
            }
        }
        lent
    }

    /// # Safety
    ///
    /// As for [`lend`](Rings::lend).
    unsafe fn lend_one(&self, way: Way, object: &[Span], bytes: u64) -> Result<Option<Lent>> {
        let Some(ring) = self.take(way)? else {
            return Ok(None);
        };
        let slots = ring.staging.slots();
        let order = Mutex::new(Order::new(slots.len()));
        let filled = bytes.min(ring.staging.memory().bytes);
        let pieces = slots.iter().enumerate().map(|(slot, span)| {
            let at = span.bytes * slot as u64;
            (slot, at..filled.min(at + span.bytes))
        });
        let pieces: Vec<_> = pieces.filter(|(_, piece)| !piece.is_empty()).collect();
        // Goes back to the others if it cannot be filled.
        let lent = Lent {
            ring: Some(ring),
            free: Arc::clone(&self.free),
            order,
            filled,
        };
        // SAFETY: `Staging::fill`: our caller vouches for the object; no lease has the ring yet.
        unsafe { lent.staging().fill(object, &pieces) }?;
        Ok(Some(lent))
    }

    fn take(&self, way: Way) -> Result<Option<Ring>> {
        let mut free = self.free.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(index) = free.iter().position(|ring| ring.way == way) {
            let mut ring = free.swap_remove(index);
            drop(free);
            if !ring.registration.is_alive() {
                ring.registration = self.register(ring.staging)?;
            }
            return Ok(Some(ring));
        }
        drop(free);
        // Others wait meanwhile, so that no more are made than may be.
        let mut all = self.made.lock().unwrap_or_else(PoisonError::into_inner);
        let made = all.entry(way).or_default();
        if *made >= MOST {
            return Ok(None);
        }
        let (count, bytes) = self.slots(way);
        let staging = Staging::take(&self.gpu, way, count, bytes)?;
        let staging: &'static Staging = Box::leak(Box::new(staging));
        // Counted though it cannot be registered: it is not freed.
        *made += 1;
        drop(all);
        Ok(Some(Ring {
            way,
            staging,
            registration: self.register(staging)?,
        }))
    }

    fn register(&self, staging: &Staging) -> Result<Box<dyn Registration>> {
        let files = match self.transport.wants_files() {
            true => vec![staging.export()?],
            false => Vec::new(),
        };
        // SAFETY: `lend`: staging memory is mapped and readable for the process' life. It is written
        // to by this process alone, and a slot not while it is read.
        unsafe { self.transport.lend(&[staging.memory()], files) }
    }
}

impl Rings {
    /// Returns how many slots a ring has, and of how many bytes.
    fn slots(&self, way: Way) -> (usize, u64) {
        let (slots, slot_bytes) = shape(way);
        let bytes = self.wanted.bytes.unwrap_or(slot_bytes);
        if way != Way::DeviceRing {
            return (
                slots,
                if self.wanted.always {
                    bytes
                } else {
                    slot_bytes
                },
            );
        }
        let count = self.wanted.count.unwrap_or(slots);
        let free = self
            .gpu
            .backend()
            .memory_info(self.gpu.device())
            .map_or(u64::MAX, |info| info.free_bytes);
        (count, within(count, bytes, free / SHARE))
    }
}

/// Halves slots until a ring of them has no more bytes than `most`, down to 1 MiB.
fn within(count: usize, bytes: u64, most: u64) -> u64 {
    let mut bytes = bytes;
    while bytes / 2 >= LEAST && bytes.saturating_mul(count as u64) > most {
        bytes /= 2;
    }
    bytes
}

impl Lent {
    fn ring(&self) -> &Ring {
        self.ring.as_ref().expect("a ring until it is dropped")
    }

    fn staging(&self) -> &'static Staging {
        self.ring().staging
    }

    /// Names its way.
    pub fn way(&self) -> Way {
        self.ring().way
    }

    /// Returns its registration.
    pub fn registration(&self) -> &dyn Registration {
        &*self.ring().registration
    }

    /// Describes it to the replica.
    pub fn describe(&self) -> Described {
        let slots = self.staging().slots();
        let device = match slots[0].place {
            Place::Host => None,
            Place::Device(ordinal) => Some(ordinal),
        };
        // Where peers find it may be elsewhere.
        let base = self.registration().addresses().first().copied();
        let base = base.unwrap_or(self.staging().memory().address);
        let at = |slot: &Span| base + (slot.address - self.staging().memory().address);
        let at = slots.iter().map(at).collect();
        Described {
            way: self.way(),
            slots: at,
            slot_bytes: slots[0].bytes,
            device,
            filled: self.filled,
        }
    }

    /// Fills slots with pieces of the object, and says whether they are there.
    ///
    /// # Safety
    ///
    /// The object is mapped and readable, and never changes.
    pub unsafe fn fill(&self, fill: &Fill, object: &[Span]) -> bool {
        let mut order = self.order.lock().unwrap_or_else(PoisonError::into_inner);
        if !fill
            .pieces
            .iter()
            .all(|&(slot, ..)| order.take(slot, fill.number))
        {
            return false;
        }
        let pieces = fill
            .pieces
            .iter()
            .map(|&(slot, at, bytes)| (slot, at..at.saturating_add(bytes)));
        // SAFETY: `Staging::fill`: our caller vouches for the object. The slots are this lease's,
        // and its reader asks for another piece when its read has ended; a reader that breaks this
        // gets wrong bytes, and no other does.
        let filled = unsafe { self.staging().fill(object, &pieces.collect::<Vec<_>>()) };
        filled
            .inspect_err(|error| tracing::warn!(%error, "slots were not filled"))
            .is_ok()
    }
}

impl Drop for Lent {
    fn drop(&mut self) {
        self.free
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .extend(self.ring.take());
    }
}

impl fmt::Debug for Lent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Lent")
            .field("way", &self.ring.as_ref().map(|ring| ring.way))
            .finish_non_exhaustive()
    }
}

impl fmt::Debug for Rings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Rings")
            .field("made", &self.made)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_ring_takes_no_more_than_its_share() {
        let mib = 1 << 20;
        assert_eq!(within(16, 64 * mib, 1024 * mib), 64 * mib);
        assert_eq!(within(16, 64 * mib, 1023 * mib), 32 * mib);
        assert_eq!(within(4, 256 * mib, 100 * mib), 16 * mib);
        assert_eq!(
            within(16, 64 * mib, 0),
            mib,
            "less is not worth its questions"
        );
        assert_eq!(
            within(16, mib / 2, 0),
            mib / 2,
            "what a user wants smaller stays"
        );
    }
}
