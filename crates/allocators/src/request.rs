//! What is asked of an allocator, and what it answers.

use std::panic::Location;
use std::time::{Duration, Instant};

use gpu_api::{Error, Result, StreamIdentity};

/// What is asked for.
///
/// # Examples
///
/// ```
/// use allocators::Request;
///
/// let request = Request::new(64 << 20).align(4096).tag("kv cache");
/// assert_eq!(request.bytes(), 64 << 20);
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Request {
    pub(crate) bytes: u64,
    pub(crate) align: u64,
    pub(crate) stream: Option<StreamIdentity>,
    pub(crate) until: Option<Instant>,
    pub(crate) tag: &'static str,
    pub(crate) from: &'static Location<'static>,
}

impl Request {
    /// Asks for this many bytes, aligned to 256, without waiting. Notes the caller's line, for
    /// reports.
    #[track_caller]
    pub fn new(bytes: u64) -> Request {
        Request {
            bytes,
            align: 1,
            stream: None,
            until: None,
            tag: "",
            from: Location::caller(),
        }
    }

    /// Asks for a multiple of this power of two as the address.
    #[must_use]
    pub fn align(mut self, align: u64) -> Request {
        self.align = align;
        self
    }

    /// Allows memory that was given back on this stream and whose work is not done: the bytes will
    /// only be used in this stream's order.
    #[must_use]
    pub fn on(mut self, stream: StreamIdentity) -> Request {
        self.stream = Some(stream);
        self
    }

    /// Waits until then for memory to be freed, when there is none. Allocators that ask the system
    /// for each request ([`Direct`](crate::Direct)) do not wait: nothing would wake them.
    #[must_use]
    pub fn wait_until(mut self, deadline: Instant) -> Request {
        self.until = Some(deadline);
        self
    }

    /// Names the request's purpose, for reports.
    #[must_use]
    pub fn tag(mut self, tag: &'static str) -> Request {
        self.tag = tag;
        self
    }

    /// Returns the bytes that are asked for.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Refuses nonsense.
    #[inline]
    pub(crate) fn check(&self) -> Result<()> {
        if self.bytes > 0 && self.align.is_power_of_two() {
            Ok(())
        } else {
            Err(self.nonsense())
        }
    }

    #[cold]
    fn nonsense(&self) -> Error {
        if self.bytes == 0 {
            return Error::invalid("size", "0 bytes", "at least 1 byte");
        }
        Error::invalid("alignment", self.align, "a power of two")
    }

    /// Names the code that asked: the tag, if there is one, and the line.
    pub(crate) fn asker(&self) -> String {
        let space = if self.tag.is_empty() { "" } else { " " };
        format!(
            "{}{space}({}:{})",
            self.tag,
            self.from.file(),
            self.from.line()
        )
    }

    /// Asks the same without waiting.
    pub(crate) fn at_once(mut self) -> Request {
        self.until = None;
        self
    }

    /// Asks the same for memory that no stream works on any more, since it is going to be written
    /// at once.
    pub(crate) fn idle(mut self) -> Request {
        self.stream = None;
        self
    }

    /// Asks the same for other bytes.
    pub(crate) fn resized(mut self, bytes: u64) -> Request {
        self.bytes = bytes;
        self
    }
}

/// What was handed out.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Placed<T = ()> {
    /// The first byte.
    pub address: u64,
    /// Bytes that it may use: what was asked for, rounded up, and slack that was not worth cutting
    /// off.
    pub bytes: u64,
    /// Bytes that were asked for.
    pub asked: u64,
    /// Numbers the allocation, from 1, never used again by its allocator.
    pub number: u64,
    /// What upstream said of the region that it lies in.
    pub token: T,
}

impl<T> Placed<T> {
    /// Says whether an address lies in it.
    pub fn covers(&self, address: u64) -> bool {
        address >= self.address && address - self.address < self.bytes
    }

    /// Leaves the token out.
    pub fn untied(&self) -> Placed {
        Placed {
            address: self.address,
            bytes: self.bytes,
            asked: self.asked,
            number: self.number,
            token: (),
        }
    }
}

/// Returns the end of a wait; a time that no process lives to see for one that the clock does not
/// reach.
pub(crate) fn end_of(now: Instant, wait: Duration) -> Instant {
    const CENTURY: Duration = Duration::from_secs(100 * 365 * 24 * 3600);
    now.checked_add(wait).unwrap_or(now + CENTURY)
}

/// Makes the error for an address that is not handed out.
#[cold]
pub(crate) fn foreign(address: u64) -> Error {
    Error::invalid(
        "address",
        format!("{address:#x}"),
        "one that this allocator handed out and that was not freed since",
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wait_without_end_does_not_end_at_once() {
        let now = Instant::now();
        assert_eq!(
            end_of(now, Duration::from_secs(5)),
            now + Duration::from_secs(5)
        );
        assert!(end_of(now, Duration::MAX) > now + Duration::from_secs(1 << 31));
    }
}
