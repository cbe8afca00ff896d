//! Memory for blocks of sessions: regions that are exported, and nothing private in them.

use std::fmt;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use gpu_api::{Error, Gpu, Result, Sharing};

use crate::{Piece, Reclaim, Region, RegionSource, SourceUsage};
use serde::{Deserialize, Serialize};

use crate::relief::PATIENCE;
use crate::request::end_of;
use crate::snapshot::Snapshot;
use crate::{
    Allocator, Bfc, BfcOptions, Budget, DeviceMemory, GrowingMemory, Growth, Placed, RegionVisitor,
    Relief, Relieved, Request, Shareable, Visited,
};

/// The most bytes behind a block that nobody can use: a page.
const MAX_SLACK: u64 = 4096;

/// How an [`Arena`] is set up.
#[derive(Clone)]
#[non_exhaustive]
pub struct ArenaOptions {
    /// What reports call it; `arena of device 0` and so on when empty.
    pub name: String,
    /// The most bytes taken from the driver.
    pub limit: u64,
    /// How much at a time.
    pub growth: Growth,
    /// How regions are shared; by file descriptor where the device can when `None`.
    pub sharing: Option<Sharing>,
    /// Whether regions are pieces of one range of addresses, where the device has ranges.
    pub grows_in_place: bool,
    /// How long [`take`](RegionSource::take) waits for memory when there is none. Without a wait, a
    /// block that another thread is giving back at that moment counts as in use.
    pub wait: Duration,
    /// How long it waits for consumers that it asked to unmap.
    pub patience: Duration,
    /// A limit that it shares with other allocators.
    pub budget: Option<Arc<Budget>>,
    /// The visitors that are told of new and returned regions.
    pub visitor: Option<Arc<dyn RegionVisitor>>,
    /// Where it asks for memory when it is out of it; with `None` only those registered with it.
    pub relief: Option<Arc<Relief>>,
}

impl Default for ArenaOptions {
    /// Regions of 32 MiB, and for a block above half of that one of its own size; no limit; no
    /// waiting but 100 ms for the participants that were asked to unmap.
    fn default() -> ArenaOptions {
        ArenaOptions {
            name: String::new(),
            limit: u64::MAX,
            growth: Growth::Fixed(32 << 20),
            sharing: None,
            grows_in_place: false,
            wait: Duration::ZERO,
            patience: PATIENCE,
            budget: None,
            visitor: None,
            relief: None,
        }
    }
}

impl ArenaOptions {
    /// Sets what reports call it.
    #[must_use]
    pub fn name(mut self, name: impl Into<String>) -> ArenaOptions {
        self.name = name.into();
        self
    }

    /// Sets the most bytes taken from the driver.
    #[must_use]
    pub fn limit(mut self, bytes: u64) -> ArenaOptions {
        self.limit = bytes;
        self
    }

    /// Sets how much is taken at a time. A consumer maps whole regions: larger ones cost it more,
    /// once.
    #[must_use]
    pub fn growth(mut self, growth: Growth) -> ArenaOptions {
        self.growth = growth;
        self
    }

    /// Sets how regions are shared.
    #[must_use]
    pub fn sharing(mut self, sharing: Sharing) -> ArenaOptions {
        self.sharing = Some(sharing);
        self
    }

    /// Grows in place: regions are pieces that are mapped one behind the other in a range of
    /// addresses, which this process and every consumer reserve once. A block may lie across
    /// several, so what is free at the end of one is used with the beginning of the next. The last
    /// pieces go back to the driver when nobody uses or maps them.
    ///
    /// Regions are on their own all the same, which `tracing` reports once, on a device without
    /// [`Caps::ranges`](gpu_api::Caps::ranges), with `Sharing::Handle`, and in a process that has
    /// no such range of addresses to give.
    #[must_use]
    pub fn grows_in_place(mut self, grows: bool) -> ArenaOptions {
        self.grows_in_place = grows;
        self
    }

    /// Lets `take` wait so long for memory.
    #[must_use]
    pub fn wait(mut self, time: Duration) -> ArenaOptions {
        self.wait = time;
        self
    }

    /// Sets how long consumers that were asked to unmap are waited for.
    #[must_use]
    pub fn patience(mut self, time: Duration) -> ArenaOptions {
        self.patience = time;
        self
    }

    /// Shares a limit with other allocators.
    #[must_use]
    pub fn budget(mut self, budget: Arc<Budget>) -> ArenaOptions {
        self.budget = Some(budget);
        self
    }

    /// Calls `visitor` for each region that comes or goes, such as to register it with a network
    /// card.
    #[must_use]
    pub fn visitor(mut self, visitor: Arc<dyn RegionVisitor>) -> ArenaOptions {
        self.visitor = Some(visitor);
        self
    }

    /// Joins the sessions and allocators of a device.
    #[must_use]
    pub fn relief(mut self, relief: Arc<Relief>) -> ArenaOptions {
        self.relief = Some(relief);
        self
    }
}

impl fmt::Debug for ArenaOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ArenaOptions")
            .field("name", &self.name)
            .field("limit", &self.limit)
            .field("growth", &self.growth)
            .field("sharing", &self.sharing)
            .field("grows_in_place", &self.grows_in_place)
            .finish_non_exhaustive()
    }
}

/// The memory that sessions of one device take their blocks from.
///
/// A consumer maps a region as a whole, so a region of the arena is exported when it is made and
/// holds nothing but blocks of sessions: no private neighbour is ever exposed. A block goes from
/// here into a session, perhaps through its limbo, and back. Taking may call the driver, also to
/// free idle regions, which may block. A region that another process may have mapped never returns
/// to the driver.
///
/// # Dropping
///
/// Gives regions back to the driver that nobody uses or maps, which may block. Others stay until
/// the process ends, and so does everything in a forked child.
///
/// # Examples
///
/// ```
/// use backend_host::{HostBackend, HostConfig};
/// use allocators::{Arena, ArenaOptions};
/// use gpu_api::{DeviceId, Gpu};
/// use allocators::RegionSource;
///
/// let gpu = Gpu::new(HostBackend::new(HostConfig::default())?, DeviceId(0))?;
/// let arena = Arena::new(gpu, ArenaOptions::default())?;
/// // Session::builder(gpu).arena(&arena).open()? takes blocks from it, and is asked for memory when it has none.
/// let piece = arena.take(4096, 1)?;
/// arena.give_back(piece);
/// assert_eq!(arena.trim()?, 32 << 20);
/// # Ok::<(), gpu_api::Error>(())
/// ```
pub struct Arena {
    heap: Arc<Relieved<Visited<Shareable>>>,
    wait: Duration,
}

/// What an arena holds, in bytes unless said.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[non_exhaustive]
pub struct ArenaStats {
    /// Regions.
    pub regions: u64,
    /// Taken from the driver.
    pub reserved: u64,
    /// Handed out as blocks, in limbo or not.
    pub in_use: u64,
    /// In regions that other processes may have mapped.
    pub exported: u64,
    /// In blocks that sessions have dropped and something still holds.
    pub limbo: u64,
    /// In blocks held by processes that are dead, until proof and quarantine are over.
    pub quarantined: u64,
    /// In regions that the driver failed to take back.
    pub leaked: u64,
}

impl Arena {
    /// Makes an arena that has no region yet.
    ///
    /// # Errors
    ///
    /// [`Error::Unsupported`] on a device whose memory cannot be shared; [`Error::Forked`] in a
    /// forked child of the process that found the device.
    pub fn new(gpu: Gpu, options: ArenaOptions) -> Result<Arc<Arena>> {
        let name = if options.name.is_empty() {
            format!("arena of {}", gpu.device())
        } else {
            options.name
        };
        let bfc = BfcOptions::new(name)
            .device(gpu.device())
            .limit(options.limit)
            .growth(options.growth);
        // Blocks are large and stay; half a region of slack behind one would be nobody's.
        let bfc = bfc.max_slack(MAX_SLACK);
        let sharing = options.sharing.map_or_else(|| gpu.default_sharing(), Ok)?;
        let growing = options
            .grows_in_place
            .then(|| growing(&gpu, sharing, options.limit, options.budget.clone()))
            .flatten();
        let memory = match growing {
            Some(memory) => Shareable::growing(memory),
            None => {
                let memory = DeviceMemory::new(gpu)?.sharing(sharing);
                Shareable::new(match options.budget {
                    Some(budget) => memory.budget(budget),
                    None => memory,
                })
            }
        };
        let bfc = Bfc::new(bfc, Visited::maybe(memory, options.visitor));
        let heap =
            Relieved::with_patience(bfc, options.relief.unwrap_or_default(), options.patience);
        Ok(Arc::new(Arena {
            heap,
            wait: options.wait,
        }))
    }

    /// Adds a session to those that it turns to when it is out of memory, without keeping it alive.
    pub fn register(&self, session: Weak<dyn Reclaim>) {
        self.heap.relief().register(session);
    }

    /// Returns what it holds.
    pub fn stats(&self) -> ArenaStats {
        let usage = self.usage();
        let mut held = Snapshot::default();
        self.heap.relief().annotate(&mut held);
        ArenaStats {
            regions: usage.regions,
            reserved: usage.reserved,
            in_use: usage.in_use,
            exported: usage.pinned,
            limbo: held.limbo_bytes,
            quarantined: held.quarantined_bytes,
            leaked: self.heap.bfc().leaked_bytes(),
        }
    }

    /// Finds the block that an address lies in.
    pub(crate) fn find(&self, address: u64) -> Option<Placed> {
        self.heap.find(address)
    }

    /// Fails in a forked child.
    pub(crate) fn check_owner(&self) -> Result<()> {
        self.heap.check_owner()
    }

    /// Lists every region and chunk, and the holders of the sessions' memory.
    pub fn snapshot(&self) -> Snapshot {
        Relieved::snapshot(&self.heap)
    }
}

/// Reserves the addresses of an arena that grows in place; `None`, and a line that says why, where
/// that cannot be.
fn growing(
    gpu: &Gpu,
    sharing: Sharing,
    limit: u64,
    budget: Option<Arc<Budget>>,
) -> Option<GrowingMemory> {
    if sharing != Sharing::Fd {
        tracing::warn!(device = %gpu.device(), ?sharing, "an arena cannot grow in place without descriptors");
        return None;
    }
    let memory = GrowingMemory::new(gpu.clone()).and_then(|memory| {
        let memory = memory.most(limit);
        memory.reserve()?;
        Ok(memory)
    });
    match memory {
        Ok(memory) => Some(match budget {
            Some(budget) => memory.budget(budget),
            None => memory,
        }),
        Err(error) => {
            tracing::warn!(device = %gpu.device(), %error, "an arena cannot grow in place: its regions are separate");
            None
        }
    }
}

impl RegionSource for Arena {
    fn take(&self, len: u64, align: u64) -> Result<Piece> {
        if len == 0 {
            return Err(Error::invalid("block size", "0 bytes", "at least 1 byte"));
        }
        let mut request = Request::new(len).align(align).tag("block");
        request.until = (!self.wait.is_zero()).then(|| end_of(Instant::now(), self.wait));
        let placed = self.heap.place(request)?;
        let offset = placed.address - placed.token.base().0;
        Ok(Piece {
            region: placed.token,
            offset,
            len,
        })
    }

    fn give_back(&self, piece: Piece) {
        let address = piece.region.base().0.checked_add(piece.offset);
        let given = address.is_some_and(|address| {
            let is_meant = |placed: &Placed<_>| {
                placed.asked == piece.len && Arc::ptr_eq(&placed.token, &piece.region)
            };
            self.heap.bfc().free_if(address, is_meant).is_ok()
        });
        // In a forked child there is nothing to give back, and to log might lock.
        if !given && self.check_owner().is_ok() {
            // To believe it would hand out bytes twice.
            tracing::error!(
                region = piece.region.id().0,
                piece.offset,
                piece.len,
                "no such piece is out"
            );
        }
    }

    fn regions(&self, piece: &Piece) -> Vec<Arc<Region>> {
        let start = piece.region.base().0;
        self.heap.bfc().core.tokens(
            start,
            start.saturating_add(piece.offset).saturating_add(piece.len),
        )
    }

    fn trim(&self) -> Result<u64> {
        self.heap.bfc().trim()
    }

    fn unpinned(&self, _: &Region) {
        self.heap.bfc().wake_for_trim();
    }

    fn usage(&self) -> SourceUsage {
        let bfc = self.heap.bfc();
        let stats = bfc.stats();
        let (regions, pinned) = bfc.core.regions();
        SourceUsage {
            regions,
            reserved: stats.bytes_reserved,
            in_use: stats.bytes_in_use,
            pinned,
        }
    }

    fn snapshot(&self, asker: &dyn Reclaim, most: usize) -> Option<String> {
        let mut snapshot = self.heap.bfc().snapshot();
        self.heap.relief().annotate_for(asker, &mut snapshot);
        snapshot.json(most)
    }
}

impl fmt::Debug for Arena {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Arena")
            .field("heap", &self.heap)
            .finish_non_exhaustive()
    }
}
