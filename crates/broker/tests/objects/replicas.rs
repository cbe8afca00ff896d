//! Copies of what another host committed: they keep identity and epoch, their name has one home,
//! and what is removed stays so.

use broker::wire::RefusalCode;
use broker::{CreateOptions, Epoch, Identity, ObjectError, Selector};

use crate::agent::{fill, layout, put, seed_of, serving};
use crate::{Case, until};

pub const CASES: &[Case] = &[
    (
        "replicas::a_replica_keeps_identity_and_epoch_and_a_second_copy_is_refused",
        keeps_identity_and_epoch,
    ),
    (
        "replicas::a_name_is_written_on_its_home_alone",
        written_on_its_home_alone,
    ),
    (
        "replicas::what_was_removed_does_not_come_back",
        removed_does_not_come_back,
    ),
];

fn replica(identity: u8, epoch: u64, home: &str) -> CreateOptions {
    let identity = Some(Identity([identity; 16]));
    CreateOptions {
        identity,
        replica_of: Some((Epoch(epoch), home.into())),
        ..CreateOptions::default()
    }
}

fn refusal(result: broker::Result<Epoch>) -> RefusalCode {
    match result {
        Err(ObjectError::Refused { refusal, .. }) => refusal,
        Err(ObjectError::Conflict { .. }) => RefusalCode::Conflict,
        other => panic!("refused, and not {other:?}"),
    }
}

fn keeps_identity_and_epoch() {
    let (dir, _keeper, client) = serving();
    assert_eq!(
        put(&client, "model", 7, &replica(5, 41, "a")).expect("a replica"),
        Epoch(41)
    );
    // Again while it is there, and while another is being filled.
    assert_eq!(
        refusal(put(&client, "model", 7, &replica(5, 41, "a"))),
        RefusalCode::Exists
    );
    let mut filling = client
        .create_with("model", layout(8), &replica(6, 42, "a"))
        .expect("an object to fill");
    assert_eq!(
        refusal(put(
            &crate::agent::client(&dir),
            "model",
            8,
            &replica(6, 42, "a")
        )),
        RefusalCode::Exists
    );
    fill(&mut filling, 8).expect("filled");
    assert_eq!(
        filling
            .commit(&[])
            .expect("a commit")
            .wait()
            .expect("visible"),
        Epoch(42)
    );
    let look = || {
        let reader = client
            .open_one(&Selector::Identity(Identity([5; 16])))
            .expect("the replica");
        assert_eq!((reader.epoch(), seed_of(&reader)), (Epoch(41), 7));
        assert_eq!(reader.manifest().home.as_deref(), Some("a"));
        let regions = reader.regions();
        assert_eq!(Some(regions[0].0), reader.device_ptr("p0"));
        let listing = client.list().expect("a listing");
        let row = listing
            .objects
            .iter()
            .find(|row| row.epoch == 41)
            .expect("its row");
        assert_eq!(
            (row.home.as_deref(), row.identity.as_str()),
            (Some("a"), &*Identity([5; 16]).to_string())
        );
    };
    look();
    let first = dir.broker();
    dir.signal_broker(rustix::process::Signal::KILL);
    until("another broker", || {
        dir.broker() != first && client.list().is_ok_and(|list| list.restored == 2)
    });
    look();
}

fn written_on_its_home_alone() {
    let (_dir, _keeper, client) = serving();
    let plain = CreateOptions::default();
    put(&client, "theirs", 1, &replica(1, 3, "a")).expect("a replica");
    assert_eq!(
        refusal(put(&client, "theirs", 2, &plain)),
        RefusalCode::Home
    );
    assert_eq!(
        refusal(put(&client, "theirs", 2, &replica(2, 4, "b"))),
        RefusalCode::Home
    );
    put(&client, "ours", 1, &plain).expect("an object");
    assert_eq!(
        refusal(put(&client, "ours", 2, &replica(3, 4, "a"))),
        RefusalCode::Home
    );
    // Both began before either had a name.
    let first = client
        .create_with("both", layout(1), &plain)
        .expect("an object to fill");
    let second = client
        .create_with("both", layout(2), &replica(4, 9, "a"))
        .expect("a replica to fill");
    assert_eq!(
        second
            .commit(&[])
            .expect("a commit")
            .wait()
            .expect("visible"),
        Epoch(9)
    );
    assert_eq!(
        refusal(first.commit(&[]).expect("a commit").wait()),
        RefusalCode::Home
    );
    // What makes no sense of a replica.
    let expecting = CreateOptions {
        expect: Some(Epoch(3)),
        ..replica(5, 4, "a")
    };
    assert_eq!(
        refusal(put(&client, "theirs", 2, &expecting)),
        RefusalCode::Protocol
    );
    assert_eq!(
        refusal(put(&client, "theirs", 2, &replica(6, 0, "a"))),
        RefusalCode::Layout
    );
    let error = put(&client, "theirs", 2, &plain)
        .expect_err("written elsewhere")
        .to_string();
    assert!(
        error.contains("theirs is written on host a, and not on this host; write it there"),
        "{error}"
    );
}

fn removed_does_not_come_back() {
    let (dir, _keeper, client) = serving();
    put(&client, "model", 1, &replica(1, 3, "a")).expect("a replica");
    client.remove_epoch("model", Epoch(3)).expect("removed");
    put(&client, "model", 1, &replica(1, 3, "a")).expect("one epoch went, and may come again");
    put(&client, "model", 2, &replica(2, 5, "a")).expect("a replica");
    assert_eq!(client.remove("model").expect("removed"), Epoch(5));
    let look = || {
        assert_eq!(
            refusal(put(&client, "model", 1, &replica(1, 3, "a"))),
            RefusalCode::Conflict
        );
        assert_eq!(
            refusal(put(&client, "model", 2, &replica(2, 5, "a"))),
            RefusalCode::Conflict
        );
        let removed = client.list().expect("a listing").removed;
        let [name] = &removed[..] else {
            panic!("{removed:?}")
        };
        assert_eq!(
            (name.name.as_str(), name.home.as_deref(), name.up_to),
            ("model", Some("a"), 5)
        );
    };
    look();
    let first = dir.broker();
    dir.signal_broker(rustix::process::Signal::KILL);
    until("another broker", || {
        dir.broker() != first && client.list().is_ok()
    });
    look();
    assert_eq!(
        refusal(put(&client, "model", 3, &CreateOptions::default())),
        RefusalCode::Home
    );
    assert_eq!(
        put(&client, "model", 3, &replica(3, 6, "a")).expect("a later epoch"),
        Epoch(6)
    );
}
