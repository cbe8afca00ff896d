//! The thread that hands memory out, where a handle is no object of the kernel's (ROCr,
//! `AsyncIPCSockServerConnLoop`, `IPCCreate`, `IPCAttach`).
//!
//! An exporter listens on the abstract socket `hsa<pid>` and serves one client after the other,
//! under the lock that its exports take. A client says which memory it wants, reads the answer and
//! confirms that it has attached it.
//!
//! | what happens | what follows |
//! |---|---|
//! | a client dies with the answer unread | its confirmation fails to be read: the server ends |
//! | a client dies in the queue | the answer fails to be sent, with SIGPIPE: the server ends |
//! | a client stops before it confirms | the server, and every export of the process, stand still |
//! | the memory is freed, or the server is gone, when a client asks | the stream ends without an answer |
//! | an export finds that the server has ended | it waits for the old one, then begins a new one, which knows of that memory alone |
//! | another process has the socket's name | the export fails with 1 |

use std::collections::BTreeMap;
use std::io::{self, IoSlice, Read, Write};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::process;
use std::sync::Mutex;
use std::thread;
use std::time::{Duration, Instant};

use gpu_api::lock::Acquire;

use crate::machine::{INVALID_VALUE, Outcome, UNKNOWN};
use crate::settings::{Fault, Settings};
use crate::sharing::INVALID_DEVICE_POINTER;

/// What names memory in a handle.
pub(crate) type Token = [u8; 32];

/// What the driver below needs to open it.
pub(crate) type Below = [u8; 64];

#[derive(Clone, Copy, PartialEq, Eq)]
enum Life {
    /// Nothing was exported yet.
    Unborn,
    Serving,
    Ended,
}

struct Server {
    life: Life,
    memory: BTreeMap<Token, Below>,
}

static SERVER: Mutex<Server> = Mutex::new(Server {
    life: Life::Unborn,
    memory: BTreeMap::new(),
});

fn address(process: u32) -> io::Result<SocketAddr> {
    SocketAddr::from_abstract_name(format!("hsa{process}"))
}

/// Has the server hand out memory, and starts it where there is none.
pub(crate) fn register(token: Token, below: Below) -> Outcome {
    let settings = Settings::get();
    let mut server = SERVER.acquire();
    if server.life == Life::Ended {
        // The old one is asked to give its memory back first.
        thread::sleep(settings.patience);
    }
    server.memory.insert(token, below);
    if server.life == Life::Serving {
        return Ok(());
    }
    if settings.has(Fault::ExportCollides) {
        return Err(INVALID_VALUE);
    }
    let bound = address(process::id()).and_then(|name| UnixListener::bind_addr(&name));
    let listener = bound.map_err(|_| INVALID_VALUE)?;
    // It inherits the signal mask of this thread.
    let thread = thread::Builder::new().name("hsa-ipc".into());
    thread.spawn(|| serve(listener)).map_err(|_| UNKNOWN)?;
    server.life = Life::Serving;
    Ok(())
}

/// Has the server hand it out no more.
pub(crate) fn forget(token: &Token) {
    SERVER.acquire().memory.remove(token);
}

fn serve(listener: UnixListener) {
    let mut served = true;
    while served {
        served = listener.accept().and_then(|(it, _)| hand_out(it)).is_ok()
            && !Settings::get().has(Fault::ServerDies);
    }
    let mut server = SERVER.acquire();
    server.memory.clear();
    drop(listener);
    server.life = Life::Ended;
}

/// Serves one client.
fn hand_out(mut client: UnixStream) -> io::Result<()> {
    let mut token = [0; 32];
    let server = SERVER.acquire();
    if client.read(&mut token)? < token.len() {
        return Ok(());
    }
    let Some(below) = server.memory.get(&token) else {
        return Ok(());
    };
    while Settings::get().has(Fault::ServerStalls) {
        // By this name a test sees that it has come here.
        let _ = rustix::thread::set_name(c"hsa-stalls");
        thread::park();
    }
    send(&client, below)?;
    client.read(&mut [0]).map(|_| ())
}

/// Sends with a SIGPIPE where nothing reads: the library's own `write` leaves that out.
fn send(to: &UnixStream, bytes: &[u8]) -> io::Result<()> {
    let flags = rustix::net::SendFlags::empty();
    let mut none = rustix::net::SendAncillaryBuffer::default();
    rustix::net::sendmsg(to, &[IoSlice::new(bytes)], &mut none, flags)?;
    Ok(())
}

/// Asks the server of a process for memory, attaches it by `open`, and confirms that.
pub(crate) fn attach<T>(
    process: u32,
    token: Token,
    open: impl FnOnce(Below) -> Outcome<T>,
) -> Outcome<T> {
    let refused = |_| INVALID_DEVICE_POINTER;
    let until = Instant::now() + Settings::get().patience;
    let name = address(process).map_err(refused)?;
    let mut server = loop {
        match UnixStream::connect_addr(&name) {
            Ok(server) => break server,
            Err(_) if Instant::now() < until => thread::sleep(Duration::from_millis(1)),
            Err(_) => return Err(INVALID_DEVICE_POINTER),
        }
    };
    send(&server, &token).map_err(refused)?;
    let mut below = [0; 64];
    while server.read(&mut below).map_err(refused)? == 0 {
        // The end of the stream is taken for nothing yet, again and again (`IPCRecvHandle`).
        if !Settings::get().has(Fault::OpenSpins) {
            return Err(INVALID_DEVICE_POINTER);
        }
        thread::yield_now();
    }
    let opened = open(below)?;
    let _ = server.write(&[1]);
    Ok(opened)
}
