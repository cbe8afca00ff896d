//! A program without this library: two streams, an event and a few words, and the raw calls on
//! them.

use gpu_ipc::backend::{EventKind, RawEvent};
use gpu_ipc::{Gpu, Stream};

use super::floor::Floor;
use super::words::{Hold, Words};
use crate::failure::{Failure, Result};

/// What raw calls are made on.
#[derive(Debug)]
pub struct Naked<'a> {
    floor: &'a dyn Floor,
    gpu: Gpu,
    /// The application's stream, and one of its own that releases on.
    streams: (Stream, Stream),
    event: RawEvent,
    value: u64,
    words: Words,
    hold: Hold,
}

impl<'a> Naked<'a> {
    /// Makes it.
    pub fn new(gpu: &Gpu, floor: &'a dyn Floor) -> Result<Naked<'a>> {
        let stream = || Stream::create(gpu).map_err(Failure::from);
        Ok(Naked {
            floor,
            streams: (stream()?, stream()?),
            event: gpu.backend().create_event(gpu.device(), EventKind::Local)?,
            value: 0,
            words: Words::new(gpu)?,
            hold: Hold::new(gpu)?,
            gpu: gpu.clone(),
        })
    }

    /// Queues one write of a word: what tells a consumer that work is done.
    pub fn write(&mut self) -> Result<()> {
        self.value += 1;
        self.floor
            .write(self.streams.0.raw(), self.words.word(0), self.value)
    }

    /// Queues this many in one batch.
    pub fn writes(&mut self, count: usize) -> Result<()> {
        self.value += 1;
        self.floor
            .writes(self.streams.0.raw(), self.words.word(0), self.value, count)
    }

    /// Begins waits that are not over at once.
    pub fn begin_waits(&mut self) {
        self.hold.begin();
    }

    /// Queues one wait for a word.
    pub fn wait(&self) -> Result<()> {
        let (word, value) = self.hold.awaited();
        self.floor.wait(self.streams.0.raw(), word, value)
    }

    /// Lets the waits end.
    pub fn end_waits(&self) -> Result<()> {
        self.hold.let_go();
        self.settle()
    }

    /// Queues what ends a lease: an event behind the caller's work, a wait for it elsewhere, and
    /// the writes there.
    pub fn end(&mut self, writes: usize) -> Result<()> {
        self.value += 1;
        let (caller, own) = (self.streams.0.raw(), self.streams.1.raw());
        self.floor.record(self.event, caller)?;
        self.floor.wait_event(own, self.event)?;
        self.floor
            .writes(own, self.words.word(1), self.value, writes)
    }

    /// Waits until all of it is done.
    pub fn settle(&self) -> Result<()> {
        self.floor.settle(self.streams.0.raw())?;
        self.floor.settle(self.streams.1.raw())
    }
}

impl Drop for Naked<'_> {
    fn drop(&mut self) {
        self.hold.let_go();
        // An error here was reported before, by the call that caused it.
        let _ = self.settle();
        // SAFETY: `destroy_event` asks for a live event that nobody uses afterwards: this was its
        // owner.
        let _ = unsafe { self.gpu.backend().destroy_event(self.event) };
    }
}
