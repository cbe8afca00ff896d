//! A request that found nothing free in its thread's heap: it grows, looks at the other heaps, asks
//! others, and waits.

use std::time::{Duration, Instant};

use gpu_api::{Error, Result};

use super::heaps::Heaps;
use super::one_upstream::OneUpstream;
use crate::bfc::{Fit, Turn};
use crate::relief::Asking;
use crate::request::end_of;
use crate::{Placed, Request, SubAllocator};

/// How long a request waits at one heap before it looks at the others, which do not wake it.
const LOOK_AROUND: Duration = Duration::from_millis(16);

/// The heaps in the order in which a request looks at them: its own first.
type Turns<'a, U> = [(usize, Turn<'a, OneUpstream<U>>)];

impl<U: SubAllocator> Heaps<U> {
    /// Looks for finished work, grows, turns to the other heaps and to the device's other
    /// allocators, and waits; says which heap it is from.
    #[cold]
    pub(super) fn place_slowly(
        &self,
        own: usize,
        request: Request,
        fit: Fit,
    ) -> Result<(usize, Placed<U::Token>)> {
        // Its own first.
        let mut turns: Vec<_> = self
            .from(own)
            .map(|at| (at, self.each[at].core.turn(&request, fit)))
            .collect();
        let is_hopeless = self.each[own].core.is_hopeless(fit.bytes());
        let mut until = request.until.filter(|_| !is_hopeless);
        let relief = self.relief.as_ref().filter(|_| !is_hopeless);
        let mut asking = relief.map(|(relief, patience)| Asking::new(relief, *patience));
        for round in 0.. {
            until = until.filter(|&until| Instant::now() < until);
            if until.is_none() {
                turns.iter_mut().for_each(|(_, turn)| turn.is_last());
            }
            let waits_at = round % turns.len();
            let seen = self.each[turns[waits_at].0].core.seen();
            if asking
                .as_ref()
                .is_some_and(|asking| asking.relief.collect() > 0)
                && let Some(placed) = turns
                    .iter_mut()
                    .find_map(|(at, turn)| Some((*at, turn.try_fit()?)))
            {
                return Ok(placed);
            }
            let mut error = match self.look_everywhere(&mut turns, until.is_none()) {
                Err(error @ Error::OutOfMemory { .. }) => error,
                other => return other,
            };
            if let Some(asking) = &mut asking {
                until = asking.ask_to_unmap(Instant::now(), until);
                if asking.relief.trim() > 0 {
                    error = match self.look_everywhere(&mut turns, until.is_none()) {
                        Err(error @ Error::OutOfMemory { .. }) => error,
                        other => return other,
                    };
                }
            }
            let Some(deadline) = until else {
                return Err(self.explain(own, error));
            };
            let (at, turn) = &mut turns[waits_at];
            if let Some(placed) = turn.wait(seen, deadline.min(end_of(Instant::now(), LOOK_AROUND)))
            {
                return Ok((*at, placed));
            }
        }
        unreachable!("rounds have no end")
    }

    fn look_everywhere(
        &self,
        turns: &mut Turns<'_, U>,
        is_last: bool,
    ) -> Result<(usize, Placed<U::Token>)> {
        let (own, others) = turns.split_first_mut().expect("at least one heap");
        let error = match own.1.try_harder() {
            Err(error @ Error::OutOfMemory { .. }) => error,
            other => return other.map(|placed| (own.0, placed)),
        };
        let mut trimmed = 0;
        for (at, turn) in others {
            let core = &self.each[*at].core;
            core.settle();
            let placed = turn
                .try_fit()
                .or_else(|| if is_last { turn.break_window() } else { None });
            if let Some(placed) = placed {
                return Ok((*at, placed));
            }
            if self.options.collect_regions {
                // What fails is leaked, and counted so.
                trimmed += core.trim().unwrap_or(0);
            }
        }
        if trimmed == 0 {
            Err(error)
        } else {
            own.1.try_harder().map(|placed| (own.0, placed))
        }
    }

    /// Adds to an error of one heap what all of them have.
    #[cold]
    fn explain(&self, own: usize, error: Error) -> Error {
        let Error::OutOfMemory {
            device,
            asked,
            hint,
            ..
        } = error
        else {
            return error;
        };
        let stats = self.stats();
        let free = stats.bytes_reserved.saturating_sub(stats.bytes_in_use);
        let hint = format!(
            "{hint}; that is one of {} heaps, which have together: reserved {}, in use {}",
            self.each.len(),
            stats.bytes_reserved,
            stats.bytes_in_use
        );
        let error = Error::OutOfMemory {
            device,
            asked,
            free,
            hint,
        };
        self.each[own]
            .core
            .explain(error, |snapshot| *snapshot = self.snapshot())
    }
}
