//! A line of CSV for each call.

use std::fmt;
use std::io::{self, Write};
use std::sync::{Mutex, PoisonError};
use std::time::Instant;

use gpu_api::lock::Acquire;
use gpu_api::{Error, Result, StreamIdentity};

use crate::allocator::hand_on;
use crate::{Allocator, Placed, Request, Work};

/// Writes what is allocated and freed as CSV, to be replayed by [`Trace`](crate::Trace).
///
/// The first six columns are those of RMM's log; `Align` and `Tag` come after them. A free is
/// written before it is done and an allocation after, so that no line says that an address is
/// handed out twice.
///
/// When a line cannot be written, the log ends there, and [`finish`](Log::finish) says so;
/// allocating goes on.
///
/// # Examples
///
/// ```
/// use allocators::{Allocator, Bfc, BfcOptions, Log, Request, Simulated};
///
/// let log = Log::new(Bfc::new(BfcOptions::new("bfc"), Simulated::new()), Vec::new());
/// log.alloc(Request::new(100).tag("row"))?;
/// let csv = String::from_utf8(log.finish()?)?;
/// assert!(csv.starts_with("Thread,Time,Action,Pointer,Size,Stream,Align,Tag\n"));
/// assert!(csv.ends_with(",allocate,0x10000000000,100,0,1,row\n"));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct Log<A: Allocator, W: Write + Send + 'static = Box<dyn Write + Send>> {
    inner: A,
    start: Instant,
    sink: Mutex<Sink<W>>,
}

struct Sink<W> {
    to: W,
    failed: Option<io::Error>,
}

impl<A: Allocator, W: Write + Send + 'static> Log<A, W> {
    /// The first line.
    pub const HEADER: &'static str = "Thread,Time,Action,Pointer,Size,Stream,Align,Tag";

    /// Logs to a file, a buffer, or whatever takes bytes; put a [`BufWriter`](io::BufWriter) around
    /// a file.
    pub fn new(inner: A, mut to: W) -> Log<A, W> {
        let failed = writeln!(to, "{}", Self::HEADER).err();
        Log {
            inner,
            start: Instant::now(),
            sink: Mutex::new(Sink { to, failed }),
        }
    }

    /// Ends the log and returns what it was written to.
    ///
    /// # Errors
    ///
    /// [`Error::System`] for the first line that could not be written.
    pub fn finish(self) -> Result<W> {
        let Sink { mut to, failed } = self
            .sink
            .into_inner()
            .unwrap_or_else(PoisonError::into_inner);
        match failed.map_or_else(|| to.flush(), Err) {
            Ok(()) => Ok(to),
            Err(error) => Err(Error::system(
                "writing a log of allocations",
                "make room where it is written",
                error,
            )),
        }
    }

    fn write(
        &self,
        action: &str,
        address: u64,
        size: u64,
        stream: Option<StreamIdentity>,
        request: Option<&Request>,
    ) {
        let time = self.start.elapsed().as_secs_f64();
        let stream = stream.map_or(0, |stream| stream.0);
        let (align, tag) = request.map_or((0, ""), |request| (request.align, request.tag));
        // A line is a line: the tag is last, and what would end it or need quotes is left out.
        let tag = tag.replace([',', '"', '\n', '\r'], " ");
        let thread = rustix::thread::gettid().as_raw_nonzero();
        let line =
            format!("{thread},{time:.6},{action},{address:#x},{size},{stream},{align},{tag}\n");
        let mut sink = self.sink.acquire();
        if sink.failed.is_none() {
            sink.failed = sink.to.write_all(line.as_bytes()).err();
        }
    }
}

// SAFETY: as the allocator beneath, which hands out and takes back.
unsafe impl<A: Allocator, W: Write + Send + 'static> Allocator for Log<A, W> {
    fn alloc(&self, request: Request) -> Result<Placed> {
        let result = self.inner.alloc(request);
        match &result {
            Ok(placed) => self.write(
                "allocate",
                placed.address,
                request.bytes,
                request.stream,
                Some(&request),
            ),
            Err(_) => self.write(
                "allocate failure",
                0,
                request.bytes,
                request.stream,
                Some(&request),
            ),
        }
        result
    }

    fn free(&self, address: u64) -> Result<()> {
        self.check_owner()?;
        if let Some(placed) = self.inner.get(address) {
            self.write("free", address, placed.asked, None, None);
        }
        self.inner.free(address)
    }

    fn free_after(&self, address: u64, work: Vec<Work>) -> Result<()> {
        self.check_owner()?;
        if let Some(placed) = self.inner.get(address) {
            self.write(
                "free",
                address,
                placed.asked,
                work.iter().find_map(Work::stream),
                None,
            );
        }
        self.inner.free_after(address, work)
    }

    hand_on!(inner: name, record_work, is_wanted, register_keeper, get, find);
    hand_on!(inner: stats, clear_stats, trim, memory, snapshot, check_owner);
}

impl<A: Allocator, W: Write + Send + 'static> fmt::Debug for Log<A, W> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Log")
            .field("inner", &self.inner)
            .finish_non_exhaustive()
    }
}
