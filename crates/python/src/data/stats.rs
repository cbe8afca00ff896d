//! Counts and holders of sessions, under the names of the Rust library.

use std::path::PathBuf;

use pyo3::prelude::*;

use super::addressee::ParticipantId;
use crate::interpreter::errors::OrRaise;
use crate::interpreter::waiting::duration;

/// A participant that holds memory of a session.
#[pyclass(frozen, weakref, get_all, module = "gpu_ipc")]
pub(crate) struct Holder {
    /// Its number in the session.
    participant: ParticipantId,
    /// Its process, as the producer sees it; 0 when it is in a namespace that hides it.
    pid: u32,
    /// The command that it runs, for reading only.
    command: String,
    /// Leases that it was granted and has not ended.
    leases: u64,
    /// Bytes of the blocks behind them; a block leased twice counts twice.
    bytes: u64,
    /// Regions that it may have mapped.
    mappings: u64,
    /// The age of its oldest lease, in seconds.
    oldest: f64,
    /// Whether its process is dead, and the rest of the proof or the quarantine is awaited.
    dying: bool,
}

impl Holder {
    fn list(py: Python<'_>, holders: Vec<gpu_ipc::backend::Holder>) -> PyResult<Vec<Py<Holder>>> {
        let holder = |holder: gpu_ipc::backend::Holder| Holder {
            participant: ParticipantId::of(holder.participant),
            pid: holder.pid,
            command: holder.command,
            leases: holder.leases,
            bytes: holder.bytes,
            mappings: holder.mappings,
            oldest: holder.oldest.as_secs_f64(),
            dying: holder.dying,
        };
        holders
            .into_iter()
            .map(|one| Py::new(py, holder(one)))
            .collect()
    }
}

#[pymethods]
impl Holder {
    fn __repr__(&self) -> String {
        format!(
            "<gpu_ipc.Holder process {} ({}), {} leases, {} bytes>",
            self.pid, self.command, self.leases, self.bytes
        )
    }
}

/// What a session's source of memory holds, in bytes unless said.
#[pyclass(frozen, weakref, get_all, module = "gpu_ipc")]
pub(crate) struct SourceUsage {
    /// Regions.
    regions: u64,
    /// Taken from the driver.
    reserved: u64,
    /// Handed out.
    in_use: u64,
    /// In regions that other processes may have mapped.
    pinned: u64,
}

#[pymethods]
impl SourceUsage {
    fn __repr__(&self) -> String {
        format!(
            "<gpu_ipc.SourceUsage {} of {} bytes in {} regions>",
            self.in_use, self.reserved, self.regions
        )
    }
}

/// Makes the class of the numbers: one list of fields, with what each says.
macro_rules! stats {
    ($($(#[doc = $doc:literal])* $field:ident)*) => {
        /// A session at one moment. Numbers are of blocks unless they say bytes.
        #[pyclass(frozen, weakref, get_all, module = "gpu_ipc")]
        pub(crate) struct Stats {
            $($(#[doc = $doc])* $field: u64,)*
            /// Participants, and what each holds.
            holders: Vec<Py<Holder>>,
            /// What the session's source of memory holds.
            source: Py<SourceUsage>,
        }

        impl Stats {
            pub fn of(py: Python<'_>, stats: gpu_ipc::session::Stats) -> PyResult<Stats> {
                let source = stats.source;
                let gpu_ipc::backend::SourceUsage { regions, reserved, in_use, pinned } = source;
                Ok(Stats {
                    $($field: stats.$field,)*
                    holders: Holder::list(py, stats.holders)?,
                    source: Py::new(py, SourceUsage { regions, reserved, in_use, pinned })?,
                })
            }
        }

        #[pymethods]
        impl Stats {
            fn __repr__(&self) -> String {
                let mut text = String::from("<gpu_ipc.Stats");
                $(if self.$field != 0 {
                    text.push_str(&format!(" {}={}", stringify!($field), self.$field));
                })*
                text.push('>');
                text
            }
        }
    };
}

stats! {
    /// Blocks that exist: with the producer, shared, or in limbo.
    live_blocks
    /// Their bytes.
    live_bytes
    /// Blocks that the producer dropped and something still holds.
    limbo_blocks
    /// Their bytes.
    limbo_bytes
    /// Of those, blocks that wait for streams on which no event could be recorded: a thread
    /// synchronises these.
    unmarked_blocks
    /// Leases granted and not claimed.
    in_flight
    /// Leases claimed and not seen released.
    held
    /// Leases of participants that are dead or gone, until proof and quarantine are over.
    quarantined
    /// Bytes of the blocks behind those.
    quarantined_bytes
    /// Leases whose slot holds an invalid word: their blocks are barred until the holder's death.
    poisoned
    /// Blocks that are never used again, because nobody can say when the work on them ends.
    leaked_blocks
    /// Their bytes.
    leaked_bytes
    /// Grants taken back by cancel, by the addressee's death or by its goodbye, so far.
    revoked
    /// Grants taken back because nobody claimed them in time, so far.
    expired
    /// Participants buried so far.
    deaths
    /// Words found corrupt so far.
    corrupt_words
    /// Tickets that can still be claimed.
    tickets
    /// Participants that are connected, or dead and not buried yet.
    participants
}

/// What a collect brought back.
#[pyclass(frozen, weakref, get_all, module = "gpu_ipc")]
pub(crate) struct Collected {
    /// Blocks that nothing holds any more.
    blocks: u64,
    /// Their bytes.
    bytes: u64,
    /// Arrays of other allocators that are their owners' again.
    arrays: u64,
}

impl Collected {
    pub fn of((blocks, bytes): (u64, u64), arrays: u64) -> Collected {
        Collected {
            blocks,
            bytes,
            arrays,
        }
    }
}

#[pymethods]
impl Collected {
    fn __repr__(&self) -> String {
        format!(
            "<gpu_ipc.Collected {} blocks, {} bytes, {} arrays>",
            self.blocks, self.bytes, self.arrays
        )
    }
}

/// What was still held when a session was closed.
#[pyclass(frozen, weakref, get_all, module = "gpu_ipc")]
pub(crate) struct ShutdownReport {
    /// Whether nothing was held any more.
    clean: bool,
    /// Blocks that still exist.
    blocks: u64,
    /// Their bytes.
    bytes: u64,
    /// Of those, blocks that this process itself has.
    own_blocks: u64,
    /// Blocks that are never used again, because the end of the work on them could not be observed.
    leaked_blocks: u64,
    /// Their bytes.
    leaked_bytes: u64,
    /// Tickets that connected processes can still claim: they hold blocks too.
    tickets: u64,
    /// Participants that hold leases or mappings.
    holders: Vec<Py<Holder>>,
}

impl ShutdownReport {
    pub fn of(
        py: Python<'_>,
        report: gpu_ipc::session::ShutdownReport,
    ) -> PyResult<ShutdownReport> {
        Ok(ShutdownReport {
            clean: report.clean,
            blocks: report.blocks,
            bytes: report.bytes,
            own_blocks: report.own_blocks,
            leaked_blocks: report.leaked_blocks,
            leaked_bytes: report.leaked_bytes,
            tickets: report.tickets,
            holders: Holder::list(py, report.holders)?,
        })
    }
}

#[pymethods]
impl ShutdownReport {
    fn __repr__(&self) -> String {
        format!(
            "<gpu_ipc.ShutdownReport clean={} blocks={} bytes={}>",
            self.clean, self.blocks, self.bytes
        )
    }
}

/// What a session told of itself.
#[pyclass(frozen, weakref, get_all, module = "gpu_ipc")]
pub(crate) struct SessionReport {
    /// The session's number, as 32 hexadecimal digits.
    session: String,
    /// The producer's process, as this process sees it where it can.
    pid: u32,
    /// The command that it runs, for reading only; ``?`` when nobody tells.
    command: String,
    /// The vendor: ``cuda``, ``hip`` or ``host``.
    backend: &'static str,
    /// The identity of the device.
    device: String,
    /// For how many seconds it is open.
    age: f64,
    /// Its counts and holders.
    stats: Py<Stats>,
}

#[pymethods]
impl SessionReport {
    fn __repr__(&self) -> String {
        format!(
            "<gpu_ipc.SessionReport {} of process {} ({})>",
            self.session, self.pid, self.command
        )
    }
}

/// List the sockets of this user's sessions that are alive.
///
/// Args:
///     runtime_dir: the directory to look in; None is where sessions put theirs unless told otherwise.
#[pyfunction]
#[pyo3(signature = (runtime_dir=None))]
pub(crate) fn sessions(py: Python<'_>, runtime_dir: Option<PathBuf>) -> PyResult<Vec<String>> {
    let found = py
        .detach(|| gpu_ipc::admin::sessions(runtime_dir.as_deref()))
        .or_raise()?;
    Ok(found
        .into_iter()
        .map(|path| path.display().to_string())
        .collect())
}

/// Ask a session for its counts and holders, without becoming a participant.
///
/// Raises:
///     ConnectFailed: no process listens there.
///     Timeout: its process does not answer; it hangs or is stopped.
#[pyfunction]
#[pyo3(signature = (path, timeout=10.0))]
pub(crate) fn inspect(
    py: Python<'_>,
    path: PathBuf,
    timeout: Option<f64>,
) -> PyResult<SessionReport> {
    let report = ask(py, path, timeout)?;
    Ok(SessionReport {
        session: report.session.to_string(),
        pid: report.pid,
        command: report.command,
        backend: report.backend.name(),
        device: report.device.to_string(),
        age: report.age.as_secs_f64(),
        stats: Py::new(py, Stats::of(py, report.stats)?)?,
    })
}

/// Asks a session about itself.
pub(crate) fn ask(
    py: Python<'_>,
    path: PathBuf,
    timeout: Option<f64>,
) -> PyResult<gpu_ipc::admin::SessionReport> {
    let timeout = duration(timeout)?;
    crate::interpreter::waiting::aside(py, move || gpu_ipc::admin::inspect(path, timeout))?
        .or_raise()
}
