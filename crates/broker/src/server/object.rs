//! One object of a broker: how far it has come, who writes and who reads it.

use crate::object::identity::{Epoch, Identity};
use crate::object::manifest::Manifest;
use crate::server::action::{Asker, Participant};
use crate::wire::LeaseSlot;

/// How far an object has come; the table of `catalogue` says what leads from one stage to the next.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) enum Stage<F> {
    Drafting,
    Making,
    Filling { leases: Vec<LeaseSlot> },
    Keeping { epoch: Epoch },
    Visible { manifest: F },
}

/// One object.
#[derive(Clone, Debug)]
pub(super) struct Object<F> {
    pub seq: u64,
    pub stage: Stage<F>,
    pub writer: Option<Asker>,
    pub scratch: bool,
    pub replace: bool,
    pub expect: Option<Epoch>,
    /// The last question of its writer that is to be answered when the stage is over.
    pub request: u64,
    /// Known from `Making` on.
    pub manifest: Option<Box<Manifest>>,
    pub regions: Vec<F>,
    pub readers: Vec<Participant>,
}

impl<F> Object<F> {
    /// Returns the bytes of its regions; 0 while the draft is read.
    pub fn bytes(&self) -> u64 {
        self.manifest.as_ref().map_or(0, |manifest| manifest.mapped_bytes())
    }

    /// Says whether a participant fills it.
    pub fn is_written_by(&self, participant: Participant) -> bool {
        self.writer.is_some_and(|writer| writer.participant == participant)
    }

    /// Says whether it can be given up: its commit was not asked for.
    pub fn is_unfinished(&self) -> bool {
        !matches!(self.stage, Stage::Keeping { .. } | Stage::Visible { .. })
    }

    /// Returns its row of the listing, if a user may know of it.
    pub fn row(&self, identity: Identity, uid: u32) -> Option<Row> {
        let manifest = self.manifest.as_ref()?;
        let visible = matches!(self.stage, Stage::Visible { .. });
        let may = manifest.owner == uid || (visible && manifest.readers.admit(manifest.owner, uid));
        may.then(|| Row {
            name: manifest.name.clone(),
            epoch: manifest.epoch,
            identity,
            bytes: manifest.mapped_bytes(),
            owner: manifest.owner,
            state: match &self.stage {
                Stage::Drafting | Stage::Making => "making",
                Stage::Filling { .. } if self.scratch => "scratch",
                Stage::Filling { .. } => "filling",
                Stage::Keeping { .. } => "keeping",
                Stage::Visible { .. } => "visible",
            },
            writer: self.writer.map(|writer| writer.participant),
            readers: self.readers.clone(),
        })
    }
}

/// A row of the listing.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Row {
    /// Its name.
    pub name: String,
    /// Its epoch; 0 if it has none yet.
    pub epoch: Epoch,
    /// Which object.
    pub identity: Identity,
    /// Bytes of memory.
    pub bytes: u64,
    /// The user that owns it.
    pub owner: u32,
    /// `making`, `filling`, `keeping`, `visible` or `scratch`.
    pub state: &'static str,
    /// Its writer, while it is unfinished.
    pub writer: Option<Participant>,
    /// Its readers.
    pub readers: Vec<Participant>,
}
