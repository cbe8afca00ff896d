//! The way in and the way out: connections that end, stall or lie at every step, and what they
//! leave behind.

use std::collections::BTreeMap;
use std::fs;
use std::io::Write;
use std::net::{TcpListener, TcpStream};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc;
use std::time::Duration;

use gpu_ipc::session::{Departure, SessionNotice};
use gpu_ipc::{After, ClaimError, Claims, Participant, ParticipantId, Stream, To, Wait};
use harness::{WATCHDOG, wait_until};
use rustix::mm::{MapFlags, ProtFlags, mmap};
use rustix::net::{AddressFamily, Shutdown, SocketFlags, SocketType, socketpair};

use crate::stranger::{HELLO, Idler, REFUSED, Stranger, hear, hello, say};
use crate::{Case, Stage, open_gpu};

pub const CASES: &[Case] = &[
    (
        "connections::who_leaves_after_the_welcome_is_no_participant",
        leaves_after_the_welcome,
    ),
    (
        "connections::who_leaves_before_the_welcome_harms_no_share",
        leaves_before_the_welcome,
    ),
    (
        "connections::every_step_that_fails_leaves_nothing",
        every_step,
    ),
    (
        "connections::descriptors_that_take_long_to_close_keep_nobody",
        lingering,
    ),
    (
        "connections::a_connection_that_is_shut_for_writing_costs_nothing",
        half_closed,
    ),
    (
        "connections::a_producer_that_shuts_its_end_for_writing_costs_nothing",
        half_closed_producer,
    ),
    (
        "connections::words_are_unmapped_only_when_no_stream_owes_them_a_value",
        owed_words,
    ),
    ("connections::who_joins_and_leaves_is_told_by_name", told),
    (
        "connections::a_shut_down_session_leaves_no_socket",
        no_socket_left,
    ),
];

fn open_files() -> usize {
    fs::read_dir("/proc/self/fd")
        .expect("proc is mounted")
        .count()
}

/// Counter files that this process has mapped.
fn mapped_files() -> usize {
    let maps = fs::read_to_string("/proc/self/maps").expect("proc is mounted");
    maps.lines()
        .filter(|line| line.contains("gpu-ipc-counters"))
        .count()
}

/// How often this process has mapped one file.
fn mappings_of(inode: u64) -> usize {
    let maps = fs::read_to_string("/proc/self/maps").expect("proc is mounted");
    let inode = inode.to_string();
    maps.lines()
        .filter(|line| line.split_whitespace().nth(4) == Some(&inode))
        .count()
}

/// A connect that fails after its welcome: the process lives on.
fn leaves_after_the_welcome() {
    let stage = Stage::new();
    let idler = Idler::new();
    let (files, maps) = (open_files(), mapped_files());
    for _ in 0..300 {
        drop(Stranger::join(
            stage.session.socket_path(),
            &stage.gpu,
            idler.fd(),
        ));
    }
    wait_until("the rows to go", || {
        stage.session.participants() == [stage.honest.id()]
    });
    wait_until("their files to go", || {
        open_files() <= files && mapped_files() <= maps
    });
    assert_eq!(stage.session.stats().deaths, 0, "nobody died");
    stage.end();
}

/// Connections end between hello and welcome while a thread shares with everybody that is listed.
fn leaves_before_the_welcome() {
    let stage = Stage::new();
    let idler = Idler::new();
    let stream = Stream::create(&stage.gpu).expect("a stream");
    let (block, done) = (stage.block(), AtomicBool::new(false));
    let shared = AtomicU64::new(0);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !done.load(Ordering::Relaxed) {
                for id in stage.session.participants() {
                    if let Ok(descriptor) = block.share(To::Participant(id), After::Stream(&stream))
                    {
                        shared.fetch_add(1, Ordering::Relaxed);
                        block.cancel(&descriptor).expect("it is ours");
                    }
                }
            }
        });
        for n in 0..500 {
            let socket = Stranger::connect(stage.session.socket_path()).expect("it listens");
            say(&socket, HELLO, 0, &hello(&stage.gpu, 0), &[idler.fd()]).expect("said");
            // Sometimes it stays until it can be shared with.
            if n % 4 == 0 {
                let _ = hear(&socket);
            }
        }
        let before = shared.load(Ordering::Relaxed);
        wait_until("more shares", || shared.load(Ordering::Relaxed) > before);
        done.store(true, Ordering::Relaxed);
    });
    wait_until("the rows to go", || {
        stage.session.participants() == [stage.honest.id()]
    });
    drop((block, idler));
    stage.end();
}

/// Every way that a newcomer can fail in, one after the other: nothing stays of it, and the next is
/// served.
fn every_step() {
    let stage = Stage::new();
    let idler = Idler::new();
    let path = stage.session.socket_path().to_owned();
    let (pipe, _other) = std::io::pipe().expect("a pipe");
    let body = hello(&stage.gpu, 0);
    let connect = || Stranger::connect(&path).expect("it listens");
    let says = |number: u16, body: &[u8], fds: &[rustix::fd::BorrowedFd<'_>]| {
        let socket = connect();
        say(&socket, number, 0, body, fds).expect("said");
        socket
    };
    let mut other_device = body.clone();
    other_device[10] ^= 1;
    let cases: &[(&str, &dyn Fn() -> OwnedFd, bool)] = &[
        ("connects and goes", &connect, false),
        (
            "says nothing that makes sense",
            &|| says(77, b"nonsense", &[]),
            true,
        ),
        (
            "says hello with no pidfd",
            &|| says(HELLO, &body, &[]),
            true,
        ),
        (
            "says hello with a pipe for a pidfd",
            &|| says(HELLO, &body, &[pipe.as_fd()]),
            true,
        ),
        (
            "says hello for another device",
            &|| says(HELLO, &other_device, &[idler.fd()]),
            true,
        ),
        (
            "says hello with too many descendants",
            &|| says(HELLO, &hello(&stage.gpu, 201), &[idler.fd(); 202]),
            true,
        ),
        (
            "says hello and goes",
            &|| says(HELLO, &body, &[idler.fd()]),
            false,
        ),
        (
            "says hello and shuts its end",
            &|| {
                let socket = says(HELLO, &body, &[idler.fd()]);
                rustix::net::shutdown(&socket, Shutdown::Both).expect("shut");
                socket
            },
            false,
        ),
        (
            "shuts its end and says hello never",
            &|| {
                let socket = connect();
                rustix::net::shutdown(&socket, Shutdown::Write).expect("shut");
                socket
            },
            false,
        ),
        (
            "sends an empty packet",
            &|| {
                let socket = connect();
                rustix::net::send(&socket, b"", rustix::net::SendFlags::empty()).expect("sent");
                socket
            },
            false,
        ),
    ];
    let files = open_files();
    for (what, fail, refused) in cases {
        for _ in 0..3 {
            let socket = fail();
            if *refused {
                let heard = hear(&socket).unwrap_or_else(|| panic!("{what}: it is told nothing"));
                assert_eq!(heard.number, REFUSED, "{what}");
            }
            drop(socket);
        }
        wait_until(what, || {
            stage.session.participants() == [stage.honest.id()] && open_files() <= files
        });
        let next = Participant::builder(stage.gpu.clone())
            .connect(&path)
            .unwrap_or_else(|e| panic!("{what}: {e}"));
        drop(next);
        wait_until("the next to go", || {
            stage.session.participants() == [stage.honest.id()] && open_files() <= files
        });
    }
    stage.end();
}

/// A TCP connection whose close takes an hour, and the end that keeps it so.
fn slow_to_close() -> (OwnedFd, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let mut ours =
        TcpStream::connect(listener.local_addr().expect("an address")).expect("connected");
    let (theirs, _) = listener.accept().expect("accepted");
    rustix::net::sockopt::set_socket_linger(&ours, Some(Duration::from_secs(3600)))
        .expect("it lingers");
    ours.set_nonblocking(true).expect("not blocking");
    while ours.write(&[0; 65_536]).is_ok() {}
    (ours.into(), theirs)
}

/// Closes on a thread of its own: this process' copy may be the last.
fn let_go(closes: impl Send + 'static) {
    std::thread::spawn(move || drop(closes));
}

fn lingering() {
    let stage = Stage::new();
    let idler = Idler::new();
    let mut kept = Vec::new();
    for _ in 0..10 {
        // Instead of a hello, with one, and from one who is let in.
        let (slow, theirs) = slow_to_close();
        kept.push(theirs);
        let socket = Stranger::connect(stage.session.socket_path()).expect("it listens");
        say(&socket, 77, 0, b"nonsense", &[slow.as_fd()]).expect("said");
        let_go((socket, slow));
        let (slow, theirs) = slow_to_close();
        kept.push(theirs);
        let socket = Stranger::connect(stage.session.socket_path()).expect("it listens");
        say(&socket, HELLO, 0, &hello(&stage.gpu, 0), &[slow.as_fd()]).expect("said");
        let_go((socket, slow));
        let (slow, theirs) = slow_to_close();
        kept.push(theirs);
        let stranger = Stranger::join(stage.session.socket_path(), &stage.gpu, idler.fd());
        say(&stranger.socket, 77, 0, b"nonsense", &[slow.as_fd()]).expect("said");
        // And one that nobody reads any more when the connection is closed.
        say(&stranger.socket, 77, 0, b"nonsense", &[slow.as_fd()]).expect("said");
        let_go((stranger, slow));
    }
    stage.check();
    let late = Participant::builder(stage.gpu.clone())
        .timeout(Some(WATCHDOG))
        .connect(stage.session.socket_path());
    drop(late.expect("nobody waits for a stranger's close"));
    // A close ends when its other end does.
    drop(kept);
    stage.end();
}

/// How often this process' session thread went to sleep by itself.
fn sleeps() -> u64 {
    let tasks = fs::read_dir("/proc/self/task")
        .expect("proc is mounted")
        .flatten();
    let status = tasks.filter_map(|task| fs::read_to_string(task.path().join("status")).ok());
    let sessions = status.filter(|status| status.starts_with("Name:\tgpu-ipc-session\n"));
    let count = |status: String| {
        status.lines().find_map(|line| {
            line.strip_prefix("voluntary_ctxt_switches:\t")?
                .parse()
                .ok()
        })
    };
    sessions.filter_map(count).max().expect("it runs")
}

fn half_closed() {
    let stage = Stage::new();
    let idler = Idler::new();
    let stranger = Stranger::join(stage.session.socket_path(), &stage.gpu, idler.fd());
    rustix::net::shutdown(&stranger.socket, Shutdown::Write).expect("shut");
    wait_until("it to be granted nothing more", || {
        let block = stage.block();
        block
            .share(To::Participant(ParticipantId(stranger.id)), After::Done)
            .is_err()
    });
    // A thread that sleeps between two answers goes to sleep each time; one that spins answers, and
    // never does.
    let before = sleeps();
    wait_until("the session's thread to sleep between answers", || {
        gpu_ipc::admin::inspect(stage.session.socket_path(), Some(WATCHDOG)).expect("it answers");
        sleeps() >= before + 50
    });
    stage.check();
    drop(stranger);
    wait_until("its row to go", || {
        stage.session.participants() == [stage.honest.id()]
    });
    stage.end();
}

/// Threads of this process by number: name and state.
fn threads() -> BTreeMap<String, (String, char)> {
    let tasks = fs::read_dir("/proc/self/task")
        .expect("proc is mounted")
        .flatten();
    let stat = tasks.filter_map(|task| {
        Some((
            task.file_name(),
            fs::read_to_string(task.path().join("stat")).ok()?,
        ))
    });
    stat.map(|(number, stat)| {
        let (front, state) = stat.rsplit_once(") ").expect("a name in parentheses");
        let (_, name) = front.split_once('(').expect("a name in parentheses");
        (
            number.to_string_lossy().into_owned(),
            (name.to_owned(), state.chars().next().expect("a state")),
        )
    })
    .collect()
}

/// How often a thread of this process has given the processor away, or lost it.
fn switches(thread: &str) -> u64 {
    let status = fs::read_to_string(format!("/proc/self/task/{thread}/status")).expect("it runs");
    let counts = status
        .lines()
        .filter_map(|line| line.split_once("voluntary_ctxt_switches:\t"));
    counts
        .map(|(_, count)| count.parse::<u64>().expect("a number"))
        .sum()
}

/// The participant's thread has nothing more to hear, and a claim that waits ends.
fn half_closed_producer() {
    let stage = Stage::new();
    let (theirs, ours) = socketpair(
        AddressFamily::UNIX,
        SocketType::SEQPACKET,
        SocketFlags::CLOEXEC,
        None,
    )
    .expect("a pair");
    let copy = theirs.try_clone().expect("a descriptor");
    stage.session.accept(theirs).expect("it is open");
    let before = threads();
    let participant = Participant::builder(stage.gpu.clone())
        .connect_by(ours)
        .expect("welcomed");
    let mut thread = None;
    // It takes its name itself.
    wait_until("its thread", || {
        let is_new = |(number, (name, _)): &(String, (String, char))| {
            name == "gpu-ipc-partici" && !before.contains_key(number)
        };
        thread = threads().into_iter().find(is_new).map(|(number, _)| number);
        thread.is_some()
    });
    let thread = thread.expect("it is there");
    let block = stage.block();
    let ticket = block
        .share(To::Ticket(Claims::Once), After::Done)
        .expect("shared");
    rustix::net::shutdown(&copy, Shutdown::Write).expect("shut");
    let claimed = participant.claim(ticket.as_bytes(), Wait::None, Some(WATCHDOG));
    assert!(
        matches!(claimed, Err(ClaimError::ProducerGone)),
        "{claimed:?}"
    );
    // One that reads the same end again and again never sleeps.
    wait_until("the participant's thread to sleep", || {
        threads()[&thread].1 == 'S'
    });
    let before = switches(&thread);
    for _ in 0..100 {
        gpu_ipc::admin::inspect(stage.session.socket_path(), Some(WATCHDOG)).expect("it answers");
    }
    assert!(
        switches(&thread) < before + 10,
        "it wakes up for nothing: {} times",
        switches(&thread) - before
    );
    // The question may have come before the end was shut, or never.
    block.cancel(&ticket).expect("it is ours");
    drop((copy, block, participant));
    wait_until("its row to go", || {
        stage.session.participants() == [stage.honest.id()]
    });
    stage.end();
}

/// One that is slow with its hello, and from another process any number that say nothing.
/// A participant writes into its words that all is done, and leaves, while a stream has yet to
/// write there.
fn owed_words() {
    let stage = Stage::new();
    let mut idler = Idler::new();
    let stranger = Stranger::join(stage.session.socket_path(), &stage.gpu, idler.fd());
    let stream = Stream::create(&stage.gpu).expect("a stream");
    let (open, gate) = mpsc::channel::<()>();
    let wait = Box::new(move || {
        let _ = gate.recv();
    });
    // SAFETY: `host_function` asks for a live stream that nobody captures: this function keeps it
    // until the gate opens.
    unsafe { stage.gpu.backend().host_function(stream.raw(), wait) }.expect("queued");
    let block = stage.block();
    let to = To::Participant(ParticipantId(stranger.id));
    let descriptor = block.share(to, After::Stream(&stream)).expect("shared");
    let inode = rustix::fs::fstat(&stranger.files[1])
        .expect("it is open")
        .st_ino;
    assert_eq!(mappings_of(inode), 1, "the session has it mapped");
    // SAFETY: `mmap` at no address of ours asks for nothing.
    let words = unsafe {
        mmap(
            std::ptr::null_mut(),
            8192,
            ProtFlags::READ | ProtFlags::WRITE,
            MapFlags::SHARED,
            &stranger.files[1],
            0,
        )
    };
    let words = words.expect("a counter file can be mapped").cast::<u64>();
    for index in 512..1024 {
        // SAFETY: `add` stays in the mapping of 1,024 words, which is never unmapped.
        let word = unsafe { words.add(index) };
        // SAFETY: `AtomicU64::from_ptr` asks for an aligned word that stays valid and that
        // everybody uses atomically: one of a counter file.
        unsafe { AtomicU64::from_ptr(word) }.store(1 << 60, Ordering::Relaxed);
    }
    assert!(block.cancel(&descriptor).expect("it is ours"));
    drop(stranger);
    idler.kill();
    wait_until("its row to go", || {
        stage.session.participants() == [stage.honest.id()]
    });
    stage.check();
    // Ours and the attacker's.
    assert_eq!(
        mappings_of(inode),
        2,
        "its words were unmapped while a stream owes them a value"
    );
    open.send(()).expect("the stream waits");
    stream.synchronize().expect("it runs");
    drop(block);
    wait_until("its words to be unmapped", || mappings_of(inode) == 1);
    stage.end();
}

fn told() {
    let stage = Stage::new();
    let next = || {
        let mut notice = None;
        wait_until("a notice", || {
            notice = stage.session.next_notice();
            notice.is_some()
        });
        notice.expect("it came")
    };
    assert_eq!(
        next(),
        SessionNotice::Joined {
            participant: stage.honest.id()
        }
    );
    let builder = Participant::builder(stage.gpu.clone()).name("decoder");
    let decoder = builder
        .connect(stage.session.socket_path())
        .expect("connected");
    assert_eq!(
        next(),
        SessionNotice::Joined {
            participant: decoder.id()
        }
    );
    assert_eq!(
        stage.session.participant_name(decoder.id()).as_deref(),
        Some("decoder")
    );
    let id = decoder.id();
    let stats = stage.session.stats();
    assert!(
        stats
            .holders
            .iter()
            .any(|holder| holder.participant == id && holder.command == "decoder"),
        "{stats:?}"
    );
    let block = stage.block();
    let descriptor = block
        .share(To::Participant(id), After::Done)
        .expect("shared");
    drop(
        decoder
            .claim(descriptor.as_bytes(), Wait::Host, Some(WATCHDOG))
            .expect("claimed"),
    );
    drop(decoder);
    // The name outlives the participant.
    let left = SessionNotice::Left {
        participant: id,
        name: "decoder".into(),
        how: Departure::Goodbye,
    };
    assert_eq!(next(), left);
    assert_eq!(stage.session.participant_name(id), None);
    drop(block);
    stage.end();
}

fn no_socket_left() {
    for _ in 0..50 {
        let dir = tempfile::tempdir().expect("a directory");
        let session = gpu_ipc::Session::builder(open_gpu())
            .socket(dir.path().join("s"))
            .open()
            .expect("a session");
        let own = session.alloc(4096).expect("there is room");
        let report = session.shutdown(Duration::ZERO);
        assert!(!report.clean && report.own_blocks == 1, "{report:?}");
        assert_eq!(
            report.to_string(),
            "1 blocks of 4096 bytes are held; 1 by this process itself: drop them"
        );
        drop(own);
        let report = session.shutdown(WATCHDOG);
        assert!(report.clean, "{report}");
        assert_eq!(
            fs::read_dir(dir.path()).expect("it is there").count(),
            0,
            "the socket's file stays"
        );
    }
}
