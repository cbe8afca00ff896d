//! Marks on both ends of every allocation.

use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, Mutex};

use gpu_api::lock::Acquire;
use gpu_api::{Error, Result};

use crate::allocator::hand_on;
use crate::request::foreign;
use crate::{Allocator, Memory, Placed, Request, Work};

/// Bytes of a mark, and what the front one is rounded up to so that alignment is kept.
const MARK: u64 = 256;
/// What each byte of the mark in front is, and of the one behind.
const FRONT: u8 = 0xab;
const BEHIND: u8 = 0xcd;

/// An allocation whose marks are not what was written.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct Damage {
    /// The allocation.
    pub placed: Placed,
    /// Where the first wrong byte lies, counted from the allocation's first byte: below 0 in front
    /// of it.
    pub at: i64,
    /// What is there.
    pub found: u8,
    /// The code that allocated: the tag and the line.
    pub asker: String,
}

impl fmt::Display for Damage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Damage {
            placed: Placed { number, asked, .. },
            at,
            found,
            asker,
        } = self;
        write!(
            f,
            "{found:#04x} at byte {at} of allocation {number}, {asked} bytes for {asker}"
        )
    }
}

/// Puts 256 bytes of marks before and behind every allocation, and looks at them when it is freed.
///
/// A write past an end is found at the free at the latest, and by [`check`](Guard::check) at any
/// time. An allocation that was written beyond is not freed, so that nobody gets it next;
/// [`free_damaged`](Guard::free_damaged) does. The alignment that was asked for is kept. What is
/// given back after work on a stream is looked at when that is done;
/// [`check_all`](Guard::check_all) lists what was found then.
///
/// # Examples
///
/// ```
/// use allocators::{Allocator, BasicCpu, Guard, Request};
/// let guard = Guard::new(BasicCpu::new(None)?)?;
/// let placed = guard.alloc(Request::new(100).tag("row"))?;
/// // SAFETY: the byte behind belongs to the guard, and is still within what it took.
/// unsafe { guard.memory()?.write(placed.address + 100, &[0]) }?;
/// let error = guard.free(placed.address).unwrap_err();
/// assert!(error.to_string().contains("0x00 at byte 100 of allocation 1, 100 bytes for row"));
/// # Ok::<(), gpu_api::Error>(())
/// ```
#[derive(Debug)]
pub struct Guard<A: Allocator> {
    inner: A,
    memory: Arc<dyn Memory>,
    state: Mutex<GuardState>,
    late: Late,
}

#[derive(Debug, Default)]
struct GuardState {
    live: HashMap<u64, Guarded>,
    number: u64,
}

/// Damage that was found after work on a stream, when the allocation was no longer there to refuse
/// its free.
type Late = Arc<Mutex<Vec<Damage>>>;

#[derive(Clone, Debug)]
struct Guarded {
    placed: Placed,
    request: Request,
    /// The address that `inner` gave.
    start: u64,
    /// Work that was noted for it: its marks are looked at after that.
    noted: Vec<Work>,
}

impl<A: Allocator> Guard<A> {
    /// Guards what an allocator of memory hands out.
    ///
    /// # Errors
    ///
    /// As [`Allocator::memory`].
    pub fn new(inner: A) -> Result<Guard<A>> {
        let memory = inner.memory()?;
        Ok(Guard {
            inner,
            memory,
            state: Mutex::default(),
            late: Late::default(),
        })
    }

    /// Looks at the marks of an allocation; `None` when they are whole.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] for an address that is not handed out; the driver's error.
    pub fn check(&self, address: u64) -> Result<Option<Damage>> {
        self.check_owner()?;
        // The lock keeps it from being freed meanwhile.
        let state = self.state.acquire();
        look(
            &*self.memory,
            state.live.get(&address).ok_or_else(|| foreign(address))?,
        )
    }

    /// Looks at the marks of every allocation, and lists the damaged ones in the order in which
    /// they were made, with those that were given back after work on a stream and found damaged
    /// when it was done.
    ///
    /// # Errors
    ///
    /// The driver's error.
    pub fn check_all(&self) -> Result<Vec<Damage>> {
        self.check_owner()?;
        let state = self.state.acquire();
        let mut damaged = self.late.acquire().clone();
        for guarded in state.live.values() {
            damaged.extend(look(&*self.memory, guarded)?);
        }
        damaged.sort_by_key(|damage| damage.placed.number);
        Ok(damaged)
    }

    /// Frees an allocation whatever its marks are.
    ///
    /// # Errors
    ///
    /// As [`Allocator::free`].
    pub fn free_damaged(&self, address: u64) -> Result<()> {
        self.check_owner()?;
        let guarded = self
            .state
            .acquire()
            .live
            .remove(&address)
            .ok_or_else(|| foreign(address))?;
        self.give_back(guarded)
    }

    /// Gives back what is looked at when the work on it is done, and before anybody gets it.
    fn give_back_after(&self, guarded: Guarded, work: Vec<Work>) -> Result<()> {
        let (memory, late, freed) = (self.memory.clone(), self.late.clone(), guarded.clone());
        let looked = Work::and_then(work, move || match look(&*memory, &freed) {
            Ok(None) => {}
            Ok(Some(damage)) => {
                tracing::error!(%damage, "a write went past the end of an allocation");
                late.acquire().push(damage);
            }
            Err(error) => tracing::warn!(%error, "marks around an allocation cannot be read"),
        });
        let given = self.inner.free_after(guarded.start, vec![looked]);
        if given.is_err() {
            self.state
                .acquire()
                .live
                .insert(guarded.placed.address, guarded);
        }
        given
    }

    fn give_back(&self, guarded: Guarded) -> Result<()> {
        let freed = self.inner.free(guarded.start);
        if freed.is_err() {
            self.state
                .acquire()
                .live
                .insert(guarded.placed.address, guarded);
        }
        freed
    }
}

fn look(memory: &dyn Memory, guarded: &Guarded) -> Result<Option<Damage>> {
    let Placed { address, asked, .. } = guarded.placed;
    let mut mark = [0; MARK as usize];
    for (at, byte) in [(-(MARK as i64), FRONT), (asked as i64, BEHIND)] {
        // SAFETY: `Memory::read` asks for a range of one allocation of `inner`'s that is not freed
        // meanwhile: the marks lie within what was taken for it, and it is live; and that nothing
        // writes them meanwhile, which only code that writes past an end does: the bytes are only
        // compared.
        unsafe { memory.read(address.wrapping_add_signed(at), &mut mark) }?;
        if let Some(wrong) = mark.iter().position(|&found| found != byte) {
            let asker = guarded.request.asker();
            let at = at + wrong as i64;
            return Ok(Some(Damage {
                placed: guarded.placed,
                at,
                found: mark[wrong],
                asker,
            }));
        }
    }
    Ok(None)
}

// SAFETY: `Allocator` asks that what is handed out does not overlap: each is a part of what `inner`
// handed out, which does not. `memory` is `inner`'s.
unsafe impl<A: Allocator> Allocator for Guard<A> {
    fn alloc(&self, request: Request) -> Result<Placed> {
        request.check()?;
        let before = request.align.max(MARK);
        let whole = before
            .checked_add(request.bytes)
            .and_then(|bytes| bytes.checked_add(MARK));
        // Bytes that a stream still works on cannot be marked from here.
        let taken = self
            .inner
            .alloc(request.idle().resized(whole.unwrap_or(u64::MAX)))?;
        let address = taken.address + before;
        let marked = [(address - MARK, FRONT), (address + request.bytes, BEHIND)]
            .into_iter()
            .try_for_each(|(at, byte)| {
                // SAFETY: `Memory::write` asks for a range of one allocation that nothing else
                // uses: both lie within what was taken just now.
                unsafe { self.memory.write(at, &[byte; MARK as usize]) }
            });
        if let Err(error) = marked {
            // Why it cannot be marked is what the caller can mend; what cannot be freed stays with
            // `inner`.
            let _ = self.inner.free(taken.address);
            return Err(error);
        }
        let mut state = self.state.acquire();
        state.number += 1;
        let placed = Placed {
            address,
            bytes: request.bytes,
            asked: request.bytes,
            number: state.number,
            token: (),
        };
        state.live.insert(
            address,
            Guarded {
                placed,
                request,
                start: taken.address,
                noted: Vec::new(),
            },
        );
        Ok(placed)
    }

    fn free(&self, address: u64) -> Result<()> {
        self.free_after(address, Vec::new())
    }

    fn free_after(&self, address: u64, mut work: Vec<Work>) -> Result<()> {
        self.check_owner()?;
        let guarded = self
            .state
            .acquire()
            .live
            .remove(&address)
            .ok_or_else(|| foreign(address))?;
        work.extend(guarded.noted.iter().cloned());
        if !work.is_empty() {
            return self.give_back_after(guarded, work);
        }
        let looked = match look(&*self.memory, &guarded) {
            Ok(None) => return self.give_back(guarded),
            Ok(Some(damage)) => Err(Error::invalid(
                "a mark around an allocation",
                damage,
                "the guard pattern: a write went past the block's end",
            )),
            Err(error) => Err(error),
        };
        self.state.acquire().live.insert(address, guarded);
        looked
    }

    fn record_work(&self, address: u64, work: Work) -> Result<()> {
        self.check_owner()?;
        let mut state = self.state.acquire();
        state
            .live
            .get_mut(&address)
            .ok_or_else(|| foreign(address))?
            .noted
            .push(work);
        Ok(())
    }

    fn get(&self, address: u64) -> Option<Placed> {
        self.state
            .acquire()
            .live
            .get(&address)
            .map(|guarded| guarded.placed)
    }

    fn find(&self, address: u64) -> Option<Placed> {
        self.state
            .acquire()
            .live
            .values()
            .map(|guarded| guarded.placed)
            .find(|placed| placed.covers(address))
    }

    fn memory(&self) -> Result<Arc<dyn Memory>> {
        Ok(self.memory.clone())
    }

    hand_on!(inner: name, is_wanted, register_keeper, stats, clear_stats, trim, snapshot, check_owner);
}
