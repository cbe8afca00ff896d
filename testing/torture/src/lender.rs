//! Lending by the library: sessions, grants of every kind, and what can go wrong with a message.

use std::collections::VecDeque;
use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::{Duration, Instant};

use gpu_ipc::backend::RegionSource;
use gpu_ipc::session::ShareOptions;
use gpu_ipc::{After, Claims, Descriptor, Error, Gone, Gpu, ParticipantId, SentBlock, Session, To};

use super::audit::Audit;
use super::message::{self, Message, Outbox};
use super::options::{Control, PATIENCE};
use super::seat::Seat;
use super::shared_stats::{Board, Count, microseconds};
use super::sides::Lender;
use gpu_ipc_cli::copier::Copier;
use gpu_ipc_cli::device::explain;
use harness::rng::Dice;
use harness::vitals::{Course, Vitals};

/// Regions are small, so that they come and go.
const REGION_BYTES: u64 = 256 << 10;
/// Blocks that a producer keeps for a while.
const MOST_KEPT: usize = 24;
/// Longer than a late write may take on a machine that has much else to do.
pub const QUARANTINE: Duration = Duration::from_millis(250);
/// A user that there is not.
const NO_USER: u32 = 0x7fff_fffe;
/// More than messages take, less than many a stop: some grants lapse before their consumer goes on.
const TIME_TO_LIVE: Duration = Duration::from_millis(700);

/// A session, and what its producer keeps.
pub struct Sessions {
    board: &'static Board,
    serial: u64,
    copier: Copier,
    audit: Arc<Audit>,
    gpu: Gpu,
    session: Session,
    /// The bytes of its largest blocks.
    large: u64,
    kept: VecDeque<(Instant, SentBlock)>,
    /// Its device is small on purpose.
    is_small: bool,
    /// What it took before anybody came, and since; of one that lives for the whole run.
    course: Option<(Vitals, Course)>,
}

/// A grant that can be sent.
struct Grant {
    descriptor: Descriptor,
    most: u32,
    exclusive: bool,
}

impl Sessions {
    /// Opens a session for this producer.
    pub fn open(seat: &Seat) -> Result<Sessions, String> {
        let gpu: Gpu = seat.gpu()?.gpu;
        // Every second one grows in place, where the device can.
        let in_place = gpu.caps().ranges
            && (seat.serial % 2 == 1 || seat.control == Some(Control::UnpinnedPiece));
        let region_bytes = REGION_BYTES.max(gpu.caps().granularity);
        let audit = Audit::new(
            gpu.clone(),
            region_bytes,
            in_place,
            seat.board,
            seat.control,
        );
        let audit = audit.map_err(|e| explain(&e))?;
        let source: Arc<dyn RegionSource> = audit.clone();
        // So that others come as far as to be refused by who they are, the directory is what keeps
        // them away, and not the socket's mode.
        let session = Session::builder(gpu.clone())
            .allow_uids([NO_USER])
            .socket(message::session(&seat.dir, seat.serial))
            .source(source)
            .time_to_live(Some(TIME_TO_LIVE))
            .quarantine(QUARANTINE)
            .max_slots(1)
            .open()
            .map_err(|e| explain(&e))?;
        let copier = Copier::new(&gpu).map_err(|e| explain(&e))?;
        let mut sessions = Sessions {
            board: seat.board,
            serial: seat.serial,
            copier,
            audit,
            gpu,
            session,
            large: if in_place {
                region_bytes / 4 * 3
            } else {
                64 << 10
            },
            kept: VecDeque::new(),
            is_small: seat.is_small,
            course: None,
        };
        if let Some(lasts) = seat.lasts {
            // What is made once, at the first block, is no growth.
            drop(sessions.block(&mut Dice::new(seat.seed, seat.serial), 0)?);
            sessions.copier.settle().map_err(|e| explain(&e))?;
            sessions.session.collect();
            sessions.session.trim().map_err(|e| explain(&e))?;
            sessions.course = Some((sessions.vitals(), Course::new(lasts)));
        }
        Ok(sessions)
    }

    fn vitals(&self) -> Vitals {
        let usage = self.audit.usage();
        // The host's devices are this process' own, and know what is taken from them; a GPU is
        // everybody's.
        let info = self
            .gpu
            .backend()
            .memory_info(self.gpu.device())
            .ok()
            .filter(|_| self.gpu.kind().in_host_memory());
        let device_bytes = info.map_or(usage.reserved, |info| info.total_bytes - info.free_bytes);
        let rows = self.session.stats().participants;
        Vitals {
            rows,
            regions: usage.regions,
            device_bytes,
            ..Vitals::read()
        }
    }

    /// Waits until every region has been given back, and until the process takes no more than
    /// before anybody came, if that is known; says what is missing.
    fn rest(&self) -> (u64, Option<String>) {
        let end = Instant::now() + PATIENCE;
        loop {
            let trimmed = self.session.trim();
            let usage = self.audit.usage();
            let above = self
                .course
                .as_ref()
                .and_then(|(before, _)| self.vitals().above(*before));
            if (usage.regions == 0 && above.is_none()) || Instant::now() > end {
                let above = above.or_else(|| trimmed.err().map(|e| explain(&e)));
                return (usage.regions, above);
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Makes a block with a stamp in it, if there is room.
    fn block(&mut self, dice: &mut Dice, stamp: u64) -> Result<Option<SentBlock>, String> {
        let size = match dice.below(20) {
            0 => self.large,
            1..5 => 8 + 8 * dice.below(2048),
            _ => 64,
        };
        match self.session.alloc_within(size, Duration::ZERO) {
            Ok(block) => {
                self.copier.write(&block, stamp).map_err(|e| explain(&e))?;
                Ok(Some(block))
            }
            Err(Error::OutOfMemory { .. }) => {
                self.board.count(if self.is_small {
                    Count::NoRoom
                } else {
                    Count::OutOfMemory
                });
                // Regions that nobody uses can be taken by others.
                if dice.in_thousand(200) {
                    self.session.trim().map_err(|e| explain(&e))?;
                }
                Ok(None)
            }
            Err(error) => Err(explain(&error)),
        }
    }

    fn share(
        &mut self,
        dice: &mut Dice,
        block: &SentBlock,
        to: ParticipantId,
        user: [u8; 64],
    ) -> Result<Option<Grant>, String> {
        let (to, most, exclusive) = match dice.below(10) {
            0 => (To::Ticket(Claims::Once), 1, true),
            1 => {
                let times = 2 + dice.below(3) as u32;
                (
                    To::Ticket(NonZeroU32::new(times).map_or(Claims::Once, Claims::Times)),
                    times,
                    false,
                )
            }
            2 => (To::Ticket(Claims::Unlimited), 0, false),
            _ => (To::Participant(to), 1, true),
        };
        let after = if dice.in_thousand(700) {
            After::Stream(self.copier.stream())
        } else {
            self.copier.settle().map_err(|e| explain(&e))?;
            After::Done
        };
        match block.share_with(to, after, &ShareOptions::default().user(user)) {
            Ok(descriptor) => Ok(Some(Grant {
                descriptor,
                most,
                exclusive,
            })),
            // It died, or is about to.
            Err(error) if Gone::of(&error).is_some() => Ok(None),
            Err(Error::Exhausted { .. }) => {
                self.board.count(Count::Full);
                Ok(None)
            }
            Err(error) => Err(explain(&error)),
        }
    }

    /// Sends a grant to its addressee, or a ticket to some; or loses it, or sends it twice, or
    /// takes it back.
    fn send(
        &self,
        dice: &mut Dice,
        block: &SentBlock,
        grant: &Grant,
        to: u64,
        all: &[(u64, u64)],
        outbox: &Outbox,
    ) -> Result<(), String> {
        if dice.in_thousand(40) {
            return Ok(());
        }
        if dice.in_thousand(30) {
            block.cancel(&grant.descriptor).map_err(|e| explain(&e))?;
        }
        let number = self.board.next_grant();
        let user = grant.descriptor.user();
        let word =
            |at: usize| u64::from_le_bytes(user[at..at + 8].try_into().expect("eight of 64 bytes"));
        let message = Message {
            grant: number,
            stamp: word(0),
            since: word(8),
            most: grant.most,
            exclusive: grant.exclusive,
            across: block.regions().len() > 1,
            bytes: grant.descriptor.as_bytes().to_vec(),
        };
        outbox.send(&message, to);
        // A duplicate for the same, and for another.
        if dice.in_thousand(80) {
            outbox.send(&message, to);
        }
        if grant.descriptor.is_ticket() || dice.in_thousand(20) {
            for _ in 0..=grant.most.min(4) {
                if let Some(&(other, _)) = dice.one_of(all) {
                    outbox.send(&message, other);
                }
            }
        }
        Ok(())
    }

    /// Grants until the addressee's counter file has no slot left.
    fn fill_up(&mut self, dice: &mut Dice, to: ParticipantId) -> Result<(), String> {
        let Some(block) = self.block(dice, 0)? else {
            return Ok(());
        };
        let options = ShareOptions::default().time_to_live(Some(Duration::from_millis(100)));
        loop {
            match block.share_with(To::Participant(to), After::Done, &options) {
                Ok(_) => {}
                Err(Error::Exhausted { .. }) => {
                    self.board.count(Count::Full);
                    return Ok(());
                }
                Err(error) if Gone::of(&error).is_some() => return Ok(()),
                Err(error) => return Err(explain(&error)),
            }
        }
    }
}

impl Lender for Sessions {
    fn lend(
        &mut self,
        dice: &mut Dice,
        partners: &[(u64, u64)],
        outbox: &Outbox,
    ) -> Result<(), String> {
        let Some(&(serial, participant)) = dice.one_of(partners) else {
            return Ok(());
        };
        let participant = ParticipantId(participant);
        if dice.in_thousand(1) && dice.in_thousand(300) {
            return self.fill_up(dice, participant);
        }
        if dice.in_thousand(5) {
            self.session.trim().map_err(|e| explain(&e))?;
        }
        let stamp = self.board.next_grant();
        let since = microseconds();
        let Some(block) = self.block(dice, stamp)? else {
            return Ok(());
        };
        let mut user = [0; 64];
        user[..8].copy_from_slice(&stamp.to_le_bytes());
        user[8..16].copy_from_slice(&since.to_le_bytes());
        let Some(grant) = self.share(dice, &block, participant, user)? else {
            return Ok(());
        };
        self.send(dice, &block, &grant, serial, partners, outbox)?;
        if dice.in_thousand(300) && self.kept.len() < MOST_KEPT {
            self.kept.push_back((
                Instant::now() + Duration::from_millis(dice.below(40)),
                block,
            ));
        }
        Ok(())
    }

    fn tend(&mut self) {
        if let Some((rest, mut course)) = self.course.take() {
            course.look(|| self.vitals());
            self.course = Some((rest, course));
        }
        let now = Instant::now();
        self.kept.retain(|(until, _)| *until > now);
        if self.board.has_deaths(self.serial) {
            self.session.collect();
            let holders: Vec<u64> = self
                .session
                .stats()
                .holders
                .iter()
                .map(|holder| holder.participant.0)
                .collect();
            self.board.time_reclaims(self.serial, &holders);
        }
    }

    fn let_go(&mut self) {
        self.kept.clear();
    }

    fn held(&mut self) -> u64 {
        self.session.collect();
        let stats = self.session.stats();
        stats.held + stats.in_flight
    }

    fn finish(&mut self, alone: bool) -> u64 {
        if alone {
            let (regions, above) = self.rest();
            self.board.add(Count::LeakedRegions, regions);
            let grown = self.course.as_ref().and_then(|(_, course)| course.grown());
            for why in above.into_iter().chain(grown) {
                self.board.count(Count::Grown);
                gpu_ipc_cli::output::complain(&format!("producer {}: {why}", self.serial));
            }
        }
        let end = Instant::now() + PATIENCE;
        while self.board.has_deaths(self.serial) && Instant::now() < end {
            self.tend();
            std::thread::sleep(Duration::from_millis(1));
        }
        if self.board.has_deaths(self.serial) {
            let (serial, holders) = (self.serial, self.session.stats().holders);
            gpu_ipc_cli::output::complain(&format!(
                "producer {serial}: deaths without a reclaim; {holders:?} hold something"
            ));
            self.board.count(Count::LeakedBlocks);
        }
        let report = self.session.shutdown(PATIENCE);
        let stats = self.session.stats();
        if report.blocks != 0 || stats.leaked_blocks != 0 || self.audit.outstanding() != 0 {
            gpu_ipc_cli::output::complain(&format!(
                "producer {}: {} blocks are held at the end, {} leaked, {} pieces are out: {:?}",
                self.serial,
                report.blocks,
                stats.leaked_blocks,
                self.audit.outstanding(),
                report.holders,
            ));
        }
        (self.audit.outstanding() as u64)
            .max(report.blocks)
            .max(stats.leaked_blocks)
    }
}
