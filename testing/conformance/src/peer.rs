//! Two processes: memory, events and words that one makes and the other opens.

use crate::can;
use std::os::fd::AsFd;
use std::sync::atomic::Ordering;

use gpu_ipc::backend::{Access, DevicePtr, EventHandle, EventKind, MemHandle, Sharing, StreamOp};
use gpu_ipc::{Error, Gpu};

use crate::event::Mark;
use crate::queue::{Queue, alloc, free};
use crate::word::Words;
use crate::{PeerCase, Pipe};

pub(crate) const CASES: &[PeerCase] = &[
    PeerCase {
        name: "peer::sees_the_same_device",
        producer: same_device_producer,
        consumer: same_device_consumer,
    },
    PeerCase {
        name: "peer::opens_a_handle_and_both_write",
        producer: handle_producer,
        consumer: handle_consumer,
    },
    PeerCase {
        name: "peer::opens_a_handle_twice",
        producer: twice_producer,
        consumer: twice_consumer,
    },
    PeerCase {
        name: "peer::imports_a_descriptor_and_both_write",
        producer: fd_producer,
        consumer: fd_consumer,
    },
    PeerCase {
        name: "peer::maps_descriptors_side_by_side",
        producer: several_producer,
        consumer: several_consumer,
    },
    PeerCase {
        name: "peer::imports_a_descriptor_to_read",
        producer: read_producer,
        consumer: read_consumer,
    },
    PeerCase {
        name: "peer::a_descriptor_outlives_the_allocation",
        producer: outlives_producer,
        consumer: outlives_consumer,
    },
    PeerCase {
        name: "peer::an_event_orders_both_ways",
        producer: event_producer,
        consumer: event_consumer,
    },
    PeerCase {
        name: "peer::a_word_written_there_is_waited_for_here",
        producer: word_producer,
        consumer: word_consumer,
    },
];

fn same_device_producer(gpu: &Gpu, pipe: &mut Pipe) {
    pipe.send(&gpu.uuid().0);
    pipe.meet();
}

fn same_device_consumer(gpu: &Gpu, pipe: &mut Pipe) {
    assert_eq!(pipe.receive::<16>(), gpu.uuid().0);
    pipe.meet();
}

/// Writes 1, waits until the peer has written 2 behind it, and reads that.
fn both_write_here(gpu: &Gpu, pipe: &mut Pipe, base: DevicePtr) {
    let queue = Queue::new(gpu);
    queue.write(base.offset(4096), 1);
    pipe.meet();
    pipe.meet();
    assert_eq!(queue.read(base.offset(4104)), 2);
}

fn both_write_there(gpu: &Gpu, pipe: &mut Pipe, base: DevicePtr) {
    let queue = Queue::new(gpu);
    pipe.meet();
    assert_eq!(queue.read(base.offset(4096)), 1);
    queue.write(base.offset(4104), 2);
    pipe.meet();
}

fn close(gpu: &Gpu, base: DevicePtr) {
    // SAFETY: `close` asks for a mapping that was not closed and that nobody uses: the case is done
    // with it.
    unsafe { gpu.backend().close(base) }.expect("it closes");
}

fn handle_producer(gpu: &Gpu, pipe: &mut Pipe) {
    if can(gpu.caps().handle, "handles") {
        let memory = gpu
            .backend()
            .alloc(gpu.device(), 1 << 16, Sharing::Handle)
            .expect("there is room");
        pipe.send(
            &gpu.backend()
                .export_handle(memory.base)
                .expect("it has a handle")
                .0,
        );
        both_write_here(gpu, pipe, memory.base);
        pipe.meet();
        free(gpu, memory);
    }
}

fn handle_consumer(gpu: &Gpu, pipe: &mut Pipe) {
    if can(gpu.caps().handle, "handles") {
        let base = gpu
            .backend()
            .open_handle(gpu.device(), &MemHandle(pipe.receive()))
            .expect("it opens");
        assert!(gpu.backend().address_range(base).expect("it is known").len >= 1 << 16);
        assert!(
            gpu.backend()
                .classify(base)
                .expect("it is known")
                .sharing
                .is_none(),
            "imported memory is exportable"
        );
        assert!(
            gpu.backend().export_handle(base).is_err(),
            "opened memory was exported"
        );
        both_write_there(gpu, pipe, base);
        close(gpu, base);
        pipe.meet();
    }
}

fn twice_producer(gpu: &Gpu, pipe: &mut Pipe) {
    if can(gpu.caps().handle, "handles") {
        let memory = gpu
            .backend()
            .alloc(gpu.device(), 1 << 16, Sharing::Handle)
            .expect("there is room");
        let handle = gpu
            .backend()
            .export_handle(memory.base)
            .expect("it has a handle");
        pipe.send(&handle.0);
        both_write_here(gpu, pipe, memory.base);
        pipe.meet();
        free(gpu, memory);
    }
}

fn twice_consumer(gpu: &Gpu, pipe: &mut Pipe) {
    if can(gpu.caps().handle, "handles") {
        let handle = MemHandle(pipe.receive());
        let open = || {
            gpu.backend()
                .open_handle(gpu.device(), &handle)
                .expect("it opens")
        };
        let (first, second) = (open(), open());
        // What is left after the first close is still mapped.
        close(gpu, first);
        both_write_there(gpu, pipe, second);
        close(gpu, second);
        assert!(
            // SAFETY: `close` asks for a mapping: one that is closed already is refused by every
            // backend's table.
            unsafe { gpu.backend().close(second) }.is_err(),
            "opened twice and closed three times"
        );
        pipe.meet();
    }
}

fn fd_producer(gpu: &Gpu, pipe: &mut Pipe) {
    if can(gpu.caps().fd, "file descriptors") {
        let memory = gpu
            .backend()
            .alloc(gpu.device(), 1 << 16, Sharing::Fd)
            .expect("there is room");
        let fd = gpu
            .backend()
            .export_fd(memory.base)
            .expect("it has a descriptor");
        pipe.send_fd(&memory.len.to_le_bytes(), fd.as_fd());
        both_write_here(gpu, pipe, memory.base);
        pipe.meet();
        free(gpu, memory);
    }
}

fn fd_consumer(gpu: &Gpu, pipe: &mut Pipe) {
    if can(gpu.caps().fd, "file descriptors") {
        let (len, fd) = pipe.receive_fd();
        let len = u64::from_le_bytes(len);
        let import = |len| {
            gpu.backend()
                .import_fd(gpu.device(), fd.as_fd(), len, Access::ReadWrite)
        };
        assert!(
            import(len + (1 << 30)).is_err(),
            "more was imported than there is"
        );
        assert!(import(0).is_err(), "nothing was imported");
        let base = import(len).expect("it imports");
        assert!(
            gpu.backend()
                .classify(base)
                .expect("it is known")
                .sharing
                .is_none(),
            "imported memory is exportable"
        );
        assert!(
            gpu.backend().export_fd(base).is_err(),
            "imported memory was exported"
        );
        both_write_there(gpu, pipe, base);
        assert!(
            // SAFETY: `free` asks for an allocation: another process' memory is refused by every
            // backend's table.
            unsafe { gpu.backend().free(base) }.is_err(),
            "another process' memory was freed"
        );
        close(gpu, base);
        assert!(
            // SAFETY: `close` asks for a mapping: one that is closed already is refused by every
            // backend's table.
            unsafe { gpu.backend().close(base) }.is_err(),
            "closed twice"
        );
        pipe.meet();
    }
}

fn outlives_producer(gpu: &Gpu, pipe: &mut Pipe) {
    if can(gpu.caps().fd, "file descriptors") {
        let memory = gpu
            .backend()
            .alloc(gpu.device(), 1 << 16, Sharing::Fd)
            .expect("there is room");
        Queue::new(gpu).write(memory.base, 77);
        let fd = gpu
            .backend()
            .export_fd(memory.base)
            .expect("it has a descriptor");
        pipe.send_fd(&memory.len.to_le_bytes(), fd.as_fd());
        drop(fd);
        free(gpu, memory);
        pipe.meet();
        pipe.meet();
    }
}

fn outlives_consumer(gpu: &Gpu, pipe: &mut Pipe) {
    if can(gpu.caps().fd, "file descriptors") {
        let (len, fd) = pipe.receive_fd();
        pipe.meet();
        let len = u64::from_le_bytes(len);
        let base = gpu
            .backend()
            .import_fd(gpu.device(), fd.as_fd(), len, Access::ReadWrite)
            .expect("it imports");
        drop(fd);
        assert_eq!(Queue::new(gpu).read(base), 77);
        close(gpu, base);
        pipe.meet();
    }
}

/// The pieces of a mapping of several.
const PIECES: u64 = 3;

fn several_producer(gpu: &Gpu, pipe: &mut Pipe) {
    if can(gpu.caps().fd, "file descriptors") {
        let (backend, queue) = (gpu.backend(), Queue::new(gpu));
        let make = |_| {
            backend
                .alloc(gpu.device(), 1 << 16, Sharing::Fd)
                .expect("there is room")
        };
        let pieces: Vec<_> = (0..PIECES).map(make).collect();
        for (number, piece) in (0..).zip(&pieces) {
            queue.write(piece.base, 10 * number);
            queue.write(piece.base.offset(piece.len - 8), 10 * number + 1);
            let fd = backend.export_fd(piece.base).expect("it has a descriptor");
            pipe.send_fd(&piece.len.to_le_bytes(), fd.as_fd());
        }
        if &pipe.receive::<1>() == b"+" {
            let [end, start] =
                [pieces[0].base.offset(pieces[0].len - 8), pieces[1].base].map(|at| queue.read(at));
            assert_eq!(
                (end, start),
                (0x7777_7777_7777_7777, 0x7777_7777_7777_7777),
                "written across the border there"
            );
        }
        pipe.meet();
        pieces.into_iter().for_each(|piece| free(gpu, piece));
    }
}

fn several_consumer(gpu: &Gpu, pipe: &mut Pipe) {
    if can(gpu.caps().fd, "file descriptors") {
        let backend = gpu.backend();
        let received: Vec<_> = (0..PIECES).map(|_| pipe.receive_fd::<8>()).collect();
        let len = u64::from_le_bytes(received[0].0);
        let import = |len| {
            let mut fds = received
                .iter()
                .map(|(_, fd)| Ok(fd.try_clone().expect("a descriptor is free")));
            backend.import_fds(gpu.device(), &mut fds, len, Access::ReadWrite)
        };
        let base = match import(len) {
            Ok(base) => base,
            Err(error) => {
                assert!(matches!(error, Error::Unsupported { .. }), "{error}");
                pipe.send(b"-");
                return pipe.meet();
            }
        };
        assert!(import(2 * len).is_err() && import(0).is_err() && import(len + 1).is_err());
        assert!(
            backend
                .import_fds(
                    gpu.device(),
                    &mut std::iter::empty(),
                    len,
                    Access::ReadWrite
                )
                .is_err()
        );
        let queue = Queue::new(gpu);
        for number in 0..PIECES {
            let start = base.offset(number * len);
            assert_eq!(
                (queue.read(start), queue.read(start.offset(len - 8))),
                (10 * number, 10 * number + 1)
            );
            let range = backend.address_range(start).expect("it is known");
            assert_eq!((range.base, range.len), (base, PIECES * len));
        }
        // SAFETY: `fill` asks for a live stream and a range that stays valid: it is waited for.
        unsafe { backend.fill(queue.raw(), base.offset(len - 8), 0x77, 16) }.expect("it queues");
        queue.synchronize();
        pipe.send(b"+");
        close(gpu, base);
        pipe.meet();
    }
}

fn read_producer(gpu: &Gpu, pipe: &mut Pipe) {
    if can(gpu.caps().read_only, "read-only mappings") {
        let memory = alloc(gpu, 1 << 16);
        Queue::new(gpu).write(memory.base, 42);
        let fd = gpu
            .backend()
            .export_fd(memory.base)
            .expect("it has a descriptor");
        pipe.send_fd(&memory.len.to_le_bytes(), fd.as_fd());
        pipe.meet();
        free(gpu, memory);
    }
}

fn read_consumer(gpu: &Gpu, pipe: &mut Pipe) {
    if can(gpu.caps().read_only, "read-only mappings") {
        let (len, fd) = pipe.receive_fd();
        let len = u64::from_le_bytes(len);
        let base = gpu
            .backend()
            .import_fd(gpu.device(), fd.as_fd(), len, Access::ReadOnly)
            .expect("it imports");
        // The mapping keeps the memory, not the descriptor.
        drop(fd);
        assert_eq!(Queue::new(gpu).read(base), 42);
        close(gpu, base);
        pipe.meet();
    }
}

fn event_producer(gpu: &Gpu, pipe: &mut Pipe) {
    if can(gpu.caps().event_ipc, "interprocess events") {
        let (queue, mark) = (Queue::new(gpu), Mark::new(gpu, EventKind::Interprocess));
        let go = queue.hold();
        mark.record(&queue);
        // SAFETY: `event_handle` asks for a live event: `mark` keeps it.
        pipe.send(
            &unsafe { gpu.backend().event_handle(mark.raw) }
                .expect("it has a handle")
                .0,
        );
        pipe.meet();
        drop(go);
        // The other process records it next, behind work of its own, and this one waits.
        pipe.meet();
        assert!(!mark.is_done(), "done before the work there");
        mark.hold_up(&queue);
        assert!(!queue.is_idle(), "a stream waits for nothing");
        pipe.meet();
        queue.synchronize();
        pipe.meet();
    }
}

fn event_consumer(gpu: &Gpu, pipe: &mut Pipe) {
    if can(gpu.caps().event_ipc, "interprocess events") {
        let raw = gpu
            .backend()
            .open_event(gpu.device(), &EventHandle(pipe.receive()))
            .expect("it opens");
        let (queue, mark) = (Queue::new(gpu), Mark::opened(gpu, raw));
        assert!(!mark.is_done(), "done before the work there");
        mark.hold_up(&queue);
        assert!(!queue.is_idle(), "a stream waits for nothing");
        pipe.meet();
        queue.synchronize();
        assert!(mark.is_done());
        let go = queue.hold();
        mark.record(&queue);
        pipe.meet();
        pipe.meet();
        drop(go);
        pipe.meet();
    }
}

fn word_producer(gpu: &Gpu, pipe: &mut Pipe) {
    if gpu.caps().stream_writes && gpu.caps().stream_waits {
        let (words, queue) = (Words::new(gpu), Queue::new(gpu));
        pipe.send_fd(b"w", words.file.as_fd());
        pipe.meet();
        words
            .batch(
                &queue,
                &[StreamOp::Write {
                    word: words.ptr(7),
                    value: 3,
                }],
            )
            .expect("it queues");
        queue.synchronize();
        pipe.meet();
    }
}

fn word_consumer(gpu: &Gpu, pipe: &mut Pipe) {
    if gpu.caps().stream_writes && gpu.caps().stream_waits {
        let (_, file) = pipe.receive_fd::<1>();
        let (words, queue) = (Words::map(gpu, file), Queue::new(gpu));
        words
            .batch(
                &queue,
                &[StreamOp::WaitGeq {
                    word: words.ptr(7),
                    value: 3,
                }],
            )
            .expect("it queues");
        assert!(!queue.is_idle());
        pipe.meet();
        queue.synchronize();
        assert_eq!(words.get(7).load(Ordering::Acquire), 3);
        pipe.meet();
    }
}
