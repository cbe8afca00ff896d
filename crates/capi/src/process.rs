//! What a process has one of: the tables behind its handles, and its backends.
//!
//! A forked child starts with fresh ones. The parent's may be locked by a thread that the child
//! does not have, so the child never touches them, and leaks them; it only knows its ancestors'
//! handles by their instance, to say what they are.
//!
//! A thread keeps one free row of each table, that of the handle it closed last, so that claiming
//! and closing in turn takes no lock. It puts them back when it ends; a forked child forgets them.

use std::cell::Cell;
use std::hash::{BuildHasher, RandomState};
use std::ptr;
use std::sync::atomic::{AtomicPtr, Ordering};

use crate::callback::Callbacks;
use crate::engine::{BackendKind, Backends, DeviceId, Error, ForkGuard, Gpu, Result};
use crate::failure::Failure;
use crate::handle::{Handle, MOST_INSTANCES};
use crate::kinds::{KINDS, Kind, Tables};
use crate::pools::Pools;
use crate::table::{Closed, FreeRow, Full, Inside, RowUse};

/// What a process has one of.
pub(crate) struct Process {
    guard: ForkGuard,
    /// In every handle of this process.
    instance: u16,
    /// The process that this one was forked from, if that had handles.
    parent: Option<&'static Process>,
    pub tables: Tables,
    pub callbacks: Callbacks,
    pub pools: Pools,
    pub backends: Backends,
}

static CURRENT: AtomicPtr<Process> = AtomicPtr::new(ptr::null_mut());

impl Process {
    /// Returns this process' own.
    #[inline]
    pub fn current() -> Result<&'static Process> {
        match Process::made() {
            Some(process) if !process.guard.is_child() => Ok(process),
            before => Process::make(before),
        }
    }

    #[inline]
    fn made() -> Option<&'static Process> {
        // SAFETY: `as_ref` asks for null or a valid value for as long as the reference: what is
        // stored was leaked.
        unsafe { CURRENT.load(Ordering::Acquire).as_ref() }
    }

    #[cold]
    fn make(parent: Option<&'static Process>) -> Result<&'static Process> {
        let fresh = Box::new(Process {
            guard: ForkGuard::new()?,
            instance: other_instance(parent),
            parent,
            tables: Tables::default(),
            callbacks: Callbacks::default(),
            pools: Pools::default(),
            backends: Backends::default(),
        });
        let before = parent.map_or(ptr::null_mut(), |parent| ptr::from_ref(parent).cast_mut());
        let fresh = Box::into_raw(fresh);
        match CURRENT.compare_exchange(before, fresh, Ordering::AcqRel, Ordering::Acquire) {
            // SAFETY: `&*` asks for a valid value: it was made above and is never freed.
            Ok(_) => Ok(unsafe { &*fresh }),
            Err(other) => {
                // SAFETY: `Box::from_raw` asks for what `into_raw` gave and nobody else has: it was
                // not stored.
                drop(unsafe { Box::from_raw(fresh) });
                // SAFETY: `&*` asks for a valid value: another thread of this process stored it,
                // and nothing frees it.
                Ok(unsafe { &*other })
            }
        }
    }

    /// Puts a value behind a new handle.
    #[inline]
    pub fn open<K: Kind>(&self, value: K::Value) -> Result<*mut K> {
        let row = self.with_spare::<K, _>(Cell::take).flatten();
        match K::table(&self.tables).open(row, value) {
            Ok(RowUse { row, generation }) => Ok(Handle {
                instance: self.instance,
                kind: K::NUMBER,
                generation,
                row,
            }
            .to_c()),
            Err(Full) => Err(Error::exhausted(
                "handles of a kind",
                crate::handle::MOST_ROWS.into(),
                "close those that are done with",
            )),
        }
    }

    /// Finds what a handle stands for; it stays until the end of what this returns.
    #[inline]
    pub fn get<K: Kind>(&self, handle: *mut K) -> Result<Inside<'_, K::Value>, Failure> {
        self.row_use(handle)
            .and_then(|row_use| K::table(&self.tables).enter(row_use))
            .ok_or_else(|| self.why_not::<K>(handle))
    }

    /// Finds what a handle stands for, if there is one.
    #[inline]
    pub fn get_opt<K: Kind>(
        &self,
        handle: *mut K,
    ) -> Result<Option<Inside<'_, K::Value>>, Failure> {
        if handle.is_null() {
            Ok(None)
        } else {
            self.get(handle).map(Some)
        }
    }

    /// Closes a handle; nothing for null, as `free` does. What it stands for is dropped, or by the
    /// last call that is in it.
    #[inline]
    pub fn close<K: Kind>(&self, handle: *mut K) -> Result<(), Failure> {
        if handle.is_null() {
            return Ok(());
        }
        self.close_and_take(handle).map(drop)
    }

    /// Closes a handle and returns what it stands for; `None` while another call is in it, whose
    /// end drops it.
    #[inline]
    pub fn close_and_take<K: Kind>(&self, handle: *mut K) -> Result<Option<K::Value>, Failure> {
        match self
            .row_use(handle)
            .map(|row_use| K::table(&self.tables).close(row_use))
        {
            Some(Closed::Taken(value, row)) => {
                self.keep::<K>(row);
                Ok(Some(value))
            }
            Some(Closed::InUse) => Ok(None),
            Some(Closed::NotOpen) | None => Err(self.why_not::<K>(handle)),
        }
    }

    /// Keeps a free row for the next open of this thread; the one that it had goes on the table's
    /// list.
    #[inline]
    fn keep<K: Kind>(&self, mut row: Option<FreeRow>) {
        // A thread that is ending has no place for it any more.
        self.with_spare::<K, _>(|spare| row = spare.replace(row.take()));
        row.into_iter()
            .for_each(|row| K::table(&self.tables).put_back(row));
    }

    /// Calls `run` with the place of this thread's free row of a kind; `None` while the thread is
    /// ending.
    #[inline]
    fn with_spare<K: Kind, R>(&self, run: impl FnOnce(&Cell<Option<FreeRow>>) -> R) -> Option<R> {
        let run = |spares: &Spares| {
            if spares.instance.get() != self.instance {
                spares.forget(self.instance);
            }
            run(&spares.rows[usize::from(K::NUMBER)])
        };
        SPARES.try_with(run).ok()
    }

    #[inline]
    fn row_use<K: Kind>(&self, handle: *mut K) -> Option<RowUse> {
        let handle = Handle::of(handle)?;
        (handle.instance == self.instance && handle.kind == K::NUMBER).then_some(RowUse {
            row: handle.row,
            generation: handle.generation,
        })
    }

    #[cold]
    fn why_not<K: Kind>(&self, pointer: *mut K) -> Failure {
        let Some(handle) = Handle::of(pointer) else {
            return Failure::handle(format!("{} is null; pass one that was opened", K::NAME));
        };
        let is_kin = std::iter::successors(self.parent, |process| process.parent)
            .any(|ancestor| ancestor.instance == handle.instance);
        if is_kin {
            return Error::forked(K::NAME).into();
        }
        if handle.instance != self.instance {
            return Failure::handle(format!(
                "{} {pointer:?} is no handle of this library; pass it to the library that made it, if that is another \
                 one of this process",
                K::NAME
            ));
        }
        if handle.kind != K::NUMBER {
            let got =
                crate::kinds::name_of(handle.kind).unwrap_or("nothing that this library knows");
            return Failure::handle(format!(
                "{} was asked for, the handle is of {got}; pass the right one",
                K::NAME
            ));
        }
        Failure::handle(format!("{} was closed; open another", K::NAME))
    }

    /// Opens a device of a backend.
    pub fn device(&self, kind: BackendKind, number: u32) -> Result<Gpu> {
        let backend = self.backends.get(kind)?;
        let count = backend.device_count()?;
        if number >= count {
            return Err(Error::invalid(
                "the number of a device",
                format!("{number} of {count} on {kind}"),
                "below the number of devices that this process sees",
            ));
        }
        Gpu::new(backend, DeviceId(number))
    }
}

thread_local! {
    static SPARES: Spares =
        const { Spares { instance: Cell::new(0), rows: [const { Cell::new(None) }; KINDS] } };
}

/// A thread's free rows, at most one of each kind's table.
struct Spares {
    /// The process that they belong to: not this one in a forked child, and none at first.
    instance: Cell<u16>,
    rows: [Cell<Option<FreeRow>>; KINDS],
}

impl Spares {
    /// Forgets another process' rows.
    #[cold]
    fn forget(&self, instance: u16) {
        self.rows.iter().for_each(|row| row.set(None));
        self.instance.set(instance);
    }
}

impl Drop for Spares {
    fn drop(&mut self) {
        let is_ours = |process: &&Process| {
            process.instance == self.instance.get() && !process.guard.is_child()
        };
        let Some(process) = Process::made().filter(is_ours) else {
            return;
        };
        for (kind, row) in (0..).zip(&self.rows) {
            row.take()
                .into_iter()
                .for_each(|row| process.tables.put_back(kind, row));
        }
    }
}

/// Chooses an instance above 0 that no ancestor has.
fn other_instance(parent: Option<&'static Process>) -> u16 {
    // Seeded by the system, for each thread and map anew.
    let mut draw = RandomState::new().hash_one(ptr::from_ref(&CURRENT).addr());
    loop {
        let instance = (draw % u64::from(MOST_INSTANCES)) as u16;
        let taken = std::iter::successors(parent, |process| process.parent)
            .any(|kin| kin.instance == instance);
        if instance != 0 && !taken {
            return instance;
        }
        draw = draw / u64::from(MOST_INSTANCES) + draw.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    }
}
