//! What writers and readers have in common: the addresses of parts, and the streams that touch
//! them.

use std::sync::Mutex;

use gpu_api::lock::Acquire;
use gpu_api::{DevicePtr, Error, Gpu};
use ipc_rc::Stream;

use crate::error::Result;
use crate::object::manifest::Manifest;
use crate::object::part::Part;

/// Finds a part's address: its region lies behind those before it.
pub(super) fn address(manifest: &Manifest, base: DevicePtr, part: &Part) -> DevicePtr {
    let before: u64 = manifest
        .mapped_regions()
        .take(usize::from(part.region))
        .sum();
    base.offset(before + part.offset)
}

/// Finds the address of the part of this name.
pub(super) fn address_of(manifest: &Manifest, base: DevicePtr, part: &str) -> Option<DevicePtr> {
    let part = manifest.layout.part(part)?;
    Some(address(manifest, base, part))
}

/// Lists where each region begins, and its bytes as its parts fill them.
pub(super) fn regions(manifest: &Manifest, base: DevicePtr) -> Vec<(DevicePtr, u64)> {
    let starts = manifest.mapped_regions().scan(0, |at, bytes| {
        let start = *at;
        *at += bytes;
        Some(base.offset(start))
    });
    starts
        .zip(manifest.layout.regions().iter().copied())
        .collect()
}

/// Finds where bytes of a part lie: so many from an offset on.
pub(super) fn span(
    manifest: &Manifest,
    base: DevicePtr,
    name: &str,
    (offset, len): (u64, u64),
    verb: &str,
) -> Result<DevicePtr> {
    let end = offset.checked_add(len);
    let found = manifest.layout.part(name);
    if let Some(part) = found.filter(|part| end.is_some_and(|end| end <= part.spec.len)) {
        return Ok(address(manifest, base, part).offset(offset));
    }
    let has = found.map_or("no such part".into(), |part| {
        format!("{} bytes", part.spec.len)
    });
    Err(Error::Invalid {
        what: "a range of a part",
        got: format!("{len} bytes at {offset} of {name} to {verb}, which has {has}"),
        must: "inside it",
    }
    .into())
}

pub(super) fn check_stream(gpu: &Gpu, stream: &Stream) -> Result<()> {
    if stream.gpu() == gpu {
        return Ok(());
    }
    Err(Error::mismatch(
        "the stream's device",
        stream.gpu().device(),
        gpu.device(),
        "pass a stream of the device that the client was connected with",
    )
    .into())
}

/// Adds a stream of the client's device to those that touch an object, once.
pub(super) fn note(gpu: &Gpu, streams: &Mutex<Vec<Stream>>, stream: &Stream) -> Result<()> {
    check_stream(gpu, stream)?;
    let mut streams = streams.acquire();
    if !streams
        .iter()
        .any(|known| known.identity() == stream.identity())
    {
        streams.push(stream.clone());
    }
    Ok(())
}

/// Queues a fill of mapped memory on a stream, which counts as one that touches the object then.
///
/// # Safety
///
/// The range lies in memory that stays mapped until the work of `streams` has finished, and the
/// stream lives until then.
pub(super) unsafe fn queue_fill(
    gpu: &Gpu,
    streams: &Mutex<Vec<Stream>>,
    stream: &Stream,
    (at, len): (DevicePtr, u64),
    byte: u8,
) -> Result<()> {
    check_stream(gpu, stream)?;
    stream.refuse_per_thread()?;
    stream.refuse_capture("fill before the capture begins or after it ended")?;
    if len == 0 {
        return Ok(());
    }
    // Before the fill: a call that fails may have queued it all the same.
    note(gpu, streams, stream)?;
    // SAFETY: `fill` asks for a live stream and a range that is valid until the fill has finished;
    // the caller vouches for both.
    unsafe { stream.gpu().backend().fill(stream.raw(), at, byte, len) }?;
    Ok(())
}

/// Copies on the device, each from the second address to the first, and waits.
pub(super) fn copy_and_wait(gpu: &Gpu, copies: &[(DevicePtr, DevicePtr, u64)]) -> Result<()> {
    let stream = Stream::create(gpu)?;
    for &(to, from, len) in copies.iter().filter(|(.., len)| *len > 0) {
        // SAFETY: `copy` asks for a live stream, and for ranges of the stream's device that are
        // valid until the copy has finished: the callers' mappings, which they hold until the wait
        // below is over.
        unsafe { gpu.backend().copy(stream.raw(), to, from, len) }?;
    }
    Ok(stream.synchronize()?)
}

/// Copies a piece of a part to the host.
pub(super) fn read_part(
    gpu: &Gpu,
    manifest: &Manifest,
    base: DevicePtr,
    name: &str,
    offset: u64,
    bytes: &mut [u8],
) -> Result<()> {
    let end = offset.checked_add(bytes.len() as u64);
    let found = manifest.layout.part(name);
    let Some(part) = found.filter(|part| end.is_some_and(|end| end <= part.spec.len)) else {
        let has = found.map_or("no such part".into(), |part| {
            format!("{} bytes", part.spec.len)
        });
        let got = format!(
            "{} bytes at {offset} of {name}, which has {has}",
            bytes.len()
        );
        return Err(Error::invalid("the range to read of a part", got, "inside it").into());
    };
    if bytes.is_empty() {
        return Ok(());
    }
    let at = address(manifest, base, part).offset(offset);
    let stream = Stream::create(gpu)?;
    // SAFETY: `copy_to_host` asks for a live stream and ranges that are valid until the copy has
    // finished: the piece lies in the mapped range, and `bytes` and the mapping outlive the wait
    // below.
    unsafe {
        gpu.backend()
            .copy_to_host(stream.raw(), bytes.as_mut_ptr(), at, bytes.len())
    }?;
    Ok(stream.synchronize()?)
}
