//! Which ways there are, how each is measured, and which is taken. Nothing here knows a transport.

use std::fmt;
use std::time::Duration;

use crate::error::{Error, Result};
use crate::transport::Place;

/// How often each way is tried. The first read over a connection also makes the connection.
const ROUNDS: usize = 4;

/// How much faster a way through buffers must be, in parts of 10: it takes memory and copies on both sides, and what
/// was measured on an idle machine is shared with others later.
const WORTH: u64 = 11;

/// A way from an object on one host to an object on another.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Way {
    /// Both objects' memory is registered, and read directly.
    Direct,
    /// Through a ring of buffers on the devices, where the transport is fast with those.
    DeviceRing,
    /// Through a ring of pinned buffers on the hosts.
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

/// Lists the ways for memory in a place. Bytes on the host are read where they are.
pub fn candidates(place: Place) -> &'static [Way] {
    match place {
        Place::Host => &[Way::Direct],
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

/// Tries each way by `trial`, which reads `bytes` by that way and says how long it took.
///
/// An error of a trial is about its way, and kept with it. A trial that would not end must give an error: nothing is
/// timed out here.
pub fn measure(ways: &[Way], bytes: u64, mut trial: impl FnMut(Way) -> Result<Duration>) -> Vec<Measured> {
    ways.iter()
        .map(|&way| {
            let rounds: Result<Vec<_>> = (0..ROUNDS).map(|_| trial(way)).collect();
            let speed = rounds.map_err(|error| error.to_string()).map(|rounds| {
                let mut after_the_first = rounds[1..].to_vec();
                after_the_first.sort_unstable();
                let nanoseconds = after_the_first[after_the_first.len() / 2].as_nanos().max(1);
                u64::try_from(u128::from(bytes) * 1_000_000_000 / nanoseconds).unwrap_or(u64::MAX)
            });
            Measured { way, speed }
        })
        .collect()
}

/// Takes the fastest way, and [`Way::Direct`] unless another is faster by a tenth.
///
/// # Errors
///
/// [`Error::Unavailable`] when no way can be taken, with the reason of each.
pub fn choose(measured: &[Measured]) -> Result<Way> {
    let speed_of = |way: &Way| measured.iter().find(|one| one.way == *way).and_then(|one| one.speed.as_ref().ok());
    // Of two that are equally fast, the first.
    let fastest = measured
        .iter()
        .filter_map(|one| one.speed.as_ref().ok().map(|speed| (*speed, one.way)))
        .reduce(|best, other| if other.0 > best.0 { other } else { best });
    let Some((speed, way)) = fastest else {
        return Err(Error::Unavailable {
            what: "a way for the bytes".to_owned(),
            why: measured.iter().map(Measured::to_string).collect::<Vec<_>>().join("; "),
            remedy: "UCX_LOG_LEVEL=info says which transports UCX has; UCX_TLS=tcp,cuda_copy is the least",
        });
    };
    let direct = speed_of(&Way::Direct).copied().unwrap_or(0);
    let worth = u128::from(speed) * 10 >= u128::from(direct) * u128::from(WORTH);
    Ok(if direct > 0 && !worth { Way::Direct } else { way })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const DEVICE: Place = Place::Device(0);

    fn found(speeds: [Option<u64>; 3]) -> Vec<Measured> {
        let speed = |speed: Option<u64>| speed.ok_or_else(|| "no such memory".to_owned());
        candidates(DEVICE).iter().zip(speeds).map(|(&way, one)| Measured { way, speed: speed(one) }).collect()
    }

    #[test]
    fn what_was_measured_on_gpus_gives_the_way_that_was_fastest_there() {
        // GB/s of virtual memory, cudaMalloc and pinned memory: NVLink, then TCP.
        let millions = |one: u64| Some(one * 10_000_000);
        assert_eq!(choose(&found([41, 36_800, 470].map(millions))).expect("a way"), Way::DeviceRing);
        assert_eq!(choose(&found([41, 49, 140].map(millions))).expect("a way"), Way::PinnedRing);
        // RDMA takes the object's memory itself.
        assert_eq!(choose(&found([4_600, 4_700, 4_500].map(millions))).expect("a way"), Way::Direct);
    }

    #[test]
    fn a_way_that_fails_is_shown_and_not_taken() {
        let measured = found([None, Some(1), None]);
        assert_eq!(choose(&measured).expect("a way"), Way::DeviceRing);
        assert_eq!(measured[0].to_string(), "direct: not taken: no such memory");
        let error = choose(&found([None; 3])).expect_err("there is none").to_string();
        assert!(error.contains("ring of pinned buffers: not taken: no such memory"), "{error}");
    }

    #[test]
    fn the_first_round_and_one_slow_one_do_not_count() {
        let mut rounds = [9_000, 10, 900, 10].into_iter().cycle();
        let measured = measure(candidates(Place::Host), 1_000, |_| {
            Ok(Duration::from_nanos(rounds.next().expect("it goes on for ever")))
        });
        assert_eq!(measured, [Measured { way: Way::Direct, speed: Ok(100_000_000_000) }]);
    }

    #[test]
    fn a_trial_that_fails_once_ends_the_trials_of_its_way_alone() {
        let mut tried = Vec::new();
        let measured = measure(candidates(DEVICE), 1_000, |way| {
            tried.push(way);
            match way {
                Way::DeviceRing if tried.len() > 5 => Err(Error::Transfer { why: "broken".to_owned() }),
                _ => Ok(Duration::from_nanos(1)),
            }
        });
        assert_eq!(tried.iter().filter(|&&way| way == Way::PinnedRing).count(), ROUNDS);
        let fails: Vec<_> = measured.iter().map(|one| one.speed.is_err()).collect();
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
