//! A connection to a broker, from the hello to the welcome.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use gpu_api::{Error, Gpu, WordPtr};
use rustix::event::PollFlags;
use transport::os::process::{descendants_holding, own_pidfd};
use transport::os::socket::{self, ReceiveOutcome, connect_within};
use transport::shared::counter_file::CounterFile;
use transport::wire::packet::Versions;
use transport::wire::table;

use crate::error::{ObjectError, Result};
use crate::server::broker::SOCKET;
use crate::wire::{MOST_BYTES, RefusalCode, ToBroker, ToClient, VERSIONS};

/// The counter file of a connection, registered with the driver.
#[derive(Debug)]
pub(super) struct Words {
    pub file: CounterFile,
    pub registered: Option<WordPtr>,
    gpu: Gpu,
}

impl Words {
    fn of(gpu: &Gpu, file: CounterFile) -> Result<Words> {
        let registered = if gpu.caps().stream_writes {
            // SAFETY: `register_words` asks for bytes that stay mapped until `unregister_words`:
            // `drop` calls that before the file goes.
            Some(unsafe { gpu.backend().register_words(file.start(), file.bytes()) }?)
        } else {
            None
        };
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
        let socket = connect_within(&dir.join(SOCKET), Some(deadline))?;
        let pidfd = own_pidfd()?;
        let descendants = descendants_holding(gpu.backend().device_files())?;
        let hello = ToBroker::Hello {
            lowest: VERSIONS.lowest,
            highest: VERSIONS.highest,
            shared_context: gpu.caps().shared_context,
            descendants: descendants.len() as u16,
            name: name.into(),
        };
        let mut bytes = [0; MOST_BYTES];
        let fds: Vec<BorrowedFd<'_>> = std::iter::once(&pidfd)
            .chain(&descendants)
            .map(AsFd::as_fd)
            .collect();
        let len = hello.encode(&mut bytes);
        match socket::send(&socket, &bytes[..len], &fds) {
            Ok(socket::SendOutcome::Sent) => {}
            Ok(_) => return Err(gone(dir)),
            Err(e) => {
                return Err(
                    Error::system("sendmsg to the broker", "raise RLIMIT_NOFILE", e).into(),
                );
            }
        }
        loop {
            let mut fds = Vec::new();
            match socket::receive(&socket, &mut bytes, &mut fds) {
                Ok(ReceiveOutcome::Packet(len)) => {
                    return Connection::welcomed(gpu, socket, &bytes[..len], fds);
                }
                Ok(ReceiveOutcome::Empty) => {
                    socket::wait_ready(
                        socket.as_fd(),
                        PollFlags::IN,
                        "the broker's welcome",
                        Some(deadline),
                    )?;
                }
                Ok(ReceiveOutcome::HungUp) => return Err(gone(dir)),
                Err(e) => {
                    return Err(
                        Error::system("recvmsg from the broker", "raise RLIMIT_NOFILE", e).into(),
                    );
                }
            }
        }
    }

    fn welcomed(
        gpu: &Gpu,
        socket: OwnedFd,
        bytes: &[u8],
        mut fds: Vec<OwnedFd>,
    ) -> Result<Connection> {
        let (message, version) = table::decode(bytes, fds.len()).map_err(Error::from)?;
        match message {
            ToClient::Welcome { slots, .. } => {
                let file = CounterFile::open(fds.swap_remove(1), slots)?;
                Ok(Connection {
                    socket,
                    version,
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
    Error::Mismatch {
        what: "the broker's answer",
        theirs: "of another kind".into(),
        ours: "what the question asks for".into(),
        remedy: "use broker and client of one version",
    }
    .into()
}
