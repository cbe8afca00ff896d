//! The name of the broker's socket, which others can take away: a program that tidies a directory
//! up, an operator, a process that binds it. It is looked at every second; a broker without it would
//! serve those alone that are connected.

// Tests: `crates/broker/tests/objects/naming.rs`.

use std::sync::Arc;
use std::time::{Duration, Instant};

use gpu_api::{Result, explain};
use transport::os::socket::{Endpoint, Listener};
use transport::server::{Allowed, Door};

use crate::server::action::Participant;
use crate::server::place;

/// How often the name is looked at.
const LOOK_AGAIN: Duration = Duration::from_secs(1);

/// What is known of the name.
#[derive(Debug)]
pub(super) struct Name {
    /// Other users may connect to it.
    others: bool,
    look_at: Instant,
    /// Why it could not be bound again, as was logged last.
    why: Option<String>,
    rebound: u64,
}

impl Name {
    pub(super) fn new(allowed: &Allowed) -> Name {
        Name {
            others: !allowed.is_empty(),
            look_at: Instant::now() + LOOK_AGAIN,
            why: None,
            rebound: 0,
        }
    }

    pub(super) fn until_look(&self, now: Instant) -> Duration {
        self.look_at.saturating_duration_since(now)
    }

    /// Counts how often it was bound again.
    pub(super) fn rebound(&self) -> u64 {
        self.rebound
    }

    /// Says, once a second, whether it is gone or leads elsewhere.
    pub(super) fn is_lost(&mut self, door: &Door<Participant>) -> bool {
        let now = Instant::now();
        if self.look_at > now {
            return false;
        }
        self.look_at = now + LOOK_AGAIN;
        door.listener()
            .is_some_and(|listener| !listener.has_its_name())
    }

    /// Binds a socket to it again. Where that cannot be done, the log says why, once for each reason.
    pub(super) fn bind_again(&mut self, door: &mut Door<Participant>) {
        match self.listen(door) {
            Ok(()) => {
                self.rebound += 1;
                self.why = None;
                tracing::warn!("the broker's socket was removed or replaced; it is there again");
            }
            Err(error) => {
                let why = explain(&error);
                if self.why.as_ref() != Some(&why) {
                    tracing::error!(
                        why,
                        "the broker's socket was removed or replaced, and no process can connect; it is tried every second"
                    );
                    self.why = Some(why);
                }
            }
        }
    }

    fn listen(&self, door: &mut Door<Participant>) -> Result<()> {
        let Some(path) = door.listener().map(|listener| listener.path().to_owned()) else {
            return Ok(());
        };
        if let Some(dir) = path.parent() {
            place::prepare(dir)?;
        }
        let others = self.others;
        let listener = Listener::bind(&Endpoint::Path { path, others })?;
        door.listen_at(Arc::new(listener))
    }

    /// Lets those connect who may from here on.
    pub(super) fn open_to(&mut self, allowed: &Allowed, door: &Door<Participant>) {
        self.others = !allowed.is_empty();
        let opened = door.listener().map(|of| of.open_to_others(self.others));
        // A name that is gone gets its mode when it is bound again.
        if let Some(Err(error)) = opened {
            tracing::warn!(%error, "the mode of the broker's socket stays as it is");
        }
    }
}
