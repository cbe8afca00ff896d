//! Hardware queues: a stream's wait is a kernel that spins, and occupies the queue that it runs on.
//!
//! Before 7.2 a stream is bound, when it is made, to the queue that the fewest are bound to (clr,
//! `rocdevice.cpp`, `getQueueFromPool`): what shares a queue with a stream that waits does not run.
//! From 7.2 on work goes to a queue that is idle (ROCm/rocm-systems#1958): as many waits as there
//! are queues stop everything (ROCm/rocm-systems#9249).

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

use crate::settings::{Fault, Settings};

/// Between two looks of a stream that has to wait for its queue.
const PAUSE: Duration = Duration::from_micros(50);

#[derive(Default)]
struct Queues {
    /// The waiting stream on each queue.
    occupied: Vec<Option<u64>>,
    /// The queue of each stream.
    bound: HashMap<u64, usize>,
}

/// The hardware queues of every device.
#[derive(Default)]
pub(crate) struct Turns {
    devices: Mutex<HashMap<i32, Queues>>,
    /// Some stream has waited: before that nobody is in anybody's way.
    used: AtomicBool,
}

impl Turns {
    fn devices(&self) -> MutexGuard<'_, HashMap<i32, Queues>> {
        self.devices.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Says whether a stream's work has to wait for its turn.
    pub(crate) fn matter(&self) -> bool {
        self.used.load(Ordering::Relaxed)
    }

    /// Says whether the rule is kept at all; from here on it is.
    pub(crate) fn begin(&self) -> bool {
        let kept = !Settings::get().has(Fault::FreeQueues);
        self.used.fetch_or(kept, Ordering::Relaxed);
        kept
    }

    /// Binds a stream that was made.
    pub(crate) fn bind(&self, device: i32, stream: u64) {
        let mut devices = self.devices();
        let queues = devices.entry(device).or_default();
        let most = Settings::get().queues;
        queues.occupied.resize(most, None);
        let users = |queue| {
            queues
                .bound
                .values()
                .filter(|bound| **bound == queue)
                .count()
        };
        let least = (0..most).min_by_key(|queue| users(*queue)).unwrap_or(0);
        queues.bound.insert(stream, least);
    }

    /// Forgets a stream that is destroyed.
    pub(crate) fn unbind(&self, device: i32, stream: u64) {
        if let Some(queues) = self.devices().get_mut(&device) {
            queues.bound.remove(&stream);
        }
    }

    /// Waits on a stream's thread until a queue runs its work; a wait occupies it.
    pub(crate) fn take(&self, device: i32, stream: u64, occupies: bool) {
        while !self.try_take(device, stream, occupies) {
            thread::sleep(PAUSE);
        }
    }

    fn try_take(&self, device: i32, stream: u64, occupies: bool) -> bool {
        let mut devices = self.devices();
        let queues = devices.entry(device).or_default();
        queues.occupied.resize(Settings::get().queues, None);
        // A default stream has the first.
        let own = queues.bound.get(&stream).copied().unwrap_or(0);
        let free = |holder: &Option<u64>| holder.is_none_or(|holder| holder == stream);
        let found = if Settings::get().at_least(7, 2) {
            queues.occupied.iter().position(free)
        } else {
            Some(own).filter(|own| free(&queues.occupied[*own]))
        };
        if let (Some(queue), true) = (found, occupies) {
            queues.occupied[queue] = Some(stream);
        }
        found.is_some()
    }

    /// Lets go of what a wait occupied.
    pub(crate) fn leave(&self, device: i32, stream: u64) {
        if let Some(queues) = self.devices().get_mut(&device) {
            queues
                .occupied
                .iter_mut()
                .filter(|holder| **holder == Some(stream))
                .for_each(|holder| *holder = None);
        }
    }
}
