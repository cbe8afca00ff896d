//! An event loop of `poll`: a producer and a consumer on one thread that never waits in a call of
//! the library.
//!
//! ```text
//! cargo run --example poll -- [--backend host|cuda|hip] [--rounds 1000]
//! ```
//!
//! A session's descriptor is readable while a notice of it is unread: here that a block of the pool
//! is free again. So is a participant's: here that the answer to a claim has come. A real program
//! has one of the two, beside its own descriptors; this one has both, so that it is whole.

mod shared;

use std::collections::VecDeque;
use std::error::Error;
use std::process::ExitCode;
use std::time::Duration;

use gpu_ipc::participant::Notice;
use gpu_ipc::session::SessionNotice;
use gpu_ipc::{After, ClaimError, Claims, Descriptor, Participant, Session, Stream, To, Wait};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use shared::{Options, PATIENCE, check, end, open, pool, shut_down, words};

/// Bytes of a block, each word of which is its number.
const BLOCK: usize = 64 << 10;
/// Blocks of the producer's pool.
const POOL: usize = 8;

fn main() -> ExitCode {
    let done = Options::parse("poll", 1000).and_then(|options| run(&options));
    end("poll", done)
}

fn run(options: &Options) -> Result<(), Box<dyn Error>> {
    let gpu = open(&options.backend)?;
    let stream = Stream::create(&gpu)?;
    let session = Session::builder(gpu.clone()).open()?;
    // A connection waits for the producer's welcome, and so is made before the loop.
    let participant = Participant::builder(gpu).connect(session.socket_path())?;
    let pool = pool(&session, POOL, BLOCK)?;
    let (mut shared, mut claimed, mut waits) = (0, 0, 0);
    let mut queue = VecDeque::<Descriptor>::new();
    // False while a claim waits for an answer that has not come.
    let mut try_claims = true;
    while claimed < options.rounds {
        // The producer: a block that no process holds is filled again. When none is free, the
        // session has a notice when the next one is.
        while shared < options.rounds
            && let Some(block) = pool
                .iter()
                .find(|block| block.wait_released(Some(Duration::ZERO)).is_ok())
        {
            stream.write(block, &words(shared, BLOCK))?;
            queue.push_back(block.share(To::Ticket(Claims::Once), After::Stream(&stream))?);
            shared += 1;
        }
        // The consumer.
        while try_claims && let Some(descriptor) = queue.front() {
            match participant.try_claim(descriptor.as_bytes(), Wait::Host) {
                Ok(block) => {
                    queue.pop_front();
                    // A short copy, so the loop waits for it; for long work poll on the stream's
                    // end instead.
                    check(&stream, &block, claimed)?;
                    claimed += 1;
                }
                // The answer that it needs was asked for. A notice says when it may have come.
                Err(ClaimError::WouldBlock) => try_claims = false,
                Err(error) => return Err(error.into()),
            }
        }
        if claimed == options.rounds {
            break;
        }
        // Both sides have done what they can.
        let patience = Timespec::try_from(PATIENCE)?;
        let mut fds = [
            PollFd::new(&session, PollFlags::IN),
            PollFd::new(&participant, PollFlags::IN),
        ];
        if poll(&mut fds, Some(&patience))? == 0 {
            return Err("nothing happens".into());
        }
        // All notices are read: while one is unread the descriptor stays readable.
        while let Some(notice) = session.next_notice() {
            waits += u64::from(notice == SessionNotice::TryAgain);
        }
        while let Some(notice) = participant.next_notice() {
            match notice {
                Notice::TryAgain => try_claims = true,
                Notice::ProducerGone => return Err("the producer is gone".into()),
                _ => {}
            }
        }
    }
    drop((pool, participant));
    shut_down(&session)?;
    println!(
        "poll: {claimed} blocks of 64 KiB from a pool of {POOL}, {waits} waits for a free one"
    );
    Ok(())
}
