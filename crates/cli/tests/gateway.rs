//! The commands that `gpu-ipc-gateway` carries out: found beside the program or on the path, else
//! how to build it.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Command, Output};

use harness::program::output;

/// Puts a program there that says where it lies and what it was given, and ends with 7.
fn put_gateway(folder: &Path) {
    fs::create_dir_all(folder).expect("a folder");
    let path = folder.join("gpu-ipc-gateway");
    fs::write(
        &path,
        "#!/bin/sh\necho \"$(dirname \"$0\")\"\nprintf '%s\\n' \"$@\"\nexit 7\n",
    )
    .expect("a script");
    fs::set_permissions(&path, fs::Permissions::from_mode(0o700)).expect("its mode");
}

/// One test, so that no other thread of this process starts one while a program here is being
/// written: it would inherit the descriptor, and the program could not be started ("text file
/// busy").
#[test]
fn it_is_found_beside_the_program_then_on_the_path_and_else_named_with_how_to_build_it() {
    let place = tempfile::tempdir().expect("a folder");
    let place = place.path().canonicalize().expect("it is there");
    let (own, other) = (place.join("own"), place.join("other"));
    fs::create_dir(&own).expect("a folder");
    let program = own.join("gpu-ipc");
    fs::copy(env!("CARGO_BIN_EXE_gpu-ipc"), &program).expect("the program was built");
    let path = format!("{}:/usr/bin:/bin", other.display());
    let run =
        |args: &[&str]| -> Output { output(Command::new(&program).args(args).env("PATH", &path)) };
    let said = |output: &Output| {
        let text = String::from_utf8(output.stdout.clone()).expect("text");
        text.lines().map(str::to_owned).collect::<Vec<_>>()
    };

    for args in [
        &["pull", "model"][..],
        &["gateway", "--status"],
        &["objects", "--all-hosts"],
    ] {
        let output = run(args);
        let why = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(3), "{args:?}: {why}");
        assert!(
            why.contains("cargo install --path crates/gateway"),
            "{args:?}: {why}"
        );
    }

    put_gateway(&other);
    let on_path = run(&["pull", "model", "--from", "a b", "--json"]);
    assert_eq!(on_path.status.code(), Some(7), "{on_path:?}");
    let there = other.display().to_string();
    assert_eq!(
        said(&on_path),
        [there.as_str(), "pull", "model", "--from", "a b", "--json"]
    );

    put_gateway(&own);
    let here = own.display().to_string();
    let told = |args: &[&str]| {
        let mut said = said(&run(args));
        assert_eq!(
            said.remove(0),
            here,
            "the one beside the program goes first"
        );
        said
    };
    assert_eq!(
        told(&["gateway", "--listen", "tcp/127.0.0.1:1"]),
        ["run", "--listen", "tcp/127.0.0.1:1"]
    );
    assert_eq!(
        told(&["gateway", "--broker", "d", "--status", "--json"]),
        ["status", "--broker", "d", "--json"]
    );
    assert_eq!(
        told(&["objects", "--all-hosts"]),
        ["objects", "--all-hosts"]
    );
    let all = told(&["objects", "--dir", "d", "--all-hosts", "--json"]);
    assert_eq!(all, ["objects", "--all-hosts", "--broker", "d", "--json"]);
}
