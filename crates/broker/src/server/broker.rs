//! How a broker starts: takes its directory, reads what a keeper kept, and serves.

use std::collections::HashMap;
use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::mpsc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use gpu_api::Result;
use transport::os::process::{command_of, pid_of};
use transport::os::socket::{Endpoint, Listener};
use transport::os::waker::Waker;
use transport::server::Allowed;
use transport::shared::sealed_file;
use transport::trace_point;

use crate::keeper::depositor::{DepositError, Depositor, Inventory};
use crate::keeper::process::{STARTED_BY, raise_file_limit};
use crate::memory::store::FindGpus;
use crate::object::identity::{Epoch, Lineage};
use crate::object::manifest::{self, MOST_MANIFEST, Manifest};
use crate::server::action::Action;
use crate::server::bequest::{
    Bequest, HISTORY_BYTES, History, Inherited, Label, MOST_TOMBS, Reading, Tombs, sort,
};
use crate::server::catalogue::Catalogue;
use crate::server::control::Control;
use crate::server::deposit::Stored;
use crate::server::happened::{File, Teller};
use crate::server::limits::Limits;
use crate::server::listing::Process;
use crate::server::record::{Kept, Record};
use crate::server::service::{KeeperState, Parts, Service};
use crate::server::{deposit, lock, place, workshop};

/// How often a keeper is asked for that did not start this broker and is not there yet.
const ASK_AGAIN: Duration = Duration::from_millis(10);

/// The name of the broker's socket in its directory.
pub const SOCKET: &str = "broker";

/// How a broker is set up.
#[derive(Clone)]
pub struct Options {
    /// Where its socket, its lock and its keeper's socket lie.
    pub dir: PathBuf,
    /// Finds the devices that it makes regions on.
    pub gpus: FindGpus,
    /// Its limits.
    pub limits: Limits,
    /// Users beside its own that may connect.
    pub allowed: Allowed,
    /// The keeper's socket, from `NOTIFY_SOCKET`; objects go with the broker without one.
    pub keeper: Option<PathBuf>,
}

impl std::fmt::Debug for Options {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Options")
            .field("dir", &self.dir)
            .field("keeper", &self.keeper)
            .finish_non_exhaustive()
    }
}

/// A broker that is ready to serve.
pub struct Broker {
    service: Service,
    actions: Vec<Action<Arc<OwnedFd>>>,
    restored: u64,
    control: Control,
    _lock: std::fs::File,
}

impl std::fmt::Debug for Broker {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Broker").finish_non_exhaustive()
    }
}

/// What a keeper kept for this broker.
struct Inheritance {
    bequest: Bequest,
    /// The numbers of the tombs and of the history that the keeper has.
    stored: Stored,
    objects: Vec<Inherited<Arc<OwnedFd>>>,
    /// Who held which pool.
    records: Vec<Kept<Arc<OwnedFd>>>,
    next_seq: u64,
    orphans: u64,
    /// What another version wrote.
    foreign: Vec<(String, File)>,
    /// Hangs up with the keeper, which has all of this; nothing if it has ended.
    leash: Option<OwnedFd>,
}

impl Inheritance {
    /// Nothing: a history begins.
    fn none() -> Result<Inheritance> {
        let history = History {
            lineage: Lineage::random()?,
            ..History::default()
        };
        Ok(Inheritance {
            bequest: Bequest {
                history,
                tombs: Tombs::default(),
            },
            stored: Stored::default(),
            objects: Vec::new(),
            records: Vec::new(),
            next_seq: 1,
            orphans: 0,
            foreign: Vec::new(),
            leash: None,
        })
    }
}

impl Broker {
    /// Takes the directory, waiting for another broker's end, and everything that the keeper kept,
    /// waiting for a keeper that did not start this process. No driver is loaded: that is left to the
    /// first creation.
    ///
    /// # Errors
    ///
    /// [`System`](gpu_api::Error::System) for what the system refuses,
    /// [`Refused`](gpu_api::Error::Refused) for a keeper that is there
    /// and cannot be read, and when the keeper that started this process has ended.
    pub fn open(options: Options) -> Result<Broker> {
        raise_file_limit();
        place::prepare(&options.dir)?;
        let depositor = options.keeper.as_deref().map(Depositor::new).transpose()?;
        let lock = lock::wait(&options.dir.join("lock"), || match &depositor {
            Some(depositor) => Ok(ask(depositor, false)?.map(|found| found.leash)),
            None => Ok(None),
        })?;
        trace_point!("locked");
        let (depositor, mut inheritance) = inherit(depositor)?;
        trace_point!("restored");
        let (sender, happened) = mpsc::channel();
        let waker = Arc::new(Waker::new()?);
        let teller = Teller {
            sender,
            waker: waker.clone(),
        };
        let workshop = workshop::start(options.gpus, teller.clone())?;
        let control = Control::new(teller.clone());
        let leash = inheritance.leash.take();
        let keeper = match &depositor {
            None => KeeperState::None,
            Some(_) if leash.is_some() => KeeperState::Fed,
            Some(_) => KeeperState::Absent,
        };
        let listener = Listener::bind(&Endpoint::Path {
            path: options.dir.join(SOCKET),
            others: !options.allowed.is_empty(),
        })?;
        if let Some(depositor) = &depositor {
            depositor.ready();
        }
        let pulse = depositor.as_ref().map(Depositor::pulse);
        let foreign = inheritance.foreign.len() as u64;
        let next_number = inheritance.stored.highest().max(inheritance.next_seq);
        let deposit = deposit::start(depositor, inheritance.stored, inheritance.foreign, teller)?;
        let operator = rustix::process::geteuid().as_raw();
        let mut catalogue = Catalogue::new(options.limits, operator);
        let restored = inheritance.objects.len() as u64;
        let mut actions = catalogue.restore(
            &inheritance.bequest,
            inheritance.objects,
            inheritance.next_seq,
        );
        let records = inheritance.records.into_iter();
        actions.extend(catalogue.inherit(records.map(|of| (of.clone(), holder_of(&of))).collect()));
        let parts = Parts {
            catalogue,
            keeper,
            leash,
            pulse,
            next_number,
            restored,
            orphans: inheritance.orphans,
            foreign,
            happened,
            waker,
            workshop,
            deposit,
        };
        let Limits {
            bytes,
            bytes_per_uid,
            epochs,
            ..
        } = *parts.catalogue.limits();
        let shown = |limit| (limit != u64::MAX).then_some(limit);
        tracing::info!(
            dir = %options.dir.display(),
            restored,
            orphans = parts.orphans,
            keeper = ?parts.keeper,
            limit = shown(bytes),
            limit_per_uid = shown(bytes_per_uid),
            epochs,
            allowed = ?options.allowed.uids,
            allowed_groups = ?options.allowed.gids,
            "the broker serves"
        );
        let service = Service::new(parts, listener, options.allowed)?;
        Ok(Broker {
            service,
            actions,
            restored,
            control,
            _lock: lock,
        })
    }

    /// Says in the listing which file its options are read from again.
    pub fn reads_again(&mut self, file: String) {
        self.service.reread.file = file;
    }

    /// Returns the way to change what it allows while it serves.
    pub fn control(&self) -> Control {
        self.control.clone()
    }

    /// Counts the objects that it found in the keeper.
    pub fn restored(&self) -> u64 {
        self.restored
    }

    /// Serves until the process ends.
    pub fn run(self) -> ! {
        let _lock = self._lock;
        self.service.run(self.actions)
    }
}

/// Asks the keeper what it has; nothing if none is there and none started this process.
///
/// # Errors
///
/// [`Error::Refused`] when the keeper that started this process has ended, though another one may
/// be there: that one has a broker of its own.
fn ask(depositor: &Depositor, with_files: bool) -> Result<Option<Inventory>> {
    let started_by = std::env::var(STARTED_BY).ok();
    match depositor.inventory(with_files) {
        Ok(found) => match started_by {
            Some(starter) if starter != found.incarnation.to_string() => Err(lock::keeper_ended()),
            _ => Ok(Some(found)),
        },
        Err(DepositError::Absent) if started_by.is_some() => Err(lock::keeper_ended()),
        Err(DepositError::Absent) => Ok(None),
        Err(error) => Err(error.into()),
    }
}

/// Reads everything back from the keeper, and lets it close what belongs to no whole object. What
/// another version wrote stays.
///
/// A keeper that is not there yet is waited for: it may have everything, as one that takes over from
/// another does, and a broker that began with nothing would take that out of it.
fn inherit(depositor: Option<Depositor>) -> Result<(Option<Depositor>, Inheritance)> {
    let Some(mut depositor) = depositor else {
        return Ok((None, Inheritance::none()?));
    };
    let mut asked = ask(&depositor, true)?;
    if asked.is_none() {
        tracing::warn!("no keeper is there; waiting for it");
    }
    let inventory = loop {
        match asked {
            Some(inventory) => break inventory,
            None => std::thread::sleep(ASK_AGAIN),
        }
        asked = ask(&depositor, true)?;
    };
    let mut manifests = HashMap::new();
    let mut records = HashMap::new();
    let files = inventory
        .files
        .into_iter()
        .map(|(name, file)| (name, Arc::new(file)))
        .collect();
    let found = sort(files, |label, file: &File| {
        read(label, file, &mut manifests, &mut records)
    });
    let mut inheritance = Inheritance {
        stored: Stored {
            tombs: found.tombs.as_ref().map(|(number, _)| *number),
            history: found.history,
        },
        next_seq: found.next_seq,
        orphans: found.rest.len() as u64,
        foreign: found.foreign,
        ..Inheritance::none()?
    };
    if let Some((_, tombs)) = found.tombs {
        inheritance.bequest.tombs = tombs;
    }
    match found.history {
        // Which epochs there were is known only with all the tombs.
        Some((_, history)) if !found.lacks_tombs => inheritance.bequest.history = history,
        Some((_, history)) => inheritance.bequest.history.floor = history.floor,
        None => {}
    }
    for (seq, file, regions) in found.whole {
        if let Some(record) = records.remove(&seq) {
            inheritance.records.push(Kept {
                seq,
                record,
                file,
                processes: regions,
            });
        } else if let Some(manifest) = manifests.remove(&seq) {
            inheritance.objects.push(Inherited {
                since: written_at(&file),
                seq,
                manifest,
                file,
                regions,
            });
        }
    }
    if !inheritance.foreign.is_empty() {
        tracing::warn!(
            count = inheritance.foreign.len(),
            "the keeper has files of another version of the broker; they stay there"
        );
    }
    if !found.rest.is_empty() {
        tracing::warn!(
            count = found.rest.len(),
            "the keeper had descriptors of no whole object; they are closed"
        );
    }
    let next_number = inheritance.stored.highest().max(inheritance.next_seq) + 1;
    let cleaned = depositor
        .is_fed(inventory.incarnation)
        .and_then(|()| depositor.remove_names(&found.rest))
        .and_then(|()| {
            let history = inheritance.bequest.history;
            inheritance
                .stored
                .keep_history(&depositor, next_number, history)
        });
    match cleaned {
        Ok(()) => {}
        Err(DepositError::System(error)) => return Err(error),
        // What it does not do here it is asked again: with the next removal, by the next broker.
        Err(DepositError::Refused(why)) => tracing::warn!(%why, "the keeper is not in order"),
        // What it had is here: it is given to the next one.
        Err(DepositError::Absent) => depositor.is_lost(),
    }
    inheritance.leash = depositor.fed().map(|_| inventory.leash);
    Ok((Some(depositor), inheritance))
}

/// Returns when a sealed file was written: the commit of the object whose manifest it is.
fn written_at(file: &File) -> SystemTime {
    let written = rustix::fs::fstat(file).map_or(0, |is| is.st_mtime);
    UNIX_EPOCH + Duration::from_secs(u64::try_from(written).unwrap_or(0))
}

/// Says which process held a pool, as far as this one can see it.
fn holder_of(kept: &Kept<File>) -> Process {
    let pid = kept.processes.first().map(|of| pid_of(of.as_fd()));
    let pid = pid.and_then(Result::ok).unwrap_or(0);
    Process {
        pid,
        command: command_of(pid),
        name: String::new(),
    }
}

/// Reads a file of the keeper; a manifest or a record is put aside under its number.
fn read(
    label: Label,
    file: &File,
    manifests: &mut HashMap<u64, Manifest>,
    records: &mut HashMap<u64, Record>,
) -> Reading {
    let most = match label {
        Label::Manifest(_) => MOST_MANIFEST,
        Label::Tombs(_) => MOST_TOMBS,
        Label::History(_) => HISTORY_BYTES,
        Label::Region(..) => return Reading::Broken,
    };
    let bytes = match sealed_file::read(file.as_fd(), 0..=most) {
        Ok(bytes) => bytes,
        Err(error) => {
            tracing::warn!(%error, %label, "a file in the keeper is not readable");
            return match label {
                Label::Manifest(_) => Reading::Broken,
                _ => Reading::Foreign,
            };
        }
    };
    let read = match label {
        Label::Manifest(seq) if Record::is_record(&bytes) => Record::decode(&bytes).map(|record| {
            let processes = record.processes;
            records.insert(seq, record);
            Reading::Manifest(processes)
        }),
        Label::Manifest(seq) => Manifest::decode(&bytes).map(|manifest| {
            let whole = manifest.epoch > Epoch(0) && manifest.granularity > 0;
            let journal = usize::from(manifest.layout.journal() > 0);
            let regions = manifest.layout.regions().len() + journal;
            manifests.insert(seq, manifest);
            if whole {
                Reading::Manifest(regions)
            } else {
                Reading::Broken
            }
        }),
        Label::Tombs(_) => Tombs::decode(&bytes).map(Reading::Tombs),
        _ => History::decode(&bytes).map(Reading::History),
    };
    read.unwrap_or_else(|error| {
        tracing::warn!(%error, %label, "a file in the keeper is not of this version");
        match label {
            Label::Manifest(_) if !manifest::is_of_another_version(&bytes) => Reading::Broken,
            _ => Reading::Foreign,
        }
    })
}
