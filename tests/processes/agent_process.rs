//! An agent's own side: does what it is told until the test lets it go.

use std::collections::HashMap;
use std::os::fd::{FromRawFd, OwnedFd};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use gpu_ipc::backend::DeviceId;
use gpu_ipc::host::HostBackend;
use gpu_ipc::{
    After, Descriptor, Gpu, Participant, ReceivedBlock, SentBlock, Session, Stream, Wait,
};
use harness::{WATCHDOG, step};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::child::{self, Belongings};
use crate::device::{is_host, open_gpu, open_host, read_stamp, write_stamp};
use crate::gate::Gate;
use crate::kernel::Kernels;
use crate::words::{Answer, Command, Done, Refusal, Step, Waits};

/// What an agent has.
struct Life {
    /// For what the host backend alone can be made to do.
    host: Option<Arc<HostBackend>>,
    gpu: Gpu,
    stream: Stream,
    participant: Option<Participant>,
    crowd: Vec<Participant>,
    received: HashMap<u64, ReceivedBlock>,
    session: Option<Session>,
    sent: HashMap<u64, SentBlock>,
    serial: u64,
    gates: Vec<Gate>,
    kernels: Option<Kernels>,
}

/// Lives as an agent until the test lets go.
pub fn run() {
    let (host, gpu) = if is_host() {
        let (host, gpu) = open_host();
        (Some(host), gpu)
    } else {
        (None, open_gpu())
    };
    let stream = Stream::create(&gpu).expect("a stream");
    let mut life = Life {
        host,
        gpu,
        stream,
        participant: None,
        crowd: Vec::new(),
        received: HashMap::new(),
        session: None,
        sent: HashMap::new(),
        serial: 0,
        gates: Vec::new(),
        kernels: None,
    };
    harness::obey(|command| life.obey(command));
}

impl Life {
    fn obey(&mut self, command: Command) -> Answer {
        match command {
            Command::Connect { socket } => {
                self.joined(Participant::builder(self.gpu.clone()).connect(socket)?)
            }
            Command::ConnectWithCache {
                socket,
                bytes,
                regions,
            } => {
                let builder = Participant::builder(self.gpu.clone()).mapping_cache(bytes, regions);
                self.joined(builder.connect(socket)?)
            }
            Command::ConnectBy { connection } => {
                // SAFETY: `from_raw_fd` asks for an open descriptor that nobody else owns: the
                // parent left it open for this command alone.
                let connection = unsafe { OwnedFd::from_raw_fd(connection) };
                self.joined(Participant::builder(self.gpu.clone()).connect_by(connection)?)
            }
            Command::Disconnect => {
                self.participant = None;
                Ok(Done::Nothing)
            }
            Command::Claim { descriptor, wait } => {
                let wait = match wait {
                    Waits::OnTheHost => Wait::Host,
                    Waits::OnTheStream => Wait::Stream(&self.stream),
                    Waits::ForNothing => Wait::None,
                };
                let block = self
                    .participant()?
                    .claim(&descriptor, wait, Some(WATCHDOG))?;
                self.keep(block)
            }
            Command::TryClaim { descriptor } => {
                let block = self.participant()?.try_claim(&descriptor, Wait::Host)?;
                self.keep(block)
            }
            Command::ClaimMany { descriptors } => {
                let (mut blocks, mut refusal) = (0, None);
                for claimed in
                    self.participant()?
                        .claim_many(&descriptors, Wait::None, Some(WATCHDOG))
                {
                    match claimed {
                        Ok(block) => {
                            blocks += 1;
                            self.keep(block)?;
                        }
                        Err(error) => refusal = Some(error.into()),
                    }
                }
                Ok(Done::Claimed { blocks, refusal })
            }
            Command::Prefetch { descriptor } => {
                self.participant()?.prefetch(&[descriptor])?;
                Ok(Done::Nothing)
            }
            Command::NextNotice => self.next_notice(),
            Command::Forward { block, to } => {
                let forwarded = self.received(block)?.forward(to.into(), Some(WATCHDOG));
                step::reached(Step::Forwarded.name());
                Ok(Done::Descriptor(forwarded?.as_bytes().to_vec()))
            }
            Command::Slice { block, from, to } => {
                let slice = self.received(block)?.slice(from..to)?;
                self.keep(slice)
            }
            Command::Len { block } => Ok(Done::Number(self.received(block)?.len())),
            Command::LookFrom { device, block } => {
                let (here, there) = (self.gpu.device(), DeviceId(device));
                let peer = Gpu::new(self.gpu.backend().clone(), there)?;
                peer.backend().enable_peer_access(there, here)?;
                let stream = Stream::create(&peer)?;
                let received = self.received(block)?;
                received.used_on(&stream)?;
                let looked = Kernels::open_on(there).look(
                    &peer,
                    &stream,
                    received.device_ptr(),
                    received.len() / 8,
                );
                match looked {
                    (least, greatest) if least == greatest => Ok(Done::Number(least)),
                    (least, greatest) => Err(Refusal::from(
                        format!("words from {least:x} to {greatest:x}").as_str(),
                    )),
                }
            }
            Command::State { block } => Ok(Done::State(self.received(block)?.state().into())),
            Command::KeptLeases => Ok(Done::Number(self.participant()?.kept_leases())),
            Command::Mappings => Ok(Done::Number(self.participant()?.mappings() as u64)),
            Command::LetGoOfAll => {
                self.received.clear();
                Ok(Done::Nothing)
            }
            Command::IsReadOnly { block } => {
                let received = self.received(block)?;
                // What can be written in place is not only read.
                if received.is_read_only() && received.host_bytes().is_some() {
                    return Err("a view that can be written".into());
                }
                Ok(Done::Number(received.is_read_only().into()))
            }
            Command::Write { block, stamp } => {
                let received = self.received(block)?;
                self.stream.write(received, &stamp.to_le_bytes())?;
                Ok(Done::Nothing)
            }
            Command::Overwrite { block, stamp } => {
                let ptr = self.received(block)?.device_ptr();
                let bytes = stamp.to_le_bytes();
                // SAFETY: `copy_to_device` asks for a live stream and two ranges that are valid
                // until the copy is done. The block is not one that may be written: that is what
                // is tried, and it ends this process or its context.
                unsafe {
                    self.gpu
                        .backend()
                        .copy_to_device(self.stream.raw(), ptr, bytes.as_ptr(), 8)
                }?;
                self.stream.synchronize()?;
                Ok(Done::Nothing)
            }
            Command::MakeWritable { block } => {
                let received = self.received(block)?;
                let start = received.device_ptr().0 as *mut libc::c_void;
                // SAFETY: `mprotect` asks for pages that are mapped: a lease keeps them, and blocks
                // of the session's source begin at pages here.
                match unsafe { libc::mprotect(start, 4096, libc::PROT_READ | libc::PROT_WRITE) } {
                    0 => Ok(Done::Nothing),
                    _ => Err(std::io::Error::last_os_error().to_string().as_str().into()),
                }
            }
            Command::LateWrite {
                block,
                stamp,
                milliseconds,
            } => {
                let (host, ptr) = (
                    self.host.as_ref().ok_or("not the host")?,
                    self.received(block)?.device_ptr(),
                );
                host.arm_late_write(
                    ptr,
                    &stamp.to_le_bytes(),
                    Duration::from_millis(milliseconds),
                )?;
                Ok(Done::Nothing)
            }
            Command::JoinUntilRefused { socket } => self.join_until_refused(&socket),
            Command::Join { socket, count } => {
                for _ in 0..count {
                    self.crowd
                        .push(Participant::builder(self.gpu.clone()).connect(&socket)?);
                }
                Ok(Done::Nothing)
            }
            Command::ClaimByFirst { descriptor } => {
                let first = self.crowd.first().ok_or("nobody is connected")?;
                Ok(Done::Number(
                    first.claim(&descriptor, Wait::Host, Some(WATCHDOG))?.len(),
                ))
            }
            Command::ClaimByAll { descriptor } => {
                for participant in &self.crowd {
                    self.serial += 1;
                    self.received.insert(
                        self.serial,
                        participant.claim(&descriptor, Wait::Host, Some(WATCHDOG))?,
                    );
                }
                Ok(Done::Number(self.crowd.len() as u64))
            }
            Command::Open { socket } => {
                self.session = Some(Session::builder(self.gpu.clone()).socket(socket).open()?);
                Ok(Done::Nothing)
            }
            Command::Alloc { len, stamp } => {
                let block = self.session()?.alloc(len)?;
                write_stamp(&self.gpu, &self.stream, block.device_ptr(), stamp);
                self.serial += 1;
                self.sent.insert(self.serial, block);
                Ok(Done::Number(self.serial))
            }
            Command::Share {
                block,
                to,
                on_stream,
            } => {
                let after = if on_stream {
                    After::Stream(&self.stream)
                } else {
                    After::Done
                };
                let descriptor = self.sent(block)?.share(to.into(), after)?;
                step::reached(Step::Send.name());
                Ok(Done::Descriptor(descriptor.as_bytes().to_vec()))
            }
            Command::Cancel { block, descriptor } => Ok(Done::Number(
                self.sent(block)?
                    .cancel(&Descriptor::decode(&descriptor)?)?
                    .into(),
            )),
            Command::Outstanding { block } => {
                self.session()?.collect();
                Ok(Done::Number(self.sent(block)?.outstanding() as u64))
            }
            Command::Collect => {
                let session = self.session()?;
                step::reached(Step::CollectBegins.name());
                let blocks = session.collect().blocks;
                Ok(Done::Collected {
                    blocks,
                    limbo: session.stats().limbo_blocks,
                })
            }
            Command::BreakContext => {
                self.host
                    .as_ref()
                    .ok_or("not the host")?
                    .break_device(DeviceId(0));
                Ok(Done::Nothing)
            }
            Command::Stamp { block } => {
                step::reached(Step::Use.name());
                let ptr = match self.received.get(&block) {
                    Some(received) => received.device_ptr(),
                    None => self.sent(block)?.device_ptr(),
                };
                Ok(Done::Number(read_stamp(&self.gpu, &self.stream, ptr)))
            }
            Command::UsedOnStream { block } => {
                self.received(block)?.used_on(&self.stream)?;
                Ok(Done::Nothing)
            }
            Command::LetGo { block } => {
                drop((self.received.remove(&block), self.sent.remove(&block)));
                Ok(Done::Nothing)
            }
            Command::Synchronize => {
                self.stream.synchronize()?;
                Ok(Done::Nothing)
            }
            Command::CloseGate => {
                self.gates.push(Gate::close(&self.gpu, &self.stream));
                Ok(Done::Nothing)
            }
            Command::OpenGates => {
                self.gates.clear();
                Ok(Done::Nothing)
            }
            Command::WriteOn { block, words } => {
                let ptr = match self.received.get(&block) {
                    Some(received) => {
                        received.used_on(&self.stream)?;
                        received.device_ptr()
                    }
                    None => {
                        let sent = self.sent(block)?;
                        sent.used_on(&self.stream)?;
                        sent.device_ptr()
                    }
                };
                self.kernels
                    .get_or_insert_with(Kernels::open)
                    .write_on(&self.stream, ptr, words);
                Ok(Done::Nothing)
            }
            Command::Crash => {
                let stream = Stream::create(&self.gpu)?;
                self.kernels
                    .get_or_insert_with(Kernels::open)
                    .crash(&stream);
                // The error is there once a stream tells of it.
                while stream.synchronize().is_ok() {}
                std::mem::forget(stream);
                Ok(Done::Nothing)
            }
            Command::Fork => Ok(Done::Number(fork_that_lives_on().into())),
            Command::ForkAndCall { children } => {
                child::call_in_children(self.belongings()?, children)
                    .map_err(|why| Refusal::from(why.as_str()))?;
                Ok(Done::Nothing)
            }
            Command::DieAt(step) => {
                step::die_at(step.name(), None);
                Ok(Done::Nothing)
            }
        }
    }

    fn participant(&self) -> Result<&Participant, Refusal> {
        Ok(self.participant.as_ref().ok_or("not connected")?)
    }

    fn session(&self) -> Result<&Session, Refusal> {
        Ok(self.session.as_ref().ok_or("no session")?)
    }

    fn received(&self, block: u64) -> Result<&ReceivedBlock, Refusal> {
        Ok(self
            .received
            .get(&block)
            .ok_or("no such block was received")?)
    }

    fn sent(&self, block: u64) -> Result<&SentBlock, Refusal> {
        Ok(self.sent.get(&block).ok_or("no such block was allocated")?)
    }

    fn joined(&mut self, participant: Participant) -> Answer {
        let id = participant.id().0;
        self.participant = Some(participant);
        Ok(Done::Number(id))
    }

    fn keep(&mut self, block: ReceivedBlock) -> Answer {
        self.serial += 1;
        self.received.insert(self.serial, block);
        Ok(Done::Number(self.serial))
    }

    fn join_until_refused(&mut self, socket: &Path) -> Answer {
        loop {
            match Participant::builder(self.gpu.clone()).connect(socket) {
                Ok(participant) => self.crowd.push(participant),
                Err(error) => {
                    let first = self
                        .crowd
                        .first()
                        .map_or(0, |participant| participant.id().0);
                    return Ok(Done::Joined {
                        count: self.crowd.len() as u64,
                        first,
                        refusal: error.into(),
                    });
                }
            }
        }
    }

    /// Polls the participant's descriptor until a notice has come.
    fn next_notice(&self) -> Answer {
        let participant = self.participant()?;
        let deadline = Instant::now() + WATCHDOG;
        loop {
            if let Some(notice) = participant.next_notice() {
                return Ok(Done::Notice(notice.into()));
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err("no notice comes".into());
            }
            let timeout = Timespec {
                tv_sec: left.as_secs().cast_signed(),
                tv_nsec: 0,
            };
            let _ = poll(
                &mut [PollFd::new(participant, PollFlags::IN)],
                Some(&timeout),
            );
        }
    }

    /// Moves what it has out of its tables, for calls that need one of each.
    fn belongings(&mut self) -> Result<Belongings, Refusal> {
        Ok(Belongings {
            gpu: self.gpu.clone(),
            stream: self.stream.clone(),
            session: self.session.clone().ok_or("no session")?,
            participant: self.participant.clone().ok_or("not connected")?,
            received: self.received.values().next().ok_or("no block")?.clone(),
            sent: self
                .sent
                .drain()
                .map(|(_, sent)| sent)
                .next()
                .ok_or("no block")?,
        })
    }
}

/// Forks a child that does nothing until it is killed, and returns its number.
fn fork_that_lives_on() -> u32 {
    // SAFETY: `fork` asks that the child of a process with threads calls only async-signal-safe
    // functions: it calls `close` and `pause` alone.
    let child = unsafe { harness::fork(stand_still) }.expect("room for a process");
    let pid = child.pid();
    child.leave();
    pid
}

/// Stands still without the standard descriptors: the test reads these to their end, which must not
/// wait for the child.
fn stand_still() -> i32 {
    for standard in 0..3 {
        // SAFETY: `close` asks for a descriptor that is not used afterwards: the child uses none.
        unsafe { libc::close(standard) };
    }
    loop {
        // SAFETY: `pause` has no conditions.
        unsafe { libc::pause() };
    }
}
