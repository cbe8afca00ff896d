//! Two versions beside each other: a client, a broker and a keeper of before, by the bytes that were
//! recorded of them, each beside the newer ones. What cannot work is refused with both versions.

use std::collections::BTreeMap;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixDatagram;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

use broker::keeper::depositor::Depositor;
use broker::keeper::process::Keeper;
use broker::object::identity::{Identity, Lineage};
use broker::wire::{MOST_BYTES, RefusalCode, ToBroker, ToClient};
use broker::{Client, CreateOptions, Epoch, ObjectError};
use transport::os::process::own_pidfd;
use transport::os::socket::{
    Endpoint, Listener, ReceiveOutcome, SendOutcome, receive, send, wait_ready,
};
use transport::shared::counter_file::{CounterFile, FIRST_SLOTS};
use transport::shared::sealed_file;
use transport::wire::table;

use crate::agent::{Agent, Dir, client, gpu, layout, put, seed_of, started};
use crate::bad_input::{create, draft, file_of};
use crate::holder;
use crate::raw::Raw;
use crate::{Case, until};

pub const CASES: &[Case] = &[
    (
        "versions::a_client_of_before_is_served_in_its_version",
        a_client_of_before_is_served,
    ),
    (
        "versions::a_client_works_at_a_broker_of_before",
        a_client_works_at_a_broker_of_before,
    ),
    (
        "versions::a_broker_that_shares_no_version_is_named_with_both",
        a_broker_that_shares_no_version,
    ),
    (
        "versions::a_broker_of_before_keeps_in_a_new_keeper",
        a_broker_of_before_keeps_in_a_new_keeper,
    ),
    (
        "versions::a_broker_keeps_in_a_keeper_of_before",
        a_broker_keeps_in_a_keeper_of_before,
    ),
];

/// The recorded lines of a version: name, descriptors, bytes.
fn recorded(version: u16) -> BTreeMap<&'static str, Vec<u8>> {
    let text = match version {
        1 => include_str!("../recorded/messages-1.txt"),
        _ => include_str!("../recorded/messages-2.txt"),
    };
    let line = |line: &'static str| {
        let (name, rest) = line.split_once(": ").expect("a name");
        let (_, hex) = rest.split_once(' ').expect("a number of descriptors");
        let byte = |at: usize| u8::from_str_radix(&hex[at..at + 2], 16).expect("hexadecimal");
        (name, (0..hex.len()).step_by(2).map(byte).collect())
    };
    text.lines().map(line).collect()
}

/// The name and the request of the recordings.
const NAME: &str = "model/é";
const REQUEST: u64 = 5;

fn a_client_of_before_is_served() {
    let (dir, _keeper) = started();
    let newer = client(&dir);
    for seed in 1..=8 {
        put(&newer, NAME, seed, &CreateOptions::default()).expect("a commit");
    }
    let _pool = holder::create(&newer).expect("a pool");
    for version in [1, 2] {
        let lines = recorded(version);
        let raw = Raw::connect(&dir);
        // The recorded hello speaks 1 to 3 and names a descendant: this one speaks what it is.
        let mut hello = [0; MOST_BYTES];
        let len = table::encode(&crate::raw::hello(1, version), &mut hello, version);
        raw.say_bytes(&hello[..len], &[own_pidfd().expect("a pidfd").as_fd()]);
        let ask = |name: &str| {
            if !name.is_empty() {
                raw.say_bytes(&lines[name], &[]);
            }
            let (bytes, fds) = raw.hear_bytes().expect("an answer");
            assert_eq!(bytes[2..4], version.to_le_bytes(), "{name}: its version");
            let kind = u16::from_le_bytes([bytes[4], bytes[5]]);
            assert!(kind <= 139, "{name}: a message of before, not {kind}");
            ToClient::decode(&bytes, fds.len()).expect("a message")
        };
        assert!(matches!(ask(""), ToClient::Welcome { .. }));
        assert!(matches!(
            ask("List"),
            ToClient::Listing {
                request: REQUEST,
                ..
            }
        ));
        let ToClient::Opened { epoch, .. } = ask("Open latest") else {
            panic!("version {version}: it is open to its owner");
        };
        assert_eq!(epoch, Epoch(8));
        assert!(matches!(
            ask("Open epoch"),
            ToClient::Opened {
                epoch: Epoch(7),
                ..
            }
        ));
        // It has seen epoch 7.
        assert!(matches!(
            ask("Watch"),
            ToClient::Newer {
                epoch: Epoch(8),
                ..
            }
        ));
        assert!(matches!(ask("AskOutcome"), ToClient::Outcome { .. }));
        assert!(matches!(ask("Close"), ToClient::Noted { .. }));
        assert!(matches!(ask("Abort"), ToClient::Noted { .. }));
        // It knows no pools, and not the refusal that names them.
        let identity = Identity([version as u8; 16]);
        let draft = file_of(&draft(identity, "kv", layout(1)));
        let mut bytes = [0; MOST_BYTES];
        let len = table::encode(&create(REQUEST, identity), &mut bytes, version);
        raw.say_bytes(&bytes[..len], &[draft.as_fd()]);
        let (answer, _) = raw.hear().expect("an answer");
        let ToClient::Declined { refusal, why, .. } = answer else {
            panic!("version {version}: {answer:?}");
        };
        assert_eq!(refusal, RefusalCode::Conflict);
        assert!(why.contains("kv is a pool"), "{why}");
    }
    let raw = Raw::connect(&dir);
    raw.say(
        &crate::raw::hello(1, 2),
        &[own_pidfd().expect("a pidfd").as_fd()],
    );
    raw.hear().expect("a welcome");
    raw.say_bytes(&recorded(2)["Remove"], &[]);
    let (answer, _) = raw.hear().expect("an answer");
    assert!(
        matches!(
            answer,
            ToClient::Removed {
                epoch: Epoch(8),
                ..
            }
        ),
        "epoch 7 went: {answer:?}"
    );
    assert_eq!(seed_of(&newer.open(NAME).expect("the newest")), 8);
}

/// A broker that speaks the versions before this one, and of the questions answers those alone that
/// there were. It returns the types that it was asked.
fn serve_as_before(listener: &Listener, version: u16, done: &AtomicBool) -> Vec<u16> {
    let old = r#"{"pid":7,"age_s":1,"keeper":"fed","bytes":2,"limit":null,"restored":0,"orphans":0,
        "commits":1,"opens":0,"aborted":0,"objects":[{"name":"a","epoch":1,"identity":"00","bytes":2,
        "owner":0,"state":"visible","writer":null,"readers":[]}]}"#;
    let mut asked = Vec::new();
    let mut connections: Vec<OwnedFd> = Vec::new();
    while !done.load(Ordering::Acquire) {
        connections.extend(listener.accept(|_| {}).expect("accept"));
        for connection in &connections {
            let (mut packet, mut fds) = ([0; MOST_BYTES], Vec::new());
            let Ok(ReceiveOutcome::Packet(len)) = receive(connection, &mut packet, &mut fds) else {
                continue;
            };
            let said = ToBroker::decode(&packet[..len], fds.len()).expect("a message");
            let sent = u16::from_le_bytes([packet[2], packet[3]]);
            let answer = |message: &ToClient, fds: &[&OwnedFd]| {
                let mut bytes = [0; MOST_BYTES];
                let len = table::encode(message, &mut bytes, version);
                let fds: Vec<_> = fds.iter().map(|fd| fd.as_fd()).collect();
                let sent = send(connection, &bytes[..len], &fds).expect("send");
                assert_eq!(sent, SendOutcome::Sent);
            };
            match said {
                ToBroker::Hello {
                    lowest, highest, ..
                } => {
                    assert!(
                        lowest <= version && highest > version,
                        "{lowest} to {highest}"
                    );
                    let words = CounterFile::create(FIRST_SLOTS).expect("a counter file");
                    let file = words.fd().try_clone_to_owned().expect("dup");
                    let welcome = ToClient::Welcome {
                        lineage: Lineage([9; 16]),
                        participant: 1,
                        pid: 7,
                        slots: words.slot_count(),
                    };
                    answer(&welcome, &[&own_pidfd().expect("a pidfd"), &file]);
                }
                ToBroker::List { request } => {
                    assert_eq!(sent, version, "the one that was agreed on");
                    let file = sealed_file::create("listing", old.as_bytes()).expect("a file");
                    let bytes = old.len() as u64;
                    answer(&ToClient::Listing { request, bytes }, &[&file]);
                }
                ToBroker::Open { request, .. } => {
                    let (refusal, why) = (RefusalCode::NotFound, "it is not here".into());
                    answer(
                        &ToClient::Declined {
                            request,
                            refusal,
                            why,
                        },
                        &[],
                    );
                }
                other => panic!("a broker of version {version} knows no {other:?}"),
            }
            asked.push(u16::from_le_bytes([packet[4], packet[5]]));
        }
        std::thread::yield_now();
    }
    asked
}

fn listen(dir: &Path) -> Listener {
    Listener::bind(&Endpoint::Path {
        path: dir.join("broker"),
        others: false,
    })
    .expect("bind")
}

fn a_client_works_at_a_broker_of_before() {
    for version in [1, 2] {
        let dir = Dir::new();
        let (listener, done) = (listen(&dir), AtomicBool::new(false));
        let asked = std::thread::scope(|scope| {
            let old = scope.spawn(|| serve_as_before(&listener, version, &done));
            let newer = client(&dir);
            assert_eq!(newer.lineage().is_some(), version == 2, "version {version}");
            let sums = newer.sums().expect("it lists all of them instead");
            assert_eq!((sums.objects.len(), sums.count()), (1, 1));
            assert_eq!(newer.list().expect("a listing").objects[0].name, "a");
            let error = newer.open("a").expect_err("it is not there");
            assert!(matches!(error, ObjectError::NotFound { .. }), "{error}");
            drop(newer);
            done.store(true, Ordering::Release);
            old.join().expect("no question that it does not know")
        });
        assert_eq!(asked, [1, 10, 10, 6], "version {version}");
    }
}

fn a_broker_that_shares_no_version() {
    let dir = Dir::new();
    let listener = listen(&dir);
    let refused = std::thread::scope(|scope| {
        let newer = scope.spawn(|| Client::builder(gpu()).dir(&*dir).connect());
        let mut connection = None;
        until("it connects", || {
            connection = listener.accept(|_| {}).expect("accept");
            connection.is_some()
        });
        let mut packet = [0; MOST_BYTES];
        let refused = ToClient::Refused {
            refusal: RefusalCode::Version,
            lowest: 7,
            highest: 9,
            why: "of another time".into(),
        };
        let len = table::encode(&refused, &mut packet, 9);
        let _ = send(connection.expect("a connection"), &packet[..len], &[]).expect("send");
        newer.join().expect("no panic")
    });
    let why = refused.expect_err("no version is common").to_string();
    assert!(
        why.contains("the broker speaks versions 7 to 9, this side 1 to 3"),
        "{why}"
    );
}

/// What a broker of the first version said to its keeper, and how it read the answers.
fn a_broker_of_before_keeps_in_a_new_keeper() {
    let dir = Dir::new();
    let path = dir.to_path_buf();
    std::thread::spawn(move || Keeper::open(&path, Some(8)).expect("a keeper").run_alone());
    let keeper = dir.join("keeper");
    until("the keeper listens", || keeper.exists());
    let old = UnixDatagram::unbound().expect("a socket");
    let tell = |text: &str, fds: &[&OwnedFd]| {
        let fds: Vec<_> = fds.iter().map(|fd| fd.as_fd()).collect();
        old.connect(&keeper).expect("it listens");
        let sent = send(&old, text.as_bytes(), &fds).expect("send");
        assert_eq!(sent, SendOutcome::Sent);
    };
    let file = |text: &str| sealed_file::create("old", text.as_bytes()).expect("a file");
    tell("FDSTORE=1\nFDNAME=r1.0\nFDPOLL=0", &[&file("region")]);
    tell("FDSTORE=1\nFDNAME=m1\nFDPOLL=0", &[&file("manifest")]);
    tell("FDSTORE=1\nFDNAME=m2\nFDPOLL=0", &[&file("another")]);
    tell("FDSTOREREMOVE=1\nFDNAME=m2", &[]);
    tell("READY=1", &[]);
    for with_files in [false, true] {
        let (ours, theirs) = rustix::net::socketpair(
            rustix::net::AddressFamily::UNIX,
            rustix::net::SocketType::SEQPACKET,
            rustix::net::SocketFlags::CLOEXEC,
            None,
        )
        .expect("a pair");
        let ask = if with_files {
            "X_GPU_IPC_READ=1"
        } else {
            "X_GPU_IPC_LIST=1"
        };
        tell(ask, &[&theirs]);
        drop(theirs);
        let read = || {
            let (mut packet, mut fds) = ([0; MOST_BYTES], Vec::new());
            loop {
                match receive(&ours, &mut packet, &mut fds).expect("received") {
                    ReceiveOutcome::Packet(len) => return (packet[..len].to_vec(), fds),
                    ReceiveOutcome::Empty => {
                        let flags = rustix::event::PollFlags::IN;
                        wait_ready(ours.as_fd(), flags, "the keeper", None).expect("an answer");
                    }
                    ReceiveOutcome::HungUp => panic!("the keeper hung up"),
                }
            }
        };
        let (names, files) = read();
        let mut names: Vec<&str> = str::from_utf8(&names).expect("text").lines().collect();
        names.sort_unstable();
        assert_eq!(names, ["m1", "r1.0"]);
        assert_eq!(files.len(), if with_files { 2 } else { 0 });
        let (end, _) = read();
        assert_eq!((end[0], end.len()), (b'.', 17), "and no numbers behind it");
    }
}

/// A keeper of the first version: it knows neither `HAS` nor `HAND_OVER`, and lets go what comes
/// with them.
fn keep_as_before(socket: &UnixDatagram) {
    const INCARNATION: [u8; 16] = [7; 16];
    let mut shelf: BTreeMap<String, OwnedFd> = BTreeMap::new();
    let mut readers = Vec::new();
    loop {
        let (mut packet, mut fds) = ([0; MOST_BYTES], Vec::new());
        let len = match receive(socket, &mut packet, &mut fds) {
            Ok(ReceiveOutcome::Packet(len)) => len,
            Ok(_) => {
                let flags = rustix::event::PollFlags::IN;
                wait_ready(socket.as_fd(), flags, "a datagram", None).expect("it is open");
                continue;
            }
            Err(error) => panic!("{error}"),
        };
        let text = str::from_utf8(&packet[..len]).expect("text");
        let value = |name: &str| {
            let line = text.lines().find_map(|line| line.strip_prefix(name));
            line.map(str::to_owned)
        };
        if value("FDSTORE=1").is_some() {
            let name = value("FDNAME=").expect("a name");
            shelf.insert(name, fds.pop().expect("a descriptor"));
        } else if value("FDSTOREREMOVE=1").is_some() {
            shelf.remove(&value("FDNAME=").expect("a name"));
        } else if value("X_GPU_IPC_LIST=1").is_some() || value("X_GPU_IPC_READ=1").is_some() {
            let reader = fds.pop().expect("a socket");
            let names: Vec<&String> = shelf.keys().collect();
            for page in names.chunks(64) {
                let page: Vec<&str> = page.iter().map(|name| name.as_str()).collect();
                let files: Vec<_> = page.iter().map(|&name| shelf[name].as_fd()).collect();
                let with = if value("X_GPU_IPC_READ=1").is_some() {
                    &files[..]
                } else {
                    &[]
                };
                let _ = send(&reader, page.join("\n").as_bytes(), with).expect("send");
            }
            let end: Vec<u8> = std::iter::once(b'.').chain(INCARNATION).collect();
            let _ = send(&reader, &end, &[]).expect("send");
            readers.push(reader);
        }
    }
}

fn a_broker_keeps_in_a_keeper_of_before() {
    let dir = Dir::new();
    let socket = UnixDatagram::bind(dir.join("keeper")).expect("bind");
    socket.set_nonblocking(true).expect("it can be");
    std::thread::spawn(move || keep_as_before(&socket));
    let mut broker = Agent::broker_of(&dir);
    until("the broker listens", || dir.join("broker").exists());
    let newer = client(&dir);
    until("its keeper has everything", || {
        newer.list().is_ok_and(|list| list.keeper == "fed")
    });
    for seed in 1..=3 {
        put(
            &newer,
            &format!("model{seed}"),
            seed,
            &CreateOptions::default(),
        )
        .expect("a commit");
    }
    newer.remove("model1").expect("it is ours");
    let list = newer.list().expect("a listing");
    assert_eq!(list.shelf.most, 0, "it does not say how many it may keep");
    broker.kill();
    let _next = Agent::broker_of(&dir);
    until("the next broker serves", || {
        newer.list().is_ok_and(|list| list.restored == 2)
    });
    assert_eq!(seed_of(&newer.open("model3").expect("kept")), 3);
    // It cannot hand over, and a keeper that is to take over says so and what to do.
    let taken = Depositor::new(&dir.join("keeper"))
        .expect("a socket")
        .take_over();
    let error = broker::keeper::depositor::DepositError::Absent;
    assert_eq!(
        format!("{:?}", taken.expect_err("it does not know how")),
        format!("{error:?}")
    );
}
