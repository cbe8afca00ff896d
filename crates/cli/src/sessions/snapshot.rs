//! `gpu-ipc snapshot`: where a session's memory lies, and which process holds it.

use std::fmt::Write as _;
use std::path::PathBuf;
use std::time::Duration;

use gpu_ipc::Error;
use gpu_ipc::allocators::Snapshot;
use serde_json::json;

use super::gather;
use super::text::{bytes, cut, time};
use crate::args::SnapshotOptions;
use crate::device::explain;
use crate::{Outcome, output};

/// Prints a session's snapshot, and draws it if asked.
pub fn run(options: &SnapshotOptions) -> Outcome {
    let taken = find(options).and_then(|socket| take(options, socket));
    let (socket, snapshot) = match taken {
        Ok(taken) => taken,
        Err(why) => return output::fail(&why, options.json, Outcome::Finding),
    };
    if let Some(file) = &options.svg
        && let Err(error) = std::fs::write(file, snapshot.svg())
    {
        let why = format!("{} cannot be written: {error}", file.display());
        return output::fail(&why, options.json, Outcome::Finding);
    }
    let socket = socket.display().to_string();
    let text = if options.json {
        json!({ "ok": true, "socket": socket, "snapshot": snapshot }).to_string()
    } else {
        page(&socket, &snapshot)
    };
    output::conclude(text.trim_end(), Outcome::Good)
}

/// Finds the socket of the session that is meant: the one that is named, or the only one that is
/// open here.
fn find(options: &SnapshotOptions) -> Result<PathBuf, String> {
    if let Some(session) = &options.session {
        return gather::find(session);
    }
    let mut open = gather::open_here()?;
    match (open.pop(), open.len()) {
        (Some(only), 0) => Ok(only),
        (None, _) => {
            Err("no session is open here; name the socket of one: gpu-ipc snapshot PATH".into())
        }
        (Some(_), more) => Err(format!(
            "{} sessions are open here; name one that gpu-ipc ls shows",
            more + 1
        )),
    }
}

fn take(options: &SnapshotOptions, socket: PathBuf) -> Result<(PathBuf, Snapshot), String> {
    let timeout = Duration::from_secs_f64(options.timeout);
    let text = gpu_ipc::admin::snapshot(&socket, Some(timeout)).map_err(|error| match error {
        Error::Deadline { .. } => {
            format!(
                "{} listens and does not answer: its process hangs or is stopped",
                socket.display()
            )
        }
        error => explain(&error),
    })?;
    let snapshot = Snapshot::from_json(&text).map_err(|error| explain(&error))?;
    Ok((socket, snapshot))
}

/// Returns what people read.
fn page(socket: &str, snapshot: &Snapshot) -> String {
    let mut text = format!("SESSION  {socket}\n         {}\n", snapshot.name);
    // Writing to a string cannot fail.
    let _ = sums(&mut text, snapshot);
    let _ = holders(&mut text, snapshot);
    let _ = write!(text, "{}", snapshot.tables());
    text += "  * in use  o lent  # in limbo  + some of these  x slack  ~ pending  _ free\n";
    text += "  ! another process may have the region mapped\n";
    text
}

fn sums(text: &mut String, snapshot: &Snapshot) -> std::fmt::Result {
    let stats = &snapshot.stats;
    let limit = stats.bytes_limit.map_or_else(|| "none".into(), bytes);
    let sums = [
        [
            ("limit", limit),
            ("reserved", bytes(stats.bytes_reserved)),
            ("in use", bytes(stats.bytes_in_use)),
        ],
        [
            ("in limbo", bytes(snapshot.limbo_bytes)),
            ("quarantine", bytes(snapshot.quarantined_bytes)),
            ("exported", bytes(snapshot.exported_bytes())),
        ],
        [
            ("free", bytes(snapshot.free_bytes())),
            ("largest", bytes(stats.largest_free_block_bytes)),
            (
                "scattered",
                format!("{:.0} %", 100.0 * snapshot.fragmentation()),
            ),
        ],
    ];
    for [(a, a_is), (b, b_is), (c, c_is)] in sums {
        writeln!(
            text,
            "  {a:<9}{a_is:>11}   {b:<10}{b_is:>11}   {c:<10}{c_is:>11}"
        )?;
    }
    Ok(())
}

fn holders(text: &mut String, snapshot: &Snapshot) -> std::fmt::Result {
    if snapshot.holders.is_empty() {
        return writeln!(text, "  no process holds a block");
    }
    writeln!(
        text,
        "  {:>8} {:<15} {:>8} {:>10} {:>10} {:>7} {:>10}  STATE",
        "PID", "HELD BY", "LEASES", "BYTES", "IN LIMBO", "REGIONS", "OLDEST"
    )?;
    let mut holders: Vec<_> = snapshot.holders.iter().enumerate().collect();
    holders.sort_by_key(|(_, holder)| std::cmp::Reverse(holder.bytes));
    for (place, holder) in holders {
        let oldest = Duration::from_millis(holder.oldest_ms);
        writeln!(
            text,
            "  {:>8} {:<15} {:>8} {:>10} {:>10} {:>7} {:>10}  {}",
            holder.pid,
            cut(&holder.command, 15),
            holder.leases,
            bytes(holder.bytes),
            bytes(snapshot.limbo_of(place)),
            holder.mappings,
            if holder.leases == 0 {
                "-".into()
            } else {
                time(oldest)
            },
            if holder.dying { "dying" } else { "alive" }
        )?;
    }
    Ok(())
}
