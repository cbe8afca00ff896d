//! Contents that show.

use std::sync::Arc;

use gpu_api::Result;

use crate::allocator::hand_on;
use crate::{Allocator, Memory, Placed, Request};

/// A quiet NaN as bytes.
const NAN: [u8; 4] = f32::NAN.to_ne_bytes();
/// Bytes written at a time.
const PART: usize = 64 << 10;

/// Fills what is handed out, and what is given back, with `f32` NaNs: whoever reads memory before it is written, or
/// after it was freed, sees it in the results.
///
/// # Examples
///
/// ```
/// use allocators::{Allocator, BasicCpu, NanFill, Request};
/// # use backend_host::{HostBackend, HostConfig};
/// # let gpu = gpu_api::Gpu::new(HostBackend::new(HostConfig::default())?, gpu_api::DeviceId(0))?;
/// let filled = NanFill::new(BasicCpu::new(gpu, None)?)?;
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
}

impl<A: Allocator> NanFill<A> {
    /// Fills what an allocator of memory hands out.
    ///
    /// # Errors
    ///
    /// As [`Allocator::memory`].
    pub fn new(inner: A) -> Result<NanFill<A>> {
        let memory = inner.memory()?;
        Ok(NanFill { inner, memory })
    }

    fn fill(&self, placed: &Placed) -> Result<()> {
        let part = NAN.repeat(placed.asked.min(PART as u64).div_ceil(NAN.len() as u64) as usize);
        let mut at = 0;
        while at < placed.asked {
            let len = (placed.asked - at).min(part.len() as u64);
            // SAFETY: `Memory::write` asks for a range of one allocation of `inner`'s that is not freed meanwhile and
            // that nothing else uses: it is handed out, and its owner either has not seen it yet or is freeing it.
            unsafe { self.memory.write(placed.address + at, &part[..len as usize]) }?;
            at += len;
        }
        Ok(())
    }
}

// SAFETY: as the allocator beneath, which hands out and takes back.
unsafe impl<A: Allocator> Allocator for NanFill<A> {
    fn alloc(&self, request: Request) -> Result<Placed> {
        let placed = self.inner.alloc(request)?;
        if let Err(error) = self.fill(&placed) {
            // Why it cannot be filled is what the caller can mend; what cannot be freed stays with `inner`.
            let _ = self.inner.free(placed.address);
            return Err(error);
        }
        Ok(placed)
    }

    fn free(&self, address: u64) -> Result<()> {
        self.check_owner()?;
        if let Some(placed) = self.inner.get(address) {
            self.fill(&placed)?;
        }
        self.inner.free(address)
    }

    fn memory(&self) -> Result<Arc<dyn Memory>> {
        Ok(self.memory.clone())
    }

    hand_on!(inner: name, get, stats, clear_stats, trim, snapshot, check_owner);
}
