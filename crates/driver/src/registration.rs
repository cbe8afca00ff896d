//! The table of memory that streams may write words of.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use gpu_api::{DeviceId, Error, HostPtr, Result};

/// A registration that was not ended.
#[derive(Clone, Copy, Debug)]
struct Registration {
    /// The context in which it was made.
    device: DeviceId,
    /// Ending it failed: nobody knows what is left, and its context must not be given back.
    leaked: bool,
}

/// Registrations by their first address.
#[derive(Debug, Default)]
pub struct Registrations(Mutex<HashMap<usize, Registration>>);

impl Registrations {
    /// Says whether every registration was ended.
    pub fn is_empty(&self) -> bool {
        self.lock().is_empty()
    }

    /// Notes a registration.
    pub fn insert(&self, start: HostPtr, device: DeviceId) {
        self.lock().insert(
            start.0,
            Registration {
                device,
                leaked: false,
            },
        );
    }

    /// Takes out what is about to be ended.
    pub fn take(&self, start: HostPtr) -> Result<DeviceId> {
        let mut all = self.lock();
        let found = all.get(&start.0).copied();
        match found {
            Some(Registration {
                device,
                leaked: false,
            }) => {
                all.remove(&start.0);
                Ok(device)
            }
            _ => {
                let state = if found.is_some() {
                    "which an earlier error leaked"
                } else {
                    "which is not registered"
                };
                Err(Error::Invalid {
                    what: "the address",
                    got: format!("{start:?}, {state}"),
                    must: "the start of what `register_words` took",
                })
            }
        }
    }

    /// Puts back what could not be ended, for good.
    pub fn leak(&self, start: HostPtr, device: DeviceId) {
        self.lock().entry(start.0).or_insert(Registration {
            device,
            leaked: true,
        });
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<usize, Registration>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_leaked_stays_and_is_never_taken_again() {
        let (table, start) = (Registrations::default(), HostPtr(0x1000));
        assert!(table.take(start).is_err(), "nothing is registered");
        table.insert(start, DeviceId(1));
        assert_eq!(table.take(start).expect("it is there"), DeviceId(1));
        assert!(table.is_empty());
        table.leak(start, DeviceId(1));
        assert!(table.take(start).is_err() && !table.is_empty());
    }
}
