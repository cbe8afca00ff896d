//! The ways of one pull: begins to read an object by the way that is wanted, or by the one that is
//! found fastest.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use gpu_ipc::Gpu;

use crate::error::{Error, Result};
use crate::net::call::{Granted, Lent};
use crate::net::key::Gateway;
use crate::net::session::Session;
use crate::replica::fills::Fills;
use crate::transport::choice::{Land, Way};
use crate::transport::ring::{Landing, Ring, Times};
use crate::transport::route::{Candidate, Found, Route};
use crate::transport::staging::{InObject, InSlots, LEAST_STAGED, Staging};
use crate::transport::{Pair, Peer, Progress, Registration, RemoteSpan, Span, Transfer, Transport};

/// Bytes of one trial of a way.
const TRIAL: u64 = 4 << 20;
/// Bytes of one part of a direct read: progress is seen by whole ones.
const PIECE: u64 = 64 << 20;

/// What reads go by, and staging memory for them.
pub struct Ways<'a> {
    session: &'a Session,
    transport: Arc<dyn Transport>,
    gpu: &'a Gpu,
    /// How long an answer is waited for.
    answer: Duration,
    /// The way to take; else the one that is found fastest.
    pub way: Option<Way>,
    /// Where the bytes of a ring land; else as [`Land::of`] has it.
    pub land: Option<Land>,
    /// Slots of this side, by way. An attempt ends when nothing writes to them any more, or with
    /// the process: so the next attempt may use them.
    stages: BTreeMap<Way, (&'static Staging, Box<dyn Registration>)>,
}

/// What is read to.
struct Target<'a> {
    object: &'a [Span],
    bytes: u64,
    /// Memory of the object that a trial may be read to, if the object is registered.
    lands: Option<Span>,
    /// Bytes that a trial reads, or a slot.
    trial: u64,
}

impl<'a> Ways<'a> {
    /// Knows the means, and has no staging memory yet.
    pub fn new(
        session: &'a Session,
        transport: Arc<dyn Transport>,
        gpu: &'a Gpu,
        answer: Duration,
    ) -> Ways<'a> {
        Ways {
            session,
            transport,
            gpu,
            answer,
            way: None,
            land: None,
            stages: BTreeMap::new(),
        }
    }

    /// Begins to read what was granted to an object here, which is registered or not.
    ///
    /// # Errors
    ///
    /// [`Error::Unavailable`] where no way leads there that is wanted, and what a direct read says
    /// that cannot begin.
    ///
    /// # Safety
    ///
    /// The object stays mapped, writable and unused by others until the transfer has ended, and for
    /// the process' life if the transfer is dropped before.
    pub unsafe fn begin(
        &mut self,
        peer: Box<dyn Peer>,
        (gateway, granted): (&Gateway, &Granted),
        object: &[Span],
        registered: bool,
        found: &Arc<Mutex<Found>>,
    ) -> Result<Box<dyn Transfer>> {
        let pairs = pairs(granted, object);
        // The longest, so that a trial of it is like the read.
        let Some(&longest) = pairs.iter().max_by_key(|pair| pair.to.bytes) else {
            return Ok(Box::new(Nothing));
        };
        let trial = TRIAL.min(longest.to.bytes);
        // SAFETY: `Peer::read` has our condition.
        let read = move |peer: Box<dyn Peer>| unsafe { peer.read(&pairs) };
        let only = self.way;
        let wanted = move |way: Way| only.is_none_or(|only| only == way);
        let bytes: u64 = object.iter().map(|region| region.bytes).sum();
        if granted.rings.is_empty() && bytes < LEAST_STAGED && wanted(Way::Direct) {
            return read(peer);
        }
        // Memory that is not registered is not read into.
        let lands = registered.then_some(longest.to);
        let target = Target {
            object,
            bytes,
            lands,
            trial,
        };
        let mut candidates = Vec::new();
        for lent in granted.rings.iter().filter(|lent| wanted(lent.way)) {
            match self.ring((gateway, granted), lent, &target, found) {
                Ok(candidate) => candidates.push(candidate),
                Err(error) => tracing::warn!(%error, "a way is not tried"),
            }
        }
        // The last: where it is slow, it is tried less often.
        if wanted(Way::Direct) && granted.direct && registered {
            candidates.push(Candidate {
                way: Way::Direct,
                trial: cut(longest, trial),
                begin: Box::new(read),
            });
        }
        if candidates.is_empty() {
            let way = only.map_or("no way".to_owned(), |way| format!("no {way}"));
            return Err(Error::Unavailable {
                what: "a way for the bytes".into(),
                why: format!("{way} leads from {} to here", gateway.host),
                remedy: "leave `--way` and `--land` out; the warnings say why each way is missing",
            });
        }
        // SAFETY: `Route::new`: the destinations are the object, as our caller promises, and slots
        // of staging memory, which is kept for the process' life and is this attempt's alone.
        Ok(Box::new(unsafe {
            Route::new(peer, candidates, Arc::clone(found))
        }))
    }

    /// Prepares to read through a ring that the lease has.
    fn ring(
        &mut self,
        (gateway, granted): (&Gateway, &Granted),
        lent: &Lent,
        target: &Target<'_>,
        found: &Arc<Mutex<Found>>,
    ) -> Result<Candidate> {
        let remote = lent.spans()?;
        let first = remote[0];
        let times = Arc::<Times>::default();
        let (lease, session) = (granted.grant.lease, self.session.clone());
        let fills = Fills::new(
            session,
            gateway.clone(),
            lease,
            lent,
            self.answer,
            Arc::clone(&times),
        );
        let object = target.object.to_vec();
        if target.lands.is_none() && self.land == Some(Land::Object) {
            return Err(Error::Unavailable {
                what: format!("a {} that is read into the object", lent.way),
                why: "the object could not be registered".into(),
                remedy: "leave `--land` out",
            });
        }
        let to_object = target
            .lands
            .filter(|to| self.land.unwrap_or(Land::of(first.place, to.place)) == Land::Object);
        let (to, land, landing): (Span, Land, Box<dyn Landing>) = match to_object {
            Some(to) => (to, Land::Object, Box::new(InObject { object })),
            None => {
                let staging = self.stage(lent, remote.len())?;
                let landing = InSlots {
                    staging,
                    object,
                    transport: Arc::clone(&self.transport),
                };
                (staging.slots()[0], Land::Slots, Box::new(landing))
            }
        };
        let (bytes, found) = (target.bytes, Arc::clone(found));
        let begin = move |peer: Box<dyn Peer>| {
            found.lock().unwrap_or_else(PoisonError::into_inner).ring =
                Some((land, Arc::clone(&times)));
            // SAFETY: `Ring::new`: the object stays as the caller of `Ways::begin` promises, also
            // if the ring is dropped before its end, and slots are kept for the process' life; the
            // trials, which wrote to them, have ended.
            let ring = unsafe { Ring::new(peer, fills, landing, remote, bytes, times) }?;
            Ok(Box::new(ring) as Box<dyn Transfer>)
        };
        Ok(Candidate {
            way: lent.way,
            trial: cut(Pair { from: first, to }, target.trial),
            begin: Box::new(begin),
        })
    }

    /// Returns slots here for those of a ring: as many, and as long.
    fn stage(&mut self, lent: &Lent, count: usize) -> Result<&'static Staging> {
        let fits = |staging: &Staging| {
            staging.slots().len() == count
                && staging
                    .slots()
                    .first()
                    .is_some_and(|one| one.bytes == lent.slot_bytes)
        };
        if let Some(&(staging, _)) = self
            .stages
            .get(&lent.way)
            .filter(|(staging, _)| fits(staging))
        {
            return Ok(staging);
        }
        let staging = Staging::of(self.gpu, lent.way, count, lent.slot_bytes)?;
        let staging: &'static Staging = Box::leak(Box::new(staging));
        // SAFETY: `register`: staging memory is mapped and writable for the process' life.
        let registration = unsafe { self.transport.register(&[staging.memory()]) }?;
        self.stages.insert(lent.way, (staging, registration));
        Ok(staging)
    }
}

/// Cuts an object's regions into pairs of the origin's bytes and this host's.
fn pairs(granted: &Granted, object: &[Span]) -> Vec<Pair> {
    let mut pairs = Vec::new();
    for (from, to) in granted.spans().zip(object) {
        let mut at = 0;
        while at < to.bytes {
            let bytes = PIECE.min(to.bytes - at);
            let from = RemoteSpan {
                address: from.address.wrapping_add(at),
                bytes,
                ..from
            };
            pairs.push(Pair {
                from,
                to: Span {
                    address: to.address + at,
                    bytes,
                    ..*to
                },
            });
            at += bytes;
        }
    }
    pairs
}

/// Shortens a pair to the bytes that a trial reads.
fn cut(mut pair: Pair, bytes: u64) -> Pair {
    let bytes = pair.to.bytes.min(pair.from.bytes).min(bytes);
    (pair.from.bytes, pair.to.bytes) = (bytes, bytes);
    pair
}

/// The read of an object without a byte, as the roll of a group is.
#[derive(Debug)]
struct Nothing;

impl Transfer for Nothing {
    fn poll(&mut self) -> Result<Progress> {
        Ok(Progress::Done)
    }
}
