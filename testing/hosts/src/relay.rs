//! A relay in user space between one host and all others: it has the host's address in the network
//! of all the others, so that nobody needs to be told of it, and carries every connection to a port
//! that the host listens on.
//!
//! What the host answers is delayed, cut or truncated. A host behind a relay is asked and does not
//! ask itself.

use std::collections::BTreeMap;
use std::io::{ErrorKind, Read, Write};
use std::net::{Ipv4Addr, Shutdown, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use crate::network::{Network, own_address};

/// What is done to what the host answers.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Fault {
    /// Nothing.
    None,
    /// Each piece comes so much later.
    Delay(Duration),
    /// A connection ends both ways after this number of bytes.
    Cut(usize),
    /// A connection brings no more than this number of bytes, then its end, and takes more.
    Truncate(usize),
}

/// How often ports and connections are looked at.
const LOOK: Duration = Duration::from_millis(5);
/// Bytes of a piece.
const PIECE: usize = 64 << 10;

/// What all connections share.
#[derive(Debug)]
struct Shared {
    host: Network,
    fault: Mutex<Fault>,
    hit: AtomicUsize,
    over: AtomicBool,
}

/// See the module.
#[derive(Debug)]
pub struct Relay {
    shared: Arc<Shared>,
    accepts: Option<JoinHandle<()>>,
}

impl Relay {
    /// Puts one before a host.
    ///
    /// # Errors
    ///
    /// What this machine forbids.
    pub fn before(host: &Network) -> Result<Relay, String> {
        own_address(host.address(), true)?;
        let (hit, over) = (AtomicUsize::new(0), AtomicBool::new(false));
        let shared = Arc::new(Shared {
            host: host.clone(),
            fault: Mutex::new(Fault::None),
            hit,
            over,
        });
        let ours = shared.clone();
        let accepts = Some(std::thread::spawn(move || accept(&ours)));
        Ok(Relay { shared, accepts })
    }

    /// Says what is done to connections from this moment on, also to open ones, and forgets how
    /// often it was done.
    pub fn set(&self, fault: Fault) {
        *self
            .shared
            .fault
            .lock()
            .unwrap_or_else(PoisonError::into_inner) = fault;
        self.shared.hit.store(0, Ordering::Relaxed);
    }

    /// How often it was done.
    pub fn hit(&self) -> usize {
        self.shared.hit.load(Ordering::Relaxed)
    }
}

impl Drop for Relay {
    fn drop(&mut self) {
        self.shared.over.store(true, Ordering::Relaxed);
        let _ = self.accepts.take().map(JoinHandle::join);
        let _ = own_address(self.shared.host.address(), false);
    }
}

/// Lists the TCP ports that somebody listens on in a network.
pub fn ports(network: &Network) -> Vec<u16> {
    let table = network
        .within(|| std::fs::read_to_string("/proc/thread-self/net/tcp"))
        .ok()
        .and_then(Result::ok);
    let port = |line: &str| {
        let mut words = line.split_whitespace();
        let (local, state) = (words.nth(1)?, words.nth(1)?);
        let port = local
            .rsplit_once(':')
            .and_then(|(_, port)| u16::from_str_radix(port, 16).ok());
        port.filter(|_| state == "0A")
    };
    let mut found: Vec<u16> = table
        .iter()
        .flat_map(|table| table.lines().skip(1))
        .filter_map(port)
        .collect();
    found.sort_unstable();
    found.dedup();
    found
}

fn accept(shared: &Arc<Shared>) {
    let address: Ipv4Addr = shared.host.address();
    let mut listeners: BTreeMap<u16, TcpListener> = BTreeMap::new();
    let mut pumps = Vec::new();
    while !shared.over.load(Ordering::Relaxed) {
        let open = ports(&shared.host);
        listeners.retain(|port, _| open.contains(port));
        for port in open {
            if let (false, Ok(listener)) = (
                listeners.contains_key(&port),
                TcpListener::bind((address, port)),
            ) && listener.set_nonblocking(true).is_ok()
            {
                listeners.insert(port, listener);
            }
        }
        for (port, listener) in &listeners {
            while let Ok((outside, _)) = listener.accept() {
                let Ok(Ok(inside)) = shared.host.within(|| TcpStream::connect((address, *port)))
                else {
                    continue;
                };
                if let (Ok(from), Ok(to)) = (outside.try_clone(), inside.try_clone()) {
                    let (ask, answer) = (shared.clone(), shared.clone());
                    pumps.push(std::thread::spawn(move || pump(&ask, from, to, false)));
                    pumps.push(std::thread::spawn(move || {
                        pump(&answer, inside, outside, true)
                    }));
                }
            }
        }
        std::thread::sleep(LOOK);
    }
    pumps.into_iter().for_each(|pump| drop(pump.join()));
}

fn pump(shared: &Shared, mut from: TcpStream, mut to: TcpStream, answers: bool) {
    let fault = || *shared.fault.lock().unwrap_or_else(PoisonError::into_inner);
    let mut piece = vec![0; PIECE];
    let mut carried = 0;
    let _ = (
        from.set_nonblocking(false),
        from.set_read_timeout(Some(LOOK)),
    );
    let _ = (
        to.set_nonblocking(false),
        to.set_write_timeout(Some(Duration::from_secs(1))),
    );
    while !shared.over.load(Ordering::Relaxed) {
        let most = match fault() {
            Fault::Cut(after) | Fault::Truncate(after) if answers && carried >= after => {
                shared.hit.fetch_add(1, Ordering::Relaxed);
                let _ = to.shutdown(Shutdown::Write);
                if fault() == Fault::Cut(after) {
                    let _ = (to.shutdown(Shutdown::Both), from.shutdown(Shutdown::Both));
                }
                return;
            }
            Fault::Cut(after) | Fault::Truncate(after) if answers => PIECE.min(after - carried),
            _ => PIECE,
        };
        let bytes = match from.read(&mut piece[..most]) {
            Ok(0) => break,
            Ok(bytes) => bytes,
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {
                continue;
            }
            Err(_) => break,
        };
        if let (Fault::Delay(time), true) = (fault(), answers) {
            shared.hit.fetch_add(1, Ordering::Relaxed);
            std::thread::sleep(time);
        }
        if !write(shared, &mut to, &piece[..bytes]) {
            break;
        }
        carried += bytes;
    }
    let _ = (to.shutdown(Shutdown::Both), from.shutdown(Shutdown::Both));
}

/// Writes all, unless the relay goes first: who reads there may be stopped.
fn write(shared: &Shared, to: &mut TcpStream, mut bytes: &[u8]) -> bool {
    while !bytes.is_empty() {
        match to.write(bytes) {
            Ok(0) => return false,
            Ok(written) => bytes = &bytes[written..],
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {
                if shared.over.load(Ordering::Relaxed) {
                    return false;
                }
            }
            Err(_) => return false,
        }
    }
    true
}
