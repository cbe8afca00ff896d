//! Seals of a pool's blocks beside the raw batch of words that they end in, timed with no Python
//! around them.

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::time::Instant;

use gpu_ipc::backend::{HostPtr, StreamOp};
use gpu_ipc::broker::ObjectError;
use gpu_ipc::broker::pool::Key;
use pyo3::prelude::*;

use crate::data::stream::Stream;
use crate::interpreter::errors::OrRaise;
use crate::objects::pool::Pool;

/// Bytes of the words of a raw batch; a driver registers whole pages.
const PAGE: usize = 4096;

/// Seal the first blocks of a pool, and queue as many raw words on the same stream, in turns. Returns
/// the nanoseconds of each batch of seals and of each raw batch. At most 512 blocks.
#[pyfunction(name = "_time_seals")]
pub(crate) fn time_seals(
    py: Python<'_>,
    pool: &Pool,
    stream: &Stream,
    blocks: u32,
    rounds: usize,
) -> PyResult<(Vec<u64>, Vec<u64>)> {
    let (hold, stream) = (pool.hold()?, stream.native());
    let pairs: Vec<(u32, Key)> = (0..blocks.min(512))
        .map(|block| (block, Key([block as u8; 16])))
        .collect();
    py.detach(|| {
        let layout = Layout::from_size_align(PAGE, PAGE).expect("a page");
        // SAFETY: `alloc_zeroed` asks for a layout of more than 0 bytes: a page.
        let page = unsafe { alloc_zeroed(layout) };
        assert!(!page.is_null(), "no memory");
        let start = HostPtr(page.expose_provenance());
        let backend = stream.gpu().backend();
        // SAFETY: `register_words` asks for memory that stays until `unregister_words`: it is freed
        // behind that call.
        let words = unsafe { backend.register_words(start, PAGE) }?;
        let (mut seals, mut raw) = (Vec::new(), Vec::new());
        for round in 0..rounds as u64 {
            for (block, _) in &pairs {
                hold.invalidate(*block)?;
            }
            let begin = Instant::now();
            hold.seal_all(&pairs, stream)?;
            seals.push(begin.elapsed().as_nanos() as u64);
            stream.synchronize()?;
            let begin = Instant::now();
            let ops: Vec<StreamOp> = (0..pairs.len())
                .map(|at| StreamOp::Write {
                    word: words.word(at),
                    value: round,
                })
                .collect();
            // SAFETY: `stream_batch` asks for a live stream, which `stream` keeps, and for words in a
            // registration that outlives them: the stream is waited for below.
            unsafe { backend.stream_batch(stream.raw(), &ops) }?;
            raw.push(begin.elapsed().as_nanos() as u64);
            stream.synchronize()?;
        }
        // SAFETY: `unregister_words` asks for a registration that no unfinished operation uses: the
        // stream was waited for.
        unsafe { backend.unregister_words(start) }?;
        // SAFETY: `dealloc` asks for memory of this layout, which nothing uses any more.
        unsafe { dealloc(page, layout) };
        Ok::<_, ObjectError>((seals, raw))
    })
    .or_raise()
}
