//! What the process under watch does: cycles, and between them everything that comes and goes.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use gpu_ipc::broker::{Client, Layout, PartSpec};
use gpu_ipc::{After, Claims, Descriptor, Gpu, Participant, SentBlock, Session, Stream, To, Wait};
use rustix::time::{ClockId, clock_gettime};
use serde::Serialize;

use super::control::Leaks;
use super::lender::STAMP;
use super::reading::Reading;
use gpu_ipc_cli::child::Child;
use gpu_ipc_cli::copier::Copier;
use gpu_ipc_cli::device::explain;
use gpu_ipc_cli::output;
use gpu_ipc_cli::owner::Owner;
use harness::rng::Dice;

/// Cycles in a round.
const ROUND: u64 = 256;
/// Batches of as many cycles that are timed at a look.
const BATCHES: usize = 20;
/// Bytes of a block of the session's.
const BLOCK: u64 = 4096;
/// Blocks of the session that live as long as the run.
const BLOCKS: usize = 8;
/// Bytes of an object.
const OBJECT: u64 = 64 << 10;
/// A process that is silent for longer counts as hung.
const PATIENCE: Duration = Duration::from_secs(60);
/// Tickets that were before a run begins: more than a session remembers after their end (4,096).
const WARM_TICKETS: usize = 5_000;
/// Participants that live as long as the run.
const LIVING: u64 = 2;
/// How long nothing may go until what is there counts as staying: a thread that closes descriptors
/// ends after an idle second.
const QUIET: Duration = Duration::from_millis(1500);
/// How long that is waited for: what goes on for longer is judged as it is.
const SETTLING: Duration = Duration::from_secs(15);

/// How often everything was done.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub struct Done {
    pub cycles: u64,
    pub blocks: u64,
    pub fenced: u64,
    pub tickets: u64,
    pub streams: u64,
    pub participants: u64,
    pub foreign: u64,
    pub sessions: u64,
    pub objects: u64,
}

impl Done {
    /// Lists what was done less often than it is in a run with this number of looks.
    pub fn shortfalls(&self, looks: u64) -> Vec<String> {
        output::below([
            ("cycles", self.cycles, looks * ROUND),
            ("blocks through limbo", self.blocks, looks),
            ("fenced leases", self.fenced, looks),
            ("tickets", self.tickets, looks),
            ("streams", self.streams, looks),
            ("participants", self.participants, looks),
            ("regions of another process", self.foreign, looks),
            ("sessions", self.sessions, looks),
            ("objects", self.objects, looks),
        ])
    }
}

/// What lives as long as the run.
pub struct Work {
    pub done: Done,
    gpu: Gpu,
    dice: Dice,
    session: Session,
    participant: Participant,
    /// Uses the streams that come and go, of which a participant keeps up to 64 queues. Another
    /// takes its place at each look, so that their number does not depend on when that is.
    guest: Participant,
    stream: Stream,
    blocks: Vec<SentBlock>,
    copier: Copier,
    lender: Child<u64>,
    lender_socket: PathBuf,
    owner: Owner,
    client: Client,
}

impl Work {
    /// Sets up everything.
    pub fn new(gpu: Gpu, dice: Dice) -> Result<Work, String> {
        let session = Session::builder(gpu.clone())
            .open()
            .map_err(|e| explain(&e))?;
        let participant = connect(&gpu, &session)?;
        let blocks = (0..BLOCKS)
            .map(|_| session.alloc(BLOCK))
            .collect::<gpu_ipc::Result<_>>()
            .map_err(|e| explain(&e))?;
        let device = gpu.uuid().to_string();
        let mut lender = Child::start(
            [
                "lender",
                "--backend",
                gpu.kind().name(),
                "--device",
                &device,
            ],
            PATIENCE,
        )?;
        let lender_socket = lender.answer()?;
        let dir = std::env::temp_dir().join(format!("gpu-ipc-steady-{}", std::process::id()));
        let owner = Owner::start(&gpu, dir, &[])?;
        let client = owner.connect(&gpu, "steady")?;
        Ok(Work {
            done: Done::default(),
            dice,
            guest: connect(&gpu, &session)?,
            session,
            participant,
            stream: Stream::create(&gpu).map_err(|e| explain(&e))?,
            blocks,
            copier: Copier::new(&gpu).map_err(|e| explain(&e))?,
            lender,
            lender_socket,
            owner,
            client,
            gpu,
        })
    }

    /// Fills what is kept up to a fixed number, so that what grows from here on grows for good.
    pub fn warm(&mut self) -> Result<(), String> {
        (0..WARM_TICKETS).try_for_each(|_| self.unclaimed_ticket())
    }

    /// Does everything once.
    pub fn everything(&mut self, leaks: Option<&mut Leaks>) -> Result<(), String> {
        self.cycles(ROUND, leaks)?;
        self.through_limbo()?;
        self.fenced()?;
        self.ticket()?;
        self.stream_comes_and_goes()?;
        self.participant_comes_and_goes()?;
        self.foreign_region()?;
        self.session_comes_and_goes()?;
        self.object_comes_and_goes()
    }

    /// Does a round of cycles, and now and then what else there is.
    pub fn round(&mut self, leaks: Option<&mut Leaks>) -> Result<(), String> {
        self.cycles(ROUND, leaks)?;
        for _ in 0..4 {
            self.through_limbo()?;
            self.fenced()?;
        }
        if self.dice.in_thousand(250) {
            self.ticket()?;
        }
        if self.dice.in_thousand(100) {
            self.stream_comes_and_goes()?;
        }
        if self.dice.in_thousand(20) {
            self.participant_comes_and_goes()?;
        }
        if self.dice.in_thousand(20) {
            self.foreign_region()?;
        }
        if self.dice.in_thousand(10) {
            self.session_comes_and_goes()?;
        }
        if self.dice.in_thousand(10) {
            self.object_comes_and_goes()?;
        }
        Ok(())
    }

    fn cycles(&mut self, count: u64, mut leaks: Option<&mut Leaks>) -> Result<(), String> {
        let block = self.dice.below(BLOCKS as u64) as usize;
        for _ in 0..count {
            let descriptor = self.share(&self.blocks[block], After::Done)?;
            drop(claim(&self.participant, &descriptor, Wait::None)?);
            self.session.collect();
            if let Some(leaks) = &mut leaks {
                leaks.cycle();
            }
        }
        self.done.cycles += count;
        Ok(())
    }

    fn share(&self, block: &SentBlock, after: After<'_>) -> Result<Descriptor, String> {
        block
            .share(To::Participant(self.participant.id()), after)
            .map_err(|e| explain(&e))
    }

    /// A block that is dropped while its lease lives.
    fn through_limbo(&mut self) -> Result<(), String> {
        let block = self
            .session
            .alloc(256 << self.dice.below(8))
            .map_err(|e| explain(&e))?;
        let held = claim(
            &self.participant,
            &self.share(&block, After::Done)?,
            Wait::None,
        )?;
        drop(block);
        drop(held);
        self.done.blocks += 1;
        Ok(())
    }

    /// A lease that begins and ends in the order of a stream.
    fn fenced(&mut self) -> Result<(), String> {
        let block = &self.blocks[self.dice.below(BLOCKS as u64) as usize];
        let descriptor = self.share(block, After::Stream(&self.stream))?;
        let held = claim(&self.participant, &descriptor, Wait::Stream(&self.stream))?;
        held.used_on(&self.stream).map_err(|e| explain(&e))?;
        self.done.fenced += 1;
        Ok(())
    }

    /// A ticket that is claimed, and one that is taken back.
    fn ticket(&mut self) -> Result<(), String> {
        let block = &self.blocks[0];
        let ticket = block
            .share(To::Ticket(Claims::Once), After::Done)
            .map_err(|e| explain(&e))?;
        drop(claim(&self.participant, &ticket, Wait::None)?);
        self.unclaimed_ticket()?;
        self.done.tickets += 2;
        Ok(())
    }

    fn unclaimed_ticket(&self) -> Result<(), String> {
        let block = &self.blocks[0];
        let ticket = block
            .share(To::Ticket(Claims::Once), After::Done)
            .map_err(|e| explain(&e))?;
        match block.cancel(&ticket).map_err(|e| explain(&e))? {
            true => Ok(()),
            false => Err("a ticket that nobody claimed could not be taken back".to_owned()),
        }
    }

    fn stream_comes_and_goes(&mut self) -> Result<(), String> {
        let stream = Stream::create(&self.gpu).map_err(|e| explain(&e))?;
        let to = To::Participant(self.guest.id());
        let descriptor = self.blocks[1]
            .share(to, After::Stream(&stream))
            .map_err(|e| explain(&e))?;
        let held = claim(&self.guest, &descriptor, Wait::Stream(&stream))?;
        held.used_on(&stream).map_err(|e| explain(&e))?;
        drop(held);
        stream.synchronize().map_err(|e| explain(&e))?;
        self.done.streams += 1;
        Ok(())
    }

    fn participant_comes_and_goes(&mut self) -> Result<(), String> {
        let participant = connect(&self.gpu, &self.session)?;
        let to = To::Participant(participant.id());
        let descriptor = self.blocks[2]
            .share(to, After::Done)
            .map_err(|e| explain(&e))?;
        // Nobody claims it: it ends with its participant.
        self.blocks[3]
            .share(to, After::Done)
            .map_err(|e| explain(&e))?;
        drop(claim(&participant, &descriptor, Wait::None)?);
        drop(participant);
        while self.session.next_notice().is_some() {}
        self.done.participants += 1;
        Ok(())
    }

    /// A region of another process that is mapped, read and unmapped.
    fn foreign_region(&mut self) -> Result<(), String> {
        let participant = Participant::builder(self.gpu.clone())
            .mapping_cache(0, 0)
            .connect(&self.lender_socket);
        let participant = participant.map_err(|e| explain(&e))?;
        let descriptor: Vec<u8> = self.lender.ask(&participant.id().0)?;
        let held = participant
            .claim(&descriptor, Wait::None, Some(PATIENCE))
            .map_err(|e| e.to_string())?;
        if !self.copier.holds(&held, STAMP).map_err(|e| explain(&e))? {
            return Err("a block of another process has not its contents".to_owned());
        }
        self.done.foreign += 1;
        Ok(())
    }

    fn session_comes_and_goes(&mut self) -> Result<(), String> {
        let session = Session::builder(self.gpu.clone())
            .region_bytes(1 << 20)
            .open()
            .map_err(|e| explain(&e))?;
        let participant = connect(&self.gpu, &session)?;
        let block = session.alloc(BLOCK).map_err(|e| explain(&e))?;
        let to = To::Participant(participant.id());
        let descriptor = block
            .share(to, After::Stream(&self.stream))
            .map_err(|e| explain(&e))?;
        drop(claim(
            &participant,
            &descriptor,
            Wait::Stream(&self.stream),
        )?);
        drop((block, participant));
        let report = session.shutdown(PATIENCE);
        self.done.sessions += 1;
        if report.clean {
            Ok(())
        } else {
            Err(format!("a session's end left {} blocks", report.blocks))
        }
    }

    /// An object that is put, read and removed.
    fn object_comes_and_goes(&mut self) -> Result<(), String> {
        let part = PartSpec::bytes("part", OBJECT).map_err(|e| explain(&e))?;
        let layout = Layout::pack(vec![part], b"").map_err(|e| explain(&e))?;
        let mut writer = self
            .client
            .create("steady", layout)
            .map_err(|e| explain(&e))?;
        let contents = vec![self.dice.throw() as u8; OBJECT as usize];
        writer.write("part", &contents).map_err(|e| explain(&e))?;
        writer
            .commit(&[])
            .and_then(|commit| commit.wait())
            .map_err(|e| explain(&e))?;
        let reader = self.client.open("steady").map_err(|e| explain(&e))?;
        if reader.read("part").map_err(|e| explain(&e))? != contents {
            return Err("an object has not its contents".to_owned());
        }
        drop(reader);
        self.client.remove("steady").map_err(|e| explain(&e))?;
        self.done.objects += 1;
        Ok(())
    }

    /// Waits until nothing is going any more, and reads what the process takes.
    pub fn rest(&mut self, mut leaks: Option<&mut Leaks>) -> Result<Reading, String> {
        let mut nanos = f64::MAX;
        for _ in 0..BATCHES {
            let start = thread_nanos();
            self.cycles(ROUND, leaks.as_deref_mut())?;
            nanos = nanos.min((thread_nanos() - start) as f64 / ROUND as f64);
        }
        self.stream
            .synchronize()
            .and_then(|()| self.copier.settle())
            .map_err(|e| explain(&e))?;
        self.guest = connect(&self.gpu, &self.session)?;
        let start = Instant::now();
        let (mut last, mut since) = (Reading::of_process(), start);
        while since.elapsed() < QUIET && start.elapsed() < SETTLING {
            self.session.collect();
            self.session.trim().map_err(|e| explain(&e))?;
            std::thread::sleep(Duration::from_millis(10));
            let next = Reading::of_process();
            if !next.is_like(&last) || self.session.stats().participants != LIVING {
                since = Instant::now();
            }
            last = next;
        }
        let memory = self
            .gpu
            .backend()
            .memory_info(self.gpu.device())
            .map_err(|e| explain(&e))?;
        Ok(Reading {
            device_bytes: memory.total_bytes - memory.free_bytes,
            nanos,
            ..last
        })
    }

    /// Takes everything down; nothing may be left.
    pub fn end(mut self) -> Result<(), String> {
        self.blocks.clear();
        drop((self.participant, self.guest, self.client));
        let report = self.session.shutdown(PATIENCE);
        self.lender.wait()?;
        drop(self.owner);
        if report.clean {
            Ok(())
        } else {
            Err(format!(
                "{} blocks are still held at the end",
                report.blocks
            ))
        }
    }
}

fn connect(gpu: &Gpu, session: &Session) -> Result<Participant, String> {
    Participant::builder(gpu.clone())
        .connect(session.socket_path())
        .map_err(|e| explain(&e))
}

fn claim(
    participant: &Participant,
    descriptor: &Descriptor,
    wait: Wait<'_>,
) -> Result<gpu_ipc::ReceivedBlock, String> {
    participant
        .claim(descriptor.as_bytes(), wait, Some(PATIENCE))
        .map_err(|e| e.to_string())
}

/// The time that this thread has run.
fn thread_nanos() -> u64 {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}
