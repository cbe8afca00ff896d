//! Participants that lie, are late, or belong elsewhere: each has its error or its rule.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::Instant;

use backend_host::{HostBackend, HostConfig};
use broker::wire::{RefusalCode, Standing, ToBroker, ToClient, Wanted};
use broker::{
    Client, CreateOptions, Epoch, Identity, Layout, Manifest, ObjectError, PartSpec, Readers,
    Selector,
};
use gpu_api::{CaptureStatus, DeviceId, DeviceUuid, Error, Gpu};
use ipc_rc::Stream;
use transport::shared::sealed_file;

use crate::agent::{Agent, Dir, client, fill, gpu, layout, put, seed_of, started};
use crate::raw::{Raw, hello};
use crate::{Case, until};

pub const CASES: &[Case] = &[
    (
        "bad_input::a_draft_that_is_no_sealed_manifest_is_refused",
        a_draft_that_is_no_sealed_manifest_is_refused,
    ),
    (
        "bad_input::a_commit_before_the_writes_have_ended_is_not_heard",
        a_commit_before_the_writes_have_ended_is_not_heard,
    ),
    (
        "bad_input::the_control_a_broker_that_reads_no_slots_publishes_halves",
        the_control_publishes_halves,
    ),
    (
        "bad_input::nobody_commits_or_aborts_anothers_object",
        nobody_commits_or_aborts_anothers_object,
    ),
    (
        "bad_input::versions_that_do_not_meet_are_both_named",
        versions_that_do_not_meet_are_both_named,
    ),
    (
        "bad_input::nonsense_is_not_read_again",
        nonsense_is_not_read_again,
    ),
    (
        "bad_input::a_client_of_mps_may_read_and_not_write",
        a_client_of_mps_may_read_and_not_write,
    ),
    (
        "bad_input::another_device_is_refused_by_name",
        another_device_is_refused_by_name,
    ),
    (
        "bad_input::a_fill_that_cannot_be_followed_is_refused",
        a_fill_that_cannot_be_followed_is_refused,
    ),
    (
        "bad_input::out_of_memory_half_way_gives_all_back",
        out_of_memory_half_way_gives_all_back,
    ),
    (
        "bad_input::a_full_keeper_refuses_the_commit",
        a_full_keeper_refuses_the_commit,
    ),
    (
        "bad_input::questions_may_come_twice",
        questions_may_come_twice,
    ),
    (
        "bad_input::an_identity_is_created_once",
        an_identity_is_created_once,
    ),
    (
        "bad_input::a_half_closed_connection_costs_nothing",
        a_half_closed_connection_costs_nothing,
    ),
];

pub fn draft(identity: Identity, name: &str, layout: Layout) -> Manifest {
    let gpu = gpu();
    Manifest {
        identity,
        name: name.into(),
        epoch: Epoch(0),
        home: None,
        backend: gpu.kind(),
        device: gpu.uuid(),
        owner: 0,
        readers: Readers::Owner,
        granularity: 0,
        layout,
    }
}

pub fn create(request: u64, identity: Identity) -> ToBroker {
    ToBroker::Create {
        request,
        identity,
        wanted: Wanted::default(),
    }
}

pub fn file_of(manifest: &Manifest) -> OwnedFd {
    sealed_file::create("draft", &manifest.encode().expect("bytes")).expect("a memfd")
}

fn a_draft_that_is_no_sealed_manifest_is_refused() {
    let (dir, _keeper) = started();
    let (raw, _) = Raw::greeted(&dir);
    let identity = Identity([1; 16]);
    let good = draft(identity, "model", layout(1));
    let unsealed =
        rustix::fs::memfd_create("draft", rustix::fs::MemfdFlags::ALLOW_SEALING).expect("a memfd");
    rustix::io::write(&unsealed, &good.encode().expect("bytes")).expect("written");
    let (pipe, _end) = std::io::pipe().expect("a pipe");
    let other = file_of(&draft(Identity([2; 16]), "model", layout(1)));
    let granted = file_of(&Manifest {
        epoch: Epoch(9),
        ..good.clone()
    });
    let bytes = sealed_file::create("draft", b"no manifest at all").expect("a memfd");
    for (file, why) in [
        (unsealed, "sealed against writing"),
        (pipe.into(), "sealed against writing"),
        (other, "another identity"),
        (granted, "no draft"),
        (bytes, "a manifest is 18 bytes"),
    ] {
        raw.say(&create(7, identity), &[file.as_fd()]);
        let (answer, _) = raw.hear().expect("an answer");
        let ToClient::Declined {
            request: 7,
            refusal: RefusalCode::Layout,
            why: text,
        } = answer
        else {
            panic!("{why}: {answer:?}");
        };
        assert!(text.contains(why), "{text}");
    }
    raw.say(&create(8, identity), &[file_of(&good).as_fd()]);
    assert!(
        matches!(raw.hear(), Some((ToClient::Created { request: 8, .. }, _))),
        "a good one is taken"
    );
}

/// Makes an object, writes nothing, and asks for the commit while the leases are held.
fn hasty(dir: &Dir) -> (Raw, Identity) {
    let (raw, _file) = Raw::greeted(dir);
    let identity = Identity::random().expect("random bits");
    raw.say(
        &create(1, identity),
        &[file_of(&draft(identity, "model", layout(1))).as_fd()],
    );
    assert!(matches!(raw.hear(), Some((ToClient::Created { .. }, _))));
    raw.say(
        &ToBroker::Commit {
            request: 2,
            identity,
        },
        &[],
    );
    raw.say(
        &ToBroker::AskOutcome {
            request: 3,
            identity,
        },
        &[],
    );
    (raw, identity)
}

fn a_commit_before_the_writes_have_ended_is_not_heard() {
    let (dir, _keeper) = started();
    let (raw, identity) = hasty(&dir);
    let (answer, _) = raw.hear().expect("an answer");
    assert_eq!(
        answer,
        ToClient::Outcome {
            request: 3,
            standing: Standing::Unfinished
        },
        "the commit is not answered"
    );
    let reader = client(&dir);
    assert!(reader.open("model").is_err());
    assert_eq!(
        reader.outcome(identity).expect("an answer"),
        Standing::Unfinished
    );
}

/// The negative control: what the case above would miss.
fn the_control_publishes_halves() {
    let dir = Dir::new();
    let _keeper = Agent::blind(&dir);
    until("the broker listens", || dir.join("broker").exists());
    let (_raw, identity) = hasty(&dir);
    let reader = client(&dir);
    until("it is visible", || {
        matches!(reader.outcome(identity), Ok(Standing::Committed(_)))
    });
    let half = reader
        .open("model")
        .expect("visible, though nothing was written");
    let seen = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| seed_of(&half)));
    assert!(
        seen.is_err(),
        "the check of contents would miss an object that nobody filled"
    );
}

fn nobody_commits_or_aborts_anothers_object() {
    let (dir, _keeper) = started();
    let writer = client(&dir);
    let mut object = writer.create("model", layout(1)).expect("memory");
    fill(&mut object, 1).expect("written");
    let identity = object.identity();
    let (raw, _) = Raw::greeted(&dir);
    raw.say(
        &ToBroker::Commit {
            request: 1,
            identity,
        },
        &[],
    );
    let (answer, _) = raw.hear().expect("an answer");
    assert!(
        matches!(
            answer,
            ToClient::Declined {
                refusal: RefusalCode::NotWriter,
                ..
            }
        ),
        "{answer:?}"
    );
    raw.say(
        &ToBroker::Abort {
            request: 2,
            identity,
        },
        &[],
    );
    assert!(matches!(
        raw.hear(),
        Some((ToClient::Noted { request: 2 }, _))
    ));
    raw.say(
        &create(3, identity),
        &[file_of(&draft(identity, "model", layout(1))).as_fd()],
    );
    let (answer, _) = raw.hear().expect("an answer");
    assert!(
        matches!(
            answer,
            ToClient::Declined {
                refusal: RefusalCode::Exists,
                ..
            }
        ),
        "{answer:?}"
    );
    assert_eq!(
        object
            .commit(&[])
            .expect("queued")
            .wait()
            .expect("its own writer's"),
        Epoch(1)
    );
}

fn versions_that_do_not_meet_are_both_named() {
    let (dir, _keeper) = started();
    let raw = Raw::connect(&dir);
    let pidfd = transport::os::process::own_pidfd().expect("a pidfd");
    raw.say(&hello(7, 9), &[pidfd.as_fd()]);
    let (answer, _) = raw.hear().expect("an answer");
    let ToClient::Refused {
        refusal: RefusalCode::Version,
        lowest: 1,
        highest: 3,
        why,
    } = answer
    else {
        panic!("{answer:?}");
    };
    assert_eq!(
        why,
        "the participant speaks versions 7 to 9, the broker 1 to 3"
    );
    let raw = Raw::connect(&dir);
    raw.say(&hello(1, 9), &[pidfd.as_fd()]);
    assert!(
        matches!(raw.hear(), Some((ToClient::Welcome { .. }, _))),
        "1 is spoken by both"
    );
}

fn nonsense_is_not_read_again() {
    let (dir, _keeper) = started();
    let stranger = Raw::connect(&dir);
    stranger.say_bytes(b"nonsense", &[]);
    let (answer, _) = stranger.hear().expect("an answer");
    assert!(
        matches!(
            answer,
            ToClient::Refused {
                refusal: RefusalCode::Protocol,
                ..
            }
        ),
        "{answer:?}"
    );
    let no_pidfd = Raw::connect(&dir);
    let (pipe, _end) = std::io::pipe().expect("a pipe");
    no_pidfd.say(&hello(1, 1), &[pipe.as_fd()]);
    let (answer, _) = no_pidfd.hear().expect("an answer");
    assert!(
        matches!(
            answer,
            ToClient::Refused {
                refusal: RefusalCode::Protocol,
                ..
            }
        ),
        "{answer:?}"
    );
    let (raw, _) = Raw::greeted(&dir);
    raw.say_bytes(b"nonsense", &[pipe.as_fd()]);
    raw.say(&ToBroker::List { request: 5 }, &[]);
    let (second, _) = Raw::greeted(&dir);
    second.say(
        &hello(1, 1),
        &[transport::os::process::own_pidfd()
            .expect("a pidfd")
            .as_fd()],
    );
    second.say(&ToBroker::List { request: 5 }, &[]);
    let (good, _) = Raw::greeted(&dir);
    good.say(&ToBroker::List { request: 6 }, &[]);
    assert!(matches!(
        good.hear(),
        Some((ToClient::Listing { request: 6, .. }, _))
    ));
    for silenced in [raw, second] {
        let now = Some(Instant::now());
        assert!(silenced.hear_until(now).is_err(), "it is read again");
    }
}

fn a_client_of_mps_may_read_and_not_write() {
    let (dir, _keeper) = started();
    put(&client(&dir), "model", 1, &CreateOptions::default()).expect("a commit");
    let config = HostConfig::default()
        .bytes_per_device(64 << 30)
        .shared_context(true);
    let mps = Gpu::new(
        HostBackend::new(config).expect("the host backend"),
        DeviceId(0),
    )
    .expect("its device");
    let client = Client::builder(mps)
        .dir(&*dir)
        .connect()
        .expect("it may connect");
    assert_eq!(seed_of(&client.open("model").expect("it may read")), 1);
    let error = client
        .create("other", layout(2))
        .expect_err("it may not write")
        .to_string();
    assert!(
        error.contains("is a client of MPS") && error.contains("not a client of MPS"),
        "{error}"
    );
}

fn another_device_is_refused_by_name() {
    let (dir, _keeper) = started();
    let (raw, _) = Raw::greeted(&dir);
    let identity = Identity([5; 16]);
    let elsewhere = Manifest {
        device: DeviceUuid([0xee; 16]),
        ..draft(identity, "model", layout(1))
    };
    raw.say(&create(1, identity), &[file_of(&elsewhere).as_fd()]);
    let (answer, _) = raw.hear().expect("an answer");
    let ToClient::Declined {
        refusal: RefusalCode::Device,
        why,
        ..
    } = answer
    else {
        panic!("{answer:?}")
    };
    assert_eq!(
        why,
        "this broker does not serve host device eeeeeeee-eeee-eeee-eeee-eeeeeeeeeeee"
    );
}

fn a_fill_that_cannot_be_followed_is_refused() {
    let (dir, _keeper) = started();
    let host = HostBackend::new(HostConfig::default()).expect("the host backend");
    let own = Gpu::new(host.clone(), DeviceId(0)).expect("its device");
    let client = Client::builder(own.clone())
        .dir(&*dir)
        .connect()
        .expect("a broker that listens");
    let mut writer = client.create("model", layout(1)).expect("memory");
    fill(&mut writer, 1).expect("written");
    let (stream, foreign) = (Stream::create(&own), Stream::create(&gpu()));
    let (stream, foreign) = (stream.expect("a stream"), foreign.expect("a stream"));
    let error = writer
        .fill("p9", 0, &stream)
        .expect_err("no such part")
        .to_string();
    assert!(
        error.contains("p9, which the layout does not have"),
        "{error}"
    );
    let elsewhere = writer.fill("p0", 0, &foreign);
    assert!(
        matches!(elsewhere, Err(ObjectError::Gpu(Error::Mismatch { .. }))),
        "{elsewhere:?}"
    );
    // SAFETY: `borrow` asks for a stream that is alive as long as `keep`, and that nobody captures
    // it meanwhile: the backend keeps its default streams.
    let threads = unsafe { Stream::borrow(&own, 2, Arc::new(())) }.expect("the thread's own");
    let another = writer.fill("p0", 0, &threads);
    assert!(
        matches!(
            another,
            Err(ObjectError::Gpu(Error::Invalid {
                what: "the stream",
                ..
            }))
        ),
        "{another:?}"
    );
    host.set_capture(stream.raw(), CaptureStatus::Active);
    let captured = writer.fill("p0", 0, &stream);
    assert!(
        matches!(captured, Err(ObjectError::Gpu(Error::Capturing { .. }))),
        "{captured:?}"
    );
    // None of them was noted: the commit does not ask the stream that is captured.
    writer
        .commit(&[])
        .expect("queued")
        .wait()
        .expect("a commit");
    assert_eq!(
        seed_of(&client.open("model").expect("an object")),
        1,
        "nothing changed"
    );
}

fn out_of_memory_half_way_gives_all_back() {
    let (dir, _keeper) = started();
    let client = client(&dir);
    // Two regions, of which the device has room for the first alone.
    let parts = [
        PartSpec::bytes("a", 5 << 30).expect("a part"),
        PartSpec::bytes("b", 75 << 30).expect("a part"),
    ];
    let layout = Layout::pack(parts, b"").expect("a layout");
    assert_eq!(layout.regions().len(), 2);
    let error = client
        .create("model", layout)
        .expect_err("no room for the second")
        .to_string();
    assert!(error.contains("out of memory"), "{error}");
    assert_eq!(client.list().expect("a listing").objects.len(), 0);
    put(&client, "model", 1, &CreateOptions::default()).expect("room for a small one");
}

fn a_full_keeper_refuses_the_commit() {
    let dir = Dir::new();
    // Room for one object of one region.
    let _keeper = Agent::small_keeper(&dir, 3);
    until("the broker listens", || dir.join("broker").exists());
    let client = client(&dir);
    put(&client, "model", 1, &CreateOptions::default()).expect("there is room");
    let error = put(&client, "other", 2, &CreateOptions::default())
        .expect_err("no room")
        .to_string();
    assert!(
        error.contains("the keeper has") && error.contains("did not take"),
        "{error}"
    );
    assert!(matches!(
        client.open("other"),
        Err(ObjectError::NotFound { .. })
    ));
    let first = dir.broker();
    dir.signal_broker(rustix::process::Signal::KILL);
    until("another broker", || dir.broker() != first);
    assert_eq!(seed_of(&client.open("model").expect("kept")), 1);
    assert!(client.open("other").is_err());
}

fn questions_may_come_twice() {
    let (dir, _keeper) = started();
    let (raw, file) = Raw::greeted(&dir);
    let identity = Identity::random().expect("random bits");
    let draft = file_of(&draft(identity, "model", layout(1)));
    // Before the memory was made or after it, the answer is the same.
    let ask = |request| raw.say(&create(request, identity), &[draft.as_fd()]);
    let mut slots = Vec::new();
    (0..2).for_each(|_| ask(1));
    while slots.is_empty() {
        let Some((
            ToClient::Created {
                leases, request: 1, ..
            },
            _,
        )) = raw.hear()
        else {
            panic!("no answer")
        };
        slots.push(leases);
    }
    ask(1);
    ask(2);
    loop {
        match raw.hear() {
            Some((
                ToClient::Created {
                    leases, request: 1, ..
                },
                _,
            )) => slots.push(leases),
            Some((
                ToClient::Declined {
                    request: 2,
                    refusal: RefusalCode::Exists,
                    why,
                },
                _,
            )) => {
                assert_eq!(
                    why, "the participant is filling an object of this identity",
                    "another question"
                );
                break;
            }
            other => panic!("{other:?}"),
        }
    }
    assert!(
        slots.len() >= 2 && slots.windows(2).all(|pair| pair[0] == pair[1]),
        "one object, one lease: {slots:?}"
    );
    let counters =
        transport::shared::counter_file::CounterFile::open(file, 8_192).expect("a counter file");
    for lease in &slots[0] {
        let slot = counters.slot(lease.slot);
        let _ = slot.claim(lease.generation);
        slot.release(lease.generation);
    }
    for request in 4..=6 {
        raw.say(&ToBroker::Commit { request, identity }, &[]);
    }
    until("it is committed", || {
        raw.say(
            &ToBroker::Commit {
                request: 7,
                identity,
            },
            &[],
        );
        loop {
            match raw.hear() {
                Some((ToClient::Committed { epoch, .. }, _)) => {
                    assert_eq!(epoch, Epoch(1));
                    return true;
                }
                Some(_) => {}
                None => panic!("the broker hung up"),
            }
        }
    });
    let reader = client(&dir);
    assert_eq!(
        reader
            .open_one(&Selector::Latest("model".into()))
            .expect("visible")
            .epoch(),
        Epoch(1)
    );
    raw.say(
        &ToBroker::Remove {
            request: 8,
            epoch: Epoch(0),
            name: "model".into(),
        },
        &[],
    );
    raw.say(
        &ToBroker::Remove {
            request: 9,
            epoch: Epoch(0),
            name: "model".into(),
        },
        &[],
    );
    until("it is removed", || {
        matches!(raw.hear(), Some((ToClient::Removed { request: 9, .. }, _)))
    });
}

/// A second create of an identity is refused wherever the first one is, and harms it nowhere.
fn an_identity_is_created_once() {
    let dir = Dir::new();
    // Room for one object of one region.
    let _keeper = Agent::small_keeper(&dir, 3);
    until("the broker listens", || dir.join("broker").exists());
    let client = client(&dir);
    put(&client, "model", 1, &CreateOptions::default()).expect("there is room");
    let identity = Identity::random().expect("random bits");
    let options = CreateOptions {
        identity: Some(identity),
        ..CreateOptions::default()
    };
    let again = |why: &str| {
        let error = client
            .create_with("again", layout(9), &options)
            .expect_err("it is there")
            .to_string();
        assert!(error.contains(why), "{error}");
    };
    let mut writer = client
        .create_with("other", layout(2), &options)
        .expect("memory");
    again("the participant is filling an object of this identity");
    fill(&mut writer, 2).expect("the first one's memory is mapped");
    let error = writer
        .commit(&[])
        .expect("queued")
        .wait()
        .expect_err("the keeper is full");
    assert!(
        matches!(
            error,
            ObjectError::Refused {
                refusal: RefusalCode::Keeper,
                ..
            }
        ),
        "{error}"
    );
    again("the object was committed already");
    client.remove("model").expect("it is ours");
    assert_eq!(
        client.commit_again(identity).expect("there is room"),
        Epoch(1)
    );
    again("the identity belongs to another object");
    assert_eq!(seed_of(&client.open("other").expect("an object")), 2);
}

fn a_half_closed_connection_costs_nothing() {
    let (dir, _keeper) = started();
    let client = client(&dir);
    put(&client, "model", 1, &CreateOptions::default()).expect("a commit");
    let (raw, _file) = Raw::greeted(&dir);
    raw.say(
        &ToBroker::Open {
            request: 1,
            selector: Selector::Latest("model".into()),
        },
        &[],
    );
    assert!(matches!(raw.hear(), Some((ToClient::Opened { .. }, _))));
    raw.half_close();
    // Processor time in hundredths of a second. A broker that asks the same socket again and again
    // uses as much as this thread, which does nothing else meanwhile.
    let used = |pid: &str| {
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).expect("its row");
        let fields: Vec<i64> = stat
            .rsplit(')')
            .next()
            .expect("fields")
            .split(' ')
            .filter_map(|field| field.parse().ok())
            .collect();
        // Fields 14 and 15 of proc_pid_stat(5); the first number behind the name is the fourth.
        fields[10] + fields[11]
    };
    let readers = || client.list().expect("it answers").objects[0].readers.len();
    let broker = dir.broker().to_string();
    let (before, own) = (used(&broker), used("thread-self"));
    while used("thread-self") - own < 100 {}
    let spent = used(&broker) - before;
    assert!(
        spent < 25,
        "{spent} hundredths of a second beside 100 of a thread that never waits"
    );
    assert_eq!(readers(), 1, "its lease lasts until it hangs up");
    drop(raw);
    until("it is forgotten", || readers() == 0);
}
