//! What holds for every view: proptest draws the views.

use std::time::Duration;

use gpu_ipc_gateway_plan::{
    Admission, Desk, READS_AT_ONCE, Reading, Source, Step, Trouble, TroubleKind, Verdict, View,
    admit, choose, keep,
};
use proptest::prelude::*;

const ME: u8 = 0;

fn millis(most: u64) -> impl Strategy<Value = Duration> {
    (0..most).prop_map(Duration::from_millis)
}

fn sources() -> impl Strategy<Value = Vec<Source<u8>>> {
    let source = (0u8..12, any::<bool>(), millis(100_000), 0u32..4, 0u32..4);
    let source = source.prop_map(|(host, origin, heard, reads, limit)| Source {
        host,
        origin,
        heard,
        reads,
        limit,
    });
    proptest::collection::vec(source, 0..12)
}

fn troubles() -> impl Strategy<Value = Vec<Trouble<u8>>> {
    let kind = prop_oneof![
        Just(TroubleKind::Refused),
        Just(TroubleKind::Failed),
        Just(TroubleKind::Slow)
    ];
    let trouble = (
        0u8..12,
        kind,
        prop_oneof![1u32..6, Just(u32::MAX)],
        millis(100_000),
    );
    let trouble = trouble.prop_map(|(host, kind, times, at)| Trouble {
        host,
        kind,
        times,
        at,
    });
    proptest::collection::vec(trouble, 0..8)
}

/// The parts of a view.
#[derive(Clone, Debug)]
struct Heard {
    now: Duration,
    wanted_since: Duration,
    expected: Duration,
    sources: Vec<Source<u8>>,
    troubles: Vec<Trouble<u8>>,
    seed: u64,
}

fn heard() -> impl Strategy<Value = Heard> {
    (
        millis(200_000),
        millis(100_000),
        millis(60_000),
        sources(),
        troubles(),
        any::<u64>(),
    )
        .prop_map(
            |(now, wanted_since, expected, sources, troubles, seed)| Heard {
                now,
                wanted_since,
                expected,
                sources,
                troubles,
                seed,
            },
        )
}

impl Heard {
    fn view(&self) -> View<'_, u8> {
        View {
            me: ME,
            now: self.now,
            wanted_since: self.wanted_since,
            expected: self.expected,
            sources: &self.sources,
            troubles: &self.troubles,
            seed: self.seed,
        }
    }
}

proptest! {
    #[test]
    fn reads_only_from_another_host_that_announces_it(heard in heard()) {
        let others = heard.sources.iter().any(|source| source.host != ME);
        match choose(&heard.view()) {
            Step::Read { host, last_resort } => {
                prop_assert!(host != ME);
                let found = heard.sources.iter().find(|source| source.host == host);
                prop_assert!(found.is_some());
                prop_assert!(!last_resort || heard.sources.iter().any(|s| s.host == host && s.origin));
            }
            Step::Wait(time) => prop_assert!(others && time > Duration::ZERO),
            Step::Nobody => prop_assert!(!others),
        }
    }

    #[test]
    fn does_not_depend_on_the_order_of_what_was_heard(mut heard in heard()) {
        // Of two entries for one host that differ in more than the reads either may count.
        heard.sources.sort_by_key(|source| source.host);
        heard.sources.dedup_by_key(|source| source.host);
        let mut turned = heard.clone();
        turned.sources.reverse();
        turned.troubles.reverse();
        prop_assert_eq!(choose(&heard.view()), choose(&turned.view()));
    }

    #[test]
    fn does_not_pick_a_host_again_at_once_after_it_failed(mut heard in heard()) {
        if let Step::Read { host, .. } = choose(&heard.view()) {
            for kind in [TroubleKind::Failed, TroubleKind::Refused, TroubleKind::Slow] {
                heard.troubles.push(Trouble { host, kind, times: 1, at: heard.now });
                let next = choose(&heard.view());
                let again = matches!(next, Step::Read { host: next, .. } if next == host);
                prop_assert!(!again);
                heard.troubles.pop();
            }
        }
    }

    #[test]
    fn leaves_an_origin_that_stepped_aside_alone_while_a_replica_serves(mut heard in heard()) {
        let at = heard.now;
        heard.wanted_since = at;
        heard.sources.iter_mut().filter(|source| source.origin).for_each(|origin| origin.reads = origin.limit);
        heard.sources.push(Source { host: 200, origin: false, heard: at, reads: 0, limit: 1 });
        // One that is full may be drawn: then the host waits, and draws again.
        let mut draws = 0;
        let (host, last_resort) = loop {
            match choose(&heard.view()) {
                Step::Read { host, last_resort } => break (host, last_resort),
                step => prop_assert!(matches!(step, Step::Wait(_)) && draws < 2_000, "{step:?} after {draws} draws"),
            }
            heard.seed = heard.seed.wrapping_mul(6364136223846793005).wrapping_add(1);
            draws += 1;
        };
        prop_assert!(heard.sources.iter().any(|source| source.host == host && !source.origin));
        prop_assert!(!last_resort);
    }

    /// No livelock: with one host that serves and others that refuse, fail and report falsely, the
    /// one is reached.
    #[test]
    fn reaches_the_only_host_that_serves(mut heard in heard(), origin in any::<bool>(), full in any::<bool>()) {
        let good = 100;
        heard.troubles.clear();
        heard.sources.push(Source { host: good, origin, heard: heard.now, reads: u32::from(full), limit: 1 });
        let mut asked = 0;
        loop {
            match choose(&heard.view()) {
                Step::Read { host, .. } if host == good => break,
                Step::Read { host, .. } => {
                    asked += 1;
                    let times = heard.troubles.iter().filter(|t| t.host == host).count() as u32 + 1;
                    let kind = if host % 2 == 0 { TroubleKind::Failed } else { TroubleKind::Refused };
                    heard.troubles.push(Trouble { host, kind, times, at: heard.now });
                }
                Step::Wait(time) => heard.now += time,
                Step::Nobody => prop_assert!(false, "the host that serves is among the sources"),
            }
            heard.seed = heard.seed.wrapping_mul(6364136223846793005).wrapping_add(1);
            prop_assert!(asked < 2_000, "asked {asked} times and never the host that serves");
        }
    }

    #[test]
    fn a_read_that_stands_still_ends_and_one_that_is_slow_is_kept_at_last(
        heard in heard(),
        done in any::<u64>(),
        size in any::<u64>(),
        elapsed in millis(10_000_000),
        given_up in any::<u32>(),
    ) {
        let view = heard.view();
        let reading = Reading { host: 5, elapsed, idle: Duration::ZERO, done, size, given_up };
        prop_assert_ne!(keep(&view, &reading), Verdict::Stalled);
        let idle = Duration::from_secs(3_600);
        prop_assert_eq!(keep(&view, &Reading { idle, ..reading }), Verdict::Stalled);
        // A link of a 10,000th of the expected rate is kept after 48 reads were given up.
        let slow = Reading { elapsed: heard.expected * 2, done: 1, size: 5_000, given_up: 48, ..reading };
        prop_assert_eq!(keep(&view, &slow), Verdict::Keep);
    }

    #[test]
    fn admits_no_more_than_the_room_and_points_away_only_at_an_origin_with_others(
        origin in any::<bool>(),
        reads in proptest::collection::vec(millis(100_000), 0..12),
        expected in millis(60_000),
        more in 0u32..8,
        others in 0u32..3,
        last_resort in any::<bool>(),
    ) {
        let desk = Desk { origin, reads: &reads, expected, admitted: reads.len() as u32 + more, others };
        prop_assert!(desk.counted() as usize <= reads.len() && desk.counted() <= desk.announced());
        match admit(&desk, last_resort) {
            Admission::Admit => prop_assert!(desk.counted() <= u32::from(last_resort) && reads.len() < 8),
            Admission::Busy => prop_assert!(desk.counted() >= READS_AT_ONCE || reads.len() >= 8),
            Admission::OthersServe => prop_assert!(origin && others > 0 && !last_resort && desk.admitted >= 2),
        }
        let free = desk.announced() < READS_AT_ONCE && reads.len() < 8;
        prop_assert_eq!(free, admit(&desk, false) == Admission::Admit, "what it announces and what it does agree");
    }
}

#[test]
fn a_slow_read_is_left_for_a_free_replica() {
    let second = Duration::from_secs(1);
    let sources = [
        Source {
            host: 1,
            origin: false,
            heard: second,
            reads: 0,
            limit: 1,
        },
        Source {
            host: 2,
            origin: false,
            heard: second,
            reads: 0,
            limit: 1,
        },
    ];
    let view = View {
        me: 0,
        now: 9 * second,
        wanted_since: second,
        expected: second,
        sources: &sources,
        troubles: &[],
        seed: 1,
    };
    let reading = Reading {
        host: 1,
        elapsed: second,
        idle: Duration::ZERO,
        done: 1,
        size: 10,
        given_up: 0,
    };
    assert_eq!(keep(&view, &reading), Verdict::Slow);
    assert_eq!(keep(&view, &Reading { done: 5, ..reading }), Verdict::Keep);
    assert_eq!(
        keep(
            &view,
            &Reading {
                given_up: 8,
                ..reading
            }
        ),
        Verdict::Keep
    );
    assert_eq!(
        keep(
            &View {
                sources: &sources[..1],
                ..view
            },
            &reading
        ),
        Verdict::Keep
    );
}
