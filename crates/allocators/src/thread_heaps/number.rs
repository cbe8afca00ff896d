//! A small number for each thread of the process that is alive.

use std::sync::atomic::{AtomicU64, Ordering};

/// Numbers are below this times 64; the threads beyond share the first one.
const WORDS: usize = 16;

/// A bit for each number that a thread has. Without a lock, so that a fork at any moment leaves it
/// usable.
static TAKEN: [AtomicU64; WORDS] = [const { AtomicU64::new(0) }; WORDS];

/// The number of a thread, which goes back at its end.
struct Number(Option<usize>);

impl Number {
    /// Takes the lowest number that no thread has.
    fn take() -> Number {
        let free = |(at, word): (usize, &AtomicU64)| {
            let lowest_free = |taken: u64| (taken != u64::MAX).then(|| taken | (taken + 1));
            // Relaxed: a number stands for nothing that its last thread wrote.
            let before = word
                .fetch_update(Ordering::Relaxed, Ordering::Relaxed, lowest_free)
                .ok()?;
            Some(64 * at + before.trailing_ones() as usize)
        };
        Number(TAKEN.iter().enumerate().find_map(free))
    }
}

impl Drop for Number {
    fn drop(&mut self) {
        if let Some(number) = self.0 {
            TAKEN[number / 64].fetch_and(!(1 << (number % 64)), Ordering::Relaxed);
        }
    }
}

thread_local! {
    static NUMBER: Number = Number::take();
}

/// Returns the calling thread's number: the lowest that no thread had when it first asked; 0 for a
/// thread that is about to end.
#[inline]
pub(crate) fn thread_number() -> usize {
    NUMBER
        .try_with(|number| number.0)
        .ok()
        .flatten()
        .unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use std::sync::Barrier;
    use std::thread;

    use super::*;

    #[test]
    fn threads_that_are_alive_have_numbers_of_their_own() {
        let most = 64 * WORDS;
        for _ in 0..50 {
            let barrier = Barrier::new(4);
            let mut numbers: Vec<usize> = thread::scope(|scope| {
                let ask = || {
                    let number = thread_number();
                    barrier.wait();
                    assert_eq!(thread_number(), number);
                    number
                };
                let threads: Vec<_> = (0..4).map(|_| scope.spawn(ask)).collect();
                threads
                    .into_iter()
                    .map(|thread| thread.join().expect("no panic"))
                    .collect()
            });
            numbers.sort_unstable();
            numbers.dedup();
            assert_eq!(numbers.len(), 4);
            // 200 threads were here in the end, of which 4 lived at a time; other tests' threads
            // have numbers too.
            assert!(numbers.iter().all(|&number| number < most));
        }
    }

    #[test]
    fn a_number_is_used_again_after_its_thread() {
        let ask = || thread::spawn(thread_number).join().expect("no panic");
        let numbers: Vec<usize> = (0..64 * WORDS + 1).map(|_| ask()).collect();
        assert!(numbers.iter().all(|&number| number < 64), "{numbers:?}");
    }
}
