//! What a process has one of: the tables behind its handles, and its backends.
//!
//! A forked child starts with fresh ones. The parent's may be locked by a thread that the child does not have, so the
//! child never touches them, and leaks them; it only knows its ancestors' handles by their instance, to say what they
//! are.

use std::hash::{BuildHasher, RandomState};
use std::ptr;
use std::sync::atomic::{AtomicPtr, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use crate::callback::Callbacks;
use crate::engine::{BackendKind, DeviceId, Error, ForkGuard, Gpu, GpuBackend, Result, detect_only};
use crate::failure::Failure;
use crate::handle::{Handle, MOST_INSTANCES};
use crate::kinds::{Kind, Tables};
use crate::table::{Full, Inside, Place, Taken};
use crate::torch::Pools;

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
    /// One of each kind, so that sessions and participants of a process know each other's streams.
    backends: Mutex<Vec<Arc<dyn GpuBackend>>>,
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
        // SAFETY: `as_ref` asks for null or a valid value for as long as the reference: what is stored was leaked.
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
            backends: Mutex::default(),
        });
        let before = parent.map_or(ptr::null_mut(), |parent| ptr::from_ref(parent).cast_mut());
        let fresh = Box::into_raw(fresh);
        match CURRENT.compare_exchange(before, fresh, Ordering::AcqRel, Ordering::Acquire) {
            // SAFETY: `&*` asks for a valid value: it was made above and is never freed.
            Ok(_) => Ok(unsafe { &*fresh }),
            Err(other) => {
                // SAFETY: `Box::from_raw` asks for what `into_raw` gave and nobody else has: it was not stored.
                drop(unsafe { Box::from_raw(fresh) });
                // SAFETY: `&*` asks for a valid value: another thread of this process stored it, and nothing frees it.
                Ok(unsafe { &*other })
            }
        }
    }

    /// Says whether this is a forked child of the process that it belongs to.
    pub fn is_child(&self) -> bool {
        self.guard.is_child()
    }

    /// Puts a value behind a new handle.
    #[inline]
    pub fn open<K: Kind>(&self, value: K::Value) -> Result<*mut K> {
        match K::table(&self.tables).open(value) {
            Ok(Place { row, generation }) => {
                Ok(Handle { instance: self.instance, kind: K::NUMBER, generation, row }.to_c())
            }
            Err(Full(_)) => Err(Error::Exhausted {
                what: "handles of a kind",
                limit: crate::handle::MOST_ROWS.into(),
                remedy: "close those that are done with",
            }),
        }
    }

    /// Finds what a handle stands for; it stays until the end of what this returns.
    #[inline]
    pub fn get<K: Kind>(&self, handle: *mut K) -> Result<Inside<'_, K::Value>, Failure> {
        self.place(handle)
            .and_then(|place| K::table(&self.tables).enter(place))
            .ok_or_else(|| self.why_not::<K>(handle))
    }

    /// Finds what a handle stands for, if there is one.
    #[inline]
    pub fn get_opt<K: Kind>(&self, handle: *mut K) -> Result<Option<Inside<'_, K::Value>>, Failure> {
        if handle.is_null() { Ok(None) } else { self.get(handle).map(Some) }
    }

    /// Closes a handle; nothing for null, as `free` does. What it stands for is dropped, or by the last call that is in
    /// it.
    #[inline]
    pub fn close<K: Kind>(&self, handle: *mut K) -> Result<(), Failure> {
        if handle.is_null() {
            return Ok(());
        }
        match self.place(handle) {
            Some(place) if K::table(&self.tables).close(place) => Ok(()),
            _ => Err(self.why_not::<K>(handle)),
        }
    }

    /// Closes a handle and returns what it stands for; `None` while another call is in it, whose end drops it.
    #[inline]
    pub fn close_and_take<K: Kind>(&self, handle: *mut K) -> Result<Option<K::Value>, Failure> {
        match self.place(handle).map(|place| K::table(&self.tables).close_and_take(place)) {
            Some(Taken::Value(value)) => Ok(Some(value)),
            Some(Taken::InUse) => Ok(None),
            Some(Taken::NotOpen) | None => Err(self.why_not::<K>(handle)),
        }
    }

    #[inline]
    fn place<K: Kind>(&self, handle: *mut K) -> Option<Place> {
        let handle = Handle::of(handle)?;
        (handle.instance == self.instance && handle.kind == K::NUMBER)
            .then_some(Place { row: handle.row, generation: handle.generation })
    }

    #[cold]
    fn why_not<K: Kind>(&self, pointer: *mut K) -> Failure {
        let Some(handle) = Handle::of(pointer) else {
            return Failure::handle(format!("{} is null; pass one that was opened", K::NAME));
        };
        let is_kin = std::iter::successors(self.parent, |process| process.parent)
            .any(|ancestor| ancestor.instance == handle.instance);
        if is_kin {
            return Error::Forked { what: K::NAME }.into();
        }
        if handle.instance != self.instance {
            return Failure::handle(format!(
                "{} {pointer:?} is no handle of this library; pass it to the library that made it, if that is another one \
                 of this process",
                K::NAME
            ));
        }
        if handle.kind != K::NUMBER {
            let got = crate::kinds::name_of(handle.kind).unwrap_or("nothing that this library knows");
            return Failure::handle(format!("{} was asked for, the handle is of {got}; pass the right one", K::NAME));
        }
        Failure::handle(format!("{} was closed; open another", K::NAME))
    }

    /// Returns the backend of a kind, loaded at the first call.
    ///
    /// # Errors
    ///
    /// Why it cannot be used; the next call tries again.
    pub fn backend(&self, kind: BackendKind) -> Result<Arc<dyn GpuBackend>> {
        let mut backends = self.backends.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(backend) = backends.iter().find(|backend| backend.kind() == kind) {
            return Ok(backend.clone());
        }
        let backend = detect_only(kind)?.backend(kind)?;
        backends.push(backend.clone());
        Ok(backend)
    }

    /// Opens a device of a backend.
    pub fn device(&self, kind: BackendKind, number: u32) -> Result<Gpu> {
        let backend = self.backend(kind)?;
        let count = backend.device_count()?;
        if number >= count {
            return Err(Error::Invalid {
                what: "the number of a device",
                got: format!("{number} of {count} on {kind}"),
                must: "below the number of devices that this process sees",
            });
        }
        Gpu::new(backend, DeviceId(number))
    }
}

/// Chooses an instance above 0 that no ancestor has.
fn other_instance(parent: Option<&'static Process>) -> u16 {
    // Seeded by the system, for each thread and map anew.
    let mut draw = RandomState::new().hash_one(ptr::from_ref(&CURRENT).addr());
    loop {
        let instance = (draw % u64::from(MOST_INSTANCES)) as u16;
        let taken = std::iter::successors(parent, |process| process.parent).any(|kin| kin.instance == instance);
        if instance != 0 && !taken {
            return instance;
        }
        draw = draw / u64::from(MOST_INSTANCES) + draw.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    }
}
