//! Epochs that begin anew, and what another version of a broker left in the keeper.

use std::os::fd::AsFd;
use std::time::Duration;

use broker::keeper::depositor::Depositor;
use broker::server::listing::Listing;
use broker::{Client, CreateOptions, Epoch, ObjectError};
use rustix::process::Signal;
use transport::shared::sealed_file;

use crate::agent::{Agent, Dir, put, seed_of, serving};
use crate::{Case, until};

pub const CASES: &[Case] = &[
    (
        "histories::a_watch_wakes_for_weights_of_another_history",
        a_watch_wakes_for_another_history,
    ),
    (
        "histories::an_epoch_of_another_history_is_not_expected",
        an_epoch_of_another_history_is_not_expected,
    ),
    (
        "histories::a_history_outlasts_broker_and_keeper_one_by_one",
        a_history_outlasts_either,
    ),
    (
        "histories::what_a_newer_broker_left_stays_in_the_keeper",
        what_a_newer_broker_left_stays,
    ),
    (
        "histories::names_that_were_removed_count_no_more",
        names_that_were_removed_count_no_more,
    ),
];

fn listing(client: &Client) -> Listing {
    client.list().expect("a listing")
}

fn commit(client: &Client, name: &str, seed: u64) -> Epoch {
    put(client, name, seed, &CreateOptions::default()).expect("a commit")
}

fn another_broker(dir: &Dir, client: &Client) {
    let first = dir.broker();
    dir.signal_broker(Signal::KILL);
    until("another broker", || {
        dir.broker() != first && client.is_connected() && client.list().is_ok()
    });
}

/// Ends keeper and broker, and starts others.
fn begin_anew(dir: &Dir, keeper: &mut Agent, client: &Client) {
    let before = client.lineage().expect("it is connected");
    keeper.kill();
    dir.signal_broker(Signal::KILL);
    *keeper = Agent::keeper(dir);
    until("a broker of another history", || {
        client.lineage().is_some_and(|lineage| lineage != before)
    });
}

fn a_watch_wakes_for_another_history() {
    let (dir, mut keeper, client) = serving();
    let mut seen = Epoch(0);
    for seed in 1..=5 {
        seen = commit(&client, "model", seed);
    }
    let reader = client.open("model").expect("an object");
    // One thread watches all along, another begins after the end.
    let watching = {
        let client = client.clone();
        std::thread::spawn(move || client.watch("model", seen, harness::WATCHDOG))
    };
    begin_anew(&dir, &mut keeper, &client);
    assert_eq!(seed_of(&reader), 5, "what is mapped stays");
    let other = crate::agent::client(&dir);
    assert_eq!(commit(&other, "model", 9), Epoch(1), "epochs begin anew");
    let woken = watching.join().expect("no panic").expect("an answer");
    assert_eq!(woken.map(|(epoch, _)| epoch), Some(Epoch(1)));
    assert_eq!(
        client
            .watch("model", Epoch(1), Duration::ZERO)
            .expect("an answer"),
        None,
        "that epoch is known"
    );
    // A client that was told of epoch 5 and hears of nothing meanwhile.
    let late = crate::agent::client(&dir);
    commit(&late, "other", 1);
    let mut seen = Epoch(0);
    for seed in 2..=5 {
        seen = commit(&late, "other", seed);
    }
    begin_anew(&dir, &mut keeper, &late);
    commit(&crate::agent::client(&dir), "other", 7);
    let woken = late
        .watch("other", seen, harness::WATCHDOG)
        .expect("an answer");
    assert_eq!(woken.map(|(epoch, _)| epoch), Some(Epoch(1)));
}

fn an_epoch_of_another_history_is_not_expected() {
    let (dir, mut keeper, client) = serving();
    assert_eq!(commit(&client, "model", 1), Epoch(1));
    begin_anew(&dir, &mut keeper, &client);
    assert_eq!(
        commit(&crate::agent::client(&dir), "model", 2),
        Epoch(1),
        "the same number"
    );
    let expecting = CreateOptions {
        expect: Some(Epoch(1)),
        ..CreateOptions::default()
    };
    let error = put(&client, "model", 3, &expecting).expect_err("another epoch 1");
    assert!(
        matches!(&error, ObjectError::Conflict { why }
            if why.starts_with("epoch 1 of model was expected, and is of an earlier history")),
        "{error}"
    );
    assert_eq!(seed_of(&client.open("model").expect("an object")), 2);
    assert_eq!(
        put(&client, "model", 3, &expecting).expect("it was told of this one"),
        Epoch(2)
    );
}

fn a_history_outlasts_either() {
    let (dir, mut keeper, client) = serving();
    commit(&client, "model", 1);
    let lineage = client.lineage().expect("it is connected").to_string();
    assert_eq!(listing(&client).lineage, lineage);
    another_broker(&dir, &client);
    assert_eq!(listing(&client).lineage, lineage, "the keeper has it");
    keeper.kill();
    keeper = Agent::keeper(&dir);
    until("the keeper has everything", || {
        listing(&client).keeper == "fed"
    });
    another_broker(&dir, &client);
    assert_eq!(listing(&client).lineage, lineage, "the new keeper has it");
    client.remove("model").expect("it is ours");
    another_broker(&dir, &client);
    assert_eq!(commit(&client, "model", 2), Epoch(2));
    begin_anew(&dir, &mut keeper, &client);
    assert_ne!(listing(&client).lineage, lineage);
}

fn what_a_newer_broker_left_stays() {
    let (dir, mut keeper, client) = serving();
    commit(&client, "model", 1);
    // A manifest of version 3 with a region, tombs of version 2, and a kind of file that this
    // version does not know.
    let mut manifest = b"GIPCobj1".to_vec();
    manifest.extend_from_slice(&3u32.to_le_bytes());
    let body = [7u8; 200];
    let sum = crc32c::crc32c_append(crc32c::crc32c(&manifest), &body);
    manifest.extend_from_slice(&sum.to_le_bytes());
    manifest.extend_from_slice(&body);
    let left: [(&str, &[u8]); 5] = [
        ("mzz", &manifest),
        ("rzz.0", b"bytes"),
        ("tzz", b"GIPCtmb2"),
        ("dzz", b"whatever it is"),
        ("mzy", b"no manifest of any version"),
    ];
    let mut depositor = Depositor::new(&dir.join("keeper")).expect("a socket");
    let inventory = depositor.inventory(false).expect("a keeper");
    depositor
        .is_fed(inventory.incarnation)
        .expect("the same one");
    for (name, bytes) in left {
        let file = sealed_file::create("left", bytes).expect("a file");
        depositor.give(name, file.as_fd()).expect("it is there");
    }
    another_broker(&dir, &client);
    let found = listing(&client);
    assert_eq!((found.foreign, found.orphans), (4, 1), "{found:?}");
    assert_eq!(seed_of(&client.open("model").expect("its own")), 1);
    let names = |depositor: &Depositor| depositor.inventory(false).expect("a keeper").names;
    let stay = ["mzz", "rzz.0", "tzz", "dzz"];
    let there = names(&depositor);
    assert!(stay.iter().all(|name| there.contains(*name)), "{there:?}");
    assert!(!there.contains("mzy"), "it is closed: {there:?}");
    // The broker goes on beside it, and gives it to the next keeper too.
    commit(&client, "model", 2);
    client.remove("model").expect("it is ours");
    keeper.kill();
    let _next = Agent::keeper(&dir);
    until("the keeper has everything", || {
        listing(&client).keeper == "fed"
    });
    let there = names(&depositor);
    assert!(stay.iter().all(|name| there.contains(*name)), "{there:?}");
}

fn names_that_were_removed_count_no_more() {
    let dir = Dir::new();
    let _keeper = Agent::naming(&dir, 2);
    until("the broker listens", || dir.join("broker").exists());
    let client = crate::agent::client(&dir);
    for number in 0..5 {
        let name = format!("step{number}");
        commit(&client, &name, number + 1);
        client.remove(&name).expect("it is ours");
    }
    commit(&client, "a", 1);
    commit(&client, "b", 1);
    assert_eq!(
        (listing(&client).names, listing(&client).names_limit),
        (2, 2)
    );
    let error = put(&client, "c", 1, &CreateOptions::default()).expect_err("a third name");
    assert!(
        error.to_string().contains("2 names have an object already"),
        "{error}"
    );
    commit(&client, "a", 2);
    client.remove("b").expect("it is ours");
    commit(&client, "c", 1);
}
