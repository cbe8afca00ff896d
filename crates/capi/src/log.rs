//! What the library has to say, as lines on a descriptor.
//!
//! Lines and not a callback: events come on any thread with any lock held, where a program could
//! call nothing.

use std::ffi::c_int;
use std::fmt::{self, Write as _};
use std::fs::File;
use std::io::Write as _;
use std::sync::{Mutex, Once, PoisonError};

use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Level, Metadata, Subscriber};

use crate::boundary::{call, copy_of};
use crate::failure::Failure;
use crate::write_signals::WriteSignals;

/// Errors.
pub const GPU_IPC_LOG_ERROR: u32 = 1;
/// Warnings too: blocks that are kept for ever, a session that ends while others hold blocks of it.
pub const GPU_IPC_LOG_WARN: u32 = 2;
/// What happens, too.
pub const GPU_IPC_LOG_INFO: u32 = 3;
/// What helps to find a bug of the library, too.
pub const GPU_IPC_LOG_DEBUG: u32 = 4;

static TO: Mutex<Option<(File, Level)>> = Mutex::new(None);

/// Writes the library's log to a descriptor, a line each: 2 for standard error, below 0 for nowhere
/// (the default). `level` is `GPU_IPC_LOG_...`.
///
/// A pipe or socket whose reader has gone loses the lines and raises no SIGPIPE.
///
/// Keeps: nothing; the library has a copy of its own. Thread: any. Blocks: no; later a full
/// descriptor blocks the thread that logs. Errors: `INVALID`, `SYSTEM`.
///
/// # Safety
///
/// `fd` is below 0, or open, and nobody closes it during the call.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gpu_ipc_log_to(fd: c_int, level: u32) -> i32 {
    call(|_| {
        let level = match level {
            GPU_IPC_LOG_ERROR => Level::ERROR,
            GPU_IPC_LOG_WARN => Level::WARN,
            GPU_IPC_LOG_INFO => Level::INFO,
            GPU_IPC_LOG_DEBUG => Level::DEBUG,
            other => {
                return Err(Failure::invalid(
                    "the level of a log",
                    other.to_string(),
                    "one of GPU_IPC_LOG_...",
                ));
            }
        };
        let to = match fd {
            ..0 => None,
            // SAFETY: `copy_of` asks for what this function asks for.
            fd => Some((File::from(unsafe { copy_of(fd) }?), level)),
        };
        *TO.lock().unwrap_or_else(PoisonError::into_inner) = to;
        static ONCE: Once = Once::new();
        // The first of this library: its `tracing` is its own, whatever other libraries of the
        // process have.
        ONCE.call_once(|| drop(tracing::subscriber::set_global_default(Lines)));
        Ok(())
    })
}

/// Writes each event as a line.
struct Lines;

impl Subscriber for Lines {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        metadata.level() <= &Level::DEBUG
    }

    fn event(&self, event: &Event<'_>) {
        let level = event.metadata().level();
        // Never waited for: a forked child may have it locked by a thread that it does not have.
        let Ok(mut to) = TO.try_lock() else { return };
        let Some((file, wanted)) = &mut *to else {
            return;
        };
        if level > wanted {
            return;
        }
        let mut line = Line(format!("gpu_ipc {level}:"));
        event.record(&mut line);
        line.0.push('\n');
        let _kept = WriteSignals::keep();
        // An error cannot be told to anything here.
        let _ = file.write_all(line.0.as_bytes());
    }

    // The library opens no spans.
    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }

    fn record(&self, _: &Id, _: &Record<'_>) {}

    fn record_follows_from(&self, _: &Id, _: &Id) {}

    fn enter(&self, _: &Id) {}

    fn exit(&self, _: &Id) {}
}

/// An event's message and its fields.
struct Line(String);

impl Visit for Line {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        // Writing to a string does not fail.
        let _ = match field.name() {
            "message" => write!(self.0, " {value:?}"),
            name => write!(self.0, " {name}={value:?}"),
        };
    }
}
