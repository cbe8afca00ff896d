//! Who may do what: other users, other containers, a commit that was refused, memory that was
//! another's.

use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use broker::wire::RefusalCode;
use broker::{
    Client, CreateOptions, Epoch, GroupWriter, Identity, ObjectError, Readers, Roll, Selector,
    Standing,
};
use gpu_api::Error;
use harness::WATCHDOG;
use harness::surroundings::{NOBODY, as_member, as_user, contained, has_users};
use ipc_rc::Stream;

use crate::agent::{
    Agent, Command, Dir, Said, client, fill, layout, put, seed_of, serving, started, to_put,
};
use crate::{Case, until};

pub const CASES: &[Case] = &[
    (
        "rules::a_refused_commit_may_be_asked_for_again",
        a_refused_commit_may_be_asked_for_again,
    ),
    (
        "rules::a_refused_object_is_given_up",
        a_refused_object_is_given_up,
    ),
    (
        "rules::lost_addresses_say_so_and_the_object_opens_anew",
        lost_addresses_say_so,
    ),
    (
        "rules::memory_that_comes_back_shows_nothing_of_its_last_user",
        memory_shows_nothing,
    ),
    (
        "rules::a_forked_child_is_refused_every_call",
        a_forked_child_is_refused_every_call,
    ),
];

/// Needs a kernel and a machine that let this user make namespaces.
pub const NAMESPACES: &[Case] = &[(
    "rules::containers_share_a_directory_alone",
    containers_share_a_directory_alone,
)];

/// Needs root, and a test binary that others may run.
pub const USERS: &[Case] = &[
    (
        "rules::another_user_opens_what_was_said_at_the_create",
        another_user_opens_what_was_said_at_the_create,
    ),
    (
        "rules::the_brokers_own_user_sees_all_removes_all_and_frees_names",
        the_operator_governs_all,
    ),
    (
        "rules::a_group_is_let_in_and_reads_what_is_open_to_it",
        a_group_is_let_in_and_reads,
    ),
    (
        "rules::a_user_who_may_not_connect_any_more_is_hung_up_on",
        a_user_who_may_not_connect_any_more,
    ),
    (
        "rules::a_name_belongs_to_who_committed_it_first",
        a_name_belongs_to_who_committed_it_first,
    ),
];

/// What nobody else may find in memory that was given back.
const SECRET: u64 = 0x5ec2_e75e_c2e7_5ec2;

fn containers_share_a_directory_alone() {
    let (dir, _keeper) = started();
    let container = || {
        let mut agent = Agent::client_by(contained(&dir), Path::new("/mnt"));
        assert_eq!(agent.answer(), Some(Said::Ready), "in a container");
        agent
    };
    let (mut writer, mut reader) = (container(), container());
    assert_eq!(writer.ask(&to_put("model", 7)), Said::Epoch(1));
    assert_eq!(
        reader.ask(&Command::Open("model".into())),
        Said::Epoch(1),
        "every byte was compared"
    );
    assert_eq!(writer.ask(&to_put("model", 8)), Said::Epoch(2));
    assert_eq!(reader.ask(&Command::Advance), Said::Epoch(2));
    // A death in a container is proven too.
    let outside = client(&dir);
    writer.kill();
    reader.kill();
    until("both are gone", || {
        outside.list().is_ok_and(|list| {
            list.objects
                .iter()
                .all(|row| row.readers.is_empty() && row.writer.is_none())
        })
    });
    assert_eq!(seed_of(&outside.open("model").expect("an object")), 8);
}

/// A broker that lets another user in, in a directory that it may enter.
fn open_to_others() -> (Dir, Agent) {
    let dir = Dir::new();
    std::fs::set_permissions(&*dir, std::fs::Permissions::from_mode(0o755)).expect("it is ours");
    let keeper = Agent::open_to(&dir, NOBODY);
    until("the broker listens", || dir.join("broker").exists());
    (dir, keeper)
}

fn somebody_else(dir: &Dir) -> Agent {
    let mut agent = Agent::client_by(as_user(NOBODY), dir);
    assert_eq!(agent.answer(), Some(Said::Ready), "another user's");
    agent
}

fn another_user_opens_what_was_said_at_the_create() {
    let (dir, _keeper) = open_to_others();
    let owner = client(&dir);
    put(&owner, "model", 1, &CreateOptions::default()).expect("a commit");
    let mut other = somebody_else(&dir);
    let why = other.cannot(&Command::Open("model".into()));
    assert!(why.contains(&format!("not for uid {NOBODY}")), "{why}");
    let shared = CreateOptions {
        readers: Readers::Uids(vec![NOBODY]),
        ..CreateOptions::default()
    };
    put(&owner, "shared", 2, &shared).expect("a commit");
    assert_eq!(other.ask(&Command::Open("shared".into())), Said::Epoch(1));
    assert_eq!(
        other.ask(&Command::List),
        Said::Names(vec!["shared".into()]),
        "it knows of nothing else"
    );
    let strict = Dir::new();
    std::fs::set_permissions(&*strict, std::fs::Permissions::from_mode(0o755)).expect("it is ours");
    let _keeper = Agent::keeper(&strict);
    until("the broker listens", || strict.join("broker").exists());
    let refused = Agent::client_by(as_user(NOBODY), &strict).answer();
    assert!(
        matches!(refused, Some(Said::Failed(_))),
        "a broker of one user alone: {refused:?}"
    );
}

fn a_user_who_may_not_connect_any_more() {
    let dir = Dir::new();
    std::fs::set_permissions(&*dir, std::fs::Permissions::from_mode(0o755)).expect("it is ours");
    let _keeper = Agent::open_until_forbidden(&dir, NOBODY);
    until("the broker listens", || dir.join("broker").exists());
    let owner = client(&dir);
    let shared = CreateOptions {
        readers: Readers::Uids(vec![NOBODY]),
        ..CreateOptions::default()
    };
    put(&owner, "shared", 2, &shared).expect("a commit");
    let mut other = somebody_else(&dir);
    assert_eq!(other.ask(&Command::Open("shared".into())), Said::Epoch(1));
    std::fs::write(dir.join("forbid"), "").expect("a file");
    until("its lease has ended", || {
        owner.list().is_ok_and(|list| {
            list.participants == 1 && list.objects.iter().all(|row| row.readers.is_empty())
        })
    });
    let again = Agent::client_by(as_user(NOBODY), &dir).answer();
    assert!(
        matches!(&again, Some(Said::Failed(_))),
        "the socket is for its own user alone: {again:?}"
    );
    let mode = std::fs::metadata(dir.join("broker"))
        .expect("stat")
        .permissions();
    assert_eq!(mode.mode() & 0o777, 0o600);
    put(&owner, "shared", 3, &shared).expect("who may connect is served");
}

/// A member is one by its own group or by a supplementary one.
fn a_group_is_let_in_and_reads() {
    const GROUP: u32 = 4_242;
    let dir = Dir::new();
    std::fs::set_permissions(&*dir, std::fs::Permissions::from_mode(0o755)).expect("it is ours");
    let _keeper = Agent::open_to_group(&dir, GROUP);
    until("the broker listens", || dir.join("broker").exists());
    let owner = client(&dir);
    let open_to = |gids: &[u32]| CreateOptions {
        readers: Readers::Gids(gids.to_vec()),
        ..CreateOptions::default()
    };
    put(&owner, "model", 1, &CreateOptions::default()).expect("a commit");
    put(&owner, "shared", 2, &open_to(&[7, GROUP])).expect("a commit");
    put(&owner, "others", 3, &open_to(&[GROUP + 1])).expect("a commit");
    let refused = Agent::client_by(as_user(NOBODY), &dir).answer();
    let Some(Said::Failed(why)) = refused else {
        panic!("in no group that may connect: {refused:?}");
    };
    assert!(
        why.contains("is not allowed, and is in no group of 4242"),
        "{why}"
    );
    for groups in [[NOBODY, GROUP].as_slice(), &[GROUP]] {
        let mut member = Agent::client_by(as_member(NOBODY, groups), &dir);
        assert_eq!(member.answer(), Some(Said::Ready), "{groups:?}");
        assert_eq!(
            member.ask(&Command::Open("shared".into())),
            Said::Epoch(1),
            "every byte was compared"
        );
        assert_eq!(
            member.ask(&Command::List),
            Said::Names(vec!["shared".into()]),
            "it knows of nothing else"
        );
        let why = member.cannot(&Command::Open("others".into()));
        assert!(
            why.contains("uid 0 and the groups 4243, and uid 65534 is in none of them"),
            "{why}"
        );
        let why = member.cannot(&Command::Open("model".into()));
        assert!(why.contains("not for uid 65534"), "{why}");
    }
    // A broker that starts from the keeper reads whom an object is open to.
    let first = dir.broker();
    dir.signal_broker(rustix::process::Signal::KILL);
    until("another broker", || {
        dir.broker() != first && owner.list().is_ok()
    });
    let mut member = Agent::client_by(as_member(NOBODY, &[NOBODY, GROUP]), &dir);
    assert_eq!(member.answer(), Some(Said::Ready));
    assert_eq!(member.ask(&Command::Open("shared".into())), Said::Epoch(1));
}

fn a_name_belongs_to_who_committed_it_first() {
    let (dir, _keeper) = open_to_others();
    let owner = client(&dir);
    put(&owner, "model", 1, &CreateOptions::default()).expect("a commit");
    owner.remove("model").expect("it is ours");
    let mut other = somebody_else(&dir);
    for told in [to_put("model", 9), Command::Remove("model".into())] {
        let why = other.cannot(&told);
        assert!(why.contains("belongs to uid 0"), "{told:?}: {why}");
    }
    assert_eq!(other.ask(&to_put("theirs", 9)), Said::Epoch(1));
    let error = put(&owner, "theirs", 1, &CreateOptions::default())
        .expect_err("another user's")
        .to_string();
    assert!(
        error.contains(&format!("belongs to uid {NOBODY}")),
        "{error}"
    );
    assert_eq!(
        put(&owner, "model", 2, &CreateOptions::default()).expect("a commit"),
        Epoch(2)
    );
}

/// The user that the broker runs as is its operator.
fn the_operator_governs_all() {
    let (dir, _keeper) = open_to_others();
    let operator = client(&dir);
    put(&operator, "model", 1, &CreateOptions::default()).expect("a commit");
    let mut other = somebody_else(&dir);
    assert_eq!(other.ask(&to_put("prod", 9)), Said::Epoch(1));
    let seen = operator.list().expect("a listing");
    let names: Vec<&str> = seen.objects.iter().map(|row| row.name.as_str()).collect();
    assert_eq!(names, ["model", "prod"]);
    let bytes = |uid| {
        let user = seen.users.iter().find(|user| user.uid == uid);
        user.map(|user| (user.objects, user.bytes))
    };
    assert_eq!(bytes(0), bytes(NOBODY), "each has one object: {seen:?}");
    assert_eq!(bytes(0), Some((1, seen.bytes / 2)));
    assert_eq!(other.ask(&Command::List), Said::Names(vec!["prod".into()]));
    let why = operator.open("prod").expect_err("it is not open to it");
    assert!(why.to_string().contains("not for uid 0"), "{why}");
    // Removed, the name is free for any user, also for a broker that starts from the keeper.
    operator
        .remove("prod")
        .expect("it is the operator's to remove");
    let first = dir.broker();
    dir.signal_broker(rustix::process::Signal::KILL);
    until("another broker", || {
        dir.broker() != first && operator.list().is_ok()
    });
    assert_eq!(
        put(&operator, "prod", 2, &CreateOptions::default()).expect("it is free"),
        Epoch(2),
        "its epochs go on"
    );
    // A name without an object is freed as well. A question that any broker answers comes first: a
    // create is lost with the broker that it was put to.
    other.ask(&Command::List);
    let above = Said::Epoch(2);
    assert_eq!(
        other.ask(&to_put("once", 9)),
        above,
        "no name begins below the epochs of one that is forgotten"
    );
    assert_eq!(other.ask(&Command::Remove("once".into())), above);
    operator
        .remove("once")
        .expect("it is the operator's to remove");
    put(&operator, "once", 1, &CreateOptions::default()).expect("it is free");
}

/// A keeper with room for one object of one region, and an object whose commit it refused.
fn refused(dir: &Dir) -> (Client, Identity) {
    let client = client(dir);
    put(&client, "model", 1, &CreateOptions::default()).expect("there is room");
    let mut writer = client.create("other", layout(2)).expect("memory");
    fill(&mut writer, 2).expect("written");
    let commit = writer.commit(&[]).expect("queued");
    let identity = commit.id();
    let error = commit.wait().expect_err("the keeper is full");
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
    assert_eq!(
        client.outcome(identity).expect("an answer"),
        Standing::Unfinished
    );
    (client, identity)
}

fn a_refused_commit_may_be_asked_for_again() {
    let dir = Dir::new();
    let _keeper = Agent::small_keeper(&dir, 3);
    until("the broker listens", || dir.join("broker").exists());
    let (client, identity) = refused(&dir);
    assert!(
        client.commit_again(identity).is_err(),
        "there is no more room than before"
    );
    client.remove("model").expect("it is ours");
    assert_eq!(
        client.commit_again(identity).expect("there is room"),
        Epoch(1)
    );
    assert_eq!(
        client.commit_again(identity).expect("it was committed"),
        Epoch(1),
        "the same answer again"
    );
    assert_eq!(seed_of(&client.open("other").expect("an object")), 2);
}

fn a_refused_object_is_given_up() {
    let dir = Dir::new();
    let _keeper = Agent::small_keeper(&dir, 3);
    until("the broker listens", || dir.join("broker").exists());
    let (client, identity) = refused(&dir);
    assert_eq!(client.list().expect("a listing").objects.len(), 2);
    client.give_up(identity).expect("heard");
    assert_eq!(
        client.outcome(identity).expect("an answer"),
        Standing::Unknown
    );
    assert_eq!(client.list().expect("a listing").objects.len(), 1);
    let error = client
        .commit_again(identity)
        .expect_err("it is gone")
        .to_string();
    assert!(error.contains("no unfinished object"), "{error}");
}

/// What a user left in memory is not there when the next one gets it: the other one is another user
/// where this machine has one.
fn memory_shows_nothing() {
    let (dir, _keeper) = open_to_others();
    let owner = client(&dir);
    let bytes = if crate::agent::is_host() {
        8 << 20
    } else {
        2u64 << 30
    };
    for committed in [true, false] {
        let spec = broker::PartSpec::bytes("p0", bytes).expect("a part");
        let mut writer = owner
            .create(
                "secret",
                broker::Layout::pack([spec], b"").expect("a layout"),
            )
            .expect("memory");
        let page: Vec<u8> = std::iter::repeat_n(SECRET.to_le_bytes(), 1 << 17)
            .flatten()
            .collect();
        for at in (0..bytes).step_by(page.len()) {
            writer.write_part("p0", at, &page).expect("written");
        }
        if committed {
            writer
                .commit(&[])
                .expect("queued")
                .wait()
                .expect("a commit");
            owner.remove("secret").expect("it is ours");
        } else {
            drop(writer);
        }
        until("the memory is given back", || {
            owner.list().is_ok_and(|list| list.bytes == 0)
        });
        let mut next = if has_users() {
            somebody_else(&dir)
        } else {
            Agent::client(&dir)
        };
        let seen = next.ask(&Command::Look {
            bytes,
            word: SECRET,
        });
        assert_eq!(
            seen,
            Said::Count(0),
            "words of the last user in {bytes} bytes, committed: {committed}"
        );
    }
}

/// A reader that cannot map what it has taken off: here a process at its limit of addresses, on a
/// GPU a context that broke.
fn lost_addresses_say_so() {
    let (dir, _keeper) = started();
    let mut agent = Agent::client(&dir);
    assert_eq!(agent.ask(&to_put("model", 1)), Said::Epoch(1));
    assert_eq!(agent.ask(&Command::Open("model".into())), Said::Epoch(1));
    let why = agent.cannot(&Command::SleepAtTheLimit);
    assert!(
        why.contains("the addresses of model are lost") && why.contains("raise RLIMIT_AS"),
        "{why}"
    );
    assert_eq!(agent.ask(&to_put("model", 2)), Said::Epoch(2));
    for command in [Command::Advance, Command::Wake, Command::Sleep] {
        let why = agent.cannot(&command);
        assert!(
            why.contains("the addresses of model are lost"),
            "{command:?}: {why}"
        );
    }
    assert_eq!(
        agent.ask(&Command::Open("model".into())),
        Said::Epoch(2),
        "every byte was compared"
    );
}

fn is_forked<T>(done: broker::Result<T>) -> bool {
    matches!(done, Err(ObjectError::Gpu(Error::Forked { .. })))
}

/// Of a client, and of everything that it gave to the parent.
fn a_forked_child_is_refused_every_call() {
    let (dir, _keeper, client) = serving();
    let create = |name: &str| client.create(name, layout(1)).expect("memory");
    let group = |name: &str| GroupWriter::create(name, vec![(client.clone(), layout(1))]);
    let put_once = || put(&client, "model", 1, &CreateOptions::default()).expect("a commit");
    put_once();
    let mut reader = client.open("model").expect("an object");
    let mut asleep = client.open("model").expect("an object");
    asleep.sleep(false).expect("unmapped");
    put_once();
    let newest = Selector::Latest("model".into());
    let prepared = reader.prepare(&newest).expect("leased").expect("another");
    let (mut writer, mut into) = (create("filled"), create("copied"));
    let mut own = client.scratch("own", layout(1)).expect("memory");
    let commits = ["a", "b"].map(|name| create(name).commit(&[]).expect("queued"));
    group("g").expect("memory").commit(None).expect("a commit");
    let roll = Roll::newest(&client, "g").expect("a roll");
    let unfinished = group("h").expect("memory");
    let stream = Stream::create(client.gpu()).expect("a stream");
    let call_all = || {
        let identity = Identity([1; 16]);
        let [first, second] = commits;
        let builder = Client::builder(client.gpu().clone()).dir(&*dir);
        let refused = [
            is_forked(builder.connect()),
            is_forked(client.create("m", layout(1))),
            is_forked(client.create_with("m", layout(1), &CreateOptions::default())),
            is_forked(client.scratch("m", layout(1))),
            is_forked(client.open("model")),
            is_forked(client.open_one(&newest)),
            is_forked(client.outcome(identity)),
            is_forked(client.commit_again(identity)),
            is_forked(client.give_up(identity)),
            is_forked(client.watch("model", Epoch(9), WATCHDOG)),
            is_forked(client.remove("model")),
            is_forked(client.remove_epoch("model", Epoch(1))),
            is_forked(client.list()),
            !client.is_connected(),
            is_forked(reader.used_on(&stream)),
            is_forked(reader.read("p0")),
            is_forked(reader.read_at("p0", 0, &mut [0])),
            is_forked(reader.copy_part("p0", &mut into)),
            is_forked(reader.writable_copy()),
            is_forked(reader.prepare(&newest)),
            is_forked(reader.switch(prepared)),
            is_forked(reader.advance()),
            is_forked(reader.advance_to(&newest)),
            is_forked(reader.sleep(true)),
            is_forked(asleep.wake()),
            is_forked(asleep.wake_to(&newest)),
            is_forked(writer.used_on(&stream)),
            is_forked(writer.write("p0", &[1])),
            is_forked(writer.write_part("p0", 0, &[1])),
            is_forked(writer.fill("p0", 1, &stream)),
            is_forked(writer.commit(&[])),
            is_forked(own.used_on(&stream)),
            is_forked(own.read_at("p0", 0, &mut [0])),
            is_forked(own.write_part("p0", 0, &[1])),
            is_forked(first.wait()),
            is_forked(second.wait_for(WATCHDOG)),
            is_forked(Roll::newest(&client, "g")),
            is_forked(Roll::read(&client, &newest)),
            is_forked(roll.open(0, &client)),
            is_forked(roll.advance(0, &mut reader)),
            is_forked(group("i")),
            is_forked(unfinished.commit(None)),
        ];
        let granted = refused.iter().position(|is_refused| !is_refused);
        granted.map_or(0, |at| at as i32 + 1)
    };
    // SAFETY: `fork` asks that the child of a process with threads does only what is safe there: it
    // allocates with the C library's allocator, which glibc keeps usable in a child, and makes the
    // calls that are under test.
    let child = unsafe { harness::fork(call_all) }.expect("room for a process");
    assert_eq!(child.code(), Some(0), "the first call that is let through");
    // The parent's are as they were.
    assert_eq!((reader.epoch(), seed_of(&reader)), (Epoch(1), 1));
    assert_eq!(asleep.wake().map(|()| seed_of(&asleep)).ok(), Some(1));
    assert!(client.list().is_ok());
}
