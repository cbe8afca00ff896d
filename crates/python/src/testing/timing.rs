//! The library's calls with no Python around them, timed: what `gpu/speed.py` compares Python's
//! with.

use std::time::Instant;

use gpu_ipc::backend::DevicePtr;
use gpu_ipc::session::ShareOptions;
use gpu_ipc::{After, Wait};
use pyo3::prelude::*;

use crate::consumer::participant::Participant;
use crate::consumer::received::Received;
use crate::data::descriptor::{Descriptor, Tail};
use crate::data::layout::Layout;
use crate::data::{addressee, stream};
use crate::interpreter::errors::OrRaise;
use crate::producer::session::Session;

/// Share ranges of memory, given as address and length, and return nanoseconds and descriptors.
///
/// Memory of another allocator is adopted within the time; the caller keeps it until the session is
/// gone.
#[pyfunction(name = "_time_shares")]
pub(crate) fn time_shares(
    py: Python<'_>,
    session: &Session,
    ranges: Vec<(u64, u64)>,
    to: &Bound<'_, PyAny>,
    stream: &Bound<'_, PyAny>,
) -> PyResult<(Vec<u64>, Vec<Descriptor>)> {
    let shared = session.shared();
    let (to, stream) = (
        addressee::to(Some(to))?,
        stream::given(&shared.gpu, stream)?,
    );
    let timed = py.detach(|| {
        let mut timed = Vec::with_capacity(ranges.len());
        for (start, len) in ranges {
            let lent = shared.block_at(start, len);
            let layout = Layout::bytes(len);
            let tail = Tail::of(&layout, &[]);
            let options = ShareOptions::default().user(*tail.user());
            let begin = Instant::now();
            let granted = match &lent {
                Some(lent) => lent
                    .block()
                    .share_with(to, After::Stream(&stream), &options),
                None => {
                    let token = shared.adopted.draw_token();
                    // SAFETY: `adopt` asks that the range stays allocated until its token is back,
                    // and that no other block overlaps it but those that give nothing away: the
                    // caller keeps it beyond the session.
                    let adopted = unsafe { shared.session.adopt(DevicePtr(start), len, token) };
                    adopted.and_then(|block| block.share_with(to, After::Stream(&stream), &options))
                }
            };
            timed.push((
                begin.elapsed().as_nanos() as u64,
                Descriptor::new(&granted?, layout, &tail),
            ));
        }
        Ok::<_, gpu_ipc::Error>(timed)
    });
    Ok(timed.or_raise()?.into_iter().unzip())
}

/// Claim descriptors, and return nanoseconds and what was received.
#[pyfunction(name = "_time_claims")]
pub(crate) fn time_claims(
    py: Python<'_>,
    participant: &Participant,
    descriptors: Vec<Py<Descriptor>>,
) -> PyResult<(Vec<u64>, Vec<Received>)> {
    let open = participant.participant()?;
    let timed = py.detach(|| {
        let mut timed = Vec::with_capacity(descriptors.len());
        for descriptor in &descriptors {
            let begin = Instant::now();
            let block = open.claim(descriptor.get().grant(), Wait::None, None)?;
            timed.push((begin.elapsed().as_nanos() as u64, block));
        }
        Ok::<_, gpu_ipc::ClaimError>(timed)
    });
    let received = timed.or_raise()?.into_iter().zip(&descriptors);
    Ok(received
        .map(|((time, block), descriptor)| {
            (time, participant.received(descriptor.clone_ref(py), block))
        })
        .unzip())
}
