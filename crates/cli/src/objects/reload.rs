//! A change of options while a broker serves: SIGHUP, as the broker and its keeper hear it, and the
//! command that sends it and says what came of it.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use gpu_ipc::backend::thread;
use gpu_ipc::broker::Client;
use gpu_ipc::broker::server::listing::Listing;
use rustix::process::Signal;
use tokio::runtime::Runtime;
use tokio::signal::unix::{SignalKind, signal};

use super::stop::Holder;
use super::{Asked, any_gpu};
use crate::device::explain;
use crate::{Outcome, output};

/// How often a broker is asked whether it has read its options again.
const AGAIN: Duration = Duration::from_millis(10);

/// SIGHUP, which ends this process no more once this is made.
#[derive(Debug)]
pub struct Hangup {
    runtime: Runtime,
    signal: tokio::signal::unix::Signal,
}

impl Hangup {
    /// Takes the signal.
    ///
    /// # Errors
    ///
    /// What the system refuses.
    pub fn take() -> Result<Hangup, String> {
        let failed = |e: std::io::Error| format!("SIGHUP cannot be waited for: {e}");
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_io()
            .build()
            .map_err(failed)?;
        let signal = {
            let _in = runtime.enter();
            signal(SignalKind::hangup()).map_err(failed)?
        };
        Ok(Hangup { runtime, signal })
    }

    /// Does something at each, on a thread of its own.
    ///
    /// # Errors
    ///
    /// When no thread can be started.
    pub fn each(mut self, mut act: impl FnMut() + Send + 'static) -> Result<(), String> {
        let run = move || {
            while self.runtime.block_on(self.signal.recv()).is_some() {
                act();
            }
        };
        let started = thread::start("gpu-ipc-hangup", run);
        started.map(drop).map_err(|error| explain(&error))
    }
}

/// Has a keeper pass SIGHUP on to the broker of its directory: service managers know the keeper.
///
/// # Errors
///
/// As [`Hangup`].
pub fn pass_on(dir: PathBuf) -> Result<(), String> {
    Hangup::take()?.each(move || match Holder::find(&dir.join("lock")) {
        Some(broker) => broker.signal(Signal::HUP),
        None => tracing::warn!("no broker serves that could read its options again"),
    })
}

/// Has a broker read its options again, and waits for what comes of it.
pub fn run(options: &Asked) -> Outcome {
    match reload(options) {
        Ok(said) => output::conclude(&said, Outcome::Good),
        Err(why) => output::fail(&why, false, Outcome::Finding),
    }
}

fn reload(options: &Asked) -> Result<String, String> {
    let start = Instant::now();
    let client = options.connect(any_gpu()?, "gpu-ipc reload")?;
    let sums = |client: &Client| client.sums().map_err(|error| explain(&error));
    let before = sums(&client)?;
    if before.reread.file.is_empty() {
        return Err(format!(
            "process {} was started without --options FILE, so there is nothing to read again",
            before.pid
        ));
    }
    let dir = options.place.path()?;
    let broker = Holder::find(&dir.join("lock"))
        .ok_or_else(|| format!("the broker of {} is not seen from here", dir.display()))?;
    broker.signal(Signal::HUP);
    let is_done = |now: &Listing| now.pid != before.pid || now.reread.count > before.reread.count;
    loop {
        let now = sums(&client)?;
        if is_done(&now) {
            return match now.reread.why.as_str() {
                "" => Ok(format!("the options of {} hold", now.reread.file)),
                why => Err(format!("the options stay as they were: {why}")),
            };
        }
        if start.elapsed() > options.patience() {
            return Err(format!(
                "process {} has not read its options again within {} s: see its log",
                before.pid, options.timeout
            ));
        }
        std::thread::sleep(AGAIN);
    }
}
