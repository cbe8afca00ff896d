//! Parts that the next epoch takes over unchanged, and copies that may be written to.

use broker::{Client, CreateOptions, Epoch, Layout, ObjectError, PartSpec, Readers, Selector};
use ipc_rc::Stream;

use crate::agent::{Agent, Dir, bytes_of, client, layout, put, started};
use crate::{Case, until};

pub const CASES: &[Case] = &[
    (
        "takeover::parts_are_taken_over_without_memory_of_their_own",
        without_memory_of_their_own,
    ),
    (
        "takeover::a_taken_over_part_outlasts_its_first_epoch_and_the_broker",
        it_outlasts_its_first_epoch,
    ),
    (
        "takeover::with_replace_a_part_needs_no_second_room",
        with_replace_a_part_needs_no_second_room,
    ),
    (
        "takeover::what_cannot_be_taken_over_is_named",
        what_cannot_be_taken_over_is_named,
    ),
    (
        "takeover::a_part_is_copied_on_the_device",
        a_part_is_copied_on_the_device,
    ),
    (
        "takeover::a_writable_copy_changes_nothing_of_the_object",
        a_writable_copy_changes_nothing,
    ),
];

/// A large part that stays, and a small one that each epoch writes anew.
const BASE: usize = 3 << 20;
const ADAPTER: usize = 9_000;

fn two(seed: u64) -> Layout {
    let spec = |name, len: usize| PartSpec::bytes(name, len as u64).expect("a part");
    Layout::pack_groups(
        [[spec("base", BASE)], [spec("adapter", ADAPTER)]],
        &seed.to_le_bytes(),
    )
    .expect("a layout")
}

fn unchanged(names: &[&str]) -> CreateOptions {
    CreateOptions {
        unchanged: names.iter().map(|name| (*name).to_owned()).collect(),
        ..CreateOptions::default()
    }
}

fn first(client: &Client) {
    let mut writer = client.create("model", two(1)).expect("memory");
    writer
        .write("base", &bytes_of(1, 0, BASE))
        .expect("written");
    writer
        .write("adapter", &bytes_of(1, 1, ADAPTER))
        .expect("written");
    assert_eq!(
        writer
            .commit(&[])
            .expect("queued")
            .wait()
            .expect("a commit"),
        Epoch(1)
    );
}

fn next(client: &Client, seed: u64, options: &CreateOptions) -> broker::Result<Epoch> {
    let mut writer = client.create_with("model", two(seed), options)?;
    writer.write("adapter", &bytes_of(seed, 1, ADAPTER))?;
    writer.commit(&[])?.wait()
}

/// Checks that the base is of the first epoch, and returns which one the adapter is of.
fn adapter_of(reader: &broker::Reader) -> u64 {
    let seed = u64::from_le_bytes(reader.layout().user().try_into().expect("a seed"));
    assert!(
        reader.read("base").expect("mapped") == bytes_of(1, 0, BASE),
        "the base of epoch {}",
        reader.epoch()
    );
    assert!(
        reader.read("adapter").expect("mapped") == bytes_of(seed, 1, ADAPTER),
        "the adapter of {seed}"
    );
    seed
}

fn without_memory_of_their_own() {
    let (dir, _keeper) = started();
    let client = client(&dir);
    first(&client);
    let one = client.list().expect("a listing").bytes;
    let mut reader = client.open("model").expect("an object");
    let at = (reader.device_ptr("base"), reader.device_ptr("adapter"));
    assert_eq!(
        next(&client, 2, &unchanged(&["base"])).expect("a commit"),
        Epoch(2)
    );
    let more = client.list().expect("a listing").bytes - one;
    assert!(
        more > 0 && more < one,
        "{more} bytes more than {one}: the adapter's alone"
    );
    assert_eq!(
        adapter_of(&reader),
        1,
        "what is mapped never changes by itself"
    );
    assert!(reader.advance().expect("a newer epoch"));
    assert_eq!(
        (
            adapter_of(&reader),
            (reader.device_ptr("base"), reader.device_ptr("adapter"))
        ),
        (2, at)
    );
    let old = client
        .open_one(&Selector::Epoch("model".into(), Epoch(1)))
        .expect("both are there");
    assert_eq!(adapter_of(&old), 1);
}

fn it_outlasts_its_first_epoch() {
    let (dir, _keeper) = started();
    let client = client(&dir);
    first(&client);
    for seed in 2..5 {
        next(&client, seed, &unchanged(&["base"])).expect("a commit");
    }
    assert!(
        client
            .open_one(&Selector::Epoch("model".into(), Epoch(1)))
            .is_err(),
        "two epochs are kept"
    );
    let broker = dir.broker();
    dir.signal_broker(rustix::process::Signal::KILL);
    until("another broker", || {
        dir.broker() != broker && client.is_connected()
    });
    assert_eq!(adapter_of(&client.open("model").expect("kept")), 4);
    next(&client, 5, &unchanged(&["base"])).expect("from what the keeper kept");
    client.remove_epoch("model", Epoch(4)).expect("it is ours");
    assert_eq!(adapter_of(&client.open("model").expect("an object")), 5);
    client.remove("model").expect("it is ours");
    assert_eq!(
        client.list().expect("a listing").bytes,
        0,
        "nothing keeps the memory"
    );
}

fn with_replace_a_part_needs_no_second_room() {
    let dir = Dir::new();
    // Room for one epoch, in regions of 2 MiB on a GPU, and not for two.
    let _keeper = Agent::limited(
        &dir,
        if crate::agent::is_host() {
            4 << 20
        } else {
            8 << 20
        },
    );
    until("the broker listens", || dir.join("broker").exists());
    let client = client(&dir);
    first(&client);
    let error = next(&client, 2, &CreateOptions::default())
        .expect_err("no room for two")
        .to_string();
    assert!(error.contains("limit"), "{error}");
    let options = CreateOptions {
        replace: true,
        ..unchanged(&["base"])
    };
    assert_eq!(
        next(&client, 3, &options).expect("the base is there once"),
        Epoch(2)
    );
    assert_eq!(adapter_of(&client.open("model").expect("an object")), 3);
}

fn what_cannot_be_taken_over_is_named() {
    let (dir, _keeper) = started();
    let client = client(&dir);
    let refused = |layout: Layout, options: &CreateOptions| {
        client
            .create_with("model", layout, options)
            .map(drop)
            .expect_err("refused")
            .to_string()
    };
    let error = refused(two(1), &unchanged(&["base"]));
    assert!(
        error.contains("model has no epoch to take parts over from"),
        "{error}"
    );
    first(&client);
    let error = refused(two(2), &unchanged(&["nothing"]));
    assert!(
        error.contains("nothing, which the layout does not have"),
        "{error}"
    );
    let error = refused(layout(2), &unchanged(&["p1"]));
    assert!(
        error.contains("others of region 0, and not p0") && error.contains("pack_groups"),
        "{error}"
    );
    let all: Vec<String> = (0..4).map(|i| format!("p{i}")).collect();
    let error = refused(
        layout(2),
        &CreateOptions {
            unchanged: all,
            ..CreateOptions::default()
        },
    );
    assert!(
        error.contains("region 0 has") && error.contains("bytes in epoch 1 of model"),
        "{error}"
    );
    let error = refused(
        two(2),
        &CreateOptions {
            readers: Readers::Everybody,
            ..unchanged(&["base"])
        },
    );
    assert!(
        error.contains("epoch 1 of model is open to other users than the draft"),
        "{error}"
    );
    let mut writer = client
        .create_with("model", two(2), &unchanged(&["base"]))
        .expect("as it was");
    let error = writer
        .write("base", &bytes_of(9, 0, BASE))
        .expect_err("it is another epoch's too")
        .to_string();
    assert!(
        error.contains("base, which is taken over from the former epoch"),
        "{error}"
    );
    let stream = Stream::create(client.gpu()).expect("a stream");
    let error = writer
        .fill("base", 9, &stream)
        .expect_err("it is another epoch's too")
        .to_string();
    assert!(
        error.contains("base, which is taken over from the former epoch"),
        "{error}"
    );
    drop(writer);
    assert_eq!(adapter_of(&client.open("model").expect("an object")), 1);
}

fn a_part_is_copied_on_the_device() {
    let (dir, _keeper) = started();
    let client = client(&dir);
    put(&client, "model", 1, &CreateOptions::default()).expect("a commit");
    let mut reader = client.open("model").expect("an object");
    let mut writer = client.create("other", layout(2)).expect("memory");
    for part in ["p0", "p1"] {
        reader.copy_part(part, &mut writer).expect("copied");
    }
    let error = reader
        .copy_part("p9", &mut writer)
        .expect_err("no such part")
        .to_string();
    assert!(error.contains("p9, which model does not have"), "{error}");
    let mut short = client.create(
        "short",
        Layout::pack([PartSpec::bytes("p0", 1).expect("a part")], b"").expect("one"),
    );
    let error = reader
        .copy_part("p0", short.as_mut().expect("memory"))
        .expect_err("too short")
        .to_string();
    assert!(
        error.contains("5000 bytes for p0, which has 1 bytes"),
        "{error}"
    );
    writer
        .commit(&[])
        .expect("queued")
        .wait()
        .expect("a commit");
    let other = client.open("other").expect("an object");
    assert_eq!(
        other.read("p1").expect("mapped"),
        reader.read("p1").expect("mapped")
    );
    reader.sleep(false).expect("unmapped");
    let mut asleep = client.create("asleep", layout(2)).expect("memory");
    assert!(matches!(
        reader.copy_part("p0", &mut asleep),
        Err(ObjectError::Asleep { .. })
    ));
    assert!(matches!(
        reader.writable_copy(),
        Err(ObjectError::Asleep { .. })
    ));
}

fn a_writable_copy_changes_nothing() {
    let (dir, _keeper) = started();
    let client = client(&dir);
    first(&client);
    let mut reader = client.open("model").expect("an object");
    let one = client.list().expect("a listing").bytes;
    let mut copy = reader.writable_copy().expect("memory");
    assert_eq!(
        client.list().expect("a listing").bytes,
        2 * one,
        "it counts"
    );
    for part in ["base", "adapter"] {
        let len = copy.layout().part(part).expect("the same layout").spec.len;
        let mut bytes = vec![0; len as usize];
        copy.read_at(part, 0, &mut bytes).expect("mapped");
        assert!(
            bytes == reader.read(part).expect("mapped"),
            "the same contents of {part}"
        );
        copy.write_part(part, len - 1, &[!bytes[len as usize - 1]])
            .expect("it may be written to");
    }
    assert_eq!(adapter_of(&reader), 1, "the object is as it was");
    next(&client, 2, &unchanged(&["base"])).expect("a commit");
    reader.advance().expect("a newer epoch");
    assert_eq!(
        adapter_of(&reader),
        2,
        "what is taken over is the object's, and not the copy's"
    );
    drop(copy);
    until("its memory is given back", || {
        client
            .list()
            .expect("a listing")
            .objects
            .iter()
            .all(|row| row.state == "visible")
    });
}
