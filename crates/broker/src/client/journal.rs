//! The journal of a pool that this process holds.

use std::sync::Mutex;

use gpu_api::lock::Acquire;
use gpu_api::{Gpu, MAX_BATCH, Result, StreamOp, WordPtr};
use ipc_rc::Stream;
use transport::shared::journal_file::{JournalFile, seal_word};

use crate::pool::table::{Table, sealed};
use crate::pool::{Key, Sealed};

/// The file, registered with the driver, and what this holder did with each block.
#[derive(Debug)]
pub(super) struct Journal {
    file: JournalFile,
    /// Where streams see the file; `None` on a device without stream words.
    registered: Option<WordPtr>,
    table: Mutex<Table>,
    gpu: Gpu,
}

impl Journal {
    /// Goes on with a journal. One whose header is none has no whole block.
    pub(super) fn of(gpu: &Gpu, file: JournalFile) -> Result<Journal> {
        if !file.is_sound() {
            tracing::warn!("the journal of a pool is damaged: none of its blocks counts as whole");
            file.reset();
        }
        // SAFETY: `register` asks for a file that stays mapped until `unregister_words`: `drop`
        // calls that before the file goes.
        let registered = unsafe { file.register(gpu) }?;
        let table = Mutex::new(Table::of(file.entries()));
        Ok(Journal {
            file,
            registered,
            table,
            gpu: gpu.clone(),
        })
    }

    pub(super) fn file(&self) -> &JournalFile {
        &self.file
    }

    pub(super) fn invalidate(&self, block: u32) -> Result<()> {
        self.table.acquire().invalidate(self.file.entries(), block)
    }

    /// Queues the seals behind the work on a stream, in batches.
    pub(super) fn seal(&self, blocks: &[(u32, Key)], stream: &Stream) -> Result<()> {
        let Some(words) = self.registered else {
            stream.synchronize()?;
            return self.seal_here(blocks);
        };
        let entries = self.file.entries();
        let mut table = self.table.acquire();
        table.check(blocks)?;
        for batch in blocks.chunks(MAX_BATCH) {
            let seal = |&(block, key): &(u32, Key)| StreamOp::Write {
                word: words.word(seal_word(block)),
                value: table.key(entries, block, key),
            };
            let ops: Vec<StreamOp> = batch.iter().map(seal).collect();
            // SAFETY: `stream_batch` asks for a live stream, which the caller has, and for words in a
            // registration that outlives the operation: the pool keeps the stream among those that
            // it waits for before this journal goes.
            unsafe { self.gpu.backend().stream_batch(stream.raw(), &ops) }?;
        }
        Ok(())
    }

    /// Stores the seals by the CPU, for fillings that have ended.
    pub(super) fn seal_here(&self, blocks: &[(u32, Key)]) -> Result<()> {
        let entries = self.file.entries();
        let mut table = self.table.acquire();
        table.check(blocks)?;
        for &(block, key) in blocks {
            let value = table.key(entries, block, key);
            entries[block as usize].seal_here(value);
        }
        Ok(())
    }

    pub(super) fn sealed(&self) -> Vec<Sealed> {
        sealed(self.file.entries())
    }
}

impl Drop for Journal {
    fn drop(&mut self) {
        if self.registered.is_some() {
            // SAFETY: `unregister_words` asks for a registration that no unfinished operation uses:
            // whoever drops a journal has waited for every stream that seals were queued on.
            if let Err(error) = unsafe { self.gpu.backend().unregister_words(self.file.start()) } {
                tracing::warn!(%error, "the words of a journal cannot be unregistered");
            }
        }
    }
}
