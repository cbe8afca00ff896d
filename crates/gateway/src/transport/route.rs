//! A read by the way that is found fastest: each way is tried on the connection that the read will
//! use, then one is taken.
//!
//! ```text
//! Trying(way, round) ──all tried──► chosen ──► Reading ──► ended
//! ```
//!
//! A trial reads the first bytes of the object, or of the origin's first slot, to where they would
//! go; what it brings is read again. It also makes the connection, which the figures leave out. A
//! trial that neither ends nor fails keeps the read running without a byte, as any [`Transfer`].

use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use super::choice::{Land, Measured, Trials, Way, choose};
use super::ring::Times;
use crate::error::Result;
use crate::transport::{Pair, Peer, Progress, Transfer};

/// What is known of a read's way so far.
#[derive(Clone, Debug, Default)]
pub struct Found {
    /// What each way was found to do.
    pub measured: Vec<Measured>,
    /// The way that was taken, and when its read began.
    pub taken: Option<(Way, Instant)>,
    /// When the last trial, or the read, began: who polls does so often after it.
    pub begun: Option<Instant>,
    /// Where the bytes of a ring land, and what it spends its time with, once one is read through.
    pub ring: Option<(Land, Arc<Times>)>,
}

/// A way that can be taken.
pub struct Candidate {
    /// The way.
    pub way: Way,
    /// What a trial reads.
    pub trial: Pair,
    /// Begins to read the object.
    pub begin: Begin,
}

/// Begins a read, with the peer that was tried.
pub type Begin = Box<dyn FnOnce(Box<dyn Peer>) -> Result<Box<dyn Transfer>> + Send>;

/// A read by a way that is chosen first.
pub struct Route {
    peer: Option<Box<dyn Peer>>,
    candidates: Vec<Candidate>,
    trials: Trials,
    trial: Option<(Box<dyn Transfer>, Instant)>,
    reading: Option<Box<dyn Transfer>>,
    found: Arc<Mutex<Found>>,
}

impl Route {
    /// Prepares to read. Nothing begins before it is polled.
    ///
    /// # Safety
    ///
    /// Of every candidate: until the read has ended, the destination of its trial stays mapped,
    /// writable and unused by others, and what [`Candidate::begin`] asks for holds.
    pub unsafe fn new(
        peer: Box<dyn Peer>,
        candidates: Vec<Candidate>,
        found: Arc<Mutex<Found>>,
    ) -> Route {
        let trials = Trials::new(
            candidates
                .iter()
                .map(|one| (one.way, one.trial.to.bytes))
                .collect(),
        );
        Route {
            peer: Some(peer),
            candidates,
            trials,
            trial: None,
            reading: None,
            found,
        }
    }

    /// Takes the trials further, and begins the read when they are over. After an error nothing
    /// runs.
    fn choose(&mut self) -> Result<()> {
        if let Some((transfer, begun)) = &mut self.trial {
            let ended = match transfer.poll() {
                Ok(Progress::Running { .. }) => return Ok(()),
                Ok(Progress::Done) => Ok(begun.elapsed()),
                Err(error) => Err(error),
            };
            self.trials.ended(ended);
            self.trial = None;
        }
        let Some(peer) = &self.peer else {
            return Ok(());
        };
        if let Some(way) = self.trials.next() {
            let Some(candidate) = self.candidates.iter().find(|one| one.way == way) else {
                return Ok(());
            };
            let begun = Instant::now();
            // SAFETY: `Peer::read`: the caller of `new` vouches for the destination; of trials one
            // runs at a time, and the read begins after the last.
            match unsafe { peer.read(&[candidate.trial]) } {
                Ok(transfer) => self.trial = Some((transfer, begun)),
                Err(error) => self.trials.ended(Err(error)),
            }
            self.found
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
                .begun = Some(begun);
            return Ok(());
        }
        let way = choose(self.trials.measured())?;
        let Some(index) = self.candidates.iter().position(|one| one.way == way) else {
            return Ok(());
        };
        let Candidate { begin, .. } = self.candidates.swap_remove(index);
        let mut found = self.found.lock().unwrap_or_else(PoisonError::into_inner);
        let now = Instant::now();
        *found = Found {
            measured: self.trials.measured().to_vec(),
            taken: Some((way, now)),
            begun: Some(now),
            ring: None,
        };
        drop(found);
        let Some(peer) = self.peer.take() else {
            return Ok(());
        };
        self.reading = Some(begin(peer)?);
        Ok(())
    }
}

impl Transfer for Route {
    fn poll(&mut self) -> Result<Progress> {
        if self.reading.is_none() {
            self.choose()?;
        }
        match &mut self.reading {
            Some(reading) => reading.poll(),
            None => Ok(Progress::Running { bytes: 0 }),
        }
    }
}

impl fmt::Debug for Route {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Route")
            .field("trials", &self.trials)
            .field("reading", &self.reading)
            .finish_non_exhaustive()
    }
}
