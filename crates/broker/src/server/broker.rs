//! How a broker starts: takes its directory, reads what a keeper kept, and serves.

use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::mpsc;

use gpu_api::Result;
use transport::os::socket::{Endpoint, Listener};
use transport::os::waker::Waker;
use transport::shared::sealed_file;
use transport::trace_point;

use crate::keeper::depositor::{DepositError, Depositor};
use crate::keeper::process::{STARTED_BY, raise_file_limit};
use crate::memory::store::FindGpus;
use crate::object::identity::Epoch;
use crate::object::manifest::{MOST_MANIFEST, Manifest};
use crate::server::action::Action;
use crate::server::bequest::{Inherited, MOST_TOMBS, Tombs, sort};
use crate::server::catalogue::Catalogue;
use crate::server::happened::Teller;
use crate::server::limits::Limits;
use crate::server::service::{KeeperState, Parts, Service};
use crate::server::{deposit, lock, workshop};

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
    pub allowed: Vec<u32>,
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
    _lock: File,
}

impl std::fmt::Debug for Broker {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Broker").finish_non_exhaustive()
    }
}

/// What a keeper kept for this broker.
#[derive(Default)]
struct Inheritance {
    tombs: Tombs,
    newest_tombs: Option<u64>,
    objects: Vec<Inherited<Arc<OwnedFd>>>,
    next_seq: u64,
    orphans: u64,
}

impl Broker {
    /// Takes the directory, waiting for another broker's end, and everything that the keeper kept.
    /// No driver is loaded: that is left to the first creation.
    ///
    /// # Errors
    ///
    /// [`Error::System`] for what the system refuses, [`Error::Refused`] for a keeper that is there
    /// and cannot be read.
    pub fn open(options: Options) -> Result<Broker> {
        raise_file_limit();
        let depositor = options.keeper.as_deref().map(Depositor::new).transpose()?;
        let lock = lock::wait(&options.dir.join("lock"), || match &depositor {
            Some(depositor) => leash(depositor),
            None => Ok(None),
        })?;
        trace_point!("locked");
        let (depositor, inheritance) = inherit(depositor)?;
        trace_point!("restored");
        let (sender, happened) = mpsc::channel();
        let waker = Arc::new(Waker::new()?);
        let teller = Teller {
            sender,
            waker: waker.clone(),
        };
        let workshop = workshop::start(options.gpus, teller.clone())?;
        let keeper = match &depositor {
            None => KeeperState::None,
            Some(depositor) if depositor.fed().is_some() => KeeperState::Fed,
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
        let deposit = deposit::start(depositor, inheritance.newest_tombs, teller)?;
        let mut catalogue = Catalogue::new(options.limits.clone());
        let restored = inheritance.objects.len() as u64;
        let actions = catalogue.restore(
            &inheritance.tombs,
            inheritance.objects,
            inheritance.next_seq,
        );
        let parts = Parts {
            limits: options.limits,
            catalogue,
            keeper,
            pulse,
            next_tombs: inheritance
                .newest_tombs
                .unwrap_or(0)
                .max(inheritance.next_seq),
            restored,
            orphans: inheritance.orphans,
            happened,
            waker,
            workshop,
            deposit,
        };
        let service = Service::new(parts, listener, options.allowed)?;
        Ok(Broker {
            service,
            actions,
            _lock: lock,
        })
    }

    /// Serves until the process ends.
    pub fn run(self) -> ! {
        let _lock = self._lock;
        self.service.run(self.actions)
    }
}

/// Returns what hangs up with the keeper that started this process.
///
/// # Errors
///
/// [`Error::Refused`] when that keeper has ended, though another one may be there.
fn leash(depositor: &Depositor) -> Result<Option<OwnedFd>> {
    let started_by = std::env::var(STARTED_BY).ok();
    match depositor.inventory(false) {
        Ok(found) => match started_by {
            Some(starter) if starter != found.incarnation.to_string() => Err(lock::keeper_ended()),
            _ => Ok(Some(found.leash)),
        },
        Err(DepositError::Absent) if started_by.is_some() => Err(lock::keeper_ended()),
        // Which keeper will be there is not known yet.
        Err(DepositError::Absent) => Ok(None),
        Err(error) => Err(error.into()),
    }
}

/// Reads everything back from the keeper, and lets it close what belongs to no whole object.
fn inherit(depositor: Option<Depositor>) -> Result<(Option<Depositor>, Inheritance)> {
    let Some(mut depositor) = depositor else {
        return Ok((None, Inheritance::default()));
    };
    let inventory = match depositor.inventory(true) {
        Ok(inventory) => inventory,
        // Without a keeper there is nothing to inherit; the service looks for one.
        Err(DepositError::Absent) => return Ok((Some(depositor), Inheritance::default())),
        Err(error) => return Err(error.into()),
    };
    let mut manifests = Vec::new();
    let files = inventory
        .files
        .into_iter()
        .map(|(name, file)| (name, Arc::new(file)))
        .collect();
    let found = sort(files, |file: &Arc<OwnedFd>| {
        let manifest = sealed_file::read(file.as_fd(), 0..=MOST_MANIFEST)
            .and_then(|bytes| Manifest::decode(&bytes));
        let manifest = manifest
            .inspect_err(|error| tracing::warn!(%error, "a manifest in the keeper is invalid"))
            .ok()?;
        let whole = manifest.epoch > Epoch(0) && manifest.granularity > 0;
        let regions = manifest.layout.regions().len();
        manifests.push((file.clone(), manifest));
        whole.then_some(regions)
    });
    let mut inheritance = Inheritance {
        next_seq: found.next_seq,
        orphans: found.rest.len() as u64,
        ..Default::default()
    };
    if let Some((number, file)) = &found.tombs {
        inheritance.newest_tombs = Some(*number);
        inheritance.tombs = sealed_file::read(file.as_fd(), 0..=MOST_TOMBS)
            .and_then(|bytes| Tombs::decode(&bytes))?;
    }
    for (seq, file, regions) in found.whole {
        let at = manifests.iter().position(|(of, _)| Arc::ptr_eq(of, &file));
        if let Some(at) = at {
            let manifest = manifests.swap_remove(at).1;
            inheritance.objects.push(Inherited {
                seq,
                manifest,
                file,
                regions,
            });
        }
    }
    if !found.rest.is_empty() {
        tracing::warn!(
            count = found.rest.len(),
            "the keeper had descriptors of no whole object; they are closed"
        );
    }
    let cleaned = depositor
        .is_fed(inventory.incarnation)
        .and_then(|()| depositor.remove_names(&found.rest));
    match cleaned {
        Ok(()) => {}
        Err(DepositError::System(error)) => return Err(error),
        // One that does not close what belongs to nothing is asked again by the next broker.
        Err(DepositError::Refused(why)) => tracing::warn!(%why, "descriptors stay"),
        // What it had is here: it is given to the next one.
        Err(DepositError::Absent) => depositor.is_lost(),
    }
    Ok((Some(depositor), inheritance))
}
