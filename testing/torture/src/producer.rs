//! A producer of a run: it lends blocks to connected consumers, until it is killed or told to end.

use std::time::{Duration, Instant};

use super::control::Arena;
use super::fork;
use super::lender::Sessions;
use super::message::Outbox;
use super::options::PATIENCE;
use super::seat::Seat;
use super::shared_stats::{Board, Count, Phase};
use super::sides::Lender;
use harness::rng::Dice;

/// Lives until the run ends.
pub fn run(seat: &Seat) -> Result<(), String> {
    match seat.control {
        Some(control) if control.is_no_library() => serve(seat, &mut Arena::create(seat)?),
        _ => serve(seat, &mut Sessions::open(seat)?),
    }
}

fn serve(seat: &Seat, lender: &mut impl Lender) -> Result<(), String> {
    let board: &Board = seat.board;
    let me = board.member(seat.slot);
    let outbox = Outbox::new(&seat.dir).map_err(|e| format!("a socket cannot be made: {e}"))?;
    let mut dice = Dice::new(seat.seed, seat.serial);
    // Consumers may connect from here on.
    me.serial
        .store(seat.serial, std::sync::atomic::Ordering::Release);
    let beat = || me.beat.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
    let ending = || me.ending.load(std::sync::atomic::Ordering::Acquire) != 0;
    while board.phase() == Phase::Work && !ending() {
        beat();
        let partners = board.partners(seat.serial);
        for _ in 0..=dice.below(8) {
            lender.lend(&mut dice, &partners, &outbox)?;
        }
        lender.tend();
        if dice.in_thousand(1)
            && seat.control.is_none()
            && fork::child(Duration::from_millis(dice.below(1500)), &[])?
        {
            board.count(Count::Forks);
        }
        std::thread::sleep(Duration::from_micros(200 + dice.below(2000)));
    }
    lender.let_go();
    me.ending.store(2, std::sync::atomic::Ordering::Release);
    let mut settling = None;
    while board.phase() < Phase::Finish && !ending_alone(board, seat) {
        beat();
        lender.tend();
        // Everybody who lives has let go: what is still lent was let go of in vain.
        if board.phase() == Phase::Settle
            && me.ending.load(std::sync::atomic::Ordering::Acquire) == 2
        {
            let (held, since) = (lender.held(), *settling.get_or_insert_with(Instant::now));
            if held == 0 || since.elapsed() > PATIENCE {
                if held > 0 {
                    gpu_ipc_cli::output::complain(&format!(
                        "producer {}: {held} leases were released without effect",
                        seat.serial
                    ));
                }
                board.add(Count::LeakedBlocks, held);
                me.ending.store(3, std::sync::atomic::Ordering::Release);
            }
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    beat();
    board.add(
        Count::LeakedBlocks,
        lender.finish(board.phase() == Phase::Finish),
    );
    Ok(())
}

/// A producer that ends before the run does, ends with its consumers still there.
fn ending_alone(board: &Board, seat: &Seat) -> bool {
    seat.control.is_none() && board.phase() == Phase::Work
}
