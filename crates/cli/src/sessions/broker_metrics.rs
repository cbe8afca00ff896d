//! What a broker measures of itself, as families of metrics.

// Tests: `crates/cli/src/sessions/metrics.rs`.

use std::collections::BTreeMap;

use gpu_ipc::broker::server::listing::{Listing, Row, Usage};

use super::brokers::{BrokerState, SeenBroker};
use super::open_metrics::{Family, label};

/// Names that have series of their own: the first by name, so that a series does not come and go as
/// others change.
pub const MOST_NAMES: usize = 1_000;

/// Writes a yes as 1 and a no as 0.
pub fn number(is: bool) -> f64 {
    f64::from(u8::from(is))
}

/// Makes the families of a broker.
pub fn of_broker(seen: &SeenBroker) -> Vec<Family> {
    let dir = label("dir", seen.dir.display());
    let up = [(
        dir.clone(),
        number(matches!(seen.state, BrokerState::Serves(_))),
    )];
    let mut all = vec![Family::gauge(
        "broker_up",
        "Whether the broker answers.",
        up,
    )];
    let BrokerState::Serves(listing) = &seen.state else {
        return all;
    };
    type Value = fn(&Listing) -> u64;
    let gauges: [(&'static str, &'static str, Value); 15] = [
        (
            "broker_age_seconds",
            "Seconds since the broker's start.",
            |l| l.age_s,
        ),
        ("broker_bytes", "Bytes of all objects.", |l| l.bytes),
        ("broker_objects", "Objects, finished or not.", |l| l.count()),
        ("broker_names", "Names that have an object.", |l| l.names),
        ("broker_names_limit", "The limit of them.", |l| {
            l.names_limit
        }),
        ("broker_participants", "Connected participants.", |l| {
            l.participants
        }),
        ("broker_participants_limit", "The limit of them.", |l| {
            l.participants_limit
        }),
        (
            "broker_restored",
            "Objects that were found whole at the start.",
            |l| l.restored,
        ),
        (
            "broker_orphans",
            "Descriptors of no whole object that were closed at the start.",
            |l| l.orphans,
        ),
        (
            "broker_foreign",
            "Objects and files of another version that the keeper has.",
            |l| l.foreign,
        ),
        (
            "broker_descriptors",
            "File descriptors that the broker has open; 0 before Linux 6.2.",
            |l| l.descriptors,
        ),
        (
            "broker_options_refused",
            "Whether the file of options was refused when it was read last.",
            |l| u64::from(!l.reread.why.is_empty()),
        ),
        (
            "broker_keeper_descriptors",
            "Descriptors that the keeper has.",
            |l| l.shelf.kept,
        ),
        (
            "broker_keeper_missing_objects",
            "Visible objects that the keeper does not have.",
            |l| l.shelf.missing,
        ),
        (
            "broker_keeper_silent_seconds",
            "Seconds for which the keeper has not answered.",
            |l| l.shelf.silent_s,
        ),
    ];
    let counters: [(&'static str, &'static str, Value); 9] = [
        ("broker_commits", "Commits.", |l| l.commits),
        ("broker_opens", "Opens.", |l| l.opens),
        (
            "broker_aborted",
            "Objects that went because their writer died.",
            |l| l.aborted,
        ),
        (
            "broker_evicted",
            "Objects that went because a limit pressed or their time was over.",
            |l| l.evicted,
        ),
        (
            "broker_keeper_deaths",
            "Ends of a keeper that this broker saw.",
            |l| l.keeper_deaths,
        ),
        (
            "broker_turned_away",
            "Connections that were refused for want of a file descriptor.",
            |l| l.turned_away,
        ),
        (
            "broker_rebinds",
            "Times that the broker's socket was gone, and was bound again.",
            |l| l.rebound,
        ),
        (
            "broker_rereads",
            "Times that the options were read again.",
            |l| l.reread.count,
        ),
        ("broker_starts", "Brokers that the keeper started.", |l| {
            l.shelf.starts
        }),
    ];
    type Limit = fn(&Listing) -> Option<u64>;
    let limits: [(&'static str, &'static str, Limit); 4] = [
        (
            "broker_limit_bytes",
            "The limit of all objects' bytes.",
            |l| l.limit,
        ),
        (
            "broker_limit_per_uid_bytes",
            "The limit of one user's bytes.",
            |l| l.limit_per_uid,
        ),
        (
            "broker_descriptors_limit",
            "The most file descriptors that the broker may have open.",
            |l| Some(l.descriptors_limit).filter(|&most| most > 0),
        ),
        (
            "broker_keeper_descriptors_limit",
            "The most descriptors that the keeper keeps.",
            |l| Some(l.shelf.most).filter(|&most| most > 0),
        ),
    ];
    let one = |value: u64| [(dir.clone(), value as f64)];
    all.extend(gauges.map(|(name, help, value)| Family::gauge(name, help, one(value(listing)))));
    all.extend(
        limits.into_iter().filter_map(|(name, help, value)| {
            Some(Family::gauge(name, help, one(value(listing)?)))
        }),
    );
    all.extend(
        counters.map(|(name, help, value)| Family::counter(name, help, one(value(listing)))),
    );
    let states = ["none", "fed", "absent", "full", "silent"];
    let state = |state| {
        (
            format!("{dir},{}", label("state", state)),
            number(listing.keeper == state),
        )
    };
    let help = "Which of its states the keeper is in.";
    all.push(Family::gauge("broker_keeper", help, states.map(state)));
    let users = |value: fn(&Usage) -> u64| {
        let sample = |user: &Usage| {
            (
                format!("{dir},{}", label("uid", user.uid)),
                value(user) as f64,
            )
        };
        listing.users.iter().map(sample).collect::<Vec<_>>()
    };
    all.push(Family::gauge(
        "broker_user_bytes",
        "Bytes of a user's objects.",
        users(|user| user.bytes),
    ));
    all.push(Family::gauge(
        "broker_user_objects",
        "A user's objects.",
        users(|user| user.objects),
    ));
    let latency = &listing.commit_latency;
    let seconds = |us: u64| us as f64 / 1e6;
    all.push(Family::histogram(
        "broker_commit_seconds",
        "From the question for a commit to its answer.",
        &dir,
        latency
            .at_most_us
            .iter()
            .map(|&(bound, count)| (seconds(bound), count as f64)),
        (latency.count as f64, seconds(latency.sum_us)),
    ));
    all.extend(names(&dir, listing));
    all
}

/// Makes the families of objects, by name alone: a label with an epoch or an identity would be a new
/// series at each commit.
fn names(dir: &str, listing: &Listing) -> Vec<Family> {
    let mut names: BTreeMap<&str, Vec<&Row>> = BTreeMap::new();
    for row in &listing.objects {
        names.entry(&row.name).or_default().push(row);
    }
    let names: Vec<(&str, Vec<&Row>)> = names.into_iter().take(MOST_NAMES).collect();
    fn newest<'a>(rows: &[&'a Row]) -> Option<&'a Row> {
        let visible = rows.iter().copied().filter(|row| row.epoch > 0);
        visible.max_by_key(|row| row.epoch)
    }
    let family = |name, help, value: fn(&[&Row]) -> Option<u64>| {
        let sample = |(name, rows): &(&str, Vec<&Row>)| {
            Some((
                format!("{dir},{}", label("name", name)),
                value(rows)? as f64,
            ))
        };
        Family::gauge(name, help, names.iter().filter_map(sample))
    };
    vec![
        family("object_bytes", "Bytes of a name's epochs.", |rows| {
            Some(rows.iter().map(|row| row.bytes).sum())
        }),
        family("object_epochs", "Epochs of a name.", |rows| {
            Some(rows.iter().filter(|row| row.epoch > 0).count() as u64)
        }),
        family(
            "object_unfinished",
            "Objects of a name that are not committed.",
            |rows| Some(rows.iter().filter(|row| row.epoch == 0).count() as u64),
        ),
        family("object_epoch", "The newest epoch of a name.", |rows| {
            newest(rows).map(|row| row.epoch)
        }),
        family("object_age_seconds", "Seconds since its commit.", |rows| {
            newest(rows).map(|row| row.age_s)
        }),
        family(
            "object_readers",
            "Leases that participants hold on a name's epochs.",
            |rows| Some(rows.iter().map(|row| row.readers.len() as u64).sum()),
        ),
    ]
}
