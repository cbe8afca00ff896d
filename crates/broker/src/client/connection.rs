//! A connection to a broker, from the hello to the welcome.

use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use gpu_api::{Error, Gpu, WordPtr};
use transport::client;
use transport::shared::counter_file::CounterFile;
use transport::wire::packet::Versions;

use crate::error::{ObjectError, Result};
use crate::object::identity::Lineage;
use crate::server::broker::SOCKET;
use crate::wire::{RefusalCode, ToBroker, ToClient, VERSIONS};

/// The first version in which a broker says which history its epochs are of, and lets a watch be
/// taken back.
pub(super) const SAYS_LINEAGE: u16 = 2;

/// The first version in which a broker answers `Sum`.
pub(super) const SUMS: u16 = 3;

/// The counter file of a connection, registered with the driver.
#[derive(Debug)]
pub(super) struct Words {
    pub file: CounterFile,
    pub registered: Option<WordPtr>,
    gpu: Gpu,
}

impl Words {
    pub(super) fn of(gpu: &Gpu, file: CounterFile) -> Result<Words> {
        // SAFETY: `register` asks for a file that stays mapped until `unregister_words`: `drop`
        // calls that before the file goes.
        let registered = unsafe { file.register(gpu) }?;
        Ok(Words {
            file,
            registered,
            gpu: gpu.clone(),
        })
    }
}

impl Drop for Words {
    fn drop(&mut self) {
        if self.registered.is_some() {
            // SAFETY: `unregister_words` asks for a registration that no unfinished operation uses:
            // a commit keeps these words until its releases have happened.
            if let Err(error) = unsafe { self.gpu.backend().unregister_words(self.file.start()) } {
                tracing::warn!(%error, "words cannot be unregistered");
            }
        }
    }
}

/// A connection that was welcomed.
#[derive(Debug)]
pub(super) struct Connection {
    pub socket: OwnedFd,
    pub version: u16,
    /// Which history the broker's epochs are of, if it says so.
    pub lineage: Option<Lineage>,
    pub words: Arc<Words>,
}

impl Connection {
    /// Connects, says hello and waits for the welcome.
    pub(super) fn greet(
        gpu: &Gpu,
        dir: &Path,
        name: &str,
        deadline: Instant,
    ) -> Result<Connection> {
        let (socket, kin) = client::connect(&dir.join(SOCKET), gpu, Some(deadline))?;
        let hello = ToBroker::Hello {
            lowest: VERSIONS.lowest,
            highest: VERSIONS.highest,
            shared_context: gpu.caps().shared_context,
            descendants: kin.descendants(),
            name: name.into(),
        };
        let awaited = "the broker's welcome";
        let (answer, version, fds) =
            client::say_hello(&socket, &hello, &kin, awaited, Some(deadline))?
                .ok_or_else(|| gone(dir))?;
        Connection::welcomed(gpu, socket, answer, version, fds)
    }

    fn welcomed(
        gpu: &Gpu,
        socket: OwnedFd,
        answer: ToClient,
        version: u16,
        mut fds: Vec<OwnedFd>,
    ) -> Result<Connection> {
        match answer {
            ToClient::Welcome { slots, lineage, .. } => {
                let file = CounterFile::open(fds.swap_remove(1), slots)?;
                Ok(Connection {
                    socket,
                    version,
                    lineage: (version >= SAYS_LINEAGE).then_some(lineage),
                    words: Arc::new(Words::of(gpu, file)?),
                })
            }
            ToClient::Refused {
                refusal,
                lowest,
                highest,
                why,
            } => {
                let why = if refusal == RefusalCode::Version {
                    let theirs = Versions { lowest, highest };
                    format!("the broker speaks versions {theirs}, this side {VERSIONS}")
                } else {
                    why
                };
                Err(ObjectError::Refused {
                    refusal,
                    why,
                    remedy: refusal.remedy(),
                })
            }
            _ => Err(nonsense()),
        }
    }
}

fn gone(dir: &Path) -> ObjectError {
    let path = dir.join(SOCKET).display().to_string();
    let (why, remedy) = (
        "the broker hung up".into(),
        "start it again: `gpu-ipc keep -- gpu-ipc broker`",
    );
    Error::Connect {
        path,
        why,
        remedy,
        source: None,
    }
    .into()
}

/// The broker answered a question that was not asked.
pub(super) fn nonsense() -> ObjectError {
    Error::mismatch(
        "the broker's answer",
        "of another kind",
        "what the question asks for",
        "use broker and client of one version",
    )
    .into()
}
