//! What a broker says of a keeper that is full, silent or new, and what survives it.

use broker::server::listing::Listing;
use broker::{Client, Commit, CreateOptions, ObjectError};
use rustix::process::Signal;

use crate::agent::{Agent, Dir, Said, client, fill, layout, put, seed_of, serving, to_put};
use crate::step::tombstone;
use crate::{Case, until};

pub const CASES: &[Case] = &[
    (
        "keeping::a_new_keeper_with_too_little_room_gets_the_newest_objects_whole",
        a_new_keeper_with_too_little_room,
    ),
    (
        "keeping::a_full_keeper_takes_the_rest_when_room_comes",
        a_full_keeper_takes_the_rest,
    ),
    (
        "keeping::a_keeper_stays_full_when_two_commits_were_lost_with_the_one_before_it",
        a_keeper_stays_full,
    ),
    (
        "keeping::a_commit_on_its_way_stays_when_room_comes",
        a_commit_on_its_way_stays,
    ),
    (
        "keeping::a_broker_that_feeds_an_heir_leaves_the_history_there",
        a_broker_that_feeds_an_heir,
    ),
    (
        "keeping::a_stopped_keeper_is_said_to_be_silent",
        a_stopped_keeper_is_silent,
    ),
    (
        "keeping::a_keeper_takes_everything_over_from_the_one_before_it",
        a_keeper_takes_everything_over,
    ),
    (
        "keeping::a_keeper_that_cannot_take_all_over_leaves_it_where_it_is",
        a_keeper_that_cannot_take_all,
    ),
    (
        "keeping::a_keeper_at_every_step_of_taking_over",
        a_keeper_at_every_step_of_taking_over,
    ),
    (
        "keeping::a_limit_that_presses_evicts_the_oldest_that_is_not_read",
        a_limit_that_presses_evicts,
    ),
    (
        "keeping::a_full_keeper_makes_room_for_a_commit_by_eviction",
        a_full_keeper_makes_room_by_eviction,
    ),
    (
        "keeping::the_listing_counts_what_the_keeper_has",
        the_listing_counts,
    ),
];

/// Steps of two keepers of which one takes over, and whether the step is the first one's.
pub const TAKE_OVER_STEPS: &[(&str, bool)] = &[
    ("hand_over.begun", true),
    ("hand_over.written", true),
    ("hand_over.done", true),
    ("take_over.read", false),
    ("take_over.told", false),
];

/// Descriptors of an object of these tests: one region and the manifest.
const AN_OBJECT: usize = 2;

fn put_all(client: &Client, seeds: std::ops::RangeInclusive<u64>) {
    for seed in seeds {
        put(
            client,
            &format!("model{seed}"),
            seed,
            &CreateOptions::default(),
        )
        .expect("a commit");
    }
}

fn listing(client: &Client) -> Listing {
    client.list().expect("a listing")
}

fn unkept(listing: &Listing) -> Vec<&str> {
    let rows = listing.objects.iter().filter(|row| row.unkept);
    rows.map(|row| row.name.as_str()).collect()
}

fn a_new_keeper_with_too_little_room() {
    let (dir, mut keeper, client) = serving();
    put_all(&client, 1..=3);
    put(&client, "model3", 4, &CreateOptions::default()).expect("a second epoch");
    keeper.kill();
    // Room for two objects of four and for half of another one.
    let most = 2 * AN_OBJECT + 1;
    let _small = Agent::small_keeper(&dir, most);
    until("the keeper is full", || listing(&client).keeper == "full");
    let full = listing(&client);
    assert_eq!(
        (full.shelf.kept, full.shelf.most, full.shelf.missing),
        (most as u64 - 1, most as u64, 2),
        "{:?}",
        full.shelf
    );
    assert_eq!(
        full.shelf.why,
        format!("it has {} descriptors of at most {most}", most - 1)
    );
    // The newest epoch of each name goes before an older one of a newer name.
    assert_eq!(unkept(&full), ["model1", "model3"], "epoch 1 of model3");
    let error = put(&client, "next", 9, &CreateOptions::default()).expect_err("no room");
    let ObjectError::Refused { why, .. } = &error else {
        panic!("{error}");
    };
    assert!(
        why.starts_with(&format!(
            "the keeper has {most} descriptors of at most {most}"
        )),
        "{why}"
    );
    assert_eq!(
        listing(&client).shelf.kept,
        most as u64 - 1,
        "no half of it stays"
    );
    let first = dir.broker();
    dir.signal_broker(Signal::KILL);
    until("another broker", || {
        dir.broker() != first && client.list().is_ok()
    });
    let after = listing(&client);
    assert_eq!((after.restored, after.orphans), (2, 0), "{after:?}");
    assert_eq!(seed_of(&client.open("model3").expect("kept")), 4);
    assert_eq!(seed_of(&client.open("model2").expect("kept")), 2);
    assert!(client.open("model1").is_err(), "it went with the broker");
}

fn a_full_keeper_takes_the_rest() {
    let (dir, mut keeper, client) = serving();
    put_all(&client, 1..=3);
    keeper.kill();
    let _small = Agent::small_keeper(&dir, 2 * AN_OBJECT);
    until("the keeper is full", || listing(&client).keeper == "full");
    assert_eq!(unkept(&listing(&client)), ["model1"]);
    client.remove("model3").expect("it is ours");
    until("the keeper has everything", || {
        listing(&client).keeper == "fed"
    });
    assert_eq!(listing(&client).shelf.missing, 0);
    let first = dir.broker();
    dir.signal_broker(Signal::KILL);
    until("another broker", || {
        dir.broker() != first && client.list().is_ok()
    });
    for seed in 1..=2 {
        let reader = client.open(&format!("model{seed}")).expect("kept");
        assert_eq!(seed_of(&reader), seed);
    }
}

/// Queues the commit of an object while the keeper is stopped, and waits until the broker has it.
fn on_its_way(client: &Client, name: &str, seed: u64) -> Commit {
    let mut writer = client.create(name, layout(seed)).expect("memory");
    fill(&mut writer, seed).expect("written");
    let commit = writer.commit(&[]).expect("queued");
    until("the commit waits for the keeper", || {
        let rows = listing(client).objects;
        rows.iter()
            .any(|row| row.name == name && row.state == "keeping")
    });
    commit
}

fn another_broker(dir: &Dir, client: &Client) -> Listing {
    let first = dir.broker();
    dir.signal_broker(Signal::KILL);
    until("another broker", || {
        dir.broker() != first && client.list().is_ok()
    });
    listing(client)
}

fn a_keeper_stays_full() {
    let (dir, mut keeper, client) = serving();
    put_all(&client, 1..=3);
    keeper.stop();
    let commits = [4, 5].map(|seed| on_its_way(&client, &format!("next{seed}"), seed));
    // It learns of all of it at once: the end of the one, both commits, and the next one.
    dir.signal_broker(Signal::STOP);
    keeper.kill();
    let _small = Agent::small_keeper(&dir, 2 * AN_OBJECT);
    dir.signal_broker(Signal::CONT);
    until("the keeper has what it has room for", || {
        listing(&client).shelf.kept == 2 * AN_OBJECT as u64
    });
    // Whatever the broker asked the keeper before, it knows when it has this answer.
    for commit in commits {
        commit.wait().expect_err("no room");
    }
    let full = listing(&client);
    assert_eq!((&*full.keeper, full.shelf.missing), ("full", 1), "{full:?}");
    assert_eq!(another_broker(&dir, &client).restored, 2);
}

fn a_commit_on_its_way_stays() {
    let (dir, mut keeper, client) = serving();
    put_all(&client, 1..=3);
    keeper.kill();
    let small = Agent::small_keeper(&dir, 2 * AN_OBJECT);
    until("the keeper is full", || listing(&client).keeper == "full");
    small.stop();
    let removed = std::thread::spawn({
        let client = client.clone();
        move || client.remove("model3")
    });
    until("the removal waits for the keeper", || {
        let rows = listing(&client).objects;
        rows.iter().all(|row| row.name != "model3")
    });
    // It gets the room that the removal makes.
    let next = on_its_way(&client, "next", 9);
    small.signal(Signal::CONT);
    removed.join().expect("an answer").expect("it is ours");
    next.wait().expect("there is room");
    put(&client, "late", 7, &CreateOptions::default()).expect_err("no room");
    let after = another_broker(&dir, &client);
    assert_eq!((after.restored, after.orphans), (2, 0), "{after:?}");
    assert_eq!(seed_of(&client.open("next").expect("committed")), 9);
}

/// The broker dies when it has taken the first file out of a keeper that took everything over.
fn a_broker_that_feeds_an_heir() {
    let (dir, step) = (Dir::new(), "forget.removed");
    let mut first = Agent::keeper_killing_broker_at(&dir, step);
    until("the broker listens", || dir.join("broker").exists());
    let client = client(&dir);
    put_all(&client, 1..=2);
    let (serving, lineage) = (dir.broker(), listing(&client).lineage);
    let mut heir = Agent::heir(&dir, None, None);
    assert_eq!(heir.answer(), Some(Said::Ready));
    assert!(first.wait().success(), "the first ended by itself");
    until("another broker", || {
        dir.broker() != serving && client.list().is_ok()
    });
    assert!(tombstone(&dir, step).exists(), "no broker came to {step}");
    let after = listing(&client);
    assert_eq!((after.restored, after.lineage), (2, lineage));
}

fn a_stopped_keeper_is_silent() {
    let (_dir, keeper, client) = serving();
    put_all(&client, 1..=1);
    assert_eq!(listing(&client).keeper, "fed");
    keeper.stop();
    until(
        "the keeper is silent, though nothing was asked of it",
        || {
            let listing = listing(&client);
            listing.keeper == "silent" && listing.shelf.silent_s >= 1
        },
    );
    let said = listing(&client).shelf;
    assert_eq!(
        said.why,
        format!("it has not answered for {} s", said.silent_s)
    );
    assert_eq!(seed_of(&client.open("model1").expect("opens go on")), 1);
    keeper.signal(Signal::CONT);
    until("it answers again", || listing(&client).keeper == "fed");
    put_all(&client, 2..=2);
}

fn the_listing_counts() {
    let (dir, mut keeper, client) = serving();
    put_all(&client, 1..=2);
    let shelf = listing(&client).shelf;
    assert_eq!((shelf.kept, shelf.starts), (2 * AN_OBJECT as u64, 1));
    dir.signal_broker(Signal::KILL);
    until("another broker", || {
        client.list().is_ok_and(|list| list.shelf.starts == 2)
    });
    let mut other = Agent::client(&dir);
    keeper.kill();
    until("the keeper is away", || listing(&client).keeper == "absent");
    other.tell(&to_put("next", 9));
    let away = listing(&client);
    assert_eq!(away.keeper_deaths, 1, "{away:?}");
    assert_eq!(away.shelf.missing, 2, "they are in the broker alone");
    let _next = Agent::keeper(&dir);
    assert_eq!(other.answer(), Some(Said::Epoch(1)), "the commit waited");
}

/// Broker and second keeper die at once, with no moment between: what the first had is in the
/// second.
fn a_keeper_takes_everything_over() {
    let (dir, mut first, client) = serving();
    // More names than one packet has.
    put_all(&client, 1..=70);
    let serving = dir.broker();
    // The broker is stopped: what survives is what was taken over, and not what it gives again.
    dir.signal_broker(Signal::STOP);
    let mut heir = Agent::heir(&dir, None, None);
    assert_eq!(heir.answer(), Some(Said::Ready));
    assert!(first.wait().success(), "the first ended by itself");
    dir.signal_broker(Signal::KILL);
    until("another broker", || {
        dir.broker() != serving && client.list().is_ok()
    });
    let listing = listing(&client);
    assert_eq!((listing.restored, listing.orphans), (70, 0));
    for seed in 1..=70 {
        let reader = client.open(&format!("model{seed}")).expect("taken over");
        assert_eq!(seed_of(&reader), seed);
    }
    until("one broker serves", || dir.brokers().len() == 1);
    put_all(&client, 71..=71);
}

fn a_keeper_that_cannot_take_all() {
    let (dir, _first, client) = serving();
    put_all(&client, 1..=3);
    let mut small = Agent::heir(&dir, Some(3), None);
    let Some(Said::Failed(why)) = small.answer() else {
        panic!("it has room for one object and a half");
    };
    assert!(
        why.contains("and this one may keep 3") && why.contains("raise `--most`"),
        "{why}"
    );
    put_all(&client, 4..=4);
    until("the first goes on", || listing(&client).keeper == "fed");
    assert_eq!(listing(&client).keeper_deaths, 0);
}

fn a_keeper_at_every_step_of_taking_over() {
    for (step, of_first) in TAKE_OVER_STEPS {
        let dir = Dir::new();
        let mut first = if *of_first {
            Agent::keeper_dying_at(&dir, step)
        } else {
            Agent::keeper(&dir)
        };
        until("the broker listens", || dir.join("broker").exists());
        let client = client(&dir);
        put_all(&client, 1..=3);
        let dies_at = (!of_first).then_some(*step);
        let mut heir = Agent::heir(&dir, None, dies_at);
        if *of_first {
            first.wait();
            assert_eq!(heir.answer(), Some(Said::Ready), "{step}: it is the keeper");
        } else {
            heir.wait();
            if *step == "take_over.told" {
                // Both have gone: the next one is given everything.
                first.wait();
                heir = Agent::keeper(&dir);
            }
        }
        assert!(tombstone(&dir, step).exists(), "nothing came to {step}");
        put_all(&client, 4..=4);
        until("a keeper has everything", || {
            listing(&client).keeper == "fed"
        });
        let serving = dir.broker();
        dir.signal_broker(Signal::KILL);
        until("another broker", || {
            dir.broker() != serving && client.list().is_ok()
        });
        for seed in 1..=4 {
            let reader = client.open(&format!("model{seed}")).expect("kept");
            assert_eq!(seed_of(&reader), seed, "{step}");
        }
        drop(heir);
    }
}

/// What goes is out of the keeper too, and what is read stays.
fn a_limit_that_presses_evicts() {
    let dir = Dir::new();
    let granularity = crate::agent::gpu().caps().granularity;
    let one = layout(0).bytes().next_multiple_of(granularity);
    let _keeper = Agent::evicting(&dir, 3 * one);
    until("the broker listens", || dir.join("broker").exists());
    let client = client(&dir);
    put_all(&client, 1..=3);
    let reader = client.open("model1").expect("an object");
    put_all(&client, 4..=4);
    let names = |listing: &Listing| -> Vec<String> {
        listing.objects.iter().map(|row| row.name.clone()).collect()
    };
    let after = listing(&client);
    assert_eq!(names(&after), ["model1", "model3", "model4"]);
    assert_eq!((after.evicted, after.commit_latency.count), (1, 4));
    let why = client.open("model2").expect_err("it went").to_string();
    assert!(why.contains("its last epoch was 1"), "{why}");
    let serving = dir.broker();
    dir.signal_broker(Signal::KILL);
    until("another broker", || {
        dir.broker() != serving && client.list().is_ok()
    });
    assert_eq!(names(&listing(&client)), ["model1", "model3", "model4"]);
    assert_eq!(seed_of(&reader), 1);
    let again = put(&client, "model2", 2, &CreateOptions::default()).expect("another one goes");
    assert_eq!(again, broker::Epoch(2), "no epoch is used again");
}

/// No limit of bytes presses: the keeper's room does.
fn a_full_keeper_makes_room_by_eviction() {
    let dir = Dir::new();
    let _keeper = Agent::small_and_evicting(&dir, 2 * AN_OBJECT);
    until("the broker listens", || dir.join("broker").exists());
    let client = client(&dir);
    put_all(&client, 1..=4);
    let names = |listing: &Listing| -> Vec<String> {
        listing.objects.iter().map(|row| row.name.clone()).collect()
    };
    let after = listing(&client);
    assert_eq!(names(&after), ["model3", "model4"]);
    assert_eq!((after.evicted, after.keeper.as_str()), (2, "fed"));
    // What is read stays; where nothing may go the keeper's own reason is told.
    let readers = ["model3", "model4"].map(|name| client.open(name).expect("an object"));
    let error = put(&client, "model5", 5, &CreateOptions::default()).expect_err("no room");
    assert!(
        error.to_string().contains("descriptors of at most 4"),
        "{error}"
    );
    drop(readers);
    until("nothing is read", || {
        let listing = listing(&client);
        listing.objects.iter().all(|row| row.readers.is_empty())
    });
    put_all(&client, 6..=6);
    let serving = dir.broker();
    dir.signal_broker(Signal::KILL);
    until("another broker", || {
        dir.broker() != serving && client.list().is_ok()
    });
    let after = listing(&client);
    assert_eq!((after.restored, after.orphans), (2, 0), "{after:?}");
    assert!(names(&after).contains(&"model6".into()), "{after:?}");
}
