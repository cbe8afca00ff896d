//! The other process' own side: what it was started to be, what it is told, what it answers.

use std::io::{BufRead, Write};
use std::process::Command;

use rustix::event::{PollFd, PollFlags, poll};
use rustix::process::{Pid, PidfdFlags, getpid, pidfd_open};
use serde::Serialize;
use serde::de::DeserializeOwned;

/// Holds a process' role.
pub(crate) const ROLE: &str = "GPU_IPC_TEST_ROLE";
/// Set for a process that has done its job when it has started.
pub(crate) const STARTS: &str = "GPU_IPC_TEST_STARTS";
/// Holds the number of the process of the tests.
pub(crate) const TESTS: &str = "GPU_IPC_TEST_TESTS";

/// Has a command run this program in a role: for a process that starts others itself.
pub fn play(command: &mut Command, role: &impl Serialize) {
    command.env(ROLE, encode(role));
}

/// Returns what this process was started to be by a [`Child`](crate::Child); nothing in the process
/// of the tests. Ends a process that [`surroundings`](crate::surroundings) started to see whether
/// it starts.
///
/// # Panics
///
/// When it was started to be something that it does not know: the message names it.
pub fn role<R: DeserializeOwned>() -> Option<R> {
    if std::env::var_os(STARTS).is_some() {
        std::process::exit(0);
    }
    let text = std::env::var(ROLE).ok()?;
    Some(decode(&text).unwrap_or_else(|error| panic!("no role of this program: {error}")))
}

/// Waits for the next thing that this process is told; nothing once the test has let it go.
///
/// # Panics
///
/// When it is told something that it does not know: the message names it.
pub fn next<T: DeserializeOwned>() -> Option<T> {
    let mut line = String::new();
    let read = std::io::stdin()
        .lock()
        .read_line(&mut line)
        .expect("standard input is text");
    (read != 0).then(|| {
        decode(&line).unwrap_or_else(|error| panic!("no command of this program: {error}"))
    })
}

/// Answers, or says how far this process has come.
pub fn say<A: Serialize>(answer: &A) {
    let mut out = std::io::stdout().lock();
    // The test that does not listen any more has ended, or is about to kill this process.
    let _ = writeln!(out, "{}", encode(answer)).and_then(|()| out.flush());
}

/// Answers everything that this process is told, until the test lets it go.
pub fn obey<T: DeserializeOwned, A: Serialize>(mut answer: impl FnMut(T) -> A) {
    while let Some(told) = next() {
        say(&answer(told));
    }
}

/// Has this process end with that of the tests, however that ends: for one that waits for no input.
/// A process that is the first of its namespace ends with the one that made it.
pub fn die_with_the_tests() {
    if getpid().is_init() {
        return;
    }
    let tests = std::env::var(TESTS)
        .ok()
        .and_then(|pid| pid.parse().ok())
        .and_then(Pid::from_raw);
    let Ok(tests) = pidfd_open(tests.expect("started by a test"), PidfdFlags::empty()) else {
        std::process::exit(1);
    };
    std::thread::spawn(move || {
        while poll(&mut [PollFd::new(&tests, PollFlags::IN)], None) == Err(rustix::io::Errno::INTR)
        {
        }
        std::process::exit(1);
    });
}

/// Writes a value in one line.
pub(crate) fn encode<T: Serialize>(value: &T) -> String {
    serde_json::to_string(value).expect("it can be written")
}

/// Reads a value, or says which text is none.
pub(crate) fn decode<T: DeserializeOwned>(text: &str) -> Result<T, String> {
    let text = text.trim_end();
    serde_json::from_str(text).map_err(|error| format!("{text}: {error}"))
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use serde::{Deserialize, Serialize};

    use super::{decode, encode};

    #[derive(Serialize, Deserialize, PartialEq, Debug)]
    enum Told {
        Claim { descriptor: Vec<u8>, within: u64 },
        Open(PathBuf),
        Drop,
    }

    #[test]
    fn what_is_told_is_what_is_heard() {
        for told in [
            Told::Claim {
                descriptor: vec![0, 255],
                within: u64::MAX,
            },
            Told::Open("/a path/\n\"with\" everything".into()),
            Told::Drop,
        ] {
            let line = encode(&told);
            assert!(!line.contains('\n'), "{line} is one line");
            assert_eq!(decode::<Told>(&line), Ok(told));
        }
    }

    #[test]
    fn what_is_unknown_names_itself() {
        for (text, named) in [
            ("\"Steal\"", "Steal"),
            ("{\"Drop\":1}", "Drop"),
            ("{\"Claim\":{\"within\":1}}", "descriptor"),
        ] {
            let error = decode::<Told>(text).expect_err("nothing is called that");
            assert!(
                error.starts_with(text) && error[text.len()..].contains(named) || named == "Drop",
                "{error}"
            );
        }
    }
}
