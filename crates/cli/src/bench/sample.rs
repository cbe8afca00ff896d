//! Times of our calls and of their floor, taken in turns.

use crate::failure::Result;
use std::time::Instant;

use serde::{Deserialize, Serialize};

/// What was measured of one thing, in the row's unit.
#[derive(Clone, Copy, PartialEq, Debug, Serialize, Deserialize)]
pub struct Figures {
    /// The median of the samples.
    pub median: f64,
    /// What one sample in a hundred exceeds.
    pub p99: f64,
    /// Samples.
    pub samples: usize,
    /// Calls in each sample, which is their mean.
    pub calls: usize,
}

impl Figures {
    /// Sums samples up; `None` without any.
    pub fn of(mut samples: Vec<f64>, calls: usize) -> Option<Figures> {
        samples.sort_by(f64::total_cmp);
        let last = samples.len().checked_sub(1)?;
        let median = match samples.len() % 2 {
            0 => f64::midpoint(samples[last / 2], samples[last / 2 + 1]),
            _ => samples[last / 2],
        };
        let p99 = samples[(samples.len() * 99).div_ceil(100).clamp(1, samples.len()) - 1];
        Some(Figures {
            median,
            p99,
            samples: samples.len(),
            calls,
        })
    }

    /// Returns the same in another unit, or of another number of calls.
    pub fn divided_by(self, by: f64) -> Figures {
        Figures {
            median: self.median / by,
            p99: self.p99 / by,
            ..self
        }
    }
}

/// Samples of our calls and of their floor, in nanoseconds a call.
#[derive(Clone, Debug, Default)]
pub struct Pairs {
    pub ours: Vec<f64>,
    pub floor: Vec<f64>,
    calls: usize,
}

impl Pairs {
    /// Begins without samples; each will be the mean of this many calls.
    pub fn new(calls: usize) -> Pairs {
        Pairs {
            calls,
            ..Pairs::default()
        }
    }

    /// Takes in what another process measured: first ours, then as many of the floor, in
    /// nanoseconds a sample.
    pub fn add(&mut self, nanos: &[u64]) {
        let (ours, floor) = nanos.split_at(nanos.len() / 2);
        let calls = self.calls.max(1) as f64;
        self.ours
            .extend(ours.iter().map(|&nanos| nanos as f64 / calls));
        self.floor
            .extend(floor.iter().map(|&nanos| nanos as f64 / calls));
    }

    /// Takes one sample of each, `ours` first in every other turn, so that neither always finds
    /// what the other warmed.
    ///
    /// # Errors
    ///
    /// What a call gives.
    pub fn sample(
        &mut self,
        mut ours: impl FnMut() -> Result<()>,
        mut floor: impl FnMut() -> Result<()>,
    ) -> Result<()> {
        let calls = self.calls.max(1);
        let mut ours =
            |pairs: &mut Pairs| time(calls, &mut ours).map(|nanos| pairs.ours.push(nanos));
        let mut floor =
            |pairs: &mut Pairs| time(calls, &mut floor).map(|nanos| pairs.floor.push(nanos));
        if self.ours.len().is_multiple_of(2) {
            ours(self)?;
            floor(self)
        } else {
            floor(self)?;
            ours(self)
        }
    }

    /// Takes one sample of each as [`sample`](Pairs::sample) does, and with each what its calls
    /// leave to be done once, after them: it is part of their price.
    ///
    /// # Errors
    ///
    /// What a call gives.
    pub fn sample_whole(
        &mut self,
        [ours, floor]: [&mut dyn FnMut() -> Result<()>; 2],
        [ours_after, floor_after]: [&dyn Fn(); 2],
    ) -> Result<()> {
        let calls = std::mem::replace(&mut self.calls, 1);
        let whole = |call: &mut dyn FnMut() -> Result<()>, after: &dyn Fn()| {
            (0..calls).try_for_each(|_| call())?;
            after();
            Ok(())
        };
        let sampled = self.sample(|| whole(ours, ours_after), || whole(floor, floor_after));
        self.calls = calls;
        for last in [self.ours.last_mut(), self.floor.last_mut()]
            .into_iter()
            .flatten()
        {
            *last /= calls.max(1) as f64;
        }
        sampled
    }

    /// Sums both up.
    pub fn figures(self) -> (Option<Figures>, Option<Figures>) {
        (
            Figures::of(self.ours, self.calls),
            Figures::of(self.floor, self.calls),
        )
    }

    /// Returns all samples in whole nanoseconds of the sample, for another process'
    /// [`add`](Pairs::add).
    pub fn numbers(&self) -> Vec<u64> {
        let calls = self.calls.max(1) as f64;
        self.ours
            .iter()
            .chain(&self.floor)
            .map(|nanos| (nanos * calls) as u64)
            .collect()
    }
}

/// Calls so often, and returns the nanoseconds of each.
pub fn time(calls: usize, call: &mut impl FnMut() -> Result<()>) -> Result<f64> {
    let start = Instant::now();
    for _ in 0..calls {
        call()?;
    }
    Ok(start.elapsed().as_nanos() as f64 / calls as f64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_median_and_the_slowest_hundredth_are_found() {
        let figures =
            Figures::of((1..=200).map(f64::from).collect(), 3).expect("there are samples");
        assert_eq!(
            (figures.median, figures.p99, figures.samples, figures.calls),
            (100.5, 198.0, 200, 3)
        );
        let one = Figures::of(vec![7.0], 1).expect("there is one");
        assert_eq!((one.median, one.p99), (7.0, 7.0));
        assert_eq!(Figures::of(Vec::new(), 1), None);
        assert_eq!(
            Figures::of(vec![5.0, 1.0, 9.0], 1).expect("three").median,
            5.0
        );
    }

    #[test]
    fn both_are_called_equally_often_and_pass_between_processes() {
        let (mut ours, mut floor) = (0, 0);
        let mut pairs = Pairs::new(4);
        for _ in 0..3 {
            let count = |n: &mut i32| {
                *n += 1;
                Ok(())
            };
            pairs
                .sample(|| count(&mut ours), || count(&mut floor))
                .expect("nothing fails");
        }
        assert_eq!((ours, floor), (12, 12));
        let mut there = Pairs::new(4);
        there.add(&[400, 800, 40, 80]);
        assert_eq!(there.numbers(), [400, 800, 40, 80]);
        let (ours, floor) = there.figures();
        assert_eq!(
            (ours.map(|f| f.median), floor.map(|f| f.median)),
            (Some(150.0), Some(15.0))
        );
    }
}
