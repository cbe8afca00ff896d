//! Who may do what: other users, other containers, a commit that was refused, memory that was another's.

use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Stdio};

use broker::wire::Refusal;
use broker::{CreateOptions, Epoch, ObjectError, Readers, Standing};

use crate::agent::{Agent, Dir, client, fill, layout, put, seed_of};
use crate::{Case, until};

pub const CASES: &[Case] = &[
    ("rules::a_refused_commit_may_be_asked_for_again", a_refused_commit_may_be_asked_for_again),
    ("rules::a_refused_object_is_given_up", a_refused_object_is_given_up),
    ("rules::memory_that_comes_back_shows_nothing_of_its_last_user", memory_shows_nothing),
];

/// Needs a kernel and a machine that let this user make namespaces.
pub const NAMESPACES: &[Case] = &[("rules::containers_share_a_directory_alone", containers_share_a_directory_alone)];

/// Needs root, and a test binary that others may run.
pub const USERS: &[Case] = &[
    ("rules::another_user_opens_what_was_said_at_the_create", another_user_opens_what_was_said_at_the_create),
    ("rules::a_name_belongs_to_who_committed_it_first", a_name_belongs_to_who_committed_it_first),
];

/// A user that owns nothing.
const NOBODY: u32 = 65_534;
/// What nobody else may find in memory that was given back.
const SECRET: u64 = 0x5ec2_e75e_c2e7_5ec2;

/// Says whether namespaces of pids, mounts and users can be made here.
pub fn has_namespaces() -> bool {
    ends_well(contained(&std::env::temp_dir()).arg("--list"))
}

/// Says whether a process of another user can run this binary.
pub fn has_users() -> bool {
    rustix::process::geteuid().is_root() && ends_well(this_binary().uid(NOBODY).arg("--list"))
}

fn ends_well(command: &mut Command) -> bool {
    let quiet = command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    quiet.status().is_ok_and(|status| status.success())
}

fn this_binary() -> Command {
    Command::new(std::env::current_exe().expect("a test binary has a path"))
}

/// A command that runs this binary in namespaces of its own, with `shared` at /mnt and an empty /tmp: nothing else that
/// can be written is seen by another. The binary is opened before the mounts, one of which may cover it.
fn contained(shared: &Path) -> Command {
    let script =
        r#"exec 9<"$1" && shift && mount --bind "$0" /mnt && mount -t tmpfs none /tmp && exec /proc/self/fd/9 "$@""#;
    let mut command = Command::new("unshare");
    command.args(["--user", "--map-root-user", "--mount", "--pid", "--ipc", "--fork", "--kill-child", "--mount-proc"]);
    command.args(["sh", "-c", script]).arg(shared).arg(std::env::current_exe().expect("a test binary has a path"));
    command
}

fn containers_share_a_directory_alone() {
    let dir = Dir::new();
    let _keeper = Agent::keeper(&dir);
    until("the broker listens", || dir.join("broker").exists());
    let container = |role: &str| {
        let mut agent = Agent::run(contained(&dir), role, Path::new("/mnt"), &[]);
        assert_eq!(agent.line(), "ready", "{role} in a container");
        agent
    };
    let (mut writer, mut reader) = (container("writer"), container("reader"));
    writer.tell("model 7");
    assert_eq!(writer.line(), "ok 1");
    reader.tell("open");
    assert_eq!(reader.line(), "ok 1", "every byte was compared");
    writer.tell("model 8");
    assert_eq!(writer.line(), "ok 2");
    reader.tell("advance");
    assert_eq!(reader.line(), "ok 2");
    // A death in a container is proven too.
    let outside = client(&dir);
    writer.kill();
    reader.kill();
    until("both are gone", || {
        outside.list().is_ok_and(|list| list.objects.iter().all(|row| row.readers.is_empty() && row.writer.is_none()))
    });
    assert_eq!(seed_of(&outside.open("model").expect("an object")), 8);
}

/// A broker that lets another user in, in a directory that it may enter.
fn open_to_others() -> (Dir, Agent) {
    let dir = Dir::new();
    std::fs::set_permissions(&*dir, std::fs::Permissions::from_mode(0o755)).expect("it is ours");
    let keeper = Agent::keeper_with(&dir, &[("GPU_IPC_ALLOW", NOBODY.to_string())]);
    until("the broker listens", || dir.join("broker").exists());
    (dir, keeper)
}

fn somebody_else(dir: &Dir, role: &str) -> Agent {
    let mut command = this_binary();
    command.uid(NOBODY);
    let mut agent = Agent::run(command, role, dir, &[]);
    assert_eq!(agent.line(), "ready", "another user's {role}");
    agent
}

fn another_user_opens_what_was_said_at_the_create() {
    let (dir, _keeper) = open_to_others();
    let owner = client(&dir);
    put(&owner, "model", 1, &CreateOptions::default()).expect("a commit");
    let mut other = somebody_else(&dir, "stranger");
    other.tell("open model");
    let answer = other.line();
    assert!(answer.starts_with("error ") && answer.contains(&format!("not for uid {NOBODY}")), "{answer}");
    let shared = CreateOptions { readers: Readers::Uids(vec![NOBODY]), ..CreateOptions::default() };
    put(&owner, "shared", 2, &shared).expect("a commit");
    other.tell("open shared");
    assert_eq!(other.line(), "ok 1");
    other.tell("list");
    assert_eq!(other.line(), "ok shared", "it knows of nothing else");
    let strict = Dir::new();
    std::fs::set_permissions(&*strict, std::fs::Permissions::from_mode(0o755)).expect("it is ours");
    let _keeper = Agent::keeper(&strict);
    until("the broker listens", || strict.join("broker").exists());
    let mut command = this_binary();
    command.uid(NOBODY);
    let refused = Agent::run(command, "stranger", &strict, &[]).line();
    assert!(refused.starts_with("error "), "a broker of one user alone: {refused:?}");
}

fn a_name_belongs_to_who_committed_it_first() {
    let (dir, _keeper) = open_to_others();
    let owner = client(&dir);
    put(&owner, "model", 1, &CreateOptions::default()).expect("a commit");
    owner.remove("model").expect("it is ours");
    let mut other = somebody_else(&dir, "stranger");
    for told in ["put model", "remove model"] {
        other.tell(told);
        let answer = other.line();
        assert!(answer.starts_with("error ") && answer.contains("belongs to uid 0"), "{told}: {answer}");
    }
    other.tell("put theirs");
    assert_eq!(other.line(), "ok 1");
    let error = owner.remove("theirs").expect_err("another user's").to_string();
    assert!(error.contains(&format!("belongs to uid {NOBODY}")), "{error}");
    assert_eq!(put(&owner, "model", 2, &CreateOptions::default()).expect("a commit"), Epoch(2));
}

/// A keeper with room for one object of one region, and an object whose commit it refused.
fn refused(dir: &Dir) -> (broker::Client, broker::Identity) {
    let client = client(dir);
    put(&client, "model", 1, &CreateOptions::default()).expect("there is room");
    let mut writer = client.create("other", layout(2)).expect("memory");
    fill(&mut writer, 2).expect("written");
    let commit = writer.commit(&[]).expect("queued");
    let identity = commit.id();
    let error = commit.wait().expect_err("the keeper is full");
    assert!(matches!(error, ObjectError::Refused { refusal: Refusal::Keeper, .. }), "{error}");
    assert_eq!(client.outcome(identity).expect("an answer"), Standing::Unfinished);
    (client, identity)
}

fn a_refused_commit_may_be_asked_for_again() {
    let dir = Dir::new();
    let _keeper = Agent::small_keeper(&dir, 3);
    until("the broker listens", || dir.join("broker").exists());
    let (client, identity) = refused(&dir);
    assert!(client.commit_again(identity).is_err(), "there is no more room than before");
    client.remove("model").expect("it is ours");
    assert_eq!(client.commit_again(identity).expect("there is room"), Epoch(1));
    assert_eq!(client.commit_again(identity).expect("it was committed"), Epoch(1), "the same answer again");
    assert_eq!(seed_of(&client.open("other").expect("an object")), 2);
}

fn a_refused_object_is_given_up() {
    let dir = Dir::new();
    let _keeper = Agent::small_keeper(&dir, 3);
    until("the broker listens", || dir.join("broker").exists());
    let (client, identity) = refused(&dir);
    assert_eq!(client.list().expect("a listing").objects.len(), 2);
    client.give_up(identity).expect("heard");
    assert_eq!(client.outcome(identity).expect("an answer"), Standing::Unknown);
    assert_eq!(client.list().expect("a listing").objects.len(), 1);
    let error = client.commit_again(identity).expect_err("it is gone").to_string();
    assert!(error.contains("no unfinished object"), "{error}");
}

/// What a user left in memory is not there when the next one gets it: the other one is another user where this machine
/// has one.
fn memory_shows_nothing() {
    let (dir, _keeper) = open_to_others();
    let owner = client(&dir);
    let bytes = if crate::agent::is_host() { 8 << 20 } else { 2u64 << 30 };
    for committed in [true, false] {
        let spec = broker::PartSpec::bytes("p0", bytes).expect("a part");
        let mut writer = owner.create("secret", broker::Layout::pack([spec], b"").expect("a layout")).expect("memory");
        let page: Vec<u8> = std::iter::repeat_n(SECRET.to_le_bytes(), 1 << 17).flatten().collect();
        for at in (0..bytes).step_by(page.len()) {
            writer.write_part("p0", at, &page).expect("written");
        }
        if committed {
            writer.commit(&[]).expect("queued").wait().expect("a commit");
            owner.remove("secret").expect("it is ours");
        } else {
            drop(writer);
        }
        until("the memory is given back", || owner.list().is_ok_and(|list| list.bytes == 0));
        let mut next = if has_users() {
            somebody_else(&dir, "stranger")
        } else {
            let mut same = Agent::start("stranger", &dir, &[]);
            assert_eq!(same.line(), "ready");
            same
        };
        next.tell(&format!("look {bytes} {SECRET}"));
        assert_eq!(next.line(), "ok 0", "words of the last user in {bytes} bytes, committed: {committed}");
    }
}
