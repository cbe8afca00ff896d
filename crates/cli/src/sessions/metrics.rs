//! `gpu-ipc metrics`: sessions and brokers, for whatever scrapes.

use std::time::Duration;

use super::broker_metrics::{number, of_broker};
use super::brokers::{Depth, look};
use super::gather::{Answer, Seen, gather};
use super::open_metrics::{Family, label, text};
use crate::args::MetricsOptions;
use crate::{Outcome, output};

/// Prints the metrics.
pub fn run(options: &MetricsOptions) -> Outcome {
    let seen = match gather(&options.place) {
        Ok(seen) => seen,
        Err(why) => return output::fail(&why, false, Outcome::Unavailable),
    };
    let named = !options.place.sessions.is_empty();
    let timeout = Duration::from_secs_f64(options.place.timeout);
    let broker = if named && options.dir.is_none() {
        None
    } else {
        look(options.dir.as_deref(), Depth::Sums, timeout)
    };
    let families = sessions(&seen)
        .into_iter()
        .chain(broker.iter().flat_map(of_broker));
    output::conclude(text(families).trim_end(), Outcome::Good)
}

fn sessions(seen: &[Seen]) -> Vec<Family> {
    type Value = fn(&gpu_ipc::session::Stats) -> u64;
    let gauges: [(&'static str, &'static str, Value); 10] = [
        ("session_blocks", "Blocks that are live.", |s| s.live_blocks),
        ("session_block_bytes", "Bytes of live blocks.", |s| {
            s.live_bytes
        }),
        (
            "session_limbo_blocks",
            "Blocks that were dropped and are still held or in use.",
            |s| s.limbo_blocks,
        ),
        ("session_limbo_bytes", "Bytes of those.", |s| s.limbo_bytes),
        ("session_leases_held", "Leases that consumers hold.", |s| {
            s.held
        }),
        (
            "session_leases_in_flight",
            "Leases that were granted and not claimed.",
            |s| s.in_flight,
        ),
        ("session_participants", "Connected participants.", |s| {
            s.participants
        }),
        (
            "session_quarantined_bytes",
            "Bytes of the dead that are not yet used again.",
            |s| s.quarantined_bytes,
        ),
        (
            "session_leaked_bytes",
            "Bytes that are never used again.",
            |s| s.leaked_bytes,
        ),
        (
            "session_reserved_bytes",
            "Bytes of the device that the session has.",
            |s| s.source.reserved,
        ),
    ];
    let counters: [(&'static str, &'static str, Value); 3] = [
        (
            "session_expired",
            "Leases that nobody claimed in time.",
            |s| s.expired,
        ),
        ("session_revoked", "Leases that were taken back.", |s| {
            s.revoked
        }),
        ("session_deaths", "Participants that died.", |s| s.deaths),
    ];
    let labels = |one: &Seen| label("socket", one.socket.display());
    let is_up = |one: &Seen| matches!(one.answer, Answer::Alive(_));
    let up = seen.iter().map(|one| (labels(one), number(is_up(one))));
    let of_alive = |value: Value| {
        let sample = move |one: &Seen| match &one.answer {
            Answer::Alive(report) => {
                let (pid, device) = (label("pid", report.pid), label("device", report.device));
                let labels = format!("{},{pid},{device}", labels(one));
                Some((labels, value(&report.stats) as f64))
            }
            Answer::Hung(_) | Answer::Unknown(_) => None,
        };
        seen.iter().filter_map(sample)
    };
    let mut all = vec![Family::gauge(
        "session_up",
        "Whether the session answers.",
        up,
    )];
    all.extend(gauges.map(|(name, help, value)| Family::gauge(name, help, of_alive(value))));
    all.extend(counters.map(|(name, help, value)| Family::counter(name, help, of_alive(value))));
    all
}

#[cfg(test)]
#[path = "../../tests/open_metrics/mod.rs"]
mod open_metrics;

#[cfg(test)]
mod tests {
    use super::super::broker_metrics::MOST_NAMES;
    use super::super::brokers::{BrokerState, SeenBroker};
    use super::*;
    use gpu_ipc::broker::server::listing::{Listing, Row};
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
        let families = sessions(&[alive, hung])
            .into_iter()
            .chain(of_broker(&broker));
        let samples = parse(&text(families)).expect("OpenMetrics");
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
        assert_eq!(next.label("name"), "next");
        assert_eq!(values("gpu_ipc_object_epoch"), [7.0], "`next` has none yet");
        assert_eq!(values("gpu_ipc_object_unfinished"), [0.0, 1.0]);
        assert_eq!(parse(&text([])), Ok(Vec::new()), "nothing is a text too");
    }

    /// A label with an epoch or an identity would be a new series at each commit, for as long as
    /// the store keeps any.
    #[test]
    fn commits_make_no_new_series() {
        let of = |listing: Listing| {
            let seen = SeenBroker {
                dir: "/run/objects".into(),
                state: BrokerState::Serves(Box::new(listing)),
            };
            let samples = parse(&text(of_broker(&seen))).expect("OpenMetrics");
            let series = samples
                .into_iter()
                .map(|sample| (sample.name, sample.labels));
            series.collect::<Vec<_>>()
        };
        let mut listing = super::super::brokers::tests::listing();
        listing.commit_latency.note(Duration::from_millis(3));
        let before = of(listing.clone());
        listing.commits += 1;
        listing.commit_latency.note(Duration::from_millis(5));
        let (row, older) = (&mut listing.objects[0], 7);
        (row.epoch, row.identity, row.age_s) = (older + 1, "f".repeat(32), 0);
        assert_eq!(of(listing.clone()), before);
        let many = (0..MOST_NAMES + 5).map(|n| Row {
            name: format!("checkpoint-{n:04}"),
            epoch: 1,
            ..Row::default()
        });
        listing.objects.extend(many);
        let named = of(listing)
            .into_iter()
            .filter(|(name, _)| name == "gpu_ipc_object_bytes");
        let named: Vec<String> = named.map(|(_, labels)| labels["name"].clone()).collect();
        assert_eq!(named.len(), MOST_NAMES);
        assert!(
            !named.contains(&"checkpoint-1004".into()),
            "the last are left out"
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
            ("counter\n", "histogram\n", "a sample of another family"),
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
        let good = concat!(
            "# TYPE h histogram\n# HELP h It.\n",
            "h_bucket{a=\"b\",le=\"0.5\"} 1\nh_bucket{a=\"b\",le=\"+Inf\"} 2\nh_count{a=\"b\"} 2\nh_sum{a=\"b\"} 3.5\n# EOF\n"
        );
        assert_eq!(parse(good).expect("good").len(), 4);
        for (from, to, why) in [
            (
                "le=\"0.5\"} 1",
                "le=\"0.5\"} 3",
                "a bucket that holds less than the one before",
            ),
            (
                "le=\"0.5\"",
                "le=\"half\"",
                "a bucket without a bound above the one before",
            ),
            (
                "le=\"+Inf\"} 2",
                "le=\"0.4\"} 2",
                "a bucket without a bound above the one before",
            ),
            (
                "h_count{a=\"b\"} 2",
                "h_count{a=\"b\"} 3",
                "a count that is not its last bucket's",
            ),
            (
                "_bucket{a=\"b\",le=\"+Inf\"} 2\nh",
                "_bucket{a=\"b\",le=\"0.6\"} 2\nh",
                "a count that is not its last bucket's",
            ),
            ("h_sum", "h_total", "a sample of another family"),
        ] {
            let text = good.replacen(from, to, 1);
            assert_ne!(text, good, "{from:?} is not there");
            let error = parse(&text).expect_err(why);
            assert!(error.contains(why), "{from:?} to {to:?}: {error}");
        }
    }
}
