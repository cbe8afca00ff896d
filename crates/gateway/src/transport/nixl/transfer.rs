//! A read of several ranges, as a window of requests.
//!
//! Ranges are cut into pieces, so that people see how far a read is. Several are under way at a
//! time, so that the next is asked for before the last has arrived.

use std::collections::VecDeque;
use std::ffi::c_int;
use std::fmt;
use std::sync::Arc;

use super::library::READ;
use super::request::{Kept, Prepared, Running, State};
use crate::error::{Error, Result};
use crate::transport::{Pair, Progress, Transfer};

/// How a read is cut.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Cut {
    /// Bytes of one request, at least 1.
    pub piece: u64,
    /// Requests under way at a time, at least 1.
    pub window: usize,
    /// What NIXL is to do: it reads.
    pub operation: c_int,
}

impl Default for Cut {
    fn default() -> Self {
        Self {
            piece: 32 << 20,
            window: 4,
            operation: READ,
        }
    }
}

/// A read that is under way.
pub struct Read {
    kept: Arc<Kept>,
    window: usize,
    operation: c_int,
    waiting: VecDeque<Pair>,
    running: VecDeque<(Running, u64)>,
    arrived: u64,
    failed: Option<Error>,
    /// What `poll` says again once it has ended.
    ended: Option<Result<(), String>>,
}

impl Read {
    /// Starts to read.
    ///
    /// # Errors
    ///
    /// [`Error::Transfer`] when the first request cannot be posted: then nothing is written.
    ///
    /// # Safety
    ///
    /// As for [`Peer::read`](crate::transport::Peer::read).
    pub unsafe fn start(kept: Kept, pairs: &[Pair], cut: Cut) -> Result<Self> {
        let mut read = Self {
            kept: Arc::new(kept),
            window: cut.window,
            operation: cut.operation,
            waiting: pairs
                .iter()
                .flat_map(|pair| pieces(pair, cut.piece))
                .collect(),
            running: VecDeque::new(),
            arrived: 0,
            failed: None,
            ended: None,
        };
        read.fill();
        match read.failed.take() {
            Some(error) if read.running.is_empty() && read.arrived == 0 => Err(error),
            failed => {
                read.failed = failed;
                Ok(read)
            }
        }
    }

    /// Posts requests until the window is full, nothing waits, or one fails.
    fn fill(&mut self) {
        while self.failed.is_none() && self.running.len() < self.window {
            let Some(pair) = self.waiting.pop_front() else {
                return;
            };
            let posted =
                Prepared::new(Arc::clone(&self.kept), &pair, self.operation).map(|request| {
                    // SAFETY: `Prepared::post` asks for what the caller of `Read::start` promised for
                    // all pairs.
                    unsafe { request.post() }
                });
            match posted {
                Ok(State::Running(request)) => self.running.push_back((request, pair.to.bytes)),
                Ok(State::Ended(Ok(()))) => self.arrived += pair.to.bytes,
                Ok(State::Ended(Err(error))) | Err(error) => self.failed = Some(error),
            }
        }
    }
}

impl Transfer for Read {
    fn poll(&mut self) -> Result<Progress> {
        if let Some(ended) = &self.ended {
            return ended
                .clone()
                .map(|()| Progress::Done)
                .map_err(|why| Error::Transfer { why });
        }
        for _ in 0..self.running.len() {
            let Some((request, bytes)) = self.running.pop_front() else {
                break;
            };
            match request.poll() {
                State::Running(request) => self.running.push_back((request, bytes)),
                State::Ended(Ok(())) => self.arrived += bytes,
                // The first error is the cause of those after it.
                State::Ended(Err(error)) => drop(self.failed.get_or_insert(error)),
            }
        }
        self.fill();
        // An error is told only when no request writes any more. One that never ends keeps the
        // whole read running.
        if !self.running.is_empty() {
            return Ok(Progress::Running {
                bytes: self.arrived,
            });
        }
        match self.failed.take() {
            Some(error) => {
                self.waiting.clear();
                self.ended = Some(Err(match &error {
                    Error::Transfer { why } => why.clone(),
                    other => other.to_string(),
                }));
                Err(error)
            }
            None => {
                self.ended = Some(Ok(()));
                Ok(Progress::Done)
            }
        }
    }
}

impl fmt::Debug for Read {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Read")
            .field("waiting", &self.waiting.len())
            .field("running", &self.running.len())
            .field("arrived", &self.arrived)
            .field("failed", &self.failed)
            .finish_non_exhaustive()
    }
}

/// Cuts a pair into pieces.
fn pieces(pair: &Pair, length: u64) -> impl Iterator<Item = Pair> + use<> {
    let pair = *pair;
    (0..pair.to.bytes.div_ceil(length)).map(move |index| {
        let offset = index * length;
        let bytes = length.min(pair.to.bytes - offset);
        let mut piece = pair;
        (piece.from.address, piece.from.bytes) = (pair.from.address + offset, bytes);
        (piece.to.address, piece.to.bytes) = (pair.to.address + offset, bytes);
        piece
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::transport::{Place, RemoteSpan, Span};

    const PIECE: u64 = 4096;

    #[test]
    fn pieces_are_the_whole_without_a_gap() {
        for bytes in [0, 1, PIECE - 1, PIECE, PIECE + 1, 5 * PIECE + 3] {
            let pair = Pair {
                from: RemoteSpan {
                    address: 1 << 20,
                    bytes,
                    place: Place::Host,
                },
                to: Span {
                    address: 1 << 40,
                    bytes,
                    place: Place::Host,
                },
            };
            let mut offset = 0;
            for piece in pieces(&pair, PIECE) {
                assert_eq!(
                    (piece.from.address, piece.to.address),
                    ((1 << 20) + offset, (1 << 40) + offset)
                );
                assert_eq!(piece.from.bytes, piece.to.bytes);
                assert!(piece.to.bytes > 0 && piece.to.bytes <= PIECE);
                offset += piece.to.bytes;
            }
            assert_eq!(offset, bytes);
        }
    }
}
