//! What a process takes at quiet moments of a run, and what of it grew.

use serde::Serialize;

use harness::vitals::Vitals;

/// Looks that are not judged: everything may grow until it has been as large as it gets.
const WARM: usize = 6;
/// Looks at the beginning and at the end of what is judged, that are compared.
const PART: usize = 8;
/// Descriptors, threads and mappings by which two quiet moments differ.
const FEW: f64 = 16.0;
/// How many times as long a call may take at the end: on a machine that others begin to use it was
/// seen to take twice.
const SLOWER: f64 = 4.0;

/// What a process takes at a quiet moment.
#[derive(Clone, Copy, Debug, Default)]
pub struct Reading {
    /// What the kernel counts.
    pub vitals: Vitals,
    /// Bytes that the allocator has given out; 0 where it does not say.
    pub allocated: u64,
    /// Resident memory of every kind, in KiB.
    pub resident_kib: u64,
    /// Mappings of files, shared memory among them. What has no file are stacks and heaps, which
    /// the allocator keeps.
    pub mappings: u64,
    /// Bytes that the device says are taken.
    pub device_bytes: u64,
    /// The thread's own time of a cycle, in nanoseconds: the least of several batches.
    pub nanos: f64,
}

impl Reading {
    /// Reads what the kernel and the allocator say about this process; the rest is the caller's to
    /// know.
    pub fn of_process() -> Reading {
        let text = |path: &str| std::fs::read_to_string(path).unwrap_or_default();
        let status = text("/proc/self/status");
        let resident = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
        let resident_kib = resident
            .and_then(|line| line.split_whitespace().next()?.parse().ok())
            .unwrap_or(0);
        let of_file = |line: &&str| {
            line.split_whitespace()
                .nth(4)
                .is_some_and(|inode| inode != "0")
        };
        let mappings = text("/proc/self/maps").lines().filter(of_file).count() as u64;
        Reading {
            vitals: Vitals::read(),
            allocated: allocated(),
            resident_kib,
            mappings,
            ..Reading::default()
        }
    }

    /// Says whether as much is there as at another look: nothing came, and nothing went.
    pub fn is_like(&self, other: &Reading) -> bool {
        let of = |reading: &Reading| {
            (
                reading.vitals.descriptors,
                reading.vitals.threads,
                reading.mappings,
            )
        };
        of(self) == of(other)
    }

    /// What is judged: its name, its value, and how much more of it is no growth.
    fn each(&self, is_host: bool) -> [(&'static str, f64, f64); 7] {
        // A GPU's memory is everybody's, and its driver keeps some.
        let device = if is_host { 0.0 } else { f64::from(64 << 20) };
        [
            (
                "bytes allocated",
                self.allocated as f64,
                f64::from(512 << 10),
            ),
            ("KiB resident", self.resident_kib as f64, 16_384.0),
            ("descriptors", self.vitals.descriptors as f64, FEW),
            ("threads", self.vitals.threads as f64, FEW),
            ("mappings of files", self.mappings as f64, FEW),
            ("bytes of the device", self.device_bytes as f64, device),
            ("ns of a cycle", self.nanos, f64::INFINITY),
        ]
    }
}

#[cfg(target_env = "gnu")]
fn allocated() -> u64 {
    // SAFETY: `mallinfo2` asks for nothing: it takes the arenas' locks itself.
    let info = unsafe { libc::mallinfo2() };
    (info.uordblks + info.hblkhd) as u64
}

#[cfg(not(target_env = "gnu"))]
fn allocated() -> u64 {
    0
}

/// What one thing did over a run.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Growth {
    what: &'static str,
    /// The median of the first looks that are judged.
    early: f64,
    /// The median of the last.
    late: f64,
    /// The most of the first, and the least of the last: what rises is above all that was before.
    early_most: f64,
    late_least: f64,
    grew: bool,
}

/// Compares the end of a run with its beginning, after it was warm.
pub fn growth(readings: &[Reading], is_host: bool) -> Vec<Growth> {
    let judged = readings.get(WARM..).unwrap_or_default();
    let part = PART.min(judged.len() / 2);
    let (early, late) = (&judged[..part], &judged[judged.len() - part..]);
    let Some(first) = early.first() else {
        return Vec::new();
    };
    let each = first.each(is_host).into_iter().enumerate();
    each.map(|(index, (what, _, slack))| {
        let sorted = |readings: &[Reading]| {
            let mut values: Vec<f64> = readings
                .iter()
                .map(|reading| reading.each(is_host)[index].1)
                .collect();
            values.sort_by(f64::total_cmp);
            values
        };
        let (before, after) = (sorted(early), sorted(late));
        let (early, late) = (before[part / 2], after[part / 2]);
        let (early_most, late_least) = (before[part - 1], after[0]);
        let limit = if slack.is_finite() {
            early + slack
        } else {
            early * SLOWER
        };
        Growth {
            what,
            early,
            late,
            early_most,
            late_least,
            grew: late > limit && late_least > early_most,
        }
    })
    .collect()
}

impl Growth {
    /// Says what grew, if it did.
    pub fn finding(&self) -> Option<String> {
        self.grew.then(|| format!("grew: {}", self.text()))
    }

    /// Says how it went.
    pub fn text(&self) -> String {
        format!(
            "{}: {:.0} early ({:.0} at most), {:.0} late ({:.0} at least)",
            self.what, self.early, self.early_most, self.late, self.late_least
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(of: impl Fn(usize) -> Reading) -> Vec<&'static str> {
        let readings: Vec<Reading> = (0..30).map(of).collect();
        growth(&readings, true)
            .iter()
            .filter(|growth| growth.grew)
            .map(|growth| growth.what)
            .collect()
    }

    #[test]
    fn what_rises_is_found_and_what_goes_up_and_down_is_not() {
        let taken = |descriptors| Reading {
            vitals: Vitals {
                descriptors,
                ..Vitals::default()
            },
            nanos: 500.0,
            ..Reading::default()
        };
        assert_eq!(found(|look| taken(10 + 5 * look as u64)), ["descriptors"]);
        assert_eq!(found(|look| taken(10 + look as u64 % 7)), [""; 0]);
        assert_eq!(
            found(|look| taken(10 + look.min(WARM) as u64)),
            [""; 0],
            "it may grow until it is warm"
        );
        assert_eq!(
            found(|look| Reading {
                nanos: 10.0 * (look * look + 1) as f64,
                ..taken(9)
            }),
            ["ns of a cycle"]
        );
        assert_eq!(
            found(|look| Reading {
                nanos: 500.0 + look as f64,
                ..taken(9)
            }),
            [""; 0]
        );
        assert_eq!(
            found(|look| Reading {
                device_bytes: 4096 * look as u64,
                ..taken(9)
            }),
            ["bytes of the device"]
        );
    }

    #[test]
    fn a_process_knows_its_own() {
        let before = Reading::of_process();
        let held = vec![1u8; 1 << 20];
        let after = Reading::of_process();
        assert!(before.mappings > 3 && before.resident_kib > 0 && before.vitals.descriptors >= 3);
        assert!(
            !cfg!(target_env = "gnu") || after.allocated >= before.allocated + held.len() as u64
        );
    }
}
