//! What this host knows of its own service of one object, put before the plan.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use gpu_ipc::broker::Identity;
use gpu_ipc_gateway_plan::{Admission, Desk, admit};

use crate::net::heard::Heard;
use crate::pace::Pace;
use crate::error::Result;
use crate::net::key::ROOT;

/// How long a host that had its copy confirmed counts as one that has the object, though nobody has
/// heard it say so.
const WILL_SAY_SO: Duration = Duration::from_secs(30);

/// The service of one object.
#[derive(Debug)]
pub struct Service {
    host: String,
    identity: Identity,
    origin: bool,
    expected: Duration,
    heard: Heard,
    /// Reads that were admitted and did not fail.
    admitted: u32,
    confirmed: BTreeMap<String, Duration>,
}

impl Service {
    /// Begins to serve an object, and to listen for other hosts that have it.
    ///
    /// # Errors
    ///
    /// [`Error::Unavailable`](crate::Error::Unavailable) when the session has ended.
    pub fn begin(
        session: &zenoh::Session,
        host: &str,
        identity: Identity,
        origin: bool,
        bytes: u64,
        pace: Pace,
        started: Instant,
    ) -> Result<Service> {
        let heard = Heard::listen(session, format!("{ROOT}/*/*/has/{identity}/**"), started)?;
        let (host, expected) = (host.to_owned(), pace.expected(bytes));
        Ok(Service {
            host,
            identity,
            origin,
            expected,
            heard,
            admitted: 0,
            confirmed: BTreeMap::new(),
        })
    }

    /// Decides whether to serve one more, beside reads of these ages.
    ///
    /// # Errors
    ///
    /// Why not, at this moment.
    pub fn admit(
        &self,
        now: Duration,
        reads: &[Duration],
        last_resort: bool,
    ) -> Result<(), String> {
        match admit(&self.desk(now, reads), last_resort) {
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

    /// Returns the reads to announce.
    pub fn announced(&self, now: Duration, reads: &[Duration]) -> u32 {
        self.desk(now, reads).announced()
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

    fn desk<'a>(&self, now: Duration, reads: &'a [Duration]) -> Desk<'a> {
        let mut others = self.heard.hosts(&self.identity.to_string());
        let soon = self
            .confirmed
            .iter()
            .filter(|&(_, &at)| now.saturating_sub(at) < WILL_SAY_SO);
        others.extend(soon.map(|(host, _)| host.clone()));
        others.remove(&self.host);
        let Service {
            origin,
            expected,
            admitted,
            ..
        } = *self;
        Desk {
            origin,
            reads,
            expected,
            admitted,
            others: u32::try_from(others.len()).unwrap_or(u32::MAX),
        }
    }
}
