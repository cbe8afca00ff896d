//! Which gateways are there: one token each, however many objects they have.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, PoisonError};

use zenoh::Wait;
use zenoh::pubsub::Subscriber;
use zenoh::sample::SampleKind;

use crate::error::{Error, Result};
use crate::net::key::{Gateway, ROOT};
use crate::net::session::Session;

/// The gateways that are suspected to live, as this process has heard it.
pub struct Live {
    known: Arc<Mutex<BTreeSet<Gateway>>>,
    _subscriber: Subscriber<()>,
}

impl std::fmt::Debug for Live {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Live").finish_non_exhaustive()
    }
}

impl Live {
    /// Begins to listen.
    ///
    /// # Errors
    ///
    /// [`Error::Unavailable`] when the session has ended.
    pub fn listen(session: &Session) -> Result<Live> {
        let known = Arc::<Mutex<BTreeSet<Gateway>>>::default();
        let told = Arc::clone(&known);
        let hear = move |sample: zenoh::sample::Sample| {
            let Some(gateway) = Gateway::of_token(sample.key_expr().as_str()) else {
                return;
            };
            let mut known = told.lock().unwrap_or_else(PoisonError::into_inner);
            if sample.kind() == SampleKind::Put {
                known.insert(gateway);
            } else {
                known.remove(&gateway);
            }
        };
        let subscriber = session
            .liveliness()
            .declare_subscriber(format!("{ROOT}/*/*/live"))
            .history(true)
            .callback(hear)
            .wait();
        let subscriber = subscriber.map_err(|error| Error::Unavailable {
            what: "a subscription".into(),
            why: error.to_string(),
            remedy: "see that the session is open",
        })?;
        Ok(Live {
            known,
            _subscriber: subscriber,
        })
    }

    /// Lists those of a host; of all hosts for none.
    pub fn gateways(&self, host: Option<&str>) -> Vec<Gateway> {
        let known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        let of_host = |gateway: &&Gateway| host.is_none_or(|host| gateway.host == host);
        known.iter().filter(of_host).cloned().collect()
    }
}
