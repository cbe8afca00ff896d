//! Which ways there are, what a trial of each says, and which is taken. Nothing here knows a
//! transport.

use std::fmt;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};
use crate::transport::Place;

/// How often each way is tried. The first read over a connection also makes the connection.
const ROUNDS: usize = 4;
/// A way is not tried again when its first two rounds, or more, were each slower than the fastest
/// way so far by this factor. One slow round is not enough: the process may have been preempted.
const HOPELESS: u64 = 4;

/// How much faster a way through buffers must be, in parts of 10: it takes memory and copies on
/// both sides, and what was measured on an idle machine is shared with others later.
const WORTH: u64 = 11;

/// A way from an object on one host to an object on another.
#[derive(
    Clone,
    Copy,
    PartialEq,
    Eq,
    PartialOrd,
    Ord,
    Hash,
    Debug,
    Serialize,
    Deserialize,
    clap::ValueEnum,
)]
#[serde(rename_all = "snake_case")]
pub enum Way {
    /// Both objects' memory is registered, and read directly
    Direct,
    /// Through a ring of buffers on the devices, where the transport is fast with those
    DeviceRing,
    /// Through a ring of pinned buffers on the hosts
    PinnedRing,
}

impl fmt::Display for Way {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Way::Direct => "direct",
            Way::DeviceRing => "ring of device buffers",
            Way::PinnedRing => "ring of pinned buffers",
        })
    }
}

/// Where the bytes of a ring land.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "snake_case")]
pub enum Land {
    /// In the object
    Object,
    /// In slots of this host, from which they are copied to the object
    Slots,
}

impl Land {
    /// Returns where they land unless the user chooses: in the object if it is memory of the slots'
    /// kind, so that the transport reads to either as fast.
    pub fn of(slots: Place, object: Place) -> Land {
        let on_host = |place| place == Place::Host;
        if on_host(slots) == on_host(object) {
            Land::Object
        } else {
            Land::Slots
        }
    }
}

/// Lists the ways for memory in a place.
pub fn candidates(place: Place) -> &'static [Way] {
    match place {
        Place::Host => &[Way::Direct, Way::PinnedRing],
        Place::Device(_) => &[Way::Direct, Way::DeviceRing, Way::PinnedRing],
    }
}

/// What a way was found to do.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Measured {
    /// The way.
    pub way: Way,
    /// Bytes per second, the median of the rounds after the first; or why it cannot be taken.
    pub speed: Result<u64, String>,
}

impl fmt::Display for Measured {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.speed {
            Ok(speed) => write!(f, "{}: {:.2} GB/s", self.way, *speed as f64 / 1e9),
            Err(why) => write!(f, "{}: not taken: {why}", self.way),
        }
    }
}

/// What a way was found to do, as data.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Tried {
    /// The way.
    pub way: Way,
    /// 10^9 bytes a second; none if it cannot be taken.
    pub gb_s: Option<f64>,
    /// Why it cannot.
    pub error: Option<String>,
}

impl From<&Measured> for Tried {
    fn from(measured: &Measured) -> Tried {
        let gb_s = measured
            .speed
            .as_ref()
            .ok()
            .map(|speed| *speed as f64 / 1e9);
        Tried {
            way: measured.way,
            gb_s,
            error: measured.speed.clone().err(),
        }
    }
}

impl fmt::Display for Tried {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.gb_s, &self.error) {
            (Some(gb_s), _) => write!(f, "{} {gb_s:.2} GB/s", self.way),
            (None, why) => write!(
                f,
                "{} not taken: {}",
                self.way,
                why.as_deref().unwrap_or("no reason was given")
            ),
        }
    }
}

/// Trials of several ways, one after the other. Who carries them out says how each round ended.
///
/// An error of a round is about its way, and ends the trials of that way alone. A round that never
/// ends holds up the trials: nothing is timed out here.
#[derive(Clone, Debug)]
pub struct Trials {
    /// The ways that are not measured, the next one last, with the bytes that a round reads.
    waiting: Vec<(Way, u64)>,
    rounds: Vec<Duration>,
    measured: Vec<Measured>,
}

impl Trials {
    /// Begins the trials of these ways, each with the number of bytes that one of its rounds reads.
    pub fn new(ways: Vec<(Way, u64)>) -> Trials {
        let waiting = ways.into_iter().rev().collect();
        Trials {
            waiting,
            rounds: Vec::new(),
            measured: Vec::new(),
        }
    }

    /// Says which way the next round is of; none when all are measured.
    pub fn next(&self) -> Option<Way> {
        self.waiting.last().map(|(way, _)| *way)
    }

    /// Takes what became of a round.
    pub fn ended(&mut self, round: Result<Duration>) {
        let Some(&(way, bytes)) = self.waiting.last() else {
            return;
        };
        let speed = match round {
            Ok(time) => {
                self.rounds.push(time);
                let speed = |time: Duration| {
                    let each_second = u128::from(bytes) * 1_000_000_000 / time.as_nanos().max(1);
                    u64::try_from(each_second).unwrap_or(u64::MAX)
                };
                let best = self
                    .rounds
                    .iter()
                    .min()
                    .map_or(u64::MAX, |&time| speed(time));
                let fastest = self
                    .measured
                    .iter()
                    .filter_map(|one| one.speed.as_ref().ok())
                    .max();
                let is_hopeless =
                    fastest.is_some_and(|&fastest| best.saturating_mul(HOPELESS) < fastest);
                let Some((_, after_the_first @ [_, ..])) = self.rounds.split_first_mut() else {
                    return;
                };
                if after_the_first.len() + 1 < ROUNDS && !is_hopeless {
                    return;
                }
                after_the_first.sort_unstable();
                Ok(speed(after_the_first[after_the_first.len() / 2]))
            }
            Err(error) => Err(error.to_string()),
        };
        self.rounds.clear();
        self.waiting.pop();
        self.measured.push(Measured { way, speed });
    }

    /// Lists what was measured.
    pub fn measured(&self) -> &[Measured] {
        &self.measured
    }
}

/// Takes the fastest way, and [`Way::Direct`] unless another is faster by a tenth.
///
/// # Errors
///
/// [`Error::Unavailable`] when no way can be taken, with the reason of each.
pub fn choose(measured: &[Measured]) -> Result<Way> {
    let speed_of = |way: &Way| {
        measured
            .iter()
            .find(|one| one.way == *way)
            .and_then(|one| one.speed.as_ref().ok())
    };
    // Of two that are equally fast, the first.
    let fastest = measured
        .iter()
        .filter_map(|one| one.speed.as_ref().ok().map(|speed| (*speed, one.way)))
        .reduce(|best, other| if other.0 > best.0 { other } else { best });
    let Some((speed, way)) = fastest else {
        return Err(Error::Unavailable {
            what: "a way for the bytes".to_owned(),
            why: measured
                .iter()
                .map(Measured::to_string)
                .collect::<Vec<_>>()
                .join("; "),
            remedy: "UCX_LOG_LEVEL=info says which transports UCX has; UCX_TLS=tcp,cuda_copy is the least",
        });
    };
    let direct = speed_of(&Way::Direct).copied().unwrap_or(0);
    let worth = u128::from(speed) * 10 >= u128::from(direct) * u128::from(WORTH);
    Ok(if direct > 0 && !worth {
        Way::Direct
    } else {
        way
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const DEVICE: Place = Place::Device(0);

    fn found(speeds: [Option<u64>; 3]) -> Vec<Measured> {
        let speed = |speed: Option<u64>| speed.ok_or_else(|| "no such memory".to_owned());
        candidates(DEVICE)
            .iter()
            .zip(speeds)
            .map(|(&way, one)| Measured {
                way,
                speed: speed(one),
            })
            .collect()
    }

    #[test]
    fn what_was_measured_on_gpus_gives_the_way_that_was_fastest_there() {
        // GB/s of virtual memory, cudaMalloc and pinned memory: NVLink, then TCP.
        let millions = |one: u64| Some(one * 10_000_000);
        assert_eq!(
            choose(&found([41, 36_800, 470].map(millions))).expect("a way"),
            Way::DeviceRing
        );
        assert_eq!(
            choose(&found([41, 49, 140].map(millions))).expect("a way"),
            Way::PinnedRing
        );
        // RDMA takes the object's memory itself.
        assert_eq!(
            choose(&found([4_600, 4_700, 4_500].map(millions))).expect("a way"),
            Way::Direct
        );
    }

    #[test]
    fn a_way_that_fails_is_shown_and_not_taken() {
        let measured = found([None, Some(1), None]);
        assert_eq!(choose(&measured).expect("a way"), Way::DeviceRing);
        assert_eq!(measured[0].to_string(), "direct: not taken: no such memory");
        let error = choose(&found([None; 3]))
            .expect_err("there is none")
            .to_string();
        assert!(
            error.contains("ring of pinned buffers: not taken: no such memory"),
            "{error}"
        );
    }

    #[test]
    fn the_first_round_and_one_slow_one_do_not_count() {
        let mut trials = Trials::new(vec![(Way::Direct, 1_000)]);
        for nanoseconds in [9_000, 10, 900, 10] {
            assert_eq!(trials.next(), Some(Way::Direct));
            trials.ended(Ok(Duration::from_nanos(nanoseconds)));
        }
        assert_eq!(trials.next(), None);
        assert_eq!(
            trials.measured(),
            [Measured {
                way: Way::Direct,
                speed: Ok(100_000_000_000)
            }]
        );
    }

    #[test]
    fn a_way_that_is_slow_twice_is_not_tried_again() {
        let mut trials = Trials::new(vec![
            (Way::DeviceRing, 1_000),
            (Way::PinnedRing, 1_000),
            (Way::Direct, 1_000),
        ]);
        let mut rounds = [0; 3];
        while let Some(way) = trials.next() {
            let (index, nanoseconds) = match way {
                Way::DeviceRing => (0, 10),
                Way::PinnedRing => (1, 40),
                Way::Direct => (2, 41),
            };
            rounds[index] += 1;
            trials.ended(Ok(Duration::from_nanos(nanoseconds)));
        }
        assert_eq!(rounds, [ROUNDS, ROUNDS, 2]);
        assert_eq!(choose(trials.measured()).expect("a way"), Way::DeviceRing);
    }

    #[test]
    fn one_slow_round_does_not_end_the_trials_of_a_way() {
        for slow in 0..ROUNDS {
            let mut trials = Trials::new(vec![(Way::DeviceRing, 1_000), (Way::Direct, 1_000)]);
            for _ in 0..ROUNDS {
                trials.ended(Ok(Duration::from_nanos(10)));
            }
            for round in 0..ROUNDS {
                assert_eq!(trials.next(), Some(Way::Direct), "round {slow} is slow");
                trials.ended(Ok(Duration::from_nanos(if round == slow {
                    10_000
                } else {
                    10
                })));
            }
            assert_eq!(choose(trials.measured()).expect("a way"), Way::Direct);
        }
    }

    #[test]
    fn bytes_land_in_the_object_where_it_is_memory_of_the_slots_kind() {
        assert_eq!(Land::of(Place::Host, Place::Host), Land::Object);
        assert_eq!(Land::of(Place::Device(1), DEVICE), Land::Object);
        assert_eq!(Land::of(Place::Host, DEVICE), Land::Slots);
        assert_eq!(Land::of(DEVICE, Place::Host), Land::Slots);
    }

    #[test]
    fn a_trial_that_fails_once_ends_the_trials_of_its_way_alone() {
        let mut tried = Vec::new();
        let mut trials = Trials::new(candidates(DEVICE).iter().map(|way| (*way, 1_000)).collect());
        while let Some(way) = trials.next() {
            tried.push(way);
            trials.ended(match way {
                Way::DeviceRing if tried.len() > 5 => Err(Error::Transfer {
                    why: "broken".to_owned(),
                }),
                _ => Ok(Duration::from_nanos(1)),
            });
        }
        assert_eq!(
            tried.iter().filter(|&&way| way == Way::PinnedRing).count(),
            ROUNDS
        );
        let fails: Vec<_> = trials
            .measured()
            .iter()
            .map(|one| one.speed.is_err())
            .collect();
        assert_eq!(fails, [false, true, false]);
    }

    proptest! {
        #[test]
        fn the_way_taken_is_within_a_tenth_of_the_fastest(
            speeds in prop::array::uniform3(prop::option::of(1u64..1_000)),
        ) {
            let measured = found(speeds);
            let best = speeds.iter().flatten().max();
            match (choose(&measured), best) {
                (Ok(way), Some(best)) => {
                    let speed = measured.iter().find(|one| one.way == way).and_then(|one| one.speed.clone().ok());
                    prop_assert!(speed.expect("it was measured") * 11 >= best * 10);
                }
                (Err(_), None) => {}
                (choice, best) => prop_assert!(false, "{choice:?} of {best:?}"),
            }
        }
    }
}
