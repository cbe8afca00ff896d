//! A session of Zenoh between gateways: TCP with certificates of both sides, or without by the
//! user's word. No multicast.

use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::str::FromStr;

use zenoh::Wait;

use crate::error::{Error, Result};

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
    pub fn open(&self) -> Result<zenoh::Session> {
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
        let json = |value: serde_json::Value| value.to_string();
        let mut settings = vec![
            ("mode", json("peer".into())),
            ("scouting/multicast/enabled", json(false.into())),
            (
                "listen/endpoints",
                json(self.listen.iter().map(endpoint).collect::<Vec<_>>().into()),
            ),
            (
                "connect/endpoints",
                json(self.peers.iter().map(endpoint).collect::<Vec<_>>().into()),
            ),
            // A peer that is not there yet is tried again.
            ("connect/exit_on_failure", json(false.into())),
            ("listen/exit_on_failure", json(true.into())),
        ];
        if let Trust::Certificates {
            certificate,
            key,
            authority,
        } = &self.trust
        {
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
        zenoh::open(config).wait().map_err(unavailable)
    }
}
