//! Events in one process.

use gpu_ipc::backend::{EventKind, RawEvent};
use gpu_ipc::{Error, Gpu};

use crate::queue::{Queue, alloc, free};
use crate::{Case, wait_until};

pub(crate) const CASES: &[Case] = &[
    Case {
        name: "event::one_that_was_never_recorded_is_done",
        run: never_recorded,
    },
    Case {
        name: "event::is_done_after_the_work_before_it",
        run: after_the_work,
    },
    Case {
        name: "event::orders_two_streams",
        run: orders,
    },
    Case {
        name: "event::a_wait_keeps_what_was_recorded_when_it_was_queued",
        run: kept,
    },
    Case {
        name: "event::a_wait_is_not_ended_by_a_later_recording",
        run: not_overtaken,
    },
    Case {
        name: "event::a_local_one_has_no_handle",
        run: no_handle,
    },
];

/// An event that is destroyed when it is dropped.
pub(crate) struct Mark<'a> {
    gpu: &'a Gpu,
    pub raw: RawEvent,
}

impl<'a> Mark<'a> {
    pub fn new(gpu: &'a Gpu, kind: EventKind) -> Mark<'a> {
        Mark {
            gpu,
            raw: gpu
                .backend()
                .create_event(gpu.device(), kind)
                .expect("an event"),
        }
    }

    /// Takes an event that was opened.
    pub fn opened(gpu: &'a Gpu, raw: RawEvent) -> Mark<'a> {
        Mark { gpu, raw }
    }

    pub fn record(&self, queue: &Queue<'_>) {
        // SAFETY: `record_event` asks for a live event and stream of one device: both are the
        // case's.
        unsafe { self.gpu.backend().record_event(self.raw, queue.raw()) }.expect("it queues");
    }

    pub fn is_done(&self) -> bool {
        // SAFETY: `query_event` asks for a live event: `self` keeps it.
        unsafe { self.gpu.backend().query_event(self.raw) }.expect("it tells")
    }

    pub fn hold_up(&self, queue: &Queue<'_>) {
        // SAFETY: `stream_wait_event` asks for a live stream and event: both are the case's.
        unsafe { self.gpu.backend().stream_wait_event(queue.raw(), self.raw) }.expect("it queues");
    }
}

impl Drop for Mark<'_> {
    fn drop(&mut self) {
        // SAFETY: `destroy_event` asks for a live event that nobody uses afterwards: its owner
        // goes.
        let _ = unsafe { self.gpu.backend().destroy_event(self.raw) };
    }
}

fn never_recorded(gpu: &Gpu) {
    assert!(Mark::new(gpu, EventKind::Local).is_done());
}

fn after_the_work(gpu: &Gpu) {
    let (queue, mark) = (Queue::new(gpu), Mark::new(gpu, EventKind::Local));
    let go = queue.hold();
    mark.record(&queue);
    assert!(!mark.is_done());
    drop(go);
    wait_until("the event", || mark.is_done());
}

fn orders(gpu: &Gpu) {
    let (first, second, mark) = (
        Queue::new(gpu),
        Queue::new(gpu),
        Mark::new(gpu, EventKind::Local),
    );
    let memory = alloc(gpu, 4096);
    first.write(memory.base, 1);
    let go = first.hold();
    let two = 2u64.to_le_bytes();
    // SAFETY: `copy_to_device` asks for a live stream and ranges that are valid until it is done:
    // waited for below.
    unsafe {
        gpu.backend()
            .copy_to_device(first.raw(), memory.base, two.as_ptr(), 8)
    }
    .expect("it queues");
    mark.record(&first);
    mark.hold_up(&second);
    assert!(!second.is_idle(), "the second stream waits for nothing");
    drop(go);
    assert_eq!(second.read(memory.base), 2);
    first.synchronize();
    free(gpu, memory);
}

fn kept(gpu: &Gpu) {
    let (first, stuck, third) = (Queue::new(gpu), Queue::new(gpu), Queue::new(gpu));
    let mark = Mark::new(gpu, EventKind::Local);
    mark.record(&first);
    mark.hold_up(&third);
    let go = stuck.hold();
    mark.record(&stuck);
    // The third stream waits for the first recording, not for the second.
    third.synchronize();
    assert!(!mark.is_done());
    drop(go);
    wait_until("the second recording", || mark.is_done());
}

fn not_overtaken(gpu: &Gpu) {
    let (stuck, idle, third) = (Queue::new(gpu), Queue::new(gpu), Queue::new(gpu));
    let mark = Mark::new(gpu, EventKind::Local);
    let go = stuck.hold();
    mark.record(&stuck);
    mark.hold_up(&third);
    mark.record(&idle);
    wait_until("the second recording", || mark.is_done());
    assert!(
        !third.is_idle(),
        "a wait for the first recording was ended by the second"
    );
    drop(go);
    third.synchronize();
}

fn no_handle(gpu: &Gpu) {
    let mark = Mark::new(gpu, EventKind::Local);
    // SAFETY: `event_handle` asks for a live event: `mark` keeps it.
    let error =
        unsafe { gpu.backend().event_handle(mark.raw) }.expect_err("a local event has none");
    assert!(
        matches!(error, Error::Unsupported { .. } | Error::Driver { .. }),
        "{error}"
    );
}
