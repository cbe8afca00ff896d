//! `gpu-ipc metrics`: sessions and brokers as OpenMetrics text, for whatever scrapes.
//!
//! The format is that of OpenMetrics 1.0: a family's `TYPE` and `HELP`, then its samples, and `#
//! EOF` at the end
//! (<https://github.com/prometheus/OpenMetrics/blob/main/specification/OpenMetrics.md>).

use std::fmt::{Display, Write as _};
use std::time::Duration;

use gpu_ipc::broker::server::listing::Listing;

use super::brokers::{BrokerState, SeenBroker, look};
use super::gather::{Answer, Seen, gather};
use crate::args::MetricsOptions;
use crate::{Outcome, output};

/// Prints the metrics.
pub fn run(options: &MetricsOptions) -> Outcome {
    let seen = match gather(&options.place) {
        Ok(seen) => seen,
        Err(why) => return output::fail(&why, false, Outcome::Unavailable),
    };
    let named = !options.place.sessions.is_empty();
    let broker = if named {
        None
    } else {
        look(Duration::from_secs_f64(options.place.timeout))
    };
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
    for family in sessions(seen)
        .into_iter()
        .chain(broker.map_or_else(Vec::new, of_broker))
    {
        let Family {
            name,
            kind,
            help,
            samples,
        } = family;
        // A counter's samples have a suffix that its family has not.
        let suffix = if kind == "counter" { "_total" } else { "" };
        // Writing to a string cannot fail.
        let _ = writeln!(
            text,
            "# TYPE gpu_ipc_{name} {kind}\n# HELP gpu_ipc_{name} {help}"
        );
        for (labels, value) in samples {
            let _ = writeln!(text, "gpu_ipc_{name}{suffix}{{{labels}}} {value}");
        }
    }
    text + "# EOF\n"
}

fn label(name: &str, value: impl Display) -> String {
    let value = value
        .to_string()
        .replace('\\', "\\\\")
        .replace('"', "\\\"")
        .replace('\n', "\\n");
    format!("{name}=\"{value}\"")
}

fn sessions(seen: &[Seen]) -> Vec<Family> {
    type Value = fn(&gpu_ipc::session::Stats) -> u64;
    let families: [(&'static str, &'static str, &'static str, Value); 13] = [
        ("session_blocks", "gauge", "Blocks that are live.", |s| {
            s.live_blocks
        }),
        (
            "session_block_bytes",
            "gauge",
            "Bytes of live blocks.",
            |s| s.live_bytes,
        ),
        (
            "session_limbo_blocks",
            "gauge",
            "Blocks that were dropped and are still held or in use.",
            |s| s.limbo_blocks,
        ),
        ("session_limbo_bytes", "gauge", "Bytes of those.", |s| {
            s.limbo_bytes
        }),
        (
            "session_leases_held",
            "gauge",
            "Leases that consumers hold.",
            |s| s.held,
        ),
        (
            "session_leases_in_flight",
            "gauge",
            "Leases that were granted and not claimed.",
            |s| s.in_flight,
        ),
        (
            "session_participants",
            "gauge",
            "Connected participants.",
            |s| s.participants,
        ),
        (
            "session_quarantined_bytes",
            "gauge",
            "Bytes of the dead that are not yet used again.",
            |s| s.quarantined_bytes,
        ),
        (
            "session_leaked_bytes",
            "gauge",
            "Bytes that are never used again.",
            |s| s.leaked_bytes,
        ),
        (
            "session_reserved_bytes",
            "gauge",
            "Bytes of the device that the session has.",
            |s| s.source.reserved,
        ),
        (
            "session_expired",
            "counter",
            "Leases that nobody claimed in time.",
            |s| s.expired,
        ),
        (
            "session_revoked",
            "counter",
            "Leases that were taken back.",
            |s| s.revoked,
        ),
        (
            "session_deaths",
            "counter",
            "Participants that died.",
            |s| s.deaths,
        ),
    ];
    let labels = |one: &Seen| label("socket", one.socket.display());
    let up = seen
        .iter()
        .map(|one| {
            (
                labels(one),
                u64::from(matches!(one.answer, Answer::Alive(_))),
            )
        })
        .collect();
    let mut all = vec![Family {
        name: "session_up",
        kind: "gauge",
        help: "Whether the session answers.",
        samples: up,
    }];
    for (name, kind, help, value) in families {
        let samples = seen.iter().filter_map(|one| match &one.answer {
            Answer::Alive(report) => {
                let (pid, device) = (label("pid", report.pid), label("device", report.device));
                Some((
                    format!("{},{pid},{device}", labels(one)),
                    value(&report.stats),
                ))
            }
            Answer::Hung(_) | Answer::Unknown(_) => None,
        });
        all.push(Family {
            name,
            kind,
            help,
            samples: samples.collect(),
        });
    }
    all
}

fn of_broker(seen: &SeenBroker) -> Vec<Family> {
    let dir = label("dir", seen.dir.display());
    let one = |name, kind, help, value| Family {
        name,
        kind,
        help,
        samples: vec![(dir.clone(), value)],
    };
    let is_up = matches!(seen.state, BrokerState::Serves(_));
    let mut all = vec![one(
        "broker_up",
        "gauge",
        "Whether the broker answers.",
        u64::from(is_up),
    )];
    let BrokerState::Serves(listing) = &seen.state else {
        return all;
    };
    let Listing {
        bytes,
        limit,
        keeper,
        commits,
        opens,
        aborted,
        restored,
        orphans,
        objects,
        ..
    } = &**listing;
    all.push(one(
        "broker_bytes",
        "gauge",
        "Bytes of all objects.",
        *bytes,
    ));
    if let Some(limit) = limit {
        all.push(one(
            "broker_limit_bytes",
            "gauge",
            "The limit of them.",
            *limit,
        ));
    }
    let fed = u64::from(keeper == "fed");
    all.push(one(
        "broker_keeper_fed",
        "gauge",
        "Whether the keeper has everything.",
        fed,
    ));
    all.push(one(
        "broker_restored",
        "gauge",
        "Objects that were found whole at the start.",
        *restored,
    ));
    all.push(one(
        "broker_orphans",
        "gauge",
        "Descriptors of no whole object that were closed at the start.",
        *orphans,
    ));
    all.push(one("broker_commits", "counter", "Commits.", *commits));
    all.push(one("broker_opens", "counter", "Opens.", *opens));
    all.push(one(
        "broker_aborted",
        "counter",
        "Objects that went because their writer died.",
        *aborted,
    ));
    let samples = |value: fn(&gpu_ipc::broker::server::listing::Row) -> u64| {
        let sample = |row: &gpu_ipc::broker::server::listing::Row| {
            let (name, identity) = (label("name", &row.name), label("identity", &row.identity));
            let (epoch, state) = (label("epoch", row.epoch), label("state", &row.state));
            (
                format!("{dir},{name},{epoch},{identity},{state}"),
                value(row),
            )
        };
        objects.iter().map(sample).collect()
    };
    let (name, help) = ("object_bytes", "Bytes of an object.");
    all.push(Family {
        name,
        kind: "gauge",
        help,
        samples: samples(|row| row.bytes),
    });
    let (name, help) = ("object_readers", "Participants that lease an object.");
    all.push(Family {
        name,
        kind: "gauge",
        help,
        samples: samples(|row| row.readers.len() as u64),
    });
    all
}

#[cfg(test)]
#[path = "../../tests/open_metrics/mod.rs"]
mod open_metrics;

#[cfg(test)]
mod tests {
    use super::*;
    use open_metrics::{Sample, parse};

    #[test]
    fn sessions_and_a_broker_are_open_metrics() {
        let dir = tempfile::tempdir().expect("a directory");
        let backend = gpu_ipc::host::HostBackend::new(gpu_ipc::host::HostConfig::default())
            .expect("it opens");
        let gpu = gpu_ipc::Gpu::new(backend, gpu_ipc::backend::DeviceId(0)).expect("a device");
        let session = gpu_ipc::Session::builder(gpu)
            .socket(dir.path().join("s"))
            .open()
            .expect("a session");
        let _block = session.alloc(1 << 20).expect("there is room");
        let report = gpu_ipc::admin::inspect(session.socket_path(), None).expect("a report");
        let alive = Seen {
            socket: "/run/a\"b\\c".into(),
            answer: Answer::Alive(Box::new(report)),
        };
        let hung = Seen {
            socket: "/run/hung".into(),
            answer: Answer::Hung(None),
        };
        let state = BrokerState::Serves(Box::new(super::super::brokers::tests::listing()));
        let broker = SeenBroker {
            dir: "/run/objects".into(),
            state,
        };
        let samples = parse(&text(&[alive, hung], Some(&broker))).expect("OpenMetrics");
        let of = |name: &str| {
            samples
                .iter()
                .filter(|sample| sample.name == name)
                .collect::<Vec<_>>()
        };
        let values = |name: &str| {
            of(name)
                .iter()
                .map(|sample| sample.value)
                .collect::<Vec<_>>()
        };
        assert_eq!(values("gpu_ipc_session_up"), [1.0, 0.0]);
        let Sample { labels, value, .. } = of("gpu_ipc_session_block_bytes")[0];
        assert_eq!(
            (labels["socket"].as_str(), *value),
            (r#"/run/a"b\c"#, f64::from(1 << 20))
        );
        assert_eq!(values("gpu_ipc_broker_commits_total"), [3.0]);
        assert_eq!(values("gpu_ipc_object_bytes").len(), 2);
        let next = of("gpu_ipc_object_readers")[1];
        assert_eq!((next.label("name"), next.label("epoch")), ("next", "0"));
        assert_eq!(
            parse(&text(&[], None)),
            Ok(Vec::new()),
            "nothing is a text too"
        );
    }

    /// Each rule that the check of the tests stands for, broken by a text of a line or two.
    #[test]
    fn what_is_no_open_metrics_is_found() {
        let good = "# TYPE a counter\n# HELP a It \\\"counts\\\".\na_total{b=\"c\\n\"} 1\n# EOF\n";
        assert_eq!(parse(good).expect("good")[0].label("b"), "c\n");
        for (from, to, why) in [
            ("# EOF\n", "", "the last line is not # EOF"),
            ("# EOF\n", "# EOF", "the last line is not # EOF"),
            (" 1\n", " 1", "does not end"),
            ("# TYPE a counter\n", "", "a sample of another family"),
            ("counter\n", "number\n", "no TYPE or HELP"),
            ("# HELP a", "# TYPE a", "no TYPE or HELP"),
            ("# HELP a", "# UNIT a", "no TYPE or HELP"),
            ("\\\"", "\"", "without a backslash"),
            ("# TYPE a c", "#TYPE a c", "no space behind #"),
            ("# HELP a", "# HELP 1", "no name of a metric"),
            ("# HELP a", "# HELP b", "a sample of another family"),
            ("a_total{", "a{", "a sample of another family"),
            ("{b=", "{1=", "no name of a label"),
            ("b=\"c\\n\"", "b=\"c\",b=\"c\"", "no name of a label"),
            ("c\\n", "c\\t", "a backslash before"),
            ("\"} 1", "\",} 1", "nothing or too much"),
            ("} 1", "} one", "no number"),
            ("} 1", "} -1", "a value that its type cannot have"),
            ("} 1", "}1", "no space before the value"),
            ("# EOF", "a_total{b=\"c\\n\"} 2\n# EOF", "a metric twice"),
            (
                "# EOF",
                "# HELP a It.\n# EOF",
                "a description behind its samples",
            ),
            (
                "# EOF",
                "# TYPE b gauge\nb 1\n# TYPE a counter\n# EOF",
                "a family in two places",
            ),
            (
                "# EOF",
                "# TYPE a_total gauge\na_total 1\n# EOF",
                "families of one sample's name",
            ),
            ("# EOF", "\n# EOF", "no value"),
        ] {
            let text = good.replacen(from, to, 1);
            assert_ne!(text, good, "{from:?} is not there");
            let error = parse(&text).expect_err(why);
            assert!(error.contains(why), "{from:?} to {to:?}: {error}");
        }
    }
}
