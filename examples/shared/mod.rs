//! What the examples have in common: their options, their device, what they write and compare, and
//! how they end.

#![allow(
    dead_code,
    reason = "each example is a program of its own and uses a part of this"
)]

use std::error::Error;
use std::process::ExitCode;
use std::time::Duration;

use gpu_ipc::backend::detect_only;
use gpu_ipc::{BackendKind, Gpu, ReceivedBlock, SentBlock, Session, Stream};

/// A wait that takes longer has failed.
pub const PATIENCE: Duration = Duration::from_secs(60);

/// What an example is told on its command line.
pub struct Options {
    /// Where the memory lies.
    pub backend: String,
    /// How often it does what it shows.
    pub rounds: u64,
}

impl Options {
    /// Reads the arguments of an example.
    pub fn parse(example: &str, rounds: u64) -> Result<Options, Box<dyn Error>> {
        let mut options = Options {
            backend: "host".into(),
            rounds,
        };
        for pair in std::env::args().skip(1).collect::<Vec<_>>().chunks(2) {
            match pair {
                [name, value] if name == "--backend" => options.backend.clone_from(value),
                [name, value] if name == "--rounds" => options.rounds = value.parse()?,
                _ => {
                    let usage = "[--backend host|cuda|hip] [--rounds N]";
                    return Err(format!("usage: {example} {usage}").into());
                }
            }
        }
        Ok(options)
    }
}

/// Opens the first device of a backend.
pub fn open(backend: &str) -> Result<Gpu, Box<dyn Error>> {
    let kind = BackendKind::ALL
        .into_iter()
        .find(|kind| kind.name() == backend);
    let kind = kind.ok_or_else(|| format!("no backend is named {backend}"))?;
    Ok(detect_only(kind)?.first(kind)?)
}

/// Makes so many bytes, each word of which is a number.
pub fn words(number: u64, bytes: usize) -> Vec<u8> {
    number.to_le_bytes().repeat(bytes / 8)
}

/// Compares every word of a block with a number. It waits for the copy to the host.
pub fn check(stream: &Stream, block: &ReceivedBlock, number: u64) -> Result<(), Box<dyn Error>> {
    let mut seen = vec![0; usize::try_from(block.len())?];
    stream.read(block, &mut seen)?;
    if seen == words(number, seen.len()) {
        Ok(())
    } else {
        Err(format!(
            "block {number} has other contents, and is {:?}",
            block.state()
        )
        .into())
    }
}

/// Allocates so many blocks.
pub fn pool(session: &Session, count: usize, bytes: usize) -> gpu_ipc::Result<Vec<SentBlock>> {
    (0..count).map(|_| session.alloc(bytes as u64)).collect()
}

/// Ends a session of which every block must be back.
pub fn shut_down(session: &Session) -> Result<(), Box<dyn Error>> {
    let report = session.shutdown(PATIENCE);
    if report.clean {
        Ok(())
    } else {
        Err(format!("still held: {report:?}").into())
    }
}

/// Ends an example, in any of its processes, and says why if it failed.
pub fn end(example: &str, done: Result<(), Box<dyn Error>>) -> ExitCode {
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{example}: {error}");
            ExitCode::FAILURE
        }
    }
}
