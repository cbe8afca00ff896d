//! A participant that speaks in bytes, by the tables of `docs/WIRE.md`, and so can say anything.

use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicU64, Ordering};

use gpu_ipc::{Descriptor, Gpu};
use harness::Lines;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType,
};
use rustix::process::{Pid, PidfdFlags, pidfd_open};

pub const HELLO: u16 = 1;
pub const MAP_REGION: u16 = 2;
pub const CLAIM_TICKETS: u16 = 5;
pub const FORWARD: u16 = 6;
pub const INSPECT: u16 = 7;
pub const WELCOME: u16 = 129;
pub const REFUSED: u16 = 130;
pub const REGION: u16 = 132;
pub const NO_REGION: u16 = 133;
pub const TICKETS: u16 = 136;
pub const DECLINED: u16 = 139;

/// What a session said.
#[derive(Debug)]
pub struct Heard {
    pub number: u16,
    pub body: Vec<u8>,
    pub fds: Vec<OwnedFd>,
}

impl Heard {
    /// Returns the text of a refusal that begins at `at` of the body, after its code.
    pub fn text(&self, at: usize) -> String {
        String::from_utf8_lossy(self.body.get(at + 4..).unwrap_or_default()).into_owned()
    }
}

/// The connection.
#[derive(Debug)]
pub struct Stranger {
    pub socket: OwnedFd,
    pub id: u64,
    /// Its own key, and that of the session's tickets.
    pub keys: [[u8; 16]; 2],
    /// What came with the welcome.
    pub files: Vec<OwnedFd>,
}

impl Stranger {
    /// Connects, and says nothing.
    pub fn connect(path: &Path) -> std::io::Result<OwnedFd> {
        let socket = rustix::net::socket_with(
            AddressFamily::UNIX,
            SocketType::SEQPACKET,
            SocketFlags::CLOEXEC,
            None,
        )?;
        rustix::net::connect(&socket, &SocketAddrUnix::new(path)?)?;
        Ok(socket)
    }

    /// Connects as the process behind `pidfd`, and must be let in.
    pub fn join(path: &Path, gpu: &Gpu, pidfd: BorrowedFd<'_>) -> Stranger {
        let socket = Stranger::connect(path).expect("it listens");
        say(&socket, HELLO, 0, &hello(gpu, 0), &[pidfd]).expect("said");
        let heard = hear(&socket).expect("it answers");
        assert_eq!(heard.number, WELCOME, "{}", heard.text(0));
        let id = u64::from_le_bytes(heard.body[16..24].try_into().expect("8 bytes"));
        let key = |at: usize| heard.body[at..at + 16].try_into().expect("16 bytes");
        Stranger {
            socket,
            id,
            keys: [key(40), key(56)],
            files: heard.fds,
        }
    }

    pub fn say(&self, number: u16, request: u64, body: &[u8]) {
        say(&self.socket, number, request, body, &[]).expect("said");
    }

    /// Says something and returns the answer, past what comes unasked.
    pub fn ask(&self, number: u16, body: &[u8]) -> Heard {
        // What is asked again by the same number is answered the same.
        static ASKED: AtomicU64 = AtomicU64::new(0);
        self.say(number, ASKED.fetch_add(1, Ordering::Relaxed) + 1, body);
        loop {
            let heard = hear(&self.socket).expect("it answers");
            if matches!(
                heard.number,
                REGION | NO_REGION | TICKETS | 137 | DECLINED | 138
            ) {
                return heard;
            }
        }
    }
}

/// The body of a hello.
pub fn hello(gpu: &Gpu, descendants: u16) -> Vec<u8> {
    let mut body = vec![gpu.kind() as u8, 0];
    body.extend(descendants.to_le_bytes());
    body.extend([0; 4]);
    body.extend(gpu.uuid().0);
    // No name.
    body.extend([0; 2]);
    body
}

/// The lease that a descriptor names, as messages have it.
pub fn lease(descriptor: &Descriptor) -> Vec<u8> {
    descriptor.as_bytes()[48..64].to_vec()
}

/// The body of a question how to map a descriptor's region, by the lease that it names.
pub fn map_region(descriptor: &Descriptor) -> Vec<u8> {
    [&descriptor.as_bytes()[64..72], &[0; 8], &lease(descriptor)].concat()
}

/// Says something with file descriptors.
pub fn say(
    socket: &OwnedFd,
    number: u16,
    request: u64,
    body: &[u8],
    fds: &[BorrowedFd<'_>],
) -> std::io::Result<()> {
    let mut packet = b"GI\x02\x00".to_vec();
    packet.extend(number.to_le_bytes());
    packet.extend((fds.len() as u16).to_le_bytes());
    packet.extend(request.to_le_bytes());
    packet.extend(body);
    say_bytes(socket, &packet, fds)
}

/// Sends any bytes with file descriptors.
pub fn say_bytes(socket: &OwnedFd, packet: &[u8], fds: &[BorrowedFd<'_>]) -> std::io::Result<()> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(253))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() {
        assert!(control.push(SendAncillaryMessage::ScmRights(fds)));
    }
    rustix::net::sendmsg(
        socket,
        &[IoSlice::new(packet)],
        &mut control,
        SendFlags::NOSIGNAL,
    )?;
    Ok(())
}

/// Waits for what a session says; `None` once it has hung up.
pub fn hear(socket: &OwnedFd) -> Option<Heard> {
    let mut packet = [0; 4096];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(253))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let mut parts = [IoSliceMut::new(&mut packet)];
    let got = loop {
        match rustix::net::recvmsg(socket, &mut parts, &mut control, RecvFlags::CMSG_CLOEXEC) {
            // Told once, before what a session said that closed without reading all.
            Err(rustix::io::Errno::CONNRESET) => {}
            got => break got.ok()?,
        }
    };
    let mut fds = Vec::new();
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(came) = message {
            fds.extend(came);
        }
    }
    let number = u16::from_le_bytes(packet[..got.bytes].get(4..6)?.try_into().ok()?);
    Some(Heard {
        number,
        body: packet[16..got.bytes].to_vec(),
        fds,
    })
}

/// A process that does nothing, until it is dropped, and a pidfd of it.
#[derive(Debug)]
pub struct Idler {
    process: Lines,
    pub pidfd: OwnedFd,
}

impl Idler {
    pub fn new() -> Idler {
        let process = Lines::start(&mut Command::new("cat"));
        let pid = Pid::from_raw(process.pid().cast_signed()).expect("a process has a number");
        let pidfd = pidfd_open(pid, PidfdFlags::empty()).expect("it lives");
        Idler { process, pidfd }
    }

    pub fn fd(&self) -> BorrowedFd<'_> {
        self.pidfd.as_fd()
    }

    pub fn kill(&mut self) {
        self.process.kill();
    }
}
