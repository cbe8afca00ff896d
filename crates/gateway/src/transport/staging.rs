//! Staging memory: the slots of a ring on one side, and copies between them and an object.
//!
//! It is kept for the process' life. UCX maps plain device memory in the processes that read it,
//! and CUDA forbids to free memory that another process has mapped by its handle
//! (`cudaIpcOpenMemHandle`); a transfer that never ends may write to a slot for ever. So rings are
//! used again, and never freed.

use std::fmt;
use std::ops::Range;
use std::os::fd::{AsFd, OwnedFd};
use std::ptr;
use std::sync::Arc;

use gpu_ipc::backend::{DevicePtr, EventKind, HostMemory, RawEvent, Sharing};
use gpu_ipc::{Gpu, Stream};

use super::choice::Way;
use super::ring::Landing;
use crate::error::{Error, Result};
use crate::transport::{Place, Span, Transport};

/// An object with fewer bytes is read directly: nothing is gained by a ring.
pub const LEAST_STAGED: u64 = 64 << 20;
/// Fewer bytes in a slot are not worth their questions.
pub const LEAST: u64 = 1 << 20;

/// Returns how many slots a way's ring has by itself, and of how many bytes: enough to read while
/// the origin is asked for more. At 390 GB/s (NVLink) 1 GiB lasts 2.8 ms, and a question for a
/// quarter of it took 1.3 ms with others on their way (H200, both sides on one GPU). Host memory is
/// not read so fast.
pub fn shape(way: Way) -> (usize, u64) {
    if way == Way::DeviceRing {
        (16, 64 << 20)
    } else {
        (8, 16 << 20)
    }
}

/// The slots of one side. Copies of one ring go one after the other, on a stream of its own.
pub struct Staging {
    gpu: Gpu,
    stream: Stream,
    memory: Span,
    /// Memory of the host that other processes can map.
    file: Option<OwnedFd>,
    slots: Vec<Span>,
    events: Vec<RawEvent>,
}

impl Staging {
    /// Takes `count` slots of `bytes` bytes each, or of half, a quarter and so on where there is no
    /// room.
    ///
    /// # Errors
    ///
    /// [`Error::Unavailable`] without room for slots of 1 MiB, or of `bytes` if that is less.
    pub fn take(gpu: &Gpu, way: Way, count: usize, bytes: u64) -> Result<Staging> {
        let mut bytes = bytes;
        loop {
            match Staging::of(gpu, way, count, bytes) {
                Err(_) if bytes / 2 >= LEAST => bytes /= 2,
                taken => return taken,
            }
        }
    }

    /// Takes `count` slots of exactly `bytes` bytes.
    ///
    /// # Errors
    ///
    /// [`Error::Unavailable`] without room.
    pub fn of(gpu: &Gpu, way: Way, count: usize, bytes: u64) -> Result<Staging> {
        let none = |why: gpu_ipc::Error| Error::Unavailable {
            what: format!("a {way} of {count} times {bytes} bytes"),
            why: gpu_ipc::backend::explain(&why),
            remedy: "leave that memory free, or give `--way direct`",
        };
        let stream = Stream::create(gpu).map_err(none)?;
        let event = |_| {
            gpu.backend()
                .create_event(gpu.device(), EventKind::Local)
                .map_err(none)
        };
        let events = (0..count).map(event).collect::<Result<Vec<_>>>()?;
        let all = bytes.saturating_mul(count as u64);
        let (backend, device) = (gpu.backend(), gpu.device());
        let (address, place, file) = match way {
            _ if gpu.kind().in_host_memory() => {
                let base = backend.alloc(device, all, Sharing::Fd).map_err(none)?.base;
                let file = backend.export_fd(base).map_err(none)?;
                let read_only = backend.read_only_fd(device, file.as_fd()).map_err(none)?;
                (base.0, Place::Host, read_only)
            }
            Way::DeviceRing => {
                let memory = backend.alloc(device, all, Sharing::Handle).map_err(none)?;
                (memory.base.0, Place::Device(device.0), None)
            }
            Way::Direct | Way::PinnedRing => {
                let memory = HostMemory {
                    pinned: true,
                    numa_node: None,
                };
                let bytes = usize::try_from(all).unwrap_or(usize::MAX);
                let memory = backend.host_alloc(device, bytes, memory).map_err(none)?;
                (memory.0 as u64, Place::Host, None)
            }
        };
        let slot = |slot| Span {
            address: address + bytes * slot as u64,
            bytes,
            place,
        };
        let memory = Span {
            address,
            bytes: all,
            place,
        };
        Ok(Staging {
            gpu: gpu.clone(),
            stream,
            memory,
            file,
            slots: (0..count).map(slot).collect(),
            events,
        })
    }

    /// Returns the memory of all slots.
    pub fn memory(&self) -> Span {
        self.memory
    }

    /// Returns a descriptor by which another process maps it to read.
    ///
    /// # Errors
    ///
    /// [`Error::Unavailable`] for memory that has none.
    pub fn export(&self) -> Result<OwnedFd> {
        let file = self.file.as_ref().map(OwnedFd::try_clone);
        let none = || std::io::Error::other("it is pinned, or a device's");
        file.unwrap_or_else(|| Err(none()))
            .map_err(|e| Error::Unavailable {
                what: "a descriptor of a ring".into(),
                why: e.to_string(),
                remedy: "raise RLIMIT_NOFILE, or give `--way direct`",
            })
    }

    /// Lists the slots.
    pub fn slots(&self) -> &[Span] {
        &self.slots
    }

    /// Copies pieces of an object, each to the start of a slot, and waits until they are there.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] for bytes or a slot that are not there, [`Error::Transfer`] with what the
    /// driver says.
    ///
    /// # Safety
    ///
    /// The object is mapped and readable, and nobody writes to it or uses the slots meanwhile.
    pub unsafe fn fill(&self, object: &[Span], pieces: &[(usize, Range<u64>)]) -> Result<()> {
        let mut copies = Vec::new();
        for (slot, bytes) in pieces {
            let to = self.slot(*slot, bytes)?;
            copies.push((to, parts(object, bytes.clone())?));
        }
        for (to, parts) in copies {
            let mut at = to.address;
            for from in parts {
                // SAFETY: `copy`: the caller vouches for the object's part; the slot has room for
                // the sum of all parts.
                unsafe { self.copy(at, to.place, from.address, Place::Device(0), from.bytes) }?;
                at += from.bytes;
            }
        }
        self.stream
            .synchronize()
            .map_err(|error| self.failed(&error))
    }

    /// # Safety
    ///
    /// As for [`Landing::copy`], with the object at these spans.
    unsafe fn empty(&self, slot: usize, object: &[Span], bytes: Range<u64>) -> Result<()> {
        let from = self.slot(slot, &bytes)?;
        let mut at = from.address;
        for to in parts(object, bytes)? {
            // SAFETY: `copy`: the caller vouches for the object's part; the slot holds the sum of
            // all parts.
            unsafe { self.copy(to.address, Place::Device(0), at, from.place, to.bytes) }?;
            at += to.bytes;
        }
        // SAFETY: `record_event` takes an event and a stream that live as long as this.
        let recorded = unsafe {
            self.gpu
                .backend()
                .record_event(self.events[slot], self.stream.raw())
        };
        recorded.map_err(|error| self.failed(&error))
    }

    fn slot(&self, slot: usize, bytes: &Range<u64>) -> Result<Span> {
        let span = self
            .slots
            .get(slot)
            .filter(|span| bytes.start < bytes.end && bytes.end - bytes.start <= span.bytes);
        span.copied().ok_or_else(|| Error::Invalid {
            what: "a slot",
            got: format!("{slot}, for bytes {} to {}", bytes.start, bytes.end),
            must: "one of the ring's, with room for some bytes",
        })
    }

    /// Queues a copy. `Place::Device` stands for memory of the object's backend, whatever that is.
    ///
    /// # Safety
    ///
    /// Both ranges stay mapped until the stream is done, and nobody writes to what is read or uses
    /// what is written.
    unsafe fn copy(
        &self,
        to: u64,
        to_place: Place,
        from: u64,
        from_place: Place,
        bytes: u64,
    ) -> Result<()> {
        let (backend, stream) = (self.gpu.backend(), self.stream.raw());
        // Host memory of this length is mapped, so its length is one of this machine.
        let length = bytes as usize;
        let queued = match (to_place, from_place) {
            // SAFETY: `copy_to_host` has our condition, and the stream lives as long as this.
            (Place::Host, _) => unsafe {
                backend.copy_to_host(stream, to as *mut u8, DevicePtr(from), length)
            },
            // SAFETY: `copy_to_device` has our condition, and the stream lives as long as this.
            (_, Place::Host) => unsafe {
                backend.copy_to_device(
                    stream,
                    DevicePtr(to),
                    ptr::with_exposed_provenance(from as usize),
                    length,
                )
            },
            // SAFETY: `copy` has our condition, and the stream lives as long as this.
            _ => unsafe { backend.copy(stream, DevicePtr(to), DevicePtr(from), bytes) },
        };
        queued.map_err(|error| self.failed(&error))
    }

    /// Makes an error after which nothing of this stream runs.
    fn failed(&self, error: &gpu_ipc::Error) -> Error {
        if let Err(error) = self.stream.synchronize() {
            tracing::warn!(%error, "a copy through staging memory may be under way yet");
        }
        Error::Transfer {
            why: format!(
                "a copy through staging memory: {}",
                gpu_ipc::backend::explain(error)
            ),
        }
    }
}

impl fmt::Debug for Staging {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Staging")
            .field("slots", &self.slots)
            .finish_non_exhaustive()
    }
}

/// Lands in the object.
#[derive(Debug)]
pub struct InObject {
    /// The object, region by region, registered with the transport.
    pub object: Vec<Span>,
}

impl Landing for InObject {
    fn spans(&self, _: usize, piece: &Range<u64>) -> Result<Vec<Span>> {
        parts(&self.object, piece.clone())
    }

    unsafe fn copy(&mut self, _: usize, _: Range<u64>) -> Result<()> {
        Ok(())
    }

    fn copied(&mut self, _: usize) -> Result<bool> {
        Ok(true)
    }
}

/// Lands in slots of this side, and is copied from there.
pub struct InSlots {
    /// The slots, registered with the transport.
    pub staging: &'static Staging,
    /// The object, region by region.
    pub object: Vec<Span>,
    /// What brings the bytes: its flush makes them visible to the copy.
    pub transport: Arc<dyn Transport>,
}

impl Landing for InSlots {
    fn spans(&self, slot: usize, piece: &Range<u64>) -> Result<Vec<Span>> {
        let bytes = piece.end - piece.start;
        Ok(vec![Span {
            bytes,
            ..self.staging.slot(slot, piece)?
        }])
    }

    unsafe fn copy(&mut self, slot: usize, piece: Range<u64>) -> Result<()> {
        self.transport.flush()?;
        // SAFETY: `empty` has the condition of `Landing::copy`, whose caller vouches for slot and
        // object.
        unsafe { self.staging.empty(slot, &self.object, piece) }
    }

    fn copied(&mut self, slot: usize) -> Result<bool> {
        let Staging { gpu, events, .. } = self.staging;
        // SAFETY: `query_event` takes an event that lives as long as the ring.
        unsafe { gpu.backend().query_event(events[slot]) }
            .map_err(|error| self.staging.failed(&error))
    }
}

/// Finds bytes of an object, which are counted through all its regions.
fn parts(object: &[Span], bytes: Range<u64>) -> Result<Vec<Span>> {
    let mut found = Vec::new();
    let (mut first, mut at) = (0_u64, bytes.start);
    for region in object {
        let last = first.saturating_add(region.bytes);
        if at < bytes.end && at >= first && at < last {
            let end = bytes.end.min(last);
            found.push(Span {
                address: region.address + (at - first),
                bytes: end - at,
                ..*region
            });
            at = end;
        }
        first = last;
    }
    if at < bytes.end {
        let got = format!("{} to {} of {first}", bytes.start, bytes.end);
        return Err(Error::Invalid {
            what: "bytes of an object",
            got,
            must: "some, within its regions",
        });
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;
    use crate::transport::{Peer, Registration};

    /// Counts how often what it brought is made visible.
    #[derive(Default, Debug)]
    struct Flushes(AtomicUsize);

    impl Transport for Flushes {
        fn kind(&self) -> &'static str {
            "flushes"
        }

        unsafe fn register(&self, _: &[Span]) -> Result<Box<dyn Registration>> {
            unreachable!("a landing registers nothing")
        }

        fn metadata(&self, _: &[u64]) -> Result<Vec<u8>> {
            unreachable!("a landing asks for none")
        }

        fn load_peer(&self, _: &[u8]) -> Result<Box<dyn Peer>> {
            unreachable!("a landing loads none")
        }

        fn flush(&self) -> Result<()> {
            self.0.fetch_add(1, Ordering::Relaxed);
            Ok(())
        }
    }

    fn span(address: u64, bytes: u64) -> Span {
        Span {
            address,
            bytes,
            place: Place::Host,
        }
    }

    fn host() -> Gpu {
        gpu_ipc::detect()
            .expect("the host has memory")
            .first(gpu_ipc::BackendKind::Host)
            .expect("one device")
    }

    #[test]
    fn bytes_are_found_over_the_border_of_regions() {
        let object = [span(1_000, 10), span(5_000, 4), span(9_000, 6)];
        assert_eq!(parts(&object, 0..3).expect("there"), [span(1_000, 3)]);
        assert_eq!(
            parts(&object, 8..16).expect("there"),
            [span(1_008, 2), span(5_000, 4), span(9_000, 2)]
        );
        assert_eq!(parts(&object, 10..14).expect("there"), [span(5_000, 4)]);
        assert_eq!(parts(&object, 19..20).expect("there"), [span(9_005, 1)]);
        for wrong in [19..21, 20..21, u64::MAX - 1..u64::MAX] {
            parts(&object, wrong).expect_err("beyond the end");
        }
    }

    #[test]
    fn bytes_go_through_a_slot_of_either_kind() {
        let gpu = host();
        for way in [Way::DeviceRing, Way::PinnedRing] {
            let staging: &'static Staging =
                Box::leak(Box::new(Staging::of(&gpu, way, 2, 64).expect("room")));
            let object = gpu
                .backend()
                .alloc(gpu.device(), 4096, Sharing::Fd)
                .expect("room")
                .base
                .0;
            let regions = vec![span(object, 40), span(object + 1_000, 40)];
            // SAFETY: `slice::from_raw_parts_mut`: 4,096 bytes that were just allocated and that
            // nothing else uses.
            let bytes = unsafe { std::slice::from_raw_parts_mut(object as *mut u8, 4096) };
            bytes
                .iter_mut()
                .enumerate()
                .for_each(|(at, byte)| *byte = at as u8);
            // SAFETY: `fill`: the object is mapped, and nothing writes to it or the slot.
            unsafe { staging.fill(&regions, &[(1, 30..60)]) }.expect("a copy");
            bytes.fill(0);
            let flushes = Arc::new(Flushes::default());
            let mut copies = InSlots {
                staging,
                object: regions.clone(),
                transport: Arc::clone(&flushes) as _,
            };
            let landed = copies.spans(1, &(30..60)).expect("a slot");
            assert_eq!(
                landed,
                [Span {
                    bytes: 30,
                    ..staging.slots()[1]
                }]
            );
            // SAFETY: `copy`: the object is mapped, and nobody uses it or the slot before the copy
            // has ended.
            unsafe { copies.copy(1, 30..60) }.expect("a copy");
            assert_eq!(
                flushes.0.load(Ordering::Relaxed),
                1,
                "it was flushed before it was copied"
            );
            while !copies.copied(1).expect("it ends well") {
                std::thread::yield_now();
            }
            let right: Vec<u8> = (0..40_u64).chain(1_000..1_040).map(|at| at as u8).collect();
            let found: Vec<u8> = (0..40).chain(1_000..1_040).map(|at| bytes[at]).collect();
            assert_eq!(
                (&found[30..60], &found[..30]),
                (&right[30..60], &[0; 30][..]),
                "{way}"
            );
            // SAFETY: `fill`: nothing is copied.
            unsafe { staging.fill(&regions, &[(0, 0..1), (2, 0..1)]) }.expect_err("no such slot");
            // SAFETY: `fill`: nothing is copied.
            unsafe { staging.fill(&regions, &[(0, 0..65)]) }.expect_err("no room");
            copies.spans(0, &(0..65)).expect_err("no room");
        }
    }

    #[test]
    fn a_ring_of_slots_that_do_not_fit_has_smaller_ones_or_says_so() {
        let gpu = host();
        let error = Staging::of(&gpu, Way::DeviceRing, 2, 1 << 60)
            .expect_err("no such room")
            .to_string();
        assert!(
            error.contains("ring of device buffers of 2 times"),
            "{error}"
        );
    }
}
