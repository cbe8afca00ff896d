//! The thread that may wait for the driver: reads drafts and makes regions.

use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};

use gpu_api::{Error, Gpu, Result, explain, thread};
use transport::os::closer::Foreign;
use transport::shared::{journal_file, sealed_file};
use transport::trace_point;

use crate::memory::store::{FindGpus, make_region};
use crate::object::identity::Identity;
use crate::object::manifest::{MOST_MANIFEST, Manifest};
use crate::server::action::Device;
use crate::server::catalogue::draft::Site;
use crate::server::happened::{File, Happened, Teller};
use crate::wire::RefusalCode;
use transport::server::Refused;

/// What the workshop is to do.
pub(super) enum Job {
    /// Load the drivers.
    Open,
    /// Read and check a draft.
    Draft(Identity, Foreign),
    /// Make regions, and a journal of so many bytes if it is not 0.
    Make(Identity, Device, Vec<u64>, u64),
}

/// Starts the thread; it ends with the sender.
pub(super) fn start(find: FindGpus, teller: Teller) -> Result<Sender<Job>> {
    let (sender, jobs) = channel();
    let workshop = Workshop {
        find,
        gpus: None,
        teller,
    };
    thread::start("gpu-ipc-workshop", move || workshop.run(&jobs))?;
    // Behind this the first creation need not wait for the driver.
    let _ = sender.send(Job::Open);
    Ok(sender)
}

struct Workshop {
    find: FindGpus,
    gpus: Option<Vec<Gpu>>,
    teller: Teller,
}

impl Workshop {
    fn run(mut self, jobs: &Receiver<Job>) {
        for job in jobs {
            match job {
                Job::Open => match self.gpus() {
                    Ok(gpus) => {
                        for gpu in gpus {
                            let (kind, device) = (gpu.kind().name(), gpu.device().0);
                            tracing::info!(
                                device = %format_args!("{kind}:{device}"),
                                uuid = %gpu.uuid(),
                                "objects may lie on this device"
                            );
                        }
                    }
                    Err((_, why)) => {
                        tracing::warn!(%why, "no device for objects; tried again at each creation");
                    }
                },
                Job::Draft(identity, file) => {
                    let draft = self.read(&file);
                    self.teller.tell(Happened::Drafted(identity, draft));
                }
                Job::Make(identity, device, bytes, journal) => {
                    trace_point!("make.begun");
                    let made = self.make(device, &bytes, journal);
                    trace_point!("make.done");
                    self.teller.tell(Happened::Made(identity, made));
                }
            }
        }
    }

    fn gpus(&mut self) -> Result<&[Gpu], Refused> {
        if self.gpus.is_none() {
            self.gpus =
                Some((self.find)().map_err(|error| (RefusalCode::Device, explain(&error)))?);
        }
        Ok(self.gpus.as_deref().unwrap_or(&[]))
    }

    fn gpu(&mut self, device: Device) -> Result<&Gpu, Refused> {
        let found = self
            .gpus()?
            .iter()
            .find(|gpu| gpu.kind() == device.backend && gpu.uuid() == device.uuid);
        let Device { backend, uuid } = device;
        found.ok_or_else(|| {
            (
                RefusalCode::Device,
                format!("this broker does not serve {backend} device {uuid}"),
            )
        })
    }

    fn read(&mut self, file: &Foreign) -> Result<(Box<Manifest>, Site), Refused> {
        let bytes = sealed_file::read(file.as_fd(), 0..=MOST_MANIFEST);
        let draft = bytes
            .and_then(|bytes| Manifest::decode(&bytes))
            .map_err(|e| (RefusalCode::Layout, explain(&e)))?;
        let gpu = self.gpu(Device {
            backend: draft.backend,
            uuid: draft.device,
        })?;
        let site = Site {
            granularity: gpu.caps().granularity.max(1),
            bytes: gpu.info().total_bytes,
        };
        Ok((Box::new(draft), site))
    }

    /// Makes all regions, or none: those that were made are closed when one fails.
    fn make(&mut self, device: Device, bytes: &[u64], journal: u64) -> Result<Vec<File>, Refused> {
        let gpu = self.gpu(device)?;
        let journal = (journal > 0).then(|| journal_file::create(journal).map(Arc::new));
        let made: Result<Vec<File>> = bytes
            .iter()
            .map(|&bytes| make_region(gpu, bytes).map(Arc::new))
            .chain(journal)
            .collect();
        made.map_err(|error| match error {
            Error::OutOfMemory { .. } => (RefusalCode::OutOfMemory, explain(&error)),
            error => (RefusalCode::Failed, explain(&error)),
        })
    }
}
