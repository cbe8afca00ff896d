//! One object of a broker: its state, its writer and its readers.

use std::time::{Instant, SystemTime};

use crate::object::identity::{Epoch, Identity};
use crate::object::manifest::Manifest;
use crate::server::action::{Asker, Participant};
use crate::server::listing::PoolRow;
use crate::wire::{LeaseSlot, Wanted};

/// How far an object has come; the table of `catalogue` says what leads from one stage to the next.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) enum Stage<F> {
    Drafting,
    Making,
    Filling { leases: Vec<LeaseSlot> },
    Keeping { epoch: Epoch },
    Written,
    Visible { manifest: F },
}

/// One object.
#[derive(Clone, Debug)]
pub(super) struct Object<F> {
    pub seq: u64,
    pub stage: Stage<F>,
    pub writer: Option<Asker>,
    pub wanted: Wanted,
    /// The last question of its writer that is to be answered when the stage is over.
    pub request: u64,
    /// Known from `Making` on.
    pub manifest: Option<Box<Manifest>>,
    /// What is there of each region: until the workshop has made the others, what was taken over.
    pub regions: Vec<Option<F>>,
    /// Which memory each region is, known from `Making` on: two epochs that share a region have the
    /// same number.
    pub numbers: Vec<u64>,
    pub readers: Vec<Participant>,
    /// When it was committed, or created while it is not visible.
    pub since: SystemTime,
    /// Since when no participant reads it.
    pub idle_since: Instant,
}

impl<F: Clone> Object<F> {
    /// Returns its regions: all of them, from `Filling` on.
    pub fn files(&self) -> Vec<F> {
        self.regions.iter().flatten().cloned().collect()
    }

    /// Lists the number and the bytes of each region; none while the draft is read.
    pub fn memory(&self) -> impl Iterator<Item = (u64, u64)> + '_ {
        let bytes = self
            .manifest
            .iter()
            .flat_map(|manifest| manifest.mapped_regions().chain(journal_of(manifest)));
        self.numbers.iter().copied().zip(bytes)
    }

    /// Says whether a user who is in these groups may know of it.
    pub fn is_known_to(&self, uid: u32, groups: &[u32]) -> bool {
        self.manifest.as_ref().is_some_and(|manifest| {
            let visible = matches!(self.stage, Stage::Visible { .. });
            manifest.owner == uid
                || (visible && manifest.readers.admit(manifest.owner, uid, groups))
        })
    }

    /// Says whether a participant fills it.
    pub fn is_written_by(&self, participant: Participant) -> bool {
        self.writer
            .is_some_and(|writer| writer.participant == participant)
    }

    /// Says whether it can be given up: its commit was not asked for.
    pub fn is_unfinished(&self) -> bool {
        !matches!(self.stage, Stage::Keeping { .. } | Stage::Visible { .. })
    }

    /// Returns its row of the listing, once its draft was read.
    pub fn row(&self, identity: Identity) -> Option<Row> {
        let manifest = self.manifest.as_ref()?;
        Some(Row {
            seq: self.seq,
            name: manifest.name.clone(),
            epoch: manifest.epoch,
            identity,
            home: manifest.home.clone(),
            bytes: manifest.mapped_bytes(),
            owner: manifest.owner,
            state: match &self.stage {
                Stage::Drafting | Stage::Making => "making",
                Stage::Filling { .. } if self.wanted.scratch => "scratch",
                Stage::Filling { .. } | Stage::Written => "filling",
                Stage::Keeping { .. } => "keeping",
                Stage::Visible { .. } if manifest.layout.journal() > 0 => "pool",
                Stage::Visible { .. } => "visible",
            },
            parts: manifest.layout.parts().len() as u64,
            since: self.since,
            pinned: false,
            pool: None,
            record: None,
            writer: self.writer.map(|writer| writer.participant),
            readers: self.readers.clone(),
        })
    }
}

/// Returns the bytes of a pool's journal, which count as its memory does.
pub(super) fn journal_of(manifest: &Manifest) -> Option<u64> {
    Some(manifest.layout.journal()).filter(|bytes| *bytes > 0)
}

/// A row of the listing.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Row {
    /// Its number.
    pub seq: u64,
    /// Its name.
    pub name: String,
    /// Its epoch; 0 if it has none yet.
    pub epoch: Epoch,
    /// Which object.
    pub identity: Identity,
    /// The host whose broker committed it first, if it is a replica.
    pub home: Option<String>,
    /// Bytes of memory; a region that two epochs share counts for each.
    pub bytes: u64,
    /// The user that owns it.
    pub owner: u32,
    /// `making`, `filling`, `keeping`, `visible`, `scratch` or `pool`.
    pub state: &'static str,
    /// Its parts.
    pub parts: u64,
    /// When it was committed, or created while it is not visible.
    pub since: SystemTime,
    /// It is never evicted.
    pub pinned: bool,
    /// Who holds it, if it is a pool.
    pub pool: Option<PoolRow>,
    /// The number of the record of its hold.
    pub record: Option<u64>,
    /// Its writer, while it is unfinished.
    pub writer: Option<Participant>,
    /// Its readers.
    pub readers: Vec<Participant>,
}
