//! Regions from upstream, and back.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use gpu_api::{Error, Result};

use super::chunk::UNIT;
use super::core::{Core, Grower, Refused};
use super::heap::{Fit, Unfit};
use super::options::Growth;
use crate::sync::Acquire;
use crate::{Extent, Placed, Request, Snapshot, SubAllocator, Trim};

/// The most chunks of which an error shows the sizes and the places: to list them holds up
/// everybody else.
const DRAWN: usize = 1 << 16;

impl<U: SubAllocator> Core<U> {
    /// Returns whole regions that nobody uses and upstream may free, and says how many bytes. May
    /// block.
    ///
    /// # Errors
    ///
    /// The first error of upstream's; the other regions are given back all the same. What failed is
    /// leaked.
    pub(crate) fn trim(&self) -> Result<u64> {
        self.upstream.check_owner()?;
        self.settle();
        self.give_regions_back(&mut self.grower.acquire())
    }

    /// Grows, or makes room to grow, and allocates; fails with the reason when that cannot be.
    pub(crate) fn grow_for(&self, request: &Request, fit: Fit) -> Result<Placed<U::Token>> {
        let mut grower = self.grower.acquire();
        // The thread that held the lock before may have added a region with room for both.
        if let Some(placed) = self.try_fit(request, fit) {
            return Ok(placed);
        }
        let now = Instant::now();
        let mut room = self.state().room;
        if request.until.is_some() && grower.has_refused(room, now, fit) {
            return Err(self.out_of_memory(fit, "upstream has no room"));
        }
        if self.is_crowded() {
            self.give_regions_back_quietly(&mut grower);
        }
        let mut grown = self.grow(&mut grower, request, fit);
        if matches!(grown, Err(Error::OutOfMemory { .. })) && self.would_grow(fit) {
            self.give_regions_back_quietly(&mut grower);
            room = self.state().room;
            grown = self.grow(&mut grower, request, fit);
        }
        if matches!(grown, Err(Error::OutOfMemory { .. })) {
            grower.refused = Some(Refused {
                room,
                at: now,
                bytes: fit.bytes(),
            });
        }
        grown
    }

    /// Takes a region with room for the request from upstream, and the request's bytes of it before
    /// anybody else can.
    fn grow(&self, grower: &mut Grower, request: &Request, fit: Fit) -> Result<Placed<U::Token>> {
        let step = self.upstream.granularity().max(UNIT);
        let taken = self.state().counters.taken();
        let room = self.options.limit.saturating_sub(taken) / step * step;
        // What merges with the last region goes on where that ends. A whole region is asked for
        // first all the same.
        let there = if self.upstream.merges() {
            self.state().heap.free_at_end(fit)
        } else {
            0
        };
        let need = (fit.bytes() - there)
            .checked_next_multiple_of(step)
            .filter(|&need| need <= room);
        let Some(need) = need else {
            return Err(self.out_of_memory(fit, "the limit is reached"));
        };
        let (asked, next) = self.next_region(grower, fit);
        // With the bytes for a start that is not aligned, if there is room for them.
        let asked = asked.max(fit.bytes_anywhere().unwrap_or(need));
        let asked = asked
            .checked_next_multiple_of(step)
            .unwrap_or(room)
            .min(room);
        let (extent, token) = self.ask_upstream(asked, need, step, fit)?;
        // Not before: a request that upstream has no room for would have all later ones ask for as
        // much.
        grower.next = next;
        let mut state = self.state();
        match state.heap.add(extent, token, self.upstream.merges()) {
            Ok(()) => {
                state.counters.grown(extent.len);
                let placed = self.fit_in(&mut state, request, fit);
                self.wake(state);
                if placed.is_none() && self.options.collect_regions {
                    // It lies apart from the bytes that it was to go on from, or is not aligned.
                    self.give_regions_back_quietly(grower);
                }
                placed.ok_or_else(|| {
                    self.out_of_memory(fit, "what upstream gave does not hold it where it lies")
                })
            }
            Err((unfit, token)) => {
                drop(state);
                Err(self.refuse(extent, token, unfit))
            }
        }
    }

    /// Says whether so much is reserved that idle regions go back before there are more.
    fn is_crowded(&self) -> bool {
        let Some(share) = self.options.collect_from else {
            return false;
        };
        let limit = self.options.limit.min(self.upstream.capacity());
        self.state().counters.reserved as f64 > share * limit as f64
    }

    fn give_regions_back_quietly(&self, grower: &mut Grower) {
        if let Err(error) = self.give_regions_back(grower) {
            tracing::warn!(allocator = self.options.name, %error, "a region is leaked");
        }
    }

    /// Gives idle regions back. The caller holds the lock of growth.
    pub(crate) fn give_regions_back(&self, grower: &mut Grower) -> Result<u64> {
        let idle = {
            let mut state = self.state();
            let may_free = |parts: &[(Extent, U::Token)]| {
                parts.iter().all(|(_, token)| self.upstream.may_free(token))
            };
            let idle = state.heap.remove_idle(|region| may_free(&region.parts));
            let tails = state
                .heap
                .remove_tails(|token| self.upstream.may_free(token));
            let parts: Vec<_> = idle
                .into_iter()
                .flat_map(|region| region.parts)
                .chain(tails)
                .collect();
            state.counters.reserved -= parts.iter().map(|(extent, _)| extent.len).sum::<u64>();
            parts
        };
        let mut freed = 0;
        let mut leaked = 0;
        let mut failed = None;
        for (extent, token) in idle {
            match self.upstream.free(extent, token) {
                Ok(()) => freed += extent.len,
                Err(error) => {
                    leaked += extent.len;
                    failed = failed.or(Some(error));
                }
            }
        }
        if leaked > 0 {
            self.state().counters.leaked += leaked;
        }
        if freed > 0 {
            // What was reserved at the peak is no measure of what is needed next.
            grower.next = self.options.first_region();
            let mut state = self.state();
            state.room += 1;
            // Who waits may find that it can grow.
            self.wake(state);
        }
        failed.map_or(Ok(freed), Err)
    }

    /// Returns how much to ask for, and how much next when upstream has it.
    fn next_region(&self, grower: &Grower, fit: Fit) -> (u64, u64) {
        let need = fit.bytes();
        if let Some(most) = self.options.max_split {
            // A region above that would never be cut up, and one for a large request is that
            // request's alone.
            let most = most / UNIT * UNIT;
            let (asked, next) = (
                grower.next.min(most).max(UNIT),
                grower.next.saturating_mul(2).min(most).max(UNIT),
            );
            let is_doubling = matches!(self.options.growth, Growth::Doubling(_));
            let next = if is_doubling && need <= most {
                next
            } else {
                grower.next
            };
            return (if need > most { need } else { asked.max(need) }, next);
        }
        match self.options.growth {
            Growth::Doubling(_) if grower.next < need => {
                let mut raised = grower.next;
                while raised < need {
                    raised = raised.saturating_mul(2);
                }
                (raised, raised)
            }
            Growth::Doubling(_) => (grower.next, grower.next.saturating_mul(2)),
            // Blocks above half a region would leave the rest of each to nobody: two do not fit.
            Growth::Fixed(_) if grower.next / 2 < need => (need, grower.next),
            Growth::Fixed(_) => (grower.next, grower.next),
            Growth::Whole => (grower.next.max(need), grower.next),
        }
    }

    /// Asks for `asked` bytes, and while upstream has no room for a tenth less, down to `need`.
    fn ask_upstream(
        &self,
        asked: u64,
        need: u64,
        step: u64,
        fit: Fit,
    ) -> Result<(Extent, U::Token)> {
        let align = (fit.align_bytes()).max(UNIT);
        let mut bytes = asked;
        loop {
            match self.upstream.alloc(bytes, align) {
                Ok((extent, token)) if extent.len >= bytes => return Ok((extent, token)),
                Ok((extent, token)) => return Err(self.refuse(extent, token, Unfit::Small)),
                Err(Error::OutOfMemory { hint, free, .. }) => {
                    if bytes == need {
                        return Err(
                            self.out_of_memory(fit, &format!("upstream has no room ({hint})"))
                        );
                    }
                    // Rounded down, so that it ends; the last try is for just what is needed.
                    let less = ((bytes as f64 * 0.9) as u64 / step * step).min(bytes - step);
                    bytes = less.min(free / step * step).max(need);
                }
                Err(error) => return Err(error),
            }
        }
    }

    /// Gives back what upstream should not have given.
    fn refuse(&self, extent: Extent, token: U::Token, unfit: Unfit) -> Error {
        let got = format!("{} bytes at {:#x} ({unfit:?})", extent.len, extent.base);
        if unfit != Unfit::Overlap
            && let Err(error) = self.upstream.free(extent, token)
        {
            self.state().counters.leaked += extent.len;
            tracing::warn!(allocator = self.options.name, %error, "a region is leaked");
        }
        Error::invalid(
            "region from upstream",
            got,
            "as long as was asked for, below 2^56, apart from every other, and one of at most 65,536",
        )
    }

    /// Says whether idle regions, given back, would leave room within the limit for one with this
    /// request.
    pub(crate) fn would_grow(&self, fit: Fit) -> bool {
        if !self.options.collect_regions {
            return false;
        }
        let state = self.state();
        let idle = state.heap.idle_bytes(|token| self.upstream.may_free(token));
        idle > 0
            && self
                .options
                .limit
                .saturating_sub(state.counters.taken() - idle)
                >= fit.bytes()
    }

    /// Adds to an error where the memory lies, and what `annotate` knows of it.
    #[cold]
    pub(crate) fn explain(&self, error: Error, annotate: impl FnOnce(&mut Snapshot)) -> Error {
        match error {
            Error::OutOfMemory {
                device,
                asked,
                free,
                hint,
            } => {
                let draw = self.numbers() <= DRAWN;
                let mut snapshot = if draw {
                    self.snapshot()
                } else {
                    self.outline()
                };
                annotate(&mut snapshot);
                self.dump(&snapshot);
                let hint = format!("{hint}, {}", snapshot.rest_of_error(draw).trim_end());
                Error::OutOfMemory {
                    device,
                    asked,
                    free,
                    hint,
                }
            }
            other => other,
        }
    }

    /// Writes down what the heap looks like, when somebody wants to know.
    fn dump(&self, snapshot: &Snapshot) {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let Some(prefix) = &self.options.memory_dump else {
            return;
        };
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let mut path = prefix.clone().into_os_string();
        path.push(format!(
            ".{}.{number}.json",
            self.options.name.replace([' ', '/'], "_")
        ));
        let written = snapshot
            .clone()
            .json(usize::MAX)
            .map(|json| std::fs::write(&path, json));
        match written {
            Some(Ok(())) => tracing::info!(?path, "the heap of a failed request"),
            Some(Err(error)) => tracing::warn!(?path, %error, "the heap cannot be written down"),
            None => tracing::warn!(?path, "the heap is too large to be written down"),
        }
    }

    /// Makes the error that says how much of the memory is in use.
    pub(crate) fn out_of_memory(&self, fit: Fit, why: &str) -> Error {
        let stats = self.stats();
        let limit = match stats.bytes_limit {
            Some(limit) => format!("limit {limit}"),
            None => "no limit".into(),
        };
        let free = stats.bytes_reserved.saturating_sub(stats.bytes_in_use);
        Error::OutOfMemory {
            device: self.options.device,
            asked: fit.asked,
            free,
            hint: format!(
                "{}: {why}; {limit}, reserved {}, in use {}, largest free piece {}",
                self.options.name,
                stats.bytes_reserved,
                stats.bytes_in_use,
                stats.largest_free_block_bytes
            ),
        }
    }
}

impl<U: SubAllocator> Trim for Core<U> {
    fn trim(&self) -> Result<u64> {
        Core::trim(self)
    }
}
