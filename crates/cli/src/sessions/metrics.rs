//! `gpu-ipc metrics`: sessions and brokers as OpenMetrics text, for whatever scrapes.
//!
//! The format is that of OpenMetrics 1.0: a family's `TYPE` and `HELP`, then its samples, and `# EOF` at the end
//! (<https://github.com/prometheus/OpenMetrics/blob/main/specification/OpenMetrics.md>).

use std::fmt::{Display, Write as _};
use std::time::Duration;

use gpu_ipc::broker::server::listing::Listing;

use super::brokers::{BrokerState, SeenBroker, look};
use super::gather::{Answer, Seen, gather};
use crate::args::MetricsOptions;
use lab::{Outcome, output};

/// Prints the metrics.
pub fn run(options: &MetricsOptions) -> Outcome {
    let seen = match gather(&options.place) {
        Ok(seen) => seen,
        Err(why) => return output::fail(&why, false, Outcome::Unavailable),
    };
    let named = !options.place.sessions.is_empty();
    let broker = if named { None } else { look(Duration::from_secs_f64(options.place.timeout)) };
    output::conclude(text(&seen, broker.as_ref()).trim_end(), Outcome::Good)
}

/// A family of samples.
struct Family {
    name: &'static str,
    kind: &'static str,
    help: &'static str,
    samples: Vec<(String, u64)>,
}

fn text(seen: &[Seen], broker: Option<&SeenBroker>) -> String {
    let mut text = String::new();
    for family in sessions(seen).into_iter().chain(broker.map_or_else(Vec::new, of_broker)) {
        let Family { name, kind, help, samples } = family;
        // A counter's samples have a suffix that its family has not.
        let suffix = if kind == "counter" { "_total" } else { "" };
        // Writing to a string cannot fail.
        let _ = writeln!(text, "# TYPE gpu_ipc_{name} {kind}\n# HELP gpu_ipc_{name} {help}");
        for (labels, value) in samples {
            let _ = writeln!(text, "gpu_ipc_{name}{suffix}{{{labels}}} {value}");
        }
    }
    text + "# EOF\n"
}

fn label(name: &str, value: impl Display) -> String {
    let value = value.to_string().replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n");
    format!("{name}=\"{value}\"")
}

fn sessions(seen: &[Seen]) -> Vec<Family> {
    type Value = fn(&gpu_ipc::session::Stats) -> u64;
    let families: [(&'static str, &'static str, &'static str, Value); 13] = [
        ("session_blocks", "gauge", "Blocks that are live.", |s| s.live_blocks),
        ("session_block_bytes", "gauge", "Bytes of live blocks.", |s| s.live_bytes),
        ("session_limbo_blocks", "gauge", "Blocks that were dropped and are still held or in use.", |s| s.limbo_blocks),
        ("session_limbo_bytes", "gauge", "Bytes of those.", |s| s.limbo_bytes),
        ("session_leases_held", "gauge", "Leases that consumers hold.", |s| s.held),
        ("session_leases_in_flight", "gauge", "Leases that were granted and not claimed.", |s| s.in_flight),
        ("session_participants", "gauge", "Connected participants.", |s| s.participants),
        ("session_quarantined_bytes", "gauge", "Bytes of the dead that are not yet used again.", |s| {
            s.quarantined_bytes
        }),
        ("session_leaked_bytes", "gauge", "Bytes that are never used again.", |s| s.leaked_bytes),
        ("session_reserved_bytes", "gauge", "Bytes of the device that the session has.", |s| s.source.reserved),
        ("session_expired", "counter", "Leases that nobody claimed in time.", |s| s.expired),
        ("session_revoked", "counter", "Leases that were taken back.", |s| s.revoked),
        ("session_deaths", "counter", "Participants that died.", |s| s.deaths),
    ];
    let labels = |one: &Seen| label("socket", one.socket.display());
    let up = seen.iter().map(|one| (labels(one), u64::from(matches!(one.answer, Answer::Alive(_))))).collect();
    let mut all = vec![Family { name: "session_up", kind: "gauge", help: "Whether the session answers.", samples: up }];
    for (name, kind, help, value) in families {
        let samples = seen.iter().filter_map(|one| match &one.answer {
            Answer::Alive(report) => {
                let (pid, device) = (label("pid", report.pid), label("device", report.device));
                Some((format!("{},{pid},{device}", labels(one)), value(&report.stats)))
            }
            Answer::Hung(_) | Answer::Unknown(_) => None,
        });
        all.push(Family { name, kind, help, samples: samples.collect() });
    }
    all
}

fn of_broker(seen: &SeenBroker) -> Vec<Family> {
    let dir = label("dir", seen.dir.display());
    let one = |name, kind, help, value| Family { name, kind, help, samples: vec![(dir.clone(), value)] };
    let is_up = matches!(seen.state, BrokerState::Serves(_));
    let mut all = vec![one("broker_up", "gauge", "Whether the broker answers.", u64::from(is_up))];
    let BrokerState::Serves(listing) = &seen.state else { return all };
    let Listing { bytes, limit, keeper, commits, opens, aborted, restored, orphans, objects, .. } = &**listing;
    all.push(one("broker_bytes", "gauge", "Bytes of all objects.", *bytes));
    if let Some(limit) = limit {
        all.push(one("broker_limit_bytes", "gauge", "The limit of them.", *limit));
    }
    let fed = u64::from(keeper == "fed");
    all.push(one("broker_keeper_fed", "gauge", "Whether the keeper has everything.", fed));
    all.push(one("broker_restored", "gauge", "Objects that were found whole at the start.", *restored));
    all.push(one("broker_orphans", "gauge", "Descriptors of no whole object that were closed at the start.", *orphans));
    all.push(one("broker_commits", "counter", "Commits.", *commits));
    all.push(one("broker_opens", "counter", "Opens.", *opens));
    all.push(one("broker_aborted", "counter", "Objects that went because their writer died.", *aborted));
    let samples = |value: fn(&gpu_ipc::broker::server::listing::Row) -> u64| {
        let sample = |row: &gpu_ipc::broker::server::listing::Row| {
            let (name, identity) = (label("name", &row.name), label("identity", &row.identity));
            let (epoch, state) = (label("epoch", row.epoch), label("state", &row.state));
            (format!("{dir},{name},{epoch},{identity},{state}"), value(row))
        };
        objects.iter().map(sample).collect()
    };
    let (name, help) = ("object_bytes", "Bytes of an object.");
    all.push(Family { name, kind: "gauge", help, samples: samples(|row| row.bytes) });
    let (name, help) = ("object_readers", "Participants that lease an object.");
    all.push(Family { name, kind: "gauge", help, samples: samples(|row| row.readers.len() as u64) });
    all
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    /// Checks what OpenMetrics asks of a text, and returns its samples.
    fn parse(text: &str) -> Vec<(String, String, u64)> {
        let body = text.strip_suffix("# EOF\n").expect("it ends with EOF");
        let (mut families, mut samples, mut family) = (BTreeSet::new(), Vec::new(), (String::new(), String::new()));
        for line in body.lines() {
            if let Some(rest) = line.strip_prefix("# TYPE ") {
                let (name, kind) = rest.split_once(' ').expect("a type");
                assert!(families.insert(name.to_owned()), "{name} twice");
                family = (name.into(), kind.into());
                continue;
            }
            if let Some(rest) = line.strip_prefix("# HELP ") {
                assert!(rest.starts_with(&format!("{} ", family.0)), "{line}");
                continue;
            }
            let (name, rest) = line.split_once('{').expect("labels");
            let (labels, value) = rest.rsplit_once("} ").expect("a value");
            let suffix = if family.1 == "counter" { "_total" } else { "" };
            assert_eq!(name, format!("{}{suffix}", family.0), "a sample of another family");
            samples.push((name.to_owned(), labels.to_owned(), value.parse().expect("a number")));
        }
        samples
    }

    #[test]
    fn sessions_and_a_broker_are_open_metrics() {
        let dir = tempfile::tempdir().expect("a directory");
        let backend = gpu_ipc::host::HostBackend::new(gpu_ipc::host::HostConfig::default()).expect("it opens");
        let gpu = gpu_ipc::Gpu::new(backend, gpu_ipc::backend::DeviceId(0)).expect("a device");
        let session = gpu_ipc::Session::builder(gpu).socket(dir.path().join("s")).open().expect("a session");
        let _block = session.alloc(1 << 20).expect("there is room");
        let report = gpu_ipc::admin::inspect(session.socket_path(), None).expect("a report");
        let alive = Seen { socket: "/run/a\"b\\c".into(), answer: Answer::Alive(Box::new(report)) };
        let hung = Seen { socket: "/run/hung".into(), answer: Answer::Hung(None) };
        let state = BrokerState::Serves(Box::new(super::super::brokers::tests::listing()));
        let broker = SeenBroker { dir: "/run/objects".into(), state };
        let samples = parse(&text(&[alive, hung], Some(&broker)));
        let of = |name: &str| samples.iter().filter(|(of, ..)| of == name).collect::<Vec<_>>();
        assert_eq!(of("gpu_ipc_session_up").iter().map(|(_, _, up)| *up).collect::<Vec<_>>(), [1, 0]);
        let (_, labels, bytes) = of("gpu_ipc_session_block_bytes")[0];
        assert!(labels.starts_with(r#"socket="/run/a\"b\\c",pid=""#) && *bytes == 1 << 20, "{labels} {bytes}");
        assert_eq!(of("gpu_ipc_broker_commits_total")[0].2, 3);
        assert_eq!(of("gpu_ipc_object_bytes").len(), 2);
        assert!(of("gpu_ipc_object_readers")[1].1.contains(r#"name="next",epoch="0""#));
        assert_eq!(parse(&text(&[], None)), Vec::new(), "nothing is a text too");
    }
}
