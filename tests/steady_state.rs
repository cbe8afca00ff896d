//! What a thread allocates in the steady state: nothing where it is said to allocate nothing.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

use gpu_ipc::backend::DeviceId;
use gpu_ipc::host::{HostBackend, HostConfig};
use gpu_ipc::{After, Claims, Gpu, Participant, Session, To, Wait};

thread_local!(static COUNT: Cell<u64> = const { Cell::new(0) });

/// The system's allocator, which counts for each thread.
struct Counting;

// SAFETY: `GlobalAlloc` asks that blocks are what `System` gives and takes: every call goes there
// unchanged.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        COUNT.with(|count| count.set(count.get() + 1));
        // SAFETY: `System::alloc` asks for what `alloc` asks for.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        // SAFETY: `System::dealloc` asks for a block that `System::alloc` gave: every one is.
        unsafe { System.dealloc(ptr, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Counts what `run` allocates on this thread, once it has done the same a hundred times before.
fn allocations(mut run: impl FnMut()) -> u64 {
    (0..100).for_each(|_| run());
    let before = COUNT.with(Cell::get);
    (0..1000).for_each(|_| run());
    COUNT.with(Cell::get) - before
}

#[test]
fn a_grant_and_what_is_said_about_it_allocate_nothing() {
    let dir = tempfile::tempdir().expect("a directory");
    let gpu = Gpu::new(
        HostBackend::new(HostConfig::default()).expect("it opens"),
        DeviceId(0),
    )
    .expect("a device");
    let session = Session::builder(gpu.clone())
        .socket(dir.path().join("s"))
        .open()
        .expect("a session");
    let participant = Participant::builder(gpu)
        .connect(session.socket_path())
        .expect("connected");
    let block = session.alloc(4096).expect("there is room");
    let to = To::Participant(participant.id());

    // The participant is told of each grant that is taken back: a message that nobody waits for.
    let cancelled = allocations(|| {
        let descriptor = block.share(to, After::Done).expect("shared");
        assert!(block.cancel(&descriptor).expect("it is ours"));
        // What a participant does not read is kept, which takes memory.
        while participant.next_notice().is_none() {
            std::thread::yield_now();
        }
    });
    assert_eq!(cancelled, 0, "a grant, its cancel, and the message");

    let tickets = allocations(|| {
        let ticket = block
            .share(To::Ticket(Claims::Once), After::Done)
            .expect("a ticket");
        assert!(block.cancel(&ticket).expect("it is ours"));
    });
    // Rows are kept for a while and used again: the table grows until then.
    assert!(tickets < 30, "{tickets} allocations for 1,000 tickets");

    let leases = allocations(|| {
        let descriptor = block.share(to, After::Done).expect("shared");
        drop(
            participant
                .claim(descriptor.as_bytes(), Wait::None, None)
                .expect("claimed"),
        );
        session.collect();
    });
    assert_eq!(leases, 0, "grant, claim, release and retire");

    let held = participant.claim(
        block.share(to, After::Done).expect("shared").as_bytes(),
        Wait::None,
        None,
    );
    let held = held.expect("claimed");
    let handles = allocations(|| {
        drop((
            held.clone(),
            held.slice(0..16).expect("inside"),
            held.state(),
        ))
    });
    assert_eq!(handles, 0, "clones and slices of what is held");
}
