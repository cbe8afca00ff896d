//! A pool as the broker sent it: checked, its memory imported, nothing mapped.

use std::os::fd::{AsFd, OwnedFd};

use gpu_api::{Error, Gpu};
use transport::shared::journal_file::JournalFile;
use transport::shared::sealed_file;

use crate::client::connection::{Connection, nonsense};
use crate::client::link::Link;
use crate::error::{ObjectError, Result};
use crate::memory::range::Imported;
use crate::object::manifest::{MOST_MANIFEST, Manifest};
use crate::pool::Previous;
use crate::wire::{KNOWS_POOLS, RefusalCode, ToClient, VERSIONS};

/// A pool that was answered.
pub(super) struct Opened {
    pub manifest: Manifest,
    pub generation: u64,
    pub previous: Previous,
    pub imported: Imported,
    pub journal: JournalFile,
}

/// Refuses a broker that knows no pools.
pub(super) fn check_version(link: &Link) -> Result<()> {
    let knows = |connection: &Connection| connection.version >= KNOWS_POOLS;
    match link.connection() {
        Some(connection) if !knows(&connection) => Err(ObjectError::Refused {
            refusal: RefusalCode::Version,
            why: format!(
                "the broker speaks version {} at most, this side {VERSIONS}, and pools need {KNOWS_POOLS}",
                connection.version
            ),
            remedy: "replace the broker's program and end the broker: its keeper starts the new one",
        }),
        _ => Ok(()),
    }
}

/// Checks what a broker sent of a pool, and imports its memory.
pub(super) fn check(
    gpu: &Gpu,
    name: &str,
    answer: &ToClient,
    mut files: Vec<OwnedFd>,
    writable: bool,
) -> Result<Opened> {
    let &ToClient::Pool {
        identity,
        generation,
        previous,
        ..
    } = answer
    else {
        return Err(nonsense());
    };
    let journal = files.pop().ok_or_else(nonsense)?;
    let (file, regions) = files.split_first().ok_or_else(nonsense)?;
    let manifest = Manifest::decode(&sealed_file::read(file.as_fd(), 0..=MOST_MANIFEST)?)?;
    let is_it = manifest.name == name && manifest.identity == identity;
    let whole = manifest.layout.regions().len() == regions.len() && manifest.granularity > 0;
    if !is_it || !whole || manifest.layout.journal() == 0 {
        return Err(nonsense());
    }
    if manifest.backend != gpu.kind() || manifest.device != gpu.uuid() {
        return Err(Error::Mismatch {
            what: "the pool's device",
            theirs: format!("{} {}", manifest.backend, manifest.device),
            ours: format!("{} {}", gpu.kind(), gpu.uuid()),
            remedy: "connect a client with the pool's device",
        }
        .into());
    }
    Ok(Opened {
        imported: Imported::of(gpu, regions, manifest.mapped_regions())?,
        journal: JournalFile::open(journal, manifest.layout.journal(), writable)?,
        manifest,
        generation,
        previous,
    })
}
