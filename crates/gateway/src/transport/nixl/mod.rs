//! NIXL: NVIDIA's library that moves bytes by UCX, so by NVLink, InfiniBand, RoCE or TCP.
//!
//! It is loaded at run time. Read in this order:
//!
//! 1. [`find`]: where the library is looked for.
//! 2. `library`: its C functions.
//! 3. `agent`: an agent, with UCX, with or without a progress thread, and memory registered with
//!    it.
//! 4. `envelope`: the metadata that one gateway gives another.
//! 5. `peer`: other gateways that NIXL knows.
//! 6. `request`: one read; **one that never ends keeps its memory**.
//! 7. `transfer`: many, as one [`Transfer`].
//! 8. `card`: what a network card wrote to a GPU is made visible.
//!
//! Both sides must run their agents: a read over TCP is answered by the origin's progress thread,
//! and goes on at the replica when it is polled. It stands still while either process is stopped,
//! for as long as it is (`SIGSTOP`: still under way after 40 s; a link that is down: after 150 s;
//! `SIGKILL`: an error in 38 to 72 ms).

// Tests: `crates/gateway/tests/nixl.rs`.

mod agent;
mod card;
mod envelope;
pub mod find;
mod library;
mod peer;
mod request;
mod transfer;

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use agent::{Agent, Registered};
use envelope::{Envelope, MAX_NAME, MAX_RANGES, Range};
use peer::{Known, Peers};
use request::Kept;
use transfer::Cut;

use super::{Pair, Peer, Place, Registration, Span, Transfer, Transport};
use crate::error::{Error, Result};

/// A transport that reads by NIXL.
///
/// ```no_run
/// use gateway::transport::{Transport, nixl::Nixl};
///
/// let nixl = Nixl::start("gateway-7f3a", Some("tcp"))?;
/// assert_eq!(nixl.kind(), "nixl");
/// # Ok::<(), gateway::Error>(())
/// ```
#[derive(Debug)]
pub struct Nixl {
    shared: Arc<Shared>,
    peers: Peers,
    cut: Cut,
}

/// What registrations need as well.
#[derive(Debug)]
struct Shared {
    agent: Arc<Agent>,
    next: AtomicU64,
    registered: Mutex<BTreeMap<u64, Arc<Registered>>>,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<u64, Arc<Registered>>> {
        self.registered
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }
}

/// Has UCX ask the driver what an address is (`UCX_MEMTYPE_CACHE=n`), unless that variable is set.
///
/// UCX otherwise remembers the allocations that its module `libucm_cuda` sees, and takes any other
/// address for the host's. The module of the wheel needs `libcudart.so.12`. Where that is missing,
/// UCX goes on without the module, says so only with `UCX_LOG_LEVEL=debug`, and device memory
/// cannot be registered (seen beside CUDA 13's runtime).
///
/// # Safety
///
/// No other thread runs: the variable is set by [`std::env::set_var`].
pub unsafe fn ask_the_driver() {
    const CACHE: &str = "UCX_MEMTYPE_CACHE";
    if std::env::var_os(CACHE).is_none() {
        // SAFETY: `set_var` asks that no other thread reads or writes the environment, which our
        // caller promises.
        unsafe { std::env::set_var(CACHE, "n") };
    }
}

impl Nixl {
    /// Loads NIXL from where [`find`] says and starts an agent.
    ///
    /// `name` is how peers call the agent: it must be unique among them, and another for each
    /// process. `transports` limits UCX as `UCX_TLS` does, which goes before it: `tcp` or
    /// `tcp,cuda_copy`.
    ///
    /// # Errors
    ///
    /// [`Error::Unavailable`] without the library, with how to get it, and [`Error::Invalid`] for a
    /// name that is none.
    pub fn start(name: &str, transports: Option<&str>) -> Result<Self> {
        Self::with(name, transports, true)
    }

    /// Starts an agent that reads and that nobody reads from. It has no thread: its reads go on in
    /// [`poll`](Transfer::poll) alone, so a read by TCP wants it often.
    ///
    /// Through `cuda_ipc` UCX puts all reads from a peer on one stream. Each time that NIXL's
    /// thread goes to sleep, UCX puts a host function on every stream with work
    /// (`uct_cuda_base_iface_event_fd_arm` in `src/uct/cuda/base/cuda_iface.c`), and the next read
    /// waits for those before it. A thread that never sleeps arms all the same.
    ///
    /// # Errors
    ///
    /// As for [`start`](Nixl::start).
    pub fn start_reader(name: &str, transports: Option<&str>) -> Result<Self> {
        Self::with(name, transports, false)
    }

    fn with(name: &str, transports: Option<&str>, thread: bool) -> Result<Self> {
        if name.is_empty()
            || name.len() > MAX_NAME
            || !name.bytes().all(|byte| byte.is_ascii_graphic())
        {
            return Err(Error::Invalid {
                what: "the name of NIXL's agent",
                got: format!("{name:?}"),
                must: "1 to 128 printable characters of ASCII without a space",
            });
        }
        let library = library::Library::load(&find::Surroundings::of_process().candidates()?)?;
        let agent = Arc::new(Agent::start(library, name, transports, thread)?);
        let shared = Shared {
            agent,
            next: AtomicU64::new(1),
            registered: Mutex::default(),
        };
        Ok(Self {
            shared: Arc::new(shared),
            peers: Peers::default(),
            cut: Cut::default(),
        })
    }

    /// Sets how reads of peers that are loaded from here on are cut: into pieces of `bytes` bytes,
    /// `at_a_time` of them under way at once; 0 counts as 1. The default is 4 of 32 MiB. `u64::MAX`
    /// and 1 give NIXL each range whole.
    pub fn set_pieces(&mut self, bytes: u64, at_a_time: usize) {
        self.cut = Cut {
            piece: bytes.max(1),
            window: at_a_time.max(1),
            ..self.cut
        };
    }

    /// Writes where it should read, as a rogue does.
    #[cfg(feature = "faults")]
    #[doc(hidden)]
    pub fn set_writes(&mut self) {
        self.cut.operation = library::WRITE;
    }
}

impl Transport for Nixl {
    fn kind(&self) -> &'static str {
        "nixl"
    }

    unsafe fn register(&self, memory: &[Span]) -> Result<Box<dyn Registration>> {
        // SAFETY: `Registered::new` asks that the memory is mapped until the registration is
        // dropped, which our caller promises; a transfer that never ends keeps it, and our caller
        // keeps that memory mapped.
        let registered = Arc::new(unsafe { Registered::new(&self.shared.agent, memory)? });
        let serial = self.shared.next.fetch_add(1, Ordering::Relaxed);
        self.shared.lock().insert(serial, registered);
        Ok(Box::new(Entry {
            shared: Arc::clone(&self.shared),
            serial,
            addresses: memory.iter().map(|span| span.address).collect(),
        }))
    }

    fn metadata(&self, registrations: &[u64]) -> Result<Vec<u8>> {
        let all = self.shared.lock();
        let mut chosen = Vec::new();
        for number in registrations {
            let registered = all.get(number).ok_or_else(|| Error::Unavailable {
                what: format!("the metadata of registration {number}"),
                why: "it has ended".into(),
                remedy: "ask again",
            })?;
            chosen.push((*number, Arc::clone(registered)));
        }
        drop(all);
        let ranges: Vec<_> = chosen
            .iter()
            .flat_map(|(serial, registered)| {
                registered.spans().iter().map(|&span| Range {
                    span,
                    serial: *serial,
                })
            })
            .collect();
        if ranges.len() > MAX_RANGES {
            return Err(Error::Unavailable {
                what: format!("the metadata of {} ranges", ranges.len()),
                why: format!("a peer takes {MAX_RANGES}"),
                remedy: "commit the object again, with fewer regions",
            });
        }
        let mut blobs = vec![self.shared.agent.connection()?];
        for (_, registered) in &chosen {
            blobs.extend(registered.metadata()?);
        }
        Ok(Envelope {
            name: self.shared.agent.name().to_owned(),
            ranges,
            blobs,
        }
        .encode())
    }

    fn load_peer(&self, metadata: &[u8]) -> Result<Box<dyn Peer>> {
        let known = self
            .peers
            .load(&self.shared.agent, &Envelope::decode(metadata)?)?;
        Ok(Box::new(Reader {
            shared: Arc::clone(&self.shared),
            known,
            cut: self.cut,
        }))
    }

    fn flush(&self) -> Result<()> {
        let registered = self.shared.lock();
        let mut devices: Vec<_> = registered
            .values()
            .flat_map(|registered| registered.spans())
            .filter_map(|span| match span.place {
                Place::Host => None,
                Place::Device(ordinal) => Some(ordinal),
            })
            .collect();
        drop(registered);
        devices.sort_unstable();
        devices.dedup();
        card::flush(&devices)
    }
}

/// A registration, by its number.
#[derive(Debug)]
struct Entry {
    shared: Arc<Shared>,
    serial: u64,
    addresses: Vec<u64>,
}

impl Registration for Entry {
    fn number(&self) -> u64 {
        self.serial
    }

    fn addresses(&self) -> Vec<u64> {
        self.addresses.clone()
    }
}

impl Drop for Entry {
    fn drop(&mut self) {
        let registered = self.shared.lock().remove(&self.serial);
        // Outside of the lock: NIXL takes it back here, unless a transfer into it has not ended.
        drop(registered);
    }
}

/// A peer to read from.
#[derive(Debug)]
struct Reader {
    shared: Arc<Shared>,
    known: Arc<Known>,
    cut: Cut,
}

impl Peer for Reader {
    unsafe fn read(&self, pairs: &[Pair]) -> Result<Box<dyn Transfer>> {
        let mut destination: Vec<Arc<Registered>> = Vec::new();
        let registered = self.shared.lock();
        for pair in pairs {
            if pair.from.bytes != pair.to.bytes {
                return Err(Error::Invalid {
                    what: "the length of a destination",
                    got: format!("{} bytes", pair.to.bytes),
                    must: "the length of its source",
                });
            }
            agent::range(pair.to.address, pair.to.bytes)?;
            agent::range(pair.from.address, pair.from.bytes)?;
            if !self.known.covers(&pair.from) {
                return Err(Error::Transfer {
                    why: format!(
                        "the other gateway has not registered {} bytes at {:#x}",
                        pair.from.bytes, pair.from.address
                    ),
                });
            }
            let Some(own) = registered
                .values()
                .find(|registered| registered.covers(&pair.to))
            else {
                return Err(Error::Invalid {
                    what: "a destination",
                    got: format!("{} bytes at {:#x}", pair.to.bytes, pair.to.address),
                    must: "within memory that is registered with this transport",
                });
            };
            if !destination.iter().any(|kept| Arc::ptr_eq(kept, own)) {
                destination.push(Arc::clone(own));
            }
        }
        drop(registered);
        let kept = Kept {
            peer: Arc::clone(&self.known),
            destination,
        };
        // SAFETY: `Read::start` asks for what our caller promises.
        Ok(Box::new(unsafe {
            transfer::Read::start(kept, pairs, self.cut)?
        }))
    }
}
