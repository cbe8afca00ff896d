//! What other users of the machine may do by the program. Needs root, and a program that others may
//! run; without, its cases show as ignored.

#[allow(dead_code, reason = "each test program uses some of it")]
mod kept;

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Output;

use harness::program::{ends_well, output};
use harness::surroundings::{NOBODY, member};
use kept::{Keeper, PROGRAM, complaint, program, run, text};
use libtest_mimic::{Arguments, Failed, Trial};

const GROUP: u32 = 4_242;

fn main() {
    let arguments = Arguments::from_args();
    let lacks_users = !arguments.list && !has_users();
    let trial = |name: &str, case: fn()| {
        Trial::test(name, move || {
            std::panic::catch_unwind(case).map_err(|_| Failed::without_message())
        })
        .with_ignored_flag(lacks_users)
    };
    let trials = vec![
        trial(
            "another_users_objects_are_removed_by_force",
            another_users_objects_are_removed_by_force,
        ),
        trial(
            "who_may_connect_changes_while_the_broker_serves",
            who_may_connect_changes,
        ),
    ];
    libtest_mimic::run(&arguments, trials).exit();
}

fn has_users() -> bool {
    let mut command = std::process::Command::new(PROGRAM);
    command.arg("--version");
    member(&mut command, NOBODY, &[NOBODY]);
    rustix::process::geteuid().is_root() && ends_well(&mut command)
}

/// Runs the program as another user in these groups.
fn run_as(uid: u32, groups: &[u32], dir: &Path, args: &[&str]) -> Output {
    let mut command = program(dir, args);
    member(&mut command, uid, groups);
    output(&mut command)
}

fn open(path: &Path, mode: u32) {
    fs::set_permissions(path, fs::Permissions::from_mode(mode)).expect("it is ours");
}

/// A broker with these options, in a directory that others may enter, and a file that they may read.
fn started(broker: &[&str]) -> (Keeper, String) {
    let keeper = Keeper::start_with(&[], broker);
    open(keeper.dir.path(), 0o755);
    let file = keeper.dir.path().join("weights.bin");
    fs::write(&file, [7; 5_000]).expect("a file");
    open(&file, 0o644);
    let path = file.to_str().expect("a plain name").to_owned();
    (keeper, path)
}

fn another_users_objects_are_removed_by_force() {
    let nobody = NOBODY.to_string();
    let (keeper, file) = started(&["--allow-uid", &nobody]);
    let dir = keeper.dir.path();
    let theirs = |args: &[&str]| run_as(NOBODY, &[NOBODY], dir, args);
    text(&theirs(&["put", "theirs", &file, "--backend", "host"]));
    text(&run(
        dir,
        &[
            "put",
            "ours",
            &file,
            "--backend",
            "host",
            "--reader",
            &nobody,
        ],
    ));
    text(&theirs(&["get", "ours", "--backend", "host"]));
    let refused = |output: &Output, words: &str| {
        assert_eq!(output.status.code(), Some(1), "{output:?}");
        assert!(
            complaint(output).contains(words),
            "no {words:?}: {output:?}"
        );
    };
    // The broker's user does it by force, and no other user by any.
    refused(
        &run(dir, &["rm", "theirs"]),
        "theirs belongs to uid 65534; the broker's user removes it with --force",
    );
    refused(&theirs(&["rm", "ours", "--force"]), "ours belongs to uid 0");
    text(&theirs(&["get", "ours", "--backend", "host"]));
    text(&run(dir, &["rm", "theirs", "--force"]));
    refused(&theirs(&["get", "theirs", "--backend", "host"]), "theirs");
    // The name is free.
    text(&run(dir, &["put", "theirs", &file, "--backend", "host"]));
    refused(
        &theirs(&["put", "theirs", &file, "--backend", "host"]),
        "theirs belongs to uid 0",
    );
}

fn who_may_connect_changes() {
    let of = tempfile::tempdir().expect("a directory");
    let options = of.path().join("broker.toml");
    let options = options.to_str().expect("a plain name");
    fs::write(options, "allow-gid = [4242]\n").expect("a file");
    let (keeper, file) = started(&["--options", options]);
    let dir = keeper.dir.path();
    text(&run(
        dir,
        &[
            "put",
            "shared",
            &file,
            "--backend",
            "host",
            "--reader-group",
            "4242",
        ],
    ));
    text(&run(dir, &["put", "ours", &file, "--backend", "host"]));
    let get =
        |uid, groups: &[u32], name| run_as(uid, groups, dir, &["get", name, "--backend", "host"]);
    let refused = |output: &Output, words: &str| {
        assert_eq!(output.status.code(), Some(1), "{output:?}");
        assert!(
            complaint(output).contains(words),
            "no {words:?}: {output:?}"
        );
    };
    let of_group = [NOBODY, GROUP];
    let got = get(NOBODY, &of_group, "shared");
    assert!(got.status.success(), "{got:?}");
    assert_eq!(got.stdout.len(), 5_000);
    refused(&get(NOBODY, &of_group, "ours"), "not for uid 65534");
    let stranger = get(NOBODY, &[NOBODY], "shared");
    refused(
        &stranger,
        "uid 65534 is not allowed, and is in no group of 4242",
    );
    refused(&stranger, "a broker by `--allow-uid` or `--allow-gid`");
    // One user in place of the group.
    fs::write(options, "allow-uid = [65533]\n").expect("a file");
    text(&run(dir, &["reload"]));
    refused(
        &get(NOBODY, &of_group, "shared"),
        "uid 65534 is not allowed",
    );
    let listed = run_as(NOBODY - 1, &of_group, dir, &["objects"]);
    let listed = text(&listed);
    assert!(
        listed.contains("shared") && !listed.contains("ours"),
        "{listed}"
    );
    // None: the socket is for the broker's user alone, which the kernel sees to.
    fs::write(options, "").expect("a file");
    text(&run(dir, &["reload"]));
    assert_eq!(
        run_as(NOBODY - 1, &of_group, dir, &["objects"])
            .status
            .code(),
        Some(1)
    );
    let mode = fs::metadata(dir.join("broker"))
        .expect("stat")
        .permissions()
        .mode();
    assert_eq!(mode & 0o777, 0o600);
    text(&run(dir, &["objects"]));
}
