//! What a session is to its Python object, its blocks and the keeper; and its blocks, which keep
//! it.

use std::any::Any;
use std::collections::BTreeMap;
use std::ptr;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};

use gpu_ipc::backend::ForkGuard;
use gpu_ipc::session::SessionNotice;
use gpu_ipc::{Error, Gpu, SentBlock};
use pyo3::prelude::*;

use super::adopted::Adopted;
use crate::arrays::view::Owner;
use crate::data::notice::SessionNotices;
use crate::interpreter::process::process;
use crate::interpreter::queue::Lender;

/// A session, as its Python object, its blocks and the keeper hold it.
pub(crate) struct Shared {
    pub session: gpu_ipc::Session,
    pub gpu: Gpu,
    pub guard: ForkGuard,
    /// What the program was told and has not read.
    pub notices: SessionNotices,
    /// The program has closed it.
    pub is_closed: AtomicBool,
    pub adopted: Adopted,
    /// Blocks that arrays of this process may lie in, by address.
    blocks: Mutex<BTreeMap<u64, Weak<Owned>>>,
    /// Where other libraries' work is waited for when they are asked by `__dlpack__`, and copies
    /// run.
    own_stream: OnceLock<gpu_ipc::Stream>,
}

impl Shared {
    pub fn new(session: gpu_ipc::Session, gpu: Gpu) -> Result<Shared, Error> {
        Ok(Shared {
            session,
            gpu,
            guard: ForkGuard::new()?,
            notices: SessionNotices::new()?,
            is_closed: AtomicBool::new(false),
            adopted: Adopted::default(),
            blocks: Mutex::default(),
            own_stream: OnceLock::new(),
        })
    }

    /// Finds the block that a range lies in.
    pub fn block_at(&self, first: u64, len: u64) -> Option<Lent> {
        let block = self
            .blocks()
            .range(..=first)
            .next_back()
            .and_then(|(_, block)| block.upgrade())
            .map(Lent)?;
        let end = block.start().checked_add(block.block().len())?;
        (first.checked_add(len)? <= end).then_some(block)
    }

    /// Takes back what keeps memory that nobody holds or maps any more. The caller drops it with
    /// the interpreter's lock.
    pub fn take_back(&self) -> Vec<Owner> {
        self.adopted.take_back(&self.session.collect().tokens)
    }

    /// Returns a stream of the library's own.
    pub fn own_stream(&self) -> Result<&gpu_ipc::Stream, Error> {
        if let Some(stream) = self.own_stream.get() {
            return Ok(stream);
        }
        let stream = gpu_ipc::Stream::create(&self.gpu)?;
        Ok(self.own_stream.get_or_init(|| stream))
    }

    fn blocks(&self) -> MutexGuard<'_, BTreeMap<u64, Weak<Owned>>> {
        self.blocks.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Lender for Shared {
    /// Takes back what is returned, and passes the other notices on.
    fn hear(&self) -> Box<dyn Any + Send> {
        let mut returned = Vec::new();
        while let Some(notice) = self.session.next_notice() {
            match notice {
                SessionNotice::TokensReturned => returned.extend(self.take_back()),
                notice => self.notices.push(Some(notice)),
            }
        }
        Box::new(returned)
    }

    fn look_for_freed(&self, py: Python<'_>) {
        self.adopted.look_for_freed(py);
    }

    fn lends_storages(&self) -> bool {
        self.adopted.has_storages()
    }

    fn lends_nothing(&self) -> bool {
        self.adopted.is_empty()
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        if !self.guard.is_child() {
            process().queue.forget_gone();
        }
    }
}

/// A block of the session's memory, held by its Python object and by every array that was made of
/// it; the last one that is dropped drops the block.
#[derive(Clone)]
pub(crate) struct Lent(Arc<Owned>);

struct Owned {
    block: SentBlock,
    session: Arc<Shared>,
    /// In the hands of PyTorch's allocator, which gives out parts of it again and again.
    is_segment: bool,
}

impl Lent {
    /// Holds a block, and lets arrays of this process be found to lie in it.
    pub fn new(block: SentBlock, session: &Arc<Shared>, is_segment: bool) -> Lent {
        let lent = Lent(Arc::new(Owned {
            block,
            session: session.clone(),
            is_segment,
        }));
        session
            .blocks()
            .insert(lent.start(), Arc::downgrade(&lent.0));
        lent
    }

    pub fn block(&self) -> &SentBlock {
        &self.0.block
    }

    pub fn session(&self) -> &Arc<Shared> {
        &self.0.session
    }

    /// Says whether something else holds the block too.
    pub fn is_shared(&self) -> bool {
        Arc::strong_count(&self.0) > 1
    }

    pub fn is_segment(&self) -> bool {
        self.0.is_segment
    }

    /// Returns the address of the first byte.
    pub fn start(&self) -> u64 {
        self.0.block.device_ptr().0
    }
}

impl Drop for Owned {
    fn drop(&mut self) {
        if self.session.guard.is_child() {
            return;
        }
        // Before the block itself: its address may be another's as soon as it is gone.
        let start = self.block.device_ptr().0;
        let mut blocks = self.session.blocks();
        let known = blocks.remove(&start);
        debug_assert!(
            known.is_some_and(|known| ptr::eq(known.as_ptr(), self)),
            "a block is noted under its address"
        );
    }
}
