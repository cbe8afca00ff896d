//! `gpu-ipc ls`: the sessions, once.

use std::fmt::Write as _;
use std::time::Duration;

use rustix::termios::tcgetwinsize;
use serde_json::{Value, json};

use super::brokers;
use super::columns::{HOLDER_COLUMNS, Shown, holder_cells};
use super::gather::{Answer, Seen, gather};
use super::text::{bytes, cut, flow, time};
use crate::args::LsOptions;
use crate::{Outcome, output};

/// The columns of what is no terminal.
const WIDTH: u16 = 80;
/// In a narrower terminal lines are wrapped.
const LEAST_WIDTH: u16 = 30;

/// Prints the sessions.
pub fn run(options: &LsOptions) -> Outcome {
    let seen = match gather(&options.place) {
        Ok(seen) => seen,
        Err(why) => return output::fail(&why, options.json, Outcome::Unavailable),
    };
    let broker = if options.place.sessions.is_empty() {
        brokers::look(
            None,
            brokers::Depth::Objects,
            Duration::from_secs_f64(options.place.timeout),
        )
    } else {
        None
    };
    // Who names a session wants to know whether it is well.
    let ok = options.place.sessions.is_empty()
        || seen
            .iter()
            .all(|one| matches!(one.answer, Answer::Alive(_)));
    let text = if options.json {
        let brokers: Vec<Value> = broker.iter().map(brokers::to_json).collect();
        json!({ "ok": ok, "sessions": to_json(&seen), "brokers": brokers }).to_string()
    } else {
        let terminal = tcgetwinsize(std::io::stdout())
            .map(|size| size.ws_col)
            .ok()
            .filter(|&columns| columns > 0);
        let sessions = table(
            &seen,
            terminal.map_or(WIDTH, |columns| columns.clamp(LEAST_WIDTH, WIDTH)),
        );
        broker.iter().fold(sessions, |text, broker| {
            format!("{text}\n{}", brokers::table(broker))
        })
    };
    output::conclude(
        text.trim_end(),
        if ok { Outcome::Good } else { Outcome::Finding },
    )
}

/// Returns the text for people, within a number of columns except for paths and reasons, which stay
/// whole.
pub fn table(seen: &[Seen], width: u16) -> String {
    if seen.is_empty() {
        return "No session is open here. One that listens on a path of its own: gpu-ipc ls PATH\n"
            .into();
    }
    let mut text = String::new();
    for (n, one) in seen.iter().enumerate() {
        if n > 0 {
            text.push('\n');
        }
        // Writing to a string cannot fail.
        let _ = one_session(&mut text, one, width);
    }
    text
}

fn one_session(text: &mut String, seen: &Seen, width: u16) -> std::fmt::Result {
    let socket = seen.socket.display().to_string();
    let report = match &seen.answer {
        Answer::Alive(report) => report,
        Answer::Hung(listener) => {
            writeln!(text, "HUNG     {socket}")?;
            let who = listener.as_ref().map_or("its process".into(), |of| {
                format!("process {} ({})", of.pid, cut(&of.command, 15))
            });
            let parts = [
                format!("{who} listens and does not answer:"),
                "it hangs or is stopped".into(),
            ];
            return writeln!(text, "{}", flow(&parts, 9, width.into()));
        }
        Answer::Unknown(why) => {
            writeln!(text, "UNKNOWN  {socket}")?;
            return writeln!(text, "         {why}");
        }
    };
    let stats = &report.stats;
    writeln!(text, "SESSION  {socket}")?;
    let about = [
        format!("process {} ({})", report.pid, cut(&report.command, 15)),
        format!("open for {}", time(report.age)),
        format!("on {}", report.backend),
        format!("device {}", report.device),
    ];
    writeln!(text, "{}", flow(&about, 9, width.into()))?;
    let counts = [
        [
            format!(
                "blocks {:>9} {:>10}",
                stats.live_blocks,
                bytes(stats.live_bytes)
            ),
            format!(
                "in limbo   {:>7} {:>10}",
                stats.limbo_blocks,
                bytes(stats.limbo_bytes)
            ),
            format!("tickets {:>7}", stats.tickets),
        ],
        [
            format!(
                "leases {:>9} {:>10}",
                stats.in_flight + stats.held + stats.poisoned,
                format!("{} held", stats.held)
            ),
            format!(
                "quarantine {:>7} {:>10}",
                stats.quarantined,
                bytes(stats.quarantined_bytes)
            ),
            format!("deaths  {:>7}", stats.deaths),
        ],
    ];
    for parts in counts {
        writeln!(text, "{}", flow(&parts, 2, width.into()))?;
    }
    if stats.leaked_blocks + stats.poisoned + stats.corrupt_words > 0 {
        let never = [
            format!(
                "never reused: {} blocks, {}",
                stats.leaked_blocks,
                bytes(stats.leaked_bytes)
            ),
            format!("barred by bad words: {}", stats.poisoned),
        ];
        writeln!(text, "{}", flow(&never, 2, width.into()))?;
    }
    if stats.holders.is_empty() {
        return writeln!(text, "  no process is connected");
    }
    let shown = Shown::within(usize::from(width).saturating_sub(2), &HOLDER_COLUMNS);
    writeln!(text, "  {}", shown.head())?;
    for cells in holder_cells(&stats.holders) {
        writeln!(text, "  {}", shown.line(cells))?;
    }
    Ok(())
}

fn to_json(seen: &[Seen]) -> Vec<Value> {
    seen.iter()
        .map(|one| {
            let socket = one.socket.display().to_string();
            match &one.answer {
                Answer::Hung(None) => json!({ "socket": socket, "state": "hung" }),
                Answer::Hung(Some(listener)) => {
                    json!({ "socket": socket, "state": "hung", "pid": listener.pid, "command": listener.command })
                }
                Answer::Unknown(why) => json!({ "socket": socket, "state": "unknown", "why": why }),
                Answer::Alive(report) => {
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
