//! What a broker says of a keeper that is full, silent or new, and what survives it.

use broker::server::listing::Listing;
use broker::{Client, CreateOptions, ObjectError};
use rustix::process::Signal;

use crate::agent::{Agent, Said, put, seed_of, serving, to_put};
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
        "keeping::a_stopped_keeper_is_said_to_be_silent",
        a_stopped_keeper_is_silent,
    ),
    (
        "keeping::the_listing_counts_what_the_keeper_has",
        the_listing_counts,
    ),
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
