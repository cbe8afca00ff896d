//! `gpu-ipc ready`: waits until a broker serves and its keeper has everything.

use std::path::{Path, PathBuf};
use std::sync::mpsc::sync_channel;
use std::time::{Duration, Instant};

use clap::Args as Arguments;
use gpu_ipc::backend::thread;
use gpu_ipc::broker::keeper::depositor::Depositor;
use gpu_ipc::broker::keeper::process::SOCKET;

use super::{Asked, list};
use crate::device::explain;
use crate::sessions::brokers::{BrokerState, Depth, look};
use crate::{Outcome, output};

/// How often it is asked.
const AGAIN: Duration = Duration::from_millis(100);

/// Options of `ready`.
#[derive(Arguments, Debug)]
pub struct ReadyOptions {
    /// Wait for the keeper alone: that it answers
    #[arg(long, group = "which")]
    pub keeper: bool,
    /// Wait for the broker alone: that it answers
    #[arg(long, group = "which")]
    pub broker: bool,
    /// Which broker, and the time for all of it.
    #[command(flatten)]
    pub asked: Asked,
}

/// Waits, and says what is missing if the time is over.
pub fn run(options: &ReadyOptions) -> Outcome {
    let asked = &options.asked;
    let waited = asked
        .place
        .path()
        .and_then(|dir| wait(options, &dir, asked.patience()));
    match waited {
        Ok(()) => Outcome::Good,
        Err(why) => output::fail(&why, false, Outcome::Finding),
    }
}

fn wait(options: &ReadyOptions, dir: &Path, patience: Duration) -> Result<(), String> {
    let end = Instant::now() + patience;
    loop {
        let left = end.saturating_duration_since(Instant::now()).max(AGAIN);
        let seen = if options.keeper {
            keeper_answers(dir, left)
        } else {
            match state(dir, left) {
                State::Ready(_) => Ok(()),
                State::Serves(_) if options.broker => Ok(()),
                State::Serves(why) | State::Not(why) => Err(why),
            }
        };
        let Err(why) = seen else {
            return Ok(());
        };
        if Instant::now() >= end {
            return Err(format!("{}: {why}", dir.display()));
        }
        std::thread::sleep(AGAIN);
    }
}

/// How a broker and its keeper stand.
pub enum State {
    /// The keeper has everything.
    Ready(String),
    /// The broker serves, and the keeper has not.
    Serves(String),
    /// The broker does not answer.
    Not(String),
}

/// Asks a broker how it stands.
pub fn state(dir: &Path, patience: Duration) -> State {
    match look(Some(dir), Depth::Sums, patience).map(|seen| seen.state) {
        Some(BrokerState::Serves(listing)) if listing.keeper == "fed" => {
            State::Ready(list::summary(&listing))
        }
        Some(BrokerState::Serves(listing)) => State::Serves(list::summary(&listing)),
        Some(BrokerState::Hung(pid)) => {
            State::Not(format!("the broker, process {pid}, does not answer"))
        }
        Some(BrokerState::Unknown(why)) => State::Not(why),
        None => State::Not("no broker has been here".into()),
    }
}

/// Asks the keeper for what it has. A keeper that hangs keeps the thread that asks.
fn keeper_answers(dir: &Path, patience: Duration) -> Result<(), String> {
    let path: PathBuf = dir.join(SOCKET);
    let (sender, answer) = sync_channel(1);
    let ask = move || {
        let asked = Depositor::new(&path).map_err(|error| explain(&error));
        let asked = asked.and_then(|keeper| match keeper.inventory(false) {
            Ok(_) => Ok(()),
            Err(why) => Err(format!("the keeper is not there: {why:?}")),
        });
        let _ = sender.send(asked);
    };
    thread::start("gpu-ipc-ask", ask).map_err(|error| explain(&error))?;
    let silent = |_| Err("the keeper does not answer".to_owned());
    answer.recv_timeout(patience).unwrap_or_else(silent)
}
