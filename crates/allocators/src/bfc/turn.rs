//! A request that found nothing free: it looks for finished work, grows, asks others, and waits.

use std::time::{Duration, Instant};

use gpu_api::{Error, Result};

use super::chunk::UNIT;
use super::core::{Core, Seen};
use super::heap::Fit;
use super::window::Window;
use crate::request::end_of;
use crate::{Placed, Request, SubAllocator};

/// How often upstream is asked again for a request that waits: nobody tells of what other processes
/// give back.
const ASK_UPSTREAM_AGAIN: Duration = Duration::from_millis(16);

/// How often a request is woken in vain before bytes are kept together for it.
const PATIENCE: u32 = 8;

impl<U: SubAllocator> Core<U> {
    #[cold]
    pub(crate) fn alloc_slowly(&self, request: &Request, fit: Fit) -> Result<Placed<U::Token>> {
        let mut turn = self.turn(request, fit);
        loop {
            let seen = self.seen();
            let until = request
                .until
                .filter(|&until| Instant::now() < until && !self.is_hopeless(fit.bytes()));
            if until.is_none() {
                turn.is_last();
            }
            let error = match turn.try_harder() {
                Err(error @ Error::OutOfMemory { .. }) => error,
                other => return other,
            };
            let Some(deadline) = until else {
                return Err(error);
            };
            if let Some(placed) = turn.wait(
                seen,
                deadline.min(end_of(Instant::now(), ASK_UPSTREAM_AGAIN)),
            ) {
                return Ok(placed);
            }
        }
    }

    /// Begins to try harder for a request.
    pub(crate) fn turn(&self, request: &Request, fit: Fit) -> Turn<'_, U> {
        let mut state = self.state();
        state.tickets += 1;
        state.turns += 1;
        let (ticket, began) = (state.tickets, state.heap.last_number());
        Turn {
            core: self,
            request: *request,
            fit,
            ticket,
            began,
            vain: 0,
            had_window: false,
            broken: 0,
            came: u64::MAX,
        }
    }
}

/// A request that found nothing free, until it has memory or gives up.
pub(crate) struct Turn<'a, U: SubAllocator> {
    core: &'a Core<U>,
    request: Request,
    fit: Fit,
    ticket: u64,
    /// The last allocation before it.
    began: u64,
    /// How often it was woken in vain since it began or its window was broken.
    vain: u32,
    had_window: bool,
    /// How many of its windows others broke since it began or gave one up.
    broken: u32,
    /// The bytes of its window at the last look.
    came: u64,
}

impl<U: SubAllocator> Turn<'_, U> {
    /// Says that there is no waiting after the next try.
    pub(crate) fn is_last(&mut self) {
        self.request.until = None;
    }

    /// Looks for work that has finished, and grows; the error has only the sums, for a caller that
    /// tries again. A request that may not wait takes what is withheld for another, unless that
    /// window is closed.
    pub(crate) fn try_harder(&mut self) -> Result<Placed<U::Token>> {
        let core = self.core;
        if core.settle() > 0
            && let Some(placed) = self.try_fit()
        {
            return Ok(placed);
        }
        let mut grown = core.grow_for(&self.request, self.fit);
        // Nobody keeps what comes back from here on: that somebody wants it is known.
        if is_out_of_memory(&grown) && core.keepers.ask() > 0 {
            grown = match self.try_fit() {
                Some(placed) => Ok(placed),
                None => core.grow_for(&self.request, self.fit),
            };
        }
        match grown {
            Err(error @ Error::OutOfMemory { .. }) if self.request.until.is_none() => {
                self.break_window().ok_or(error)
            }
            other => other,
        }
    }

    /// Tries whenever memory may have become free, which costs little; returns with nothing when
    /// that time has come, and when upstream may have room, which costs more to ask.
    pub(crate) fn wait(&mut self, mut seen: Seen, until: Instant) -> Option<Placed<U::Token>> {
        while self.core.wait(seen, until) {
            let now = self.core.seen();
            if let Some(placed) = self.try_fit() {
                return Some(placed);
            }
            if now.room != seen.room || self.core.would_grow(self.fit) {
                return None;
            }
            seen = now;
        }
        self.give_up_if_stuck();
        None
    }

    /// Gives its window up when nothing has come to it since the last look: the holders of the rest
    /// may wait for what is withheld.
    fn give_up_if_stuck(&mut self) {
        let mut state = self.core.state();
        let own = state
            .window
            .as_ref()
            .filter(|window| window.is_of(self.ticket));
        let Some(bytes) = own.map(Window::bytes) else {
            return;
        };
        if bytes == self.came {
            state.dissolve_window();
            (self.had_window, self.vain, self.broken) = (false, 0, 0);
            self.core.wake(state);
        }
        self.came = bytes;
    }

    /// Allocates from what is free, and from the window once all of it is there; after some tries
    /// in vain opens one.
    pub(crate) fn try_fit(&mut self) -> Option<Placed<U::Token>> {
        let mut guard = self.core.state();
        let state = &mut *guard;
        match &state.window {
            Some(window) if !window.is_of(self.ticket) => {}
            Some(window) if !window.is_whole() => {
                return self.core.fit_in(state, &self.request, self.fit);
            }
            Some(_) => {
                state.dissolve_window();
                self.had_window = false;
            }
            None if self.had_window => {
                (self.had_window, self.vain) = (false, 0);
                self.broken += 1;
            }
            None => {}
        }
        let placed = self.core.fit_in(state, &self.request, self.fit);
        if placed.is_none() {
            self.vain += 1;
            if self.vain >= PATIENCE
                && state.window.is_none()
                && let Some(bytes) = self.fit.bytes_anywhere()
            {
                let units = bytes / UNIT;
                let (ticket, began, broken) = (self.ticket, self.began, self.broken);
                state.window = Window::open(&mut state.heap, ticket, units, began, broken);
                self.had_window = state.window.is_some();
            }
        }
        placed
    }

    /// Takes what is withheld for another, when nothing else is left and its window is not closed.
    pub(crate) fn break_window(&mut self) -> Option<Placed<U::Token>> {
        let mut guard = self.core.state();
        let state = &mut *guard;
        let breaks = |window: &Window| window.is_of(self.ticket) || !window.is_closed();
        if !state.window.as_ref().is_some_and(breaks) {
            return None;
        }
        state.dissolve_window();
        let placed = self.core.fit_in(state, &self.request, self.fit);
        self.core.wake(guard);
        placed
    }
}

impl<U: SubAllocator> Drop for Turn<'_, U> {
    fn drop(&mut self) {
        let mut state = self.core.state();
        state.turns -= 1;
        if state
            .window
            .as_ref()
            .is_some_and(|window| window.is_of(self.ticket))
        {
            state.dissolve_window();
            self.core.wake(state);
        }
    }
}

fn is_out_of_memory<T>(result: &Result<T>) -> bool {
    matches!(result, Err(Error::OutOfMemory { .. }))
}

#[cfg(test)]
mod tests {
    use super::super::window::PASSERS;
    use super::super::{Bfc, BfcOptions, Growth};
    use super::*;
    use crate::Simulated;

    const BLOCK: u64 = 1 << 20;

    /// A full heap of 8 blocks, and a request for 4 of them that waits.
    fn full() -> (Bfc<Simulated>, Vec<u64>, Request) {
        let options = BfcOptions::new("bfc")
            .limit(8 * BLOCK)
            .growth(Growth::Whole);
        let bfc = Bfc::new(options, Simulated::new());
        let held = (0..8)
            .map(|_| bfc.alloc(Request::new(BLOCK)).expect("room").address)
            .collect();
        let far = Instant::now() + Duration::from_secs(3600);
        (bfc, held, Request::new(4 * BLOCK).wait_until(far))
    }

    /// Tries in vain until a window is open, and returns whether it is closed.
    fn open_window(turn: &mut Turn<'_, Simulated>) -> bool {
        for _ in 0..=PATIENCE {
            assert!(turn.try_fit().is_none(), "there is no room");
        }
        let state = turn.core.state();
        let window = state
            .window
            .as_ref()
            .expect("it was woken in vain so often");
        window.is_closed()
    }

    #[test]
    fn requests_that_may_not_wait_break_so_many_windows_and_then_leave_the_next_alone() {
        let (bfc, mut held, large) = full();
        let fit = bfc.core.fit(&large).expect("it could fit");
        let mut turn = bfc.core.turn(&large, fit);
        let (mut rounds, mut passed) = (0, 0);
        while !open_window(&mut turn) {
            // Whatever is freed, one that may not wait has it again: the half of the blocks that
            // lies in the window by breaking it.
            let at = rounds % held.len();
            bfc.free(held[at]).expect("in use");
            held[at] = bfc
                .alloc(Request::new(BLOCK))
                .expect("an open window is broken for who may not wait")
                .address;
            passed += u32::from(bfc.core.state().window.is_none());
            rounds += 1;
            assert!(rounds <= 4 * PASSERS as usize, "it starves");
        }
        assert_eq!(passed, PASSERS);
        // What is freed in the closed window stays there, until it is whole.
        let mut refused = 0;
        let large = loop {
            bfc.free(held.pop().expect("half of them are enough"))
                .expect("in use");
            if let Some(placed) = turn.try_fit() {
                break placed;
            }
            match bfc.alloc(Request::new(BLOCK)) {
                Ok(outside) => held.insert(0, outside.address),
                Err(Error::OutOfMemory { .. }) => refused += 1,
                Err(error) => panic!("{error}"),
            }
            assert!(refused <= 4, "half of the heap is withheld in vain");
        };
        assert_eq!(large.bytes, 4 * BLOCK);
        assert!(refused > 0, "the window was not closed to who may not wait");
        drop(turn);
        let _ = bfc.free(large.address);
        bfc.alloc(Request::new(BLOCK))
            .expect("nothing is withheld any more");
    }

    #[test]
    fn a_closed_window_that_nothing_comes_to_is_given_up_and_the_next_is_open() {
        let (bfc, held, large) = full();
        let fit = bfc.core.fit(&large).expect("it could fit");
        let mut turn = bfc.core.turn(&large, fit);
        turn.broken = PASSERS;
        assert!(open_window(&mut turn), "closed");
        bfc.free(held[0]).expect("in use");
        // Two looks without a byte more.
        turn.give_up_if_stuck();
        turn.give_up_if_stuck();
        bfc.alloc(Request::new(BLOCK))
            .expect("what was withheld is free again");
        assert!(!open_window(&mut turn), "others pass again");
    }
}
