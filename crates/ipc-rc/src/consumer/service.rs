//! The participant's own thread: the producer's messages and death, ends that a lane could not queue, and unmapping.

use std::collections::HashSet;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use gpu_api::{RegionId, Result};

use crate::blocking::Blocking;
use crate::clock::Tick;
use crate::consumer::desk::Forwarded;
use crate::consumer::event::Event;
use crate::consumer::link::Link;
use crate::consumer::mapping::{self, Answer, Mapping};
use crate::counter_file::CounterFile;
use crate::descriptor::LeaseId;
use crate::manual;
use crate::message::{MOST_BYTES, ToParticipant, ToProducer};
use crate::poller::Poller;
use crate::socket::{self, ReceiveOutcome};
use crate::step::step;
use crate::waker::Waker;

/// The shortest and the longest time between two looks at what the kernel does not announce.
const POLL: (Duration, Duration) = (Duration::from_micros(50), Duration::from_millis(10));
/// How often the words are poisoned again after the producer's death, and for how long after its socket's end: a write
/// of its GPU may come late.
const POISONING: (Duration, Duration) = (Duration::from_millis(1), Duration::from_millis(100));

const SOCKET: u64 = 0;
const PRODUCER: u64 = 1;
const WAKER: u64 = 2;
const EVENTS: u64 = 3;

/// The thread's state.
#[derive(Debug)]
pub(crate) struct Service {
    link: Arc<Link>,
    poller: Poller,
    blocking: Blocking,
    asked: HashSet<RegionId>,
    producer_exited: bool,
    hung_up: Option<Tick>,
    poisoning: bool,
    poll: Duration,
}

impl Service {
    /// Makes the state; the caller runs it on a thread.
    pub fn new(link: Arc<Link>) -> Result<Service> {
        let poller = Poller::new(link.manual)?;
        poller.add(link.socket.as_fd(), SOCKET)?;
        poller.add(link.producer_pidfd.as_fd(), PRODUCER)?;
        poller.add(link.waker.fd(), WAKER)?;
        if link.manual {
            // One descriptor tells the application of turns and of events.
            poller.add(link.events.as_fd(), EVENTS)?;
        }
        Ok(Service {
            link,
            poller,
            blocking: Blocking::default(),
            asked: HashSet::new(),
            producer_exited: false,
            hung_up: None,
            poisoning: false,
            poll: POLL.0,
        })
    }
}

impl manual::Service for Service {
    const THREAD: &'static str = "gpu-ipc-participant";

    fn turn(&mut self, patience: Option<Duration>) {
        self.link.waker.doze();
        let timeout = match (self.time_to_sleep(), patience) {
            (Some(a), Some(b)) => Some(a.min(b)),
            (a, b) => a.or(b),
        };
        let ready = self.poller.wait(timeout);
        self.link.waker.rise();
        for &key in &ready {
            match key {
                SOCKET => self.hear(),
                PRODUCER => self.producer_died(),
                _ => {}
            }
        }
        self.poison();
        self.link.lanes.poll();
        self.link.look_at_watched();
        self.unmap_idle();
        self.poll = if ready.is_empty() { (self.poll * 2).min(POLL.1) } else { POLL.0 };
    }

    fn time_to_sleep(&mut self) -> Option<Duration> {
        let link = &self.link;
        if self.poisoning {
            return Some(POISONING.0);
        }
        let unmapping = link.wants_idle.load(Ordering::Relaxed) && !link.lanes.are_dry();
        let watched = link.look_at_watched();
        if link.lanes.poll() || unmapping || watched { Some(self.poll) } else { None }
    }

    fn is_finished(&self) -> bool {
        let link = &self.link;
        link.closing.load(Ordering::Relaxed) && link.lanes.are_dry() && link.mappings.is_empty()
    }

    /// Ends the connection: nothing is held or mapped any more.
    fn end(&mut self) {
        let link = self.link.clone();
        link.lanes.close();
        self.blocking.run(move || {
            for file in link.files().filter(|file| file.registered.is_some()) {
                // SAFETY: `unregister_words` asks for
                // - a registration that was not ended: every file is registered once and this runs once;
                // - no unfinished operation on its words: every lease has ended, and the lanes were dry; a wait for a
                //   fence was on a stream that its block's lease waited for.
                if let Err(error) = unsafe { link.gpu.backend().unregister_words(file.counters.start()) } {
                    tracing::warn!(%error, "a counter file stays registered, and so mapped");
                    std::mem::forget(link.clone());
                    return;
                }
            }
            // A producer that cannot be told is gone.
            let _ = link.send(&ToProducer::Bye, None);
            step!("bye");
        });
    }

    fn poller(&self) -> &Poller {
        &self.poller
    }

    fn waker(&self) -> &Waker {
        &self.link.waker
    }
}

impl Service {
    fn unwatch(&self, fd: BorrowedFd<'_>) {
        self.poller.remove(fd);
    }

    fn hear(&mut self) {
        loop {
            let mut bytes = [0; MOST_BYTES];
            let mut fds = Vec::new();
            match socket::receive(self.link.socket.as_fd(), &mut bytes, &mut fds) {
                Ok(ReceiveOutcome::Empty) => return,
                Ok(ReceiveOutcome::Packet(len)) => {
                    if let Err(error) = self.obey(&bytes[..len], fds) {
                        tracing::warn!(%error, "a message of the producer's is passed over");
                    }
                }
                Ok(ReceiveOutcome::HungUp) => {
                    self.hung_up = Some(Tick::now());
                    self.unwatch(self.link.socket.as_fd());
                    self.lose_producer();
                    return;
                }
                Err(error) => {
                    tracing::warn!(%error, "the producer cannot be read");
                    return;
                }
            }
        }
    }

    fn obey(&mut self, bytes: &[u8], fds: Vec<OwnedFd>) -> Result<()> {
        let message = ToParticipant::decode(bytes, fds.len())?;
        let mut fds = fds.into_iter();
        match message {
            ToParticipant::CounterFile { index, slots } => {
                if let Some(fd) = fds.next() {
                    self.link.add_file(index, CounterFile::open(fd, slots)?)?;
                }
            }
            ToParticipant::Region { request, region, len, device, place, .. } => {
                let answer = Answer::Yes { len, device, place, fd: fds.next() };
                self.link.mappings.answered(&self.link, request, region, answer);
            }
            ToParticipant::NoRegion { request, region, code, why } => {
                self.link.mappings.answered(&self.link, request, region, Answer::No { code, why });
            }
            ToParticipant::PleaseUnmap { region } => {
                self.asked.insert(region);
                self.link.wants_idle.store(true, Ordering::Relaxed);
                self.link.events.push(Event::PleaseUnmap { region });
            }
            ToParticipant::Tickets { answers, .. } => {
                self.link.desk.tickets_answered(&answers);
                self.link.announce_change();
            }
            ToParticipant::Forwarded { request, descriptor } => {
                self.link.desk.forward_answered(request, Forwarded::Yes(Box::new(descriptor)));
                self.link.announce_change();
            }
            ToParticipant::Declined { request, code, why } => {
                self.link.desk.forward_answered(request, Forwarded::No(code, why));
                self.link.announce_change();
            }
            ToParticipant::Revoked { lease } => {
                let lease = LeaseId::new(lease.file, lease.slot, lease.generation.get());
                self.link.events.push(Event::Revoked { lease });
            }
            ToParticipant::Closing => self.link.events.push(Event::Closing),
            ToParticipant::Report { .. } | ToParticipant::Welcome { .. } | ToParticipant::Refused { .. } => {}
        }
        Ok(())
    }

    /// The producer's process is dead: nothing new comes, and whoever waits for its GPU goes on.
    fn producer_died(&mut self) {
        self.producer_exited = true;
        self.unwatch(self.link.producer_pidfd.as_fd());
        self.lose_producer();
        self.poisoning = true;
        self.link.poison();
        step!("poison");
        tracing::debug!(pid = self.link.producer_pid, "the producer is dead");
    }

    fn lose_producer(&mut self) {
        // Before the poison: who sees a poisoned word knows why.
        if !self.link.gone.swap(true, Ordering::Release) {
            self.link.events.push(Event::ProducerGone);
        }
        self.link.wants_idle.store(true, Ordering::Relaxed);
        self.link.announce_change();
    }

    /// Poisons again while a late write of the dead producer's GPU may still replace the poison.
    fn poison(&mut self) {
        if self.poisoning {
            self.link.poison();
            if self.hung_up.is_some_and(|at| Tick::now() >= at.after(POISONING.1)) {
                self.poisoning = false;
            }
        }
    }

    /// Unmaps what is idle and unwanted: asked for by the producer, or everything when it is gone or we go.
    fn unmap_idle(&mut self) {
        let link = &self.link;
        if !link.wants_idle.load(Ordering::Relaxed) {
            return;
        }
        let all = link.closing.load(Ordering::Relaxed) || link.is_gone();
        let mut mappings = link.mappings.all();
        mappings.retain(|mapping| {
            let unwanted = all || self.asked.contains(&mapping.region);
            !(unwanted && unmap_if_idle(link, &mut self.blocking, mapping))
        });
        // Idle first, and of those the ones that nobody has entered for longest, to within one look.
        for untouched in [true, false] {
            mappings.retain(|mapping| {
                let due = link.cache.is_exceeded_by(&link.mappings.all())
                    && mapping.is_idle()
                    && !(untouched && mapping.take_touched());
                !(due && unmap_if_idle(link, &mut self.blocking, mapping))
            });
        }
        if all {
            for region in link.mappings.untaken() {
                // A producer that cannot be told is gone.
                let _ = link.send(&ToProducer::Unmapped { region }, None);
            }
        }
        let known: HashSet<RegionId> = link.mappings.all().iter().map(|mapping| mapping.region).collect();
        self.asked.retain(|region| known.contains(region));
        if !all && self.asked.is_empty() && !link.cache.is_exceeded_by(&link.mappings.all()) {
            link.wants_idle.store(false, Ordering::Relaxed);
        }
    }
}

/// Begins to unmap a region that nobody uses, and says whether it did.
fn unmap_if_idle(link: &Arc<Link>, blocking: &mut Blocking, mapping: &Arc<Mapping>) -> bool {
    if !mapping.is_idle() || !link.mappings.begin_unmap(mapping) {
        return false;
    }
    let (link, mapping) = (link.clone(), mapping.clone());
    blocking.run(move || mapping::unmap(&link, &mapping));
    true
}
