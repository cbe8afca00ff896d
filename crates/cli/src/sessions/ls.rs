//! `gpu-ipc ls`: the sessions, once.

use std::fmt::Write as _;

use serde_json::{Value, json};

use super::gather::{Seen, State, gather};
use super::text::{bytes, cut, time};
use crate::args::LsOptions;
use lab::{Outcome, output};

/// Prints the sessions.
pub fn run(options: &LsOptions) -> Outcome {
    let seen = match gather(&options.place) {
        Ok(seen) => seen,
        Err(why) => return output::fail(&why, options.json, Outcome::Unavailable),
    };
    // Who names a session wants to know whether it is well.
    let ok = options.place.socket.is_empty() || seen.iter().all(|one| matches!(one.state, State::Alive(_)));
    let text = if options.json { json!({ "ok": ok, "sessions": to_json(&seen) }).to_string() } else { table(&seen) };
    output::conclude(text.trim_end(), if ok { Outcome::Good } else { Outcome::Finding })
}

/// Returns what people read: at most 80 columns, but for paths and reasons, which are of use whole.
pub fn table(seen: &[Seen]) -> String {
    if seen.is_empty() {
        return "No session is open here. One that listens on a path of its own: gpu-ipc ls --socket PATH\n".into();
    }
    let mut text = String::new();
    for (n, one) in seen.iter().enumerate() {
        if n > 0 {
            text.push('\n');
        }
        // Writing to a string cannot fail.
        let _ = one_session(&mut text, one);
    }
    text
}

fn one_session(text: &mut String, seen: &Seen) -> std::fmt::Result {
    let socket = seen.socket.display().to_string();
    let report = match &seen.state {
        State::Alive(report) => report,
        State::Hung => {
            writeln!(text, "HUNG     {}", socket)?;
            return writeln!(text, "         it listens and does not answer: its process hangs or is stopped");
        }
        State::Unknown(why) => {
            writeln!(text, "UNKNOWN  {}", socket)?;
            return writeln!(text, "         {why}");
        }
    };
    let stats = &report.stats;
    writeln!(text, "SESSION  {}", socket)?;
    writeln!(text, "         process {} ({}), open for {}", report.pid, cut(&report.command, 15), time(report.age))?;
    writeln!(text, "         on {}, device {}", report.backend, report.device)?;
    writeln!(
        text,
        "  blocks {:>9} {:>10}   in limbo   {:>7} {:>10}   tickets {:>7}",
        stats.live_blocks,
        bytes(stats.live_bytes),
        stats.limbo_blocks,
        bytes(stats.limbo_bytes),
        stats.tickets
    )?;
    writeln!(
        text,
        "  leases {:>9} {:>10}   quarantine {:>7} {:>10}   deaths  {:>7}",
        stats.in_flight + stats.held + stats.poisoned,
        format!("{} held", stats.held),
        stats.quarantined,
        bytes(stats.quarantined_bytes),
        stats.deaths
    )?;
    if stats.leaked_blocks + stats.poisoned + stats.corrupt_words > 0 {
        writeln!(
            text,
            "  never reused: {} blocks, {}; barred by bad words: {}",
            stats.leaked_blocks,
            bytes(stats.leaked_bytes),
            stats.poisoned
        )?;
    }
    if stats.holders.is_empty() {
        return writeln!(text, "  nobody is connected");
    }
    writeln!(
        text,
        "  {:>8} {:<15} {:>8} {:>10} {:>8} {:>10}  STATE",
        "PID", "HELD BY", "LEASES", "BYTES", "REGIONS", "OLDEST"
    )?;
    let mut holders: Vec<_> = stats.holders.iter().collect();
    holders.sort_by_key(|holder| std::cmp::Reverse(holder.bytes));
    for holder in holders {
        writeln!(
            text,
            "  {:>8} {:<15} {:>8} {:>10} {:>8} {:>10}  {}",
            holder.pid,
            cut(&holder.command, 15),
            holder.leases,
            bytes(holder.bytes),
            holder.mappings,
            if holder.leases == 0 { "-".into() } else { time(holder.oldest) },
            if holder.dying { "dying" } else { "alive" }
        )?;
    }
    Ok(())
}

fn to_json(seen: &[Seen]) -> Vec<Value> {
    seen.iter()
        .map(|one| {
            let socket = one.socket.display().to_string();
            match &one.state {
                State::Hung => json!({ "socket": socket, "state": "hung" }),
                State::Unknown(why) => json!({ "socket": socket, "state": "unknown", "why": why }),
                State::Alive(report) => {
                    let stats = &report.stats;
                    let holders: Vec<Value> = stats
                        .holders
                        .iter()
                        .map(|holder| {
                            json!({
                                "participant": holder.participant.0,
                                "pid": holder.pid,
                                "command": holder.command,
                                "leases": holder.leases,
                                "bytes": holder.bytes,
                                "regions": holder.mappings,
                                "oldest_ms": holder.oldest.as_millis() as u64,
                                "dying": holder.dying,
                            })
                        })
                        .collect();
                    json!({
                        "socket": socket,
                        "state": "alive",
                        "session": report.session.to_string(),
                        "pid": report.pid,
                        "command": report.command,
                        "backend": report.backend.name(),
                        "device": report.device.to_string(),
                        "age_ms": report.age.as_millis() as u64,
                        "blocks": stats.live_blocks,
                        "bytes": stats.live_bytes,
                        "limbo_blocks": stats.limbo_blocks,
                        "limbo_bytes": stats.limbo_bytes,
                        "unmarked_blocks": stats.unmarked_blocks,
                        "in_flight": stats.in_flight,
                        "held": stats.held,
                        "tickets": stats.tickets,
                        "quarantined": stats.quarantined,
                        "quarantined_bytes": stats.quarantined_bytes,
                        "poisoned": stats.poisoned,
                        "leaked_blocks": stats.leaked_blocks,
                        "leaked_bytes": stats.leaked_bytes,
                        "revoked": stats.revoked,
                        "expired": stats.expired,
                        "deaths": stats.deaths,
                        "corrupt_words": stats.corrupt_words,
                        "reserved_bytes": stats.source.reserved,
                        "pinned_bytes": stats.source.pinned,
                        "holders": holders,
                    })
                }
            }
        })
        .collect()
}
