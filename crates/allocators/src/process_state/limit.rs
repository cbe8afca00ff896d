//! How much of a device a process may take.

use gpu_api::{Error, MemoryInfo, Result};

/// How much of a device's memory a process may take.
#[derive(Clone, Copy, PartialEq, Debug)]
#[non_exhaustive]
pub enum MemoryLimit {
    /// This many bytes.
    Bytes(u64),
    /// This part of all its memory, above 0 and up to 1.
    Fraction(f64),
    /// What is free when it is first used, but for this many bytes.
    AllBut(u64),
    /// What is free when it is first used, but for what a driver and its libraries need besides.
    Most,
}

impl MemoryLimit {
    const MIB: u64 = 1 << 20;

    /// Returns the limit in bytes.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] for more than the device has, a part beyond 0 to 1, or a reserve that
    /// leaves nothing.
    pub fn bytes(self, memory: MemoryInfo) -> Result<u64> {
        let MemoryInfo {
            free_bytes: free,
            total_bytes: total,
        } = memory;
        let what = "the memory limit";
        match self {
            MemoryLimit::Bytes(bytes) if bytes > 0 && bytes <= total => Ok(bytes),
            MemoryLimit::Bytes(bytes) => {
                let got = format!("{bytes} bytes of a device of {total}");
                Err(Error::invalid(
                    what,
                    got,
                    "at least 1 byte and no more than the device has",
                ))
            }
            MemoryLimit::Fraction(part) if part > 0.0 && part <= 1.0 => {
                Ok(((total as f64 * part) as u64).max(1))
            }
            MemoryLimit::Fraction(part) => {
                let must = "a part above 0 and up to 1, or more with `ProcessOptions::managed`";
                Err(Error::invalid(what, part, must))
            }
            MemoryLimit::AllBut(reserve) => free
                .checked_sub(reserve)
                .filter(|&left| left > 0)
                .ok_or_else(|| {
                    let got = format!("all but {reserve} bytes, of which {free} are free");
                    Error::invalid(what, got, "more than nothing")
                }),
            MemoryLimit::Most => MemoryLimit::AllBut(MemoryLimit::reserve(memory)).bytes(memory),
        }
    }

    /// Returns the limit of managed memory in bytes, of which the host lends up to `host`.
    ///
    /// # Errors
    ///
    /// As [`bytes`](MemoryLimit::bytes), with what the device has and `host` together as the most.
    pub(crate) fn managed_bytes(self, memory: MemoryInfo, host: u64) -> Result<u64> {
        let most = memory.total_bytes.saturating_add(host);
        let bytes = match self {
            MemoryLimit::Bytes(bytes) if bytes > memory.total_bytes => bytes,
            MemoryLimit::Fraction(part) if part > 1.0 => (memory.total_bytes as f64 * part) as u64,
            within => return within.bytes(memory),
        };
        if bytes <= most {
            return Ok(bytes);
        }
        let got = format!(
            "{self:?}: {bytes} bytes of a device of {} and {host} that the host has free",
            memory.total_bytes
        );
        Err(Error::invalid(
            "the limit of managed memory",
            got,
            "no more than both have",
        ))
    }

    /// Returns what is left to others when nobody says: an eighth of a small device, and so much of
    /// a larger one that kernels, communicators and a second context find room. TensorFlow's four
    /// steps, which it takes by compute capability; a device's memory tells its generation on every
    /// vendor's.
    fn reserve(memory: MemoryInfo) -> u64 {
        let mib = |mib: u64| mib * MemoryLimit::MIB;
        match memory.total_bytes / MemoryLimit::MIB {
            _ if memory.free_bytes < mib(2048) => mib(225).min(memory.free_bytes / 8),
            0..=16_384 => mib(500),
            16_385..=49_152 => mib(1050),
            49_153..=98_304 => mib(1536),
            _ => mib(1800),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;

    fn limit(limit: MemoryLimit) -> Result<u64> {
        limit.bytes(MemoryInfo {
            free_bytes: 60 * GIB,
            total_bytes: 80 * GIB,
        })
    }

    #[test]
    fn by_bytes_by_fraction_and_all_but_a_reserve() {
        assert_eq!(limit(MemoryLimit::Bytes(GIB)).expect("fits"), GIB);
        assert_eq!(limit(MemoryLimit::Bytes(80 * GIB)).expect("fits"), 80 * GIB);
        assert_eq!(limit(MemoryLimit::Fraction(0.25)).expect("fits"), 20 * GIB);
        assert_eq!(limit(MemoryLimit::Fraction(1.0)).expect("fits"), 80 * GIB);
        assert_eq!(
            limit(MemoryLimit::AllBut(10 * GIB)).expect("fits"),
            50 * GIB
        );
        assert_eq!(
            limit(MemoryLimit::Most).expect("fits"),
            60 * GIB - (1536 << 20)
        );
        let small = MemoryInfo {
            free_bytes: GIB,
            total_bytes: GIB,
        };
        assert_eq!(
            MemoryLimit::Most.bytes(small).expect("fits"),
            GIB - (128 << 20)
        );
    }

    #[test]
    fn managed_memory_goes_beyond_the_device_and_not_beyond_the_host() {
        let memory = MemoryInfo {
            free_bytes: 60 * GIB,
            total_bytes: 80 * GIB,
        };
        let limit = |limit: MemoryLimit| limit.managed_bytes(memory, 40 * GIB);
        assert_eq!(
            limit(MemoryLimit::Fraction(1.5)).expect("both have it"),
            120 * GIB
        );
        assert_eq!(
            limit(MemoryLimit::Bytes(100 * GIB)).expect("both have it"),
            100 * GIB
        );
        assert_eq!(
            limit(MemoryLimit::Fraction(0.5)).expect("the device has it"),
            40 * GIB
        );
        for beyond in [
            MemoryLimit::Fraction(1.51),
            MemoryLimit::Fraction(f64::INFINITY),
            MemoryLimit::Bytes(121 * GIB),
        ] {
            assert!(
                matches!(limit(beyond), Err(Error::Invalid { .. })),
                "{beyond:?}"
            );
        }
    }

    #[test]
    fn what_cannot_be_is_refused() {
        for wrong in [
            MemoryLimit::Bytes(0),
            MemoryLimit::Bytes(80 * GIB + 1),
            MemoryLimit::Fraction(0.0),
            MemoryLimit::Fraction(1.01),
            MemoryLimit::Fraction(f64::NAN),
            MemoryLimit::AllBut(60 * GIB),
            MemoryLimit::AllBut(u64::MAX),
        ] {
            assert!(
                matches!(
                    limit(wrong),
                    Err(Error::Invalid {
                        what: "the memory limit",
                        ..
                    })
                ),
                "{wrong:?}"
            );
        }
    }
}
