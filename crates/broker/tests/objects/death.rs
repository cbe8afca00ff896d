//! Deaths, at every named step, on every side.

use broker::{Client, CreateOptions, Epoch, Standing};
use rustix::process::Signal;

use crate::agent::{Agent, Command, Dir, Draws, Said, client, fill, layout, put, seed_of, to_put};
use crate::keeping::TAKE_OVER_STEPS;
use crate::step::tombstone;
use crate::{Case, until};

pub const CASES: &[Case] = &[
    (
        "death::a_killed_broker_loses_nothing",
        a_killed_broker_loses_nothing,
    ),
    (
        "death::a_killed_keeper_is_replaced",
        a_killed_keeper_is_replaced,
    ),
    (
        "death::a_broker_that_waits_ends_with_its_keeper",
        a_broker_that_waits_ends_with_its_keeper,
    ),
    (
        "death::keeper_and_broker_leave_what_is_mapped",
        keeper_and_broker_leave_what_is_mapped,
    ),
    (
        "death::a_stopped_broker_bars_its_successor",
        a_stopped_broker_bars_its_successor,
    ),
    ("death::a_broker_at_every_step", a_broker_at_every_step),
    ("death::a_writer_at_every_step", a_writer_at_every_step),
    (
        "death::a_writer_that_asked_for_its_commit_is_not_needed",
        a_writer_that_asked_is_not_needed,
    ),
    (
        "death::a_writers_memory_comes_back",
        a_writers_memory_comes_back,
    ),
    ("death::a_reader_at_every_step", a_reader_at_every_step),
    ("death::a_keeper_at_every_step", a_keeper_at_every_step),
    (
        "death::a_broker_whose_keeper_ends_before_it_was_read",
        a_broker_whose_keeper_ends_before_it_was_read,
    ),
    (
        "death::a_broker_whose_keeper_ends_as_it_begins_to_serve",
        a_broker_whose_keeper_ends_as_it_begins_to_serve,
    ),
    (
        "death::a_broker_that_feeds_a_new_keeper_at_every_step",
        a_broker_that_feeds_a_new_keeper_at_every_step,
    ),
    (
        "death::a_broker_that_buries_a_writer",
        a_broker_that_buries_a_writer,
    ),
    ("death::every_step_is_named_here", every_step_is_named_here),
    ("death::at_random", at_random),
];

/// Steps of a broker's life that a put, an open, a removal and a restart pass.
const BROKER_STEPS: &[&str] = &[
    "locked",
    "restored",
    "create.accepted",
    "make.begun",
    "make.done",
    "made",
    "answered",
    "commit.heard",
    "commit.accepted",
    "keep.begun",
    "deposit.regions",
    "deposit.regions.there",
    "deposit.manifest",
    "keep.done",
    "visible",
    "forget.begun",
    "forget.tombs",
    "forget.tombs.there",
    "forget.removed",
    "forget.done",
];

/// Steps of a writer's, before it has asked for the commit.
const WRITER_STEPS: &[&str] = &[
    "created",
    "claimed",
    "commit.begun",
    "commit.queued",
    "commit.released",
];

/// What a reader is told, one after the other, and the steps of each.
fn reader_steps() -> [(Command, &'static [&'static str]); 4] {
    [
        (Command::Open("model".into()), &["opened", "mapped"]),
        (Command::Advance, &["advance.imported", "advance.done"]),
        (Command::Sleep, &["sleep.unmapped"]),
        (Command::Wake, &["wake.imported", "wake.mapped"]),
    ]
}

/// Steps of a keeper's, after its broker has read what it has.
const KEEPER_STEPS: &[&str] = &[
    "keeper.ready",
    "keeper.asked",
    "keeper.answered",
    "keeper.stored",
    "keeper.removed",
];

/// Steps of a broker that gives everything to a new keeper.
const FEED_STEPS: &[&str] = &[
    "feed.begun",
    "feed.tombs",
    "feed.stored",
    "feed.given",
    "feed.done",
];

fn connected(dir: &Dir) -> Client {
    until("the broker listens", || {
        Client::builder(crate::agent::gpu())
            .dir(&**dir)
            .connect()
            .is_ok()
    });
    client(dir)
}

/// Puts until it is there, as an application whose broker may die would.
fn put_stubbornly(client: &Client, name: &str, seed: u64) {
    until("a put goes through", || {
        match put(client, name, seed, &CreateOptions::default()) {
            Ok(_) => true,
            Err(_) => client
                .open(name)
                .is_ok_and(|reader| seed_of(&reader) == seed),
        }
    });
}

fn a_killed_broker_loses_nothing() {
    let dir = Dir::new();
    let _keeper = Agent::keeper(&dir);
    let client = connected(&dir);
    for seed in 1..=5 {
        put(
            &client,
            &format!("model{seed}"),
            seed,
            &CreateOptions::default(),
        )
        .expect("a commit");
    }
    let reader = client.open("model3").expect("an object");
    let unfinished = client.create("next", layout(9)).expect("memory");
    let first = dir.broker();
    dir.signal_broker(Signal::KILL);
    assert_eq!(seed_of(&reader), 3, "its mapping needs no broker");
    until("another broker", || {
        dir.broker() != first && client.list().is_ok_and(|list| list.restored == 5)
    });
    for seed in 1..=5 {
        assert_eq!(
            seed_of(&client.open(&format!("model{seed}")).expect("kept")),
            seed
        );
    }
    let identity = unfinished.identity();
    let error = unfinished
        .commit(&[])
        .expect("queued")
        .wait()
        .expect_err("its memory went with the broker")
        .to_string();
    assert!(error.contains(&identity.to_string()), "{error}");
    assert_eq!(
        client.outcome(identity).expect("an answer"),
        Standing::Unknown
    );
    assert_eq!(
        put(&client, "model3", 6, &CreateOptions::default()).expect("a commit"),
        Epoch(2)
    );
    let again = client.list().expect("a listing");
    let model = again
        .objects
        .iter()
        .find(|row| row.identity == reader.identity().to_string())
        .expect("listed");
    assert_eq!(model.readers.len(), 1, "the reader's lease was taken again");
}

fn a_killed_keeper_is_replaced() {
    let dir = Dir::new();
    let mut keeper = Agent::keeper(&dir);
    let client = connected(&dir);
    put(&client, "model", 1, &CreateOptions::default()).expect("a commit");
    keeper.kill();
    until("the broker knows", || {
        client.list().expect("it lives on").keeper == "absent"
    });
    assert_eq!(seed_of(&client.open("model").expect("opens go on")), 1);
    let first = dir.broker();
    // Its broker waits for the lock.
    let _next = Agent::keeper(&dir);
    until("the keeper has everything", || {
        client.list().expect("it lives on").keeper == "fed"
    });
    put(&client, "model", 2, &CreateOptions::default()).expect("commits go on");
    dir.signal_broker(Signal::KILL);
    until("another broker", || {
        dir.broker() != first && client.list().is_ok()
    });
    assert_eq!(
        seed_of(&client.open("model").expect("kept by the new keeper")),
        2
    );
    let older = broker::Selector::Epoch("model".into(), Epoch(1));
    assert_eq!(
        seed_of(&client.open_one(&older).expect("what the old keeper had")),
        1
    );
}

/// One broker serves, one waits, and the one that waits is the live keeper's: what serves next has
/// the options and the program of the keeper that is there.
fn a_broker_that_waits_ends_with_its_keeper() {
    let dir = Dir::new();
    let mut keeper = Agent::keeper(&dir);
    let client = connected(&dir);
    put(&client, "model", 1, &CreateOptions::default()).expect("a commit");
    let serving = dir.broker();
    for bytes in [1 << 20, 2 << 20, 3 << 20] {
        keeper.kill();
        keeper = Agent::limited(&dir, bytes);
        until("the keeper has everything", || {
            client.list().is_ok_and(|list| list.keeper == "fed")
        });
        until("one broker serves, and one waits", || {
            dir.brokers().len() == 2
        });
    }
    assert_eq!(dir.broker(), serving);
    dir.signal_broker(Signal::KILL);
    until("another broker", || {
        dir.broker() != serving && client.list().is_ok()
    });
    let listing = client.list().expect("a listing");
    assert_eq!(
        (listing.limit, listing.restored),
        (Some(3 << 20), 1),
        "it has the last keeper's options"
    );
    until("none waits", || dir.brokers().len() == 1);
}

fn keeper_and_broker_leave_what_is_mapped() {
    let dir = Dir::new();
    let mut keeper = Agent::keeper(&dir);
    let client = connected(&dir);
    put(&client, "model", 1, &CreateOptions::default()).expect("a commit");
    let reader = client.open("model").expect("an object");
    keeper.kill();
    let first = dir.broker();
    dir.signal_broker(Signal::KILL);
    assert_eq!(seed_of(&reader), 1);
    let _next = Agent::keeper(&dir);
    until("another broker", || {
        dir.broker() != first && client.list().is_ok()
    });
    assert!(client.open("model").is_err(), "the rest is gone");
    assert_eq!(seed_of(&reader), 1);
    put(&client, "model", 2, &CreateOptions::default()).expect("a commit");
}

fn a_stopped_broker_bars_its_successor() {
    let dir = Dir::new();
    let mut keeper = Agent::keeper(&dir);
    let client = connected(&dir);
    put(&client, "model", 1, &CreateOptions::default()).expect("a commit");
    let stopped = dir.broker();
    dir.signal_broker(Signal::STOP);
    keeper.kill();
    let next = Agent::keeper(&dir);
    assert_eq!(
        dir.broker(),
        stopped,
        "the lock is its own as long as it lives"
    );
    dir.signal_broker(Signal::CONT);
    until("the new keeper has everything", || {
        client.list().is_ok_and(|list| list.keeper == "fed")
    });
    dir.signal_broker(Signal::KILL);
    until("another broker", || {
        dir.broker() != stopped && client.list().is_ok()
    });
    assert_eq!(seed_of(&client.open("model").expect("kept")), 1);
    drop(next);
}

fn a_broker_at_every_step() {
    for step in BROKER_STEPS {
        let dir = Dir::new();
        // The first broker dies there; the one after it lives.
        let _keeper = Agent::keeper_killing_broker_at(&dir, step);
        let client = connected(&dir);
        let mut seen = Epoch(0);
        for seed in 1..=4 {
            put_stubbornly(&client, "model", seed);
            let reader = client
                .open("model")
                .unwrap_or_else(|error| panic!("{step}: {error}"));
            assert_eq!(seed_of(&reader), seed, "{step}");
            assert!(
                reader.epoch() > seen,
                "{step}: epoch {} after {seen}",
                reader.epoch()
            );
            seen = reader.epoch();
        }
        put_stubbornly(&client, "other", 9);
        until("a removal goes through", || client.remove("model").is_ok());
        assert!(client.open("model").is_err(), "{step}");
        until("a put after it", || {
            put_stubbornly(&client, "model", 5);
            client
                .open("model")
                .is_ok_and(|reader| reader.epoch() > seen)
        });
        assert!(tombstone(&dir, step).exists(), "no broker came to {step}");
        let first = dir.broker();
        dir.signal_broker(Signal::KILL);
        until("another broker", || {
            dir.broker() != first && client.list().is_ok()
        });
        let listing = client.list().expect("a listing");
        assert_eq!(
            listing.orphans, 0,
            "{step}: the broker before it cleaned up"
        );
        assert_eq!(seed_of(&client.open("model").expect("kept")), 5, "{step}");
        assert_eq!(seed_of(&client.open("other").expect("kept")), 9, "{step}");
    }
}

fn a_writer_at_every_step() {
    let dir = Dir::new();
    let _keeper = Agent::keeper(&dir);
    let client = connected(&dir);
    put(&client, "model", 1, &CreateOptions::default()).expect("a commit");
    for step in WRITER_STEPS {
        let mut writer = Agent::client_dying_at(&dir, step);
        writer.tell(&to_put("model", 2));
        writer.wait();
        until("its memory is given back", || {
            let list = client.list().expect("a listing");
            list.objects.iter().all(|row| row.state == "visible")
        });
        let reader = client.open("model").expect("an object");
        assert_eq!(
            (reader.epoch(), seed_of(&reader)),
            (Epoch(1), 1),
            "{step}: never visible"
        );
    }
}

fn a_writer_that_asked_is_not_needed() {
    let dir = Dir::new();
    let _keeper = Agent::keeper(&dir);
    let client = connected(&dir);
    put(&client, "model", 1, &CreateOptions::default()).expect("a commit");
    let mut writer = Agent::client_dying_at(&dir, "commit.asked");
    writer.tell(&to_put("model", 2));
    writer.wait();
    assert_eq!(writer.answer(), None, "it died before it knew");
    until("the commit goes on", || {
        client
            .open("model")
            .is_ok_and(|reader| reader.epoch() == Epoch(2))
    });
    assert_eq!(seed_of(&client.open("model").expect("an object")), 2);
}

fn a_writers_memory_comes_back() {
    let dir = Dir::new();
    let bytes = layout(0)
        .bytes()
        .next_multiple_of(crate::agent::gpu().caps().granularity);
    let _keeper = Agent::limited(&dir, bytes);
    let client = connected(&dir);
    let mut writer = Agent::client_dying_at(&dir, "claimed");
    writer.tell(&to_put("model", 2));
    writer.wait();
    let mut object = None;
    until("there is room again", || {
        object = client.create("model", layout(3)).ok();
        object.is_some()
    });
    let mut object = object.expect("just made");
    fill(&mut object, 3).expect("written");
    assert_eq!(
        object
            .commit(&[])
            .expect("queued")
            .wait()
            .expect("a commit"),
        Epoch(1)
    );
    assert!(client.list().expect("a listing").aborted >= 1);
}

/// Kills and stops broker, keeper and a writer at random, while this process reads, verifies and
/// advances. As often as `GPU_IPC_BROKER_KILLS` says, 20 times if it says nothing;
/// `GPU_IPC_BROKER_SEED` draws other deaths.
fn at_random() {
    let number = |name: &str, default| {
        std::env::var(name).map_or(default, |text| text.parse().expect("a number"))
    };
    let (kills, mut draws) = (
        number("GPU_IPC_BROKER_KILLS", 20),
        Draws(number("GPU_IPC_BROKER_SEED", 88_172_645_463_325_252)),
    );
    let dir = Dir::new();
    let mut keeper = Agent::keeper(&dir);
    let client = connected(&dir);
    put(&client, "model", 1, &CreateOptions::default()).expect("a commit");
    let mut reader = client.open("model").expect("an object");
    let at = reader.device_ptr("p3");
    let mut writer = Agent::client(&dir);
    let (mut seed, mut highest) = (1, Epoch(1));
    let mut fell = [0u64; 4];
    for _ in 0..kills {
        seed += 1;
        writer.tell(&to_put("model", seed));
        // Anywhere in the put, from before its first message to after its end.
        std::thread::sleep(std::time::Duration::from_micros(draws.below(4_000)));
        let what = draws.below(8);
        match what {
            // Both never at once: the new keeper has everything before the next death.
            0 => {
                keeper.kill();
                keeper = Agent::keeper(&dir);
                until("the new keeper has everything", || {
                    client.list().is_ok_and(|list| list.keeper == "fed")
                });
                fell[1] += 1;
            }
            1 => {
                writer.kill();
                fell[2] += 1;
            }
            2 => {
                dir.signal_broker(Signal::STOP);
                std::thread::sleep(std::time::Duration::from_micros(draws.below(2_000)));
                dir.signal_broker(Signal::CONT);
                fell[3] += 1;
            }
            _ => {
                let first = dir.broker();
                dir.signal_broker(Signal::KILL);
                until("another broker", || {
                    dir.broker() != first && client.list().is_ok()
                });
                fell[0] += 1;
            }
        }
        // Whatever fell, what is mapped is whole and stays where it is.
        seed_of(&reader);
        assert_eq!(reader.device_ptr("p3"), at);
        if what == 1 {
            writer = Agent::client(&dir);
        } else {
            match writer.answer() {
                Some(Said::Epoch(epoch)) => {
                    let epoch = Epoch(epoch);
                    assert!(epoch > highest, "epoch {epoch} after {highest}");
                    let newest = client
                        .open("model")
                        .expect("what was answered as committed is there");
                    let lost = newest.epoch() < epoch || seed_of(&newest) != seed;
                    assert!(!lost, "epoch {epoch} of seed {seed} is lost");
                }
                Some(Said::Failed(_)) => {}
                other => panic!("{other:?}"),
            }
        }
        let newest = client.open("model").expect("a name that was never removed");
        assert!(
            newest.epoch() >= highest,
            "epoch {} after {highest}",
            newest.epoch()
        );
        highest = newest.epoch();
        seed_of(&newest);
        reader.advance().expect("the newest");
        assert_eq!(reader.device_ptr("p3"), at, "the addresses stay");
    }
    until("only visible objects are left", || {
        client
            .list()
            .is_ok_and(|list| list.objects.iter().all(|row| row.state == "visible"))
    });
    let list = client.list().expect("a listing");
    assert!(
        list.objects.len() <= 2,
        "the last two epochs alone: {list:?}"
    );
    println!(
        "killed: broker {} keeper {} writer {}, stopped: broker {}; epoch {highest}",
        fell[0], fell[1], fell[2], fell[3]
    );
}

fn a_reader_at_every_step() {
    let dir = Dir::new();
    let _keeper = Agent::keeper(&dir);
    let client = connected(&dir);
    let mut seed = 1;
    put(&client, "model", seed, &CreateOptions::default()).expect("a commit");
    let all = reader_steps();
    let deaths = all
        .iter()
        .enumerate()
        .flat_map(|(last, (_, steps))| steps.iter().map(move |step| (last, *step)));
    for (last, step) in deaths {
        let mut reader = Agent::client_dying_at(&dir, step);
        for (number, (told, _)) in all[..=last].iter().enumerate() {
            if *told == Command::Advance {
                seed += 1;
                put(&client, "model", seed, &CreateOptions::default()).expect("a commit");
            }
            reader.tell(told);
            if number < last {
                assert!(
                    matches!(reader.answer(), Some(Said::Epoch(_))),
                    "{step}: alive until {:?}",
                    all[last].0
                );
            }
        }
        reader.wait();
        assert_eq!(reader.answer(), None, "{step}: it died there");
        until("its leases end", || {
            let list = client.list().expect("a listing");
            list.objects.iter().all(|row| row.readers.is_empty())
        });
        assert_eq!(
            seed_of(&client.open("model").expect("an object")),
            seed,
            "{step}: nothing happened to it"
        );
        until("the look at it ends", || {
            client
                .list()
                .expect("a listing")
                .objects
                .iter()
                .all(|row| row.readers.is_empty())
        });
    }
}

fn a_keeper_at_every_step() {
    for step in KEEPER_STEPS {
        let dir = Dir::new();
        let mut keeper = Agent::keeper_dying_at(&dir, step);
        // Its broker serves without it, and goes on when another one is there. What was committed
        // before is nowhere else.
        let client = connected(&dir);
        let mut asked = client.create("model", layout(1)).expect("memory");
        fill(&mut asked, 1).expect("written");
        let asked = asked.commit(&[]).expect("queued");
        let mut removed = None;
        if *step == "keeper.removed" {
            assert_eq!(asked.wait().expect("a commit"), Epoch(1), "{step}");
            put(&client, "gone", 9, &CreateOptions::default()).expect("a commit");
            removed = Some(std::thread::spawn({
                let client = client.clone();
                move || client.remove("gone")
            }));
        }
        // It ends by itself only there.
        keeper.wait();
        until("the broker knows", || {
            client.list().expect("it lives on").keeper == "absent"
        });
        let _next = Agent::keeper(&dir);
        until("the new keeper has everything", || {
            client.list().is_ok_and(|list| list.keeper == "fed")
        });
        if let Some(removed) = removed {
            // Refused or done: asked again it is done.
            let _ = removed.join().expect("an answer");
            client.remove("gone").expect("it is ours");
            assert!(client.open("gone").is_err(), "{step}");
        }
        until("the commit goes through", || client.open("model").is_ok());
        assert_eq!(
            seed_of(&client.open("model").expect("committed")),
            1,
            "{step}"
        );
        put(&client, "model", 2, &CreateOptions::default()).expect("commits go on");
        let first = dir.broker();
        dir.signal_broker(Signal::KILL);
        until("another broker", || {
            dir.broker() != first && client.list().is_ok()
        });
        assert_eq!(
            seed_of(&client.open("model").expect("kept by the new keeper")),
            2,
            "{step}"
        );
        assert!(client.open("gone").is_err(), "{step}");
    }
}

/// What the keeper had may be in the next one, whose own broker reads it: one that began with nothing
/// would take it out.
fn a_broker_whose_keeper_ends_before_it_was_read() {
    let dir = Dir::new();
    let mut keeper = Agent::keeper_dying_at(&dir, "keeper.listed");
    keeper.wait();
    until("its broker ends", || dir.brokers().is_empty());
    let _next = Agent::keeper(&dir);
    let client = connected(&dir);
    put(&client, "model", 1, &CreateOptions::default()).expect("commits go on");
}

fn a_broker_whose_keeper_ends_as_it_begins_to_serve() {
    let dir = Dir::new();
    let mut keeper = Agent::keeper_dying_at(&dir, "keeper.ready");
    keeper.wait();
    let client = connected(&dir);
    until("the broker knows", || {
        client.list().expect("it lives on").keeper == "absent"
    });
}

/// Broker and keeper die one soon after the other: what is mapped stays good, and what is found is
/// whole.
fn a_broker_that_feeds_a_new_keeper_at_every_step() {
    for step in FEED_STEPS {
        let dir = Dir::new();
        let mut keeper = Agent::keeper_killing_broker_at(&dir, step);
        let client = connected(&dir);
        for seed in 1..=3 {
            put(
                &client,
                &format!("model{seed}"),
                seed,
                &CreateOptions::default(),
            )
            .expect("a commit");
        }
        let reader = client.open("model2").expect("an object");
        let first = dir.broker();
        keeper.kill();
        let _next = Agent::keeper(&dir);
        until("another broker", || {
            dir.broker() != first && client.list().is_ok()
        });
        let whole = (1..=3).filter(|seed| match client.open(&format!("model{seed}")) {
            Ok(found) => seed_of(&found) == *seed,
            Err(_) => false,
        });
        let whole = whole.count();
        assert_eq!(seed_of(&reader), 2, "{step}: its mapping needs nobody");
        let must = match *step {
            "feed.done" => 3,
            // The newest is given first, and is whole before the next one begins.
            "feed.given" => 1,
            _ => 0,
        };
        assert_eq!(whole, must, "{step}: objects that are left");
        assert_eq!(
            client.open("model3").is_ok(),
            must > 0,
            "{step}: the newest"
        );
        put(&client, "next", 7, &CreateOptions::default()).expect("commits go on");
        assert_eq!(
            seed_of(&client.open("next").expect("an object")),
            7,
            "{step}"
        );
    }
}

fn a_broker_that_buries_a_writer() {
    let dir = Dir::new();
    let _keeper = Agent::keeper_killing_broker_at(&dir, "writer.buried");
    let client = connected(&dir);
    put(&client, "model", 1, &CreateOptions::default()).expect("a commit");
    let first = dir.broker();
    let mut writer = Agent::client_dying_at(&dir, "claimed");
    writer.tell(&to_put("model", 2));
    writer.wait();
    until("another broker", || {
        dir.broker() != first && client.list().is_ok()
    });
    let listing = client.list().expect("a listing");
    assert_eq!(
        (listing.objects.len(), listing.orphans),
        (1, 0),
        "{listing:?}"
    );
    assert_eq!(seed_of(&client.open("model").expect("kept")), 1);
    assert_eq!(
        put(&client, "model", 3, &CreateOptions::default()).expect("a commit"),
        Epoch(2)
    );
}

/// A step that nobody dies at would be a step that nobody has tried.
fn every_step_is_named_here() {
    let Some(sources) = std::option_env!("CARGO_MANIFEST_DIR")
        .map(std::path::Path::new)
        .filter(|dir| dir.exists())
    else {
        // A bundle has no sources.
        return;
    };
    let mut left = vec![sources.join("src")];
    let mut steps = std::collections::BTreeSet::new();
    while let Some(path) = left.pop() {
        if path.is_dir() {
            left.extend(
                std::fs::read_dir(&path)
                    .expect("a folder")
                    .map(|entry| entry.expect("an entry").path()),
            );
            continue;
        }
        let text = std::fs::read_to_string(&path).expect("a source");
        for call in text.split("trace_point!(\"").skip(1) {
            steps.insert(call.split('"').next().expect("a name").to_owned());
        }
    }
    let readers = reader_steps()
        .into_iter()
        .flat_map(|(_, steps)| steps)
        .copied();
    let tried: std::collections::BTreeSet<&str> = [
        BROKER_STEPS,
        WRITER_STEPS,
        &["commit.asked"],
        KEEPER_STEPS,
        FEED_STEPS,
        &["writer.buried", "keeper.listed"],
    ]
    .concat()
    .into_iter()
    .chain(readers)
    .chain(crate::pools::BROKER_STEPS.iter().copied())
    .chain(crate::pools::HOLDER_STEPS.iter().map(|(step, _)| *step))
    .chain(TAKE_OVER_STEPS.iter().map(|(step, _)| *step))
    .collect();
    let untried: Vec<&String> = steps
        .iter()
        .filter(|step| !tried.contains(step.as_str()))
        .collect();
    assert!(
        untried.is_empty() && steps.len() > 30,
        "{untried:?} of {steps:?}"
    );
}
