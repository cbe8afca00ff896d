//! Requests about objects, their answers, and the work that follows.

use gpu_api::{BackendKind, DeviceUuid};

use crate::object::identity::{Epoch, Identity};
use crate::object::manifest::Manifest;
use crate::pool::Previous;
use crate::server::bequest::Bequest;
use crate::server::record::Record;
use crate::wire::{LeaseSlot, RefusalCode, Standing, ToClient};

/// Numbers a participant of this broker.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct Participant(pub u64);

/// The client that asks.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Asker {
    /// The participant.
    pub participant: Participant,
    /// Its user, as the kernel says.
    pub uid: u32,
    /// Its death proves nothing.
    pub shared_context: bool,
}

/// A device that regions are made on.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Device {
    /// The vendor.
    pub backend: BackendKind,
    /// The device.
    pub uuid: DeviceUuid,
}

/// What an answer says; the descriptors that come with it are beside it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Answer<F> {
    /// The regions are leased.
    Created {
        granularity: u64,
        leases: Vec<LeaseSlot>,
        regions: Vec<F>,
    },
    /// The object is visible.
    Committed(Epoch),
    /// What became of a commit.
    Outcome(Standing),
    /// It is so.
    Noted,
    /// Manifest and regions.
    Opened {
        identity: Identity,
        epoch: Epoch,
        manifest: F,
        regions: Vec<F>,
    },
    /// There is a newer epoch.
    Newer { identity: Identity, epoch: Epoch },
    /// The name or epoch is gone; the last epoch of the name.
    Removed(Epoch),
    /// A pool: the manifest, and the regions with the journal behind them.
    Pool {
        identity: Identity,
        generation: u64,
        previous: Previous,
        manifest: F,
        regions: Vec<F>,
    },
    /// No.
    Declined(RefusalCode, String),
}

impl<F> Answer<F> {
    /// Makes it the message that answers a question, and the descriptors that go with it.
    pub fn into_message(self, request: u64) -> (ToClient, Vec<F>) {
        let message = match self {
            Answer::Created {
                granularity,
                leases,
                regions,
            } => {
                return (
                    ToClient::Created {
                        request,
                        granularity,
                        leases: leases.into_iter().collect(),
                    },
                    regions,
                );
            }
            Answer::Opened {
                identity,
                epoch,
                manifest,
                regions,
            } => {
                let message = ToClient::Opened {
                    request,
                    identity,
                    epoch,
                    regions: regions.len() as u32,
                };
                return (message, std::iter::once(manifest).chain(regions).collect());
            }
            Answer::Pool {
                identity,
                generation,
                previous,
                manifest,
                regions,
            } => {
                let message = ToClient::Pool {
                    request,
                    identity,
                    generation,
                    previous,
                    files: regions.len() as u32,
                };
                return (message, std::iter::once(manifest).chain(regions).collect());
            }
            Answer::Committed(epoch) => ToClient::Committed { request, epoch },
            Answer::Outcome(standing) => ToClient::Outcome { request, standing },
            Answer::Noted => ToClient::Noted { request },
            Answer::Newer { identity, epoch } => ToClient::Newer {
                request,
                identity,
                epoch,
            },
            Answer::Removed(epoch) => ToClient::Removed { request, epoch },
            Answer::Declined(refusal, why) => ToClient::Declined {
                request,
                refusal,
                why,
            },
        };
        (message, Vec::new())
    }
}

/// A step that the service takes for the catalogue.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Action<F> {
    /// Answer a question of a participant.
    Answer(Participant, u64, Answer<F>),
    /// Make regions of these bytes, then call `Catalogue::made`.
    Make {
        identity: Identity,
        device: Device,
        bytes: Vec<u64>,
        /// Bytes of a journal, which is made behind them; 0 for none.
        journal: u64,
    },
    /// Give regions and manifest to the keeper, then call `Catalogue::kept`.
    Keep {
        identity: Identity,
        seq: u64,
        manifest: Box<Manifest>,
        regions: Vec<F>,
    },
    /// Take objects out of the keeper, after the bequest has gone there; then call
    /// `Catalogue::forgotten`.
    Forget {
        token: u64,
        objects: Vec<(u64, usize)>,
        bequest: Option<Bequest>,
    },
    /// Give the record of a hold to the keeper, with the pidfds of the holder's processes, then call
    /// `Catalogue::recorded`.
    KeepRecord {
        seq: u64,
        record: Record,
        processes: Vec<F>,
    },
    /// The write leases have ended: their slots can be granted again.
    EndLeases(Participant, Vec<LeaseSlot>),
}

/// Why the keeper did not take something.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum KeepError {
    /// It said no, or is full.
    Refused(String),
    /// It is not there; a new one is being fed.
    Absent,
}
