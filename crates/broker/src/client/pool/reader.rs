//! A pool that another process holds, to be read.

use std::sync::{Arc, Mutex};

use gpu_api::lock::Acquire;
use gpu_api::{Access, DevicePtr};
use ipc_rc::Stream;
use transport::shared::journal::Whole;
use transport::shared::journal_file::JournalFile;

use super::opened::{Opened, check, check_version};
use crate::client::connection::nonsense;
use crate::client::link::Link;
use crate::client::mapped::{address_of, note, read_part};
use crate::client::opened::Lease;
use crate::client::retire::Retiring;
use crate::error::Result;
use crate::memory::range::{Range, SwapError};
use crate::object::identity::Identity;
use crate::object::layout::Layout;
use crate::object::manifest::Manifest;
use crate::pool::table::sealed;
use crate::pool::{Sealed, blocks_of};
use crate::wire::{ToBroker, ToClient};

/// A pool that is mapped read-only, beside a holder that may write to it at any time.
///
/// What is read is a block's contents only if the block was whole before and after:
/// [`read_whole`](PoolReader::read_whole) does both looks. Work on a stream is put between
/// [`look`](PoolReader::look) and [`is_still`](PoolReader::is_still) with a wait for it.
#[derive(Debug)]
pub struct PoolReader {
    link: Arc<Link>,
    manifest: Manifest,
    generation: u64,
    journal: JournalFile,
    /// Gone with the drop.
    range: Option<Range>,
    base: DevicePtr,
    _lease: Lease,
    streams: Mutex<Vec<Stream>>,
}

impl PoolReader {
    pub(in crate::client) fn open(link: &Arc<Link>, name: &str) -> Result<PoolReader> {
        check_version(link)?;
        let question = |request| ToBroker::ReadPool {
            request,
            name: name.into(),
        };
        let (answer, files) = link.ask(question, Vec::new())?;
        let &ToClient::Pool { identity, .. } = &answer else {
            return Err(nonsense());
        };
        let lease = Lease::note(link, identity);
        let gpu = link.gpu();
        let Opened {
            manifest,
            generation,
            imported,
            journal,
            ..
        } = check(gpu, name, &answer, files, false)?;
        let mut range = Range::reserve(gpu, manifest.mapped_bytes(), Access::ReadOnly)?;
        if let Err(SwapError::Unchanged(error) | SwapError::Poisoned(error)) = range.map(imported) {
            link.retire(Retiring::new(gpu, range, &[]));
            return Err(error.into());
        }
        Ok(PoolReader {
            link: link.clone(),
            manifest,
            generation,
            journal,
            base: range.base(),
            range: Some(range),
            _lease: lease,
            streams: Mutex::default(),
        })
    }

    /// Returns the name.
    pub fn name(&self) -> &str {
        &self.manifest.name
    }

    /// Returns the identity: the same for every holder.
    pub fn identity(&self) -> Identity {
        self.manifest.identity
    }

    /// Returns the generation of the holder that was there when this reader opened. Of the next one
    /// [`Client::watch_pool`](crate::Client::watch_pool) tells.
    pub fn generation(&self) -> u64 {
        self.generation
    }

    /// Returns the parts' names, types, shapes and offsets.
    pub fn layout(&self) -> &Layout {
        &self.manifest.layout
    }

    /// Counts the blocks that the journal has entries for.
    pub fn blocks(&self) -> u32 {
        blocks_of(self.manifest.layout.journal())
    }

    /// Returns the address of a part, which may be read alone.
    pub fn device_ptr(&self, part: &str) -> Option<DevicePtr> {
        address_of(&self.manifest, self.base, part)
    }

    /// Notes that work on this stream touches the pool.
    ///
    /// # Errors
    ///
    /// [`Error::Mismatch`](gpu_api::Error::Mismatch) for a stream of another device.
    pub fn used_on(&self, stream: &Stream) -> Result<()> {
        self.link.check_fork()?;
        note(self.link.gpu(), &self.streams, stream)
    }

    /// Lists the blocks that are whole at this moment; the holder may give any of them up meanwhile.
    pub fn sealed(&self) -> Vec<Sealed> {
        sealed(self.journal.entries())
    }

    /// Says what a block holds, if that is whole at this moment.
    pub fn look(&self, block: u32) -> Option<Sealed> {
        let found = self.journal.entries().get(block as usize)?.look(block)?;
        Some(Sealed {
            block,
            key: found.key,
            generation: found.generation,
        })
    }

    /// Says whether a block was whole all along since the look: what was copied from it between is
    /// what the look found.
    pub fn is_still(&self, found: &Sealed) -> bool {
        let whole = Whole::of(found.block, found.key, found.generation);
        let entry = self.journal.entries().get(found.block as usize);
        entry.is_some_and(|entry| entry.is_still(&whole))
    }

    /// Copies a block that is whole from its place in a part to the host. `None`: it is not whole, or
    /// the holder gave it up meanwhile, and `bytes` are of no use.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`](gpu_api::Error::Invalid) for a range that does not lie in a part; the
    /// driver's error.
    pub fn read_whole(
        &self,
        block: u32,
        part: &str,
        offset: u64,
        bytes: &mut [u8],
    ) -> Result<Option<Sealed>> {
        self.link.check_fork()?;
        let Some(found) = self.look(block) else {
            return Ok(None);
        };
        read_part(
            self.link.gpu(),
            &self.manifest,
            self.base,
            part,
            offset,
            bytes,
        )?;
        Ok(self.is_still(&found).then_some(found))
    }
}

impl Drop for PoolReader {
    fn drop(&mut self) {
        if let Some(range) = self.range.take() {
            let streams = std::mem::take(&mut *self.streams.acquire());
            self.link
                .retire(Retiring::new(self.link.gpu(), range, &streams));
        }
    }
}
