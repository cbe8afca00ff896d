//! What a process takes from its machine, so that what it never gives back shows: a producer that
//! lives for the whole run takes no more at its end than in its middle, and when everybody has left
//! no more than before they came.

use std::time::{Duration, Instant};

/// Between two looks.
const EVERY: Duration = Duration::from_millis(200);

/// The shortest run that is judged by what grew in it.
const SHORTEST: Duration = Duration::from_secs(10);
/// What memory may differ by between two parts of a run: what an allocator keeps.
const SLACK_KIB: u64 = 4 << 10;
/// Threads, and descriptors, that a session begins when it first needs them.
const FEW: u64 = 4;

/// What a process takes at one moment.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Vitals {
    /// Resident memory that is not shared, in KiB.
    pub memory_kib: u64,
    /// Open descriptors.
    pub descriptors: u64,
    /// Threads.
    pub threads: u64,
    /// Participants in the table of a session.
    pub rows: u64,
    /// Regions of the device's memory; of a consumer, those that it maps.
    pub regions: u64,
    /// Bytes of the device's memory in those regions.
    pub device_bytes: u64,
}

impl Vitals {
    /// Reads what the kernel says about this process; the rest is the caller's to know.
    pub fn read() -> Vitals {
        let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
        let field = |name: &str| {
            let line = status.lines().find_map(|line| line.strip_prefix(name));
            line.and_then(|line| line.split_whitespace().next()?.parse().ok())
                .unwrap_or(0)
        };
        // The listing has a descriptor itself, which is there every time.
        let descriptors = std::fs::read_dir("/proc/self/fd").map_or(0, Iterator::count) as u64;
        Vitals {
            memory_kib: field("RssAnon:"),
            descriptors,
            threads: field("Threads:"),
            ..Vitals::default()
        }
    }

    pub(crate) fn each(self) -> [(&'static str, u64); 6] {
        [
            ("KiB of memory", self.memory_kib),
            ("descriptors", self.descriptors),
            ("threads", self.threads),
            ("participants", self.rows),
            ("regions", self.regions),
            ("bytes on the device", self.device_bytes),
        ]
    }

    /// Says what there is more of than at rest, memory aside, which an allocator need not give
    /// back. A few threads, and what they are woken by, begin when they are first needed, and stay.
    pub fn above(self, rest: Vitals) -> Option<String> {
        let more = |((what, now), (_, before)): ((&str, u64), (_, u64))| {
            let few = if matches!(what, "descriptors" | "threads") {
                FEW
            } else {
                0
            };
            (now > before + few).then(|| format!("{now} {what} where {before} were"))
        };
        let all: Vec<String> = self
            .each()
            .into_iter()
            .zip(rest.each())
            .skip(1)
            .filter_map(more)
            .collect();
        (!all.is_empty()).then(|| all.join(", "))
    }
}

/// The least and the most of each over a part of a run.
#[derive(Clone, Copy, Debug, Default)]
struct Part {
    looks: u64,
    least: Vitals,
    most: Vitals,
}

/// A process' vitals over a run, in three parts: it may grow in the first.
#[derive(Debug)]
pub struct Course {
    began: Instant,
    lasts: Duration,
    next: Instant,
    parts: [Part; 3],
}

impl Course {
    /// Begins to watch a process over a run that lasts so long.
    pub fn new(lasts: Duration) -> Course {
        let now = Instant::now();
        Course {
            began: now,
            lasts,
            next: now,
            parts: [Part::default(); 3],
        }
    }

    /// Looks, if it is time to.
    pub fn look(&mut self, vitals: impl FnOnce() -> Vitals) {
        let now = Instant::now();
        if now >= self.next {
            self.next = now + EVERY;
            let thirds = (now - self.began).as_secs_f64() * 3.0 / self.lasts.as_secs_f64();
            self.note(thirds as usize, vitals());
        }
    }

    fn note(&mut self, third: usize, now: Vitals) {
        let part = &mut self.parts[third.min(2)];
        let merge = |a: Vitals, pick: fn(u64, u64) -> u64| Vitals {
            memory_kib: pick(a.memory_kib, now.memory_kib),
            descriptors: pick(a.descriptors, now.descriptors),
            threads: pick(a.threads, now.threads),
            rows: pick(a.rows, now.rows),
            regions: pick(a.regions, now.regions),
            device_bytes: pick(a.device_bytes, now.device_bytes),
        };
        *part = match part.looks {
            0 => Part {
                looks: 1,
                least: now,
                most: now,
            },
            looks => Part {
                looks: looks + 1,
                least: merge(part.least, u64::min),
                most: merge(part.most, u64::max),
            },
        };
    }

    /// Says what grew: of which there was never so little in the last third as there was at most in
    /// the second. A short run says nothing: its thirds differ by as many connections as happen to
    /// be open.
    pub fn grown(&self) -> Option<String> {
        let [_, middle, last] = self.parts;
        if self.lasts < SHORTEST || middle.looks == 0 || last.looks == 0 {
            return None;
        }
        let grew = |((what, least), (_, most)): ((&str, u64), (_, u64))| {
            let slack = if what.starts_with("KiB") {
                SLACK_KIB
            } else {
                0
            };
            (least > most + slack)
                .then(|| format!("{least} {what} or more where {most} were the most"))
        };
        let all: Vec<String> = last
            .least
            .each()
            .into_iter()
            .zip(middle.most.each())
            .filter_map(grew)
            .collect();
        (!all.is_empty()).then(|| all.join(", "))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_rises_from_third_to_third_has_grown_and_what_goes_up_and_down_has_not() {
        let mut course = Course::new(SHORTEST);
        for (third, descriptors) in [(0, 9), (1, 4), (1, 8), (2, 8), (2, 12)] {
            course.note(
                third,
                Vitals {
                    descriptors,
                    ..Vitals::default()
                },
            );
        }
        assert_eq!(course.grown(), None);
        let mut course = Course::new(SHORTEST);
        for (third, regions) in [(0, 1), (1, 2), (1, 5), (2, 6), (2, 12), (3, 13)] {
            course.note(
                third,
                Vitals {
                    regions,
                    ..Vitals::default()
                },
            );
        }
        assert_eq!(
            course.grown().as_deref(),
            Some("6 regions or more where 5 were the most")
        );
    }

    #[test]
    fn a_process_knows_its_own() {
        let before = Vitals::read();
        assert!(
            before.memory_kib > 0 && before.descriptors >= 3 && before.threads >= 1,
            "{before:?}"
        );
        let file = std::fs::File::open("/proc/self/status").expect("it was read");
        let more = Vitals {
            descriptors: before.descriptors + FEW + 1,
            ..before
        };
        assert!(
            more.above(before)
                .is_some_and(|why| why.contains("descriptors"))
        );
        assert_eq!(before.above(more), None);
        drop(file);
    }
}
