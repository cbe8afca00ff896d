//! What of other processes' memory this process has mapped: each segment once, however many
//! storages lie in it.

// Tests: `crates/torch/tests/processes/chunks.rs`, `crates/torch/tests/processes/pieces.rs`.

use std::collections::HashMap;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Condvar, Mutex};

use gpu_api::lock::{Acquire, AwaitChange};
use gpu_api::{Access, DevicePtr, Error, Gpu, Result};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, PidfdGetfdFlags, RawPid, pidfd_getfd, pidfd_open};

use crate::fields::Place;
use crate::segment_handle::{Chunks, ExpandableSegment, SegmentHandle};

const OPENING: &str = "opening an expandable segment of PyTorch's";
const OFF: &str = "set PYTORCH_ALLOC_CONF=expandable_segments:False (of older versions PYTORCH_CUDA_ALLOC_CONF or \
                   PYTORCH_HIP_ALLOC_CONF) in the sender";

/// The segments that this process has open on one device.
///
/// An entry is the driver's from the first opening to the last release. Both ends of that are calls
/// of the driver, made without the lock: other threads find the entry busy and wait for it, so no
/// handle is ever opened while it is being closed.
#[derive(Debug)]
pub(crate) struct Segments {
    gpu: Gpu,
    entries: Mutex<HashMap<Vec<u8>, SegmentUse>>,
    changed: Condvar,
}

#[derive(Debug)]
enum SegmentUse {
    /// Being opened or closed.
    Busy,
    Open {
        base: DevicePtr,
        len: u64,
        users: u64,
    },
}

/// One use of an open segment, to be given back.
#[derive(Debug)]
#[must_use]
pub(crate) struct Mapped {
    key: Vec<u8>,
    pub base: DevicePtr,
    pub len: u64,
}

impl Segments {
    pub(crate) fn new(gpu: Gpu) -> Segments {
        Segments {
            gpu,
            entries: Mutex::default(),
            changed: Condvar::new(),
        }
    }

    /// Counts the segments that are open.
    pub(crate) fn count(&self) -> usize {
        self.entries.acquire().len()
    }

    /// Opens a segment, or takes part in its being open.
    pub(crate) fn acquire(&self, place: &Place) -> Result<Mapped> {
        // A plain segment is the driver's handle whatever version came before it. File descriptors
        // are numbers that are used again, but not while one of the segment's storages is counted,
        // and each user of an entry is counted. A process number can be another's while an entry
        // lives, a counter file's name cannot: part of it is random.
        let key = match &place.segment {
            SegmentHandle::Plain(handle) => handle.0.to_vec(),
            SegmentHandle::Expandable(_) => [
                place.segment_bytes.as_slice(),
                place.counter.file.as_str().as_bytes(),
            ]
            .concat(),
        };
        let mut entries = self.entries.acquire();
        loop {
            match entries.get_mut(&key) {
                Some(SegmentUse::Busy) => {
                    entries = self.changed.await_change(entries, None);
                }
                Some(SegmentUse::Open { base, len, users }) => {
                    *users += 1;
                    return Ok(Mapped {
                        base: *base,
                        len: *len,
                        key,
                    });
                }
                None => break,
            }
        }
        entries.insert(key.clone(), SegmentUse::Busy);
        drop(entries);
        let opened = self.open(&place.segment);
        let mut entries = self.entries.acquire();
        match &opened {
            Ok((base, len)) => entries.insert(
                key.clone(),
                SegmentUse::Open {
                    base: *base,
                    len: *len,
                    users: 1,
                },
            ),
            Err(_) => entries.remove(&key),
        };
        drop(entries);
        self.changed.notify_all();
        opened.map(|(base, len)| Mapped { key, base, len })
    }

    /// Ends one use; the last one closes the segment, which may block. After an error it stays
    /// mapped for good.
    pub(crate) fn release(&self, mapped: Mapped) -> Result<()> {
        let mut entries = self.entries.acquire();
        match entries.get_mut(&mapped.key) {
            Some(SegmentUse::Open { users, .. }) if *users > 1 => {
                *users -= 1;
                return Ok(());
            }
            Some(entry) => *entry = SegmentUse::Busy,
            None => return Ok(()),
        }
        drop(entries);
        // SAFETY: `close` asks
        // - that `base` was opened and is not closed: the entry says so, and it was this call that
        //   made it busy;
        // - that no work of this process touches it: each user gave its use back when its work was
        //   done, and this was the last one.
        let closed = unsafe { self.gpu.backend().close(mapped.base) };
        let mut entries = self.entries.acquire();
        match &closed {
            Ok(()) => entries.remove(&mapped.key),
            // Mapped for all that anybody knows: with a user that never ends.
            Err(_) => entries.insert(
                mapped.key,
                SegmentUse::Open {
                    base: mapped.base,
                    len: mapped.len,
                    users: 1,
                },
            ),
        };
        drop(entries);
        self.changed.notify_all();
        closed
    }

    /// Maps the chunks of an expandable segment as its sender has them: side by side.
    fn import(&self, segment: &ExpandableSegment) -> Result<DevicePtr> {
        let (backend, device) = (self.gpu.backend(), self.gpu.device());
        let mut fds = descriptors_of(segment)?;
        let count = fds.len();
        if count == 1 {
            let fd = fds.next().expect("there is one")?;
            return backend.import_fd(device, fd.as_fd(), segment.chunk_bytes, Access::ReadWrite);
        }
        backend
            .import_fds(device, &mut fds, segment.chunk_bytes, Access::ReadWrite)
            .map_err(|error| match error {
                // The backend's own, who did not ask for a single descriptor.
                Error::Unsupported { why, .. } if fds.len() == count => Error::unsupported(
                    OPENING,
                    format!(
                        "the storage lies in {count} chunks of {} bytes: {why}",
                        segment.chunk_bytes
                    ),
                    OFF,
                ),
                error => error,
            })
    }

    fn open(&self, segment: &SegmentHandle) -> Result<(DevicePtr, u64)> {
        let (backend, device) = (self.gpu.backend(), self.gpu.device());
        let base = match segment {
            SegmentHandle::Plain(handle) => backend.open_handle(device, handle)?,
            SegmentHandle::Expandable(segment) => self.import(segment)?,
        };
        match backend.address_range(base) {
            Ok(range) => Ok((
                base,
                range
                    .len
                    .saturating_sub(base.0.saturating_sub(range.base.0)),
            )),
            Err(error) => {
                // SAFETY: `close` asks for an open mapping that nothing uses: it was opened above.
                // An error leaks it.
                let _ = unsafe { backend.close(base) };
                Err(error)
            }
        }
    }
}

/// Takes the file descriptors of a segment out of the process that made it, one after the other.
fn descriptors_of(
    segment: &ExpandableSegment,
) -> Result<impl ExactSizeIterator<Item = Result<OwnedFd>>> {
    let numbers = match &segment.chunks {
        Chunks::Descriptors(numbers) => numbers,
        Chunks::Fabric(_) => {
            let why = "it is shared by fabric handles";
            return Err(Error::unsupported(OPENING, why, OFF));
        }
    };
    let number = segment.pid;
    let failed = move |e: Errno| match e {
        // The last two are how filters of system calls say it.
        Errno::PERM | Errno::ACCESS | Errno::NOSYS => Error::unsupported(
            OPENING,
            format!(
                "the system does not let this process take a file descriptor of process {number}"
            ),
            "set PYTORCH_ALLOC_CONF=expandable_segments:False (of older versions PYTORCH_CUDA_ALLOC_CONF or \
                   PYTORCH_HIP_ALLOC_CONF) in the sender, or permit it: the same user, \
                     and prctl(PR_SET_PTRACER) in the sender or CAP_SYS_PTRACE here",
        ),
        e => {
            let gone =
                "let the sender live, in the same pid namespace, until everything was received";
            Error::system("pidfd_getfd of the segment, from its sender", gone, e)
        }
    };
    let pid = RawPid::try_from(number)
        .ok()
        .and_then(Pid::from_raw)
        .ok_or_else(|| {
            Error::invalid(
                "a PyTorch expandable segment",
                format!("of process {number}"),
                "of a process with a positive number",
            )
        })?;
    let process = pidfd_open(pid, PidfdFlags::empty()).map_err(failed)?;
    Ok(numbers.iter().map(move |&fd| {
        // One that no process can have is one that this process has not.
        let fd = i32::try_from(fd).map_err(|_| failed(Errno::BADF))?;
        pidfd_getfd(&process, fd, PidfdGetfdFlags::empty()).map_err(failed)
    }))
}
