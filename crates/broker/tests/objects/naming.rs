//! The name of a broker's socket, which others take away.

use std::fs;
use std::os::unix::net::UnixListener;

use crate::agent::{Agent, Dir, client, put, seed_of, serving};
use crate::raw::Raw;
use crate::{Case, until};
use broker::wire::ToClient;
use broker::{Client, CreateOptions};

pub const CASES: &[Case] = &[
    (
        "naming::a_socket_that_was_taken_away_is_bound_again",
        a_socket_that_was_taken_away_is_bound_again,
    ),
    (
        "naming::a_connection_for_which_no_descriptor_is_left_is_told_so",
        a_connection_without_a_descriptor_is_told_so,
    ),
];

fn rebound(client: &Client) -> u64 {
    client.list().expect("a listing").rebound
}

fn a_socket_that_was_taken_away_is_bound_again() {
    let (dir, _keeper, first) = serving();
    put(&first, "model", 1, &CreateOptions::default()).expect("a commit");
    let pid = dir.broker();
    let socket = dir.join("broker");
    fs::remove_file(&socket).expect("the broker's socket");
    until("it is there again", || rebound(&first) == 1);
    assert_eq!(seed_of(&client(&dir).open("model").expect("an object")), 1);
    // A file in its place, and then a socket that another process listens at: neither is the broker's
    // to remove, and who is connected is served.
    fs::remove_file(&socket).expect("the broker's socket");
    fs::write(&socket, "mine").expect("a file");
    put(&first, "model", 2, &CreateOptions::default()).expect("a commit");
    fs::remove_file(&socket).expect("a file");
    until("it is there again", || rebound(&first) == 2);
    fs::remove_file(&socket).expect("the broker's socket");
    let other = UnixListener::bind(&socket).expect("the name is free");
    put(&first, "model", 3, &CreateOptions::default()).expect("a commit");
    drop(other);
    until("a dead socket is replaced", || rebound(&first) == 3);
    assert_eq!(seed_of(&client(&dir).open("model").expect("an object")), 3);
    assert_eq!(dir.broker(), pid, "the same broker all along");
}

/// It is not simply hung up on, and the log of a broker that is asked in a loop does not grow with
/// each.
fn a_connection_without_a_descriptor_is_told_so() {
    let dir = Dir::new();
    let _keeper = Agent::of_few_files(&dir, 96);
    until("the broker listens", || dir.join("broker").exists());
    let first = client(&dir);
    // Each takes one descriptor of the broker before it says hello.
    let crowd: Vec<Raw> = (0..150).map(|_| Raw::connect(&dir)).collect();
    let mut told = None;
    until("one is told that the broker has 96 descriptors", || {
        told = crowd.iter().find_map(|raw| match raw.hear_now()? {
            ToClient::Refused { why, .. } => Some(why),
            other => panic!("{other:?}"),
        });
        told.is_some()
    });
    let why = told.expect("it was told");
    assert!(
        why.contains("has no file descriptor left of its 96") && why.contains("LimitNOFILE="),
        "{why}"
    );
    drop(crowd);
    until("others are served", || {
        let next = Client::builder(crate::agent::gpu()).dir(&*dir).connect();
        next.is_ok()
    });
    let listing = first.list().expect("who was connected is served");
    assert!(listing.turned_away >= 1, "{listing:?}");
    assert_eq!(listing.descriptors_limit, 96);
}
