//! The participant's own thread: the producer's messages and death, ends that a release queue could
//! not queue, and unmapping.

// Tests: `crates/ipc-rc/tests/panics.rs`, `tests/processes/notice.rs`.

use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use gpu_api::Result;

use crate::consumer::connection::hear::Heard;
use crate::consumer::connection::link::{Link, SOCKET};
use crate::consumer::leases::holdings::Holdings;
use crate::consumer::mappings::mapping::Mapping;
use crate::consumer::mappings::mapping_cache;
use crate::consumer::notice::Notice;
use transport::os::blocking::Blocking;
use transport::os::clock::Tick;
use transport::trace_point;

/// The shortest and the longest time between two looks at what the kernel does not announce.
const POLL: (Duration, Duration) = (Duration::from_micros(50), Duration::from_millis(10));
/// How often the words are poisoned again after the producer's death, and for how long after its
/// socket's end: a write of its GPU may come late.
const POISONING: (Duration, Duration) = (Duration::from_millis(1), Duration::from_millis(100));

/// Packets read before other things get their turn.
const PACKETS_A_TURN: usize = 64;

const PRODUCER: u64 = 1;
const WAKER: u64 = 2;

/// The thread's state.
pub(crate) struct Service {
    holdings: Arc<Holdings>,
    blocking: Blocking,
    producer_exited: bool,
    hung_up: Option<Tick>,
    poisoning: bool,
    poll: Duration,
}

impl Service {
    /// Makes the state; the caller runs it on a thread.
    pub fn new(holdings: Arc<Holdings>) -> Result<Service> {
        let link = &holdings.link;
        link.poller.add(link.socket.as_fd(), SOCKET)?;
        link.poller
            .add(link.facts.producer_pidfd.as_fd(), PRODUCER)?;
        link.poller.add(link.waker.fd(), WAKER)?;
        Ok(Service {
            holdings,
            blocking: Blocking::default(),
            producer_exited: false,
            hung_up: None,
            poisoning: false,
            poll: POLL.0,
        })
    }

    fn link(&self) -> &Link {
        &self.holdings.link
    }

    /// Runs until nothing is left to do, ever.
    pub fn run(mut self) {
        while !self.is_finished() {
            self.turn();
        }
        self.end();
    }

    /// Waits for something to do, and does it.
    fn turn(&mut self) {
        self.link().waker.doze();
        let timeout = self.time_to_sleep();
        let ready = self.link().poller.wait(timeout);
        self.link().waker.rise();
        for &key in &ready {
            match key {
                SOCKET => self.hear(),
                PRODUCER => self.producer_died(),
                _ => {}
            }
        }
        self.poison();
        self.holdings.queues.poll();
        self.link().look_at_watched();
        self.unmap_idle();
        self.holdings.say_goodbye();
        self.blocking.retry();
        self.poll = if ready.is_empty() {
            (self.poll * 2).min(POLL.1)
        } else {
            POLL.0
        };
    }

    /// Says after what time there may be something to do that no descriptor tells of; `None` for
    /// never.
    fn time_to_sleep(&mut self) -> Option<Duration> {
        // The second look of `doze`: a thread that left a mapping, or asked for one, while this one
        // was awake did not wake it.
        self.unmap_idle();
        if self.poisoning {
            return Some(POISONING.0);
        }
        let (link, queues) = (self.link(), &self.holdings.queues);
        let unmapping = link.wants_idle.load(Ordering::Relaxed) && !queues.are_dry();
        let watched = link.look_at_watched();
        let poll = (queues.poll() || unmapping || watched).then_some(self.poll);
        let retry = self.blocking.is_waiting().then_some(POLL.1);
        let due = link
            .table()
            .plan()
            .map(|due| due.saturating_duration_since(Instant::now()));
        [poll, retry, due].into_iter().flatten().min()
    }

    fn is_finished(&self) -> bool {
        self.holdings.is_left() && !self.blocking.is_waiting()
    }

    /// Ends the connection: nothing is held or mapped any more, and the producer has noted that, or
    /// is gone.
    fn end(&mut self) {
        let holdings = self.holdings.clone();
        holdings.queues.close();
        self.blocking.run(move || {
            let link = &holdings.link;
            holdings.mappings.ranges.release(&link.facts.gpu);
            // SAFETY: `unregister` asks for
            // - no unfinished operation on their words: every lease has ended, and the queues were
            //   dry; a wait for a fence was on a stream that its block's lease waited for;
            // - one call: this runs once.
            if let Err(error) = unsafe { link.files.unregister(&link.facts.gpu) } {
                tracing::warn!(%error, "a counter file stays registered, and so mapped");
                std::mem::forget(holdings);
            }
        });
    }

    fn unwatch(&self, fd: BorrowedFd<'_>) {
        self.link().poller.remove(fd);
    }

    fn hear(&mut self) {
        let holdings = self.holdings.clone();
        let link = &holdings.link;
        // Somebody who waits for an answer reads; after that the socket is watched again.
        let Ok(mut turn) = link.hearing.try_lock() else {
            return;
        };
        // What comes on top is told again.
        for _ in 0..PACKETS_A_TURN {
            match link.hear() {
                Heard::Message => {}
                Heard::Nothing => return,
                Heard::Nonsense => {
                    tracing::warn!(
                        "the producer has shut its end, or speaks nonsense; nothing more of it is read"
                    );
                    turn.is_over = true;
                    link.poller.pause(link.socket.as_fd(), SOCKET);
                    self.lose_producer();
                    return;
                }
                Heard::End => {
                    self.hung_up = Some(Tick::now());
                    self.unwatch(link.socket.as_fd());
                    self.lose_producer();
                    return;
                }
            }
        }
    }

    /// The producer's process is dead: nothing new comes, and waits for its GPU complete.
    fn producer_died(&mut self) {
        self.producer_exited = true;
        self.unwatch(self.link().facts.producer_pidfd.as_fd());
        self.lose_producer();
        self.poisoning = true;
        self.link().files.poison();
        trace_point!("poison");
        tracing::debug!(pid = self.link().facts.producer_pid, "the producer is dead");
    }

    fn lose_producer(&mut self) {
        // Before the poison: who sees a poisoned word knows why.
        if !self.link().gone.swap(true, Ordering::Release) {
            self.link().notices.push(Notice::ProducerGone);
        }
        self.link().wants_idle.store(true, Ordering::Relaxed);
        self.link().table().end();
        self.link().announce_change();
    }

    /// Poisons again while a late write of the dead producer's GPU may still replace the poison.
    fn poison(&mut self) {
        if self.poisoning {
            self.link().files.poison();
            if self
                .hung_up
                .is_some_and(|at| Tick::now() >= at.after(POISONING.1))
            {
                self.poisoning = false;
            }
        }
    }

    /// Unmaps idle regions: those that the producer asks for, or all when either side ends.
    fn unmap_idle(&mut self) {
        let holdings = self.holdings.clone();
        let (link, mappings_now) = (&holdings.link, || holdings.mappings.all());
        if !link.wants_idle.load(Ordering::Relaxed) {
            return;
        }
        let all = link.closing.load(Ordering::Relaxed) || link.is_gone();
        let mut mappings = mappings_now();
        // Before the look: the end of a last use after it wakes this thread.
        mappings.iter().for_each(|mapping| mapping.watch(true));
        mappings.retain(|mapping| {
            let unwanted = all || link.is_asked(mapping.region());
            !(unwanted && unmap_if_idle(&holdings, &mut self.blocking, mapping))
        });
        // Idle first, and of those the ones that nobody has entered for longest, to within one
        // look.
        if holdings.mappings.is_exceeded() {
            let kept = holdings.mappings.before_what_is_asked(link);
            for untouched in [true, false] {
                mappings.retain(|mapping| {
                    let due = holdings.mappings.is_exceeded()
                        && mapping.is_idle()
                        && !(untouched && mapping.take_touched())
                        && !kept.contains(&mapping.region());
                    !(due && unmap_if_idle(&holdings, &mut self.blocking, mapping))
                });
            }
        }
        if all {
            {
                let mut table = link.table();
                table.abandon_all(Instant::now());
                table.hand_over();
            }
            // A close may wait for the end of the last question.
            link.announce_change();
        }
        if !all {
            // Before the looks: a wish that comes after them sets the flag again. Acquire, so that
            // a wish whose flag is wiped here is seen.
            link.wants_idle.swap(false, Ordering::Acquire);
            if link.closing.load(Ordering::Relaxed)
                || link.is_asked_for_any(|region| {
                    mappings_now()
                        .iter()
                        .any(|mapping| mapping.region() == region)
                })
                || holdings.mappings.is_exceeded()
            {
                link.wants_idle.store(true, Ordering::Relaxed);
            } else {
                mappings.iter().for_each(|mapping| mapping.watch(false));
            }
        }
    }
}

/// Begins to unmap an unused region, and says whether it did.
fn unmap_if_idle(
    holdings: &Arc<Holdings>,
    blocking: &mut Blocking,
    mapping: &Arc<Mapping<Holdings>>,
) -> bool {
    if !mapping.is_idle() || !holdings.mappings.begin_unmap(&holdings.link, mapping) {
        return false;
    }
    let (holdings, mapping) = (holdings.clone(), mapping.clone());
    blocking.run(move || mapping_cache::unmap(&holdings.mappings, &holdings.link, &mapping));
    true
}
