//! Nobody is left over. Alone in its file: it looks at every child of its process.

use std::process::Command;

use harness::program::ends_well;
use rustix::io::Errno;
use rustix::process::{WaitOptions, getpid, set_child_subreaper, waitpid};

#[test]
fn the_demo_leaves_no_process_behind() {
    // Whatever the demo starts and does not wait for becomes a child of this process.
    set_child_subreaper(Some(getpid())).expect("Linux 3.4 or later");
    let mut demo = Command::new(env!("CARGO_BIN_EXE_gpu-ipc"));
    demo.args([
        "demo",
        "--backend",
        "host",
        "--blocks",
        "4",
        "--consumers",
        "1",
        "--size",
        "4KiB",
    ]);
    assert!(ends_well(&mut demo));
    match waitpid(None, WaitOptions::NOHANG) {
        Err(Errno::CHILD) => {}
        left => panic!("somebody is left over: {left:?}"),
    }
}
