//! The log of a process that serves: lines on standard error.
//!
//! A thread of its own writes them, so that a reader of standard error that stops, a pager or a
//! full pipe, never stops the broker. What has no room in its queue is lost and counted.

// Tests: `crates/cli/tests/log.rs`.

use std::io::{self, Write};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::time::Duration;

use clap::Args as Arguments;
use gpu_ipc::backend::{explain, thread};
use tracing_subscriber::filter::Targets;
use tracing_subscriber::fmt::format::Writer;
use tracing_subscriber::fmt::time::{FormatTime, SystemTime};
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::{Registry, fmt, registry, reload};

/// Lines that wait for standard error.
const LINES: usize = 1_024;
/// How long the end of the process waits for them.
const PATIENCE: Duration = Duration::from_secs(1);

/// Options of the log.
#[derive(Arguments, Clone, Default, Debug)]
pub struct LogOptions {
    /// What to log on standard error: off, error, warn, info, debug or trace, also for one part, as
    /// in info,broker=debug [default: $RUST_LOG, else info]
    #[arg(long, value_name = "LEVEL")]
    pub log: Option<Targets>,
    /// Log a JSON object a line
    #[arg(long)]
    pub log_json: bool,
}

impl LogOptions {
    /// Starts the log of this process, which ends with what this returns.
    ///
    /// # Errors
    ///
    /// When `RUST_LOG` is no filter or no thread can be started.
    pub fn start(&self) -> Result<Log, String> {
        let filter = match (&self.log, std::env::var("RUST_LOG")) {
            (Some(filter), _) => filter.clone(),
            (None, Ok(text)) => text.parse().map_err(|error| {
                format!("RUST_LOG is {text:?}: {error}; as in info,broker=debug")
            })?,
            (None, Err(_)) => "info".parse().map_err(|error| format!("{error}"))?,
        };
        let (sender, queue) = sync_channel(LINES);
        let lines = Lines {
            sender,
            lost: Arc::default(),
        };
        let lost = lines.lost.clone();
        thread::start("gpu-ipc-log", move || write_all(&queue, &lost))
            .map_err(|error| explain(&error))?;
        let (filtered, handle) = reload::Layer::new(filter.clone());
        let log = Log {
            sender: lines.sender.clone(),
            filter: Filter {
                handle,
                usual: filter,
            },
        };
        // A build may have colours by way of another crate; a file has none.
        let layer = fmt::layer()
            .with_ansi(false)
            .with_writer(move || lines.clone());
        // A process has one log; a second one is no error.
        let _ = if self.log_json {
            let layer = layer.json().flatten_event(true);
            tracing::subscriber::set_global_default(registry().with(filtered).with(layer))
        } else {
            let layer = layer.with_timer(Stamp);
            tracing::subscriber::set_global_default(registry().with(filtered).with(layer))
        };
        Ok(log)
    }
}

/// The head of a line: the time, and the process, since a keeper and its brokers have one log.
struct Stamp;

impl FormatTime for Stamp {
    fn format_time(&self, line: &mut Writer<'_>) -> std::fmt::Result {
        SystemTime.format_time(line)?;
        write!(line, " {}", std::process::id())
    }
}

/// Returns the head of a line that is written now.
pub fn stamp() -> String {
    let mut head = String::new();
    // A string takes everything.
    let _ = Stamp.format_time(&mut Writer::new(&mut head));
    head
}

enum Message {
    Line(Vec<u8>),
    /// All lines before it are written when this is dropped.
    End(SyncSender<()>),
}

/// The log of this process. Dropped, it waits for the lines that are on their way, for a second at
/// most.
#[derive(Debug)]
pub struct Log {
    sender: SyncSender<Message>,
    filter: Filter,
}

impl Log {
    /// Returns the way to what is logged.
    pub fn filter(&self) -> Filter {
        self.filter.clone()
    }
}

/// What the log of this process has.
#[derive(Clone, Debug)]
pub struct Filter {
    handle: reload::Handle<Targets, Registry>,
    usual: Targets,
}

impl Filter {
    /// Logs this from here on, or what was logged at the start.
    pub fn set(&self, filter: Option<Targets>) {
        // A log that is gone has no lines.
        let _ = self
            .handle
            .reload(filter.unwrap_or_else(|| self.usual.clone()));
    }
}

impl Drop for Log {
    fn drop(&mut self) {
        let (written, end) = sync_channel(0);
        // A full queue has a reader that stopped.
        if self.sender.try_send(Message::End(written)).is_ok() {
            let _ = end.recv_timeout(PATIENCE);
        }
    }
}

impl std::fmt::Debug for Message {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Message")
    }
}

/// The way to the thread that writes.
#[derive(Clone)]
struct Lines {
    sender: SyncSender<Message>,
    lost: Arc<AtomicU64>,
}

impl Write for Lines {
    /// Takes a whole line: that is how `fmt` writes.
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        if self.sender.try_send(Message::Line(line.to_vec())).is_err() {
            self.lost.fetch_add(1, Ordering::Relaxed);
        }
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

fn write_all(queue: &Receiver<Message>, lost: &AtomicU64) {
    for message in queue {
        match message {
            // What nothing reads is no reason to end.
            Message::Line(line) => drop(io::stderr().write_all(&line)),
            Message::End(written) => drop(written),
        }
        let lost = lost.swap(0, Ordering::Relaxed);
        if lost > 0 {
            tracing::warn!(
                lost,
                "lines of the log are lost: standard error was not read"
            );
        }
    }
}
