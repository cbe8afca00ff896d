//! What a session is to its Python object, its blocks and the keeper: the native session, and what its arrays keep.

use std::collections::{BTreeMap, HashMap};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError, Weak};

use gpu_ipc::backend::ForkGuard;
use gpu_ipc::session::{AdoptToken, SessionNotice};
use gpu_ipc::{Error, Gpu};
use pyo3::prelude::*;

use crate::array::Keeper;
use crate::block::{Lent, Owned};
use crate::logging;
use crate::notice::SessionNotices;
use crate::process::process;

/// How many adopted storages one look checks.
const LOOK_AT: usize = 64;

/// A session, as its Python object, its blocks and the keeper hold it.
pub(crate) struct Shared {
    pub session: gpu_ipc::Session,
    pub gpu: Gpu,
    pub guard: ForkGuard,
    /// What the program was told and has not read.
    pub notices: SessionNotices,
    /// The program has closed it.
    pub is_closed: AtomicBool,
    next_token: AtomicU64,
    /// What keeps adopted memory, by token. Never dropped with the lock held.
    adopted: Mutex<HashMap<u64, Keeper>>,
    /// Blocks that arrays of this process may lie in, by address.
    blocks: Mutex<BTreeMap<u64, (u64, Weak<Owned>)>>,
    /// Where other libraries' work is waited for when they are asked by `__dlpack__`, and copies run.
    own_stream: OnceLock<gpu_ipc::Stream>,
    /// Where the next look for freed storages begins.
    looked: AtomicU64,
    /// How many were found.
    pub freed: AtomicU64,
}

impl Shared {
    pub fn new(session: gpu_ipc::Session, gpu: Gpu) -> Result<Shared, Error> {
        Ok(Shared {
            session,
            gpu,
            guard: ForkGuard::new()?,
            notices: SessionNotices::new()?,
            is_closed: AtomicBool::new(false),
            next_token: AtomicU64::new(1),
            adopted: Mutex::default(),
            blocks: Mutex::default(),
            own_stream: OnceLock::new(),
            looked: AtomicU64::new(0),
            freed: AtomicU64::new(0),
        })
    }

    /// Draws a token for memory that is to be adopted.
    pub fn draw_token(&self) -> AdoptToken {
        AdoptToken(self.next_token.fetch_add(1, Ordering::Relaxed))
    }

    /// Keeps what keeps adopted memory until its token is back.
    pub fn keep(&self, token: AdoptToken, keeper: Keeper) {
        let before = self.adopted.lock().unwrap_or_else(PoisonError::into_inner).insert(token.0, keeper);
        debug_assert!(before.is_none(), "a token is drawn once");
    }

    /// Gives back what keeps memory that was not adopted after all.
    pub fn keep_no_more(&self, token: AdoptToken) -> Option<Keeper> {
        self.adopted.lock().unwrap_or_else(PoisonError::into_inner).remove(&token.0)
    }

    /// Forgets a block that is being dropped.
    pub fn forget_block(&self, start: u64) {
        if !self.guard.is_child() {
            self.blocks.lock().unwrap_or_else(PoisonError::into_inner).remove(&start);
        }
    }

    /// Lets arrays of this process be found to lie in a block.
    pub fn note_block(&self, lent: &Lent) {
        let entry = (lent.block().len(), Arc::downgrade(lent.owned()));
        self.blocks.lock().unwrap_or_else(PoisonError::into_inner).insert(lent.start(), entry);
    }

    /// Finds the block that a range lies in.
    pub fn block_at(&self, first: u64, len: u64) -> Option<Lent> {
        let blocks = self.blocks.lock().unwrap_or_else(PoisonError::into_inner);
        let (&start, (bytes, owned)) = blocks.range(..=first).next_back()?;
        let is_inside = first.checked_add(len)? <= start.checked_add(*bytes)?;
        owned.upgrade().filter(|_| is_inside).map(Lent::of)
    }

    /// Takes back what keeps memory that nobody holds or maps any more. The caller drops it with the interpreter's
    /// lock.
    pub fn take_back(&self) -> Vec<Keeper> {
        self.keepers(self.session.collect().tokens)
    }

    pub fn keepers(&self, tokens: Vec<AdoptToken>) -> Vec<Keeper> {
        let mut adopted = self.adopted.lock().unwrap_or_else(PoisonError::into_inner);
        tokens.into_iter().filter_map(|token| adopted.remove(&token.0)).collect()
    }

    /// Reads the library's notices: takes back what is returned, and passes the others on. The caller drops what it
    /// gets with the interpreter's lock.
    pub fn hear(&self) -> Vec<Keeper> {
        let mut returned = Vec::new();
        while let Some(notice) = self.session.next_notice() {
            match notice {
                SessionNotice::TokensReturned => returned.extend(self.take_back()),
                notice => self.notices.push(Some(notice)),
            }
        }
        returned
    }

    /// Says whether storages of PyTorch's are lent, which may be resized under their leases.
    pub fn lends_storages(&self) -> bool {
        let adopted = self.adopted.lock().unwrap_or_else(PoisonError::into_inner);
        adopted.values().any(|keeper| matches!(keeper, Keeper::Storage { .. }))
    }

    /// Says whether every adopted memory is its owner's again.
    pub fn lends_nothing(&self) -> bool {
        self.adopted.lock().unwrap_or_else(PoisonError::into_inner).is_empty()
    }

    /// Looks at some of the storages that are lent, and reports those that were freed under their leases.
    pub fn look_for_freed(&self, py: Python<'_>) {
        let from = self.looked.load(Ordering::Relaxed);
        let mut lent: Vec<(u64, Keeper)> = Vec::new();
        {
            let adopted = self.adopted.lock().unwrap_or_else(PoisonError::into_inner);
            for (&token, keeper) in adopted.iter().filter(|(token, _)| **token >= from).take(LOOK_AT) {
                if let Keeper::Storage { object, start, bytes } = keeper {
                    lent.push((token, Keeper::Storage { object: object.clone_ref(py), start: *start, bytes: *bytes }));
                }
            }
        }
        let last = lent.iter().map(|(token, _)| *token).max();
        self.looked.store(last.filter(|_| lent.len() == LOOK_AT).map_or(0, |last| last + 1), Ordering::Relaxed);
        for (token, keeper) in lent {
            if self.report_freed(py, &keeper) {
                // Once is enough.
                let mut adopted = self.adopted.lock().unwrap_or_else(PoisonError::into_inner);
                let known = adopted.get_mut(&token).map(|known| std::mem::replace(known, Keeper::Nothing));
                if let (Some(Keeper::Storage { object, .. }), Some(place)) = (known, adopted.get_mut(&token)) {
                    *place = Keeper::Object(object);
                }
            }
        }
    }

    pub fn report_freed(&self, py: Python<'_>, keeper: &Keeper) -> bool {
        let Some(text) = keeper.was_freed(py) else { return false };
        self.freed.fetch_add(1, Ordering::Relaxed);
        logging::error(py, text);
        true
    }

    /// Returns a stream of the library's own.
    pub fn own_stream(&self) -> Result<&gpu_ipc::Stream, Error> {
        if let Some(stream) = self.own_stream.get() {
            return Ok(stream);
        }
        let stream = gpu_ipc::Stream::create(&self.gpu)?;
        Ok(self.own_stream.get_or_init(|| stream))
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        if !self.guard.is_child() {
            process().keeper.forget_gone();
        }
        // The keeper holds the session while something is lent. So this is the end of a process or a forked child, and
        // the references are not this thread's to drop.
        std::mem::forget(std::mem::take(self.adopted.get_mut().unwrap_or_else(PoisonError::into_inner)));
    }
}
