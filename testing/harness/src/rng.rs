//! Numbers that look random and follow from a seed.

/// Throws the same numbers for the same seed.
#[derive(Clone, Debug)]
pub struct Dice(u64);

impl Dice {
    /// Makes those of one process of a run.
    pub fn new(seed: u64, process: u64) -> Dice {
        let mut dice = Dice(seed ^ process.wrapping_mul(0xd6e8_feb8_6659_fd93));
        dice.throw();
        dice
    }

    /// Returns any number.
    pub fn throw(&mut self) -> u64 {
        // splitmix64 (Steele, Lea, Flood 2014).
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Returns a number below a bound, which is not 0.
    pub fn below(&mut self, bound: u64) -> u64 {
        self.throw() % bound
    }

    /// Says yes so often in a thousand.
    pub fn in_thousand(&mut self, times: u64) -> bool {
        self.below(1000) < times
    }

    /// Takes one of several; `None` of none.
    pub fn one_of<'a, T>(&mut self, all: &'a [T]) -> Option<&'a T> {
        if all.is_empty() {
            None
        } else {
            all.get(self.below(all.len() as u64) as usize)
        }
    }
}

/// Takes a seed from the system.
pub fn chosen_seed() -> u64 {
    let mut bytes = [0; 8];
    let _ = rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty());
    // Short enough to be typed.
    u64::from_le_bytes(bytes) % 1_000_000_000
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_seed_gives_the_same_numbers_and_processes_differ() {
        let throws = |seed, process| {
            let mut dice = Dice::new(seed, process);
            [dice.throw(), dice.throw(), dice.throw()]
        };
        assert_eq!(throws(1, 2), throws(1, 2));
        assert_ne!(throws(1, 2), throws(1, 3));
        assert_ne!(throws(1, 2), throws(2, 2));
    }
}
