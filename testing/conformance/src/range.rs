//! Memory apart from addresses, and the ranges that it is mapped on.

use crate::can;
use std::os::fd::AsFd;

use gpu_ipc::backend::{Access, AddressRange, DevicePtr, MemoryKind, RawMemory};
use gpu_ipc::{Error, Gpu};

use crate::queue::Queue;
use crate::{Case, PeerCase, Pipe};

pub(crate) const CASES: &[Case] = &[
    Case {
        name: "range::what_its_capabilities_deny_is_refused",
        run: denied,
    },
    Case {
        name: "range::shows_what_is_mapped_on_it",
        run: shown,
    },
    Case {
        name: "range::grows_by_a_piece_behind_the_last",
        run: grown,
    },
    Case {
        name: "range::shows_other_memory_at_the_same_address",
        run: replaced,
    },
    Case {
        name: "range::is_had_at_a_wanted_address_or_not_at_all",
        run: wanted,
    },
    Case {
        name: "range::memory_outlives_its_handle_and_its_mapping",
        run: outlives,
    },
    Case {
        name: "range::memory_of_another_length_is_refused",
        run: wrong_length,
    },
    Case {
        name: "range::a_piece_is_given_back_by_its_own_call",
        run: own_call,
    },
];

pub(crate) const PEER_CASES: &[PeerCase] = &[PeerCase {
    name: "range::stored_memory_comes_to_the_peer_at_the_same_address",
    producer: stored_producer,
    consumer: stored_consumer,
}];

/// A range that is given back when it is dropped, with what is mapped on it.
struct Range<'a> {
    gpu: &'a Gpu,
    range: AddressRange,
    mapped: Vec<DevicePtr>,
}

impl<'a> Range<'a> {
    /// Reserves a range of this many pieces.
    fn new(gpu: &'a Gpu, pieces: u64) -> Range<'a> {
        Range::at(gpu, pieces, None).expect("there are addresses")
    }

    fn at(gpu: &'a Gpu, pieces: u64, at: Option<DevicePtr>) -> gpu_ipc::Result<Range<'a>> {
        let range = gpu
            .backend()
            .reserve_range(gpu.device(), pieces * piece(gpu), at)?;
        assert!(range.len >= pieces * piece(gpu));
        Ok(Range {
            gpu,
            range,
            mapped: Vec::new(),
        })
    }

    /// Returns where the piece of this number begins.
    fn place(&self, number: u64) -> DevicePtr {
        self.range.base.offset(number * piece(self.gpu))
    }

    fn map(&mut self, number: u64, memory: RawMemory, access: Access) {
        let at = self.place(number);
        // SAFETY: `map_memory` asks for live memory and for reserved addresses where nothing is
        // mapped: the cases map each place once, and release memory afterwards.
        unsafe { self.gpu.backend().map_memory(at, memory, access) }.expect("it maps");
        self.mapped.push(at);
    }

    fn unmap(&mut self, number: u64) {
        let at = self.place(number);
        self.mapped.retain(|mapped| *mapped != at);
        // SAFETY: `unmap_memory` asks for a mapping that nothing uses: the cases synchronise their
        // streams.
        unsafe { self.gpu.backend().unmap_memory(at) }.expect("it unmaps");
    }
}

impl Drop for Range<'_> {
    fn drop(&mut self) {
        for at in self.mapped.drain(..) {
            // SAFETY: `unmap_memory` asks for a mapping that nothing uses: the cases synchronise
            // their streams.
            let _ = unsafe { self.gpu.backend().unmap_memory(at) };
        }
        // SAFETY: `release_range` asks for a range without mappings: they went above.
        let _ = unsafe { self.gpu.backend().release_range(self.range) };
    }
}

/// The length of the pieces here.
fn piece(gpu: &Gpu) -> u64 {
    gpu.caps().granularity
}

fn create(gpu: &Gpu) -> RawMemory {
    let made = gpu
        .backend()
        .create_memory(gpu.device(), piece(gpu))
        .expect("there is room");
    assert_eq!((made.device, made.len), (gpu.device(), piece(gpu)));
    made
}

fn release(gpu: &Gpu, memory: RawMemory) {
    // SAFETY: `release_memory` asks for memory that was not released: a case releases what it made,
    // once.
    unsafe { gpu.backend().release_memory(memory) }.expect("it goes");
}

/// Makes memory with a value in its first word.
fn filled(gpu: &Gpu, value: u64) -> RawMemory {
    let memory = create(gpu);
    let mut range = Range::new(gpu, 1);
    range.map(0, memory, Access::ReadWrite);
    Queue::new(gpu).write(range.place(0), value);
    memory
}

fn denied(gpu: &Gpu) {
    let backend = gpu.backend();
    if can(gpu.caps().ranges, "ranges") {
        for refused in [
            backend.create_memory(gpu.device(), 0).map(drop),
            backend.reserve_range(gpu.device(), 0, None).map(drop),
        ] {
            assert!(matches!(refused, Err(Error::Invalid { .. })), "{refused:?}");
        }
        let file = std::fs::File::open("/dev/null").expect("it is there");
        let refused = backend.import_memory(gpu.device(), file.as_fd(), piece(gpu));
        assert!(matches!(refused, Err(Error::Invalid { .. })), "{refused:?}");
        return;
    }
    for refused in [
        backend.create_memory(gpu.device(), 4096).map(drop),
        backend.reserve_range(gpu.device(), 4096, None).map(drop),
    ] {
        assert!(
            matches!(refused, Err(Error::Unsupported { .. })),
            "{refused:?}"
        );
    }
}

fn shown(gpu: &Gpu) {
    if !can(gpu.caps().ranges, "ranges") {
        return;
    }
    let (memory, queue) = (create(gpu), Queue::new(gpu));
    let (mut first, mut second) = (Range::new(gpu, 1), Range::new(gpu, 1));
    first.map(0, memory, Access::ReadWrite);
    queue.write(first.place(0), 7);
    // At two places at once, and at the second to read only.
    second.map(0, memory, Access::ReadOnly);
    assert_eq!(queue.read(second.place(0)), 7);
    queue.write(first.place(0).offset(8), 8);
    assert_eq!(queue.read(second.place(0).offset(8)), 8);
    first.unmap(0);
    assert_eq!(queue.read(second.place(0)), 7);
    first.map(0, memory, Access::ReadOnly);
    assert_eq!(queue.read(first.place(0).offset(8)), 8);
    drop((first, second));
    release(gpu, memory);
}

fn grown(gpu: &Gpu) {
    if !can(gpu.caps().ranges, "ranges") {
        return;
    }
    let (mut range, queue) = (Range::new(gpu, 4), Queue::new(gpu));
    let mut all = Vec::new();
    for number in 0..4 {
        let memory = create(gpu);
        range.map(number, memory, Access::ReadWrite);
        all.push(memory);
        // One fill over all that is mapped, and every word of the pieces before is still what it
        // was.
        let (byte, len) = (number as u8 + 1, (number + 1) * piece(gpu));
        // SAFETY: `fill` asks for a live stream and a range that is valid until it is done: waited
        // for by the reads.
        unsafe { gpu.backend().fill(queue.raw(), range.range.base, byte, len) }.expect("it queues");
        for seen in 0..=number {
            assert_eq!(queue.read(range.place(seen)), u64::from_ne_bytes([byte; 8]));
            assert_eq!(
                queue.read(range.place(seen).offset(piece(gpu) - 8)),
                u64::from_ne_bytes([byte; 8])
            );
        }
    }
    range.unmap(1);
    assert_eq!(
        queue.read(range.place(2)),
        u64::from_ne_bytes([4; 8]),
        "the pieces around one that went stay"
    );
    drop(range);
    all.into_iter().for_each(|memory| release(gpu, memory));
}

fn replaced(gpu: &Gpu) {
    if !can(gpu.caps().ranges, "ranges") {
        return;
    }
    let (old, new, queue) = (filled(gpu, 1), filled(gpu, 2), Queue::new(gpu));
    let mut range = Range::new(gpu, 1);
    for round in 0..3 {
        for (memory, value) in [(old, 1), (new, 2)] {
            range.map(0, memory, Access::ReadOnly);
            assert_eq!(queue.read(range.place(0)), value, "in round {round}");
            range.unmap(0);
        }
    }
    drop(range);
    [old, new]
        .into_iter()
        .for_each(|memory| release(gpu, memory));
}

fn wanted(gpu: &Gpu) {
    if !can(gpu.caps().ranges, "ranges") {
        return;
    }
    let taken = Range::new(gpu, 2);
    let base = taken.range.base;
    let refused = Range::at(gpu, 2, Some(base)).map(|range| range.range);
    assert!(
        matches!(
            refused,
            Err(Error::Invalid {
                what: "the wanted address",
                ..
            })
        ),
        "{refused:?}"
    );
    drop(taken);
    // Other cases may take it meanwhile: then it is refused, and never another one.
    match Range::at(gpu, 2, Some(base)) {
        Ok(range) => assert_eq!(range.range.base, base),
        Err(error) => assert!(
            matches!(
                error,
                Error::Invalid {
                    what: "the wanted address",
                    ..
                }
            ),
            "{error}"
        ),
    }
}

fn outlives(gpu: &Gpu) {
    if !can(gpu.caps().ranges, "ranges") {
        return;
    }
    let (memory, queue) = (filled(gpu, 5), Queue::new(gpu));
    // SAFETY: `export_memory` asks for live memory: just made.
    let fd = unsafe { gpu.backend().export_memory(memory) }.expect("it exports");
    let mut range = Range::new(gpu, 1);
    range.map(0, memory, Access::ReadOnly);
    release(gpu, memory);
    assert_eq!(queue.read(range.place(0)), 5, "a mapping keeps its memory");
    range.unmap(0);
    // Only the descriptor keeps it from here on.
    let again = gpu
        .backend()
        .import_memory(gpu.device(), fd.as_fd(), piece(gpu))
        .expect("it imports");
    drop(fd);
    range.map(0, again, Access::ReadOnly);
    assert_eq!(
        queue.read(range.place(0)),
        5,
        "a descriptor keeps its memory"
    );
    drop(range);
    release(gpu, again);
}

fn wrong_length(gpu: &Gpu) {
    if !can(gpu.caps().ranges, "ranges") {
        return;
    }
    let memory = create(gpu);
    // SAFETY: `export_memory` asks for live memory: just made.
    let fd = unsafe { gpu.backend().export_memory(memory) }.expect("it exports");
    let range = Range::new(gpu, 2);
    // At the import, or where the driver does not tell the length, at the mapping.
    let refused = match gpu
        .backend()
        .import_memory(gpu.device(), fd.as_fd(), 2 * piece(gpu))
    {
        Ok(imported) => {
            // SAFETY: `map_memory` asks for live memory and free addresses: just made.
            let refused = unsafe {
                gpu.backend()
                    .map_memory(range.place(0), imported, Access::ReadOnly)
            };
            release(gpu, imported);
            refused
        }
        Err(error) => Err(error),
    };
    assert!(matches!(refused, Err(Error::Invalid { .. })), "{refused:?}");
    release(gpu, memory);
}

fn own_call(gpu: &Gpu) {
    if !can(gpu.caps().ranges, "ranges") {
        return;
    }
    let (memory, backend) = (create(gpu), gpu.backend());
    let mut range = Range::new(gpu, 2);
    range.map(1, memory, Access::ReadWrite);
    let at = range.place(1);
    let inside = at.offset(100);
    assert_eq!(backend.address_range(inside).expect("it is known").base, at);
    let info = backend.classify(inside).expect("it is known");
    assert_eq!(
        (info.kind, info.device, info.sharing),
        (MemoryKind::Piece, Some(gpu.device()), None)
    );
    assert!(backend.export_fd(at).is_err() && backend.export_handle(at).is_err());
    // SAFETY: `free` asks for what `alloc` gave: every backend's table refuses what it did not.
    assert!(unsafe { backend.free(at) }.is_err());
    // SAFETY: `close` asks for what was imported whole: every backend's table refuses what was not.
    assert!(unsafe { backend.close(at) }.is_err());
    // SAFETY: `unmap_memory` asks for what was mapped there: every backend's table refuses what was
    // not.
    assert!(unsafe { backend.unmap_memory(range.place(0)) }.is_err());
    range.unmap(1);
    drop(range);
    release(gpu, memory);
}

fn stored_producer(gpu: &Gpu, pipe: &mut Pipe) {
    if !can(gpu.caps().ranges, "ranges") {
        return;
    }
    let memory = filled(gpu, 11);
    // SAFETY: `export_memory` asks for live memory: just made.
    let fd = unsafe { gpu.backend().export_memory(memory) }.expect("it exports");
    // Nothing here keeps it from now on but the descriptor on its way.
    release(gpu, memory);
    let range = Range::new(gpu, 1);
    pipe.send_fd(&range.range.base.0.to_le_bytes(), fd.as_fd());
    drop(fd);
    pipe.meet();
}

fn stored_consumer(gpu: &Gpu, pipe: &mut Pipe) {
    if !can(gpu.caps().ranges, "ranges") {
        return;
    }
    let (base, fd) = pipe.receive_fd::<8>();
    pipe.meet();
    let base = DevicePtr(u64::from_le_bytes(base));
    let memory = gpu
        .backend()
        .import_memory(gpu.device(), fd.as_fd(), piece(gpu))
        .expect("it imports");
    drop(fd);
    // At the producer's address if nothing of this process lies there.
    let mut range = Range::at(gpu, 1, Some(base)).unwrap_or_else(|_| Range::new(gpu, 1));
    range.map(0, memory, Access::ReadOnly);
    release(gpu, memory);
    assert_eq!(Queue::new(gpu).read(range.place(0)), 11);
}
