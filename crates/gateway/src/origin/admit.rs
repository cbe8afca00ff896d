//! What this host knows of its own service of one object, put before the plan.

use std::collections::BTreeMap;
use std::time::Duration;

use gpu_ipc_gateway_plan::{Admission, Desk, admit};

/// How long a host that had its copy confirmed counts as one that has the object, though the asker
/// has not heard it say so.
const WILL_SAY_SO: Duration = Duration::from_secs(30);
/// How long the service of an object is remembered after the last question about it.
const REMEMBERED: Duration = Duration::from_secs(600);

/// The service of one object.
#[derive(Debug)]
pub struct Service {
    host: String,
    origin: bool,
    expected: Duration,
    /// When it was last asked for.
    asked: Duration,
    /// Reads that were admitted and did not fail.
    admitted: u32,
    confirmed: BTreeMap<String, Duration>,
}

impl Service {
    /// Begins to serve an object, of which a read takes as long as `expected`.
    pub fn new(host: &str, origin: bool, now: Duration, expected: Duration) -> Service {
        Service {
            host: host.to_owned(),
            origin,
            expected,
            asked: now,
            admitted: 0,
            confirmed: BTreeMap::new(),
        }
    }

    /// Decides whether to serve one more, beside reads of these ages, for an asker who knows so
    /// many others that have it.
    ///
    /// # Errors
    ///
    /// Why not, at this moment.
    pub fn admit(
        &mut self,
        now: Duration,
        reads: &[Duration],
        others: u32,
        last_resort: bool,
    ) -> Result<(), String> {
        self.asked = now;
        match admit(&self.desk(now, reads, others), last_resort) {
            Admission::Admit => Ok(()),
            Admission::Busy => Err(format!(
                "{} read it from {} already",
                reads.len(),
                self.host
            )),
            Admission::OthersServe => Err(format!(
                "{} has served {} reads, and others have it",
                self.host, self.admitted
            )),
        }
    }

    /// Returns the reads that take this host's link, and those that were admitted.
    pub fn load(&self, reads: &[Duration]) -> (u32, u32) {
        let desk = self.desk(Duration::ZERO, reads, 0);
        (desk.counted(), self.admitted)
    }

    /// Says whether it is to be forgotten: nobody has asked for long.
    pub fn is_over(&self, now: Duration) -> bool {
        now.saturating_sub(self.asked) >= REMEMBERED
    }

    /// A read has been admitted.
    pub fn begun(&mut self) {
        self.admitted += 1;
    }

    /// A read's lease was confirmed: its host has the object in a moment.
    pub fn confirmed(&mut self, now: Duration, host: &str) {
        self.confirmed.insert(host.to_owned(), now);
    }

    /// A read has ended without that.
    pub fn failed(&mut self) {
        self.admitted = self.admitted.saturating_sub(1);
    }

    fn desk<'a>(&self, now: Duration, reads: &'a [Duration], others: u32) -> Desk<'a> {
        let is_recent = |at: &&Duration| now.saturating_sub(**at) < WILL_SAY_SO;
        let recent = self
            .confirmed
            .iter()
            .filter(|(host, _)| **host != self.host);
        let soon = recent.map(|(_, at)| at).filter(is_recent).count();
        Desk {
            origin: self.origin,
            reads,
            expected: self.expected,
            admitted: self.admitted,
            others: others.max(u32::try_from(soon).unwrap_or(u32::MAX)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    #[test]
    fn an_origin_steps_aside_for_who_knows_others_or_was_just_preceded() {
        let mut service = Service::new("a", true, SECOND, SECOND);
        for _ in 0..2 {
            service.admit(SECOND, &[], 0, false).expect("room");
            service.begun();
        }
        service
            .admit(SECOND, &[], 0, false)
            .expect("nobody else has it");
        service
            .admit(SECOND, &[], 1, false)
            .expect_err("another has it");
        service
            .admit(SECOND, &[], 1, true)
            .expect("the others failed");
        service.confirmed(SECOND, "b");
        service
            .admit(SECOND * 2, &[], 0, false)
            .expect_err("b will say so");
        service
            .admit(SECOND * 31, &[], 0, false)
            .expect("b did not");
        assert_eq!(service.load(&[Duration::ZERO, SECOND * 9]), (1, 2));
        assert!(!service.is_over(SECOND * 630) && service.is_over(SECOND * 631));
    }
}
