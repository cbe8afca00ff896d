//! The participant's own thread: the producer's messages and death, ends that a lane could not queue, and unmapping.

use std::collections::HashSet;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use gpu_api::{Error, RegionId, Result};
use rustix::event::{Timespec, epoll};

use crate::blocking::Blocking;
use crate::clock::Tick;
use crate::consumer::link::Link;
use crate::consumer::mapping::{self, Answer};
use crate::counter_file::CounterFile;
use crate::message::{MOST_BYTES, ToParticipant, ToProducer};
use crate::socket::{self, ReceiveOutcome};
use crate::step::step;

/// The shortest and the longest time between two looks at what the kernel does not announce.
const POLL: (Duration, Duration) = (Duration::from_micros(50), Duration::from_millis(10));
/// How often the words are poisoned again after the producer's death, and for how long after its socket's end: a write
/// of its GPU may come late.
const POISONING: (Duration, Duration) = (Duration::from_millis(1), Duration::from_millis(100));

const SOCKET: u64 = 0;
const PRODUCER: u64 = 1;
const WAKER: u64 = 2;

/// The thread's state.
#[derive(Debug)]
pub(crate) struct Service {
    link: Arc<Link>,
    epoll: OwnedFd,
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
        let error = |e| Error::system("epoll", "raise RLIMIT_NOFILE or close descriptors", e);
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC).map_err(error)?;
        let watched =
            [(link.socket.as_fd(), SOCKET), (link.producer_pidfd.as_fd(), PRODUCER), (link.waker.fd(), WAKER)];
        for (fd, key) in watched {
            epoll::add(&epoll, fd, epoll::EventData::new_u64(key), epoll::EventFlags::IN).map_err(error)?;
        }
        Ok(Service {
            link,
            epoll,
            blocking: Blocking::default(),
            asked: HashSet::new(),
            producer_exited: false,
            hung_up: None,
            poisoning: false,
            poll: POLL.0,
        })
    }

    /// Runs until the last handle and block are gone and everything is unmapped.
    pub fn run(mut self) {
        while !self.is_finished() {
            self.turn();
        }
        self.farewell();
    }

    fn is_finished(&self) -> bool {
        let link = &self.link;
        link.closing.load(Ordering::Relaxed) && link.lanes.are_dry() && link.mappings.is_empty()
    }

    fn turn(&mut self) {
        self.link.waker.doze();
        let timeout = self.time_to_sleep();
        let timeout = timeout.map(|t| Timespec { tv_sec: t.as_secs() as i64, tv_nsec: i64::from(t.subsec_nanos()) });
        let mut events = [epoll::Event { flags: epoll::EventFlags::empty(), data: epoll::EventData::new_u64(0) }; 4];
        let count = epoll::wait(&self.epoll, &mut events[..], timeout.as_ref()).unwrap_or(0);
        self.link.waker.rise();
        for event in &events[..count] {
            match event.data.u64() {
                SOCKET => self.hear(),
                PRODUCER => self.producer_died(),
                _ => {}
            }
        }
        self.poison();
        self.link.lanes.poll();
        self.unmap_idle();
        self.poll = if count > 0 { POLL.0 } else { (self.poll * 2).min(POLL.1) };
    }

    fn time_to_sleep(&self) -> Option<Duration> {
        let link = &self.link;
        if self.poisoning {
            return Some(POISONING.0);
        }
        let unmapping = link.wants_idle.load(Ordering::Relaxed) && !link.lanes.are_dry();
        if link.lanes.poll() || unmapping { Some(self.poll) } else { None }
    }

    fn unwatch(&self, fd: BorrowedFd<'_>) {
        // The only failure is a descriptor that epoll does not know: that is what is wanted.
        let _ = epoll::delete(&self.epoll, fd);
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
            }
            ToParticipant::Closing | ToParticipant::Welcome { .. } | ToParticipant::Refused { .. } => {}
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
        self.link.gone.store(true, Ordering::Release);
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
        for mapping in link.mappings.all() {
            if !all && !self.asked.contains(&mapping.region) {
                continue;
            }
            if mapping.is_idle() && link.mappings.begin_unmap(&mapping) {
                self.asked.remove(&mapping.region);
                let link = link.clone();
                self.blocking.run(move || mapping::unmap(&link, &mapping));
            }
        }
        if all {
            for region in link.mappings.untaken() {
                // A producer that cannot be told is gone.
                let _ = link.send(&ToProducer::Unmapped { region }, None);
            }
        }
        let known: HashSet<RegionId> = link.mappings.all().iter().map(|mapping| mapping.region).collect();
        self.asked.retain(|region| known.contains(region));
        if !all && self.asked.is_empty() {
            link.wants_idle.store(false, Ordering::Relaxed);
        }
    }

    /// Ends the connection: nothing is held or mapped any more.
    fn farewell(mut self) {
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
}
