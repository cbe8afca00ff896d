//! Writing to the terminal, a file or a pipe that may be closed.

use std::io::{self, ErrorKind, Write};

use serde::Serialize;
use serde_json::json;

use crate::Outcome;

/// Writes a text and a line end to standard output. A reader that went away is seen at the last
/// line: [`conclude`].
///
/// # Errors
///
/// What the system says when the output is there and takes nothing: a full disk.
pub fn print(text: &str) -> Result<(), String> {
    match write(text) {
        Err(error) if error.kind() != ErrorKind::BrokenPipe => {
            Err(format!("standard output: {error}"))
        }
        _ => Ok(()),
    }
}

fn write(text: &str) -> io::Result<()> {
    let mut out = io::stdout().lock();
    writeln!(out, "{text}")?;
    out.flush()
}

/// Writes a line to standard error, if anybody takes it.
pub fn complain(text: &str) {
    let _ = writeln!(io::stderr().lock(), "{text}");
}

/// Makes one JSON object: whether all is well, and the fields of a report, which are strings and
/// numbers.
pub fn judged(ok: bool, report: &impl Serialize) -> String {
    #[derive(Serialize)]
    struct Judged<'a, R: Serialize> {
        ok: bool,
        #[serde(flatten)]
        report: &'a R,
    }
    serde_json::to_string(&Judged { ok, report }).expect("a report is made of strings and numbers")
}

/// Makes the same of a run, with what was done in it less often than its floor.
pub fn judged_run(ok: bool, report: &impl Serialize, shortfalls: Vec<String>) -> String {
    #[derive(Serialize)]
    struct Run<'a, R: Serialize> {
        #[serde(flatten)]
        report: &'a R,
        shortfalls: Vec<String>,
    }
    judged(ok, &Run { report, shortfalls })
}

/// Lists what was done less often than its floor: what it is, how often it was done, and the floor.
pub fn below<'a>(floors: impl IntoIterator<Item = (&'a str, u64, u64)>) -> Vec<String> {
    let short = floors.into_iter().filter(|(_, done, floor)| done < floor);
    short
        .map(|(what, done, floor)| format!("{done} {what}, not {floor}"))
        .collect()
}

/// Writes the last thing that a command says and ends it. A good end that nobody read is
/// [`Outcome::Unread`].
pub fn conclude(text: &str, outcome: Outcome) -> Outcome {
    match write(text) {
        Ok(()) => outcome,
        Err(error) if error.kind() == ErrorKind::BrokenPipe => {
            if outcome == Outcome::Good {
                Outcome::Unread
            } else {
                outcome
            }
        }
        Err(error) => {
            complain(&format!("standard output: {error}"));
            Outcome::Finding
        }
    }
}

/// Ends a command that could not do its work: with the reason on standard error, or as one JSON
/// object on standard output.
pub fn fail(why: &str, json: bool, outcome: Outcome) -> Outcome {
    if json {
        conclude(&json!({ "ok": false, "error": why }).to_string(), outcome)
    } else {
        complain(why);
        outcome
    }
}
