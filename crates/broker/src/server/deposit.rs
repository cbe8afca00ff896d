//! The thread that may wait for the keeper.

use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::Duration;

use gpu_api::{Result, explain, thread};
use transport::shared::sealed_file;
use transport::trace_point;

use crate::keeper::depositor::{DepositError, Depositor, Fed, Given};
use crate::object::identity::Identity;
use crate::object::manifest::Manifest;
use crate::server::action::KeepError;
use crate::server::bequest::{Bequest, History, Label};
use crate::server::happened::{File, Happened, Teller};
use crate::server::record::Record;

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
    /// Give it the record of a hold, with the pidfds of the holder's processes.
    KeepRecord {
        seq: u64,
        record: Box<Record>,
        processes: Vec<File>,
    },
    /// Take objects out, after the bequest has gone there under this number.
    Forget {
        token: u64,
        objects: Vec<(u64, usize)>,
        bequest: Option<(u64, Bequest)>,
    },
    /// Look whether a keeper is there.
    Look,
    /// Give it everything, in this order. No object may be on its way to it: one that is not among
    /// these is taken out.
    Feed {
        objects: Vec<(u64, File, Vec<File>)>,
        bequest: (u64, Bequest),
    },
}

/// What the keeper has of a bequest.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Stored {
    /// The number of the tombs.
    pub tombs: Option<u64>,
    /// The number of the history, and what it says.
    pub history: Option<(u64, History)>,
}

impl Stored {
    /// Returns the highest number.
    pub(super) fn highest(&self) -> u64 {
        let history = self.history.map_or(0, |(number, _)| number);
        self.tombs.unwrap_or(0).max(history)
    }

    /// Gives the keeper the history, if it has another one, and takes that out.
    pub(super) fn keep_history(
        &mut self,
        depositor: &Depositor,
        number: u64,
        history: History,
    ) -> Result<(), DepositError> {
        if self.history.is_some_and(|(_, stored)| stored == history) {
            return Ok(());
        }
        let file = sealed_file::create("gpu-ipc-history", &history.encode())?;
        let label = Label::History(number);
        depositor.store(&[(label, file.as_fd())], "history")?;
        match self.history.replace((number, history)) {
            Some((older, _)) if older != number => depositor.remove([Label::History(older)]),
            _ => Ok(()),
        }
    }
}

/// Starts the thread; without a keeper it only makes manifests.
pub(super) fn start(
    depositor: Option<Depositor>,
    stored: Stored,
    foreign: Vec<(String, File)>,
    teller: Teller,
) -> Result<Sender<Job>> {
    let (sender, jobs) = channel();
    let worker = Thread {
        depositor,
        stored,
        foreign,
        teller,
    };
    thread::start("gpu-ipc-deposit", move || worker.run(&jobs))?;
    Ok(sender)
}

struct Thread {
    depositor: Option<Depositor>,
    stored: Stored,
    /// What another version wrote: the next keeper gets it too.
    foreign: Vec<(String, File)>,
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
                Job::KeepRecord {
                    seq,
                    record,
                    processes,
                } => {
                    let kept = self.keep_file(seq, &record.encode(), &processes);
                    trace_point!("record.kept");
                    Happened::Recorded(seq, record, kept)
                }
                Job::Forget {
                    token,
                    objects,
                    bequest,
                } => Happened::Forgotten(token, self.forget(&objects, bequest)),
                Job::Look => Happened::Looked(self.look()),
                Job::Feed { objects, bequest } => Happened::Fed(self.feed(&objects, &bequest)),
            };
            self.teller.tell(happened);
        }
    }

    fn keep(&self, seq: u64, manifest: &Manifest, regions: &[File]) -> Result<File, KeepError> {
        let bytes = manifest
            .encode()
            .map_err(|error| KeepError::Refused(explain(&error)))?;
        self.keep_file(seq, &bytes, regions)
    }

    fn keep_file(&self, seq: u64, bytes: &[u8], regions: &[File]) -> Result<File, KeepError> {
        let file = sealed_file::create("gpu-ipc-manifest", bytes)
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
        bequest: Option<(u64, Bequest)>,
    ) -> Result<(), KeepError> {
        let Some(depositor) = &self.depositor else {
            return Ok(());
        };
        if depositor.fed().is_none() {
            return Err(KeepError::Absent);
        }
        trace_point!("forget.begun");
        if let Some((number, Bequest { history, tombs })) = bequest {
            self.stored
                .keep_history(depositor, number, history)
                .map_err(why)?;
            let file = sealed_file::create("gpu-ipc-tombs", &tombs.encode());
            let file = file.map_err(|error| KeepError::Refused(explain(&error)))?;
            depositor
                .store(&[(Label::Tombs(number), file.as_fd())], "forget.tombs")
                .map_err(why)?;
            if let Some(older) = self.stored.tombs.replace(number) {
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

    fn look(&self) -> bool {
        let depositor = self.depositor.as_ref();
        depositor.is_some_and(|depositor| depositor.inventory(false).is_ok())
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
        (number, Bequest { history, tombs }): &(u64, Bequest),
    ) -> Result<Fed, KeepError> {
        let Some(depositor) = &mut self.depositor else {
            return Err(KeepError::Absent);
        };
        let file = |name, bytes: &[u8]| {
            sealed_file::create(name, bytes).map_err(|e| KeepError::Refused(explain(&e)))
        };
        let tombs = file("gpu-ipc-tombs", &tombs.encode())?;
        let kept = file("gpu-ipc-history", &history.encode())?;
        let first = [
            (Label::History(*number), kept.as_fd()),
            (Label::Tombs(*number), tombs.as_fd()),
        ];
        let foreign: Vec<(String, BorrowedFd<'_>)> = self
            .foreign
            .iter()
            .map(|(name, file)| (name.clone(), file.as_fd()))
            .collect();
        let objects: Vec<Given<'_>> = objects
            .iter()
            .map(|(seq, manifest, regions)| Given {
                seq: *seq,
                manifest: manifest.as_fd(),
                regions: regions.iter().map(|region| region.as_fd()).collect(),
            })
            .collect();
        trace_point!("feed.begun");
        let fed = depositor.feed(&first, &objects, &foreign).map_err(why)?;
        trace_point!("feed.done");
        self.stored = Stored {
            tombs: Some(*number),
            history: Some((*number, *history)),
        };
        Ok(fed)
    }
}

fn why(error: DepositError) -> KeepError {
    match error {
        DepositError::Absent => KeepError::Absent,
        DepositError::Refused(why) => KeepError::Refused(why),
        DepositError::System(error) => KeepError::Refused(explain(&error)),
    }
}
