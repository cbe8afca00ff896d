//! What writers and readers do: connect, create, fill, commit; open, advance, sleep, wake; watch
//! and remove.
//!
//! 1. `connection`: from the hello to the welcome. `commit`: from the last write to the epoch.
//! 2. `retire`: addresses that are given back once the GPU is done with them.
//! 3. `histories`: which history the epochs are of that were told. `questions`: what was asked and
//!    not answered yet. `link`: the thread that asks, hears and
//!    reconnects.
//! 4. `mapped`: what writers and readers have in common. `writer`: an object that is being filled.
//!    `scratch`: one that is never committed.
//! 5. `opened`: one that is leased and imported. `reader`: one that is mapped.
//! 6. `group`: one for each of several devices, all or none.
//! 7. `pool`: memory that stays writable, one holder at a time. `journal`: which of its blocks are
//!    whole. `farewell`: the end of a hold.

// Tests: `crates/broker/tests/objects/objects.rs`, `crates/broker/tests/objects/bad_input.rs`,
// `crates/broker/tests/objects/death.rs`, `crates/broker/tests/objects/pools.rs`.

mod commit;
mod connection;
mod farewell;
mod group;
mod histories;
mod journal;
mod link;
mod mapped;
mod opened;
mod pool;
mod questions;
mod reader;
mod retire;
mod scratch;
mod writer;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use gpu_api::Gpu;
use transport::os::socket::runtime_dir;
use transport::shared::sealed_file;

pub use commit::Commit;
pub use group::{GroupWriter, Roll};
pub use opened::Prepared;
pub use pool::{Pool, PoolReader};
pub use reader::Reader;
pub use scratch::Scratch;
pub use writer::{CreateOptions, Writer};

use crate::error::{ObjectError, Result};
use crate::object::identity::{Epoch, Identity, Lineage, check_name};
use crate::object::layout::Layout;
use crate::object::manifest::Readers;
use crate::server::listing::Listing;
use crate::wire::{Selector, Standing, ToBroker, ToClient, UNFINISHED};
use link::Link;

/// The most bytes of a listing.
const MOST_LISTING: u64 = 64 << 20;

/// Finds the directory of a broker: the given one, `$NVIDIA_DRA_LOCAL_IPC_DIR`, or `broker` in the
/// runtime directory.
///
/// # Errors
///
/// [`gpu_api::Error::Invalid`] for a runtime directory that is open to others.
pub fn broker_dir(explicit: Option<&Path>) -> gpu_api::Result<PathBuf> {
    if let Some(dir) = explicit {
        return Ok(dir.into());
    }
    if let Some(dir) = std::env::var_os("NVIDIA_DRA_LOCAL_IPC_DIR").filter(|dir| !dir.is_empty()) {
        return Ok(dir.into());
    }
    runtime_dir(Some(&runtime_dir(None)?.join("broker")))
}

/// How a client connects.
#[derive(Clone, Debug)]
pub struct ClientBuilder {
    gpu: Gpu,
    dir: Option<PathBuf>,
    name: String,
    patience: Duration,
}

impl ClientBuilder {
    /// Sets the broker's directory.
    #[must_use]
    pub fn dir(mut self, dir: impl Into<PathBuf>) -> ClientBuilder {
        self.dir = Some(dir.into());
        self
    }

    /// Sets what the participant calls itself, for people.
    #[must_use]
    pub fn name(mut self, name: impl Into<String>) -> ClientBuilder {
        self.name = name.into();
        self
    }

    /// Sets how long a question may take: 60 seconds. A creation waits for the driver, which may
    /// scrub memory first.
    #[must_use]
    pub fn patience(mut self, patience: Duration) -> ClientBuilder {
        self.patience = patience;
        self
    }

    /// Connects.
    ///
    /// # Errors
    ///
    /// [`gpu_api::Error::Connect`] when no broker listens, [`ObjectError::Refused`] when it
    /// refuses, [`gpu_api::Error::Forked`] in a forked child of the process that found the device.
    pub fn connect(self) -> Result<Client> {
        self.gpu.check_fork()?;
        let dir = broker_dir(self.dir.as_deref())?;
        Ok(Client {
            link: Link::connect(self.gpu, dir, self.name, self.patience)?,
        })
    }
}

/// A participant of a broker. Cheap to clone.
///
/// It reconnects by itself when the broker was started again; readers' mappings stay good all
/// along.
///
/// # Examples
///
/// ```no_run
/// use backend_host::{HostBackend, HostConfig};
/// use broker::{Client, Layout, PartSpec, Selector};
/// use gpu_api::{DeviceId, Gpu};
///
/// let gpu = Gpu::new(HostBackend::new(HostConfig::default())?, DeviceId(0))?;
/// let bytes = [0u8; 9];
/// let client = Client::connect(gpu)?;
/// let layout = Layout::pack([PartSpec::bytes("w", 9)?], b"")?;
/// let mut writer = client.create("model", layout)?;
/// writer.write("w", &bytes)?;
/// let epoch = writer.commit(&[])?.wait()?;
///
/// let reader = client.open("model")?;
/// assert_eq!((reader.epoch(), reader.read("w")?), (epoch, bytes.to_vec()));
/// # Ok::<(), broker::ObjectError>(())
/// ```
#[derive(Clone, Debug)]
pub struct Client {
    link: Arc<Link>,
}

impl Client {
    /// Starts to describe a connection, for objects on a device.
    pub fn builder(gpu: Gpu) -> ClientBuilder {
        ClientBuilder {
            gpu,
            dir: None,
            name: String::new(),
            patience: Duration::from_secs(60),
        }
    }

    /// Connects to the broker of the default directory.
    ///
    /// # Errors
    ///
    /// As [`ClientBuilder::connect`].
    pub fn connect(gpu: Gpu) -> Result<Client> {
        Client::builder(gpu).connect()
    }

    /// Makes an object to be filled: its regions are there, readable and writable by this process
    /// alone.
    ///
    /// # Errors
    ///
    /// [`ObjectError::OutOfMemory`] when there is no room for all of it; then nothing is taken.
    /// [`ObjectError::Refused`] for a limit, a name of another user, a participant under MPS.
    pub fn create(&self, name: &str, layout: Layout) -> Result<Writer> {
        self.create_with(name, layout, &CreateOptions::default())
    }

    /// As [`create`](Client::create), with options.
    ///
    /// # Errors
    ///
    /// As [`create`](Client::create), and [`ObjectError::Conflict`] when the name has another epoch
    /// than was expected.
    pub fn create_with(
        &self,
        name: &str,
        layout: Layout,
        options: &CreateOptions,
    ) -> Result<Writer> {
        Writer::create(&self.link, name, layout, options, false)
    }

    /// Makes memory that is never committed and goes with this process: what counts against the
    /// broker's limits.
    ///
    /// # Errors
    ///
    /// As [`create`](Client::create).
    pub fn scratch(&self, name: &str, layout: Layout) -> Result<Scratch> {
        Scratch::create(&self.link, name, layout)
    }

    /// Makes a pool, memory that stays writable and outlives its holder, and holds it. Its journal has
    /// so many bytes: [`pool::bytes_for`](crate::pool::bytes_for) says how many for a number of
    /// blocks. It is open to this user alone.
    ///
    /// # Errors
    ///
    /// As [`create`](Client::create) and [`adopt`](Client::adopt); [`ObjectError::Refused`] for a name
    /// that is there already; [`gpu_api::Error::Invalid`] for a layout of 0 or 16 regions, and for
    /// bytes that are no multiple of 4,096 from 8,192 to 64 MiB.
    pub fn create_pool(&self, name: &str, layout: Layout, journal_bytes: u64) -> Result<Pool> {
        self.create_pool_for(name, layout, journal_bytes, Readers::Owner)
    }

    /// As [`create_pool`](Client::create_pool), for readers of other users. No other user holds it.
    ///
    /// # Errors
    ///
    /// As [`create_pool`](Client::create_pool).
    pub fn create_pool_for(
        &self,
        name: &str,
        layout: Layout,
        journal_bytes: u64,
        readers: Readers,
    ) -> Result<Pool> {
        Pool::create(&self.link, name, layout, journal_bytes, readers)?;
        self.adopt(name, false)
    }

    /// Holds a pool: maps it writable, with the bytes that its last holder left. `at_same_addresses`:
    /// where that one had it, so that pointers in it stay good.
    ///
    /// # Errors
    ///
    /// [`ObjectError::NotFound`] when there is none; [`ObjectError::Refused`] while another process
    /// holds it ([`RefusalCode::Held`](crate::wire::RefusalCode::Held)), for a pool of another user
    /// and for a client of MPS; [`gpu_api::Error::Invalid`] when the same addresses are in use here.
    pub fn adopt(&self, name: &str, at_same_addresses: bool) -> Result<Pool> {
        Pool::adopt(&self.link, name, at_same_addresses)
    }

    /// Maps a pool read-only, beside its holder.
    ///
    /// # Errors
    ///
    /// [`ObjectError::NotFound`] when there is none, [`ObjectError::Refused`] when it is not for
    /// this user.
    pub fn read_pool(&self, name: &str) -> Result<PoolReader> {
        PoolReader::open(&self.link, name)
    }

    /// Waits until a pool was adopted more often than `seen` times, and returns how often; `None` when
    /// the time is over.
    ///
    /// # Errors
    ///
    /// As [`watch`](Client::watch).
    pub fn watch_pool(&self, name: &str, seen: u64, timeout: Duration) -> Result<Option<u64>> {
        let newer = self.watch(name, Epoch(seen), timeout)?;
        Ok(newer.map(|(generation, _)| generation.0))
    }

    /// Maps the newest epoch of a name, read-only.
    ///
    /// # Errors
    ///
    /// As [`open_one`](Client::open_one).
    pub fn open(&self, name: &str) -> Result<Reader> {
        self.open_one(&Selector::Latest(name.into()))
    }

    /// Maps an object, read-only.
    ///
    /// # Errors
    ///
    /// [`ObjectError::NotFound`] when there is none, [`ObjectError::Refused`] when it is not for
    /// this user.
    pub fn open_one(&self, selector: &Selector) -> Result<Reader> {
        Reader::open(&self.link, selector)
    }

    /// Returns what became of a commit, by the identity of its object.
    ///
    /// # Errors
    ///
    /// [`gpu_api::Error::Deadline`] without an answer.
    pub fn outcome(&self, identity: Identity) -> Result<Standing> {
        let (answer, _) = self.link.ask(
            |request| ToBroker::AskOutcome { request, identity },
            Vec::new(),
        )?;
        match answer {
            ToClient::Outcome { standing, .. } => Ok(standing),
            _ => Err(connection::nonsense()),
        }
    }

    /// Asks again for a commit that was refused because the keeper did not take it, and waits for
    /// the epoch: what was written is still there.
    ///
    /// # Errors
    ///
    /// [`ObjectError::Refused`] when the keeper still does not take it, or the object was given up;
    /// [`ObjectError::WriterLost`] when the broker went meanwhile, and the object with it.
    pub fn commit_again(&self, identity: Identity) -> Result<Epoch> {
        match self
            .link
            .ask_here(|request| ToBroker::Commit { request, identity }, Vec::new())?
        {
            (ToClient::Committed { epoch, .. }, _) => Ok(epoch),
            _ => Err(connection::nonsense()),
        }
    }

    /// Gives up an object whose commit was refused: its memory goes.
    ///
    /// # Errors
    ///
    /// [`gpu_api::Error::Deadline`] without an answer.
    pub fn give_up(&self, identity: Identity) -> Result<()> {
        self.link
            .ask_here(|request| ToBroker::Abort { request, identity }, Vec::new())
            .map(drop)
    }

    /// Waits until a name has an epoch newer than `seen`; `None` when the time is over.
    ///
    /// If keeper and broker both ended since this client learned an epoch of the name, epochs have
    /// begun anew: then any epoch that is there is newer, whatever its number.
    ///
    /// # Errors
    ///
    /// [`ObjectError::Refused`] by the broker.
    pub fn watch(
        &self,
        name: &str,
        seen: Epoch,
        timeout: Duration,
    ) -> Result<Option<(Epoch, Identity)>> {
        check_name("the name of an object", name)?;
        let deadline = Instant::now() + timeout;
        let question = |request| ToBroker::Watch {
            request,
            seen,
            name: name.into(),
        };
        match self.link.ask_until(question, Vec::new(), deadline) {
            Ok((
                ToClient::Newer {
                    identity, epoch, ..
                },
                _,
            )) => Ok(Some((epoch, identity))),
            Ok(_) => Err(connection::nonsense()),
            Err(ObjectError::Gpu(gpu_api::Error::Deadline { .. })) => {
                self.link.unwatch(name);
                Ok(None)
            }
            Err(error) => Err(error),
        }
    }

    /// Returns which history the epochs of the broker are of, while one is connected that says it.
    /// Epochs begin anew, in another history, when broker and keeper both ended.
    pub fn lineage(&self) -> Option<Lineage> {
        self.link.connection()?.lineage
    }

    /// Removes a name with all its epochs; a process that has one mapped keeps it. Returns its last
    /// epoch.
    ///
    /// # Errors
    ///
    /// [`ObjectError::NotFound`] for a name without a commit, [`ObjectError::Refused`] for another
    /// user's.
    pub fn remove(&self, name: &str) -> Result<Epoch> {
        self.remove_epoch(name, Epoch(0))
    }

    /// Removes one epoch of a name; 0 stands for all.
    ///
    /// # Errors
    ///
    /// As [`remove`](Client::remove).
    pub fn remove_epoch(&self, name: &str, epoch: Epoch) -> Result<Epoch> {
        check_name("the name of an object", name)?;
        let question = |request| ToBroker::Remove {
            request,
            epoch,
            name: name.into(),
        };
        match self.link.ask(question, Vec::new())? {
            (ToClient::Removed { epoch, .. }, _) => Ok(epoch),
            _ => Err(connection::nonsense()),
        }
    }

    /// Gives up the objects of a name that are not committed yet, whoever fills them: those of this
    /// user, or of every user for the one that the broker runs as. Their memory is free once their
    /// writers let go of it; their commits are refused. One whose commit was asked for goes on.
    ///
    /// # Errors
    ///
    /// [`ObjectError::NotFound`] when there is none.
    pub fn abort_unfinished(&self, name: &str) -> Result<()> {
        self.remove_epoch(name, UNFINISHED).map(drop)
    }

    /// Lists the objects that this user may know of, and their readers.
    ///
    /// # Errors
    ///
    /// [`gpu_api::Error::Deadline`] without an answer.
    pub fn list(&self) -> Result<Listing> {
        self.listing(|request| ToBroker::List { request })
    }

    fn listing(&self, question: impl FnOnce(u64) -> ToBroker) -> Result<Listing> {
        use std::os::fd::AsFd;
        let (_, files) = self.link.ask(question, Vec::new())?;
        let [file] = files.as_slice() else {
            return Err(connection::nonsense());
        };
        let text = sealed_file::read(file.as_fd(), 0..=MOST_LISTING)?;
        serde_json::from_slice(&text).map_err(|_| connection::nonsense())
    }

    /// Returns the sums of the listing, with the objects of the first names alone: it costs the same
    /// however many there are. A broker before version 3 lists all of them.
    ///
    /// # Errors
    ///
    /// As [`list`](Client::list).
    pub fn sums(&self) -> Result<Listing> {
        if self.link.knows(connection::SUMS) {
            self.listing(|request| ToBroker::Sum { request })
        } else {
            self.list()
        }
    }

    /// Says whether a broker is connected at this moment.
    pub fn is_connected(&self) -> bool {
        self.link.is_connected()
    }

    /// Returns the device.
    pub fn gpu(&self) -> &Gpu {
        self.link.gpu()
    }
}
