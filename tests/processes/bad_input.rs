//! Bad input: each gives its own error with the remedy, changes nothing, leaks nothing.

use std::time::Duration;

use gpu_ipc::{
    After, ClaimError, Descriptor, Error, Gone, Participant, ParticipantId, Session, To, Wait,
};

use crate::agent::{Agent, bytes, number};
use crate::device::open_gpu;
use crate::words::{Command, Done, Refusal};
use crate::{Case, Producer};

pub const CASES: &[Case] = &[
    ("bad_input::descriptors_that_are_not_ours", descriptors),
    ("bad_input::an_absent_producer", absent),
    ("bad_input::another_device", another_device),
    ("bad_input::a_wrong_runtime_directory", runtime_directory),
    ("bad_input::messages_that_make_no_sense", nonsense),
    ("bad_input::few_file_descriptors", few_descriptors),
    (
        "bad_input::a_participant_that_never_was",
        unknown_participant,
    ),
    ("bad_input::wrong_arguments", arguments),
];

fn descriptors() {
    let (producer, other) = (Producer::new(), Producer::new());
    let connect = |p: &Producer| {
        Participant::builder(p.gpu.clone())
            .connect(p.session.socket_path())
            .expect("connected")
    };
    let (first, second, foreign) = (connect(&producer), connect(&producer), connect(&other));
    let block = producer.block(1);
    let descriptor = block
        .share(To::Participant(first.id()), After::Done)
        .expect("shared");
    let bytes = descriptor.as_bytes();
    let claim = |participant: &Participant, bytes: &[u8]| {
        participant
            .claim(bytes, Wait::None, Some(Duration::from_secs(60)))
            .expect_err("it must be refused")
    };
    for end in [0, 1, 191] {
        let error = claim(&first, &bytes[..end]);
        assert!(
            matches!(error, ClaimError::Backend(Error::BadDescriptor { .. })),
            "{error}"
        );
    }
    for at in [5, 30, 57, 100, 150, 191] {
        let mut altered = *bytes;
        altered[at] ^= 1;
        let error = claim(&first, &altered);
        // One of another session is refused by name, the others are no descriptors.
        assert!(
            matches!(&error, ClaimError::Backend(Error::BadDescriptor { .. }))
                || matches!(&error, ClaimError::Backend(Error::Mismatch { .. })) && at == 5
                || matches!(&error, ClaimError::Refused { why, .. } if why.contains("session"))
                    && at == 30,
            "{at}: {error}"
        );
    }
    let error = claim(&second, bytes);
    assert!(
        matches!(&error, ClaimError::Refused { why, .. } if why.contains("participant")),
        "{error}"
    );
    let error = claim(&foreign, bytes);
    assert!(
        matches!(&error, ClaimError::Refused { why, .. } if why.contains("session")),
        "{error}"
    );
    assert!(Descriptor::decode(&[0xff; 192]).is_err());
    // None of it took or ended the lease.
    let received = first
        .claim(bytes, Wait::None, None)
        .expect("it is still there to be claimed");
    assert_eq!(received.len(), 4096);
}

fn absent() {
    let dir = tempfile::tempdir().expect("a directory");
    let gpu = open_gpu();
    let error = Participant::builder(gpu.clone())
        .connect(dir.path().join("nobody"))
        .expect_err("nobody is there");
    assert!(
        matches!(error, Error::Connect { .. }) && error.to_string().contains("; "),
        "{error}"
    );
    let error = Participant::builder(gpu)
        .connect("x".repeat(200))
        .expect_err("too long");
    assert!(
        error.to_string().contains("107") || error.to_string().contains("108"),
        "{error}"
    );
}

fn another_device() {
    let producer = Producer::new();
    let mut consumer = Agent::start();
    consumer.connect(&producer.session);
    let backend = gpu_ipc::host::HostBackend::new(gpu_ipc::host::HostConfig::default().devices(2))
        .expect("it opens");
    let second = gpu_ipc::Gpu::new(backend, gpu_ipc::backend::DeviceId(1)).expect("there are two");
    let error = Participant::builder(second.clone())
        .connect(producer.session.socket_path())
        .expect_err("another device");
    let text = error.to_string();
    assert!(
        text.contains(&second.uuid().to_string())
            && text.contains(&producer.gpu.uuid().to_string()),
        "{text}"
    );
}

fn runtime_directory() {
    use std::os::unix::fs::PermissionsExt;
    let dir = tempfile::tempdir().expect("a directory");
    let gpu = open_gpu();
    let open = |path: &std::path::Path| Session::builder(gpu.clone()).runtime_dir(path).open();
    let wide = dir.path().join("wide");
    std::fs::create_dir(&wide).expect("a directory");
    std::fs::set_permissions(&wide, std::fs::Permissions::from_mode(0o777)).expect("ours");
    let error = open(&wide).expect_err("others can write it");
    assert!(error.to_string().contains("; "), "no remedy: {error}");
    let link = dir.path().join("link");
    std::os::unix::fs::symlink(dir.path(), &link).expect("a link");
    open(&link).expect_err("a link");
    open(&dir.path().join("fresh")).expect("a fresh one is made");
}

/// With few descriptors a session serves as many as fit, refuses the others with the remedy, and
/// goes on. The last one that is free is taken by the connection, by its hello or by the counter
/// file, in turn with the limit.
fn few_descriptors() {
    for limit in 61..=64 {
        few_descriptors_up_to(limit);
    }
}

fn few_descriptors_up_to(soft: u64) {
    let dir = tempfile::tempdir().expect("a directory");
    let path = dir.path().join("s");
    let mut producer = Agent::start();
    let files = rustix::process::Resource::Nofile;
    let limits = rustix::process::Rlimit {
        current: Some(soft),
        ..rustix::process::getrlimit(files)
    };
    let pid = rustix::process::Pid::from_raw(producer.pid() as i32);
    rustix::process::prlimit(pid, files, limits).expect("it is a child of ours");
    producer.open(&path);
    let first = producer.alloc(4096, 5);
    // From a process without descendants: those would be named in the hello, and each takes a
    // descriptor too.
    let mut consumer = Agent::start();
    let joined = consumer.must(&Command::JoinUntilRefused { socket: path });
    let Done::Joined {
        count,
        first: id,
        refusal: Refusal { text: why, .. },
    } = joined
    else {
        panic!("{joined:?}")
    };
    assert!(
        (5..64).contains(&count),
        "of {soft} descriptors, {count} joined: {why}"
    );
    assert!(
        why.contains("RLIMIT_NOFILE") || why.contains("closed the connection"),
        "{soft}: no remedy: {why}"
    );
    let descriptor = bytes(&producer.share(first, To::Participant(ParticipantId(id))));
    let len = number(consumer.must(&Command::ClaimByFirst { descriptor }));
    assert_eq!(len, 4096, "the others are not served");
}

/// A process whose first message the session cannot read is turned away, with a reason where there
/// is one, and no other process notices.
fn nonsense() {
    use rustix::net::{
        AddressFamily, RecvFlags, SendFlags, SocketAddrUnix, SocketFlags, SocketType,
    };
    let producer = Producer::new();
    let address = SocketAddrUnix::new(producer.session.socket_path()).expect("a short path");
    let say = |packet: &[u8]| {
        let socket = rustix::net::socket_with(
            AddressFamily::UNIX,
            SocketType::SEQPACKET,
            SocketFlags::CLOEXEC,
            None,
        )
        .expect("a socket");
        rustix::net::connect(&socket, &address).expect("it listens");
        rustix::net::send(&socket, packet, SendFlags::NOSIGNAL).expect("it reads");
        let mut answer = [0; 4096];
        let (len, _) = rustix::net::recv(&socket, &mut answer, RecvFlags::empty())
            .expect("it answers or hangs up");
        answer[..len].to_vec()
    };
    for number in (0..10u16).chain(125..145).chain([u16::MAX]) {
        for len in [0, 8, 24, 200, 4080] {
            let mut packet = b"GI\x02\x00".to_vec();
            packet.extend(number.to_le_bytes());
            packet.resize(16 + len, 0);
            let answer = say(&packet);
            // A look at the session and a wish for its snapshot are what all may say.
            let refused = answer.is_empty() || answer[4..6] == 130u16.to_le_bytes();
            let may = matches!((number, len), (7, 8) | (8, 0));
            assert!(refused || may, "{number} with {len} bytes: {answer:02x?}");
        }
    }
    let other_version = say(b"GI\x09\x00\x01\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00");
    let text = String::from_utf8_lossy(&other_version).into_owned();
    assert!(text.contains("version 9, this side 2"), "{text:?}");
    say(&[0; 5000]);
    let mut consumer = Agent::start();
    let id = consumer.connect(&producer.session);
    let block = producer.block(1);
    consumer.claim(
        &block
            .share(To::Participant(id), After::Done)
            .expect("shared"),
    );
}

fn unknown_participant() {
    let producer = Producer::new();
    let block = producer.block(1);
    for id in [0, 1, 4096, u64::MAX] {
        let id = ParticipantId(id);
        let error = block
            .share(To::Participant(id), After::Done)
            .expect_err("nobody has that number");
        assert!(Gone::of(&error) == Some(Gone::Participant(id)), "{error}");
    }
    assert_eq!(block.outstanding(), 0);
}

fn arguments() {
    let producer = Producer::new();
    assert!(matches!(
        producer.session.alloc(0),
        Err(Error::Invalid { .. })
    ));
    assert!(matches!(
        producer.session.alloc(u64::MAX),
        Err(Error::OutOfMemory { .. } | Error::Invalid { .. })
    ));
    let stray = gpu_ipc::backend::DevicePtr(0x1000);
    // SAFETY: `adopt` asks that the range stays allocated: it is refused.
    let error = unsafe {
        producer
            .session
            .adopt(stray, 8, gpu_ipc::session::AdoptToken(1))
    }
    .expect_err("nobody allocated it");
    assert!(matches!(error, Error::Unsupported { .. }), "{error}");
    assert_eq!(producer.session.stats().live_blocks, 0);
}
