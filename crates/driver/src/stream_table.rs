//! The streams that a backend knows without asking its driver.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

use gpu_api::{DeviceId, RawStream, StreamIdentity};

/// Identities of our own begin here, far from a driver's, which counts from 1.
const OWN_IDENTITIES: u64 = 1 << 63;

/// What is known of a stream.
#[derive(Clone, Copy, Debug)]
pub struct KnownStream {
    /// What no other stream had.
    pub identity: StreamIdentity,
    /// The device that it queues work for.
    pub device: DeviceId,
}

/// A backend's own streams, and those that it adopted, until they are destroyed.
#[derive(Debug)]
pub struct StreamTable {
    known: RwLock<HashMap<u64, KnownStream>>,
    next: AtomicU64,
}

impl Default for StreamTable {
    fn default() -> StreamTable {
        StreamTable {
            known: RwLock::default(),
            next: AtomicU64::new(OWN_IDENTITIES),
        }
    }
}

impl StreamTable {
    /// Notes a stream under an identity that no other had.
    pub fn insert(&self, stream: RawStream) {
        let identity = StreamIdentity(self.next.fetch_add(1, Ordering::Relaxed));
        self.put_back(
            stream,
            KnownStream {
                identity,
                device: stream.device,
            },
        );
    }

    /// Notes again a stream that was taken out and may live on.
    pub fn put_back(&self, stream: RawStream, known: KnownStream) {
        self.write().insert(stream.handle, known);
    }

    /// Forgets a stream; returns what was known of it.
    pub fn remove(&self, stream: RawStream) -> Option<KnownStream> {
        self.write().remove(&stream.handle)
    }

    /// Returns what is known of a stream.
    pub fn get(&self, stream: RawStream) -> Option<KnownStream> {
        self.read().get(&stream.handle).copied()
    }

    /// Collects what `see` gives for each of them. None of the backend's own is destroyed
    /// meanwhile; `see` must not ask this table.
    pub fn for_each<T>(&self, see: impl Fn(RawStream) -> Option<T>) -> Vec<T> {
        let known = self.read();
        known
            .iter()
            .filter_map(|(&handle, known)| see(RawStream::new(known.device, handle)))
            .collect()
    }

    /// Says whether every stream was destroyed.
    pub fn is_empty(&self) -> bool {
        self.read().is_empty()
    }

    fn read(&self) -> RwLockReadGuard<'_, HashMap<u64, KnownStream>> {
        self.known.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn write(&self) -> RwLockWriteGuard<'_, HashMap<u64, KnownStream>> {
        self.known.write().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stream_that_is_put_back_keeps_its_identity_and_a_later_one_gets_another() {
        let (table, stream) = (StreamTable::default(), RawStream::new(DeviceId(1), 0x40));
        table.insert(stream);
        let first = table.remove(stream).expect("it was noted");
        assert!(table.is_empty() && table.get(stream).is_none());
        table.put_back(stream, first);
        assert_eq!(
            table
                .get(stream)
                .map(|known| (known.identity, known.device)),
            Some((first.identity, DeviceId(1)))
        );
        table.remove(stream);
        // Another stream gets the handle: an early value of its word must not pass for a later one
        // of the former's.
        table.insert(stream);
        assert_ne!(
            table.get(stream).map(|known| known.identity),
            Some(first.identity)
        );
        assert_eq!(table.for_each(Some), [stream]);
    }
}
