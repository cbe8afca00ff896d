//! Pools: one holder at a time, its death at every step, and what the next one finds.

use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use broker::pool::{Key, Previous, Sealed, bytes_for};
use broker::wire::ToBroker;
use broker::{Client, Epoch, Identity, Layout, Limits, ObjectError, PartSpec, Pool};
use gpu_api::BackendKind;
use ipc_rc::Stream;
use rustix::process::{Pid, Signal, kill_process};
use transport::os::process::own_pidfd;

use crate::agent::{Agent, Command, Dir, Said, client, layout, put, seed_of, serving, started};
use crate::holder::{BLOCK, BLOCKS, Told, create, key, put_block};
use crate::raw::{Raw, hello};
use crate::step::tombstone;
use crate::{Case, until};

pub const CASES: &[Case] = &[
    (
        "pools::a_child_forked_later_keeps_the_hold_past_a_broker",
        a_child_forked_later_keeps_the_hold_past_a_broker,
    ),
    (
        "pools::a_dead_holders_pool_waits_for_its_last_gpu_work",
        a_dead_holders_pool_waits_for_its_last_gpu_work,
    ),
    (
        "pools::a_descriptor_that_is_no_pipe_begins_no_hold",
        a_descriptor_that_is_no_pipe_begins_no_hold,
    ),
    (
        "pools::a_successor_finds_what_was_sealed_and_nothing_else",
        a_successor_finds_what_was_sealed_and_nothing_else,
    ),
    (
        "pools::a_seal_waits_for_its_stream",
        a_seal_waits_for_its_stream,
    ),
    (
        "pools::a_pool_has_one_holder_and_the_refusal_names_both",
        a_pool_has_one_holder_and_the_refusal_names_both,
    ),
    (
        "pools::a_close_waits_for_the_streams",
        a_close_waits_for_the_streams,
    ),
    ("pools::a_drop_ends_the_hold_too", a_drop_ends_the_hold_too),
    (
        "pools::a_hold_outlives_the_broker_and_ends_with_its_process",
        a_hold_outlives_the_broker_and_ends_with_its_process,
    ),
    (
        "pools::a_hold_is_closed_at_the_next_broker",
        a_hold_is_closed_at_the_next_broker,
    ),
    (
        "pools::a_hold_outlives_keeper_then_broker",
        a_hold_outlives_keeper_then_broker,
    ),
    ("pools::a_broker_at_every_step", a_broker_at_every_step),
    ("pools::a_holder_at_every_step", a_holder_at_every_step),
    (
        "pools::a_stopped_holder_is_not_a_dead_one",
        a_stopped_holder_is_not_a_dead_one,
    ),
    (
        "pools::a_reader_notices_what_changes_and_is_told_of_the_next_holder",
        a_reader_notices_what_changes_and_is_told_of_the_next_holder,
    ),
    (
        "pools::the_same_addresses_or_a_refusal",
        the_same_addresses_or_a_refusal,
    ),
    ("pools::names_have_one_kind", names_have_one_kind),
    (
        "pools::bad_input_is_refused_by_name",
        bad_input_is_refused_by_name,
    ),
    (
        "pools::a_free_pool_goes_when_its_time_is_over",
        a_free_pool_goes_when_its_time_is_over,
    ),
    (
        "pools::a_full_keeper_gives_no_hold",
        a_full_keeper_gives_no_hold,
    ),
    (
        "pools::room_that_comes_while_a_hold_begins_costs_no_record",
        room_comes_while_a_hold_begins,
    ),
    (
        "pools::an_eviction_for_the_keeper_leaves_pools_alone",
        an_eviction_leaves_pools_alone,
    ),
];

/// Steps of a broker at which it dies while a pool changes its holder.
pub const BROKER_STEPS: &[&str] = &[
    "adopt.heard",
    "record.kept",
    "record.known",
    "release.heard",
    "holder.buried",
];

/// Steps of a holder, and what it was told.
pub const HOLDER_STEPS: &[(&str, Told)] = &[
    ("adopted", Told::Take),
    ("pool.mapped", Told::Take),
    ("pool.unmapped", Told::Close),
];

/// A process that has been told [`Told::Take`] with success.
fn taker(dir: &Dir) -> Agent {
    let mut agent = Agent::client(dir);
    let said = agent.ask(&Command::Pool(Told::Take));
    assert!(matches!(said, Said::Epoch(_)), "{said:?}");
    agent
}

/// Has a holder do what it says nothing of.
#[track_caller]
fn does(holder: &mut Agent, told: Told, step: &str) {
    assert_eq!(holder.ask(&Command::Pool(told)), Said::Ready, "{step}");
}

#[track_caller]
fn follows(pool: &Pool, hold: (u64, Previous), step: &str) {
    assert_eq!((pool.generation(), pool.previous()), hold, "{step}");
}

/// Adopts as soon as the last holder's death is proven, and looks at every byte that is sealed.
#[track_caller]
fn adopted(client: &Client) -> Pool {
    let mut adopted = None;
    until("the pool can be adopted", || {
        adopted = client.adopt("kv", false).ok();
        adopted.is_some()
    });
    let pool = adopted.expect("just adopted");
    check(&pool);
    pool
}

#[track_caller]
fn check(pool: &Pool) {
    for Sealed { block, key, .. } in pool.sealed().expect("a holder") {
        let mut bytes = vec![0; BLOCK as usize];
        pool.read_part("kv", u64::from(block) * BLOCK, &mut bytes)
            .expect("a block");
        assert!(
            bytes.iter().all(|byte| *byte == key.0[0]),
            "block {block} is listed and not whole"
        );
    }
}

#[track_caller]
fn sealed(pool: &Pool) -> Vec<u32> {
    let sealed = pool.sealed().expect("a holder");
    sealed.into_iter().map(|of| of.block).collect()
}

fn refusal(client: &Client) -> String {
    match client.adopt("kv", false) {
        Ok(_) => panic!("the pool is held"),
        Err(error) => error.to_string(),
    }
}

fn kill_broker(dir: &Dir, client: &Client) {
    let first = dir.broker();
    dir.signal_broker(Signal::KILL);
    until("another broker", || {
        dir.broker() != first && client.list().is_ok()
    });
}

fn a_successor_finds_what_was_sealed_and_nothing_else() {
    let (dir, _keeper, client) = serving();
    let mut first = taker(&dir);
    for (block, byte) in [(0, 1), (1, 2), (2, 3)] {
        does(&mut first, Told::Put(block, byte), "");
    }
    // Block 1 is filled again, and block 5 for the first time: the holder dies in both.
    does(&mut first, Told::Half(1, 4), "");
    does(&mut first, Told::Half(5, 5), "");
    first.kill();
    let pool = adopted(&client);
    assert_eq!(sealed(&pool), [0, 2]);
    follows(&pool, (2, Previous::Died), "");
    // It goes on with every block.
    let stream = Stream::create(client.gpu()).expect("a stream");
    for block in 0..BLOCKS {
        put_block(&pool, &stream, block, 9).expect("queued");
    }
    pool.close(&[&stream]).expect("closed");
    let pool = adopted(&client);
    assert_eq!(sealed(&pool).len(), BLOCKS as usize);
    follows(&pool, (3, Previous::Closed), "");
}

fn a_seal_waits_for_its_stream() {
    let (_dir, _keeper, client) = serving();
    let pool = create(&client).expect("a pool");
    follows(&pool, (1, Previous::Never), "");
    let stream = Stream::create(client.gpu()).expect("a stream");
    let (open, gate) = std::sync::mpsc::channel::<()>();
    pool.invalidate(3).expect("a block");
    stream
        .host_function(move || gate.recv().unwrap_or(()))
        .expect("queued");
    pool.fill("kv", 3 * BLOCK, BLOCK, 7, &stream)
        .expect("queued");
    pool.seal(3, key(7), &stream).expect("queued");
    assert!(
        sealed(&pool).is_empty(),
        "the stream has not come to the seal"
    );
    drop(open);
    stream.synchronize().expect("the stream ends");
    assert_eq!(sealed(&pool), [3]);
    check(&pool);
    // A seal that comes after the block was given up again seals nothing.
    pool.invalidate(3).expect("a block");
    let (open, gate) = std::sync::mpsc::channel::<()>();
    stream
        .host_function(move || gate.recv().unwrap_or(()))
        .expect("queued");
    pool.seal(3, key(8), &stream).expect("queued");
    pool.invalidate(3).expect("a block");
    drop(open);
    stream.synchronize().expect("the stream ends");
    assert!(sealed(&pool).is_empty());
}

fn a_pool_has_one_holder_and_the_refusal_names_both() {
    let (dir, _keeper, client) = serving();
    let mut holder = taker(&dir);
    let why = refusal(&client);
    for part in [
        format!("held by process {}", holder.pid()),
        format!("asked for by process {}", std::process::id()),
        "close the pool there".to_owned(),
    ] {
        assert!(why.contains(&part), "{why}");
    }
    let listing = client.list().expect("a listing");
    let row = listing
        .objects
        .iter()
        .find(|row| row.name == "kv")
        .expect("listed");
    let of = row.pool.as_ref().expect("a pool");
    assert_eq!((row.state.as_str(), of.generation), ("pool", 1));
    assert_eq!(of.holder.as_ref().map(|of| of.pid), Some(holder.pid()));
    does(&mut holder, Told::Close, "");
    let pool = client.adopt("kv", false).expect("closed before");
    follows(&pool, (2, Previous::Closed), "");
}

fn a_close_waits_for_the_streams() {
    let (dir, _keeper, client) = serving();
    let pool = create(&client).expect("a pool");
    let stream = Stream::create(client.gpu()).expect("a stream");
    let (open, gate) = std::sync::mpsc::channel::<()>();
    stream
        .host_function(move || gate.recv().unwrap_or(()))
        .expect("queued");
    put_block(&pool, &stream, 0, 1).expect("queued");
    let closing = std::thread::spawn(move || pool.close(&[]));
    let other = crate::agent::client(&dir);
    assert!(
        refusal(&other).contains("is held by"),
        "the stream still writes"
    );
    drop(open);
    closing.join().expect("no panic").expect("closed");
    assert_eq!(sealed(&adopted(&other)), [0]);
}

fn a_drop_ends_the_hold_too() {
    let (_dir, _keeper, client) = serving();
    let pool = create(&client).expect("a pool");
    let stream = Stream::create(client.gpu()).expect("a stream");
    let (open, gate) = std::sync::mpsc::channel::<()>();
    stream
        .host_function(move || gate.recv().unwrap_or(()))
        .expect("queued");
    put_block(&pool, &stream, 0, 1).expect("queued");
    drop(pool);
    assert!(
        refusal(&client).contains("is held by"),
        "the stream still writes"
    );
    drop(open);
    let pool = adopted(&client);
    assert_eq!(
        (sealed(&pool), pool.previous()),
        (vec![0], Previous::Closed)
    );
}

fn a_hold_outlives_the_broker_and_ends_with_its_process() {
    let (dir, _keeper, client) = serving();
    let mut holder = taker(&dir);
    for _ in 0..2 {
        kill_broker(&dir, &client);
        assert!(refusal(&client).contains(&format!("held by process {}", holder.pid())));
        does(&mut holder, Told::Put(4, 4), "");
    }
    holder.kill();
    let pool = adopted(&client);
    follows(&pool, (2, Previous::Died), "");
    assert_eq!(sealed(&pool), [4]);
    // A broker that finds the processes dead knows at once.
    drop(pool);
    let mut holder = taker_when_free(&dir);
    dir.signal_broker(Signal::STOP);
    holder.kill();
    let first = dir.broker();
    dir.signal_broker(Signal::KILL);
    until("another broker", || {
        dir.broker() != first && client.list().is_ok()
    });
    assert_eq!(adopted(&client).previous(), Previous::Died);
}

/// As [`taker`], once the pool is free.
fn taker_when_free(dir: &Dir) -> Agent {
    let mut agent = Agent::client(dir);
    until("the pool is free", || {
        matches!(agent.ask(&Command::Pool(Told::Take)), Said::Epoch(_))
    });
    agent
}

fn a_hold_is_closed_at_the_next_broker() {
    let (dir, _keeper, client) = serving();
    let mut holder = taker(&dir);
    kill_broker(&dir, &client);
    does(&mut holder, Told::Close, "");
    kill_broker(&dir, &client);
    let pool = client.adopt("kv", false).expect("closed before");
    follows(&pool, (2, Previous::Closed), "");
}

fn a_hold_outlives_keeper_then_broker() {
    let (dir, mut keeper, client) = serving();
    let mut holder = taker(&dir);
    does(&mut holder, Told::Put(1, 1), "");
    keeper.kill();
    until("the broker knows", || {
        client.list().expect("it lives on").keeper == "absent"
    });
    let _next = Agent::keeper(&dir);
    until("the keeper has everything", || {
        client.list().expect("it lives on").keeper == "fed"
    });
    kill_broker(&dir, &client);
    assert!(refusal(&client).contains("is held by"));
    holder.kill();
    let pool = adopted(&client);
    assert_eq!((sealed(&pool), pool.generation()), (vec![1], 2));
}

fn a_dead_holders_pool_waits_for_its_last_gpu_work() {
    let quarantine = BackendKind::Host.quarantine_unseen();
    for loses_broker in [false, true] {
        let (dir, _keeper, client) = serving();
        let mut holder = taker(&dir);
        if loses_broker {
            kill_broker(&dir, &client);
        }
        let start = Instant::now();
        holder.kill();
        let mut said = Vec::new();
        until("the pool can be adopted", || {
            let adopted = client.adopt("kv", false);
            said.extend(adopted.as_ref().err().map(ToString::to_string));
            adopted.is_ok()
        });
        assert!(start.elapsed() >= quarantine, "{loses_broker}: {said:?}");
    }
}

/// Its child has the device's memory mapped, and no pidfd in the keeper: it was forked later.
fn a_child_forked_later_keeps_the_hold_past_a_broker() {
    let (dir, _keeper, client) = serving();
    let mut holder = taker(&dir);
    let Said::Epoch(child) = holder.ask(&Command::Pool(Told::Fork)) else {
        panic!("no child");
    };
    kill_broker(&dir, &client);
    holder.kill();
    // What has exited by now the broker knows before it answers the second question.
    client.list().expect("it serves");
    assert!(refusal(&client).contains("is held by"));
    let child = Pid::from_raw(i32::try_from(child).expect("a pid")).expect("a pid");
    kill_process(child, Signal::KILL).expect("it lives");
    let pool = adopted(&client);
    follows(&pool, (2, Previous::Died), "");
}

fn a_descriptor_that_is_no_pipe_begins_no_hold() {
    let (dir, _keeper, client) = serving();
    let pool = create(&client).expect("a pool");
    pool.close(&[]).expect("a hold that ends");
    let raw = Raw::connect(&dir);
    let own = own_pidfd().expect("a pidfd");
    raw.say(&hello(3, 3), &[own.as_fd()]);
    raw.hear().expect("a welcome");
    let adopt = |request, name: &str| ToBroker::Adopt {
        request,
        token: Identity([7; 16]),
        name: name.into(),
    };
    raw.say(&adopt(1, "kv"), &[own.as_fd()]);
    let (answer, _) = raw.hear().expect("an answer");
    assert!(
        format!("{answer:?}").contains("is not a pipe's"),
        "{answer:?}"
    );
    assert_eq!(adopted(&client).generation(), 2);
}

fn a_broker_at_every_step() {
    for step in BROKER_STEPS {
        let dir = Dir::new();
        let _keeper = Agent::keeper_killing_broker_at(&dir, step);
        until("the broker listens", || dir.join("broker").exists());
        let client = client(&dir);
        let mut holder = Agent::client(&dir);
        until("the pool is taken", || {
            holder.ask(&Command::Pool(Told::Take)) == Said::Epoch(1)
        });
        does(&mut holder, Told::Put(0, 3), step);
        does(&mut holder, Told::Half(1, 4), step);
        holder.kill();
        let pool = adopted(&client);
        follows(&pool, (2, Previous::Died), step);
        assert_eq!(sealed(&pool), [0], "{step}");
        pool.close(&[]).expect("closed");
        let pool = adopted(&client);
        follows(&pool, (3, Previous::Closed), step);
        assert!(tombstone(&dir, step).exists(), "no broker came to {step}");
    }
}

fn a_holder_at_every_step() {
    for (step, told) in HOLDER_STEPS {
        let (dir, _keeper, client) = serving();
        drop(create(&client).expect("a pool"));
        until("the pool is free", || {
            let listing = client.list().expect("a listing");
            let of = listing.objects.iter().find_map(|row| row.pool.as_ref());
            of.is_some_and(|of| of.holder.is_none())
        });
        let mut holder = Agent::client_dying_at(&dir, step);
        if *told == Told::Close {
            assert_eq!(holder.ask(&Command::Pool(Told::Take)), Said::Epoch(2));
        }
        holder.tell(&Command::Pool(*told));
        holder.wait();
        assert_eq!(holder.answer(), None, "{step}: it died there");
        let pool = adopted(&client);
        follows(&pool, (3, Previous::Died), step);
        assert!(tombstone(&dir, step).exists(), "no holder came to {step}");
    }
}

fn a_stopped_holder_is_not_a_dead_one() {
    let (dir, _keeper, client) = serving();
    let mut holder = taker(&dir);
    holder.stop();
    assert!(refusal(&client).contains("is held by"));
    kill_broker(&dir, &client);
    assert!(refusal(&client).contains("is held by"));
    holder.kill();
    assert_eq!(adopted(&client).previous(), Previous::Died);
}

fn a_reader_notices_what_changes_and_is_told_of_the_next_holder() {
    let (_dir, _keeper, client) = serving();
    let pool = create(&client).expect("a pool");
    let stream = Stream::create(client.gpu()).expect("a stream");
    put_block(&pool, &stream, 2, 6).expect("queued");
    stream.synchronize().expect("the stream ends");
    let reader = client.read_pool("kv").expect("a reader");
    assert_eq!((reader.generation(), reader.sealed().len()), (1, 1));
    let mut bytes = vec![0; BLOCK as usize];
    let mut copy = |block: u32| {
        reader
            .read_whole(block, "kv", u64::from(block) * BLOCK, &mut bytes)
            .expect("a range of the part")
            .map(|found| (found.key, bytes.iter().all(|byte| *byte == found.key.0[0])))
    };
    assert_eq!(copy(2), Some((key(6), true)));
    assert_eq!(copy(3), None, "never sealed");
    let found = reader.look(2).expect("whole");
    pool.invalidate(2).expect("a block");
    assert!(!reader.is_still(&found), "the holder may write to it");
    assert!(reader.look(2).is_none() && reader.look(BLOCKS * 1_000).is_none());
    let listed = client.list().expect("a listing");
    assert_eq!(listed.objects[0].readers.len(), 1);
    let none = client
        .watch_pool("kv", 1, Duration::ZERO)
        .expect("an answer");
    assert_eq!(none, None, "its holder is the same");
    let told = std::thread::spawn({
        let client = client.clone();
        move || client.watch_pool("kv", 1, Duration::from_secs(120))
    });
    drop(pool);
    let pool = adopted(&client);
    assert_eq!(told.join().expect("no panic").expect("an answer"), Some(2));
    put_block(&pool, &stream, 2, 8).expect("queued");
    stream.synchronize().expect("the stream ends");
    assert_eq!(copy(2), Some((key(8), true)), "the same memory");
}

fn the_same_addresses_or_a_refusal() {
    let (_dir, _keeper, client) = serving();
    let pool = create(&client).expect("a pool");
    let at = pool.device_ptr("kv");
    pool.close(&[]).expect("closed");
    let pool = client.adopt("kv", true).expect("the same addresses");
    assert_eq!(pool.device_ptr("kv"), at);
    pool.close(&[]).expect("closed");
    let other = client.adopt("kv", false).expect("free");
    let (base, bytes) = (
        other.device_ptr("kv").expect("a part"),
        BLOCK * u64::from(BLOCKS),
    );
    other.close(&[]).expect("closed");
    let in_the_way = client.gpu().backend().reserve_range(
        client.gpu().device(),
        bytes.next_multiple_of(client.gpu().caps().granularity),
        Some(base),
    );
    let in_the_way = in_the_way.expect("free addresses");
    let error = client.adopt("kv", true).expect_err("in use").to_string();
    assert!(error.contains(&format!("{:#x}", base.0)), "{error}");
    // SAFETY: `release_range` asks for a reservation with nothing mapped on it, given back once: made
    // above.
    unsafe { client.gpu().backend().release_range(in_the_way) }.expect("given back");
    let pool = adopted(&client);
    assert_eq!(
        pool.previous(),
        Previous::Closed,
        "the hold that failed has ended"
    );
}

fn names_have_one_kind() {
    let (_dir, _keeper, client) = serving();
    put(&client, "model", 1, &Default::default()).expect("a commit");
    let pool = create(&client).expect("a pool");
    let text = |error: ObjectError| error.to_string();
    let part = || PartSpec::bytes("kv", BLOCK).expect("a part");
    let small = || Layout::pack([part()], b"").expect("a layout");
    let over_an_object = client.create_pool("model", small(), bytes_for(1));
    assert!(text(over_an_object.expect_err("an object")).contains("model has an object, epoch 1"));
    assert!(text(create(&client).expect_err("there already")).contains("kv is a pool already"));
    let over_a_pool = client.create("kv", layout(1)).map(drop);
    assert!(text(over_a_pool.expect_err("a pool")).contains("kv is a pool, and an object"));
    let opened = client.open("kv").map(drop).expect_err("a pool");
    assert!(text(opened).contains("hold a pool with `adopt`"));
    let adopted = client
        .adopt("model", false)
        .map(drop)
        .expect_err("an object");
    assert!(text(adopted).contains("model is no pool, but an object"));
    let none = client
        .adopt("none", false)
        .map(drop)
        .expect_err("not there");
    assert!(
        matches!(&none, ObjectError::NotFound { name, .. } if name == "none"),
        "{none}"
    );
    let read = text(client.read_pool("none").map(drop).expect_err("not there"));
    assert!(read.starts_with("none is not there"), "{read}");
    // A removal leaves the memory to its holder, and the name to the next pool.
    client.remove("kv").expect("removed");
    let stream = Stream::create(client.gpu()).expect("a stream");
    put_block(&pool, &stream, 1, 1).expect("its memory is there");
    pool.close(&[&stream]).expect("noted");
    let again = create(&client).expect("a pool of the name");
    assert_eq!((again.generation(), sealed(&again)), (1, vec![]));
}

fn bad_input_is_refused_by_name() {
    let (_dir, _keeper, client) = serving();
    let text = |error: ObjectError| error.to_string();
    let part = || PartSpec::bytes("kv", BLOCK).expect("a part");
    let small = || Layout::pack([part()], b"").expect("a layout");
    for bytes in [0, 4_096, 8_193, (64 << 20) + 4_096] {
        let error = client.create_pool("p", small(), bytes).map(drop);
        assert!(text(error.expect_err("no journal")).contains("multiple of 4,096"));
    }
    let empty = Layout::pack([], b"").expect("a layout");
    let error = client.create_pool("p", empty, bytes_for(1)).map(drop);
    assert!(text(error.expect_err("no regions")).contains("1 to 15"));
    let pool = create(&client).expect("a pool");
    let stream = Stream::create(client.gpu()).expect("a stream");
    let blocks = pool.blocks();
    assert!(text(pool.invalidate(blocks).expect_err("no block")).contains("longer journal"));
    assert!(text(pool.seal(0, key(1), &stream).expect_err("open")).contains("not invalidated"));
    pool.invalidate(0).expect("a block");
    let twice = pool.seal_all(&[(0, key(1)), (0, key(2))], &stream);
    assert!(text(twice.expect_err("twice")).contains("block 0 twice"));
    assert!(sealed(&pool).is_empty(), "none of them was sealed");
    let beyond = pool.fill("kv", BLOCK * u64::from(BLOCKS) - 1, 2, 0, &stream);
    assert!(text(beyond.expect_err("beyond")).contains("2 bytes at 65535 of kv"));
    let other = pool.write_part("other", 0, &[1]).expect_err("no such part");
    assert!(text(other).contains("no such part"));
    pool.seal_all(&[], &stream).expect("nothing to seal");
    // 300 seals are more than one batch.
    let part = PartSpec::bytes("kv", 300).expect("a part");
    let layout = Layout::pack([part], b"").expect("a layout");
    let many = client
        .create_pool("many", layout, bytes_for(300))
        .expect("a pool");
    let blocks: Vec<(u32, Key)> = (0..300).map(|block| (block, key(block as u8))).collect();
    for (block, _) in &blocks {
        many.invalidate(*block).expect("a block");
    }
    many.seal_all(&blocks, &stream).expect("queued");
    stream.synchronize().expect("the stream ends");
    let found = many.sealed().expect("a holder");
    assert_eq!(found.len(), 300);
    assert!(found.iter().all(|of| of.key == key(of.block as u8)));
}

fn a_free_pool_goes_when_its_time_is_over() {
    let dir = Dir::new();
    let _keeper = Agent::forgetting_pools(&dir);
    until("the broker listens", || dir.join("broker").exists());
    let client = client(&dir);
    let pool = create(&client).expect("a pool");
    put(&client, "model", 1, &Default::default()).expect("a commit");
    drop(pool);
    until("the pool is gone", || {
        let listing = client.list().expect("a listing");
        listing.objects.iter().all(|row| row.name != "kv")
    });
    assert!(client.open("model").is_ok(), "an object is no pool");
    assert!(Limits::default().pool_ttl.is_none());
}

fn a_full_keeper_gives_no_hold() {
    let dir = Dir::new();
    // A region, the journal, the manifest, the first record and one more: none is left for what tells of a death.
    let _keeper = Agent::small_keeper(&dir, 5);
    until("the broker listens", || dir.join("broker").exists());
    let client = client(&dir);
    let error = create(&client)
        .map(drop)
        .expect_err("a full keeper")
        .to_string();
    assert!(error.contains("of at most 5"), "{error}");
    let (other, _keeper) = started();
    assert!(create(&crate::agent::client(&other)).is_ok());
}

/// A full keeper is given everything again when room comes, and what it was not given is taken out
/// of it: a record on its way there must not be.
fn room_comes_while_a_hold_begins() {
    let (dir, mut keeper, client) = serving();
    for seed in 1..=3 {
        put(&client, &format!("model{seed}"), seed, &Default::default()).expect("a commit");
    }
    create(&client)
        .expect("a pool")
        .close(&[])
        .expect("a hold that ends");
    keeper.kill();
    // The record, the pool's three, the two of model2 and of model3, and half of model1.
    let _small = Agent::small_keeper(&dir, 9);
    until("the keeper is full", || {
        client.list().is_ok_and(|list| list.keeper == "full")
    });
    let raw = Raw::connect(&dir);
    raw.say(&hello(3, 3), &[own_pidfd().expect("a pidfd").as_fd()]);
    raw.hear().expect("a welcome");
    for (request, name) in [(1, "model3"), (2, "model2")] {
        let remove = ToBroker::Remove {
            request,
            epoch: Epoch(0),
            name: name.into(),
        };
        raw.say(&remove, &[]);
    }
    let row = || {
        let list = client.list().expect("a listing");
        let row = list.objects.into_iter().find(|row| row.name == "kv");
        row.and_then(|row| row.pool).expect("a pool")
    };
    let (end, _line) = std::io::pipe().expect("a pipe");
    until("the pool is held", || {
        let adopt = ToBroker::Adopt {
            request: 3,
            token: Identity([7; 16]),
            name: "kv".into(),
        };
        raw.say(&adopt, &[end.as_fd()]);
        row().holder.is_some()
    });
    until("the keeper has everything", || {
        client.list().is_ok_and(|list| list.keeper == "fed")
    });
    kill_broker(&dir, &client);
    assert!(row().holder.is_some(), "{:?}", row());
    let refused = client.adopt("kv", false).map(drop).expect_err("it is held");
    assert!(refused.to_string().contains("kv is held by"), "{refused}");
    assert_eq!(seed_of(&client.open("model1").expect("kept")), 1);
}

fn an_eviction_leaves_pools_alone() {
    let dir = Dir::new();
    // A region, the journal, the manifest and the record of a pool, and two objects.
    let _keeper = Agent::small_and_evicting(&dir, 8);
    until("the broker listens", || dir.join("broker").exists());
    let client = client(&dir);
    // Another process, which has no children: each would be a pidfd in the keeper.
    let mut holder = taker(&dir);
    let closed = holder.ask(&Command::Pool(Told::Close));
    assert!(!matches!(closed, Said::Failed(_)), "{closed:?}");
    for seed in 1..=3 {
        put(&client, &format!("model{seed}"), seed, &Default::default()).expect("a commit");
    }
    assert!(client.open("model1").is_err(), "it made room for model3");
    // Five descriptors: the two objects are not enough, and with the pool there would be room.
    let parts = ["a", "b", "c", "d"].map(|name| [PartSpec::bytes(name, 64).expect("a part")]);
    let large = Layout::pack_groups(parts, b"").expect("a layout");
    let error = client
        .create("large", large)
        .and_then(|writer| writer.commit(&[])?.wait())
        .expect_err("nothing is left that may go");
    assert!(error.to_string().contains("of at most 8"), "{error}");
    for name in ["model2", "model3"] {
        client.remove(name).expect("it did not go");
    }
    let again = holder.ask(&Command::Pool(Told::Take));
    assert!(matches!(again, Said::Epoch(2)), "{again:?}");
}
