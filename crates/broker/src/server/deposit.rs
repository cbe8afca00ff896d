//! The thread that may wait for the keeper.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::Duration;

use gpu_api::{Result, explain, thread};
use transport::shared::sealed_file;
use transport::trace_point;

use crate::keeper::depositor::{DepositError, Depositor, Given};
use crate::object::identity::Identity;
use crate::object::manifest::Manifest;
use crate::server::action::KeepError;
use crate::server::bequest::{Label, Tombs};
use crate::server::happened::{File, Happened, Teller};

/// How often a keeper that is not asked anything is asked whether it is there: one that is stopped
/// is known to be so without a commit that waits for it.
const HEARTBEAT: Duration = Duration::from_secs(2);

/// A step with the keeper.
pub(super) enum Job {
    /// Give it an object.
    Keep {
        identity: Identity,
        seq: u64,
        manifest: Box<Manifest>,
        regions: Vec<File>,
    },
    /// Take objects out, after the tombs have gone there.
    Forget {
        token: u64,
        objects: Vec<(u64, usize)>,
        tombs: Option<(u64, Tombs)>,
    },
    /// Look whether a keeper is there, and which.
    Look,
    /// Give it everything, in this order.
    Feed {
        objects: Vec<(u64, File, Vec<File>)>,
        tombs: (u64, Tombs),
    },
}

/// Starts the thread; without a keeper it only makes manifests.
pub(super) fn start(
    depositor: Option<Depositor>,
    tombs: Option<u64>,
    teller: Teller,
) -> Result<Sender<Job>> {
    let (sender, jobs) = channel();
    let worker = Thread {
        depositor,
        tombs,
        teller,
    };
    thread::start("gpu-ipc-deposit", move || worker.run(&jobs))?;
    Ok(sender)
}

struct Thread {
    depositor: Option<Depositor>,
    /// The number of the tombs that the keeper has.
    tombs: Option<u64>,
    teller: Teller,
}

impl Thread {
    fn run(mut self, jobs: &Receiver<Job>) {
        loop {
            let job = match jobs.recv_timeout(HEARTBEAT) {
                Ok(job) => job,
                Err(RecvTimeoutError::Disconnected) => return,
                Err(RecvTimeoutError::Timeout) => {
                    self.feel_pulse();
                    continue;
                }
            };
            let happened = match job {
                Job::Keep {
                    identity,
                    seq,
                    manifest,
                    regions,
                } => Happened::Kept(identity, self.keep(seq, &manifest, &regions)),
                Job::Forget {
                    token,
                    objects,
                    tombs,
                } => Happened::Forgotten(token, self.forget(&objects, tombs)),
                Job::Look => Happened::Looked(self.look()),
                Job::Feed { objects, tombs } => Happened::Fed(self.feed(&objects, tombs)),
            };
            self.teller.tell(happened);
        }
    }

    fn keep(&self, seq: u64, manifest: &Manifest, regions: &[File]) -> Result<File, KeepError> {
        let bytes = manifest
            .encode()
            .map_err(|error| KeepError::Refused(explain(&error)))?;
        let file = sealed_file::create("gpu-ipc-manifest", &bytes)
            .map_err(|error| KeepError::Refused(explain(&error)))?;
        trace_point!("keep.begun");
        if let Some(depositor) = &self.depositor {
            let regions: Vec<_> = regions.iter().map(|region| region.as_fd()).collect();
            depositor.keep(seq, file.as_fd(), &regions).map_err(why)?;
        }
        trace_point!("keep.done");
        Ok(Arc::new(file))
    }

    fn forget(
        &mut self,
        objects: &[(u64, usize)],
        tombs: Option<(u64, Tombs)>,
    ) -> Result<(), KeepError> {
        let Some(depositor) = &self.depositor else {
            return Ok(());
        };
        if depositor.fed().is_none() {
            return Err(KeepError::Absent);
        }
        trace_point!("forget.begun");
        if let Some((number, tombs)) = tombs {
            let file = sealed_file::create("gpu-ipc-tombs", &tombs.encode());
            let file = file.map_err(|error| KeepError::Refused(explain(&error)))?;
            depositor
                .store(&[(Label::Tombs(number), file.as_fd())], "forget.tombs")
                .map_err(why)?;
            if let Some(older) = self.tombs.replace(number) {
                depositor.remove([Label::Tombs(older)]).map_err(why)?;
            }
        }
        trace_point!("forget.tombs.there");
        for &(seq, regions) in objects {
            let regions = (0..regions as u8).map(|region| Label::Region(seq, region));
            depositor
                .remove(std::iter::once(Label::Manifest(seq)).chain(regions))
                .map_err(why)?;
        }
        trace_point!("forget.done");
        Ok(())
    }

    /// Returns a descriptor that hangs up with the keeper, and whether that keeper has everything.
    fn look(&self) -> Option<(OwnedFd, bool)> {
        let depositor = self.depositor.as_ref()?;
        let inventory = depositor.inventory(false).ok()?;
        Some((
            inventory.leash,
            depositor.fed() == Some(inventory.incarnation),
        ))
    }

    /// Asks the keeper for nothing. That it is gone is told by its leash.
    fn feel_pulse(&self) {
        if let Some(depositor) = self.depositor.as_ref().filter(|d| d.fed().is_some()) {
            let _ = depositor.has(&[]);
        }
    }

    fn feed(
        &mut self,
        objects: &[(u64, File, Vec<File>)],
        (number, tombs): (u64, Tombs),
    ) -> Result<Vec<u64>, KeepError> {
        let Some(depositor) = &mut self.depositor else {
            return Ok(Vec::new());
        };
        let file = sealed_file::create("gpu-ipc-tombs", &tombs.encode())
            .map_err(|e| KeepError::Refused(explain(&e)))?;
        let objects: Vec<Given<'_>> = objects
            .iter()
            .map(|(seq, manifest, regions)| Given {
                seq: *seq,
                manifest: manifest.as_fd(),
                regions: regions.iter().map(|region| region.as_fd()).collect(),
            })
            .collect();
        trace_point!("feed.begun");
        let without = depositor
            .feed(&[(Label::Tombs(number), file.as_fd())], &objects, &[])
            .map_err(why)?;
        trace_point!("feed.done");
        self.tombs = Some(number);
        Ok(without)
    }
}

fn why(error: DepositError) -> KeepError {
    match error {
        DepositError::Absent => KeepError::Absent,
        DepositError::Refused(why) => KeepError::Refused(why),
        DepositError::System(error) => KeepError::Refused(explain(&error)),
    }
}
