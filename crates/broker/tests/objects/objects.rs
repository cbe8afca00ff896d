//! What objects are for: put, open, advance, sleep, wake, watch, remove.

use std::time::Duration;

use broker::{
    CreateOptions, Epoch, GroupWriter, Layout, ObjectError, PartSpec, Roll, Selector, Standing,
};

use crate::agent::{Agent, Dir, PART_BYTES, client, fill, layout, put, seed_of, serving, started};
use crate::{Case, until};

pub const CASES: &[Case] = &[
    (
        "objects::an_object_is_put_and_opened",
        an_object_is_put_and_opened,
    ),
    (
        "objects::nobody_sees_an_object_before_its_commit",
        nobody_sees_an_object_before_its_commit,
    ),
    (
        "objects::a_reader_advances_at_the_same_addresses",
        a_reader_advances_at_the_same_addresses,
    ),
    (
        "objects::a_reader_switches_to_what_it_prepared",
        a_reader_switches_to_what_it_prepared,
    ),
    (
        "objects::what_was_prepared_is_good_through_a_removal",
        what_was_prepared_is_good_through_a_removal,
    ),
    (
        "objects::another_layout_changes_nothing",
        another_layout_changes_nothing,
    ),
    (
        "objects::a_reader_sleeps_and_wakes",
        a_reader_sleeps_and_wakes,
    ),
    (
        "objects::a_watch_tells_of_a_newer_epoch",
        a_watch_tells_of_a_newer_epoch,
    ),
    (
        "objects::a_removed_name_keeps_its_epoch",
        a_removed_name_keeps_its_epoch,
    ),
    (
        "objects::of_two_writers_who_expect_one_epoch_one_wins",
        of_two_writers_who_expect_one_epoch_one_wins,
    ),
    (
        "objects::only_the_last_epochs_are_kept",
        only_the_last_epochs_are_kept,
    ),
    (
        "objects::replace_gives_up_the_old_epoch_first",
        replace_gives_up_the_old_epoch_first,
    ),
    (
        "objects::a_limit_counts_scratch_and_unfinished_objects",
        a_limit_counts_scratch_and_unfinished_objects,
    ),
    (
        "objects::the_listing_names_readers_and_writers",
        the_listing_names_readers_and_writers,
    ),
    (
        "objects::a_stream_that_still_writes_holds_the_commit_back",
        a_stream_that_still_writes_holds_the_commit_back,
    ),
    (
        "objects::a_fill_holds_the_commit_back",
        a_fill_holds_the_commit_back,
    ),
    (
        "objects::an_object_of_no_parts_and_one_of_many",
        an_object_of_no_parts_and_one_of_many,
    ),
    (
        "objects::sixty_four_readers_share_one_object",
        sixty_four_readers_share_one_object,
    ),
    (
        "objects::a_group_is_there_as_a_whole_or_not_at_all",
        a_group_is_there_as_a_whole_or_not_at_all,
    ),
    (
        "objects::a_group_without_room_for_all_takes_nothing",
        a_group_without_room_for_all_takes_nothing,
    ),
];

fn an_object_is_put_and_opened() {
    let (dir, _keeper) = started();
    let (writer, reader) = (client(&dir), client(&dir));
    assert_eq!(
        put(&writer, "model", 7, &CreateOptions::default()).expect("a commit"),
        Epoch(1)
    );
    let model = reader.open("model").expect("an object");
    assert_eq!(
        (model.epoch(), model.name(), seed_of(&model)),
        (Epoch(1), "model", 7)
    );
    assert_eq!(
        writer.outcome(model.identity()).expect("an answer"),
        Standing::Committed(Epoch(1))
    );
    let by_identity = reader
        .open_one(&Selector::Identity(model.identity()))
        .expect("an object");
    assert_eq!(seed_of(&by_identity), 7);
    assert_ne!(
        by_identity.device_ptr("p0"),
        model.device_ptr("p0"),
        "a mapping of its own"
    );
    let error = reader.open("other").expect_err("nobody put it").to_string();
    assert_eq!(
        error,
        "other is not there: it was never committed; `gpu-ipc objects` lists what is"
    );
    let error = reader
        .open_one(&Selector::Epoch("model".into(), Epoch(9)))
        .expect_err("no such epoch")
        .to_string();
    assert!(
        error.contains("epoch 9 of model is not there: the epochs that are kept: 1"),
        "{error}"
    );
}

fn nobody_sees_an_object_before_its_commit() {
    let (dir, _keeper) = started();
    let client = client(&dir);
    let mut writer = client.create("model", layout(1)).expect("memory");
    fill(&mut writer, 1).expect("written");
    assert!(matches!(
        client.open("model"),
        Err(ObjectError::NotFound { .. })
    ));
    assert!(
        client
            .open_one(&Selector::Identity(writer.identity()))
            .is_err()
    );
    assert_eq!(
        client.outcome(writer.identity()).expect("an answer"),
        Standing::Unfinished
    );
    let identity = writer.identity();
    drop(writer);
    until("the abort is heard", || {
        client.outcome(identity).expect("an answer") == Standing::Unknown
    });
    assert!(client.open("model").is_err());
    assert_eq!(client.list().expect("a listing").bytes, 0);
}

fn a_reader_advances_at_the_same_addresses() {
    let (dir, _keeper) = started();
    let client = client(&dir);
    put(&client, "model", 1, &CreateOptions::default()).expect("a commit");
    let mut reader = client.open("model").expect("an object");
    let at = reader.device_ptr("p2");
    assert!(!reader.advance().expect("nothing newer"));
    for seed in 2..6 {
        put(&client, "model", seed, &CreateOptions::default()).expect("a commit");
        assert_eq!(
            seed_of(&reader),
            seed - 1,
            "what is mapped never changes by itself"
        );
        assert!(reader.advance().expect("a newer epoch"));
        assert_eq!(
            (reader.epoch(), reader.device_ptr("p2"), seed_of(&reader)),
            (Epoch(seed), at, seed)
        );
    }
    let back = Selector::Epoch("model".into(), Epoch(4));
    assert!(
        reader
            .advance_to(&back)
            .expect("an older epoch that is kept")
    );
    assert_eq!((seed_of(&reader), reader.device_ptr("p2")), (4, at));
}

fn a_reader_switches_to_what_it_prepared() {
    let (dir, _keeper) = started();
    let (writer, client) = (client(&dir), client(&dir));
    put(&writer, "model", 1, &CreateOptions::default()).expect("a commit");
    let (mut reader, mut other) = (
        client.open("model").expect("an object"),
        client.open("model").expect("an object"),
    );
    let (at, latest) = (reader.device_ptr("p3"), Selector::Latest("model".into()));
    assert!(
        reader.prepare(&latest).expect("an answer").is_none(),
        "nothing newer"
    );
    put(&writer, "model", 2, &CreateOptions::default()).expect("a commit");
    let next = reader
        .prepare(&latest)
        .expect("it fits")
        .expect("a newer epoch");
    assert_eq!(
        (next.epoch(), reader.epoch(), seed_of(&reader)),
        (Epoch(2), Epoch(1), 1),
        "nothing has changed yet"
    );
    let error = other
        .switch(next)
        .expect_err("another's addresses")
        .to_string();
    assert!(
        error.contains("prepared by this reader") && seed_of(&other) == 1,
        "{error}"
    );
    let next = reader
        .prepare(&latest)
        .expect("it fits")
        .expect("a newer epoch");
    // Newer ones come meanwhile: the switch is to what was prepared.
    put(&writer, "model", 3, &CreateOptions::default()).expect("a commit");
    let identity = next.identity();
    reader.switch(next).expect("prepared");
    assert_eq!(
        (reader.epoch(), reader.identity(), seed_of(&reader)),
        (Epoch(2), identity, 2)
    );
    assert_eq!(reader.device_ptr("p3"), at, "the addresses stay");
    let next = reader
        .prepare(&latest)
        .expect("it fits")
        .expect("a newer epoch");
    reader.sleep(false).expect("it sleeps");
    assert!(matches!(
        reader.prepare(&latest),
        Err(ObjectError::Asleep { .. })
    ));
    let error = reader.switch(next).expect_err("it sleeps").to_string();
    assert!(error.contains("the reader of model sleeps"), "{error}");
    reader.wake().expect("it wakes");
    assert!(reader.advance().expect("the newest") && seed_of(&reader) == 3);
    // Of all that was prepared, refused or dropped, no lease is left.
    drop(other);
    let leases = || {
        let list = client.list().expect("a listing");
        list.objects
            .iter()
            .map(|row| (row.epoch, row.readers.len()))
            .collect::<Vec<_>>()
    };
    until("the other leases end", || leases() == [(2, 0), (3, 1)]);
}

fn what_was_prepared_is_good_through_a_removal() {
    let (dir, _keeper) = started();
    let client = client(&dir);
    put(&client, "model", 1, &CreateOptions::default()).expect("a commit");
    let mut reader = client.open("model").expect("an object");
    put(&client, "model", 2, &CreateOptions::default()).expect("a commit");
    let next = reader
        .prepare(&Selector::Latest("model".into()))
        .expect("it fits")
        .expect("a newer epoch");
    client.remove("model").expect("it is ours");
    let first = dir.broker();
    dir.signal_broker(rustix::process::Signal::KILL);
    reader
        .switch(next)
        .expect("its memory is here, and no broker is asked");
    assert_eq!((reader.epoch(), seed_of(&reader)), (Epoch(2), 2));
    until("another broker", || {
        dir.broker() != first && client.list().is_ok()
    });
}

fn another_layout_changes_nothing() {
    let (dir, _keeper) = started();
    let client = client(&dir);
    put(&client, "model", 1, &CreateOptions::default()).expect("a commit");
    let mut reader = client.open("model").expect("an object");
    let parts = [PartSpec::bytes("p0", PART_BYTES as u64 + 1).expect("a part")];
    let writer = client
        .create("model", Layout::pack(parts, b"").expect("a layout"))
        .expect("memory");
    writer
        .commit(&[])
        .expect("queued")
        .wait()
        .expect("a commit");
    let error = reader.advance().expect_err("another layout").to_string();
    assert!(
        error.contains(
            "epoch 2 of model has another layout: p0 [5000] of type 1/8 at 0+0 here, p0 [5001]"
        ),
        "{error}"
    );
    assert_eq!((reader.epoch(), seed_of(&reader)), (Epoch(1), 1));
}

fn a_reader_sleeps_and_wakes() {
    let (dir, _keeper) = started();
    let client = client(&dir);
    put(&client, "model", 1, &CreateOptions::default()).expect("a commit");
    let mut reader = client.open("model").expect("an object");
    let at = reader.device_ptr("p1");
    reader.sleep(false).expect("unmapped");
    assert!(reader.is_asleep());
    assert!(matches!(reader.read("p1"), Err(ObjectError::Asleep { .. })));
    assert!(matches!(
        reader.advance(),
        Ok(false) | Err(ObjectError::Asleep { .. })
    ));
    client.remove("model").expect("it is ours");
    reader.wake().expect("its lease kept the memory");
    assert_eq!((seed_of(&reader), reader.device_ptr("p1")), (1, at));
    reader.sleep(true).expect("unmapped");
    let error = reader
        .wake()
        .expect_err("the lease was released, and the object removed");
    assert!(matches!(error, ObjectError::NotFound { .. }), "{error}");
    put(&client, "model", 2, &CreateOptions::default()).expect("a commit");
    reader
        .wake_to(&Selector::Latest("model".into()))
        .expect("another epoch");
    assert_eq!(
        (seed_of(&reader), reader.device_ptr("p1"), reader.epoch()),
        (2, at, Epoch(2))
    );
}

fn a_watch_tells_of_a_newer_epoch() {
    let (dir, _keeper) = started();
    let (watcher, writer) = (client(&dir), client(&dir));
    let none = watcher
        .watch("model", Epoch(0), Duration::from_millis(1))
        .expect("no answer is an answer");
    assert_eq!(none, None);
    let thread = std::thread::spawn(move || {
        let mut seen = Epoch(0);
        while seen < Epoch(3) {
            let (epoch, _) = watcher
                .watch("model", seen, Duration::from_secs(100))
                .expect("told")
                .expect("in time");
            assert!(epoch > seen);
            seen = epoch;
        }
    });
    for seed in 1..=3 {
        put(&writer, "model", seed, &CreateOptions::default()).expect("a commit");
    }
    thread.join().expect("it saw the third");
}

fn a_removed_name_keeps_its_epoch() {
    let (dir, _keeper) = started();
    let client = client(&dir);
    for seed in 1..=2 {
        put(&client, "model", seed, &CreateOptions::default()).expect("a commit");
    }
    let reader = client.open("model").expect("an object");
    assert_eq!(client.remove("model").expect("it is ours"), Epoch(2));
    assert_eq!(client.remove("model").expect("again"), Epoch(2));
    let error = client.open("model").expect_err("removed").to_string();
    assert!(
        error.contains("it was removed; its last epoch was 2"),
        "{error}"
    );
    assert_eq!(seed_of(&reader), 2, "who has it keeps it");
    let first = dir.broker();
    dir.signal_broker(rustix::process::Signal::KILL);
    until("another broker", || dir.broker() != first);
    assert!(client.open("model").is_err(), "removed for ever");
    assert_eq!(
        put(&client, "model", 3, &CreateOptions::default()).expect("a commit"),
        Epoch(3)
    );
}

fn of_two_writers_who_expect_one_epoch_one_wins() {
    let (dir, _keeper) = started();
    let client = client(&dir);
    let first = CreateOptions {
        expect: Some(Epoch(0)),
        ..CreateOptions::default()
    };
    let mut a = client
        .create_with("model", layout(1), &first)
        .expect("memory");
    let mut b = client
        .create_with("model", layout(2), &first)
        .expect("memory");
    fill(&mut a, 1).expect("written");
    fill(&mut b, 2).expect("written");
    assert_eq!(
        b.commit(&[]).expect("queued").wait().expect("the first"),
        Epoch(1)
    );
    let error = a
        .commit(&[])
        .expect("queued")
        .wait()
        .expect_err("the second")
        .to_string();
    assert!(
        error.contains("model is at epoch 1, not at 0 as was expected"),
        "{error}"
    );
    assert_eq!(seed_of(&client.open("model").expect("an object")), 2);
    let error = client
        .create_with("model", layout(3), &first)
        .expect_err("too late")
        .to_string();
    assert!(error.contains("at epoch 1, not at 0"), "{error}");
}

fn only_the_last_epochs_are_kept() {
    let (dir, _keeper) = started();
    let client = client(&dir);
    for seed in 1..=5 {
        put(&client, "model", seed, &CreateOptions::default()).expect("a commit");
    }
    let one = |epoch| client.open_one(&Selector::Epoch("model".into(), Epoch(epoch)));
    assert!(one(3).is_err());
    assert_eq!(
        (
            seed_of(&one(4).expect("kept")),
            seed_of(&one(5).expect("kept"))
        ),
        (4, 5)
    );
    client.remove_epoch("model", Epoch(5)).expect("it is ours");
    assert_eq!(client.open("model").expect("the older").epoch(), Epoch(4));
    assert_eq!(
        put(&client, "model", 6, &CreateOptions::default()).expect("a commit"),
        Epoch(6),
        "5 is not used again"
    );
}

fn replace_gives_up_the_old_epoch_first() {
    let dir = Dir::new();
    let one = client_bytes();
    let _keeper = Agent::limited(&dir, one);
    until("the broker listens", || dir.join("broker").exists());
    let client = client(&dir);
    put(&client, "model", 1, &CreateOptions::default()).expect("there is room for one");
    let error = client
        .create("model", layout(2))
        .expect_err("no room for two")
        .to_string();
    assert!(
        error.contains(&format!("{one} of the broker's limit of {one} are taken")),
        "{error}"
    );
    let replace = CreateOptions {
        replace: true,
        ..CreateOptions::default()
    };
    assert_eq!(
        put(&client, "model", 2, &replace).expect("the old one goes first"),
        Epoch(2)
    );
    assert_eq!(seed_of(&client.open("model").expect("an object")), 2);
}

/// The memory of one object of the tests: its parts, rounded up to the host backend's granularity.
fn client_bytes() -> u64 {
    layout(0)
        .bytes()
        .next_multiple_of(crate::agent::gpu().caps().granularity)
}

fn a_limit_counts_scratch_and_unfinished_objects() {
    let dir = Dir::new();
    let _keeper = Agent::limited(&dir, 2 * client_bytes());
    until("the broker listens", || dir.join("broker").exists());
    let client = client(&dir);
    let scratch = client.scratch("kv", layout(0)).expect("room");
    assert!(scratch.device_ptr("p0").is_some());
    let writer = client.create("model", layout(1)).expect("room");
    assert!(client.create("other", layout(2)).is_err(), "both count");
    assert!(client.open("kv").is_err(), "scratch is nobody else's");
    drop((scratch, writer));
    until("both are given back", || {
        client.list().expect("a listing").bytes == 0
    });
    put(&client, "model", 1, &CreateOptions::default()).expect("room again");
}

fn the_listing_names_readers_and_writers() {
    let (dir, _keeper) = started();
    let client = client(&dir);
    put(&client, "model", 1, &CreateOptions::default()).expect("a commit");
    let reader = client.open("model").expect("an object");
    let writer = client.create("next", layout(2)).expect("memory");
    let listing = client.list().expect("a listing");
    let [model, next] = listing.objects.as_slice() else {
        panic!("{listing:?}")
    };
    assert_eq!(
        (model.name.as_str(), model.epoch, model.state.as_str()),
        ("model", 1, "visible")
    );
    assert_eq!(model.identity, reader.identity().to_string());
    assert_eq!(
        model
            .readers
            .iter()
            .map(|r| (r.pid, r.name.as_str()))
            .collect::<Vec<_>>(),
        [(std::process::id(), "test")]
    );
    assert_eq!(
        (next.name.as_str(), next.state.as_str(), next.epoch),
        ("next", "filling", 0)
    );
    assert_eq!(
        next.writer.as_ref().map(|w| w.pid),
        Some(std::process::id())
    );
    assert_eq!(
        (listing.pid, listing.keeper.as_str(), listing.commits),
        (dir.broker(), "fed", 1)
    );
    drop(reader);
    drop(writer);
    until("both are gone", || {
        let listing = client.list().expect("a listing");
        listing.objects.len() == 1 && listing.objects[0].readers.is_empty()
    });
}

fn a_stream_that_still_writes_holds_the_commit_back() {
    let (dir, _keeper) = started();
    let client = client(&dir);
    let mut writer = client.create("model", layout(1)).expect("memory");
    fill(&mut writer, 1).expect("written");
    let stream = ipc_rc::Stream::create(client.gpu()).expect("a stream");
    let (open, gate) = std::sync::mpsc::channel::<()>();
    stream
        .host_function(move || assert!(gate.recv().is_err()))
        .expect("queued");
    let identity = writer.identity();
    let commit = writer.commit(&[&stream]).expect("queued");
    assert_eq!(
        client.outcome(identity).expect("an answer"),
        Standing::Unfinished
    );
    assert!(client.open("model").is_err(), "the stream has not finished");
    drop(open);
    assert_eq!(commit.wait().expect("a commit"), Epoch(1));
    assert_eq!(seed_of(&client.open("model").expect("an object")), 1);
}

fn a_fill_holds_the_commit_back() {
    let (_dir, _keeper, client) = serving();
    let specs =
        [("a", 5_000), ("none", 0), ("b", 5_000)].map(|(name, len)| PartSpec::bytes(name, len));
    let layout = Layout::pack(specs.map(|spec| spec.expect("a part")), b"").expect("a layout");
    let mut writer = client.create("model", layout).expect("memory");
    let stream = ipc_rc::Stream::create(client.gpu()).expect("a stream");
    writer.fill("a", 1, &stream).expect("queued");
    let (open, gate) = std::sync::mpsc::channel::<()>();
    stream
        .host_function(move || gate.recv().unwrap_or(()))
        .expect("queued");
    writer.fill("none", 2, &stream).expect("it is always full");
    writer.fill("b", 3, &stream).expect("queued");
    let commit = writer.commit(&[]).expect("queued");
    assert!(client.open("model").is_err(), "the fills have not finished");
    drop(open);
    commit.wait().expect("a commit");
    let model = client.open("model").expect("an object");
    assert!(
        model.read("a").expect("mapped") == [1; 5_000]
            && model.read("b").expect("mapped") == [3; 5_000]
    );
}

fn an_object_of_no_parts_and_one_of_many() {
    let (dir, _keeper) = started();
    let client = client(&dir);
    let empty = client
        .create("empty", Layout::pack([], b"only this").expect("a layout"))
        .expect("no memory");
    empty.commit(&[]).expect("queued").wait().expect("a commit");
    assert_eq!(
        client.open("empty").expect("an object").layout().user(),
        b"only this"
    );
    let parts = (0..100_000).map(|i| PartSpec::bytes(format!("t{i}"), 4).expect("a part"));
    let mut many = client
        .create("many", Layout::pack(parts, b"").expect("a layout"))
        .expect("memory");
    many.write("t99999", b"last").expect("written");
    many.commit(&[]).expect("queued").wait().expect("a commit");
    let many = client.open("many").expect("an object");
    assert_eq!(
        (many.layout().parts().len(), many.layout().regions().len()),
        (100_000, 1)
    );
    assert_eq!(many.read("t99999").expect("mapped"), b"last");
}

fn sixty_four_readers_share_one_object() {
    let (dir, _keeper) = started();
    let client = client(&dir);
    put(&client, "model", 1, &CreateOptions::default()).expect("a commit");
    let readers: Vec<_> = (0..64)
        .map(|_| client.open("model").expect("an object"))
        .collect();
    assert!(readers.iter().all(|reader| seed_of(reader) == 1));
    assert_eq!(client.list().expect("a listing").bytes, client_bytes());
}

/// A group whose member of rank `n` has the seed `10 * seed + n`.
fn group(client: &broker::Client, seed: u64) -> broker::Result<GroupWriter> {
    let ranks = (0..3)
        .map(|rank| (client.clone(), layout(10 * seed + rank)))
        .collect();
    let mut group = GroupWriter::create("model", ranks)?;
    for (rank, writer) in (0..).zip(&mut group.writers) {
        fill(writer, 10 * seed + rank)?;
    }
    Ok(group)
}

fn a_group_is_there_as_a_whole_or_not_at_all() {
    let (dir, _keeper) = started();
    let client = client(&dir);
    assert_eq!(
        group(&client, 1)
            .expect("memory")
            .commit(Some(Epoch(0)))
            .expect("a commit"),
        Epoch(1)
    );
    let first = Roll::newest(&client, "model").expect("a roll");
    assert_eq!((first.epoch, first.members.len()), (Epoch(1), 3));
    let mut readers: Vec<_> = (0..3)
        .map(|rank| first.open(rank, &client).expect("a member"))
        .collect();
    let at: Vec<_> = readers
        .iter()
        .map(|reader| reader.device_ptr("p2"))
        .collect();
    // Members that were committed without a roll are nothing to who reads the group.
    let unfinished = group(&client, 2).expect("memory");
    let error = unfinished
        .commit(Some(Epoch(7)))
        .expect_err("the group is at 1")
        .to_string();
    assert!(error.contains("model is at epoch 1, not at 7"), "{error}");
    assert_eq!(Roll::newest(&client, "model").expect("a roll"), first);
    assert_eq!(
        group(&client, 3)
            .expect("memory")
            .commit(Some(Epoch(1)))
            .expect("a commit"),
        Epoch(2)
    );
    let second = Roll::newest(&client, "model").expect("a roll");
    for (rank, reader) in readers.iter_mut().enumerate() {
        assert_eq!(seed_of(reader), 10 + rank as u64);
        assert!(second.advance(rank, reader).expect("its next"));
        assert_eq!(
            (seed_of(reader), reader.device_ptr("p2")),
            (30 + rank as u64, at[rank])
        );
    }
    assert!(
        second
            .open(3, &client)
            .expect_err("there are three")
            .to_string()
            .contains("3 of a group of 3")
    );
    put(&client, "plain", 1, &CreateOptions::default()).expect("a commit");
    assert!(
        Roll::newest(&client, "plain")
            .expect_err("no roll")
            .to_string()
            .contains("the roll of a group")
    );
}

fn a_group_without_room_for_all_takes_nothing() {
    let dir = Dir::new();
    let _keeper = Agent::limited(&dir, 2 * client_bytes());
    until("the broker listens", || dir.join("broker").exists());
    let client = client(&dir);
    let error = group(&client, 1)
        .expect_err("room for two of three")
        .to_string();
    assert!(error.contains("limit"), "{error}");
    until("all of it is given back", || {
        client.list().is_ok_and(|list| list.objects.is_empty())
    });
    assert!(
        GroupWriter::create("model", Vec::new())
            .expect_err("nobody")
            .to_string()
            .contains("at least one")
    );
}
