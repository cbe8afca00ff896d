//! Bytes on plain TCP connections, between memory that the CPU reaches. For tests of the protocol:
//! it needs no library, and can be told to stall and to fail.
//!
//! A read stands still at its half until a poll has told so: tests stop a pull there.
//!
//! A request is the key 16, the address u64 and the bytes u64; the answer is the bytes. A
//! connection that asks for anything else is closed, and costs others nothing.

use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError, RwLock};
use std::time::Duration;

use gpu_ipc::backend::thread;

use super::{Pair, Peer, Place, Progress, Registration, Span, Transfer, Transport};
use crate::error::{Error, Result};
use crate::message::Incarnation;

/// Bytes that are copied at a time, while no registration can be taken back.
const CHUNK: usize = 1 << 20;
/// Connections at a time.
const MOST_CONNECTIONS: usize = 64;
/// How often a read that stands still looks whether it was polled.
const LOOK: Duration = Duration::from_micros(50);
/// How long a connection may say nothing before its request.
const QUIET: Duration = Duration::from_secs(5);

/// What a transport is told to do wrong, once a number of bytes of a read have arrived.
#[derive(Clone, Copy, Default, Debug)]
pub struct Faults {
    /// Neither ends nor fails.
    pub stall_after: Option<u64>,
    /// Fails.
    pub fail_after: Option<u64>,
    /// Alters the byte at this place of each range, as one who writes to the fabric.
    pub alter_at: Option<u64>,
}

#[derive(Debug, Default)]
struct Registered {
    next: u64,
    spans: BTreeMap<u64, Vec<Span>>,
}

impl Registered {
    fn has(&self, address: u64, bytes: u64) -> bool {
        let inside = |span: &Span| {
            let at = address.checked_sub(span.address);
            at.and_then(|at| at.checked_add(bytes))
                .is_some_and(|end| end <= span.bytes)
        };
        self.spans.values().flatten().any(inside)
    }
}

/// See the module.
#[derive(Debug)]
pub struct Tcp {
    at: SocketAddr,
    key: [u8; 16],
    registered: Arc<RwLock<Registered>>,
    faults: Faults,
}

impl Tcp {
    /// Listens on an address of this host, at a port that is free.
    ///
    /// # Errors
    ///
    /// [`Error::Unavailable`] for an address that this host has not.
    pub fn listen(address: IpAddr, faults: Faults) -> Result<Tcp> {
        let unavailable = |e: std::io::Error| Error::Unavailable {
            what: format!("a TCP port on {address}"),
            why: e.to_string(),
            remedy: "give an address of this host with `--listen`",
        };
        let listener = TcpListener::bind((address, 0)).map_err(unavailable)?;
        let at = listener.local_addr().map_err(unavailable)?;
        let key = Incarnation::random()?.0;
        let registered = Arc::<RwLock<Registered>>::default();
        let (ours, open) = (registered.clone(), Arc::new(AtomicUsize::new(0)));
        let accept = move || {
            for stream in listener.incoming().flatten() {
                if open.fetch_add(1, Ordering::Relaxed) >= MOST_CONNECTIONS {
                    open.fetch_sub(1, Ordering::Relaxed);
                    continue;
                }
                let (registered, open) = (ours.clone(), open.clone());
                let serve = move || {
                    // Whatever went wrong is that connection's affair.
                    let _ = serve(stream, key, &registered);
                    open.fetch_sub(1, Ordering::Relaxed);
                };
                if let Err(error) = thread::start("gateway-serves", serve) {
                    tracing::warn!(%error, "no thread for a connection");
                }
            }
        };
        thread::start("gateway-accepts", accept).map_err(|e| Error::Unavailable {
            what: "a thread".into(),
            why: e.to_string(),
            remedy: "raise RLIMIT_NPROC",
        })?;
        Ok(Tcp {
            at,
            key,
            registered,
            faults,
        })
    }
}

fn serve(
    mut stream: TcpStream,
    key: [u8; 16],
    registered: &RwLock<Registered>,
) -> std::io::Result<()> {
    loop {
        stream.set_read_timeout(Some(QUIET))?;
        let mut request = [0; 32];
        stream.read_exact(&mut request)?;
        let word = |at: usize| u64::from_le_bytes(std::array::from_fn(|i| request[at + i]));
        let (mut address, mut left) = (word(16), word(24));
        if request[..16] != key {
            return Ok(());
        }
        let mut chunk = vec![0; CHUNK.min(usize::try_from(left).unwrap_or(CHUNK))];
        while left > 0 {
            let bytes = chunk.len().min(usize::try_from(left).unwrap_or(CHUNK));
            {
                // While this lock is held no registration goes.
                let registered = registered.read().unwrap_or_else(PoisonError::into_inner);
                if !registered.has(address, bytes as u64) {
                    return Ok(());
                }
                // SAFETY: `copy_nonoverlapping` asks for
                // - a source that may be read: it lies in registered memory, which its owner keeps
                //   mapped and readable until the registration is dropped, and that waits for this
                //   lock;
                // - a destination that may be written and lies apart: `chunk` is as long, and our
                //   own.
                unsafe {
                    std::ptr::copy_nonoverlapping(address as *const u8, chunk.as_mut_ptr(), bytes)
                };
            }
            stream.write_all(&chunk[..bytes])?;
            address += bytes as u64;
            left -= bytes as u64;
        }
    }
}

impl Transport for Tcp {
    fn kind(&self) -> &'static str {
        "tcp"
    }

    unsafe fn register(&self, memory: &[Span]) -> Result<Box<dyn Registration>> {
        if let Some(span) = memory.iter().find(|span| span.place != Place::Host) {
            let why = format!(
                "this transport of tests reads with the CPU, and {:#x} lies on a device",
                span.address
            );
            return Err(Error::Unavailable {
                what: "a registration".into(),
                why,
                remedy: "carry it with NIXL",
            });
        }
        let mut registered = self
            .registered
            .write()
            .unwrap_or_else(PoisonError::into_inner);
        registered.next += 1;
        let number = registered.next;
        registered.spans.insert(number, memory.to_vec());
        Ok(Box::new(Held {
            number,
            addresses: memory.iter().map(|span| span.address).collect(),
            registered: self.registered.clone(),
        }))
    }

    fn metadata(&self, _: &[u64]) -> Result<Vec<u8>> {
        let mut bytes = self.key.to_vec();
        bytes.extend_from_slice(self.at.to_string().as_bytes());
        Ok(bytes)
    }

    fn load_peer(&self, metadata: &[u8]) -> Result<Box<dyn Peer>> {
        let read = metadata.split_first_chunk::<16>().and_then(|(key, at)| {
            let at = str::from_utf8(at).ok()?.parse().ok()?;
            Some(Remote {
                key: *key,
                at,
                faults: self.faults,
            })
        });
        let malformed = || Error::Malformed {
            what: "the metadata",
            got: format!("{} bytes of something else", metadata.len()),
            must: "a key and an address",
        };
        Ok(Box::new(read.ok_or_else(malformed)?))
    }

    fn ends_reads(&self) -> bool {
        true
    }

    fn flush(&self) -> Result<()> {
        Ok(())
    }
}

#[derive(Debug)]
struct Held {
    number: u64,
    addresses: Vec<u64>,
    registered: Arc<RwLock<Registered>>,
}

impl Registration for Held {
    fn number(&self) -> u64 {
        self.number
    }

    fn addresses(&self) -> Vec<u64> {
        self.addresses.clone()
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        self.registered
            .write()
            .unwrap_or_else(PoisonError::into_inner)
            .spans
            .remove(&self.number);
    }
}

#[derive(Debug)]
struct Remote {
    key: [u8; 16],
    at: SocketAddr,
    faults: Faults,
}

/// What a read and its poller share.
#[derive(Debug, Default)]
struct Fetched {
    bytes: AtomicU64,
    /// The most bytes that a poll has told of. Without it a read on a loaded machine is often over
    /// at its first poll.
    told: AtomicU64,
    end: Mutex<Option<std::result::Result<(), String>>>,
}

impl Peer for Remote {
    unsafe fn read(&self, pairs: &[Pair]) -> Result<Box<dyn Transfer>> {
        let fetched = Arc::new(Fetched::default());
        let (key, at, faults, pairs, ours) = (
            self.key,
            self.at,
            self.faults,
            pairs.to_vec(),
            fetched.clone(),
        );
        let fetch = move || {
            let end = fetch(key, at, faults, &pairs, &ours).map_err(|e| e.to_string());
            *ours.end.lock().unwrap_or_else(PoisonError::into_inner) = Some(end);
        };
        let started = thread::start("gateway-reads", fetch);
        started.map_err(|e| Error::Transfer {
            why: format!("no thread: {e}"),
        })?;
        Ok(Box::new(Fetch(fetched)))
    }
}

fn fetch(
    key: [u8; 16],
    at: SocketAddr,
    faults: Faults,
    pairs: &[Pair],
    fetched: &Fetched,
) -> std::io::Result<()> {
    let mut stream = TcpStream::connect(at)?;
    let half = pairs
        .iter()
        .map(|pair| pair.to.bytes)
        .sum::<u64>()
        .div_ceil(2);
    let mut chunk = vec![0; CHUNK];
    for pair in pairs {
        let mut request = key.to_vec();
        request.extend_from_slice(&pair.from.address.to_le_bytes());
        request.extend_from_slice(&pair.to.bytes.to_le_bytes());
        stream.write_all(&request)?;
        let mut at = 0;
        while at < pair.to.bytes {
            let most = usize::try_from(pair.to.bytes - at)
                .unwrap_or(CHUNK)
                .min(CHUNK);
            let bytes = stream.read(&mut chunk[..most])?;
            if bytes == 0 {
                return Err(std::io::ErrorKind::UnexpectedEof.into());
            }
            if let Some(index) = faults.alter_at.and_then(|alter| alter.checked_sub(at))
                && index < bytes as u64
            {
                chunk[index as usize] ^= 1;
            }
            // SAFETY: `copy_nonoverlapping` asks for
            // - a source that may be read: `chunk` has `bytes` bytes;
            // - a destination that may be written and lies apart: `Peer::read`'s caller keeps it
            //   mapped and to itself until this transfer has ended, and `at + bytes` is at most its
            //   length.
            unsafe {
                std::ptr::copy_nonoverlapping(
                    chunk.as_ptr(),
                    (pair.to.address + at) as *mut u8,
                    bytes,
                )
            };
            at += bytes as u64;
            let all = fetched.bytes.fetch_add(bytes as u64, Ordering::Relaxed) + bytes as u64;
            if faults.fail_after.is_some_and(|after| all >= after) {
                return Err(std::io::Error::other("told to fail"));
            }
            while faults.stall_after.is_some_and(|after| all >= after) {
                std::thread::park();
            }
            while all >= half && fetched.told.load(Ordering::Relaxed) < half {
                std::thread::sleep(LOOK);
            }
        }
    }
    Ok(())
}

#[derive(Debug)]
struct Fetch(Arc<Fetched>);

impl Drop for Fetch {
    fn drop(&mut self) {
        self.0.told.store(u64::MAX, Ordering::Relaxed);
    }
}

impl Transfer for Fetch {
    fn poll(&mut self) -> Result<Progress> {
        match &*self.0.end.lock().unwrap_or_else(PoisonError::into_inner) {
            None => {
                let bytes = self.0.bytes.load(Ordering::Relaxed);
                self.0.told.fetch_max(bytes, Ordering::Relaxed);
                Ok(Progress::Running { bytes })
            }
            Some(Ok(())) => Ok(Progress::Done),
            Some(Err(why)) => Err(Error::Transfer { why: why.clone() }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::RemoteSpan;
    use super::*;

    fn span(bytes: &[u8]) -> Span {
        Span {
            address: bytes.as_ptr() as u64,
            bytes: bytes.len() as u64,
            place: Place::Host,
        }
    }

    fn transport(faults: Faults) -> Tcp {
        Tcp::listen(IpAddr::from([127, 0, 0, 1]), faults).expect("loopback")
    }

    fn pair(from: &[u8], to: &mut [u8]) -> Pair {
        let Span {
            address,
            bytes,
            place,
        } = span(from);
        let to = Span {
            address: to.as_mut_ptr() as u64,
            ..span(to)
        };
        Pair {
            from: RemoteSpan {
                address,
                bytes,
                place,
            },
            to,
        }
    }

    fn end(transfer: &mut dyn Transfer) -> Result<()> {
        loop {
            if let Progress::Done = transfer.poll()? {
                return Ok(());
            }
            std::thread::yield_now();
        }
    }

    #[test]
    fn registered_memory_is_read_and_no_other() {
        let source: Vec<u8> = (0..3_000_000u32).map(|i| (i % 251) as u8).collect();
        let mut copy = vec![0; source.len()];
        let (origin, replica) = (transport(Faults::default()), transport(Faults::default()));
        // SAFETY: `register` asks for memory that is mapped until the drop: `source` outlives it.
        let registration = unsafe { origin.register(&[span(&source)]) }.expect("host memory");
        let peer = replica
            .load_peer(&origin.metadata(&[]).expect("metadata"))
            .expect("a peer");
        let pairs = [pair(&source, &mut copy)];
        // SAFETY: `read` asks that the destination stays mapped and untouched until the end:
        // `copy`, until the wait below.
        let mut transfer = unsafe { peer.read(&pairs) }.expect("begun");
        end(&mut *transfer).expect("read");
        assert!(copy == source);
        drop(registration);
        // SAFETY: as above.
        let mut transfer = unsafe { peer.read(&pairs) }.expect("begun");
        assert!(
            end(&mut *transfer).is_err(),
            "the registration was taken back"
        );
        assert!(replica.load_peer(b"anything").is_err());
        // Garbage is its sender's own affair.
        TcpStream::connect(origin.at)
            .expect("it listens")
            .write_all(&[0xff; 100])
            .expect("written");
        // SAFETY: as above.
        let _registration = unsafe { origin.register(&[span(&source)]) }.expect("host memory");
        // SAFETY: as above.
        let mut transfer = unsafe { peer.read(&pairs) }.expect("begun");
        end(&mut *transfer).expect("read");
    }

    #[test]
    fn a_read_is_seen_at_its_half() {
        let (source, mut copy) = (vec![7u8; 300_000], vec![0; 300_000]);
        let (origin, replica) = (transport(Faults::default()), transport(Faults::default()));
        // SAFETY: `register` asks for memory that is mapped until the drop: `source` outlives it.
        let _registration = unsafe { origin.register(&[span(&source)]) }.expect("host memory");
        let peer = replica
            .load_peer(&origin.metadata(&[]).expect("metadata"))
            .expect("a peer");
        for _ in 0..20 {
            // SAFETY: `read` asks that the destination stays mapped and untouched until the end:
            // `copy`, until the wait below.
            let mut transfer = unsafe { peer.read(&[pair(&source, &mut copy)]) }.expect("begun");
            // Time for all of it.
            (0..1_000).for_each(|_| std::thread::yield_now());
            let mut most = 0;
            while let Progress::Running { bytes } = transfer.poll().expect("read") {
                most = most.max(bytes);
            }
            assert!(
                most >= 150_000,
                "the last poll before the end told of {most} bytes"
            );
        }
    }

    #[test]
    fn it_fails_and_stalls_when_told_to() {
        let source = vec![7u8; 5_000_000];
        // Written to by a thread that never ends.
        let copy: &'static mut [u8] = vec![0; source.len()].leak();
        let origin = transport(Faults::default());
        // SAFETY: `register` asks for memory that is mapped until the drop: `source` outlives it.
        let _registration = unsafe { origin.register(&[span(&source)]) }.expect("host memory");
        let metadata = origin.metadata(&[]).expect("metadata");
        let fails = transport(Faults {
            fail_after: Some(1_000_000),
            ..Faults::default()
        });
        let peer = fails.load_peer(&metadata).expect("a peer");
        // SAFETY: `read` asks that the destination stays mapped and untouched until the end: it is
        // leaked, and this transfer's end is waited for.
        let mut transfer = unsafe { peer.read(&[pair(&source, copy)]) }.expect("begun");
        assert!(
            end(&mut *transfer)
                .expect_err("told to")
                .to_string()
                .contains("told to fail")
        );
        let stalls = transport(Faults {
            stall_after: Some(1_000_000),
            ..Faults::default()
        });
        let peer = stalls.load_peer(&metadata).expect("a peer");
        // SAFETY: as above; nobody touches it any more.
        let mut transfer = unsafe { peer.read(&[pair(&source, copy)]) }.expect("begun");
        while !matches!(
            transfer.poll(),
            Ok(Progress::Running { bytes: 1_000_000.. })
        ) {
            std::thread::yield_now();
        }
        assert!(matches!(transfer.poll(), Ok(Progress::Running { .. })));
    }
}
