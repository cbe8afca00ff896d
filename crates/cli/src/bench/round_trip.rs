//! Rows of what asks another process: tickets, and round trips.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use gpu_ipc::backend::thread;
use gpu_ipc::session::ShareOptions;
use gpu_ipc::{After, Claims, To};
use rustix::net::{RecvFlags, SendFlags, recv, send};

use super::consumer::{ANSWER, BARE, QUESTION};
use super::fixture::{Stage, until_released};
use super::row::Row;
use super::sample::Pairs;
use super::told::Told;
use crate::failure::{Failure, Result};

/// Tickets in one round.
const ROUND: usize = 64;

/// A ticket's claim, beside a bare question and answer between the same two processes.
pub fn ticket(stage: &Stage) -> Result<Vec<Row>> {
    let session = stage.session()?;
    let (mut consumer, channel) = stage.consumer_by_socket(&session)?;
    let block = session.alloc(512)?;
    let mut pairs = Pairs::new(1);
    let measured = std::thread::scope(|scope| {
        let answering = thread::start_scoped(scope, "gpu-ipc-bench", || answer(channel.as_fd()))?;
        let measured = (0..=stage.choose(20, 2)).try_for_each(|round| {
            let grants = vec![(&block, To::Ticket(Claims::Once)); ROUND];
            let tickets = session.share_many(&grants, After::Done, &ShareOptions::default());
            let nanos = consumer.ask(Told::Redeem, &tickets?)?;
            if round > 0 {
                pairs.add(&nanos);
            }
            until_released(&session, &block)
        });
        // Its end of the channel ends the thread.
        let waited = consumer.child.wait();
        let answered = answering
            .join()
            .unwrap_or_else(|_| Err("the answering thread panicked".into()));
        measured.and(waited.map_err(Failure::from)).and(answered)
    });
    measured?;
    drop(block);
    stage.end(session, [])?;
    let floor_is = "a bare question and answer over a socket pair";
    Ok(vec![
        Row::new("ticket", "claim of a ticket, its region mapped", floor_is).measured(pairs),
    ])
}

fn answer(channel: BorrowedFd<'_>) -> Result<()> {
    let mut bytes = [0; QUESTION];
    loop {
        match recv(channel, &mut bytes, RecvFlags::empty()) {
            Ok((QUESTION, _)) => {}
            Ok(_) | Err(rustix::io::Errno::CONNRESET) => return Ok(()),
            Err(error) => return Err(format!("recv: {error}").into()),
        }
        if send(channel, &[0; ANSWER], SendFlags::NOSIGNAL).is_err() {
            return Ok(());
        }
    }
}

/// Share, send, claim, drop and say so, beside the same message and answer without a lease.
pub fn round_trip(stage: &Stage) -> Result<Vec<Row>> {
    let session = stage.session()?;
    let (mut consumer, channel) = stage.consumer_by_socket(&session)?;
    let block = session.alloc(512)?;
    let to = To::Participant(consumer.id);
    consumer.child.tell(&Told::Serve)?;
    let mut pairs = Pairs::new(1);
    let mut share = || {
        let descriptor = block.share(to, After::Done)?;
        exchange(&channel, descriptor.as_bytes())
    };
    // The first one maps.
    let measured = share().and_then(|()| {
        (0..stage.choose(2000, 50))
            .try_for_each(|_| pairs.sample(&mut share, || exchange(&channel, &[0; BARE])))
    });
    // One byte ends it.
    let ended = send(&channel, &[0], SendFlags::NOSIGNAL).map_err(|e| format!("send: {e}"));
    measured?;
    ended?;
    consumer.child.answer::<Vec<u64>>()?;
    drop(block);
    stage.end(session, [consumer])?;
    let what = "share, send, claim, drop, and an answer, between two processes";
    Ok(vec![
        Row::new("round-trip", what, "the message and the answer alone").measured(pairs),
    ])
}

fn exchange(channel: &OwnedFd, message: &[u8]) -> Result<()> {
    send(channel, message, SendFlags::NOSIGNAL).map_err(|e| format!("send: {e}"))?;
    match recv(channel, &mut [0; 8], RecvFlags::empty()) {
        Ok((1, _)) => Ok(()),
        Ok(_) => Err("the consumer went away".into()),
        Err(error) => Err(format!("recv: {error}").into()),
    }
}
