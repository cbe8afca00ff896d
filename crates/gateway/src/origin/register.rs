//! Registrations beside the thread that serves: registering a large object takes seconds, and
//! lending a ring copies.
//!
//! ```text
//! ask ─► begun ──its thread──► done ──somebody waits──► the lease lives from here on
//!          │                     └──nobody asks for 30 s──► given back
//!          └── asked again meanwhile: the later question waits, and the registration goes on
//! ```
//!
//! Who asks is told every [`TELL`] that it goes on, and asks the same question again. So a
//! registration may take longer than an answer is waited for, and is not begun anew by an asker
//! that has lost patience.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::mpsc::SyncSender;
use std::time::{Duration, Instant};

use gpu_ipc::backend::thread;
use gpu_ipc::broker::server::listing::Listing;
use gpu_ipc::broker::{Identity, Reader};
use zenoh::query::Query;

use crate::digest::{Digest, PIECE};
use crate::error::{Error, Result};
use crate::local::broker;
use crate::message::{LeaseNumber, MOST_MANIFEST};
use crate::origin::rings::{Lent, Rings};
use crate::transport::choice::Way;
use crate::transport::{Registration, Span, Transport};

/// Objects that are being registered at a time.
const MOST: usize = 64;
/// How long a question waits until its asker is told that the registration goes on: half of what the
/// least patient asker waits for an answer, which then takes the gateway for one that has ended.
pub const TELL: Duration = Duration::from_millis(500);
/// What is registered, and what nobody has asked for so long, is given back.
const FORGOTTEN: Duration = Duration::from_secs(30);

/// What the serving thread is told.
pub enum Event {
    /// A question came.
    Asked(Query),
    /// An object is registered, or is not.
    Registered(Box<Done>),
    /// A list of what the broker has was taken, or could not be.
    Listed(Option<Box<Listing>>),
    /// An object was digested, or could not be.
    Digested([u8; 16], Option<Digest>),
}

/// What a lease holds: dropped in this order.
#[derive(Debug)]
pub struct Held {
    /// None where the transport does not take the object's own memory.
    pub registration: Option<Box<dyn Registration>>,
    /// The rings that the lease has.
    pub rings: Vec<Lent>,
    /// What a reader needs of the transport: for this lease's memory alone.
    pub metadata: Vec<u8>,
    /// The object's manifest, as bytes.
    pub manifest: Vec<u8>,
    /// The object's digest, where it is small.
    pub digest: Option<Digest>,
    /// The object.
    pub reader: Arc<Reader>,
    /// Where who asked is.
    pub host: String,
    /// When it asked.
    pub since: Duration,
    /// Whether it has been told that the lease was alive.
    pub confirmed: Cell<bool>,
}

impl Held {
    /// Says whether all that was lent can be read yet.
    pub fn is_alive(&self) -> bool {
        self.registration.iter().all(|one| one.is_alive())
            && self.rings.iter().all(|ring| ring.registration().is_alive())
    }
}

/// An object that is to be registered for a lease.
pub struct Wanted {
    /// The lease's number.
    pub lease: LeaseNumber,
    /// When it was asked for.
    pub since: Duration,
    /// The host that asked.
    pub host: String,
    /// The object, opened.
    pub reader: Reader,
    /// Its memory.
    pub spans: Vec<Span>,
    /// Rings that its readers may have.
    pub ways: &'static [Way],
}

/// What became of a registration.
pub struct Done {
    /// The lease's number.
    pub lease: LeaseNumber,
    /// Bytes of the object.
    pub bytes: u64,
    /// What the lease is to hold.
    pub held: Result<Held>,
}

/// Registrations that are under way, or whose asker is awaited.
pub struct Registering {
    transport: Arc<dyn Transport>,
    rings: Arc<Rings>,
    /// By lease.
    entries: BTreeMap<LeaseNumber, Entry>,
}

struct Entry {
    identity: Identity,
    since: Duration,
    /// Who waits, and since when.
    waits: Option<(Query, Instant)>,
    heard: Instant,
    done: Option<Done>,
}

impl Registering {
    /// Begins with none.
    pub fn new(transport: Arc<dyn Transport>, rings: Arc<Rings>) -> Registering {
        Registering {
            transport,
            rings,
            entries: BTreeMap::new(),
        }
    }

    /// Says whether another one may begin.
    pub fn has_room(&self) -> bool {
        self.entries.len() < MOST
    }

    /// Registers an object on a thread of its own, which tells the one that serves.
    ///
    /// # Errors
    ///
    /// The question, and why there is no thread.
    pub fn begin(
        &mut self,
        wanted: Wanted,
        query: Query,
        events: SyncSender<Event>,
    ) -> Result<(), Box<(Query, Error)>> {
        let (transport, rings) = (Arc::clone(&self.transport), Arc::clone(&self.rings));
        let (lease, identity, since) = (wanted.lease, wanted.reader.identity(), wanted.since);
        let register = move || {
            let done = register(&*transport, &rings, wanted);
            // A gateway that has ended wants it no more.
            drop(events.send(Event::Registered(Box::new(done))));
        };
        if let Err(error) = thread::start("gateway-registers", register) {
            let (what, remedy) = ("a thread".into(), "raise RLIMIT_NPROC");
            return Err(Box::new((
                query,
                Error::Unavailable {
                    what,
                    why: error.to_string(),
                    remedy,
                },
            )));
        }
        let now = Instant::now();
        self.entries.insert(
            lease,
            Entry {
                identity,
                since,
                waits: Some((query, now)),
                heard: now,
                done: None,
            },
        );
        Ok(())
    }

    /// Takes the question of a lease again. Gives it back with what became of it, if that is known.
    pub fn asked(&mut self, lease: LeaseNumber, query: Query) -> Option<(Query, Done)> {
        let entry = self.entries.get_mut(&lease)?;
        entry.heard = Instant::now();
        // The former one has an answer, or its asker waits no more.
        entry.waits = Some((query, entry.heard));
        self.finished(lease)
    }

    /// Takes what became of a registration. Gives it back with the question, if one waits.
    pub fn done(&mut self, done: Done) -> Option<(Query, Done)> {
        let lease = done.lease;
        self.entries.get_mut(&lease)?.done = Some(done);
        self.finished(lease)
    }

    fn finished(&mut self, lease: LeaseNumber) -> Option<(Query, Done)> {
        let entry = self.entries.get(&lease)?;
        if entry.done.is_none() || entry.waits.is_none() {
            return None;
        }
        let Entry { waits, done, .. } = self.entries.remove(&lease)?;
        Some((waits?.0, done?))
    }

    /// Takes the questions that have waited for [`TELL`].
    pub fn take_impatient(&mut self) -> Vec<Query> {
        let waits_long = |entry: &&mut Entry| {
            entry
                .waits
                .as_ref()
                .is_some_and(|(_, since)| since.elapsed() >= TELL)
        };
        let waits = self
            .entries
            .values_mut()
            .filter(waits_long)
            .filter_map(|entry| entry.waits.take());
        waits.map(|(query, _)| query).collect()
    }

    /// Gives back what is done and was not asked for any more, and names the leases.
    pub fn forget(&mut self) -> Vec<LeaseNumber> {
        let gone = |entry: &Entry| {
            entry.done.is_some() && entry.waits.is_none() && entry.heard.elapsed() >= FORGOTTEN
        };
        let leases: Vec<LeaseNumber> = self
            .entries
            .iter()
            .filter(|(_, entry)| gone(entry))
            .map(|(lease, _)| *lease)
            .collect();
        leases
            .iter()
            .for_each(|lease| drop(self.entries.remove(lease)));
        leases
    }

    /// Lists the objects, and when each was asked for.
    pub fn objects(&self) -> impl Iterator<Item = (Identity, Duration)> {
        self.entries
            .values()
            .map(|entry| (entry.identity, entry.since))
    }
}

fn register(transport: &dyn Transport, rings: &Rings, wanted: Wanted) -> Done {
    let Wanted {
        lease,
        since,
        host,
        reader,
        spans,
        ways,
    } = wanted;
    let bytes = spans.iter().map(|span| span.bytes).sum();
    let encoded = reader.manifest().encode();
    let manifest = match encoded {
        Ok(manifest) if manifest.len() <= MOST_MANIFEST => manifest,
        other => {
            let why = other.map_or_else(
                |error| error.to_string(),
                |manifest| format!("it has {} bytes", manifest.len()),
            );
            return Done {
                lease,
                bytes,
                held: Err(Error::Unavailable {
                    what: "the manifest".into(),
                    why,
                    remedy: "commit the object again, with fewer parts",
                }),
            };
        }
    };
    let failed = |error| Done {
        lease,
        bytes,
        held: Err(error),
    };
    let files = match transport.wants_files() {
        true => reader
            .export()
            .map_err(|e| broker("descriptors of the object", &e)),
        false => Ok(Vec::new()),
    };
    // SAFETY: `lend` asks for memory that is mapped and readable until the registration is dropped,
    // and never written to: `Held` keeps the reader, whose mapping it is, and drops it after the
    // registration. An object never changes.
    let registered = files.and_then(|files| unsafe { transport.lend(&spans, files) });
    // SAFETY: `lend`: the reader's mapping is readable, and an object never changes.
    let rings = unsafe { rings.lend(ways, &spans) };
    let registration = match registered {
        Ok(registration) => Some(registration),
        Err(error) if rings.is_empty() => return failed(error),
        Err(error) => {
            tracing::warn!(%error, "an object is read through rings alone");
            None
        }
    };
    let numbers: Vec<u64> = registration
        .iter()
        .map(|one| one.number())
        .chain(rings.iter().map(|ring| ring.registration().number()))
        .collect();
    let metadata = match transport.metadata(&numbers) {
        Ok(metadata) => metadata,
        Err(error) => return failed(error),
    };
    // SAFETY: `Digest::of`: the reader's mapping is readable, and an object never changes.
    let digest = (bytes <= PIECE).then(|| unsafe { Digest::of(&spans) });
    let confirmed = Cell::new(false);
    Done {
        lease,
        bytes,
        held: Ok(Held {
            registration,
            rings,
            metadata,
            manifest,
            digest: digest.flatten(),
            reader: Arc::new(reader),
            host,
            since,
            confirmed,
        }),
    }
}
