//! Contents that show.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};

use gpu_api::Result;
use gpu_api::lock::Acquire;

use crate::allocator::hand_on;
use crate::request::foreign;
use crate::{Allocator, Memory, Placed, Request, Work};

/// A quiet NaN as bytes.
const NAN: [u8; 4] = f32::NAN.to_ne_bytes();
/// Bytes written at a time.
const PART: usize = 64 << 10;

/// Fills what is handed out, and what is given back, with `f32` NaNs: code that reads memory before
/// it is written, or after it was freed, then computes NaN. What is given back after work on a
/// stream is filled when that is done, and nobody gets it before.
///
/// # Examples
///
/// ```
/// use allocators::{Allocator, BasicCpu, NanFill, Request};
/// let filled = NanFill::new(BasicCpu::new(None)?)?;
/// let placed = filled.alloc(Request::new(4))?;
/// let mut bytes = [0; 4];
/// // SAFETY: the four bytes are ours.
/// unsafe { filled.memory()?.read(placed.address, &mut bytes) }?;
/// assert!(f32::from_ne_bytes(bytes).is_nan());
/// # Ok::<(), gpu_api::Error>(())
/// ```
#[derive(Debug)]
pub struct NanFill<A: Allocator> {
    inner: A,
    memory: Arc<dyn Memory>,
    /// Work that was noted for allocations: what is given back is filled after it.
    noted: Mutex<HashMap<u64, Vec<Work>>>,
}

impl<A: Allocator> NanFill<A> {
    /// Fills what an allocator of memory hands out.
    ///
    /// # Errors
    ///
    /// As [`Allocator::memory`].
    pub fn new(inner: A) -> Result<NanFill<A>> {
        let memory = inner.memory()?;
        Ok(NanFill {
            inner,
            memory,
            noted: Mutex::default(),
        })
    }
}

fn fill(memory: &dyn Memory, placed: &Placed) -> Result<()> {
    let part = NAN.repeat(placed.asked.min(PART as u64).div_ceil(NAN.len() as u64) as usize);
    let mut at = 0;
    while at < placed.asked {
        let len = (placed.asked - at).min(part.len() as u64);
        // SAFETY: `Memory::write` asks for a range of one allocation of the inner allocator's that
        // is not freed meanwhile and that nothing else uses: it is handed out, and its owner either
        // has not seen it yet or is freeing it; or it was given back, all work on it has finished,
        // and nobody gets it before this returns.
        unsafe { memory.write(placed.address + at, &part[..len as usize]) }?;
        at += len;
    }
    Ok(())
}

// SAFETY: as the allocator beneath, which hands out and takes back.
unsafe impl<A: Allocator> Allocator for NanFill<A> {
    fn alloc(&self, request: Request) -> Result<Placed> {
        // Bytes that a stream still works on cannot be filled from here.
        let placed = self.inner.alloc(request.idle())?;
        if let Err(error) = fill(&*self.memory, &placed) {
            // Why it cannot be filled is what the caller can mend; what cannot be freed stays with
            // `inner`.
            let _ = self.inner.free(placed.address);
            return Err(error);
        }
        Ok(placed)
    }

    fn free(&self, address: u64) -> Result<()> {
        self.free_after(address, Vec::new())
    }

    fn free_after(&self, address: u64, mut work: Vec<Work>) -> Result<()> {
        self.check_owner()?;
        let Some(placed) = self.inner.get(address) else {
            return self.inner.free(address);
        };
        let noted = self.noted.acquire().remove(&address).unwrap_or_default();
        work.extend(noted.iter().cloned());
        let freed = if work.is_empty() {
            fill(&*self.memory, &placed).and_then(|()| self.inner.free(address))
        } else {
            let memory = self.memory.clone();
            let filled = Work::and_then(work, move || {
                if let Err(error) = fill(&*memory, &placed) {
                    tracing::warn!(address, %error, "memory that was given back is not filled");
                }
            });
            self.inner.free_after(address, vec![filled])
        };
        if freed.is_err() && !noted.is_empty() {
            self.noted.acquire().insert(address, noted);
        }
        freed
    }

    fn record_work(&self, address: u64, work: Work) -> Result<()> {
        self.check_owner()?;
        self.inner.get(address).ok_or_else(|| foreign(address))?;
        self.noted.acquire().entry(address).or_default().push(work);
        Ok(())
    }

    fn memory(&self) -> Result<Arc<dyn Memory>> {
        Ok(self.memory.clone())
    }

    hand_on!(inner: name, is_wanted, register_keeper, get, find, stats, clear_stats, trim, snapshot, check_owner);
}
