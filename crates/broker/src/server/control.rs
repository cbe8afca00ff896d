//! The way to change what a broker allows while it serves.

// Tests: `crates/broker/tests/objects/naming.rs`, `crates/cli/tests/reload.rs`.

use transport::os::socket;
use transport::server::Allowed;

use crate::server::action::Action;
use crate::server::happened::{File, Happened, Teller};
use crate::server::limits::Limits;
use crate::server::service::Service;

/// Changes what a broker allows while it serves.
#[derive(Clone, Debug)]
pub struct Control(Teller);

impl Control {
    pub(super) fn new(teller: Teller) -> Control {
        Control(teller)
    }

    /// Sets the limits, and which users may connect. What is beyond a lower limit stays, and leaves
    /// no room for more; epochs beyond those that are kept go. A participant that may not connect
    /// any more is hung up on; what it has mapped stays.
    pub fn change(&self, limits: Limits, allowed: Allowed) {
        self.0
            .tell(Happened::Changed(Ok(Box::new((limits, allowed)))));
    }

    /// Notes for the listing why what was to be changed was not.
    pub fn refuse(&self, why: String) {
        self.0.tell(Happened::Changed(Err(why)));
    }
}

impl Service {
    /// Takes what is allowed from here on.
    pub(super) fn change(
        &mut self,
        changed: Result<Box<(Limits, Allowed)>, String>,
    ) -> Vec<Action<File>> {
        self.reread.count += 1;
        match changed {
            Ok(changed) => {
                let (limits, allowed) = *changed;
                self.reread.why.clear();
                tracing::info!(
                    limit = limits.bytes,
                    limit_per_uid = limits.bytes_per_uid,
                    epochs = limits.epochs,
                    evict = limits.evict,
                    ttl = ?limits.ttl,
                    pool_ttl = ?limits.pool_ttl,
                    allowed = ?allowed.uids,
                    allowed_groups = ?allowed.gids,
                    "the options hold"
                );
                self.let_in(allowed);
                self.expires(&limits);
                self.parts.catalogue.change(limits)
            }
            Err(why) => {
                self.reread.why = why;
                Vec::new()
            }
        }
    }

    /// Hangs up on those who may not connect any more.
    fn let_in(&mut self, allowed: Allowed) {
        self.name.open_to(&allowed, &self.door);
        self.door.allow(allowed);
        for (participant, peer) in &self.peers {
            let uid = peer.asker.uid;
            let groups = self.parts.catalogue.groups_of(*participant);
            if let Err((_, why)) = self.door.admit(uid, || Ok(groups.to_vec())) {
                tracing::warn!(pid = peer.seat.pid, uid, why, "a participant is hung up on");
                socket::hang_up(&peer.seat.socket);
            }
        }
    }
}
