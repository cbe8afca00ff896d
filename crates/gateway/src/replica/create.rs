//! What was granted, checked against what was asked for, and the object that it is read to.
//!
//! The other gateway's word is input: name, identity, epoch and numbers are compared, and who may
//! open the replica is this host's to say. The object is made on a thread of its own, since pinning
//! a large one takes longer than a lease lives without a renewal.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, sync_channel};
use std::time::Duration;

use gpu_ipc::backend::thread;
use gpu_ipc::broker::wire::RefusalCode;
use gpu_ipc::broker::{CreateOptions, Epoch, Manifest, ObjectError, Readers, Writer};

use crate::error::{Error, Result};
use crate::local::Local;
use crate::message::{self, Again, Incarnation, MANIFEST_PIECE, MOST_MANIFEST, Wanted};
use crate::net::call::{Answer, Answered, Granted, Question, ask};
use crate::net::key::Gateway;
use crate::net::session::Session;
use crate::replica::report::Kind;
use crate::transport::{Peer, Registration, Transport};

/// What a gateway has granted.
#[derive(Debug)]
pub struct Leased {
    /// The gateway.
    pub gateway: Gateway,
    /// The process that asked.
    pub asker: Incarnation,
    /// What was asked for.
    pub wanted: Wanted,
    /// The answer.
    pub granted: Granted,
    /// The manifest, or its first piece, and the transport's metadata.
    pub attached: Vec<u8>,
}

/// The object of an attempt: dropped in this order.
#[derive(Debug)]
pub struct Made {
    /// The other gateway's memory, until the read begins.
    pub peer: Option<Box<dyn Peer>>,
    /// The object's memory as a destination; none where the transport does not take it.
    pub registration: Option<Box<dyn Registration>>,
    /// The object.
    pub writer: Writer,
}

impl Made {
    /// Takes the registration back: nothing is read any more.
    pub fn into_writer(self) -> Writer {
        drop(self.registration);
        self.writer
    }
}

/// What became of it: else why not, whether another attempt may do, and the kind of failure.
pub type Created = Result<Made, (String, Again, Kind)>;

/// What it takes to make the object.
pub struct Means {
    /// This host.
    pub local: Local,
    /// The network.
    pub session: Session,
    /// What carries the bytes.
    pub transport: Arc<dyn Transport>,
    /// How long an answer is waited for.
    pub patience: Duration,
    /// Who may open the replica here.
    pub readers: Readers,
}

impl Leased {
    /// Returns the bytes of the object.
    pub fn bytes(&self) -> u64 {
        let bytes = self.granted.regions.iter().map(|(_, bytes, _)| *bytes);
        bytes.fold(0, u64::saturating_add)
    }

    /// Compares the grant with what was asked for.
    ///
    /// # Errors
    ///
    /// What differs.
    pub fn check(&self, transport: &str) -> Result<(), String> {
        let Leased {
            gateway,
            asker,
            wanted,
            granted,
            ..
        } = self;
        let grant = &granted.grant;
        let host = &gateway.host;
        if granted.transport != transport {
            let theirs = &granted.transport;
            return Err(format!(
                "the gateway of {host} carries bytes by {theirs}, and this host by {transport}; \
                 start both with the same --transport"
            ));
        }
        if grant.lease.incarnation != gateway.incarnation || grant.lease.asker != *asker {
            return Err(format!("the gateway of {host} granted another's lease"));
        }
        if wanted.epoch.is_some_and(|epoch| epoch != grant.epoch) {
            let asked = wanted.epoch.unwrap_or_default();
            return Err(format!(
                "the gateway of {host} granted epoch {}, and {asked} was asked for",
                grant.epoch
            ));
        }
        if wanted.identity.is_some_and(|one| one != grant.identity) {
            return Err(format!(
                "the gateway of {host} granted {}, which is another object than was asked for",
                grant.identity()
            ));
        }
        if granted.manifest > MOST_MANIFEST {
            return Err(format!(
                "the manifest of {host} has {} bytes, and may have {MOST_MANIFEST}",
                granted.manifest
            ));
        }
        Ok(())
    }

    /// Compares the manifest with the grant and with what was asked for.
    fn describes(&self, manifest: &Manifest) -> Result<(), String> {
        let host = &self.gateway.host;
        if manifest.name != self.wanted.name {
            return Err(format!(
                "the gateway of {host} describes an object called {}, and {} was asked for",
                manifest.name, self.wanted.name
            ));
        }
        let grant = &self.granted.grant;
        let regions = self.granted.regions.iter().map(|(_, bytes, _)| *bytes);
        let sound = manifest.identity == grant.identity()
            && manifest.epoch == grant.epoch()
            && regions.eq(manifest.layout.regions().iter().copied());
        let why = || format!("what the gateway of {host} granted is not what it describes");
        sound.then_some(()).ok_or_else(why)
    }

    /// Fetches what the answer did not hold of the manifest.
    fn manifest(&self, session: &Session, patience: Duration) -> Result<Manifest, String> {
        let first = self.granted.manifest.min(MANIFEST_PIECE);
        let mut bytes = self.attached.get(..first).unwrap_or_default().to_vec();
        while bytes.len() < self.granted.manifest {
            let question = Question::Manifest(message::Manifest {
                lease: self.granted.grant.lease,
                from: bytes.len(),
            });
            let answered = ask(session, &self.gateway, &question, patience)
                .map_err(|error| error.to_string())?
                .wait();
            match answered {
                Some(Answered {
                    answer: Answer::Manifest(more),
                    attached,
                }) if more > 0 && more == attached.len() => bytes.extend(attached),
                _ => {
                    return Err(format!(
                        "the gateway of {} gave {} of {} bytes of the manifest",
                        self.gateway.host,
                        bytes.len(),
                        self.granted.manifest
                    ));
                }
            }
        }
        bytes.truncate(self.granted.manifest);
        Manifest::decode(&bytes).map_err(|error| error.to_string())
    }

    fn metadata(&self) -> &[u8] {
        let first = self.granted.manifest.min(MANIFEST_PIECE);
        self.attached.get(first..).unwrap_or_default()
    }
}

/// Begins to make the object, on a thread of its own.
///
/// # Errors
///
/// [`Error::Unavailable`] without a thread.
pub fn begin(means: Means, leased: Arc<Leased>) -> Result<Receiver<Created>> {
    let (sender, created) = sync_channel(1);
    // A pull that has ended wants it no more: it goes with the message.
    let run = move || drop(sender.send(create(&means, &leased)));
    match thread::start("gateway-creates", run) {
        Ok(_) => Ok(created),
        Err(error) => Err(Error::Unavailable {
            what: "a thread".into(),
            why: error.to_string(),
            remedy: "raise RLIMIT_NPROC",
        }),
    }
}

fn create(means: &Means, leased: &Leased) -> Created {
    let failed = |again: Again| move |why: String| (why, again, Kind::Failed);
    let manifest = leased
        .manifest(&means.session, means.patience)
        .map_err(failed(Again::Later))?;
    leased.describes(&manifest).map_err(failed(Again::Never))?;
    let grant = &leased.granted.grant;
    let options = CreateOptions {
        readers: means.readers.clone(),
        identity: Some(grant.identity()),
        replica_of: Some((Epoch(grant.epoch), leased.granted.home.to_string())),
        ..CreateOptions::default()
    };
    let writer = means
        .local
        .client
        .create_with(&manifest.name, manifest.layout.clone(), &options)
        .map_err(|error| refused(&error))?;
    let spans = means.local.spans(writer.regions());
    // SAFETY: `register` asks for memory that is mapped and writable until the registration is
    // dropped and transfers have ended: `Made` keeps the writer, whose mapping it is, and drops it
    // after the registration; the driver drops neither while a transfer may write.
    let registration = match unsafe { means.transport.register(&spans) } {
        Ok(registration) => Some(registration),
        Err(error) if leased.granted.rings.is_empty() => {
            return Err((error.to_string(), Again::Never, Kind::Failed));
        }
        Err(error) => {
            tracing::warn!(%error, "the object is read through a ring");
            None
        }
    };
    let peer = means
        .transport
        .load_peer(leased.metadata())
        .map_err(|error| (error.to_string(), Again::Later, Kind::Failed))?;
    Ok(Made {
        peer: Some(peer),
        registration,
        writer,
    })
}

/// Says what a refusal of this host's broker means.
fn refused(error: &ObjectError) -> (String, Again, Kind) {
    let again = match error {
        // Another process of this host began in the same moment: it is waited for from here on.
        ObjectError::Refused {
            refusal: RefusalCode::Exists,
            ..
        }
        | ObjectError::Gpu(_)
        | ObjectError::WriterLost { .. }
        | ObjectError::Aborted { .. } => Again::Later,
        _ => Again::Never,
    };
    let kind = match error {
        ObjectError::Refused { .. } | ObjectError::Conflict { .. } => Kind::Refused,
        _ => Kind::Failed,
    };
    (error.to_string(), again, kind)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::message::{Grant, Home, LeaseId, LeaseNumber};
    use gpu_ipc::BackendKind;
    use gpu_ipc::backend::DeviceUuid;
    use gpu_ipc::broker::{Identity, Layout, PartSpec};

    const ME: Incarnation = Incarnation([5; 16]);

    fn leased() -> Leased {
        let gateway = Gateway {
            host: "a".into(),
            incarnation: Incarnation([1; 16]),
        };
        let lease = LeaseId {
            incarnation: gateway.incarnation,
            lease: LeaseNumber([2; 16]),
            asker: ME,
        };
        let grant = Grant {
            lease,
            identity: [3; 16],
            epoch: 4,
            lives_ms: 30_000,
        };
        let granted = Granted {
            grant,
            home: Home::read("a"),
            transport: "tcp".into(),
            regions: vec![(4096, layout().regions()[0], None)],
            direct: true,
            rings: Vec::new(),
            manifest: 0,
        };
        let wanted = Wanted {
            name: "model".into(),
            epoch: Some(4),
            identity: Some([3; 16]),
        };
        Leased {
            gateway,
            asker: ME,
            wanted,
            granted,
            attached: Vec::new(),
        }
    }

    fn layout() -> Layout {
        Layout::pack(vec![PartSpec::bytes("weights", 64).expect("a part")], &[]).expect("a layout")
    }

    fn manifest() -> Manifest {
        Manifest {
            identity: Identity([3; 16]),
            name: "model".into(),
            epoch: Epoch(4),
            home: None,
            backend: BackendKind::Host,
            device: DeviceUuid([0; 16]),
            owner: 0,
            readers: Readers::Everybody,
            granularity: 4096,
            layout: layout(),
        }
    }

    #[test]
    fn what_was_asked_for_is_taken() {
        let leased = leased();
        leased.check("tcp").expect("as it was asked for");
        leased.describes(&manifest()).expect("as it was granted");
    }

    #[test]
    fn a_grant_of_anything_else_is_refused() {
        let refused = |change: &dyn Fn(&mut Leased), part: &str| {
            let mut leased = leased();
            change(&mut leased);
            let why = leased.check("tcp").expect_err(part);
            assert!(why.contains(part) && why.contains("of a "), "{why}");
        };
        refused(&|leased| leased.granted.grant.epoch = 5, "epoch 5, and 4");
        refused(
            &|leased| leased.granted.grant.identity = [9; 16],
            "another object",
        );
        refused(
            &|leased| leased.granted.grant.lease.asker = Incarnation([9; 16]),
            "another's lease",
        );
        refused(
            &|leased| leased.granted.grant.lease.incarnation = Incarnation([9; 16]),
            "another's lease",
        );
        refused(&|leased| leased.granted.transport = "nixl".into(), "nixl");
        refused(
            &|leased| leased.granted.manifest = MOST_MANIFEST + 1,
            "the manifest",
        );
    }

    #[test]
    fn a_manifest_of_anything_else_is_refused() {
        let leased = leased();
        for other in [
            Manifest {
                name: "other".into(),
                ..manifest()
            },
            Manifest {
                epoch: Epoch(5),
                ..manifest()
            },
            Manifest {
                identity: Identity([9; 16]),
                ..manifest()
            },
        ] {
            let why = leased.describes(&other).expect_err("another object");
            assert!(why.contains("of a "), "{why}");
        }
        let mut short = leased;
        short.granted.regions.clear();
        short
            .describes(&manifest())
            .expect_err("without its region");
    }
}
