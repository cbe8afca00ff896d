//! Which silent connection is closed to make room for another. Knows no descriptor and no clock.

use std::collections::HashMap;
use std::hash::Hash;

/// Picks the oldest connection of the process that has the most. Keys rise with age: the lowest is
/// the oldest.
///
/// A participant says hello at once, so a process with many silent connections keeps out only
/// itself.
pub(super) fn most_silent<P: Eq + Hash>(silent: impl Iterator<Item = (u64, P)>) -> Option<u64> {
    let mut of: HashMap<P, (usize, u64)> = HashMap::new();
    for (key, process) in silent {
        let (count, oldest) = of.entry(process).or_insert((0, key));
        *count += 1;
        *oldest = key.min(*oldest);
    }
    of.into_values()
        .max_by_key(|&(count, oldest)| (count, u64::MAX - oldest))
        .map(|(_, oldest)| oldest)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn the_oldest_of_a_process_that_none_exceeds_is_closed(of in proptest::collection::vec(0u8..6, 0..40)) {
            let silent = || of.iter().enumerate().map(|(key, &process)| (key as u64, process));
            let Some(closed) = most_silent(silent()) else {
                prop_assert!(of.is_empty());
                return Ok(());
            };
            let process = of[closed as usize];
            let count = |of_process| of.iter().filter(|&&other| other == of_process).count();
            prop_assert!((0..6).all(|other| count(other) <= count(process)));
            prop_assert_eq!(of.iter().position(|&other| other == process), Some(closed as usize));
        }

        /// A process with one connection goes on however many others come, while one of them has
        /// more than one.
        #[test]
        fn a_flood_closes_its_own(newcomers in 2usize..300, most in 2usize..64) {
            let mut silent = vec![(0u64, "quiet")];
            for key in 1..=newcomers as u64 {
                if silent.len() >= most {
                    let closed = most_silent(silent.iter().copied()).expect("it is full");
                    silent.retain(|(key, _)| *key != closed);
                }
                silent.push((key, "flood"));
            }
            prop_assert!(most < 3 || silent.contains(&(0, "quiet")));
        }
    }
}
