//! Words in shared memory that streams write and wait for.

use crate::can;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU64, Ordering};

use gpu_ipc::backend::{EventKind, HostPtr, MAX_BATCH, StreamOp, WordPtr};
use gpu_ipc::{BackendKind, Error, Gpu};
use rustix::mm::{MapFlags, ProtFlags};

use crate::queue::Queue;
use crate::{Case, wait_until};

pub(crate) const CASES: &[Case] = &[
    Case {
        name: "word::is_written_after_the_work_before_it",
        run: written_after,
    },
    Case {
        name: "word::a_wait_compares_cyclically_and_signed",
        run: compared,
    },
    Case {
        name: "word::a_batch_has_1_to_255_operations",
        run: batches,
    },
    Case {
        name: "word::a_stream_waits_until_the_host_writes",
        run: host_writes,
    },
    Case {
        name: "word::a_batch_behind_other_streams_waits_for_them",
        run: behind,
    },
    Case {
        name: "word::only_whole_pages_are_registered",
        run: whole_pages,
    },
];

const BYTES: usize = 4096;

/// A page of shared memory, registered where the device can use it.
pub(crate) struct Words<'a> {
    gpu: &'a Gpu,
    start: *mut AtomicU64,
    registered: Option<WordPtr>,
    pub file: OwnedFd,
}

impl<'a> Words<'a> {
    pub fn new(gpu: &'a Gpu) -> Words<'a> {
        let file = rustix::fs::memfd_create("conformance", rustix::fs::MemfdFlags::CLOEXEC)
            .expect("memory");
        rustix::fs::ftruncate(&file, BYTES as u64).expect("memory");
        Self::map(gpu, file)
    }

    /// Maps what another process made.
    pub fn map(gpu: &'a Gpu, file: OwnedFd) -> Words<'a> {
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: `mmap` without a fixed address has no conditions.
        let start = unsafe {
            rustix::mm::mmap(
                std::ptr::null_mut(),
                BYTES,
                protection,
                MapFlags::SHARED,
                &file,
                0,
            )
        };
        let start = start.expect("it maps").cast::<AtomicU64>();
        let registered = (gpu.caps().stream_writes || gpu.caps().stream_waits).then(|| {
            // SAFETY: `register_words` asks for mapped bytes that stay so until they are
            // unregistered: `drop` does both, in that order.
            unsafe { gpu.backend().register_words(HostPtr(start as usize), BYTES) }
                .expect("it registers")
        });
        Words {
            gpu,
            start,
            registered,
            file,
        }
    }

    /// Points at a word as streams see it.
    pub fn ptr(&self, index: usize) -> WordPtr {
        self.registered
            .unwrap_or(WordPtr(self.start as u64))
            .word(index)
    }

    /// Returns a word as the host sees it.
    pub fn get(&self, index: usize) -> &AtomicU64 {
        assert!(index < BYTES / 8);
        // SAFETY: `add` asks for an offset within the mapping: just asserted.
        let word = unsafe { self.start.add(index) };
        // SAFETY: `&*` of an atomic word of a mapping that lives as long as `self`.
        unsafe { &*word }
    }

    pub fn batch(&self, queue: &Queue<'_>, ops: &[StreamOp]) -> gpu_ipc::Result<()> {
        // SAFETY: `stream_batch` asks for a live stream and for words in a registration that
        // outlives the operations: a case synchronises its streams before it drops its words.
        unsafe { self.gpu.backend().stream_batch(queue.raw(), ops) }
    }
}

impl Drop for Words<'_> {
    fn drop(&mut self) {
        if self.registered.is_some() {
            // SAFETY: `unregister_words` asks for a registration without unfinished operations: as
            // above.
            let _ = unsafe {
                self.gpu
                    .backend()
                    .unregister_words(HostPtr(self.start as usize))
            };
        }
        // SAFETY: `munmap` asks for a mapping that nobody uses afterwards: its owner goes.
        let _ = unsafe { rustix::mm::munmap(self.start.cast(), BYTES) };
    }
}

fn written_after(gpu: &Gpu) {
    if !can(gpu.caps().stream_writes, "stream writes") {
        return;
    }
    let (words, queue) = (Words::new(gpu), Queue::new(gpu));
    let go = queue.hold();
    words
        .batch(
            &queue,
            &[StreamOp::Write {
                word: words.ptr(3),
                value: 9,
            }],
        )
        .expect("it queues");
    assert_eq!(words.get(3).load(Ordering::Acquire), 0);
    drop(go);
    queue.synchronize();
    assert_eq!(words.get(3).load(Ordering::Acquire), 9);
}

fn behind(gpu: &Gpu) {
    if !can(gpu.caps().stream_writes, "stream writes") {
        return;
    }
    let (words, queue) = (Words::new(gpu), Queue::new(gpu));
    let others = [Queue::new(gpu), Queue::new(gpu)];
    let events = [(); 2].map(|()| {
        gpu.backend()
            .create_event(gpu.device(), EventKind::Local)
            .expect("an event")
    });
    let behind = [(events[0], others[0].raw()), (events[1], others[1].raw())];
    let write = |value| {
        let ops = [
            StreamOp::Write {
                word: words.ptr(0),
                value,
            },
            StreamOp::Write {
                word: words.ptr(1),
                value,
            },
        ];
        // SAFETY: `batch_behind` asks for live streams and events of one device, and registered
        // words: all live to the end.
        unsafe { gpu.backend().batch_behind(queue.raw(), &behind, &ops) }.expect("nobody captures");
    };
    write(1);
    queue.synchronize();
    assert_eq!(words.get(1).load(Ordering::Acquire), 1);
    let go = others[1].hold();
    write(2);
    // What comes later on the first does not matter, and what stands on the second does.
    others[0].synchronize();
    assert!(!queue.is_idle());
    assert_eq!(words.get(0).load(Ordering::Acquire), 1);
    drop(go);
    queue.synchronize();
    assert_eq!(words.get(1).load(Ordering::Acquire), 2);
    // SAFETY: `batch_uncaptured` asks for a live stream and registered words: both live to the end.
    unsafe {
        gpu.backend().batch_uncaptured(
            queue.raw(),
            &[StreamOp::Write {
                word: words.ptr(0),
                value: 3,
            }],
        )
    }
    .expect("nobody captures");
    queue.synchronize();
    assert_eq!(words.get(0).load(Ordering::Acquire), 3);
    for event in events {
        // SAFETY: `destroy_event` asks for a live event that nobody uses afterwards: the streams
        // are idle.
        unsafe { gpu.backend().destroy_event(event) }.expect("it goes");
    }
}

fn compared(gpu: &Gpu) {
    if !can(gpu.caps().stream_waits, "stream waits")
        || !can(gpu.caps().stream_writes, "stream writes")
    {
        return;
    }
    let words = Words::new(gpu);
    let mut values = vec![(5, true), (6, true), (1 << 62, true), (4, false)];
    // AMD's runtime compares as unsigned numbers: the same below 2^63, where the library's values
    // and its poison are.
    if gpu.kind() != BackendKind::Hip {
        values.extend([((1 << 63) + 4, true), (u64::MAX, false)]);
    }
    for (value, completes) in values {
        let queue = Queue::new(gpu);
        words.get(0).store(value, Ordering::Release);
        words
            .batch(
                &queue,
                &[StreamOp::WaitGeq {
                    word: words.ptr(0),
                    value: 5,
                }],
            )
            .expect("it queues");
        if completes {
            queue.synchronize();
        } else {
            // Another stream's whole work passes meanwhile.
            let other = Queue::new(gpu);
            words
                .batch(
                    &other,
                    &[StreamOp::Write {
                        word: words.ptr(1),
                        value,
                    }],
                )
                .expect("it queues");
            other.synchronize();
            assert!(!queue.is_idle(), "{value:#x} completed a wait for 5");
            words.get(0).store(5, Ordering::Release);
            queue.synchronize();
        }
    }
}

fn batches(gpu: &Gpu) {
    if !can(gpu.caps().stream_writes, "stream writes") {
        return;
    }
    let (words, queue) = (Words::new(gpu), Queue::new(gpu));
    let ops = |count: usize| -> Vec<StreamOp> {
        (0..count)
            .map(|n| StreamOp::Write {
                word: words.ptr(n),
                value: n as u64 + 1,
            })
            .collect()
    };
    words.batch(&queue, &ops(MAX_BATCH)).expect("255 are taken");
    for count in [0, MAX_BATCH + 1] {
        let error = words.batch(&queue, &ops(count)).expect_err("refused");
        assert!(matches!(error, Error::Invalid { .. }), "{error}");
    }
    queue.synchronize();
    for n in 0..MAX_BATCH {
        assert_eq!(words.get(n).load(Ordering::Acquire), n as u64 + 1);
    }
    let rising: Vec<_> = (1..9)
        .map(|value| StreamOp::Write {
            word: words.ptr(300),
            value,
        })
        .collect();
    words.batch(&queue, &rising).expect("it queues");
    queue.synchronize();
    assert_eq!(
        words.get(300).load(Ordering::Acquire),
        8,
        "the last of a batch is written last"
    );
}

fn host_writes(gpu: &Gpu) {
    if !can(gpu.caps().stream_waits, "stream waits")
        || !can(gpu.caps().stream_writes, "stream writes")
    {
        return;
    }
    let (words, queue) = (Words::new(gpu), Queue::new(gpu));
    let ops = [
        StreamOp::WaitGeq {
            word: words.ptr(0),
            value: 1,
        },
        StreamOp::Write {
            word: words.ptr(1),
            value: 2,
        },
    ];
    words.batch(&queue, &ops).expect("it queues");
    assert!(!queue.is_idle());
    assert_eq!(
        words.get(1).load(Ordering::Acquire),
        0,
        "written before the wait"
    );
    words.get(0).store(1, Ordering::Release);
    wait_until("the stream", || queue.is_idle());
    assert_eq!(words.get(1).load(Ordering::Acquire), 2);
}

fn whole_pages(gpu: &Gpu) {
    if !can(gpu.caps().stream_writes, "stream writes") {
        return;
    }
    let words = Words::new(gpu);
    for (start, len) in [(words.start as usize + 8, 64), (words.start as usize, 100)] {
        // SAFETY: `register_words` asks for mapped bytes: it refuses these.
        let registered = unsafe { gpu.backend().register_words(HostPtr(start), len) };
        assert!(
            matches!(registered, Err(Error::Invalid { .. })),
            "{registered:?}"
        );
    }
}
