//! Other gateways that NIXL knows.
//!
//! NIXL keeps one entry for each name, and adds to it what is loaded under that name later. It
//! forgets the entry when something does not fit. So there is one [`Known`] for each name, shared
//! by all that read from it, and what would not fit is refused before NIXL sees it. The entry goes
//! when the last reader has: a transfer that never ends keeps it.

use std::collections::HashMap;
use std::ffi::CString;
use std::sync::{Arc, Mutex, PoisonError, Weak};

use super::agent::{Agent, forget_remote, load_remote, text, within};
use super::envelope::{Envelope, Range};
use super::library::meaning;
use crate::error::{Error, Result};
use crate::transport::RemoteSpan;

/// The peers of one agent, by name.
#[derive(Default, Debug)]
pub struct Peers(Arc<Table>);

/// What NIXL knows. It is told and made to forget under this lock alone.
type Table = Mutex<HashMap<String, Weak<Known>>>;

/// A peer that NIXL knows until this is dropped.
#[derive(Debug)]
pub struct Known {
    agent: Arc<Agent>,
    table: Arc<Table>,
    name: CString,
    ranges: Mutex<Vec<Range>>,
}

impl Peers {
    /// Takes a peer's metadata, or adds it to what is known of that peer.
    ///
    /// # Errors
    ///
    /// [`Error::Malformed`] when NIXL does not take it, [`Error::Unavailable`] when it does not fit
    /// to what reads under way use.
    pub fn load(&self, agent: &Arc<Agent>, envelope: &Envelope) -> Result<Arc<Known>> {
        if envelope.name == agent.name() {
            return Err(Error::Malformed {
                what: "the name of its agent",
                got: envelope.name.clone(),
                must: "another than that of this gateway's agent",
            });
        }
        let mut peers = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let (known, added) = match peers.get(&envelope.name).map(Weak::upgrade) {
            Some(Some(known)) => {
                let added = known.add(envelope);
                (known, added)
            }
            other => {
                // Its last reader is about to take the lock, and will find another entry there, or
                // none.
                if other.is_some() {
                    peers.remove(&envelope.name);
                    forget_remote(agent, &text("the name of a peer's agent", &envelope.name)?);
                }
                (self.first(&mut peers, agent, envelope)?, Ok(()))
            }
        };
        // Before `known` may go, whose end takes the lock.
        drop(peers);
        added.map(|()| known)
    }

    /// Loads a peer that NIXL does not know.
    fn first(
        &self,
        peers: &mut HashMap<String, Weak<Known>>,
        agent: &Arc<Agent>,
        envelope: &Envelope,
    ) -> Result<Arc<Known>> {
        let name = load_all(agent, envelope)?;
        if name.to_bytes() != envelope.name.as_bytes() {
            // Another peer's entry stays, with what was added to it.
            if !name.to_str().is_ok_and(|name| peers.contains_key(name)) {
                forget_remote(agent, &name);
            }
            return Err(Error::Malformed {
                what: "the name of its agent",
                got: format!(
                    "{} outside and {name:?} within NIXL's metadata",
                    envelope.name
                ),
                must: "one name",
            });
        }
        let ranges = Mutex::new(envelope.ranges.clone());
        let known = Arc::new(Known {
            agent: Arc::clone(agent),
            table: Arc::clone(&self.0),
            name,
            ranges,
        });
        peers.insert(envelope.name.clone(), Arc::downgrade(&known));
        Ok(known)
    }
}

impl Known {
    /// The agent that knows it.
    pub fn agent(&self) -> &Arc<Agent> {
        &self.agent
    }

    /// Its name, for NIXL.
    pub fn name(&self) -> &CString {
        &self.name
    }

    /// Whether a range lies within memory that it has registered.
    pub fn covers(&self, span: &RemoteSpan) -> bool {
        let ranges = self.ranges.lock().unwrap_or_else(PoisonError::into_inner);
        ranges.iter().any(|Range { span: own, .. }| {
            own.place == span.place && within(span.address, span.bytes, own.address, own.bytes)
        })
    }

    /// Adds what a peer has registered since.
    fn add(&self, envelope: &Envelope) -> Result<()> {
        let mut ranges = self.ranges.lock().unwrap_or_else(PoisonError::into_inner);
        let added: Vec<_> = envelope
            .ranges
            .iter()
            .filter(|range| !ranges.contains(range))
            .copied()
            .collect();
        if added.is_empty() {
            return Ok(());
        }
        if let Some(other) = added
            .iter()
            .find(|range| ranges.iter().any(|own| overlap(own, range)))
        {
            return Err(Error::Unavailable {
                what: format!("the memory of {} at {:#x}", envelope.name, other.span.address),
                why: "it was registered again, and reads from that gateway use the registration before".to_owned(),
                remedy: "ask again when they have ended; a gateway with a read that never ends must be replaced",
            });
        }
        load_all(&self.agent, envelope)?;
        ranges.extend(added);
        Ok(())
    }
}

impl Drop for Known {
    fn drop(&mut self) {
        let mut peers = self.table.lock().unwrap_or_else(PoisonError::into_inner);
        let name = self.name.to_str().unwrap_or_default();
        // A load that came in between has made NIXL forget this one already, and may have put
        // another in its place.
        if peers
            .get(name)
            .is_some_and(|entry| std::ptr::eq(entry.as_ptr(), self))
        {
            peers.remove(name);
            forget_remote(&self.agent, &self.name);
        }
    }
}

/// Has NIXL take all of its metadata, and returns the name in them, which must be one.
fn load_all(agent: &Agent, envelope: &Envelope) -> Result<CString> {
    let mut loaded: Option<CString> = None;
    for blob in &envelope.blobs {
        let name = load_remote(agent, blob).map_err(refused)?;
        if loaded.get_or_insert_with(|| name.clone()) != &name {
            forget_remote(agent, &name);
            return Err(Error::Malformed {
                what: "the name of its agent",
                got: format!("{loaded:?} and {name:?}"),
                must: "one name",
            });
        }
    }
    loaded.ok_or_else(|| refused(0))
}

fn overlap(one: &Range, other: &Range) -> bool {
    let (one, other) = (one.span, other.span);
    one.place == other.place
        && one.address < other.address.saturating_add(other.bytes)
        && other.address < one.address.saturating_add(one.bytes)
}

fn refused(status: std::ffi::c_int) -> Error {
    Error::Malformed {
        what: "NIXL's metadata",
        got: format!("refused by NIXL: {} (status {status})", meaning(status)),
        must: "of a NIXL that this one can read, with the backend UCX on both sides",
    }
}
