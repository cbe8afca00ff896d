//! What a forked child of a busy process gets from each call on what its parent has.

use std::io::{PipeReader, Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;

use gpu_ipc::allocators::{AllocatorAttributes, Arena, ArenaOptions, ProcessState, VirtualDevice};
use gpu_ipc::backend::{Backends, EventKind, HostMemory, Sharing};
use gpu_ipc::participant::GraphBlocks;
use gpu_ipc::session::{AdoptToken, DepositId, Loan, Released, ShareOptions};
use gpu_ipc::{
    After, ClaimError, Claims, Descriptor, Error, Gpu, Participant, ReceivedBlock, Result,
    SentBlock, Session, Stream, To, Wait, detect,
};
use harness::{Forked, WATCHDOG};

/// One of each, of a process that forks.
pub struct Belongings {
    pub gpu: Gpu,
    pub stream: Stream,
    pub session: Session,
    pub participant: Participant,
    pub received: ReceivedBlock,
    pub sent: SentBlock,
}

/// A call: its name, and whether a child is refused it.
type Call<'a> = (&'static str, Box<dyn Fn() -> bool + 'a>);

fn refused<T>(done: Result<T>) -> bool {
    matches!(done, Err(Error::Forked { .. }))
}

fn unclaimed<T>(done: Result<T, ClaimError>) -> bool {
    matches!(done, Err(ClaimError::Forked))
}

fn connection() -> OwnedFd {
    UnixStream::pair().expect("a pair").0.into()
}

/// Lists the calls, and their names apart, which another case compares with the sources.
macro_rules! calls {
    ($with:ident: $($name:literal => $call:expr;)*) => {
        pub const NAMES: &[&str] = &[$($name),*];

        fn calls<'a>($with: &'a Prepared) -> Vec<Call<'a>> {
            vec![$(($name, Box::new(move || $call))),*]
        }
    };
}

/// What a call needs besides, made by the parent.
struct Prepared {
    own: Belongings,
    connecting: gpu_ipc::participant::Connecting,
    graph: GraphBlocks,
    backends: Backends,
    detected: gpu_ipc::backend::Detected,
    state: ProcessState,
    arena: Arc<Arena>,
    options: ShareOptions,
    ticket: Descriptor,
    loan: Loan,
    released: Released,
    /// For a call that takes a block; the parent's other threads leave it alone.
    spare: Mutex<Option<SentBlock>>,
}

const TICKET: To = To::Ticket(Claims::Once);

calls! { with:
    "Gpu::check_fork" => refused(with.own.gpu.check_fork());
    "Stream::create" => refused(Stream::create(&with.own.gpu));
    "Stream::default_of" => refused(Stream::default_of(&with.own.gpu));
    // SAFETY: `borrow` asks for a stream that lives: the legacy stream does, and is not captured.
    "Stream::borrow" => refused(unsafe { Stream::borrow(&with.own.gpu, 0, Arc::new(())) });
    "Stream::synchronize" => refused(with.own.stream.synchronize());
    "Stream::host_function" => refused(with.own.stream.host_function(|| ()));
    "Stream::behind" => refused(with.own.stream.behind());
    "Stream::refuse_capture" => refused(with.own.stream.refuse_capture("do not"));
    "Stream::write" => refused(with.own.stream.write(&with.own.sent, b"x"));
    "Stream::read" => refused(with.own.stream.read(&with.own.received, &mut [0]));
    "Stream::fill" => refused(with.own.stream.fill(&with.own.sent, 1));
    "SessionBuilder::open" => {
        let path = with.own.session.socket_path().with_extension("child");
        refused(Session::builder(with.own.gpu.clone()).socket(path).open())
    };
    "Session::accept" => refused(with.own.session.accept(connection()));
    "Session::alloc" => refused(with.own.session.alloc(1));
    "Session::alloc_within" => refused(with.own.session.alloc_within(1, WATCHDOG));
    "Session::share_many" => {
        let grants = [(&with.own.sent, TICKET)];
        refused(with.own.session.share_many(&grants, After::Done, &with.options))
    };
    "Session::share_many_with" => {
        let grants = [(&with.own.sent, TICKET, &[0; 64])];
        refused(with.own.session.share_many_with(&grants, After::Done, &with.options))
    };
    // SAFETY: `adopt` asks that the range stays and that no block overlaps it: it is refused.
    "Session::adopt" => refused(unsafe {
        with.own.session.adopt(with.own.sent.device_ptr(), 1, AdoptToken(1))
    });
    "Session::wait_for_participants" => {
        refused(with.own.session.wait_for_participants(9, Some(WATCHDOG)))
    };
    "Session::revoke" => refused(with.own.session.revoke(&with.ticket));
    "Session::deposit" => refused(with.own.session.deposit(DepositId([1; 16]), connection()));
    "Session::fetch" => refused(with.own.session.fetch(DepositId([1; 16])));
    "Session::deposits" => with.own.session.deposits() == 0;
    "Session::lend" => {
        let spare = with.spare.lock().map_or(None, |mut spare| spare.take());
        spare.is_some_and(|spare| refused(with.own.session.lend(spare, After::Done)))
    };
    "Session::trim" => refused(with.own.session.trim());
    "Session::collect" => with.own.session.collect().tokens.is_empty();
    "Session::stats" => with.own.session.stats().live_blocks == 0;
    "Session::participants" => with.own.session.participants().is_empty();
    "Session::participant_name" => {
        with.own.session.participant_name(with.own.participant.id()).is_none()
    };
    "Session::next_notice" => with.own.session.next_notice().is_none();
    "Session::shutdown" => !with.own.session.shutdown(WATCHDOG).clean;
    "SentBlock::share" => refused(with.own.sent.share(TICKET, After::Done));
    "SentBlock::share_with" => refused(with.own.sent.share_with(TICKET, After::Done, &with.options));
    "SentBlock::part" => refused(with.own.sent.part(0, 1, AdoptToken(1)));
    "SentBlock::cancel" => refused(with.own.sent.cancel(&with.ticket));
    "SentBlock::used_on" => refused(with.own.sent.used_on(&with.own.stream));
    "SentBlock::wait_released" => refused(with.own.sent.wait_released(Some(WATCHDOG)));
    "SentBlock::lend" => refused(with.own.sent.lend(After::Done));
    "Loan::share" => refused(with.loan.share(TICKET));
    "Loan::share_with" => refused(with.loan.share_with(TICKET, &with.options));
    "Loan::into_block" => {
        // A copy of what the child drops, so that only this call could take a lock.
        // SAFETY: `read` asks for a valid value: the loan is one. It is given up without a drop.
        let loan = unsafe { std::ptr::read(&raw const with.loan) };
        std::mem::forget(loan.into_block());
        true
    };
    "Released::wait" => refused(with.released.wait(Some(WATCHDOG)));
    "SentBlock::slice" => refused(with.own.sent.slice(..1));
    "SentBlock::host_bytes" => with.own.sent.host_bytes().is_none();
    "ParticipantBuilder::connect" => {
        let builder = Participant::builder(with.own.gpu.clone());
        refused(builder.connect(with.own.session.socket_path()))
    };
    "ParticipantBuilder::connect_by" => {
        refused(Participant::builder(with.own.gpu.clone()).connect_by(connection()))
    };
    "ParticipantBuilder::start_connect" => {
        let builder = Participant::builder(with.own.gpu.clone());
        refused(builder.start_connect(with.own.session.socket_path()))
    };
    "Connecting::try_finish" => with.connecting.try_finish().is_some_and(refused);
    "Participant::claim" => unclaimed(with.own.participant.claim(&[], Wait::None, None));
    "Participant::try_claim" => unclaimed(with.own.participant.try_claim(&[], Wait::None));
    "Participant::claim_many" => {
        let claimed = with.own.participant.claim_many(&[[0u8; 192]], Wait::None, None);
        claimed.into_iter().all(unclaimed)
    };
    "Participant::deposit" => {
        unclaimed(with.own.participant.deposit(DepositId([1; 16]), connection(), None))
    };
    "Participant::fetch" => unclaimed(with.own.participant.fetch(DepositId([1; 16]), None));
    "Participant::prefetch" => unclaimed(with.own.participant.prefetch(&[[0u8; 192]]));
    "Participant::abandon" => {
        with.own.participant.abandon(&[]);
        true
    };
    "Participant::next_notice" => with.own.participant.next_notice().is_none();
    "Participant::close" => refused(with.own.participant.clone().close(None));
    "ReceivedBlock::used_on" => refused(with.own.received.used_on(&with.own.stream));
    "ReceivedBlock::wait" => unclaimed(with.own.received.wait(Wait::None, None));
    "ReceivedBlock::slice" => refused(with.own.received.slice(..1));
    "ReceivedBlock::forward" => unclaimed(with.own.received.forward(TICKET, None));
    "ReceivedBlock::forward_with" => {
        unclaimed(with.own.received.forward_with(TICKET, &[0; 64], None))
    };
    "ReceivedBlock::host_bytes" => with.own.received.host_bytes().is_none();
    "GraphBlocks::launched_on" => refused(with.graph.launched_on(&with.own.stream));
    "Gpu::backend().alloc" => {
        refused(with.own.gpu.backend().alloc(with.own.gpu.device(), 1, Sharing::Fd))
    };
    "Gpu::backend().host_alloc" => {
        refused(with.own.gpu.backend().host_alloc(with.own.gpu.device(), 1, HostMemory::default()))
    };
    "Gpu::backend().create_event" => {
        refused(with.own.gpu.backend().create_event(with.own.gpu.device(), EventKind::Local))
    };
    "Gpu::backend().memory_info" => refused(with.own.gpu.backend().memory_info(with.own.gpu.device()));
    "Gpu::backend().classify" => refused(with.own.gpu.backend().classify(with.own.sent.device_ptr()));
    "Gpu::new" => refused(Gpu::new(with.own.gpu.backend().clone(), with.own.gpu.device()));
    "Backends::get" => refused(with.backends.get(with.own.gpu.kind()));
    "Detected::backend" => refused(with.detected.backend(with.own.gpu.kind()));
    "Detected::first" => refused(with.detected.first(with.own.gpu.kind()));
    "Arena::new" => refused(Arena::new(with.own.gpu.clone(), ArenaOptions::default()));
    "Arena::take" => refused(gpu_ipc::backend::RegionSource::take(&*with.arena, 1, 1));
    "ProcessState::arena" => refused(with.state.arena(VirtualDevice(0)));
    "ProcessState::allocator" => {
        refused(with.state.allocator(VirtualDevice(0), AllocatorAttributes::default()))
    };
    "ProcessState::host_allocator" => refused(with.state.host_allocator(None, None));
    "ProcessState::tear_down_all" => refused(with.state.tear_down_all());
    "ProcessState::gpus" => with.state.gpus().is_empty();
}

/// Forks so many children, one after the other, while three threads use the device, the session and
/// the allocators; each child makes every call, then drops all that it has of its parent's.
///
/// # Errors
///
/// The call that a child hung in, was let through, or died of.
pub fn call_in_children(own: Belongings, children: u32) -> Result<(), String> {
    let builder = Participant::builder(own.gpu.clone());
    let text = |error: Error| error.to_string();
    let stream = &own.stream;
    let lent = own.session.alloc(64).map_err(text)?;
    let loan = own
        .session
        .lend(lent, After::Stream(stream))
        .map_err(text)?;
    let prepared = Prepared {
        connecting: builder
            .start_connect(own.session.socket_path())
            .map_err(text)?,
        graph: GraphBlocks::new(),
        backends: Backends::default(),
        detected: detect().map_err(text)?,
        state: ProcessState::new([own.gpu.clone()]),
        arena: Arena::new(own.gpu.clone(), ArenaOptions::default()).map_err(text)?,
        options: ShareOptions::default(),
        spare: Mutex::new(Some(own.session.alloc(64).map_err(text)?)),
        ticket: own.sent.share(TICKET, After::Done).map_err(text)?,
        released: loan.released(),
        loan,
        own,
    };
    let ends = AtomicBool::new(false);
    thread::scope(|scope| {
        for _ in 0..3 {
            scope.spawn(|| {
                while !ends.load(Ordering::Relaxed) {
                    keep_busy(&prepared);
                }
            });
        }
        let done = (0..children).try_for_each(|_| call_in_a_child(&prepared));
        ends.store(true, Ordering::Relaxed);
        done
    })
}

/// Takes each lock that a child might find taken.
fn keep_busy(with: &Prepared) {
    let Belongings {
        gpu, session, sent, ..
    } = &with.own;
    let made = Stream::create(gpu).and_then(|stream| {
        stream.synchronize()?;
        Stream::default_of(gpu)
    });
    let shared = session.alloc(64).and_then(|block| {
        let ticket = block.share(TICKET, After::Done)?;
        block.cancel(&ticket)
    });
    let state = with.state.host_allocator(None, None).map(drop);
    let region = gpu_ipc::backend::RegionSource::take(&*with.arena, 64, 1);
    let region = region.map(|piece| gpu_ipc::backend::RegionSource::give_back(&*with.arena, piece));
    let known = with.backends.get(gpu.kind()).map(drop);
    let used = sent.used_on(&with.own.stream);
    for done in [made.map(drop), shared.map(drop), state, region, known, used] {
        done.expect("the parent's own calls work");
    }
}

fn call_in_a_child(prepared: &Prepared) -> Result<(), String> {
    let (progress, mut told) = std::io::pipe().map_err(|error| error.to_string())?;
    let calls = calls(prepared);
    let call_all = || {
        for (number, (_, is_refused)) in calls.iter().enumerate() {
            let _ = told.write_all(&[number as u8]);
            if !is_refused() {
                return 1;
            }
        }
        let _ = told.write_all(&[calls.len() as u8]);
        // SAFETY: `read` asks for a valid value: `prepared` is one. Both are dropped in one process
        // each: the parent's stays as it is, since a child's memory is its own.
        drop(unsafe { std::ptr::read(prepared) });
        0
    };
    // SAFETY: `fork` asks that the child of a process with threads does only what is safe there: it
    // allocates with the C library's allocator, which glibc keeps usable in a child, and makes the
    // calls that are under test.
    let child = unsafe { harness::fork(call_all) }.map_err(|error| error.to_string())?;
    drop(told);
    let names: Vec<&str> = calls.iter().map(|(name, _)| *name).collect();
    ends_well(child, progress, &names)
}

/// Waits for a child under the watchdog, and names the call that it did not get through.
fn ends_well(child: Forked, mut progress: PipeReader, names: &[&str]) -> Result<(), String> {
    let ended = child.ends_within(WATCHDOG / 4);
    // One that hangs is killed, so that its pipe ends.
    let code = if ended {
        child.code()
    } else {
        drop(child);
        None
    };
    let mut passed = Vec::new();
    progress
        .read_to_end(&mut passed)
        .map_err(|error| error.to_string())?;
    let last = passed.last().map_or("nothing", |&number| {
        names
            .get(usize::from(number))
            .copied()
            .unwrap_or("the drops")
    });
    match (ended, code) {
        (true, Some(0)) => Ok(()),
        (true, Some(1)) => Err(format!("a child was not refused {last}")),
        (true, code) => Err(format!("a child died of {last}: {code:?}")),
        (false, _) => Err(format!("a child hung in {last}")),
    }
}
