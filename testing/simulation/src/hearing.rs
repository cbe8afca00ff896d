//! Announcements, heard late and by each host at another time.

use std::time::Duration;

use gpu_ipc_gateway_plan::{Dice, READS_AT_ONCE, Source};

/// The shortest and the longest way of an announcement.
const WAY: (u64, u64) = (5, 50);

/// What hosts said, in order.
#[derive(Clone, Debug, Default)]
pub struct Board {
    announcers: Vec<u32>,
    said: Vec<Vec<Said>>,
}

/// One announcement.
#[derive(Clone, Copy, Debug)]
struct Said {
    at: Duration,
    /// The reads that the host says it serves; `None` takes the object away.
    reads: Option<u32>,
}

impl Board {
    /// Makes one for `hosts` hosts, where nobody has said anything.
    #[must_use]
    pub fn new(hosts: u32) -> Board {
        Board {
            announcers: Vec::new(),
            said: vec![Vec::new(); hosts as usize],
        }
    }

    /// Lets a host say that it has the object and serves `reads` reads, or, with `None`, that it
    /// has it no more.
    pub fn say(&mut self, host: u32, at: Duration, reads: Option<u32>) {
        let said = &mut self.said[host as usize];
        if said.is_empty() {
            self.announcers.push(host);
        }
        if said
            .last()
            .is_none_or(|last| last.reads.is_some() && last.reads != reads)
        {
            said.push(Said { at, reads });
        }
    }

    /// Collects what a host has heard.
    pub fn heard_by(&self, hearer: u32, now: Duration, into: &mut Vec<Source<u32>>) {
        into.clear();
        for &host in &self.announcers {
            let said = &self.said[host as usize];
            let way = if host == hearer {
                Duration::ZERO
            } else {
                way(host, hearer)
            };
            let last = said.iter().rev().find(|said| said.at + way <= now);
            if let (
                Some(first),
                Some(Said {
                    reads: Some(reads), ..
                }),
            ) = (said.first(), last)
            {
                let heard = first.at + way;
                into.push(Source {
                    host,
                    origin: host == 0,
                    heard,
                    reads: *reads,
                    limit: READS_AT_ONCE,
                });
            }
        }
    }
}

/// Returns how long word takes between two hosts, always the same for them.
fn way(from: u32, to: u32) -> Duration {
    let drawn = Dice::new(u64::from(from) << 32 | u64::from(to)).below(WAY.1 - WAY.0);
    Duration::from_millis(WAY.0 + drawn)
}
