//! A session of Zenoh between gateways: TCP with certificates of both sides, or without by the
//! user's word. No multicast.

use std::net::{IpAddr, SocketAddr};
use std::ops::Deref;
use std::path::PathBuf;
use std::str::FromStr;
use std::sync::Arc;

use zenoh::Wait;

use super::seal::{MOST_SEAL, Seal};
use crate::error::{Error, Result};
use crate::message::MOST_ANSWER;

/// Hosts of one network that are promised: `docs/HOSTS.md`.
pub const HOSTS: usize = 128;
/// Sessions of one gateway: with that of every host, and with seven commands of each that look.
const MOST_SESSIONS: usize = 8 * HOSTS;
/// Connections that have not said who they are: all hosts at once when they start, four times over.
/// Those that stay silent beyond [`ACCEPT_MS`] make room.
const MOST_PENDING: usize = 4 * HOSTS;
/// Milliseconds that a connection may take to say who it is. Zenoh waits for 10 s.
const ACCEPT_MS: u64 = 2_000;
/// Milliseconds that a gateway waits for another to take its connection.
const OPEN_MS: u64 = 5_000;
/// The most bytes that Zenoh puts together of one message: an answer and its envelope. By itself it
/// takes 1 GiB.
const MOST_MESSAGE: usize = MOST_ANSWER + MOST_SEAL + (32 << 10);

/// Where a gateway listens or connects: `tcp/IP:PORT`.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Address(pub SocketAddr);

impl FromStr for Address {
    type Err = String;

    fn from_str(text: &str) -> std::result::Result<Address, String> {
        let at = text.strip_prefix("tcp/").unwrap_or(text).parse();
        at.map(Address)
            .map_err(|_| format!("{text:?} is no address; write tcp/IP:PORT, as tcp/10.0.0.1:7447"))
    }
}

impl std::fmt::Display for Address {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "tcp/{}", self.0)
    }
}

/// Which hosts may connect.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Trust {
    /// Hosts with a certificate of this authority; ours comes with it.
    Certificates {
        /// Ours, as PEM.
        certificate: PathBuf,
        /// Its private key, as PEM.
        key: PathBuf,
        /// The authority's certificate, as PEM.
        authority: PathBuf,
    },
    /// Every host that reaches the port.
    Everybody,
}

/// A session, and what answers are signed with and compared with where there are certificates.
#[derive(Clone, Debug)]
pub struct Session {
    zenoh: zenoh::Session,
    seal: Option<Arc<Seal>>,
}

impl Session {
    /// Returns what signs and compares answers; none where every host is let in.
    pub fn seal(&self) -> Option<&Seal> {
        self.seal.as_deref()
    }

    /// Says whether other hosts will believe that answers here are those of a host.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] for a certificate that has another name.
    pub fn speaks_for(&self, host: &str) -> Result<()> {
        self.seal.as_ref().map_or(Ok(()), |seal| seal.is_of(host))
    }
}

impl Deref for Session {
    type Target = zenoh::Session;

    fn deref(&self) -> &zenoh::Session {
        &self.zenoh
    }
}

/// How a gateway reaches the others.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Network {
    /// Where it listens; a short-lived one does not.
    pub listen: Option<Address>,
    /// Some of the others; those tell of more.
    pub peers: Vec<Address>,
    /// Which hosts may connect.
    pub trust: Trust,
}

impl Network {
    /// Finds this host's address for other transports: where it listens, else that by which the
    /// first peer is reached.
    pub fn own_address(&self) -> IpAddr {
        let unspecified = IpAddr::from([0, 0, 0, 0]);
        if let Some(listen) = self.listen {
            return listen.0.ip();
        }
        // A datagram socket that is connected sends nothing, and knows its own address.
        let reach = |peer: &Address| {
            let socket = std::net::UdpSocket::bind((unspecified, 0)).ok()?;
            socket.connect(peer.0).ok()?;
            Some(socket.local_addr().ok()?.ip())
        };
        self.peers.first().and_then(reach).unwrap_or(unspecified)
    }

    /// Opens the session.
    ///
    /// # Errors
    ///
    /// [`Error::Unavailable`] for an address that cannot be listened on, and certificates that
    /// cannot be read.
    pub fn open(&self) -> Result<Session> {
        let unavailable = |e: zenoh::Error| Error::Unavailable {
            what: "the network between gateways".into(),
            why: e.to_string(),
            remedy: "check `--listen`, `--peer` and `--tls`",
        };
        let scheme = if self.trust == Trust::Everybody {
            "tcp"
        } else {
            "tls"
        };
        let endpoint = |address: &Address| format!("{scheme}/{}", address.0);
        // A connection that says nothing within the handshake of TLS has no Zenoh yet to end it.
        let listening = |address: &Address| match self.trust {
            Trust::Everybody => endpoint(address),
            Trust::Certificates { .. } => {
                format!("{}#tls_handshake_timeout_ms={ACCEPT_MS}", endpoint(address))
            }
        };
        let json = |value: serde_json::Value| value.to_string();
        let mut settings = vec![
            ("mode", json("peer".into())),
            ("scouting/multicast/enabled", json(false.into())),
            (
                "listen/endpoints",
                json(self.listen.iter().map(listening).collect::<Vec<_>>().into()),
            ),
            (
                "connect/endpoints",
                json(self.peers.iter().map(endpoint).collect::<Vec<_>>().into()),
            ),
            // A peer that is not there yet is tried again.
            ("connect/exit_on_failure", json(false.into())),
            ("listen/exit_on_failure", json(true.into())),
            ("transport/unicast/max_sessions", json(MOST_SESSIONS.into())),
            ("transport/unicast/max_links", json(1.into())),
            (
                "transport/unicast/accept_pending",
                json(MOST_PENDING.into()),
            ),
            ("transport/unicast/accept_timeout", json(ACCEPT_MS.into())),
            ("transport/unicast/open_timeout", json(OPEN_MS.into())),
            (
                "transport/link/rx/max_message_size",
                json(MOST_MESSAGE.into()),
            ),
        ];
        let mut seal = None;
        if let Trust::Certificates {
            certificate,
            key,
            authority,
        } = &self.trust
        {
            seal = Some(Arc::new(Seal::read(certificate, key, authority)?));
            let path = |path: &PathBuf| json(path.to_string_lossy().into());
            settings.extend([
                ("transport/link/tls/enable_mtls", json(true.into())),
                ("transport/link/tls/root_ca_certificate", path(authority)),
                ("transport/link/tls/listen_certificate", path(certificate)),
                ("transport/link/tls/listen_private_key", path(key)),
                ("transport/link/tls/connect_certificate", path(certificate)),
                ("transport/link/tls/connect_private_key", path(key)),
            ]);
        }
        let mut config = zenoh::Config::default();
        for (name, value) in settings {
            config.insert_json5(name, &value).map_err(unavailable)?;
        }
        let zenoh = zenoh::open(config).wait().map_err(unavailable)?;
        Ok(Session { zenoh, seal })
    }
}
